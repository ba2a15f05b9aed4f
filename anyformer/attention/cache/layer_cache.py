"""Keys and values of one layer in a KV cache: at full precision or as int8, and cross-attention's."""

import torch
from torch import Tensor

from anyformer.attention.cache.ring import SlotWriter
from anyformer.config.cost import Sizes
from anyformer.kernels.runtime import at_least_fp32


class ExactStore:
    """Vectors [b, g, slots, k] in the data type of the cache."""

    def __init__(self, batch: int, groups: int, slots: int, width: int, device: torch.device, dtype: torch.dtype):
        self.numbers = torch.zeros(batch, groups, slots, width, device=device, dtype=dtype)

    def write(self, new: Tensor, writer: SlotWriter) -> Tensor:
        """Store new vectors in their slots and return all that can be read."""
        return writer.write(self.numbers, new.to(self.numbers.dtype))

    def read(self) -> Tensor:
        """Return all stored vectors."""
        return self.numbers

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.numbers,)


class Int8Store(ExactStore):
    """Vectors as integers from -127 to 127 with one scale per vector: an error of at most max|x| / 254."""

    def __init__(self, batch: int, groups: int, slots: int, width: int, device: torch.device, dtype: torch.dtype):
        super().__init__(batch, groups, slots, width, device, torch.int8)
        self.scales = torch.zeros(batch, groups, slots, 1, device=device, dtype=dtype)

    def write(self, new: Tensor, writer: SlotWriter) -> Tensor:
        new, tiny = at_least_fp32(new), torch.finfo(self.scales.dtype).tiny
        scale = (new.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=tiny).to(self.scales.dtype)
        numbers = super().write((new / scale).round(), writer)
        return numbers.to(scale.dtype) * writer.write(self.scales, scale)

    def read(self) -> Tensor:
        return self.numbers.to(self.scales.dtype) * self.scales

    def tensors(self) -> tuple[Tensor, ...]:
        return self.numbers, self.scales


class CrossStore:
    """Keys and values of cross-attention, written once."""

    def __init__(self) -> None:
        self.cross: tuple[Tensor, Tensor] | None = None  # [b / readers, g, s, k]
        self.readers = 1  # rows that read each of them (`Cache.share_rows`)

    def keep_cross(self, k: Tensor, v: Tensor, readers: int = 1) -> None:
        """Store the keys and values of cross-attention."""
        old = self.cross or (None, None)
        self.cross, self.readers = (copy_into(old[0], k), copy_into(old[1], v)), readers

    def read_cross(self, in_place: bool = False) -> tuple[Tensor, Tensor]:
        """Return the keys and values of cross-attention [b, g, s, k]; in place, those that are stored."""
        assert self.cross is not None
        if in_place or self.readers == 1:
            return self.cross
        k, v = (x.repeat_interleave(self.readers, dim=0) for x in self.cross)
        return k, v


class LayerCache(CrossStore):
    """Keys and values of one layer; layers that share weights have one cache each."""

    def __init__(
        self, batch: int, slots: int, sizes: Sizes, device: torch.device, dtype: torch.dtype, int8: bool = False
    ):
        super().__init__()
        self.keys, self.values = (
            (Int8Store if int8 and sizes.quantisable and width else ExactStore)(
                batch, sizes.groups, slots, width, device, dtype
            )
            for width in (sizes.key_width, sizes.value_width)
        )

    def append(self, k: Tensor, v: Tensor, writer: SlotWriter) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, g, t, k] in their slots and return all that can be read [b, g, s, k]."""
        return self.keys.write(k, writer), self.values.write(v, writer)

    def own(self) -> tuple[Tensor, ...]:
        """Return the tensors of self-attention."""
        return *self.keys.tensors(), *self.values.tensors()

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.own(), *(self.cross or ())


def copy_into(old: Tensor | None, new: Tensor) -> Tensor:
    """Copy `new` to the address of `old` if shape and data type agree, else to a new tensor."""
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return new.clone(memory_format=torch.contiguous_format)
    return old.copy_(new)
