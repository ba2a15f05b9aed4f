"""Segments are document numbers: masks are refused at every entry, and whole numbers of any width mean the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anyformer import presets
from anyformer.attention.layout import Layout
from anyformer.decoding.beam_search import beam_search
from anyformer.decoding.contrastive import contrastive_search
from anyformer.decoding.generate import generate, stream
from anyformer.decoding.speculative import speculate
from anyformer.decoding.strategy import Draft
from anyformer.inspection.ablation import run_without_heads
from anyformer.inspection.attention_maps import attention_maps
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])
SEGMENTS = torch.where(MASK, 0, -1)


def decoder() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.gpt2(depth=1, width=16, heads=2, vocab=11, length=32)).eval()


def encoder() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.bert(depth=1, width=16, heads=2, vocab=11, length=32)).eval()


def pair() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.bart(depth=1, width=16, heads=2, vocab=11, length=32)).eval()


def remember(segments: Tensor) -> Tensor:
    model = decoder()
    return model(IDS, segments=segments, cache=model.new_cache(2, 8))


ENTRIES: dict[str, Callable[[Tensor], object]] = {
    "decoder": lambda x: decoder()(IDS, segments=x),
    "encoder": lambda x: encoder()(IDS, segments=x),
    "source": lambda x: pair()(IDS, IDS, source_segments=x),
    "target": lambda x: pair()(IDS, IDS, target_segments=x),
    "encode": lambda x: encoder().encode(IDS, segments=x),
    "decode": lambda x: decoder().decode(IDS, segments=x),
    "memory": lambda x: pair().decode(IDS, pair().encode(IDS), source=x),
    "layout": lambda x: decoder()(Inputs(IDS, Layout.right_padded(x))),
    "cache": remember,
    "generate": lambda x: generate(decoder(), IDS, segments=x, max_new_tokens=2),
    "answer": lambda x: generate(pair(), IDS, segments=x, max_new_tokens=2),
    "stream": lambda x: list(stream(decoder(), IDS, segments=x, max_new_tokens=2)),
    "beams": lambda x: beam_search(decoder(), IDS, segments=x, max_new_tokens=2),
    "contrastive": lambda x: contrastive_search(decoder(), IDS, segments=x, max_new_tokens=2),
    "speculative": lambda x: speculate(decoder(), IDS, draft=Draft(decoder()), segments=x, max_new_tokens=2),
    "maps": lambda x: attention_maps(decoder(), IDS, segments=x),
    "without heads": lambda x: run_without_heads(decoder(), {"decoder.0.mixer": [0]}, IDS, segments=x),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_a_mask_is_refused(entry: str, dtype: torch.dtype):
    ENTRIES[entry](SEGMENTS)
    with pytest.raises(ValueError, match=r"segments .*document.*-1 for padding.*torch\.where\(mask, 0, -1\)"):
        ENTRIES[entry](MASK.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
def test_whole_numbers_of_any_width(dtype: torch.dtype):
    model, marks = decoder(), torch.tensor([[1, 1, 0, 0]]).expand(2, -1)
    for facts in ({"segments": SEGMENTS}, {"marks": marks}, {"segments": SEGMENTS, "marks": marks}):
        narrow = {name: x.to(dtype) for name, x in facts.items()}
        assert torch.equal(model(IDS, **narrow), model(IDS, **facts))
        options = {"max_new_tokens": 3}
        assert torch.equal(generate(model, IDS, **narrow, **options), generate(model, IDS, **facts, **options))


def test_positions_are_no_mask():
    with pytest.raises(ValueError, match="positions must be integers"):
        decoder()(IDS, positions=MASK)


def test_marks_may_be_a_mask():
    """Every token of a prompt sees the marked ones."""
    model = decoder()
    assert torch.equal(model(IDS, marks=MASK), model(IDS, marks=MASK.long()))
    assert torch.equal(generate(model, IDS, marks=MASK), generate(model, IDS, marks=MASK.long()))


def test_the_check_stays_out_of_compiled_graphs():
    model = decoder()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS, segments=SEGMENTS), model(IDS, segments=SEGMENTS))
