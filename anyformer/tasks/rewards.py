"""The task grpo: a decoder learns from rewards of its answers (group-relative policy optimisation).

Shao et al. 2024, https://arxiv.org/abs/2402.03300; without the two normalisations, Liu et al. 2025 ("Dr. GRPO"),
https://arxiv.org/abs/2503.20783.

Training samples a group of answers to each source, and a reward verifies each of them. The advantage of an answer is
its reward relative to its group, so no second model estimates values. The ratio r = p(token) / p_sampled(token) is 1 in
the first update on the answers, and the gradient is then that of REINFORCE with the group's mean as the baseline.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from anyformer.attention.padding import pad_rows
from anyformer.config import ModelConfig
from anyformer.data.batch import Batch, Example, SampledAnswers, collate
from anyformer.data.loader import Loader
from anyformer.data.readers import Rows
from anyformer.generation.strategy import Sampling
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExactReward, PrefixReward, Reward, Rewards
from anyformer.tasks.base import Metrics, before_end, call, ending_ids, token_log_probabilities
from anyformer.tasks.seq2seq import SequenceToSequence

FROM_MODEL = Sampling(temperature=1.0)  # the model's own distribution, which the ratio refers to


class RewardedPrompt(NamedTuple):
    """A source to answer."""

    ids: list[int]  # up to the token before the answer
    target: str
    number: int  # of the example


class RewardedAnswers(SequenceToSequence):
    """Answers of the model itself, to texts as in the task seq2seq, or to conversations (see `chat_answers.py`)."""

    spec: Rewards

    def row_faults(
        self, rows: Rows, config: ModelConfig, batches: Batches | None, role: str = "target"
    ) -> Iterator[str]:
        return super().row_faults(rows, config, None if batches is None else self._prompt_batches(batches), role)

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        return super().loader(rows, self._prompt_batches(batches), seed, model)

    def _prompt_batches(self, batches: Batches) -> Batches:
        """Return the batches of sources whose groups of answers fill a batch, if answers are as long as targets."""
        return batches.model_copy(update={"tokens": max(1, batches.row_limit // self.spec.samples)})

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure the loss of the targets and the model's answers, as the task seq2seq does."""
        return dataclasses.replace(super().evaluate(model, rows, batches), task="grpo")

    # -- answers ------------------------------------------------------------------------------------------------------

    def sample(self, model: Transformer, batch: Batch, seed: int, step: int) -> Batch:
        """Return a batch of `samples` answers to each source of a batch, with their rewards.

        The random numbers of an answer depend on the seed, the step, the example and the answer's number alone.
        """
        from anyformer.generation.sampling import row_seeds

        ends, group = self._ends(model), self.spec.samples
        prompts = self._prompts(batch, ends)
        repeated = [prompt for prompt in prompts for _ in range(group)]
        seeds = torch.cat([row_seeds(seed << 32 | step, group, first=group * prompt.number) for prompt in prompts])
        answers = self._answers(model, [prompt.ids for prompt in repeated], seeds)
        texts = [self.tokenizer.decode(before_end(ids, ends)) for ids in answers]
        each = [reward(self.spec.reward, text, one.target) for text, one in zip(texts, repeated, strict=True)]
        rewards = torch.tensor(each).view(-1, group)
        examples = [
            Example([*prompt.ids, *ids[:-1]], [IGNORE] * (len(prompt.ids) - 1) + ids)
            for prompt, ids in zip(repeated, answers, strict=True)
        ]
        pad = self.tokenizer.pad or 0
        rows = collate([(i,) for i in range(len(examples))], examples, pad, pad)
        sampled = SampledAnswers(rewards.flatten(), advantages(rewards, self.spec.variant == "grpo").flatten())
        return rows._replace(examples=batch.examples, sampled=sampled)

    def with_log_probabilities(self, model: Transformer, batch: Batch) -> Batch:
        """Return sampled answers with the log-probabilities of their tokens."""
        assert batch.sampled is not None
        with evaluating(model):
            log_p = token_log_probabilities(call(model, batch, packed=False), batch.labels)
        return batch._replace(sampled=batch.sampled._replace(log_p=log_p))

    def _prompts(self, batch: Batch, ends: Sequence[int]) -> list[RewardedPrompt]:
        prompts = []
        for ids, labels, number in zip(batch.ids.tolist(), batch.labels.tolist(), batch.examples, strict=True):
            first = next(i for i, label in enumerate(labels) if label != IGNORE)
            target = before_end([label for label in labels if label != IGNORE], ends)
            prompts.append(RewardedPrompt(ids[: first + 1], self.tokenizer.decode(target), number))
        return prompts

    def _ends(self, model: Transformer) -> list[int]:
        return ending_ids(self.tokenizer, model.config)

    def _answers(self, model: Transformer, prompts: Sequence[list[int]], seeds: Tensor) -> list[list[int]]:
        """Return an answer to each prompt, with the id that ends it unless its budget does."""
        from anyformer.generation.generate import run_sampling
        from anyformer.generation.request import Request
        from anyformer.tasks.answer_budgets import answer_budget

        ids, segments = pad_rows(prompts, next(model.parameters()).device)
        budgets = [answer_budget(self, model, len(prompt), None, FROM_MODEL) for prompt in prompts]
        ends = self._ends(model)
        request = Request(ids, budgets, FROM_MODEL, ends, segments, seed=seeds)
        with torch.autocast(ids.device.type, enabled=False):
            out = run_sampling(model, request)[:, ids.shape[1] :].tolist()
        rows = (row[:budget] for row, budget in zip(out, budgets, strict=True))
        return [row[: len(before_end(row, ends)) + 1] for row in rows]

    # -- loss ---------------------------------------------------------------------------------------------------------

    def policy_loss(
        self, logits: Tensor, labels: Tensor, sampled: SampledAnswers, reference: Tensor | None = None
    ) -> Tensor:
        """Return the loss of logits [b, t, v] and sampled labels [b, t], summed over answers.

        `reference` are the logits of the frozen model, q. The divergence is estimated by q/p - log(q/p) - 1 for each
        token, which is never negative (Schulman 2020, http://joschu.net/blog/kl-approx.html).
        """
        spec, counts = self.spec, labels != IGNORE
        log_p = token_log_probabilities(logits, labels)
        ratio = (log_p - (log_p.detach() if sampled.log_p is None else sampled.log_p)).exp()
        advantage = sampled.advantages[:, None]
        each = -torch.minimum(ratio * advantage, ratio.clamp(1 - spec.clip, 1 + spec.clip) * advantage)  # [b, t]
        if reference is not None:
            gap = token_log_probabilities(reference, labels) - log_p
            each = each + spec.kl * (gap.expm1() - gap)
        answers = torch.where(counts, each, 0).sum(dim=1)  # [b]
        if spec.variant == "grpo":
            answers = answers / counts.sum(dim=1).clamp(min=1)
        return answers.sum()


def reward(spec: Reward, answer: str, target: str) -> float:
    """Return the reward of an answer, from 0 to 1."""
    match spec:
        case ExactReward():
            return float(answer == target)
        case PrefixReward():
            right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, target, strict=False))
            return sum(1 for _ in right) / max(len(answer), len(target), 1)
        case _:
            assert_never(spec)


def advantages(rewards: Tensor, divide: bool) -> Tensor:
    """Return rewards [n, group] minus the mean of their group; with `divide`, by its standard deviation.

    Equal rewards have advantages of exactly 0: rounding of their mean must not become a difference of answers.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    if divide:
        centred = centred / rewards.std(dim=1, correction=0, keepdim=True)
    return torch.where(equal, 0, centred)
