"""How steps are compiled."""

import ast
from pathlib import Path

import pytest
import torch

import anyformer
from anyformer import presets
from anyformer.config import io
from anyformer.data.tokenizer import train_tokenizer
from anyformer.kernels.private import choice_options, fused_cast_choices, long_row_choices, whole_pass_options
from anyformer.nn.heads import LossTarget
from anyformer.nn.model import Transformer
from anyformer.recipe import Bytes, LanguageModel
from anyformer.training.machine import compile_options
from anyformer.training.objective import Objective

TWO_PASSES = {"triton.mix_order_reduction": False}
PREFETCHED = {"triton.mix_order_reduction_allow_multi_stages": True}


@pytest.mark.parametrize(("width", "found"), [(256, PREFETCHED), (512, TWO_PASSES), (768, PREFETCHED), (2048, {})])
def test_short_rows_are_passed_twice(width: int, found: dict[str, bool]) -> None:
    config = presets.gpt2(depth=1, width=width, heads=4)
    casts = {} if found == TWO_PASSES else choice_options(fused_cast_choices)
    for fp8, due in ((False, found | casts), (True, TWO_PASSES | choice_options(long_row_choices))):
        options = compile_options(config, fp8)
        assert {name: option for name, option in options.items() if name in due} == due
        assert options.keys() - due.keys() == whole_pass_options().keys()


@pytest.mark.parametrize(
    "part",
    [
        "decoder.blocks.*.mixer.gate=element",
        "decoder.blocks.*.mixer.value_residual=true",
        "decoder.embedding_skip=true",
        "decoder.unet_skips=true",
        "head.multi_token={tokens=2, weight=0.3}",
    ],
)
def test_parts_of_record_runs_are_one_graph(part: str) -> None:
    config = io.override(presets.gpt2(depth=3, width=16, heads=2, vocab=32, length=16, dropout=0.0), [part])
    objective = Objective(Transformer(config).train(), LanguageModel().build(train_tokenizer(Bytes(), [])), 0.0)
    ids = torch.randint(32, (2, 16))
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    found = compiled((ids,), LossTarget(ids), None)[0]
    torch.testing.assert_close(found, objective((ids,), LossTarget(ids), None)[0])
    found.backward()


def test_nothing_traced_evaluates_a_generic_alias() -> None:
    """torch 2.11, unlike later versions, cannot trace `list[Tensor]()` or `cast(A | None, x)`: it breaks the graph."""
    package = Path(anyformer.__file__).parent
    files = [path for name in ("attention", "nn") for path in (package / name).rglob("*.py")]
    for path in (path for path in files if "inspection" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name("dict" | "list" | "set"))):
                    raise AssertionError(f"{path}:{node.lineno}: annotate the variable")
                case ast.Call(func=ast.Name("cast"), args=[ast.BinOp() | ast.Subscript(), _]):
                    raise AssertionError(f"{path}:{node.lineno}: quote the type")
