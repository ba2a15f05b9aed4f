"""Every formula of the path, read as it is shown, recomputes the numbers that are shown beside it."""

from typing import Any

import pytest
import torch
from torch import nn

from anyformer.config import (
    LM,
    Attention,
    BatchNorm,
    Block,
    Classifier,
    DenseLayer,
    Embedder,
    Experts,
    FactorisedTable,
    Gated,
    Gelu,
    Identity,
    Latent,
    LayerNorm,
    LeakyRelu,
    Learned,
    MaskedLM,
    ModelConfig,
    NoPosition,
    Parallel,
    Plain,
    RMSNorm,
    Rotary,
    Sigmoid,
    SigmoidTopK,
    Sinusoidal,
    SqrtWidth,
    SquaredRelu,
    Tokens,
    Transform,
)
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.path_place import PathPlace
from anyformer.explore.requests import StageRequest, TextRequest
from anyformer.explore.trace import last_side
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, Classify, Embed, LanguageModel, MaskedLanguageModel
from tests.explore import made
from tests.explore.formula_symbols import recompute
from tests.explore.made import body
from tests.explore.test_path import every_stage


def block(**fields: Any) -> Block:
    return made.BLOCK.model_copy(update=fields)


def attention(**fields: Any) -> Block:
    return block(mixer=Attention(heads=2, **fields))


def lm(of: Block, position: Any = None, target: Tokens | None = None, head: LM | None = None, **stack: Any) -> Any:
    config = made.decoder(made.stack(of, position, **stack))
    more = {"target": target or config.target, "head": head or config.head}
    return LanguageModel(), config.model_copy(update=more), made.LETTERS


SPARSE = Experts(count=3, top_k=2, expert=Plain(width=8), shared=1, shared_gate=True, router=SigmoidTopK())
QUERIES = Latent(rank=8, rotary_width=4, query_rank=6, norm=LayerNorm())
FURTHER: dict[str, tuple[AnyTask, ModelConfig, Any]] = {
    "swiglu": lm(
        block(feedforward=Gated(width=12), norm=RMSNorm(offset=1.0), mixer=Attention(heads=4, kv_heads=2)),
        target=Tokens(vocab=1, scale=SqrtWidth()),
        head=LM(cap=3.0),
    ),
    "gpt-oss": lm(block(feedforward=Gated(width=12, bias=True, limit=0.5, offset=1.0), placement="post")),
    "glu": lm(block(feedforward=Gated(activation=Sigmoid(), width=12), norm=LayerNorm(bias=False))),
    "bilinear": lm(block(feedforward=Gated(activation=Identity(), width=12), placement="branch")),
    "squared": lm(block(feedforward=Plain(width=12, activation=SquaredRelu(), bias=False), residual=False)),
    "leaky": lm(block(feedforward=Plain(width=12, activation=LeakyRelu(slope=0.2)), norm=BatchNorm())),
    "sparse": lm(block(feedforward=SPARSE, placement="sandwich")),
    "biased": lm(attention(bias=True, gate="head", qk_norm=RMSNorm(), qk_norm_over="each_head"), head=LM(bias=True)),
    "whole": lm(attention(gate="element", qk_norm=LayerNorm(), qk_norm_over="projection"), Rotary(fraction=0.5)),
    "shared-qk": lm(attention(projections="shared_qk", bias=True, value_residual=True)),
    "shared-qkv": lm(attention(projections="shared_qkv", sinks=True)),
    "queries": lm(block(mixer=Attention(heads=2, key_width=12, value_width=8, compress=QUERIES, bias=True))),
    "bare-latent": lm(made.BLOCK.model_copy(update={"mixer": made.LATENT}), NoPosition()),
    "both": lm(block(placement="post", order=Parallel())),
    "early": lm(
        made.BLOCK, Learned(length=48), Tokens(vocab=1, table=FactorisedTable(width=6, project="before_position"))
    ),
    "late": lm(
        made.BLOCK,
        Sinusoidal(),
        Tokens(vocab=1, table=FactorisedTable(width=6, project="after_norm", bias=True), types=2, norm=LayerNorm()),
    ),
    "bert": (
        MaskedLanguageModel(),
        made.encoder(made.stack(), MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm()), bias=True)),
        made.WORDS,
    ),
    "pooler": (
        Classify(labels=("no", "yes")),
        made.encoder(made.stack(), Classifier(labels=2, pool="first", transform=Transform(activation=Gelu()))),
        made.WORDS,
    ),
    "maximum": (
        Classify(labels=("no", "yes")),
        made.encoder(made.stack(), Classifier(labels=2, pool="max")),
        made.WORDS,
    ),
    "sentence": (
        Embed(),
        made.encoder(
            made.stack(),
            Embedder(
                layers=(DenseLayer(width=10, activation=Gelu()),), projection=6, learned_scale=True, normalize=True
            ),
        ),
        made.WORDS,
    ),
    "free": (Embed(), made.encoder(made.stack(), Embedder(normalize=False)), made.WORDS),
}


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    with pytest.MonkeyPatch.context() as patch:
        for name, parts in FURTHER.items():
            patch.setitem(made.RUNS, name, parts)
        return Workspace({name: OpenRun(name, run, run.folder) for name in made.RUNS for run in [made.made(name)]})


@pytest.mark.parametrize("name", made.RUNS)
def test_positions_are_needed_exactly_where_the_page_says_so(workspace: Workspace, name: str) -> None:
    """Without its position scheme, a stack either returns the same for tokens in another order, or it does not."""
    run = workspace.runs[name].run
    stacks = {side: stack.model_copy(update={"position": NoPosition()}) for side, stack in run.config.stacks.items()}
    config = run.config.model_copy(update={**stacks, "adapter": None})
    torch.manual_seed(0)
    model = Transformer(config).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, 0, 0.5)
    ids = torch.tensor([[6, 8, 7, 9, 5, 10]])
    moved = torch.tensor([[7, 8, 6, 9, 5, 10]])
    for side in stacks:
        inputs = [[moved if other == side else ids for other in stacks], [ids for _ in stacks]]
        with torch.no_grad():
            last = [run_with_taps(model, [f"{side}.final"], *some)[1][f"{side}.final"][0, -1] for some in inputs]
        order = workspace.answer("stage", body(name, stage=f"{side}.position", at=0, key=0))["order"]
        assert torch.allclose(*last, atol=1e-4) == (order == "set"), (side, order)


@pytest.mark.parametrize("name", [*made.RUNS, *FURTHER])
def test_each_formula_recomputes_the_numbers_beside_it(workspace: Workspace, name: str) -> None:
    for stage, layer in every_stage(workspace.answer("path", body(name))):
        at = (layer + 1) % 2  # also the first token, which may be a global one
        request = body(name, stage=stage, layer=layer, head=1, at=at, key=at)
        found = workspace.answer("stage", request)
        kind = stage.partition(".")[0]
        trace = workspace.trace(TextRequest(**body(name)))
        kind = last_side(trace.run) if kind == "head" else kind
        recompute(PathPlace(trace, kind, found["position"], StageRequest(**request)), stage, found)


@pytest.mark.parametrize("name", [*made.RUNS, *FURTHER])
def test_scores_are_divided_by_a_root_where_the_page_says_so(workspace: Workspace, name: str) -> None:
    for stage, layer in every_stage(workspace.answer("path", body(name))):
        if stage.endswith(".scores"):
            found = workspace.answer("stage", body(name, stage=stage, layer=layer, head=1, at=1, key=0))
            vectors = body(name, stage=stage.replace("scores", "qkv"), layer=layer, head=1, at=1, key=0)
            width = len(workspace.answer("stage", vectors)["q"])
            assert found["root"] == (width if found["scale"] == pytest.approx(width**-0.5) else None)
            assert (f"q · k_s / √{width}" in found["formula"][0]) == (found["root"] is not None and width > 1)
