"""Mixers that store nothing, and modules put in by hand: generation is right, or refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

import anyformer as af
from anyformer.config import ConfigError, Mixer, import_file
from anyformer.generation import session
from anyformer.generation.engine.interface import Limits
from anyformer.kernels.conventions import Note
from anyformer.nn.model import Transformer
from anyformer.runs.run import write_run
from anyformer.testing.subject import built, model_with, random_ids
from tests import loop
from tests.serve.mixed_requests import ask

FILE = Path(__file__).with_name("my_parts.py")
BUNDLED = Path(af.__file__).parent / "explore" / "bundled_runs" / "sort"
IDS = random_ids(3, 2, 4)


class Average(nn.Module):
    """Put in place of a mixer: the mean of all tokens up to one's own, wherever they are."""

    def forward(self, x, ctx):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def swapped() -> Transformer:
    model = built(model_with(position="alibi"))
    for block in model.decoder.blocks:
        block["mixer"].inner = Average()
    return model


def uncached(model: Transformer, new: int = 5) -> torch.Tensor:
    ids = IDS
    for _ in range(new):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    return ids


def test_a_module_put_in_by_hand_generates_without_a_cache_alone() -> None:
    model = swapped()
    with pytest.raises(
        ValueError, match=r"decoder.blocks.0.mixer.inner is Average, .* builds MultiHeadAttention, .*cache"
    ):
        af.generate(model, IDS, max_new_tokens=5)
    assert torch.equal(af.generate(model, IDS, max_new_tokens=5, cache="none"), uncached(model))
    with pytest.raises(ValueError, match="is served with it"):
        af.Engine(model)
    model.decoder.blocks[1] = nn.Identity()
    with pytest.raises(ValueError, match=r"0.mixer.inner is Average"):
        model.new_cache(1, 4)


@pytest.mark.parametrize("name", ["mixer", "feedforward"])
def test_no_run_is_written_with_such_a_module(name: str, tmp_path: Path) -> None:
    run = af.load(BUNDLED)
    stack = run.model.encoder or run.model.decoder
    stack.blocks[0][name].inner = Average()
    for write in (af.to_hf, lambda run, folder: write_run(folder, run)):
        with pytest.raises(ValueError, match=rf"blocks\.0\.{name}\.inner is Average"):
            write(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_engine_without_a_cache() -> None:
    model = swapped()

    async def answers() -> list[list[int]]:
        async with af.Engine(model, Limits(cache="none")) as engine:
            return [(await engine.complete(ask(row, max_new_tokens=5))).ids for row in IDS.tolist()]

    assert loop.run(answers()) == uncached(model)[:, 4:].tolist()


def test_a_mixer_that_stores_nothing_is_recomputed_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    import_file(FILE)
    session._say.cache_clear()
    model = built(model_with(mixer="average", position="none"))
    with pytest.warns(Note, match=r"mixers that store nothing \(average\): each new token"):
        first = af.generate(model, IDS, max_new_tokens=5)
    assert torch.equal(af.generate(model, IDS, max_new_tokens=5), first)  # no second note: it would be an error
    assert torch.equal(first, uncached(model))
    assert Mixer.stores(model.config.decoder.blocks[0].mixer, 8) is None
    with pytest.raises(ConfigError, match="'average' layers store nothing"):
        af.config.io.override(model.config, ["decoder.memory=4"])
