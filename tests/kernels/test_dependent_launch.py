"""A compiled kernel waits for the one before it when that one changes in place what it loads."""

from types import SimpleNamespace

import pytest
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.virtualized import V

from anyformer.kernels.private import repair_inductor

WAIT = TritonKernel.GDC_WAIT


def lines(loaded: str) -> list[str]:
    """Return the lines before a load, after a kernel that writes `fresh` and changes `ring` under the name `new`."""
    previous = SimpleNamespace(
        read_writes=SimpleNamespace(writes=[SimpleNamespace(name="fresh"), SimpleNamespace(name="new")], reads=[])
    )
    graph = SimpleNamespace(scheduler=SimpleNamespace(previous_node=previous, mutation_real_name={"new": "ring"}))
    found: list[str] = []
    buffer = SimpleNamespace(writeline=found.append)
    kernel = SimpleNamespace(
        current_node=SimpleNamespace(mutation_renames={}),
        inside_reduction=False,
        GDC_WAIT=WAIT,
        _enable_pdl_codegen=lambda: True,
    )
    with V.set_graph_handler(graph), V.set_kernel_handler(kernel):
        TritonKernel._handle_pdl_before_access(kernel, buffer, loaded)
    return found


@pytest.mark.parametrize(("loaded", "waits"), [("fresh", True), ("new", True), ("ring", True), ("older", False)])
def test_a_load_waits_for_what_the_last_kernel_changed(loaded: str, waits: bool):
    assert repair_inductor()
    assert lines(loaded) == [WAIT] * waits
