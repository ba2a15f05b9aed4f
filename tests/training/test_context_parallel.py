"""Processes that hold parts of the same rows compute what one process does. Each of them runs `main` once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed as dist
from torch.nn import functional as F

from anyformer.attention.flex import find_blocks
from anyformer.attention.layout import Layout, sees
from anyformer.attention.media_batch import MediaBatch
from anyformer.config import (
    LM,
    Attention,
    AxialRotary,
    BatchNorm,
    BigBird,
    Block,
    Causal,
    Classifier,
    Convolution,
    Experts,
    Full,
    FullyConnected,
    Gated,
    ImageSegment,
    Latent,
    MaskedLM,
    Media,
    Mixer,
    ModelConfig,
    NoPosition,
    Pattern,
    Plain,
    PositionMixing,
    RMSNorm,
    Rotary,
    SigmoidTopK,
    SoftmaxTopK,
    Stack,
    TokenLabels,
    Tokens,
    Window,
)
from anyformer.data.batch import Batch
from anyformer.data.tokenizer import train_tokenizer
from anyformer.kernels.conventions import IGNORE, PADDING
from anyformer.nn.aux_outputs import AuxOutputs, identity
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.memory import training_memory
from anyformer.nn.model import Transformer
from anyformer.recipe import Bytes, LanguageModel
from anyformer.tasks import crf
from anyformer.tasks.base import token_loss
from anyformer.training.objective import Objective
from anyformer.training.parallel import join, sum_over_processes
from anyformer.training.ranks.context import ContextGroup, OwnPart
from tests.inspection.test_memory import B, T, V, small
from tests.strategies import ACROSS, ANCHORED, ANCHORED_BOTH_WAYS, BACKWARD, BOTH_WAYS, LENGTH, POSITIONS
from tests.training.two_processes import ends, spawn

WIDTH, VOCAB, ROWS, SOURCE = 16, 13, 3, 18
COUNTS = (2, 4)
SAVING = ("gpt2", "vaswani", "bert", "llama")
TOKENS = Tokens(vocab=VOCAB)


class Case(NamedTuple):
    config: ModelConfig
    batch: Batch
    packed: bool = False
    recompute: bool = False


class RowTask:
    """Losses of whole rows: their labels, or those of a CRF."""

    dense_loss = False

    @staticmethod
    def loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        if logits.dim() == 4:
            return crf.loss(logits, labels, labels != IGNORE)
        if logits.dim() == 3:
            return token_loss(logits, labels)
        return F.cross_entropy(logits, labels[:, 0], ignore_index=IGNORE, reduction="sum")


# -- cases ------------------------------------------------------------------------------------------------------------


def blocks(mixer: Mixer, cross: Attention | None = None, **more: Any) -> tuple[Block, ...]:
    return (Block(mixer=mixer, cross=cross, **({"feedforward": Plain(width=24)} | more)),)


def decoder(mixer: Mixer | None = None, head: Any = None, tie: Any = "output", **stack: Any) -> ModelConfig:
    inner = {name: stack.pop(name) for name in ("feedforward", "norm", "order") if name in stack}
    made = Stack(depth=2, blocks=blocks(mixer or Attention(heads=2), **inner), **stack)
    return ModelConfig(width=WIDTH, target=TOKENS, decoder=made, head=head or LM(), tie=tie)


def encoder(mixer: Mixer | None = None, head: Any = None, **stack: Any) -> ModelConfig:
    made = Stack(depth=2, blocks=blocks(mixer or Attention(heads=2)), **stack)
    return ModelConfig(width=WIDTH, source=TOKENS, encoder=made, head=head or MaskedLM())


def pair(mixer: Attention | None = None, cross: Attention | None = None, **stack: Any) -> ModelConfig:
    mixer = mixer or Attention(heads=2)
    return ModelConfig(
        width=WIDTH,
        source=TOKENS,
        target=TOKENS,
        encoder=Stack(depth=2, blocks=blocks(mixer), **stack),
        decoder=Stack(depth=2, blocks=blocks(mixer, cross or Attention(heads=2)), **stack),
        head=LM(),
        tie="all",
    )


def segments(how: str, length: int) -> Tensor | None:
    """Return one text per row, with padding in two of them, or several texts per row."""
    made = torch.zeros(ROWS, length, dtype=torch.long)
    if how == "full":
        return None
    if how == "packed":
        made[0, length // 3 :], made[0, length // 2 :], made[1, length // 4 :] = 1, 2, 1
    made[1, length - 3 :] = PADDING
    made[2, 5:] = PADDING
    return made


def batch(how: str, length: int = LENGTH, source: int | None = None, **more: Any) -> Batch:
    ids, labels = torch.randint(VOCAB, (2, ROWS, length))
    of_ids = segments(how, length)
    if of_ids is not None:
        labels = labels.masked_fill(of_ids == PADDING, IGNORE)
    read = None if source is None else torch.randint(VOCAB, (ROWS, source))
    of_source = None if source is None else segments(how, source)
    return Batch(ids, labels, of_ids, read, of_source, documents=8, **more)


def cases() -> Iterator[tuple[str, Case]]:
    for scheme in POSITIONS:
        yield f"decoder, {scheme}", Case(decoder(position=scheme), batch("packed"), packed=True)
        yield f"encoder, {scheme}", Case(encoder(position=scheme), batch("padded", LENGTH - 1))
        yield f"pair, {scheme}", Case(pair(position=scheme), batch("packed", source=SOURCE), packed=True)
    for pattern in (*BACKWARD, *ANCHORED):
        seen = Attention(heads=2, pattern=pattern)
        yield f"decoder, {pattern.kind} {pattern}"[:90], Case(decoder(seen, position=Rotary()), batch("padded"))
    for pattern in (*BOTH_WAYS, *ANCHORED_BOTH_WAYS):
        seen = Attention(heads=2, pattern=pattern)
        yield f"encoder, {pattern.kind} {pattern}"[:90], Case(encoder(seen), batch("packed"), packed=True)
    for pattern in ACROSS:
        seen = Attention(heads=2, pattern=pattern)
        yield f"across {pattern}", Case(pair(cross=seen), batch("padded", source=SOURCE))
    yield "full rows", Case(decoder(position=Rotary()), batch("full"))
    yield "few labels", Case(encoder(), few_labels(batch("full")))
    yield "prefixes", Case(decoder(), batch("packed", marks=prefixes()), packed=True)
    yield "recomputed", Case(decoder(position=Rotary()), batch("full"), recompute=True)
    yield "recomputed pair", Case(pair(), batch("padded", source=SOURCE), recompute=True)
    for name, mixer in mixers().items():
        scheme = Rotary() if isinstance(mixer, Attention) else NoPosition()
        yield name, Case(decoder(mixer, position=scheme), batch("packed"), packed=True)
    yield from pictures()
    network = Gated(width=8)
    routers = {"softmax": SoftmaxTopK(), "sigmoid": SigmoidTopK(rate=0.1)}
    for name, router in routers.items():
        experts = Experts(count=4, top_k=2, expert=network, router=router, balance=0.5)
        yield f"experts, {name}", Case(decoder(feedforward=experts), batch("packed"), packed=True)
    yield "batch norm", Case(decoder(norm=BatchNorm()), batch("padded"))
    for how in ("first", "last", "mean", "max"):
        labels = torch.randint(3, (ROWS, 1))
        head = Classifier(labels=3, pool=how)
        yield f"pooled, {how}", Case(encoder(head=head), batch("padded", LENGTH - 2)._replace(labels=labels))
    tags = batch("padded", LENGTH - 2)
    tags = tags._replace(labels=tags.labels.where(tags.labels == IGNORE, tags.labels % 3))
    yield "tags", Case(encoder(head=TokenLabels(labels=3)), tags)
    yield "CRF", Case(encoder(head=TokenLabels(labels=3, crf=True)), tags)


def pictures() -> Iterator[tuple[str, Case]]:
    """Patches that see each other, cut in two by the end of a chunk."""
    media, at = Media(image=ImageSegment(image_height=8, patch=4, channels=1)), torch.full((ROWS, LENGTH), -1)
    at[0, 4:8], at[2, 1:5] = torch.arange(4), torch.arange(4, 8)
    segment, marks = MediaBatch(torch.randn(2, 1, 8, 8), at), -(at >= 0).long()
    tokens, read = Tokens(vocab=VOCAB, media=media), batch("full", LENGTH - 3)
    cut = segment._replace(image_at=at[:, : LENGTH - 3])
    one = decoder(position=AxialRotary()).model_copy(update={"target": tokens})
    yield "pictures", Case(one, read._replace(media=cut, marks=marks[:, : LENGTH - 3]))
    two = pair().model_copy(update={"source": tokens, "tie": "none"})
    yield "pictures in the source", Case(two, batch("full", source=LENGTH, media=segment))


def few_labels(full: Batch) -> Batch:
    return full._replace(labels=full.labels.masked_fill(torch.rand(full.labels.shape) < 0.8, IGNORE))


def prefixes() -> Tensor:
    marks = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    marks[:, :4] = 1
    return marks


def mixers() -> dict[str, Mixer]:
    return {
        "grouped heads": Attention(heads=4, kv_heads=2, qk_norm=RMSNorm()),
        "latent": Attention(heads=2, key_width=8, value_width=8, compress=Latent(rank=6, rotary_width=4)),
        "sinks, cap": Attention(heads=2, sinks=True, cap=5.0),
        "relu": Attention(heads=2, normalizer="relu"),
        "shared": Attention(heads=2, projections="shared_qkv"),
        "convolution": Convolution(width=3, dilation=2),
        "weights by position": PositionMixing(length=LENGTH),
        "dense": FullyConnected(length=LENGTH),
    }


# -- what each process does -------------------------------------------------------------------------------------------


def learn(case: Case, context: ContextGroup | None) -> dict[str, Tensor]:
    """Return the loss per token, all gradients and updated buffers, summed over the processes of a group."""
    torch.manual_seed(1)
    model = Transformer(case.config).train()
    own = isinstance(case.config.head, LM | MaskedLM)
    task: Any = LanguageModel().build(train_tokenizer(Bytes(), [])) if own else RowTask()
    reduce = identity if context is None else sum_over_processes
    objective = Objective(model, task, 0.0, case.recompute, reduce, context)
    with torch.no_grad():
        for p in model.parameters():  # no zeros, and no ones
            p.add_(0.1 * torch.randn_like(p))
    count = case.batch.target_count
    arguments = objective.arguments(objective.select_labels(case.batch), case.packed)
    loss, auxiliary, _ = objective(*arguments, None)
    (loss / count + auxiliary).backward()
    model.commit()
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    found["loss"] = torch.stack([loss.detach() / count, auxiliary.detach()])
    if context is not None:
        for x in found.values():
            dist.all_reduce(x)
    return found | dict(model.named_buffers())


def main(folder: Path, size: int) -> None:
    with join(()) as ranks:
        context, errors = ContextGroup(ranks.rank, size), dict[str, float]()
        torch.manual_seed(0)
        for name, case in cases():
            one, parts = learn(case, None), learn(case, context)
            assert one.keys() == parts.keys()
            errors[name] = max(float((one[key] - parts[key]).abs().max()) for key in one)
        found = {"errors": errors, "saved": {name: saved(name, context) for name in SAVING}}
        (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def saved(name: str, context: ContextGroup) -> int:
    """Return the bytes that autograd saves for rows whose length grows with the number of processes."""
    model, sizes = Transformer(small(name, 0.0)).train(), dict[int, int]()
    weights = {p.data_ptr() for p in model.parameters()}
    ids = torch.randint(2, V, (B, T * context.size))
    sides = 2 if model.config.shape == "encoder-decoder" else 1
    hooks = torch.autograd.graph.saved_tensors_hooks

    class Noting(hooks):
        """Notes what the hooks of the context save: only the innermost hooks are called."""

        def __init__(self, pack: Callable[[Tensor], Tensor | OwnPart], unpack: Callable[[Any], Tensor]):
            super().__init__(lambda x: self.note(pack(x)), unpack)

        def note(self, found: Tensor | OwnPart) -> Tensor | OwnPart:
            x = found.x if isinstance(found, OwnPart) else found
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights and x.dtype is not torch.int64:
                sizes[storage.data_ptr()] = storage.nbytes()
            return found

    with mock.patch("torch.autograd.graph.saved_tensors_hooks", Noting), context.saving_own_parts():
        out = model(*[context.split(Inputs(ids))] * sides, aux=AuxOutputs())
    assert out.requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize("size", COUNTS)
def test_each_process_holds_other_tokens_and_as_many_visible_pairs(size: int) -> None:
    rows = torch.arange(6 * size)
    parts = [ContextGroup(rank, size).own(rows, 0) for rank in range(size)]
    assert torch.equal(torch.cat(parts).sort().values, rows)
    assert len({int((part + 1).sum()) for part in parts}) == 1  # a causal query sees the keys up to it


@pytest.mark.parametrize("pattern", [Causal(), Window(before=200, after=0), BigBird(block=64), Full()])
@pytest.mark.parametrize("size", COUNTS)
def test_blocks_of_a_part_hold_all_visible_pairs(pattern: Pattern, size: int) -> None:
    """For `flex`, which runs on GPUs."""
    packed = torch.arange(4).repeat_interleave(256)[None]
    for rank in range(size):
        q = ContextGroup(rank, size).split(Inputs(packed, Layout.packed_rows(packed, documents=4))).layout
        assert q is not None
        assert q.whole is not None
        k, tile = q.whole.layout, pattern.tile
        listed, full = find_blocks(pattern, q, k)
        seen = sees(pattern, q, k).unflatten(2, (-1, tile)).unflatten(1, (-1, tile))  # [b, blocks, tile, blocks, tile]
        assert not (seen.any(4).any(2) & ~listed).any()
        assert not (full & ~seen.all(4).all(2)).any()


Found = dict[str, dict[str, float]]


@pytest.fixture(scope="module", params=COUNTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By process."""
    folder, size = tmp_path_factory.mktemp("context"), request.param
    codes, _, complaints = ends(spawn(folder, main, folder, size, count=size))
    assert codes == [0] * size, "\n".join(complaints)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_loss_and_gradients_are_those_of_one_process(found: list[Found]) -> None:
    for own in found:
        assert {name: error for name, error in own["errors"].items() if not error < 1e-5} == {}


@pytest.mark.parametrize("name", SAVING)
def test_saved_bytes_of_each_process_are_predicted(found: list[Found], name: str) -> None:
    """At 2 and 4 times the length of one process: no process saves the keys and values of whole rows."""
    size = len(found)
    estimate = training_memory(small(name, 0.0), T * size, batch=B, precision="fp32", compiled=False, context=size)
    for own in found:
        assert own["saved"][name] == pytest.approx(estimate.activations, rel=0.1)
