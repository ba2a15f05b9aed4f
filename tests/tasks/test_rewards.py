"""The task grpo: its gradient is that of REINFORCE with the group's mean as baseline, cut where a ratio leaves its
interval, and its answers are a function of the seed and the step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from anyformer.config import ConfigError, io
from anyformer.data.batch import Batch, SampledAnswers
from anyformer.data.loader import Cursor
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Data, ExactReward, Padded, PrefixReward, Recipe, ReverseDigits, Rewards
from anyformer.runs.run import load
from anyformer.tasks.base import before_end, token_log_probabilities
from anyformer.tasks.rewards import RewardedAnswers, advantages, reward
from anyformer.training.job import Job
from anyformer.training.parallel import Ranks
from anyformer.training.plan import plan
from anyformer.training.prepare import prepare
from anyformer.training.step import TrainingStep
from tests.training.small import assert_same_run, make, metrics, pairs, quiet, run, stop_at

seeds = st.integers(0, 2**16)
sizes = st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(1, 5))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from, which reverses digits, rarely correctly."""
    out = tmp_path_factory.mktemp("first") / "run"
    run(pairs(steps=40, dropout=0.0), out)
    return out


def rewarded(first: Path, task: dict[str, Any] | None = None, dropout: float = 0.0, **train: Any) -> Recipe:
    recipe = pairs(dropout=dropout, init_from=str(first), **train)
    spec = Rewards(**{"max_target": 6, "samples": 4, "reward": PrefixReward(), **(task or {})})
    return recipe.model_copy(update={"task": spec})


def task_of(job: Job) -> RewardedAnswers:
    assert isinstance(job.task, RewardedAnswers)
    return job.task


def drawn(job: Job, step: int = 1) -> tuple[Batch, Batch]:
    """Return the first batch of sources, and the answers to it."""
    batch, _ = job.loader.read(Cursor())
    return batch, task_of(job).sample(job.model, batch, job.recipe.seed, step)


def bare(**fields: Any) -> RewardedAnswers:
    """A task without a tokenizer, for its loss."""
    task = RewardedAnswers.__new__(RewardedAnswers)
    task.spec = Rewards(**fields)
    return task


def random_answers(n: int, group: int, t: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels with padding after each answer, and rewards."""
    torch.manual_seed(seed)
    labels = torch.randint(3, (n * group, t))
    ends = torch.randint(1, t + 1, (n * group, 1))
    labels[torch.arange(t) >= ends] = IGNORE
    logits = torch.randn(n * group, t, 3, dtype=torch.float64, requires_grad=True)
    return logits, labels, torch.randint(3, (n, group)).double()


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


# -- rewards and advantages -------------------------------------------------------------------------------------------


@given(st.text("ab ", max_size=6), st.text("ab ", max_size=6))
def test_only_the_target_has_the_reward_1(answer: str, target: str) -> None:
    exact, prefix = reward(ExactReward(), answer, target), reward(PrefixReward(), answer, target)
    assert exact == (answer == target)
    assert 0 <= prefix <= 1
    if answer or target:
        assert (prefix == 1) == (answer == target)
        assert (prefix > 0) == (answer[:1] == target[:1] != "")


@given(sizes, seeds, st.booleans())
def test_advantages_are_relative_to_their_group(size: tuple[int, int, int], seed: int, divide: bool) -> None:
    n, group, _ = size
    _, _, rewards = random_answers(n, group, 1, seed)
    found = advantages(rewards, divide)
    torch.testing.assert_close(found, advantages(rewards + 5, divide))  # a constant for all changes nothing
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(n).double())
    differ = (rewards != rewards[:, :1]).any(dim=1)
    if divide:
        torch.testing.assert_close(found.pow(2).mean(dim=1), differ.double())
        torch.testing.assert_close(found, advantages(3 * rewards, divide))
    else:
        torch.testing.assert_close(3 * found, advantages(3 * rewards, divide))


@given(st.floats(0, 1, width=32), st.integers(2, 9), st.sampled_from(["grpo", "dr_grpo"]), seeds)
def test_equal_rewards_have_no_gradient(value: float, group: int, variant: str, seed: int) -> None:
    """Exactly, although the rounded mean of equal numbers may be another number."""
    logits, labels, _ = random_answers(1, group, 4, seed)
    each = advantages(torch.full((1, group), value), variant == "grpo").flatten()
    loss = bare(variant=variant).policy_loss(logits, labels, SampledAnswers(each, each))
    assert not gradient(loss, logits).any()


# -- the gradient -----------------------------------------------------------------------------------------------------


@given(sizes, seeds, st.sampled_from(["grpo", "dr_grpo"]))
@settings(max_examples=25)
def test_the_first_update_is_reinforce_with_a_baseline(size: tuple[int, int, int], seed: int, variant: str) -> None:
    """By log-probabilities of single tokens; with and without the log-probabilities of the sampling model."""
    n, group, t = size
    logits, labels, rewards = random_answers(n, group, t, seed)
    task, each = bare(variant=variant), advantages(rewards, variant == "grpo").flatten()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        mean, deviation = rewards[i].mean(), rewards[i].std(correction=0)
        for j in range(group):
            row, tokens = i * group + j, [x for x in labels[i * group + j].tolist() if x != IGNORE]
            log_p = sum(logits[row, k].log_softmax(0)[id] for k, id in enumerate(tokens))
            weight = rewards[i, j] - mean
            if variant == "grpo":
                weight = weight / deviation / len(tokens) if deviation else weight * 0
            total = total - weight * log_p
    expected = gradient(total, logits)
    old = token_log_probabilities(logits, labels).detach()
    for log_p in (None, old):
        loss = task.policy_loss(logits, labels, SampledAnswers(rewards.flatten(), each, log_p))
        torch.testing.assert_close(gradient(loss, logits), expected)


@given(sizes, seeds, st.floats(0.05, 0.5), st.floats(0.1, 1))
@settings(max_examples=25)
def test_a_token_is_cut_where_its_ratio_leaves_the_interval(
    size: tuple[int, int, int], seed: int, clip: float, step: float
) -> None:
    """In the direction of its advantage only; elsewhere its gradient is ratio · advantage · that of its logarithm."""
    logits, labels, rewards = random_answers(*size, seed)
    each = advantages(rewards, divide=False).flatten()
    log_p = token_log_probabilities(logits, labels)
    old = (log_p + step * torch.randn(labels.shape, dtype=torch.float64)).detach()
    ratio = (log_p - old).exp().detach()
    assume(bool(((ratio - 1).abs() - clip).abs().min() > 1e-6))
    task = bare(variant="dr_grpo", updates=2, clip=clip)
    found = gradient(task.policy_loss(logits, labels, SampledAnswers(each, each, old)), logits)
    up, down = each[:, None] > 0, each[:, None] < 0
    cut = (up & (ratio > 1 + clip)) | (down & (ratio < 1 - clip))
    weight = torch.where(cut | (labels == IGNORE), 0, -ratio * each[:, None])
    expected = gradient((weight * token_log_probabilities(logits, labels)).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert not found[cut].any()


@given(sizes, seeds)
@settings(max_examples=25)
def test_tokens_after_the_end_do_not_count(size: tuple[int, int, int], seed: int) -> None:
    logits, labels, rewards = random_answers(*size, seed)
    each, after = advantages(rewards, divide=True).flatten(), labels == IGNORE
    task, reference = bare(kl=0.5), torch.randn_like(logits)
    sampled = SampledAnswers(rewards.flatten(), each, torch.randn(labels.shape).double())
    loss = task.policy_loss(logits, labels, sampled, reference)
    assert not gradient(loss, logits)[after].any()
    other = torch.where(after[..., None], torch.randn_like(logits), logits.detach())
    torch.testing.assert_close(task.policy_loss(other, labels, sampled, reference), loss.detach())
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 2)) for x in (logits.detach(), reference)]
    padded = sampled._replace(log_p=torch.nn.functional.pad(sampled.log_p, (0, 2)))  # type: ignore[arg-type]
    wide = torch.nn.functional.pad(labels, (0, 2), value=IGNORE)
    torch.testing.assert_close(task.policy_loss(longer[0], wide, padded, longer[1]), loss.detach())


@given(sizes, seeds, st.floats(0.01, 2))
@settings(max_examples=25)
def test_the_divergence_is_0_at_the_start_and_positive_elsewhere(
    size: tuple[int, int, int], seed: int, kl: float
) -> None:
    logits, labels, _ = random_answers(*size, seed)
    none = torch.zeros(len(labels)).double()
    task, sampled = bare(kl=kl, variant="dr_grpo"), SampledAnswers(none, none)
    at_start = task.policy_loss(logits, labels, sampled, logits.detach())
    assert float(at_start.detach()) == 0
    assert not gradient(at_start, logits).any()
    reference = torch.randn_like(logits)
    loss = task.policy_loss(logits, labels, sampled, reference)
    gap = (token_log_probabilities(reference, labels) - token_log_probabilities(logits, labels)).detach()
    expected = kl * (gap.expm1() - gap)[labels != IGNORE].sum()
    torch.testing.assert_close(loss.detach(), expected)
    assert float(expected) >= 0


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_follow_their_sources_up_to_their_end(first: Path, tmp_path: Path) -> None:
    job = make(rewarded(first), tmp_path / "run")
    batch, answers = drawn(job)
    task, group = task_of(job), task_of(job).spec.samples
    assert answers.sampled is not None
    assert len(answers.ids) == group * len(batch.ids) == answers.target_count
    for i, (ids, labels) in enumerate(zip(answers.ids.tolist(), answers.labels.tolist(), strict=True)):
        source = batch.ids[i // group].tolist()
        prompt = source[: source.index(task.tokenizer.sep) + 1]
        said = [label for label in labels if label != IGNORE]
        assert [*prompt, *said[:-1]] == ids[: len(prompt) + len(said) - 1]
        assert labels[len(prompt) - 1 :][: len(said)] == said
        assert task.eos not in said[:-1]
        assert said[-1] == task.eos or len(said) == task.spec.max_target
        target = " ".join(reversed(task.tokenizer.decode(prompt[:-1]).split()))
        text = task.tokenizer.decode([id for id in said if id != task.eos])
        assert float(answers.sampled.rewards[i]) == pytest.approx(reward(PrefixReward(), text, target))


@given(st.lists(st.integers(0, 3), max_size=6))
def test_an_answer_ends_before_the_first_end(ids: list[int]) -> None:
    found = before_end(ids, [0, 3])
    assert found == ids[: len(found)]
    assert not {0, 3} & {*found}
    assert len(found) == len(ids) or ids[len(found)] in (0, 3)


def test_answers_are_a_function_of_seed_and_step(first: Path, tmp_path: Path) -> None:
    """And of their example: they do not depend on torch's generator, nor on the other rows."""
    job = make(rewarded(first), tmp_path / "run")
    batch, answers = drawn(job)
    torch.manual_seed(7)
    again = drawn(job)[1]
    assert torch.equal(answers.ids, again.ids)
    for seed, step in ((job.recipe.seed, 2), (job.recipe.seed + 1, 1)):
        other = task_of(job).sample(job.model, batch, seed, step)
        assert other.ids.shape != answers.ids.shape or not torch.equal(other.ids, answers.ids)
    one = batch._replace(ids=batch.ids[1:2], labels=batch.labels[1:2], segments=None, examples=batch.examples[1:2])
    alone, group = task_of(job).sample(job.model, one, job.recipe.seed, 1), task_of(job).spec.samples
    width = alone.ids.shape[1]
    assert torch.equal(alone.labels, answers.labels[group : 2 * group, :width])


def test_groups_are_samples_of_the_model(first: Path, tmp_path: Path) -> None:
    """First tokens of many answers to one source are as frequent as they are probable."""
    recipe = rewarded(first, {"samples": 2000}).model_copy(update={"batches": Padded(tokens=40000)})
    job = make(recipe, tmp_path / "run")
    batch, _ = job.loader.read(Cursor())
    one = batch._replace(ids=batch.ids[:1], labels=batch.labels[:1], segments=None, examples=batch.examples[:1])
    answers = task_of(job).sample(job.model, one, 0, 1)
    at = int((answers.labels[0] != IGNORE).nonzero()[0])
    counts = torch.bincount(answers.labels[:, at], minlength=job.model.config.vocab)
    p = job.model.eval()(answers.ids[:1, : at + 1])[0, -1].softmax(-1).detach()
    assert float((counts / 2000 - p).abs().max()) < 5 * 0.5 / 2000**0.5


# -- training ---------------------------------------------------------------------------------------------------------


def test_a_step_is_the_gradient_of_the_mean_over_answers(first: Path, tmp_path: Path) -> None:
    """With the first model as both the sampling model and the reference, of two batches of unequal size."""
    recipe = rewarded(first, {"kl": 0.1, "samples": 3}, accumulate=2, clip="none")
    job, other = make(recipe, tmp_path / "run"), make(recipe, tmp_path / "other")
    seen: list[Tensor] = []
    job.optimizer.step = lambda *_: seen.extend(p.grad.clone() for p in job.model.parameters())  # type: ignore
    one, cursor = job.loader.read(Cursor())
    two, _ = job.loader.read(cursor)
    count, scalars, _ = TrainingStep(job)([one, two])
    answers = [task_of(other).sample(other.model, batch, recipe.seed, 1) for batch in (one, two)]
    assert count == 3 * (len(one.ids) + len(two.ids))
    total = torch.zeros(())
    for batch in answers:
        assert batch.sampled is not None
        for ids, labels, worth in zip(batch.ids, batch.labels, batch.sampled.advantages, strict=True):
            kept = labels != IGNORE
            log_p = other.model(ids[None])[0].log_softmax(-1)[kept].gather(1, labels[kept, None]).mean()
            total = total - worth * log_p / count
    expected = torch.autograd.grad(total, list(other.model.parameters()), allow_unused=True)
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-5, rtol=1e-3)
    rewards = torch.cat([batch.sampled.rewards for batch in answers if batch.sampled is not None])
    assert scalars.read()[2] == pytest.approx(float(rewards.mean()))


def test_trained_tokens_are_those_of_sampled_answers_in_every_update(first: Path, tmp_path: Path) -> None:
    recipe = rewarded(first, {"updates": 2}, steps=1)
    job = make(recipe, tmp_path / "run")
    batch, answers = drawn(job)
    trained = 2 * answers.tokens
    assert TrainingStep(job)([batch]).tokens == trained
    run(recipe, tmp_path / "other")
    assert f" 1 steps and {trained:,} tokens " in (tmp_path / "other" / "README.md").read_text("utf-8")


def test_a_plan_counts_the_tokens_of_sampled_answers(first: Path) -> None:
    found = plan(rewarded(first, {"samples": 4}), quiet())
    assert found.tokens_per_second > 2 * found.batch_tokens / found.seconds  # without answers, half of a row is left
    assert f"{found.tokens_per_second:,.0f} tokens/s" in found.render()


def test_later_updates_leave_the_sampling_model(first: Path, tmp_path: Path) -> None:
    """Ratios are those to the weights before the step."""
    job = make(rewarded(first, {"updates": 2}), tmp_path / "run")
    _, answers = drawn(job)
    before = task_of(job).with_log_probabilities(job.model, answers).sampled
    run_two: list[Tensor] = []
    task, real = task_of(job), task_of(job).policy_loss

    def watched(logits: Tensor, labels: Tensor, sampled: SampledAnswers, *reference: Tensor) -> Tensor:
        assert before is not None
        assert sampled.log_p is not None
        assert torch.equal(sampled.log_p, before.log_p)  # type: ignore[arg-type]
        run_two.append((token_log_probabilities(logits, labels) - sampled.log_p).detach())
        return real(logits, labels, sampled, *reference)

    job.objective.policy_loss = watched  # type: ignore[assignment]
    batch, _ = job.loader.read(Cursor())
    TrainingStep(job)([batch])
    assert task is job.task
    assert float(run_two[0].abs().max()) < 1e-5
    assert float(run_two[1].abs().max()) > 1e-3


def test_rewards_rise(first: Path, tmp_path: Path) -> None:
    """On four sources, whose answers are found by chance and then repeated."""
    few = Data(train=ReverseDigits(count=4, shortest=2, longest=2))
    recipe = rewarded(first, {"samples": 32, "max_target": 3}, steps=30)
    recipe = recipe.model_copy(update={"data": few, "batches": Padded(tokens=1024)})
    run(recipe, tmp_path / "run")
    rows = [row["reward"] for row in metrics(tmp_path / "run") if "reward" in row]
    assert sum(rows[-5:]) > 2 * sum(rows[:5])
    done = load(tmp_path / "run")
    assert done.spec.kind == "grpo"
    assert len(done.predict(["3 1 2", "5 4"], max_new_tokens=4)) == 2


def test_a_resumed_run_is_the_same(first: Path, tmp_path: Path) -> None:
    task = {"kl": 0.1, "updates": 2, "samples": 3}
    recipe = rewarded(first, task, steps=8, accumulate=2, ema=0.9, save_every=3)
    run(recipe, tmp_path / "whole")
    assert stop_at(recipe, tmp_path / "parts", 9)
    run(recipe, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_several_processes_are_refused(first: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train without torchrun"):
        prepare(rewarded(first), tmp_path / "run", False, quiet(), Ranks(size=2))


def test_only_a_divergence_needs_a_frozen_model(first: Path, tmp_path: Path) -> None:
    assert make(rewarded(first), tmp_path / "a").frozen is None
    assert make(rewarded(first, {"kl": 0.1}), tmp_path / "b").frozen is not None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("batches={kind='packed', tokens=64, length=32}", "use 'padded'"),
        ("train.label_smoothing=0.1", "train.label_smoothing"),
        ("task.prefix=true", "task.prefix"),
        ("task.clip=0.1", "set updates above 1"),
        ("task.samples=1", "task.samples"),
        ("task.reward=sort", "task.reward"),
        ("train.own_tokens={share=0.5}", "train.own_tokens"),
        ("train.teacher.run=runs/x", "the task grpo has none"),
        ("model.head.multi_token={tokens=2}", "model.head.multi_token"),
        ("parallel.context=2", "compares whole rows"),
        ("data.train={kind='prefer_sorted', count=5}", "the task grpo needs pairs"),
    ],
)
def test_what_does_not_fit_is_refused(first: Path, change: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        io.override(rewarded(first), [change])


def test_what_a_divergence_and_later_updates_need(first: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.init_from: is required"):
        io.override(rewarded(first, {"kl": 0.1}), ["train.init_from=none"])
    with pytest.raises(ConfigError, match=r"model\.decoder\.blocks\.0\.dropout to 0"):
        io.override(rewarded(first, {"updates": 2}), ["model.decoder.blocks.0.dropout=0.1"])
    io.override(rewarded(first), ["train.init_from=none", "model.decoder.blocks.0.dropout=0.1"])
