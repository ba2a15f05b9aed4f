"""Private functions of torch: each is looked up when it is called, and has a public fallback.

torch may rename or remove such a function in any release. The fallback then runs, slower but with the same result. No
other module of the package names a private function of torch; a test reads the imports and attributes of all of them.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LONG_ROW = 8192  # elements of a row that a kernel of 8 warps keeps in registers, 32 in each thread


def functorch_is_active() -> bool:
    """Return whether a transform of torch.func runs. Where torch does not show it, custom ops without rules are off."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return True if active is None else active()


def zero_all(tensors: Sequence[Tensor]) -> None:
    """Fill all tensors with zeros, in one kernel where possible."""
    zero = getattr(torch, "_foreach_zero_", None)
    if zero is not None:
        zero(tensors)
        return
    for x in tensors:
        x.zero_()


def move_towards(averages: Sequence[Tensor], values: Sequence[Tensor], share: Tensor) -> None:
    """averages += (values - averages) · share, with few kernels where possible."""
    add, multiply, subtract = (getattr(torch, f"_foreach_{name}", None) for name in ("add_", "mul", "sub"))
    if add is not None and multiply is not None and subtract is not None:
        add(averages, multiply(subtract(values, averages), share))
        return
    for average, value in zip(averages, values, strict=True):
        average.add_((value - average) * share)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return max(0, x weightᵀ + bias), by one cuBLAS call where possible."""
    fused = getattr(torch, "_addmm_activation", None)
    out: Tensor = F.relu(torch.addmm(bias, x, weight.T)) if fused is None else fused(bias, x, weight.T)
    return out


def scaled_matmul(
    x: Tensor, y: Tensor, x_scale: Tensor, y_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (x · x_scale) (y · y_scale)ᵀ + bias for x [m, k] and y [n, k] in fp8, by fp8 tensor cores on CUDA."""
    kernel = getattr(torch, "_scaled_mm", None)
    if x.is_cuda and kernel is not None:
        out: Tensor = kernel(x, y.t(), x_scale, y_scale.t(), bias, out_dtype=dtype, use_fast_accum=True)
        return out
    z = (x.float() @ y.float().t()) * x_scale * y_scale.t()
    return (z if bias is None else z + bias).to(dtype)


def has_reordered_linear() -> bool:
    """Return whether torch runs linear layers on oneDNN with the Arm Compute Library, and can reorder their weights."""
    names = ("_is_mkldnn_acl_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available() or any(_operator("mkldnn", name) is None for name in names):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_acl_supported())


def reorder_weight(weight: Tensor) -> Tensor:
    """Return a weight in the memory layout of oneDNN (see `has_reordered_linear`)."""
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return out


def reordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ + bias for a weight of `reorder_weight`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def has_mkl_linear() -> bool:
    """Return whether torch has the linear layers of MKL with reordered weights."""
    names = ("_mkl_reorder_linear_weight", "_mkl_linear")
    return torch.backends.mkl.is_available() and all(_operator("mkl", name) is not None for name in names)


def reorder_mkl_weight(weight: Tensor, rows: int) -> Tensor:
    """Return a weight in the memory layout of MKL for inputs with this number of rows (see `has_mkl_linear`)."""
    out: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return out


def mkl_linear(x: Tensor, copy: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ + bias; `copy` is the weight by `reorder_mkl_weight` for the rows of x."""
    out: Tensor = torch.ops.mkl._mkl_linear(x, copy, weight, bias, x.shape[:-1].numel())
    return out


def has_4bit_matmul() -> bool:
    """Return whether torch has the 4-bit matmul of Arm CPUs."""
    names = ("_dyn_quant_pack_4bit_weight", "_dyn_quant_matmul_4bit")
    return torch.backends.kleidiai.is_available() and all(_operator("aten", name) is not None for name in names)


def pack_4bit_weight(q: Tensor, scale: Tensor, bias: Tensor | None, sizes: tuple[int, int, int]) -> Tensor:
    """Return weights of 4 bits as the kernel of `matmul_4bit` reads them; sizes of a group, a row and the matrix."""
    out: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(q, scale, bias, *sizes)
    return out


def matmul_4bit() -> Callable[..., Tensor]:
    """Return the kernel itself: a lookup per call would take longer than it may."""
    kernel: Callable[..., Tensor] = torch.ops.aten._dyn_quant_matmul_4bit.default
    return kernel


def allow_dynamic_size(x: Tensor, axis: int) -> None:
    """Compile for any size of an axis; without this, torch recompiles once when the size changes."""
    mark = getattr(torch._dynamo, "maybe_mark_dynamic", None)
    if mark is not None:
        mark(x, axis)


def caching_custom_gradients() -> AbstractContextManager[Any]:
    """Return a context in which torch also stores compiled graphs with custom autograd functions.

    By default it traces such a graph and derives its gradients again in every process. Its key holds the traced
    operations of both passes, so that a changed function is compiled again.
    """
    name = "autograd_cache_allow_custom_autograd_functions"
    try:
        from torch._functorch import config
    except ImportError:
        return nullcontext()
    known = getattr(config, name, None) is not None
    return config.patch(name, True) if known else nullcontext()


def start_hashing_triton() -> None:
    """Hash Triton's files, of 400 MB, in a thread: the key of all stored code holds the hash, which torch caches."""
    try:
        from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key
    except ImportError:
        return
    if HAS_TRITON:
        threading.Thread(target=triton_key, daemon=True).start()


def long_row_choices() -> Any:
    """Return Inductor's heuristics for a compile option of this name: reduce rows of up to LONG_ROW elements at once.

    Such a kernel keeps a row in registers. By default Inductor does so for rows of up to 1,024 elements, and reads
    longer ones twice.
    """
    return _choices("long rows")


def fused_cast_choices() -> Any:
    """Return Inductor's heuristics for a compile option of this name: one kernel adds and casts a norm's gradient.

    That kernel reduces rows and columns at once. Inductor (torch 2.11 and 2.13) fuses no consumer with it that has
    other axes, [b · t, d] instead of [b, t, d], as if both had no data in common: the gradient would be read again.
    """
    return _choices("fused casts")


def _choices(name: str) -> Any:
    """Return heuristics for both options. They outlive a compilation, so they check which option is set."""
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import FixedTritonConfig
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        def uuid(self) -> str:
            """Return the key of these heuristics in caches of compiled code."""
            return f"anyformer, {name}: rows of {LONG_ROW}, 16 warps, casts with gradients of norms"

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            if cooperative_reduction or config.inductor_choices_class is not long_row_choices:
                return False
            along_rows = features.get_reduction_hint() in (ReductionHint.INNER, ReductionHint.DEFAULT)
            return along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, LONG_ROW)

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, options: Any) -> Any:
            if config.inductor_choices_class is long_row_choices and computes_one_long_row(features):
                options = options | {"fixed_config": FixedTritonConfig({"XBLOCK": 1, "num_warps": 16})}
            return options

        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            reads_gradient = node1.is_reduction() and not node2.is_reduction()
            if config.inductor_choices_class is fused_cast_choices and reads_gradient and shared_data_score == 0:
                shared_data_score = bytes_read_from(scheduler, node1, node2)
            return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def bytes_read_from(scheduler: Any, node1: Any, node2: Any) -> int:
        """Return how much node1 writes that node2 reads in the same order, whatever axes they divide it into."""
        written = {x.name: x.normalize() for x in node1.read_writes.writes if isinstance(x, MemoryDep)}
        reads = [x for x in node2.read_writes.reads if isinstance(x, MemoryDep) and x.name in written]
        return sum(scheduler.dep_size_hint(x) for x in reads if x.normalize() == written[x.name])

    def computes_one_long_row(features: Any) -> bool:
        """Return whether a kernel casts rows of more than 2,048 elements to fp8 that it computes from one tensor."""
        nodes, sizes, size = list(features.scheduler_nodes()), V.graph.sizevars, features.reduction_numel
        if not (sizes.statically_known_gt(size, 2048) and sizes.statically_known_leq(size, LONG_ROW // 2)):
            return False
        made = {name for node in nodes for name in node.get_buffer_names()}
        read = {d.name for node in nodes for d in node.read_writes.reads if d.name not in made}
        narrow = any(V.graph.get_dtype(name).itemsize == 1 for name in made)
        return narrow and len(read) == 1

    return Choices()


def choice_options(choices: Callable[[], Any]) -> dict[str, Any]:
    """Return the compile options that select `long_row_choices` or `fused_cast_choices`.

    There are no such options if Inductor's heuristics have moved.
    """
    try:
        from torch._inductor.virtualized import V

        V.set_choices_handler(choices())
    except (ImportError, AttributeError, TypeError):
        return {}
    return {"inductor_choices_class": choices}


def whole_pass_options() -> dict[str, Any]:
    """Return the compile options by which a tensor takes the place of all of its parts joined again.

    A kernel that writes the gradients of queries, keys and values side by side returns their parts, which autograd
    concatenates. Inductor's own pass for this does not look through the views of heads.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return {}

    class UseWhole(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
                if (whole := joined_again(cat)) is not None:
                    cat.replace_all_uses_with(whole)

        def uuid(self) -> str:
            """Return the key of this pass in caches of compiled code."""
            return "anyformer, whole in place of its parts"

    return {"post_grad_custom_pre_pass": UseWhole()}


def joined_again(cat: Any) -> Any:
    """Return the node of a traced graph whose parts, all in order, `cat` joins; None if there is none.

    None, too, where the graph would return it, or return an input: both must be separate tensors.
    """
    joined = list(cat.args[0])
    parts = [part_of(x) for x in joined]
    if parts[0].target is not operator.getitem:
        return None
    split = parts[0].args[0]
    if split.target is not torch.ops.aten.split_with_sizes.default:
        return None
    whole, sizes, *axis = split.args
    if whole.op == "placeholder" or any(user.op == "output" for user in cat.users):
        return None
    complete = [part.args for part in parts] == [(split, i) for i in range(len(sizes))]
    found = complete and axis == list(cat.args[1:]) and list(map(layout_of, [*parts, whole]))
    return whole if found == list(map(layout_of, [*joined, cat])) else None


def part_of(x: Any) -> Any:
    """Return the node of a traced graph of which x is a view."""
    views = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
    while x.target in views:
        x = x.args[0]
    return x


def layout_of(x: Any) -> tuple[torch.Size, tuple[int, ...]]:
    """Return shape and strides of the tensor of a node."""
    return x.meta["val"].shape, x.meta["val"].stride()


def _operator(library: str, name: str) -> Any:
    return getattr(getattr(torch.ops, library), name, None)


@cache
def repair_inductor() -> bool:
    """Repair Inductor's waits under programmatic dependent launch (PDL); return whether that was possible.

    If not, leave PDL off. `triton.enable_pdl` lets a kernel load before it waits, unless the previous kernel writes
    what is loaded. Inductor compares names, and a buffer that is changed in place has two: its own, which loads use,
    and that of the operation which changes it. A load right after such an operation then does not wait, and reads old
    values: a decode step with a ring cache found other tokens (H200, torch 2.11; the code of 2.13 is the same).
    """
    try:
        from torch._inductor.codegen import triton
        from torch._inductor.virtualized import V

        kernel: Any = triton.TritonKernel
    except (ImportError, AttributeError):
        return False
    before_access = getattr(kernel, "_handle_pdl_before_access", None)
    if before_access is None:
        return False

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
