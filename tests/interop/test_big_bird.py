"""BigBird's block-sparse attention in `transformers`: why it is not imported, measured."""

import math
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from tests.interop.public import PAD, TOLERANCE, furthest, ragged
from tests.interop.test_encoders import bert

BLOCK, RANDOMS, LENGTH = 4, 1, 48  # block-sparse from 29 tokens on


def sparse() -> hf.PreTrainedModel:
    sizes = {"block_size": BLOCK, "num_random_blocks": RANDOMS, "max_position_embeddings": 64}
    return bert("Model", "BigBird", attention_type="block_sparse", num_hidden_layers=1, **sizes).built()


def hidden(model: hf.PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).last_hidden_state


def reference(model: hf.PreTrainedModel, ids: Tensor, copies: int) -> Tensor:
    """The same layer with a dense mask: neighbours, first and last block; the first one counts `copies` times."""
    block = torch.arange(ids.shape[1]) // BLOCK
    q, k, last = block[:, None], block[None], int(block[-1])
    seen = ((q - k).abs() <= 1) | (k == 0) | (k == last) | (q == 0) | (q == last)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    middle = (q > 0) & (q < last)
    bias = bias + math.log(copies) * (middle & (k == 0))
    layer = model.encoder.layer[0]
    part = layer.attention.self
    with torch.no_grad():
        x = model.embeddings(ids)
        heads = [
            f(x).unflatten(-1, (part.num_attention_heads, -1)).transpose(1, 2)
            for f in (part.query, part.key, part.value)
        ]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias)
        y = layer.attention.output(mixed.transpose(1, 2).flatten(2), x)
        return layer.output(layer.intermediate(y), y)


def test_random_links_are_copies_of_the_first_block() -> None:
    """In evaluation; the block counts once as a global block and once for each link."""
    model, ids = sparse(), torch.randint(5, 97, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    found = hidden(model, ids)
    assert furthest(found, reference(model, ids, 1 + RANDOMS), torch.ones(1, dtype=torch.bool)) <= TOLERANCE
    assert furthest(found, reference(model, ids, 1), torch.ones(1, dtype=torch.bool)) > 100 * TOLERANCE


def test_padding_changes_the_output() -> None:
    """The last block of a row is global, also if it is padding."""
    model, ids = sparse(), torch.randint(5, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    longer = torch.nn.functional.pad(ids, (0, 8), value=PAD)
    with torch.no_grad():
        padded = model(longer, attention_mask=(longer != PAD).long()).last_hidden_state[:, :40]
    assert furthest(hidden(model, ids), padded, torch.ones(1, dtype=torch.bool)) > 100 * TOLERANCE


def test_a_short_text_changes_all_later_ones() -> None:
    model, ids = sparse(), torch.randint(5, 97, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    before = hidden(model, ids)
    hidden(model, ids[:, :20])
    assert furthest(hidden(model, ids), before, torch.ones(1, dtype=torch.bool)) > 100 * TOLERANCE


def test_short_texts_are_exact_with_full_attention(tmp_path: Path) -> None:
    public = bert("Model", "BigBird", attention_type="block_sparse", block_size=8)
    theirs, batch = public.saved(tmp_path / "there"), ragged(44, 40, 17)
    said = "transformers repeats the first block in place of random ones in texts of more than 88 tokens"
    with pytest.raises(af.ConfigError, match=said):
        af.from_hf(tmp_path / "there")
    run = af.from_hf(tmp_path / "there", ignore_fields=["attention_type"])
    with torch.no_grad():
        expected = theirs(batch.ids, attention_mask=batch.mask).last_hidden_state
        assert furthest(run.model.encode(batch.ids, segments=batch.segments), expected, batch.real) <= TOLERANCE
