"""A spec for each request of the page, so that a wrong request gets a readable error."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config.spec import Count, Number, Size, Spec
from anyformer.nn.inspection.attention_maps import Kind

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


class MatrixRequest(LayerRequest):
    head: Count
    what: Literal["weights", "mask", "bias", "scores"] = "weights"


class NeuronRequest(LayerRequest):
    """A query and a key of one head."""

    head: Count
    query: Count
    key: Count


class NextRequest(TextRequest):
    """The prediction after a token, or in its place; -1 is the last token, or in a masked text the first mask."""

    at: StrictInt = -1
    kind: Literal["encoder", "decoder"] | None = None


class LensRequest(TextRequest):
    """The most probable output after each layer, for a page of positions from `first` on."""

    first: Count = 0


class CellRequest(TextRequest):
    """The most probable outputs after one layer (-1: the embeddings) at one position."""

    layer: StrictInt
    at: Count


class SalienceRequest(TextRequest):
    """The contribution of each token to an output; `at` is as in `NextRequest`, `output` as in `FollowRequest`."""

    at: StrictInt = -1
    output: StrictInt = -1
    method: Literal["gradient", "integrated"] = "gradient"


class EffectRequest(TextRequest):
    """The change of an output when each head is switched off."""

    at: StrictInt = -1
    output: StrictInt = -1


class PatchRequest(TextRequest):
    """Activations of the text `donor` in place of those of `text`, for each layer and position of a stack.

    `at` is as in `NextRequest`; -1 is the first position at which both texts have different outputs.
    """

    donor: str
    donor_target: str | None = None
    side: Literal["encoder", "decoder"] | None = None
    at: StrictInt = -1


class StageRequest(TextRequest):
    """One stage of the path of a token: `decoder.scores`. `at` is as in `NextRequest`.

    In an encoder-decoder, the stages of the encoder follow its token `key`; -1 is the one that `at` attends to most.
    Without it, the stage `encoder.tokens` follows none: that takes a forward pass.
    """

    stage: str
    at: StrictInt = -1
    key: StrictInt = -1
    layer: Count = 0
    head: Count = 0


class FollowRequest(TextRequest):
    """The terms of one output: by `level` a sum over positions, parts of the model, tokens (or neurons), or dimensions.

    `output` is a token id or the number of a label; -1 is the most probable. `place` is a position of a head that pools
    tokens, `part` a head of an attention layer (`decoder.0.mixer.3`) or a sublayer, `key` a token. The default of each
    has the largest term. Heads in `without` are disabled for the same tokens; with `off`, a model may answer others.
    """

    level: Literal["positions", "parts", "tokens", "dimensions"]
    at: StrictInt = -1
    output: StrictInt = -1
    place: StrictInt = -1
    part: str = ""
    key: StrictInt = -1
    without: tuple[str, ...] = ()


class WriteRequest(TextRequest):
    """A request for generation, with the options of `generation/logit_processors.py`."""

    temperature: Number = 0.0
    top_k: StrictInt | None = None
    top_p: Number | None = None
    seed: StrictInt | None = None
    max_new_tokens: StrictInt | None = None


class LessonRequest(RunRequest):
    """A question of a lesson: that of its step `step`, from 0."""

    lesson: str
    step: Count


class LiveRequest(RunRequest):
    """A request for the metrics of a training, from row `since` on."""

    since: Count = 0


class GifRequest(Spec):
    """Frames of equal size as PNG in base64, and the time that each is shown."""

    frames: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_FRAMES)]
    milliseconds: Size
