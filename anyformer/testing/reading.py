"""Laws of what tokens read: the tokens of their text before them, in one pass or in parts. See `laws.py`."""

import warnings
from itertools import pairwise

import torch
from torch import Tensor

from anyformer.config import ConfigError, ModelConfig, io
from anyformer.generation.generate import generate
from anyformer.kernels.conventions import Note
from anyformer.nn.model import Transformer
from anyformer.testing.subject import LENGTH, ROWS, VOCAB, Subject, built, close, random_ids

NO_DECODER = "no decoder with it writes alone"


# -- what tokens read -------------------------------------------------------------------------------------------------


@torch.no_grad()
def rows_are_apart(subject: Subject) -> None:
    """A row gives the same, whatever the others are."""
    for row in range(ROWS):
        alone = subject.model(subject.ids[row : row + 1])
        close(alone, subject.out[row : row + 1], "a row alone gives something else than among others")


@torch.no_grad()
def is_causal(subject: Subject) -> str | None:
    """No token reads a later one."""
    if not subject.reads_back:
        return "it reads later tokens"
    for at in range(1, LENGTH):
        other = subject.ids.clone()
        other[:, at:] = (other[:, at:] + 1) % VOCAB
        close(subject.model(other)[:, :at], subject.out[:, :at], f"a token before {at} reads token {at} or a later one")
    return None


@torch.no_grad()
def padding_is_ignored(subject: Subject) -> None:
    """Padding on either side changes nothing."""
    for left, right in ((0, 3), (2, 0), (1, 2)):
        padded = torch.cat((random_ids(1, ROWS, left), subject.ids, random_ids(2, ROWS, right)), dim=1)
        segments = torch.tensor([[-1] * left + [0] * LENGTH + [-1] * right] * ROWS)
        out = subject.model(padded, segments=segments)[:, left : left + LENGTH]
        close(out, subject.out, f"padding {'before' if left else 'after'} a text changes its output")


@torch.no_grad()
def packing_is_ignored(subject: Subject) -> None:
    """Texts packed into a row give what each gives alone."""
    cut = 4
    packed = torch.cat((subject.ids[:1], subject.ids[1:2, :cut], subject.ids[2:3]), dim=1)
    segments = torch.tensor([[0] * LENGTH + [1] * cut + [2] * LENGTH])
    out = subject.model(packed, segments=segments)
    close(out[:, :LENGTH], subject.out[:1], "the first text of a row reads those after it")
    close(out[:, -LENGTH:], subject.out[2:], "a text reads those before it in the row")
    close(out[:, LENGTH:-LENGTH], subject.model(subject.ids[1:2, :cut]), "a text reads those beside it in the row")


# -- reading in parts -------------------------------------------------------------------------------------------------


@torch.no_grad()
def cached_is_uncached(subject: Subject) -> str | None:
    """Read into a cache in chunks of any length, a text gives the same; also after padding, a reset and a reorder."""
    if not subject.generates:
        return NO_DECODER
    model, ids = subject.model, subject.ids
    whole = model.decode(ids)
    for kind in ("auto", "static"):
        cache = model.new_cache(ROWS, LENGTH + 3, kind=kind)
        for borders in ((0, 4, 5, 6, 9), (0, 1, 3, 9), tuple(range(10))):
            outs = [model.decode(ids[:, a:b], cache=cache) for a, b in pairwise(borders)]
            close(torch.cat(outs, dim=1), whole, "in a cache, chunks give something else than the whole text")
            cache.reset()
    _check_padded_prompts(model, ids)
    cache = model.new_cache(ROWS, LENGTH)
    model.decode(ids[:, :5], cache=cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder(order)
    close(
        model.decode(ids[order, 5:], cache=cache),
        whole[order, 5:],
        "a cache with its rows reordered gives something else",
    )
    return None


def _check_padded_prompts(model: Transformer, ids: Tensor) -> None:
    """Check prompts of unequal length, padded on the left or the right, and the tokens after them."""
    for segments in ([-1, -1, 0, 0], [0, 0, -1, -1]):
        cache, real = model.new_cache(ROWS, LENGTH), torch.tensor(segments) == 0
        prompt = torch.where(real, ids[:, :2].repeat(1, 2), 1)
        first = model.decode(prompt, segments=torch.tensor([segments] * ROWS), cache=cache)[:, real]
        outs = [first, *(model.decode(ids[:, i : i + 1], cache=cache) for i in range(2, 6))]
        expected = model.decode(ids[:, :6])
        close(torch.cat(outs, dim=1), expected, "in a cache, the padding of a prompt changes later tokens")


@torch.no_grad()
def generates(subject: Subject) -> str | None:
    """Greedy generation gives the argmax of the whole text, token for token."""
    if not subject.generates:
        return NO_DECODER
    ids = subject.ids[:, :3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # of a mixer that stores nothing
        found = generate(subject.model, ids, max_new_tokens=5)
    expected = ids
    for _ in range(5):
        expected = torch.cat((expected, subject.model(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, expected), "generated tokens are not the most probable ones of the whole text"
    return None


@torch.no_grad()
def segment_memory_is_whole(subject: Subject) -> str | None:
    """Read in segments that remember earlier ones, a text gives the same."""
    data = subject.config.model_dump()
    if not subject.generates:
        return NO_DECODER
    data["decoder"]["memory"] = LENGTH
    try:
        reader = Transformer(io.build(ModelConfig, data)).double().eval()
    except ConfigError:
        return "it has no segment memory"
    reader.load_state_dict(subject.model.state_dict())
    past, outs = reader.new_past(ROWS), []
    for part in subject.ids.split((4, 3, 2), dim=1):
        out, past = reader(part, past=past)
        outs.append(out)
    close(torch.cat(outs, dim=1), subject.out, "in segments, a text gives something else than the whole")
    return None


def is_compiled(subject: Subject) -> None:
    """The compiler traces a pass without a graph break."""
    stack = subject.stack.model_copy(update={"depth": 1})
    config = subject.config.model_copy(update={subject.side: stack})
    model, ids = built(config), subject.ids
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    segments = (torch.arange(LENGTH) // 5).expand_as(ids)
    options = {"segments": segments} if subject.is_sequence else {}
    with torch.no_grad():
        close(compiled(ids, **options), model(ids, **options), "compiled, it gives something else")
