"""What the page may ask for: a spec for each request, so that a wrong one is answered in plain words."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config.spec import Count, Number, Spec
from anyformer.inspection.attention_maps import Kind

Whole = Annotated[int, Field(strict=True)]


class AboutRun(Spec):
    """A run, by the name it has in `runs`."""

    run: str


class AboutText(AboutRun):
    """A text that its model reads, with what it says to it, and the heads that are off: `decoder.0.3`.

    `step`: by the checkpoint of that step, rather than by the finished run or the newest checkpoint.
    """

    text: str
    target: str | None = None
    off: tuple[str, ...] = ()
    step: Count | None = None


class AboutKind(AboutText):
    kind: Kind


class AboutLayer(AboutKind):
    layer: Count


class AboutMatrix(AboutLayer):
    head: Count
    what: Literal["weights", "mask", "bias", "scores"] = "weights"


class AboutPair(AboutLayer):
    """A query and a key of one head."""

    head: Count
    query: Count
    key: Count


class AboutNext(AboutText):
    """What comes after a token, or stands in its place; -1 is the last, or of a masked text the first mask."""

    at: Whole = -1
    kind: Literal["encoder", "decoder"] | None = None


class ToWrite(AboutText):
    """How tokens are chosen: as in `decoding/logit_processors.py`."""

    temperature: Number = 0.0
    top_k: Whole | None = None
    top_p: Number | None = None
    seed: Whole | None = None
    max_new_tokens: Whole | None = None


class SinceStep(AboutRun):
    """The rows of a training from the n-th on."""

    since: Count = 0
