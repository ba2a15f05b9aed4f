"""A model that is split among processes computes what one process does: loss, gradients and their norm."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from anyformer.config import ConfigError, ModelConfig, io
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.heads import LossTarget, VocabularyHead
from anyformer.nn.model import Transformer
from anyformer.recipe import Processes
from anyformer.recipe.recipe import tensor_faults
from anyformer.training.parallel import Ranks, clip_gradients, divide_model, join
from anyformer.training.ranks.split_modules import SplitDropout
from anyformer.training.ranks.tensor import SplitTransformer, in_model_order, sum_whole_gradients
from tests.training.small import pairs
from tests.training.two_processes import ends, spawn

VOCAB, WIDTH, ROWS, LENGTH = 24, 16, 4, 10
TOKENS = {"kind": "tokens", "vocab": VOCAB}
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A model, and how it is called."""

    config: ModelConfig
    packed: bool = False
    smoothing: float = 0.0


def block(mixer: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    return {
        "mixer": {"heads": 4, "bias": True, **(mixer or {})},
        "feedforward": {"kind": "plain", "width": 24},
        **parts,
    }


def decoder(blocks: Any = None, position: Any = "rotary", stack: Any = None, **rest: Any) -> ModelConfig:
    default = {"depth": 2, "blocks": blocks or block(), "position": position, "final_norm": "layer"}
    stack = default | (stack or {})
    return ModelConfig(**{"width": WIDTH, "target": TOKENS, "decoder": stack, "head": "lm", **rest})


def encoder(position: Any = "rotary", head: Any = "masked_lm", **rest: Any) -> ModelConfig:
    stack = {"depth": 2, "blocks": block(placement="post"), "position": position}
    return ModelConfig(**{"width": WIDTH, "source": TOKENS, "encoder": stack, "head": head, **rest})


def pair(position: Any, **rest: Any) -> ModelConfig:
    across = block(cross={"heads": 4, "kv_heads": 4, "qk_norm": "rms"})
    stacks = {
        "encoder": {"depth": 1, "blocks": block(), "position": position},
        "decoder": {"depth": 2, "blocks": across, "position": position},
    }
    return ModelConfig(**{"width": WIDTH, "source": TOKENS, "target": TOKENS, **stacks, "head": "lm", **rest})


def schemes() -> Iterator[tuple[str, Any]]:
    for name in ("none", "sinusoidal", "rotary", "rotary_axes", "alibi", "t5"):
        yield name, name
    yield "learned", {"kind": "learned", "length": 16}
    yield "t5 by layer", {"kind": "t5", "shared": False}
    yield "disentangled", {"kind": "disentangled", "buckets": 4, "max_distance": 6}
    yield "disentangled by itself", {"kind": "disentangled", "buckets": 4, "max_distance": 6, "projections": "separate"}


PLAIN = {"kind": "plain", "width": 8, "bias": True}
EXPERTS = {"kind": "experts", "count": 4, "top_k": 2, "shared": 1, "balance": 0.5, "expert": PLAIN}
LATENT = {"heads": 4, "key_width": 8, "value_width": 6, "compress": {"kind": "latent", "rank": 5, "rotary_width": 4}}


def cases() -> Iterator[tuple[str, Case]]:
    """By name: every shape with every position scheme, then every part that is split in its own way."""
    for name, position in schemes():
        yield f"decoder, {name}", Case(decoder(position=position), packed=True)
        yield f"encoder, {name}", Case(encoder(position, tie="output"), smoothing=0.1)
        yield f"encoder-decoder, {name}", Case(pair(position, tie="all"), packed=name in ("t5", "alibi"))
    windows = {"heads": 4, "pattern": {"kind": "window", "before": 2, "after": 2, "globals": 1}}
    tokens = {"depth": 2, "blocks": block(windows | {"global_projections": True}, placement="post")}
    yield "global tokens", Case(encoder(encoder=tokens), packed=True)
    yield "untied", Case(pair("t5"), smoothing=0.2)
    yield "inputs tied", Case(pair("rotary", tie="inputs"))
    pad = {**TOKENS, "pad": 3}
    yield "a pad row, tied", Case(decoder(tie="output", target=pad, head={"kind": "lm", "bias": True, "cap": 5.0}))
    narrow = {**TOKENS, "table": {"kind": "factorised", "width": 6}}
    yield "a factorised table", Case(decoder(tie="output", target=narrow))
    yield "labels", Case(encoder(head={"kind": "classifier", "labels": 3}))
    yield "tags", Case(encoder(head={"kind": "token_labels", "labels": 3}))
    norms = {"qk_norm": {"kind": "layer"}, "sinks": True, "key_width": 6, "value_width": 2}
    yield "norms of queries and keys, sinks", Case(decoder(block(norms)), packed=True)
    yield "no output projection", Case(decoder(block({"output": "none"})))
    yield "queries and keys in one", Case(decoder(block({"projections": "shared_qk"})))
    yield "all three in one", Case(decoder(block({"projections": "shared_qkv"})))
    yield "latent", Case(decoder(block(LATENT)), packed=True)
    ranked = {**LATENT["compress"], "query_rank": 6}
    yield "latent, with a rank of queries", Case(decoder(block({**LATENT, "compress": ranked})))
    gated = {"kind": "gated", "width": 12, "bias": True}
    yield "gated, parallel", Case(decoder(block(feedforward=gated, order="parallel")))
    yield "experts", Case(decoder(block(feedforward=EXPERTS)), packed=True)
    sigmoid = {**EXPERTS, "router": {"kind": "sigmoid", "rate": 0.1}, "expert": gated, "shared": 2}
    yield "gated experts, sigmoid", Case(decoder(block(feedforward=sigmoid)))
    yield "shared layers, batch norms", Case(decoder(block(norm="batch"), stack={"share": True, "depth": 3}))
    yield "adapters", Case(decoder(block(LATENT), adapter={"rank": 2}))
    yield "adapters of fused layers", Case(pair("t5", adapter={"rank": 2}))
    yield "a recurrent layer", Case(decoder(stack={"prefix": {"mixer": {"kind": "recurrent"}}}))
    delta = {"mixer": {"kind": "gated_delta", "heads": 4}}
    yield "a gated delta layer", Case(decoder(stack={"prefix": delta}), packed=True)
    windows = {"pattern": {"kind": "window", "before": 3, "after": 0}}
    yield "a window", Case(decoder(block(windows)), packed=True)


def grouped() -> Iterator[tuple[str, Case]]:
    """With two key/value heads: for groups of two processes."""
    yield "grouped heads", Case(decoder(block({"kv_heads": 2}), position="alibi"), packed=True)
    yield "grouped heads, norms", Case(pair("rotary", tie="output"))


# -- one of several processes -----------------------------------------------------------------------------------------


def inputs(case: Case, rows: slice) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=draw)[:, rows]
    names = ("source", "target") if case.config.shape == "encoder-decoder" else ("",)
    segments = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, -1]).expand(ROWS, LENGTH)[rows]
    if not case.packed:
        segments = torch.where(segments < 0, -1, 0)
    options = {f"{name}_segments".strip("_"): segments for name in names}
    return tuple(ids[: len(names)]), options


def loss_of(model: Transformer, case: Case, rows: slice, ranks: Ranks | None = None) -> Tensor:
    """The summed loss of some rows with the auxiliary loss, as training has it; over the whole batch they add up."""
    return objective(model, case.smoothing, *inputs(case, rows), ranks)


def objective(
    model: Transformer, smoothing: float, arguments: tuple[Tensor, ...], options: dict[str, Any], ranks: Ranks | None
) -> Tensor:
    aux = AuxOutputs() if ranks is None else AuxOutputs(ranks.reduce)
    if isinstance(model.head, VocabularyHead):
        labels = torch.where(arguments[-1] % 7 == 0, -100, arguments[-1].roll(-1, 1))
        options["loss_target"] = LossTarget(labels, smoothing)
        loss = model(*arguments, **options, aux=aux)
    else:
        out = model(*arguments, **options, aux=aux)
        loss = (out * torch.linspace(-1, 1, out.shape[-1])).tanh().sum()
    return loss + 100 * sum(aux.losses, torch.zeros(()))


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if parameter.requires_grad:
            assert grad is not None, name
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name] = in_model_order(model, name, grad)
    return found


def compare(name: str, case: Case, spec: Processes, ranks: Ranks) -> None:
    torch.manual_seed(1)
    whole = Transformer(case.config).train()
    for parameter in whole.parameters():  # biases, sinks and B of adapters are not zero
        parameter.data += 0.1 * torch.randn_like(parameter)
    split, weights = copy.deepcopy(whole), {n: p.detach().clone() for n, p in whole.named_parameters()}
    expected = loss_of(whole, case, slice(None))
    expected.backward()
    divide_model(split, ranks, spec.shard, CPU, None)
    axis = ranks.shares
    loss = loss_of(split, case, slice(axis.rank, None, axis.size), ranks)
    (loss * axis.size).backward()
    sum_whole_gradients(split)
    close(name, "loss", ranks.sum(loss.detach().clone()), expected.detach())
    ours, theirs = gradients(split), gradients(whole)
    assert ours.keys() == theirs.keys()
    for parameter, grad in theirs.items():
        close(name, f"gradient of {parameter}", ours[parameter], grad)
    for parameter, value in split.named_parameters():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(in_model_order(split, parameter, full), weights[parameter]), (name, parameter)
    norm = clip_gradients(split, 0.5)
    close(name, "norm", norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
    clipped = gradients(split)
    for parameter, grad in gradients(whole).items():
        close(name, f"clipped gradient of {parameter}", clipped[parameter], grad)
    whole.commit(), split.commit()
    for (buffer, one), other in zip(whole.named_buffers(), split.buffers(), strict=True):
        close(name, buffer, other, one)


def drop(ranks: Ranks) -> None:
    """Dropout everywhere: processes agree on activations that all have, and draw their own masks for their parts."""
    expert = {**EXPERTS, "expert": {**PLAIN, "dropout": 0.5}}
    layers = [block({"dropout": 0.5}, feedforward=each, dropout=0.5) for each in (expert, {**PLAIN, "dropout": 0.5})]
    config = decoder(layers, adapter={"rank": 2, "dropout": 0.5}, target={**TOKENS, "dropout": 0.5})
    torch.manual_seed(1)
    model = Transformer(config).train()
    divide_model(model, ranks, "none", CPU, None)
    masks = list[Tensor]()
    for module in model.modules():
        if isinstance(module, SplitDropout):
            module.register_forward_hook(lambda _, args, out: masks.append((out == 0) & (args[0] != 0)))
    ranks.seed(7, 1)
    loss_of(model, Case(config, packed=True), slice(None)).backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and not isinstance(p, DTensor)}
    assert isinstance(model, SplitTransformer)
    copies = [grad for name, grad in whole.items() if not model.whole_weights[name]]
    assert copies
    same(torch.cat([torch.get_rng_state().float(), *(grad.flatten() for grad in copies)]))
    drawn = masks[-1].float()  # of a feed-forward: its parts have the same size
    others = [torch.empty_like(drawn) for _ in range(ranks.size)]
    dist.all_gather(others, drawn)
    assert not torch.equal(others[0], others[1])


def same(x: Tensor) -> None:
    """In all processes."""
    first = x.clone()
    dist.broadcast(first, 0)
    assert torch.equal(x, first)


def never_all_logits(ranks: Ranks) -> None:
    """No tensor that the loss makes has the size of all logits."""
    torch.manual_seed(1)
    config = decoder(tie="output", target={**TOKENS, "vocab": 4096})
    model = Transformer(config).train()
    divide_model(model, ranks, "none", CPU, None)
    sizes = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        loss_of(model, Case(config), slice(None)).backward()
    assert max(sizes) <= 4096 // ranks.tensor.size * max(ROWS * LENGTH, WIDTH)


def close(name: str, what: str, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda message: f"{name}: {what}\n{message}")


def compiled(ranks: Ranks) -> None:
    """The whole loss as one graph."""
    case = dict(cases())["norms of queries and keys, sinks"]
    torch.manual_seed(1)
    whole = Transformer(case.config).train()
    split = copy.deepcopy(whole)
    expected = loss_of(whole, case, slice(None))
    expected.backward()
    divide_model(split, ranks, "none", CPU, None)
    run = torch.compile(objective, backend="aot_eager", fullgraph=True)
    loss = run(split, case.smoothing, *inputs(case, slice(None)), None)
    loss.backward()
    sum_whole_gradients(split)
    close("compiled", "loss", loss.detach(), expected.detach())
    ours = gradients(split)
    for parameter, grad in gradients(whole).items():
        close("compiled", parameter, ours[parameter], grad)


def compile_main() -> None:
    torch.set_num_threads(1)
    with join(agreed=()) as ranks:
        compiled(ranks.arranged(Processes(tensor=2)))


def main(folder: Path, layouts: list[Processes], chosen: list[str]) -> None:
    torch.set_num_threads(1)
    found = dict(cases()) | dict(grouped())
    failed = []
    with join(agreed=()) as ranks:
        for spec in layouts:
            arranged = ranks.arranged(spec)
            if spec.tensor == ranks.size:
                drop(arranged)
                never_all_logits(arranged)
            for name in chosen:
                try:
                    compare(name, found[name], spec, arranged)
                except AssertionError as error:
                    failed.append(f"tensor = {spec.tensor}, shard = {spec.shard}: {error}")
    (folder / f"failed-{ranks.rank}").write_text(json.dumps(failed))


def run(folder: Path, count: int, layouts: list[Processes], chosen: list[str]) -> None:
    codes, _, complaints = ends(spawn(folder, main, folder, layouts, chosen, count=count))
    assert codes == [0] * count, "\n".join(complaints)
    failed = [line for rank in range(count) for line in json.loads((folder / f"failed-{rank}").read_text())]
    assert not failed, "\n".join(failed)


def test_two_processes_with_a_part_each(tmp_path: Path) -> None:
    run(tmp_path, 2, [Processes(tensor=2)], [*dict(cases()), *dict(grouped())])


@pytest.mark.system
def test_a_split_model_compiles_as_one_graph(tmp_path: Path) -> None:
    codes, _, complaints = ends(spawn(tmp_path, compile_main))
    assert codes == [0, 0], "\n".join(complaints)


@pytest.mark.system
def test_four_processes(tmp_path: Path) -> None:
    run(tmp_path, 4, [Processes(tensor=4)], [*dict(cases())])


TWO_BY_TWO = [Processes(tensor=2, shard="full"), Processes(tensor=2, shard="none")]


def test_split_and_sharded_or_replicated(tmp_path: Path) -> None:
    run(tmp_path, 4, TWO_BY_TWO, ["encoder-decoder, t5", "grouped heads", "experts", "a pad row, tied"])


@pytest.mark.system
@pytest.mark.parametrize("spec", TWO_BY_TWO, ids=lambda spec: spec.shard)
@pytest.mark.parametrize("third", range(3))
def test_all_split_and_sharded_or_replicated(spec: Processes, third: int, tmp_path: Path) -> None:
    run(tmp_path, 4, [spec], [*dict(cases()), *dict(grouped())][third::3])


# -- refused models --------------------------------------------------------------------------------------------------


def test_sizes_that_cannot_be_split_are_named_with_a_fix() -> None:
    odd = {**EXPERTS, "count": 6, "shared": 3}
    blocks = [block({"heads": 8, "kv_heads": 2}, feedforward={"kind": "gated", "width": 10}), block(feedforward=odd)]
    config = ModelConfig(
        width=WIDTH,
        source={**TOKENS, "vocab": 30},
        target=TOKENS,
        encoder={"depth": 1, "blocks": block({"heads": 2})},
        decoder={"depth": 2, "blocks": [{**each, "cross": {"heads": 4}} for each in blocks]},
        head="lm",
    )
    of_four, heads = "must be a multiple of parallel.tensor = 4", "lower parallel.tensor, or change the heads"
    assert [str(fault) for fault in tensor_faults(config, 4)] == [
        f"encoder.blocks.0.mixer.heads = 2: {of_four}; {heads}",
        f"decoder.blocks.0.mixer.kv_heads = 2: {of_four}; {heads}",
        f"decoder.blocks.0.feedforward.width = 10: {of_four}; set it to 12",
        f"decoder.blocks.1.feedforward.count = 6: {of_four}; set it to 8",
        f"source.vocab = 30: {of_four}; set it to 32, and the last rows are unused",
    ]
    assert not list(tensor_faults(config, 1))


@pytest.mark.parametrize("over", ["each_head", "projection"])
def test_norms_that_are_not_alike_for_all_heads_cannot_be_split(over: str) -> None:
    config = decoder(block({"qk_norm": "rms", "qk_norm_over": over}))
    (fault,) = tensor_faults(config, 2)
    assert str(fault).startswith(f"decoder.blocks.0.mixer.qk_norm_over = '{over}': ")
    assert not list(tensor_faults(config, 1))


def test_settings_without_a_split_form_are_refused() -> None:
    recipe = pairs(steps=2)
    for change, message in {
        "train.precision=fp16": "train.precision = 'fp16': parallel.tensor = 2 has no loss scaling; use 'bf16'",
        "train.precision=fp8": "train.precision = 'fp8': parallel.tensor = 2 has no matmuls in fp8; use 'bf16'",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            io.override(recipe, ["parallel.tensor=2", change])
