"""Programmatic dependent launch (PDL) in compiled steps: a kernel starts before the previous one has ended.

Inductor's `triton.enable_pdl` lets a kernel load before it waits, unless the previous kernel writes what is loaded. It
compares names, and a buffer that is changed in place has two: its own, which loads use, and that of the operation which
changes it. A load right after such an operation then does not wait, and reads old values: a decode step with a ring
cache found other tokens (H200, torch 2.11; the code of 2.13 is the same).
"""

from functools import cache
from typing import Any

from anyformer.kernels.private import inductor_kernels


@cache
def repair_inductor() -> bool:
    """Make Inductor compare both names, and return whether that was possible: if not, leave PDL off."""
    inductor = inductor_kernels()
    before_access = None if inductor is None else getattr(inductor[0], "_handle_pdl_before_access", None)
    if inductor is None or before_access is None:
        return False
    kernel, V = inductor

    def with_both_names(self: Any, wait_buffer: Any, *names: str, consider_reads: bool = False) -> None:
        scheduler: Any = V.graph.scheduler
        previous = None if scheduler is None else scheduler.previous_node
        if previous is not None:
            touched = {access.name for access in previous.read_writes.writes}
            if consider_reads:
                touched |= {access.name for access in previous.read_writes.reads}
            renames = V.kernel.current_node.mutation_renames
            names += tuple(renames.get(x, x) for x in touched if scheduler.mutation_real_name.get(x) in names)
        before_access(self, wait_buffer, *names, consider_reads=consider_reads)

    kernel._handle_pdl_before_access = with_both_names
    return True
