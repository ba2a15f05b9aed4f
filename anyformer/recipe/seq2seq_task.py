"""Tasks that answer a source with a target: seq2seq, preferences, rewards, and mixtures. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, ModelConfig, Shape, Spec
from anyformer.config.spec import BY_KIND, Count, Flag, LengthPenalty, Positive, Size, did_you_mean
from anyformer.recipe.data import MixedSources, splits
from anyformer.recipe.task import Task

if TYPE_CHECKING:
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.tasks.base import BuiltTask


class SourceTask(Task):
    """A task whose rows have a source, for a model that writes."""

    head_kind: ClassVar = "lm"
    columns: ClassVar[tuple[str, ...]] = ("source", "target")

    def unfit_batches(self, kind: str, model: ModelConfig) -> str:
        what = "crops of one long text are for the task lm; use 'padded' or 'packed'"
        return what if kind in ("crops", "ordered") else ""


class Seq2Seq(SourceTask):
    """A target for each source: an encoder–decoder, or a decoder that reads `source <sep> target`."""

    kind: Literal["seq2seq"] = "seq2seq"
    # what evaluation measures besides the loss
    metrics: tuple[Literal["exact_match", "bleu", "chrf", "word_error_rate"], ...] = ("exact_match",)
    # tokenisation of sacreBLEU
    bleu_tokenize: Literal["13a", "none", "char", "zh", "ko-mecab", "ja-mecab", "intl"] = "13a"
    max_source: Size | None = None  # most tokens of a source; longer rows are bad rows; None: no limit
    max_target: Size | None = None  # most tokens of a target; longer rows are bad rows; None: no limit
    beams: Size = 1  # beams of every evaluation and of `predict`; 1: greedy
    length_penalty: LengthPenalty = 1.0  # of the beam search: above 0 favours long outputs
    framed: Flag = False  # add the special tokens that the tokenizer's file puts around texts
    start: Count | None = None  # id of the first token of an encoder–decoder's target; None: <bos>
    prefix: Flag = False  # in a decoder-only model, the source attends to itself in both directions

    shapes: ClassVar[tuple[Shape, ...]] = ("decoder", "encoder-decoder")
    takes_own_tokens: ClassVar = True

    @model_validator(mode="after")
    def _check_length_penalty(self) -> Self:
        if self.beams == 1 and self.length_penalty != 1:
            what = "applies to beam search only: set beams above 1"
            raise ConfigError([Fault("length_penalty", f"= {self.length_penalty}: {what}")])
        return self

    @property
    def measures(self) -> tuple[str, ...]:
        return ("loss", *self.metrics)

    def model_faults(self, model: ModelConfig) -> Iterator[Fault]:
        yield from super().model_faults(model)
        if self.prefix and model.shape == "encoder-decoder" and model.shape in self.shapes:
            yield Fault("task.prefix", "= true: is for decoder-only models; an encoder sees the whole source anyway")

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.seq2seq import SequenceToSequence

        return SequenceToSequence(self, tokenizer, source_tokenizer)


class Answers(Seq2Seq):
    """A task that compares answers to a source, or to a conversation, by one decoder."""

    kind: str  # type: ignore[assignment]  # no default: each of these tasks has its own
    shapes: ClassVar = ("decoder",)
    batches: ClassVar = ("padded",)
    takes_own_tokens: ClassVar = False
    has_distribution: ClassVar = False
    real_rows: ClassVar = "compares the rows of a batch"

    def unfit_batches(self, kind: str, model: ModelConfig) -> str:
        return Task.unfit_batches(self, kind, model)

    def faults(self, recipe: Any) -> Iterator[Fault]:
        model, name = recipe.model, f"the task {self.kind}"
        if self.compares_with_start and recipe.train.init_from is None:
            yield Fault("train.init_from", f"is required: {name} compares the model with the run that it starts from")
        if self.prefix:
            yield Fault("task.prefix", f"= true: {name} reads sources in one direction only: leave it out")
        if model.head.further:
            yield Fault("model.head.multi_token", f"{name} has no loss for further tokens: leave it out")
        if recipe.parallel.context > 1:
            yield Fault("parallel.context", f"= {recipe.parallel.context}: {name} compares whole rows")


class Preferences(Answers):
    """Prefer one answer of a decoder to another (DPO, Rafailov et al. 2023).

    The loss of a pair is -log σ(beta · (r(target) - r(rejected))), where r(y) is the log-probability of y minus that of
    the frozen model of `train.init_from`.
    """

    kind: Literal["dpo"] = "dpo"
    beta: Positive = 0.1  # the larger, the less the model departs from its start

    columns: ClassVar = ("source", "target", "rejected")
    reads: ClassVar = "compares two rows of a batch"
    compares_with_start: ClassVar = True

    @property
    def measures(self) -> tuple[str, ...]:
        return ("loss", "accuracy", *self.metrics)

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.chat import template_of
        from anyformer.tasks.chat_answers import ChatPreferring
        from anyformer.tasks.preferences import Preferring

        template = template_of(tokenizer)
        return Preferring(self, tokenizer) if template is None else ChatPreferring(self, template)


class ExactReward(Spec):
    """1 for an answer that equals the target, character by character; 0 for any other."""

    kind: Literal["exact"] = "exact"


class PrefixReward(Spec):
    """The share of characters before the first wrong one: a part of 1 for an answer that begins as the target does.

    Characters that the longer of the two has beyond the other are wrong, so only the target itself has the reward 1.
    """

    kind: Literal["prefix"] = "prefix"


Reward = Annotated[ExactReward | PrefixReward, *BY_KIND]
DEFAULT_CLIP = 0.2


class Rewards(Answers):
    """Raise the rewards of a decoder's own answers (GRPO, Shao et al. 2024).

    The model samples several answers to each source. An answer's advantage is its reward minus the mean of its group,
    divided by their standard deviation. The loss of a token with probability ratio r to the model that sampled it is
    -min(r · advantage, clip(r, 1 - clip, 1 + clip) · advantage), averaged over the tokens of an answer.
    """

    kind: Literal["grpo"] = "grpo"
    reward: Reward = ExactReward()  # how an answer is verified
    samples: Annotated[int, Field(strict=True, ge=2, le=4096)] = 8  # answers to each source, a group
    updates: Size = 1  # optimiser steps on the same answers
    # how far the ratio of a token may depart from 1 in the direction of its advantage; needs updates above 1
    clip: Annotated[float, Field(strict=True, gt=0, lt=1)] = DEFAULT_CLIP
    kl: Annotated[float, Field(strict=True, ge=0)] = 0.0  # weight of the KL divergence from the run of train.init_from
    # dr_grpo: rewards are not divided by their deviation, nor losses by the length of an answer (Liu et al. 2025)
    variant: Literal["grpo", "dr_grpo"] = "grpo"

    reads: ClassVar = "samples one answer per row"
    one_process: ClassVar = "answers are sampled in one process"

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        if self.updates == 1 and self.clip != DEFAULT_CLIP:
            what = "the ratio is 1 in the first update: set updates above 1"
            raise ConfigError([Fault("clip", f"= {self.clip}: {what}")])
        return self

    @property
    def compares_with_start(self) -> bool:
        return self.kl > 0

    def faults(self, recipe: Any) -> Iterator[Fault]:
        yield from super().faults(recipe)
        model = recipe.model
        if model.target and model.target.stream:
            yield Fault("model.target.media", "the task grpo samples answers to texts only: leave it out")
        if self.updates > 1 and (where := _first_dropout(model.model_dump(), "model")):
            what = f"= {self.updates}: the ratio to the model that sampled an answer must not depend on dropout"
            yield Fault("task.updates", f"{what}: set it to 1, or {where} to 0")

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.chat import template_of
        from anyformer.tasks.chat_answers import ChatRewardedAnswers
        from anyformer.tasks.rewards import RewardedAnswers

        template = template_of(tokenizer)
        return RewardedAnswers(self, tokenizer) if template is None else ChatRewardedAnswers(self, template)


def _first_dropout(config: Any, path: str) -> str:
    """Return the path of the first dropout above 0 in a config as plain values; empty if there is none."""
    named = dict(enumerate(config)) if isinstance(config, list | tuple) else config if isinstance(config, dict) else {}
    for name, value in named.items():
        where = f"{path}.{name}"
        if found := where if name == "dropout" and value else _first_dropout(value, where):
            return found
    return ""


class MixturePart(Seq2Seq):
    """One sequence-to-sequence task of a mixture."""

    # name of the part; its token is the first of each source
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]*$")]
    weight: Positive = 1.0  # times each of its rows is read in an epoch

    @property
    def token(self) -> str:
        """The special token that its sources begin with."""
        return f"<task:{self.name}>"


class Mixture(SourceTask):
    """Several sequence-to-sequence tasks in one model: each source begins with a token for its task."""

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[tuple[MixturePart, ...], Field(min_length=1)]  # the tasks

    shapes: ClassVar[tuple[Shape, ...]] = ("decoder", "encoder-decoder")
    takes_own_tokens: ClassVar = True
    command: ClassVar = "predict {run} FILE --task NAME"

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [part.name for part in self.parts]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError([Fault("parts", f"two are named '{repeated[0]}'")])
        return self

    @property
    def measures(self) -> tuple[str, ...]:
        return ("loss", *dict.fromkeys(metric for part in self.parts for metric in part.metrics))

    def with_tokens(self, tokenizer: "TextTokenizer", is_new: bool) -> "TextTokenizer":
        return tokenizer.with_special([part.token for part in self.parts]) if is_new else tokenizer

    def faults(self, recipe: Any) -> Iterator[Fault]:
        for name, key, _, source in splits(recipe.data):
            if isinstance(source, MixedSources):
                yield from (f.under(f"{key}.parts") for f in self._source_faults(source, complete=name == "train"))

    def _source_faults(self, source: MixedSources, complete: bool) -> Iterator[Fault]:
        """Yield what makes the sources differ from the tasks; if `complete`, every task needs one."""
        tasks, sources = [part.name for part in self.parts], [part.name for part in source.parts]
        for i, name in enumerate(sources):
            if name not in tasks:
                yield Fault(f"{i}.name", f"= '{name}': the task has no such part; {did_you_mean(name, tasks)}")
            elif name in sources[:i]:
                yield Fault(f"{i}.name", f"= '{name}': already has a source; combine the two with kind = 'joined'")
        yield from (Fault("", f"there is no source for '{name}'") for name in tasks if complete and name not in sources)

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.mixture import MixedTasks

        return MixedTasks(self, tokenizer, source_tokenizer)
