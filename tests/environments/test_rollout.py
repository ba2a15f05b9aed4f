"""Laws of rollouts: a perfect policy succeeds always, a batch of environments acts as each alone, records are exact."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anyformer.cli.env import describe
from anyformer.config import ConfigError, FeatureSegment, Media, ModelConfig, Tokens
from anyformer.data import key_to_door
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import train_tokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Actions, Bins, Bytes
from anyformer.recipe.ready import read_recipe
from anyformer.runs.run import Run
from anyformer.tasks.actions import ActionPrediction, EncodedEpisode
from anyformer.tasks.base import open_media
from anyformer.tasks.environments.environment import make
from anyformer.tasks.environments.record import record
from anyformer.tasks.environments.rollout import Player, Policy, film, rollout, summarise

GOTO = "BabyAI-GoToLocal-v0"


def small_run(spec: Actions, features: FeatureSegment | None, seed: int = 0) -> Run:
    """Return a run with random weights."""
    tokenizer = train_tokenizer(Bytes(), []).with_special(spec.special_tokens)
    task = ActionPrediction(spec, tokenizer)
    changes = ["model.width=16", "model.decoder.depth=2", "model.decoder.blocks.*.feedforward.width=32"]
    changes.append("model.decoder.position=rotary")
    model = read_recipe("key-to-door", changes).model
    target = Tokens(vocab=tokenizer.size, media=None if features is None else Media(features=features))
    config: ModelConfig = model.model_copy(update={"target": target})
    torch.manual_seed(seed)
    built = Transformer(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.5)
    open_media(task, config)
    return Run(built.eval(), task, spec, Path())


def key_to_door_run(history: int, **fields: Any) -> Run:
    spec = Actions(actions=("up", "down", "left", "right"), history=history, **fields)
    return small_run(spec, None if spec.state_bins else FeatureSegment(size=25, values=4))


@pytest.mark.parametrize("history", [1, 4, 64])
@pytest.mark.parametrize("fields", [{}, {"returns": Bins(count=2, low=0.0, high=1.0)}])
def test_a_batch_of_environments_acts_as_each_alone(history: int, fields: dict[str, Any]):
    run = key_to_door_run(history, **fields)
    together = rollout(run, "key-to-door", 3, 10)
    assert together == [rollout(run, "key-to-door", 1, 10 + i)[0] for i in range(3)]
    assert together == rollout(run, "key-to-door", 3, 10, parallel=2)
    drawn = rollout(run, "key-to-door", 3, 10, temperature=1.0)
    assert drawn == rollout(run, "key-to-door", 3, 10, parallel=2, temperature=1.0)


@pytest.mark.parametrize("history", [3, 8])
def test_the_cache_changes_no_logits(history: int):
    """Each action is the one that a call without a cache predicts from the row of training."""
    run = key_to_door_run(history, state_bins=Bins(count=4, low=0.0, high=4.0))
    assert isinstance(run.task, ActionPrediction)
    player, policy = Player(make("key-to-door"), 3, 0.0), Policy(run.task, run.model)
    step = 0
    while not player.done:
        policy.act([player], step)
        step += 1
    steps = [[*run.task.encode_state(seen), *ids] for seen, ids in zip(player.seen[:-1], player.actions, strict=True)]
    for example in run.task.windows(EncodedEpisode.of([], steps, 1)):
        logits = run.model(torch.from_numpy(example.ids[None]).long())[0][:, run.task.action_ids]
        for i, label in enumerate(example.labels):
            if label >= 0:
                assert run.task.action_ids[int(logits[i].argmax())] == label


def test_rollouts_read_the_rows_of_training():
    """A recorded success, played again with the return 1 as target, has the row that training reads."""
    run = key_to_door_run(sum(key_to_door.STEPS), returns=Bins(count=2, low=0.0, high=1.0))
    task, environment = run.task, make("key-to-door")
    assert isinstance(task, ActionPrediction)
    expert, player = environment.expert(), Player(environment, 7, 1.0)
    assert expert is not None
    while not player.done:
        action = expert()
        player.act(task.encode_action(str(action)), action)
    assert player.success
    seen = [f"<features:{' '.join(map(str, x.tolist()))}>" for x in player.seen[:-1]]
    actions = [str(task.decode_action(ids)) for ids in player.actions]
    rewards = ["0"] * (len(actions) - 1) + ["1"]
    columns = {"text": [""], "observations": ["\n".join(seen)], "actions": ["\n".join(actions)]}
    (episode,) = task.encode(Rows(columns | {"rewards": ["\n".join(rewards)]}, "", range(1)))
    assert isinstance(episode, EncodedEpisode)
    (example,) = task.windows(episode)
    store = task.tokenizer.media
    assert store is not None
    trained = store.segments(example.ids.tolist())
    ids = Policy(task, run.model)._context(player, 0, len(actions) - 1, store)
    assert [max(id, -1) for id in ids] == [max(id, -1) for id in example.ids]
    assert all(np.array_equal(a.value, b.value) for a, b in zip(trained, store.segments(ids), strict=True))


def test_only_the_key_opens_the_door():
    with_key, without = key_to_door.KeyToDoor(), key_to_door.KeyToDoor()
    with_key.reset(3), without.reset(3)
    with_key.has_key = True
    for _ in range(sum(key_to_door.STEPS[:2])):
        (a, _, _), (b, _, _) = with_key.step(1), without.step(1)
    assert np.array_equal(a, b)  # nothing shows the key
    with_key.step(0), without.step(0)
    assert with_key.step(0)[1:] == (1.0, True)
    assert without.step(0)[1:] == (0.0, False)


def test_few_random_walks_succeed():
    walks = list(key_to_door.random_walks(3000, "valid", 0))
    assert 0.02 < np.mean([walk.rewards[-1] == "1" for walk in walks]) < 0.04


class Perfect(Policy):
    """Acts as the expert of each environment."""

    def act(self, players: Sequence[Player], step: int) -> None:
        for player in players:
            expert = player.environment.expert()
            assert expert is not None
            player.act([0], expert())


@pytest.mark.parametrize("name", ["key-to-door", GOTO])
def test_a_perfect_policy_succeeds_always(monkeypatch: pytest.MonkeyPatch, name: str):
    if name == GOTO:
        pytest.importorskip("minigrid")
    monkeypatch.setattr("anyformer.tasks.environments.rollout.Policy", Perfect)
    run = small_run(Actions(actions=make(name).actions), FeatureSegment(size=147))
    report = summarise(name, rollout(run, name, 8, 100, parallel=3))
    assert report.success == 1
    low, high = report.success_interval
    assert 0.6 < low < high <= 1 + 1e-9


@pytest.mark.parametrize("name", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_success_is_the_reward_threshold_of_gymnasium(name: str):
    gymnasium = pytest.importorskip("gymnasium")
    threshold = gymnasium.spec(name).reward_threshold
    environment, rng = make(name), np.random.Generator(np.random.PCG64(0))
    for force, succeeds in ((False, False), (True, True)):
        for seed in range(3):
            environment.reset(seed)
            if force:  # as if the episode had gone as far as the environment wants
                environment._inner = Rewarding(environment._inner, 10 * threshold)  # type: ignore[attr-defined]
            total, done = 0.0, False
            while not done:
                _, reward, done, success = environment.step(environment.random_action(rng))
                total += reward
            assert success == (total >= threshold) == succeeds


class Rewarding:
    """An environment whose first reward is larger."""

    def __init__(self, inner: Any, more: float):
        self.inner, self.more = inner, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, reward, *rest = self.inner.step(action)
        reward, self.more = reward + self.more, 0.0
        return observation, reward, *rest


def test_nothing_is_printed_of_success_that_the_environment_does_not_define():
    gymnasium = pytest.importorskip("gymnasium")
    name = "Pendulum-v1"
    assert gymnasium.spec(name).reward_threshold is None
    spec = Actions(action_bins=Bins(count=8, low=-2.0, high=2.0), history=4)
    (result,) = rollout(small_run(spec, FeatureSegment(size=3)), name, 1, 0)
    report = summarise(name, [result])
    assert report.success is None
    assert report.success_interval is None
    assert summarise(name, [result._replace(success=success) for success in (True, False)]).success == 0.5
    lines = list(describe(report))
    assert not any("success" in line for line in lines)
    assert any("return" in line for line in lines)
    recorded = record(name, 2, policy="random")
    assert recorded.successes is None


def test_recorded_episodes_are_those_of_the_seeds():
    found = record("key-to-door", 6, 5, policy="random")
    arrays = found.recording.arrays()
    assert arrays["seeds"].tolist() == list(range(5, 11))
    environment = make("key-to-door")
    observation, _ = environment.reset(5)
    for i in range(int(arrays["lengths"][0])):
        assert np.array_equal(arrays["observations"][i], observation)
        observation, reward, _, _ = environment.step(int(arrays["actions"][i]))
        assert reward == arrays["rewards"][i]
    expert = record("key-to-door", 6, 5)
    assert expert.successes == expert.played == 6


def test_processes_change_no_recording():
    one, two = (record("key-to-door", 60, processes=n, policy="random").recording.arrays() for n in (1, 2))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_babyai_demonstrations_succeed():
    pytest.importorskip("minigrid")
    found = record(GOTO, 4, 3)
    arrays = found.recording.arrays()
    assert arrays["observations"].shape[1:] == (7 * 7 * 3,)
    assert arrays["observations"].max() < 11
    assert (arrays["rewards"][arrays["lengths"].cumsum() - 1] > 0).all()
    assert all(mission.startswith("go to") for mission in arrays["missions"].tolist())


def test_continuous_actions_of_gymnasium():
    pytest.importorskip("gymnasium")
    name = "MountainCarContinuous-v0"
    spec = Actions(action_bins=Bins(count=8, low=-1.0, high=1.0), history=4)
    run = small_run(spec, FeatureSegment(size=2))
    (result,) = rollout(run, name, 1, 0)
    assert result.steps > 1
    with pytest.raises(ConfigError, match="continuous actions, and the run has names"):
        rollout(key_to_door_run(4), name, 1, 0)
    with pytest.raises(ConfigError, match="has none"):
        record(name, 1)


@pytest.mark.parametrize(("name", "message"), [("BabyAI-GoToLocall-v0", "did you mean"), ("nothing", "nothing")])
def test_unknown_environments(name: str, message: str):
    pytest.importorskip("minigrid")
    with pytest.raises(ConfigError, match=message):
        make(name)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install 'anyformer\[env\]'"):
        make(GOTO)


def test_runs_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"has 4 actions .up, down, left, right., and the run has 2"):
        rollout(small_run(Actions(actions=("a", "b")), FeatureSegment(size=25)), "key-to-door", 1, 0)
    with pytest.raises(ConfigError, match="has 25 numbers, and the model reads 4"):
        rollout(small_run(Actions(actions=("a", "b", "c", "d")), FeatureSegment(size=4)), "key-to-door", 1, 0)
    with pytest.raises(ConfigError, match="has no returns"):
        rollout(key_to_door_run(4), "key-to-door", 1, 0, target=1.0)


def test_a_film_shows_every_step(tmp_path: Path):
    pytest.importorskip("minigrid")
    image = pytest.importorskip("PIL.Image")
    run = small_run(Actions(actions=make(GOTO).actions), FeatureSegment(size=147))
    result = film(run, GOTO, 3, tmp_path / "a.gif")
    with image.open(tmp_path / "a.gif") as made:
        assert made.n_frames <= result.steps + 1  # equal frames are joined
    assert result == rollout(run, GOTO, 1, 3)[0]
    with pytest.raises(ConfigError, match="has no pictures"):
        film(key_to_door_run(4), "key-to-door", 1, tmp_path / "b.gif")
