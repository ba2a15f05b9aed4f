"""A function that is one op for the compiler, and an ordinary function elsewhere."""

import subprocess
import sys

import torch
from torch import Tensor

from anyformer.kernels.runtime import opaque


@opaque("test_opaque_double", torch.empty_like)
def double(x: Tensor) -> Tensor:
    return x.new_tensor((2 * x).tolist())  # a compiler could not trace it


def test_the_compiler_sees_one_op():
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = torch.arange(3.0)
    compiled = torch.compile(lambda x: double(x) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), double(x) + 1)
    assert any("test_opaque_double" in str(target) for target in seen)


def test_other_calls_do_not_import_the_compiler():
    code = """
import sys, torch
from anyformer.kernels.runtime import opaque
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2
assert opaque("test_opaque_half", torch.empty_like)(half)(torch.ones(2)).sum() == 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
