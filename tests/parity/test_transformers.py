"""Logits and greedy ids equal to those of `transformers`, for every family that both have, with the same weights.

Rows are ragged, and real tokens alone are compared. `families.py` has the families.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.attend import Backend
from anyformer.attention.position_module import Positions
from anyformer.config import BigBird, Graph, NoPosition, Pattern, Rotary, Window
from anyformer.generation.generate import generate
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.experts import SoftmaxRouter
from anyformer.nn.feedforward import GatedFFN, PlainFFN
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.model import Transformer
from anyformer.nn.norm import RootMeanSquare
from tests.parity.families import FAMILIES, PAD, POOLED, VOCAB, Family, built, norms
from tests.parity.names import DEPTH
from tests.ragged import Ragged, ragged as rows

TOLERANCE = 1e-5  # of logits of about 1; the promise is 1e-4
VISIBLE = 5e-5  # what a mistake must exceed

ragged = partial(rows, first=3, vocab=VOCAB, pad=PAD)

# -- comparing ------------------------------------------------------------------------------------------------------


def run_theirs(family: Family, theirs: hf.PreTrainedModel, batch: Ragged, **more: Any) -> Any:
    numbers = {"position_ids": batch.positions} if family.numbers else {}
    caches = {"use_cache": False} if family.config.decoder else {}
    return theirs(batch.ids, attention_mask=batch.mask, **numbers, **caches, **more)


@torch.no_grad()
def difference(
    name: str,
    side: str,
    *,
    lengths: tuple[int, ...] = (44, 40, 17),
    backend: Backend = "auto",
    change: Callable[[Transformer], object] | None = None,
    masked: bool = False,
) -> float:
    """The largest between our logits and theirs at a real token; `change` spoils a copy of ours first.

    `masked`: ours has the mask that theirs has, in place of segments.
    """

    def padding(batch: Ragged, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}attention_mask": batch.mask} if masked else {f"{prefix}segments": batch.segments}

    family, (ours, theirs) = FAMILIES[name], built(name)
    if change:
        change(ours := copy.deepcopy(ours))
    ours.backend = backend
    batch = read = ragged(*lengths, side=side)
    if family.config.shape == "encoder-decoder":
        read = ragged(*reversed(lengths), side=side, seed=1)
        expected = run_theirs(family, theirs, batch, decoder_input_ids=read.ids, decoder_attention_mask=read.mask)
        found = ours(batch.ids, read.ids, **padding(batch, "source_"), **padding(read, "target_"))
    elif name in ("bert", "bigbird"):
        types = batch.ids % 2
        expected = run_theirs(family, theirs, batch, token_type_ids=types)
        found = ours(batch.ids, **padding(batch), types=types)
    else:
        expected = run_theirs(family, theirs, batch)
        found = ours(batch.ids, **padding(batch))
    assert found.shape == expected.logits.shape
    return furthest(found, expected.logits, read.real)


def furthest(ours: Tensor, theirs: Tensor, real: Tensor) -> float:
    return float((ours - theirs)[real].abs().max())


PADDED = [
    (name, side) for name, family in FAMILIES.items() for side in ("right", "left") if family.left or side == "right"
]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "side"), PADDED)
def test_logits(family: str, side: str, backend: Backend) -> None:
    assert difference(family, side, backend=backend) <= TOLERANCE


@pytest.mark.parametrize(("family", "side"), [case for case in PADDED if case[0] in ("gpt2", "bert", "llama", "t5")])
def test_logits_by_a_mask(family: str, side: str) -> None:
    assert difference(family, side, masked=True) <= TOLERANCE


@pytest.mark.parametrize("side", ["right", "left"])
def test_t5_past_the_last_bucket(side: str) -> None:
    assert difference("t5", side, lengths=(170, 140, 41)) <= TOLERANCE


@torch.no_grad()
def test_bigbird_sees_what_its_pattern_says() -> None:
    """Theirs draws other random blocks, so it is equal as long as all blocks are neighbours; beyond that, ours is what
    a dense model is that sees the same pairs."""
    (dense, theirs), pattern = built("bigbird"), BigBird(ahead=True, block=4, globals=1, randoms=1)

    def seeing(pattern: Pattern) -> Transformer:
        stack = dense.config.encoder
        block = stack.blocks[0].model_copy(
            update={"mixer": stack.blocks[0].mixer.model_copy(update={"pattern": pattern})}
        )
        changed = stack.model_copy(update={"blocks": (block,)})
        model = Transformer(dense.config.model_copy(update={"encoder": changed})).eval()
        model.load_state_dict(dense.state_dict())
        return model

    sparse, short, long = seeing(pattern), ragged(8, 7, 3, side="right"), ragged(44, 40, 17, side="right")
    expected = run_theirs(FAMILIES["bigbird"], theirs, short).logits
    assert furthest(sparse(short.ids, segments=short.segments), expected, short.real) <= TOLERANCE
    place = torch.arange(44)
    pairs = pattern.sees(place[:, None], place[None, :]).nonzero().tolist()
    graph = seeing(Graph(ahead=True, nodes=44, edges=tuple(map(tuple, pairs))))
    found = sparse(long.ids, segments=long.segments)
    assert furthest(found, graph(long.ids, segments=long.segments), long.real) <= TOLERANCE
    assert furthest(found, dense(long.ids, segments=long.segments), long.real) > VISIBLE


@pytest.mark.parametrize("family", POOLED)
@torch.no_grad()
def test_hidden_states_and_pooler(family: str) -> None:
    (ours, theirs), batch = built(family, pooled=True), ragged(44, 40, 17, side="right")
    types = torch.zeros_like(batch.ids) if family == "roberta" else batch.ids % 2
    expected = run_theirs(POOLED[family], theirs, batch, token_type_ids=types)
    hidden = ours.encode(batch.ids, segments=batch.segments, types=types)
    pooled = ours(batch.ids, segments=batch.segments, types=types)
    assert furthest(hidden, expected.last_hidden_state, batch.real) <= TOLERANCE
    assert float((pooled - expected.pooler_output).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_has_their_eps(family: str) -> None:
    """Deep in a model a wrong eps drowns in the size of what is normed, so it is also read off."""
    ours, theirs = built(family)
    found = {name: theirs.get_submodule(part) for name, part in norms(FAMILIES[family], theirs).items()}
    assert len(found) >= 2 * DEPTH
    for name, norm in found.items():
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        assert ours.get_submodule(name).eps == eps, name


# -- and none of this is blind --------------------------------------------------------------------------------------


def forget_positions(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, Positions):
            module.scheme = NoPosition()


def forget_scaling(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, Positions) and isinstance(module.scheme, Rotary):
            module.scheme = Rotary()


def mistake_eps(model: Transformer) -> None:
    """The other of the two usual ones."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, RootMeanSquare)):
            module.eps = 1e-6 if module.eps == 1e-5 else 1e-5


def mistake_gelu(model: Transformer) -> None:
    """The exact one for its approximation, and the other way round."""
    for module in model.modules():
        if isinstance(module, GatedFFN):
            module.act = partial(module.act, act=_other_gelu(module.act.keywords["act"]))
        elif isinstance(module, PlainFFN):
            module.act = _other_gelu(module.act)


def _other_gelu(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    if not isinstance(act, partial):
        return act
    return partial(F.gelu, approximate="none" if act.keywords["approximate"] == "tanh" else "tanh")


def forget_scale(model: Transformer) -> None:
    """1/sqrt(k) for 1, and 1 for 1/sqrt(k)."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.scale = 1.0 if module.scale != 1 else 0.5


def widen_window(model: Transformer) -> None:
    """By one key."""
    stack = model.decoder or model.encoder
    assert stack is not None
    windows = [plan for plan in stack.plans if isinstance(plan.pattern, Window)]
    assert windows
    wider = {plan: Window(before=plan.pattern.before + 1, after=plan.pattern.after) for plan in windows}
    stack.plans = tuple(plan._replace(pattern=wider.get(plan, plan.pattern)) for plan in stack.plans)


def mistake_theta(model: Transformer) -> None:
    """The far layers' for the near ones, too."""
    stack = model.decoder or model.encoder
    assert stack is not None
    schemes = [module for module in stack.schemes if isinstance(module, Positions)]
    assert len({module.scheme for module in schemes}) == 2
    for module in schemes:
        module.scheme = schemes[0].scheme


def forget_caps(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.cap = None


def forget_logit_cap(model: Transformer) -> None:
    assert isinstance(model.head, VocabularyHead)
    model.head.cap = None


def mistake_router(model: Transformer) -> None:
    """Weights that sum to 1 for such that do not, and the other way round."""
    for module in model.modules():
        if isinstance(module, SoftmaxRouter):
            module.normalize = not module.normalize


GELU = ("gpt1", "gpt2", "gpt3", "bert", "roberta", "bigbird", "modernbert", "bart", "gemma", "gemma2", "gemma3")
GELU += ("neox", "bloom")
MISTAKES = [
    *((name, change) for name in FAMILIES for change in (forget_positions, mistake_eps, forget_scale)),
    *((name, mistake_gelu) for name in GELU),
    *((name, forget_scaling) for name in FAMILIES if name.startswith("llama-")),
    *((name, widen_window) for name in ("mistral", "gpt3", "gemma2", "gemma3", "modernbert")),
    *((name, mistake_theta) for name in ("gemma3", "modernbert")),
    *((name, mistake_router) for name in ("mixtral", "deepseek")),
    ("gemma2", forget_caps),
    ("gemma2", forget_logit_cap),
]


@pytest.mark.parametrize(("family", "change"), [pytest.param(*m, id=f"{m[0]}-{m[1].__name__}") for m in MISTAKES])
def test_a_mistake_is_seen(family: str, change: Callable[[Transformer], None]) -> None:
    assert difference(family, "right", change=change) > VISIBLE


# -- greedy decoding ------------------------------------------------------------------------------------------------


@torch.no_grad()
def continued(family: Family, theirs: hf.PreTrainedModel, batch: Ragged, new: int) -> Tensor:
    """The likeliest tokens after left-padded prompts, one forward pass for each: no cache of theirs is trusted."""
    for _ in range(new):
        batch = batch.extended(run_theirs(family, theirs, batch).logits[:, -1:].argmax(-1))
    return batch.ids[:, -new:]


@torch.no_grad()
def answered(family: Family, theirs: hf.PreTrainedModel, batch: Ragged, new: int) -> Tensor:
    """The same of an encoder–decoder, from its start id."""
    ids = torch.full((len(batch.ids), 1), theirs.config.decoder_start_token_id)
    for _ in range(new):
        ids = torch.cat((ids, run_theirs(family, theirs, batch, decoder_input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.config.shape == "decoder"])
def test_greedy_continuation(family: str, side: str) -> None:
    ours, theirs = built(family)
    expected = continued(FAMILIES[family], theirs, ragged(24, 20, 7, side="left"), new=8)
    prompt = ragged(24, 20, 7, side=side)
    found = generate(ours, prompt.ids, segments=prompt.segments, max_new_tokens=8)[:, -8:]
    assert expected.unique().numel() > 2
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("family", "side"), [(f, s) for f, s in PADDED if f in ("t5", "bart")])
def test_greedy_answer(family: str, side: str) -> None:
    (ours, theirs), source = built(family), ragged(44, 40, 17, side=side)
    expected = answered(FAMILIES[family], theirs, source, new=8)
    assert expected.unique().numel() > 2
    assert torch.equal(generate(ours, source.ids, attention_mask=source.mask, max_new_tokens=8), expected)
