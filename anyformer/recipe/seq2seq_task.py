"""Tasks that answer a source with a target: seq2seq, preferences, rewards, and mixtures. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.spec import BY_KIND, Count, Flag, LengthPenalty, Positive, Size


class Seq2Seq(Spec):
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

    @model_validator(mode="after")
    def _check_length_penalty(self) -> Self:
        if self.beams == 1 and self.length_penalty != 1:
            what = "applies to beam search only: set beams above 1"
            raise ConfigError([Fault("length_penalty", f"= {self.length_penalty}: {what}")])
        return self


class Preferences(Seq2Seq):
    """Prefer one answer of a decoder to another (DPO, Rafailov et al. 2023).

    The loss of a pair is -log σ(beta · (r(target) - r(rejected))), where r(y) is the log-probability of y minus that of
    the frozen model of `train.init_from`.
    """

    kind: Literal["dpo"] = "dpo"  # type: ignore[assignment]  # a Seq2Seq for all that reads and writes texts
    beta: Positive = 0.1  # the larger, the less the model departs from its start


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


class Rewards(Seq2Seq):
    """Raise the rewards of a decoder's own answers (GRPO, Shao et al. 2024).

    The model samples several answers to each source. An answer's advantage is its reward minus the mean of its group,
    divided by their standard deviation. The loss of a token with probability ratio r to the model that sampled it is
    -min(r · advantage, clip(r, 1 - clip, 1 + clip) · advantage), averaged over the tokens of an answer.
    """

    kind: Literal["grpo"] = "grpo"  # type: ignore[assignment]  # a Seq2Seq for all that reads and writes texts
    reward: Reward = ExactReward()  # how an answer is verified
    samples: Annotated[int, Field(strict=True, ge=2, le=4096)] = 8  # answers to each source, a group
    updates: Size = 1  # optimiser steps on the same answers
    # how far the ratio of a token may depart from 1 in the direction of its advantage; needs updates above 1
    clip: Annotated[float, Field(strict=True, gt=0, lt=1)] = DEFAULT_CLIP
    kl: Annotated[float, Field(strict=True, ge=0)] = 0.0  # weight of the KL divergence from the run of train.init_from
    # dr_grpo: rewards are not divided by their deviation, nor losses by the length of an answer (Liu et al. 2025)
    variant: Literal["grpo", "dr_grpo"] = "grpo"

    @model_validator(mode="after")
    def _check_clip(self) -> Self:
        if self.updates == 1 and self.clip != DEFAULT_CLIP:
            what = "the ratio is 1 in the first update: set updates above 1"
            raise ConfigError([Fault("clip", f"= {self.clip}: {what}")])
        return self


class MixturePart(Seq2Seq):
    """One sequence-to-sequence task of a mixture."""

    # name of the part; its token is the first of each source
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]*$")]
    weight: Positive = 1.0  # times each of its rows is read in an epoch


class Mixture(Spec):
    """Several sequence-to-sequence tasks in one model: each source begins with a token for its task."""

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[tuple[MixturePart, ...], Field(min_length=1)]  # the tasks

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [part.name for part in self.parts]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError([Fault("parts", f"two are named '{repeated[0]}'")])
        return self
