"""A spec for each request of the page, so that a wrong request gets a readable error."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config.spec import Count, Size, Spec
from anyformer.nn.inspection.sublayers import Kind

MAX_FRAMES = 200  # of a GIF

StrictInt = Annotated[int, Field(strict=True)]


class RunRequest(Spec):
    """A request about a run, by its name in `runs`."""

    run: str


class TextRequest(RunRequest):
    """A request about a text with its target, and the disabled heads (`off`): `decoder.0.3`.

    With `step`, the checkpoint of that step is used instead of the finished run or the newest checkpoint.
    """

    text: str
    target: str | None = None
    off: tuple[str, ...] = ()
    step: Count | None = None


class KindRequest(TextRequest):
    kind: Kind


class LayerRequest(KindRequest):
    layer: Count


class NeuronRequest(LayerRequest):
    """A query and a key of one head."""

    head: Count
    query: Count
    key: Count


class NextRequest(TextRequest):
    """The prediction after a token, or in its place; -1 is the last token, or in a masked text the first mask."""

    at: StrictInt = -1
    kind: Literal["encoder", "decoder"] | None = None


class StageRequest(TextRequest):
    """One stage of the path of a token: `decoder.scores`. `at` is as in the view `next`.

    In an encoder-decoder, the stages of the encoder follow its token `key`; -1 is the one that `at` attends to most.
    Without it, the stage `encoder.tokens` follows none: that takes a forward pass.
    """

    stage: str
    at: StrictInt = -1
    key: StrictInt = -1
    layer: Count = 0
    head: Count = 0


class LessonRequest(RunRequest):
    """A question of a lesson: that of its step `step`, from 0."""

    lesson: str
    step: Count


class GifRequest(Spec):
    """Frames of equal size as PNG in base64, and the time that each is shown."""

    frames: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_FRAMES)]
    milliseconds: Size
