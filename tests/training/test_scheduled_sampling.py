"""Scheduled sampling: the decoder reads the model's own tokens where targets gave way, and nothing else changes."""

from pathlib import Path

import pytest
import torch

from anyformer.config import ConfigError, io
from anyformer.data.batch import Batch
from anyformer.data.loader import Cursor
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Batches, OwnTokens, Packed, Recipe
from anyformer.tasks.base import call
from anyformer.training.job import Job
from anyformer.training.scheduled_sampling import mix_own_tokens, own_token_share
from tests.training.small import PACKED, PADDED, Shape, make, pairs, run, text

WAYS = [(shape, batches) for shape in ("decoder", "encoder-decoder") for batches in (PADDED, PACKED)]


def prepared(folder: Path, shape: Shape, batches: Batches) -> tuple[Job, Batch]:
    job = make(pairs(shape, batches), folder / "run")
    return job, job.loader.read(Cursor())[0]


@pytest.mark.parametrize(("shape", "batches"), WAYS)
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_with_all_of_them_after_n_passes_n_tokens_are_those_of_greedy_decoding(
    tmp_path: Path, shape: Shape, batches: Batches, passes: int
) -> None:
    job, batch = prepared(tmp_path, shape, batches)
    packed, model = isinstance(batches, Packed), job.model.eval()
    read = mix_own_tokens(model, batch, packed, OwnTokens(share=1.0, passes=passes), 1)
    said = call(model, read, packed).argmax(-1)
    checked = 0
    for row in range(len(batch.ids)):
        since = 0  # tokens of this target that were read
        for at in range(1, batch.ids.shape[1]):
            before, here = (
                batch.labels[row, at - 1],
                batch.segments is None or (batch.segments[row, at] == batch.segments[row, at - 1]),
            )
            since = since + 1 if here and before != IGNORE else 0
            if since == 0:
                assert read.ids[row, at] == batch.ids[row, at]
            elif since <= passes:
                assert read.ids[row, at] == said[row, at - 1]
                checked += 1
    assert checked >= len(batch.ids)


def test_a_share_gives_way(tmp_path: Path) -> None:
    job, batch = prepared(tmp_path, "encoder-decoder", PADDED)
    torch.manual_seed(0)
    always = mix_own_tokens(job.model.eval(), batch, False, OwnTokens(share=1.0), 1).ids
    reads = [mix_own_tokens(job.model, batch, False, OwnTokens(share=0.25), 1).ids for _ in range(200)]
    may = always != batch.ids
    share = torch.stack([(ids != batch.ids)[may].float().mean() for ids in reads]).mean()
    assert float(share) == pytest.approx(0.25, abs=0.05)
    assert not any(bool((ids != batch.ids)[~may].any()) for ids in reads)


def test_the_share_rises() -> None:
    spec = OwnTokens(share=0.5, rise=10)
    assert [own_token_share(spec, step) for step in (0, 5, 10, 20)] == [0.0, 0.25, 0.5, 0.5]


def test_it_trains_otherwise_than_by_the_target_alone(tmp_path: Path) -> None:
    first = run(pairs("encoder-decoder", steps=3), tmp_path / "a").model.state_dict()
    other = run(pairs("encoder-decoder", steps=3, own_tokens=OwnTokens(share=1.0)), tmp_path / "b").model.state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_it_is_for_targets(tmp_path: Path) -> None:
    recipe = text(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.own_tokens: is for the tasks seq2seq and mixture, and this is lm"):
        io.override(recipe, ["train.own_tokens.share=0.5"])
    assert isinstance(recipe, Recipe)
