"""Context parallelism: the processes of a group read the same batch, and each holds a part of every row.

A row is cut into 2n chunks, and process r of n holds the chunks r and 2n - 1 - r. So under a causal mask all processes
have about the same number of visible pairs. A query must see keys of other processes: attention gathers the keys and
values of whole rows (`Layout.whole`) and masks them by position, as it does on one process. The backward pass adds the
gradients of all processes, and each process keeps those of the tokens that it holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from anyformer.attention.layout import Layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.data.batch import Batch
from anyformer.kernels.conventions import IGNORE, PADDING, PLAIN
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

FILLERS = {"segments": PADDING, "source_segments": PADDING, "marks": PLAIN}  # of padding; for all else 0


class OwnPart(NamedTuple):
    """A tensor saved for the backward pass in place of the gathered one."""

    x: Tensor
    dim: int


@dataclass(frozen=True)
class ContextGroup:
    """The processes that hold the parts of the same rows, and the rank of this one among them."""

    rank: int
    size: int
    group: Any = None  # None: all processes
    # gathered tensors that exist, with the part of this process
    gathered: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False, compare=False)

    # -- batches ------------------------------------------------------------------------------------------------------

    def share(self, batch: Batch, model: Transformer) -> Batch:
        """Return a batch with rows of a multiple of 2n tokens, padded on the right, and the labels of this process.

        These are the labels of the tokens that it holds; those of whole rows are on the first process of the group.
        """
        missing = -batch.ids.shape[1] % (2 * self.size)
        wider = _pad(batch, ("ids", "types", "marks", "spelled"), "segments", missing)
        labels = batch.labels
        if not model.config.head.per_row:
            labels = F.pad(labels, (0, missing), value=IGNORE)
        if not (model.config.head.per_row or model.config.head.joint):  # else the loss is of whole rows
            labels = self.own(labels, 1)
        elif self.rank:
            labels = torch.full_like(labels, IGNORE)
        if batch.source is not None:
            extra = -batch.source.shape[1] % (2 * self.size)
            wider |= _pad(batch, ("source",), "source_segments", extra)
            missing = extra  # media are in the source
        if missing and batch.media is not None:
            at = {name: F.pad(x, (0, missing), value=-1) for name, x in _places(batch.media)}
            wider["media"] = batch.media._replace(**at)
        return batch._replace(**wider, labels=labels)

    def split(self, inputs: Inputs) -> Inputs:
        """Return this process's tokens of padded rows, with a layout that gathers those of the others."""
        whole = inputs.layout
        if whole is None:
            length = inputs.ids.shape[1]
            positions = torch.arange(length, device=inputs.ids.device)[None]
            whole = Layout(positions, ordered=True, packed=False, padding="none", position_bound=length)
        own = whole._replace(
            positions=self.own(whole.positions, 1),
            segments=None if whole.segments is None else self.own(whole.segments, 1),
            marks=None if whole.marks is None else self.own(whole.marks, 1),
            padding="none" if whole.padding == "none" else "any",
            documents=None,
            whole=ProcessRows(self, whole),
        )
        media = inputs.media
        if media is not None:
            media = media._replace(**{name: self.own(x, 1) for name, x in _places(media)})
        types, spelled = (None if x is None else self.own(x, 1) for x in (inputs.types, inputs.spelled))
        return Inputs(self.own(inputs.ids, 1), own, types, spelled, media)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's two chunks of a tensor of whole rows."""
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the tensor of whole rows, in their order, from the two chunks of each process."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat((*heads, *reversed(tails)), dim)

    def scatter_sum(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's two chunks of a tensor of whole rows, summed over all processes."""
        chunks = x.chunk(2 * self.size, dim)
        parts = [torch.cat((chunks[rank], chunks[-1 - rank]), dim) for rank in range(self.size)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=self.group)
        return own

    @contextmanager
    def saving_own_parts(self) -> Iterator[None]:
        """Let autograd save this process's part of gathered tensors: the backward pass gathers them again."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, x: Tensor) -> Tensor | OwnPart:
        for whole, own in self.gathered.items():
            # the shape first: a DTensor has no address
            if x.shape == whole.shape and x.stride() == whole.stride() and x.data_ptr() == whole.data_ptr():
                return own
        return x

    def _unpack(self, saved: Tensor | OwnPart) -> Tensor:
        return self.gather(saved.x, saved.dim) if isinstance(saved, OwnPart) else saved


class ProcessRows:
    """Whole rows of a batch, from the parts of all processes."""

    def __init__(self, group: ContextGroup, layout: Layout):
        self.group, self.layout = group, layout

    def gather(self, x: Tensor, dim: int) -> Tensor:
        whole: Tensor = _Gather.apply(x, dim, self.group)
        self.group.gathered[whole] = OwnPart(x.detach(), dim)
        return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ContextGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.scatter_sum(grad, ctx.dim), None, None


def _pad(batch: Batch, names: tuple[str, ...], segments: str, missing: int) -> dict[str, Any]:
    """Return the fields of one side, with `missing` more tokens."""
    if not missing:
        return {}
    fields = {name: x for name in names if (x := getattr(batch, name)) is not None}
    first = fields[names[0]]
    marked = getattr(batch, segments)
    fields[segments] = torch.zeros_like(first) if marked is None else marked
    return {
        name: F.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing), value=FILLERS.get(name, 0)) for name, x in fields.items()
    }


def _places(media: MediaBatch) -> Iterator[tuple[str, Tensor]]:
    """Yield the indices of all kinds, [b, t]."""
    return ((name, x) for name, x in media._asdict().items() if name.endswith("_at") and x is not None)
