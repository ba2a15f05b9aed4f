"""Segments are document numbers: masks given as segments are refused at every entry, and `attention_mask` takes them.

Whole numbers of any width mean the same.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer import presets
from anyformer.attention.layout import Layout, check_values
from anyformer.config import Embedder
from anyformer.generation.beam_search import beam_search
from anyformer.generation.contrastive import contrastive_search
from anyformer.generation.generate import generate, stream
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Draft, Lookup
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.ablation import run_without_heads
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.model import Transformer

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])
SEGMENTS = torch.where(MASK, 0, -1)


@cache
def decoder() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.gpt2(depth=1, width=16, heads=2, vocab=11, length=32)).eval()


@cache
def encoder() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.bert(depth=1, width=16, heads=2, vocab=11, length=32)).eval()


@cache
def pair() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.bart(depth=1, width=16, heads=2, vocab=11, length=32)).eval()


@cache
def recurrent() -> Transformer:
    """A decoder with segment memory."""
    torch.manual_seed(0)
    config = presets.llama(depth=1, width=16, heads=2, vocab=11)
    return Transformer(config.model_copy(update={"decoder": config.decoder.model_copy(update={"memory": 4})})).eval()


# the functions that take the segments of IDS by keyword, with the prefix of those
ENTRIES: dict[str, tuple[str, Callable[..., object]]] = {
    "decoder": ("", lambda **x: decoder()(IDS, **x)),
    "encoder": ("", lambda **x: encoder()(IDS, **x)),
    "source": ("source_", lambda **x: pair()(IDS, IDS, **x)),
    "target": ("target_", lambda **x: pair()(IDS, IDS, **x)),
    "encode": ("", lambda **x: encoder().encode(IDS, **x)),
    "decode": ("", lambda **x: decoder().decode(IDS, **x)),
    "cache": ("", lambda **x: (model := decoder())(IDS, cache=model.new_cache(2, 8), **x)),
    "past": ("", lambda **x: (model := recurrent())(IDS, past=model.new_past(2), **x)),
    "generate": ("", lambda **x: generate(decoder(), IDS, max_new_tokens=2, **x)),
    "answer": ("", lambda **x: generate(pair(), IDS, max_new_tokens=2, **x)),
    "stream": ("", lambda **x: list(stream(decoder(), IDS, max_new_tokens=2, **x))),
    "beams": ("", lambda **x: beam_search(decoder(), IDS, max_new_tokens=2, **x)),
    "contrastive": ("", lambda **x: contrastive_search(decoder(), IDS, max_new_tokens=2, **x)),
    "speculative": ("", lambda **x: speculate(decoder(), IDS, draft=Draft(decoder()), max_new_tokens=2, **x)),
    "lookup": ("", lambda **x: speculate(pair(), IDS, draft=Lookup(ngram=1), max_new_tokens=2, **x)),
    "maps": ("", lambda **x: attention_maps(decoder(), IDS, **x)),
    "without heads": ("", lambda **x: run_without_heads(decoder(), {"decoder.0.mixer": [0]}, IDS, **x)),
}
OTHERS: dict[str, Callable[[Tensor], object]] = {
    "memory": lambda x: pair().decode(IDS, pair().encode(IDS), source=x),
    "layout": lambda x: decoder()(Inputs(IDS, Layout.right_padded(x))),
}


# a layout made by the caller says what is padded: its values are not read
MASKS = [(entry, dtype) for entry in ENTRIES | OTHERS for dtype in (torch.bool, torch.uint8, torch.int64)]


@pytest.mark.parametrize(("entry", "dtype"), [case for case in MASKS if case != ("layout", torch.int64)])
def test_a_mask_is_refused_as_segments(entry: str, dtype: torch.dtype):
    prefix, function = ENTRIES[entry] if entry in ENTRIES else ("", lambda segments: OTHERS[entry](segments))
    function(**{f"{prefix}segments": SEGMENTS})
    with pytest.raises(ValueError, match=r"segments .*document.*-1 for padding.*torch\.where\(mask == 1, 0, -1\)"):
        function(**{f"{prefix}segments": MASK.to(dtype)})


def leaves(x: object) -> list[Tensor]:
    """Return the tensors in a result."""
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else ()
    return [tensor for value in values for tensor in leaves(value)]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_a_mask_means_segments(entry: str, dtype: torch.dtype):
    """On either side and in between; both at once are refused, and a mask of another shape or with other values."""
    prefix, function = ENTRIES[entry]
    for real in (MASK, MASK.flip(1), torch.tensor([[True] * 4, [True, False, True, True]])):
        segments = {f"{prefix}segments": torch.where(real, 0, -1)}
        mask = {f"{prefix}attention_mask": real.to(dtype)}
        expected, found = leaves(function(**segments)), leaves(function(**mask))
        assert expected
        assert all(map(torch.equal, expected, found))
        with pytest.raises(ValueError, match="attention_mask and segments both"):
            function(**segments, **mask)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\]"):
        function(**{f"{prefix}attention_mask": MASK[:, 1:].to(dtype)})
    with pytest.raises(ValueError, match="attention_mask has a -1: give 1 at real tokens, 0 at padding"):
        function(**{f"{prefix}attention_mask": SEGMENTS})
    with pytest.raises(ValueError, match=r"attention_mask must be integers, got torch\.float32"):
        function(**{f"{prefix}attention_mask": MASK.float()})


@given(
    documents=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4), pads=st.booleans()
)
def test_documents_in_order_are_segments(documents: list[list[int]], pads: bool):
    """Numbered from 0 in each row, whatever their lengths; alone or with padding on the right."""
    rows = [[i for i, length in enumerate(row) for _ in range(length)] for row in documents]
    width = max(map(len, rows)) + pads
    rows = [row + [-1] * (width - len(row)) if pads else row + row[-1:] * (width - len(row)) for row in rows]
    check_values(torch.tensor(rows), None)


@given(lengths=st.sets(st.integers(1, 5), min_size=2), left=st.booleans())
def test_a_mask_of_rows_up_to_the_longest_is_refused(lengths: set[int], left: bool):
    mask = (torch.arange(max(lengths)) < torch.tensor([*lengths])[:, None]).long()
    with pytest.raises(ValueError, match="as in a mask of the real tokens"):
        check_values(mask.flip(1) if left else mask, None)


def test_a_mask_with_a_cache_continues_the_newest_segment():
    model, ids = decoder(), torch.cat((IDS, IDS.flip(1)), dim=1)
    first, rest = torch.tensor([[0, 0, 1, 1]] * 2), torch.where(MASK, 1, -1)
    expected = model(ids, segments=torch.cat((first, rest), dim=1))[:, 4:]
    model(IDS, segments=first, cache=(stored := model.new_cache(2, 8)))
    torch.testing.assert_close(model(IDS.flip(1), attention_mask=MASK, cache=stored)[MASK], expected[MASK])


def test_a_pooled_vector_of_a_padded_row_is_that_of_the_row_alone():
    torch.manual_seed(0)
    config = presets.bert(depth=1, width=16, heads=2, vocab=11, length=32)
    model = Transformer(config.model_copy(update={"head": Embedder(pool="mean")})).eval()
    row, mask = IDS[1:, :3], MASK.long()
    torch.testing.assert_close(model(IDS, attention_mask=mask)[1:], model(row))


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
