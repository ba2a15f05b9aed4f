"""Tasks that read texts or episodes: language models, conversations, actions. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, ModelConfig, Spec
from anyformer.config.spec import Count, Flag, Fraction, Number, Size
from anyformer.recipe.task import Share, Task

if TYPE_CHECKING:
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.tasks.base import BuiltTask

ActionName = Annotated[str, Field(pattern=r"^\w[\w -]*$")]


class DynamicTask(Task):
    """A task whose examples are drawn from texts, new ones in each epoch."""

    columns: ClassVar = ("text",)
    measures: ClassVar = ("loss", "accuracy")

    def unfit_batches(self, kind: str, model: ModelConfig) -> str:
        what = f"the task {self.kind} reads each chunk of a text separately; use another kind"
        return what if kind == "ordered" else ""


class LanguageModel(Task):
    """Predict the next token of a text."""

    kind: Literal["lm"] = "lm"
    framed: Flag = False  # add the special tokens that the tokenizer's file puts before texts

    head_kind: ClassVar = "lm"
    shapes: ClassVar = ("decoder",)
    columns: ClassVar = ("text",)
    command: ClassVar = "generate {run} --prompt TEXT"

    def faults(self, recipe: Any) -> Iterator[Fault]:
        if recipe.data.train.is_tokenised and self.framed:
            yield Fault("task.framed", "= true: shards hold plain texts, each followed by <eos>; set it to false")

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.lm import LanguageModelling

        return LanguageModelling(self, tokenizer)


class Chat(Task):
    """Answer conversations: predict each message of the assistant, with its end, after the messages before it."""

    kind: Literal["chat"] = "chat"
    # how conversations are written: chatml adds its special tokens to the tokenizer, plain uses <bos>, <sep> and <eos>;
    # None: the chat template of the tokenizer
    template: Literal["chatml", "plain"] | None = None

    head_kind: ClassVar = "lm"
    shapes: ClassVar = ("decoder",)
    columns: ClassVar = ("messages",)
    measures: ClassVar = ("loss", "accuracy")
    batches: ClassVar = ("padded", "packed")
    reads: ClassVar = "reads conversations"
    command: ClassVar = "chat {run}"

    def with_tokens(self, tokenizer: "TextTokenizer", is_new: bool) -> "TextTokenizer":
        from anyformer.data.conversations import with_template

        return tokenizer if self.template is None else with_template(tokenizer, self.template)

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.chat import Conversing, template_of

        return Conversing(self, template_of(tokenizer))


class PrefixLM(DynamicTask):
    """Continue a text from a random position; the tokens before it attend in both directions (Liu et al. 2018)."""

    kind: Literal["prefix_lm"] = "prefix_lm"
    framed: Flag = False  # add the special tokens that the tokenizer's file puts before texts

    head_kind: ClassVar = "lm"
    shapes: ClassVar = ("decoder",)

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.lm import PrefixModelling

        return PrefixModelling(self, tokenizer)


class MaskedLanguageModel(DynamicTask):
    """Predict masked tokens from both sides (BERT, Devlin et al. 2019)."""

    kind: Literal["mlm"] = "mlm"
    rate: Fraction = 0.15  # fraction of tokens to predict; drawn again in each epoch
    masked: Share = 0.8  # fraction of these that are replaced by <mask>
    random: Share = 0.1  # fraction replaced by a random token; the rest are unchanged

    head_kind: ClassVar = "masked_lm"
    shapes: ClassVar = ("encoder",)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.masked + self.random > 1:
            what = f"masked + random must be at most 1, and masked = {self.masked}"
            raise ConfigError([Fault("random", f"= {self.random}: {what}")])
        return self

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.mlm import MaskedLanguageModelling

        return MaskedLanguageModelling(self, tokenizer)


class SpanCorruption(DynamicTask):
    """Predict the spans that sentinels replace in a text; in the target each span follows its sentinel (T5, Raffel et
    al. 2020)."""

    kind: Literal["spans"] = "spans"
    rate: Fraction = 0.15  # fraction of tokens in spans; drawn again in each epoch
    mean_span: Annotated[float, Field(strict=True, ge=1)] = 3.0  # mean length of a span, in tokens
    # number of sentinels <extra_id_0>, …, which are added to the tokenizer
    sentinels: Annotated[int, Field(strict=True, ge=2)] = 100
    start: Count | None = None  # id of the first token of a target; None: <bos>

    head_kind: ClassVar = "lm"
    shapes: ClassVar = ("encoder-decoder",)

    def with_tokens(self, tokenizer: "TextTokenizer", is_new: bool) -> "TextTokenizer":
        return tokenizer.with_sentinels(self.sentinels) if is_new else tokenizer

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.span_corruption import SpanCorrupting

        return SpanCorrupting(self, tokenizer)


class Bins(Spec):
    """`count` equal bins from `low` to `high`, each of them a token (RT-1, Brohan et al. 2022).

    A number becomes the bin that it lies in, and a bin becomes its centre: inside the bounds, the error is at most half
    a bin. Numbers outside of them are clipped to the first or the last bin.
    """

    count: Annotated[int, Field(strict=True, ge=1, le=65_536)]  # number of bins
    low: Number  # lower bound of the first bin
    high: Number  # upper bound of the last bin

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise ConfigError([Fault("low", f"= {self.low}: must be below high = {self.high}")])
        return self

    def index(self, value: float) -> int:
        """Return the bin of a number."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(int(min(max(share, 0.0), 1.0) * self.count), 0), self.count - 1)

    def centre(self, index: int) -> float:
        """Return the number at the centre of a bin."""
        return self.low + (index + 0.5) * (self.high - self.low) / self.count

    def tokens(self, name: str) -> list[str]:
        """Return the special tokens of the bins."""
        return [f"<{name}-{i}>" for i in range(self.count)]


class Actions(Task):
    """Predict the actions of an episode from its instruction, observations and earlier actions (behaviour cloning).

    A row is `instruction observation action observation action ...`, with a loss on the actions only. With `returns`,
    the sum of the rewards still to come is a token before each observation (decision transformer, Chen et al. 2021).
    """

    kind: Literal["actions"] = "actions"
    actions: tuple[ActionName, ...] = ()  # names of the actions, in the order of their numbers
    action_bins: Bins | None = None  # bins for each number of a continuous action; None: actions have names
    action_size: Size = 1  # numbers of a continuous action
    state_bins: Bins | None = None  # bins for each number of an observation; None: it is an image or a vector
    returns: Bins | None = None  # bins of the return to go; None: rows have no returns
    history: Size = 64  # most steps that the model reads; of longer episodes, at least the last half of this

    head_kind: ClassVar = "lm"
    shapes: ClassVar = ("decoder",)
    columns: ClassVar = ("text", "observations", "actions", "rewards")
    measures: ClassVar = ("loss", "accuracy")
    batches: ClassVar = ("padded", "packed")
    reads: ClassVar = "reads episodes"

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        if bool(self.actions) == (self.action_bins is not None):
            raise ConfigError([Fault("actions", "set the names of the actions, or action_bins, and not both")])
        if repeated := [name for name in self.actions if self.actions.count(name) > 1]:
            raise ConfigError([Fault("actions", f"'{repeated[0]}' occurs twice")])
        if self.actions and self.action_size > 1:
            raise ConfigError([Fault("action_size", f"= {self.action_size}: is for action_bins")])
        return self

    @property
    def action_tokens(self) -> list[str]:
        """Special tokens of the actions."""
        if self.action_bins is not None:
            return self.action_bins.tokens("action")
        return [f"<{name}>" for name in self.actions]

    @property
    def special_tokens(self) -> list[str]:
        """All special tokens of rows."""
        states = [] if self.state_bins is None else self.state_bins.tokens("state")
        return [*self.action_tokens, *states, *([] if self.returns is None else self.returns.tokens("return"))]

    def with_tokens(self, tokenizer: "TextTokenizer", is_new: bool) -> "TextTokenizer":
        return tokenizer.with_special(self.special_tokens) if is_new else tokenizer

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.actions import ActionPrediction

        return ActionPrediction(self, tokenizer)
