"""Decoding where layers store nothing, and the check of models whose layers may not store what their config says."""

from collections.abc import Mapping

from torch import Tensor, nn

from anyformer.attention.cache.kv_cache import Cache, CacheKind
from anyformer.attention.cache.layer_cache import LayerCache
from anyformer.attention.cache.ring import FirstTokens, RowSlots, SharedSlots, Slots
from anyformer.attention.layout import Layout
from anyformer.config.cost import Sizes, StateSizes
from anyformer.nn.context import PassOptions
from anyformer.nn.recurrent import last_states
from anyformer.nn.stack import BlockStack, Encoded


def stored_sizes(
    model: nn.Module, decoder: BlockStack, width: int, kind: CacheKind
) -> tuple[CacheKind, tuple[Sizes | StateSizes, ...]]:
    """Return the kind of cache that a decoder has, "none" if a mixer stores nothing, and the sizes of its layers."""
    if kind != "none":
        check_parts(model, "reads it token by token: use cache = 'none', or")
    sizes = tuple(size for size in decoder.sizes if size is not None)
    recomputes = kind == "none" or len(sizes) < len(decoder.sizes)
    return ("none", (Sizes(1, width, 0),)) if recomputes else (kind, sizes)


def decode_again(
    decoder: BlockStack,
    x: Tensor,
    new: Layout,
    options: PassOptions,
    encoded: Encoded | None,
    cache: Cache,
    init_widths: Mapping[int, int],
) -> Tensor:
    """Store new inputs of a decoder [b, t, d] in a cache of kind "none"; return their outputs, from all inputs."""
    if new.coordinates is not None:
        raise ValueError("a cache of kind 'none' stores no rows and columns of images: use positions without axes")
    (layer,) = cache.layers
    keys, writer = cache.take(new)[None]
    assert isinstance(layer, LayerCache)
    assert writer is not None
    first, every = isinstance(writer, FirstTokens), layer.append(x[:, None], x[:, None, :, :0], writer)[0][:, 0]
    if not first:
        used = cache.taken if cache.on_host() and not cache.by_row else cache.slots
        positions, segments, marks = (None if part is None else part[:, :used] for part in keys[:3])
        assert positions is not None
        every, keys = every[:, :used], Layout(positions, segments, marks)
    if encoded is not None:
        if encoded.hidden is not None:
            layer.keep_cross(encoded.hidden[:, None], encoded.hidden[:, None, :, :0])
        states = initial_states(cache.states, keys, encoded.layout, init_widths)
        encoded = Encoded(layer.read_cross()[0][:, 0], encoded.layout, states)
    out = decoder(every, keys, options, encoded=encoded)
    if first:
        return out
    assert isinstance(writer, Slots | SharedSlots | RowSlots)
    at = writer.at if isinstance(writer, RowSlots) else writer.at.expand(len(x), -1)
    return out.gather(1, at[..., None].expand(-1, -1, out.shape[2]))


def initial_states(
    states: Tensor | None, layout: Layout, source: Layout, widths: Mapping[int, int]
) -> dict[int, Tensor]:
    """Return the states from which recurrent decoder layers start, by layer, from those of the encoder [b, s, h]."""
    if states is None:
        return {}
    parts = last_states(states, layout, source).split(list(widths.values()), dim=-1)
    return dict(zip(widths, parts, strict=True))


def check_parts(model: nn.Module, purpose: str) -> None:
    """Raise a `ValueError` if a sublayer was put in by hand, so that the config is not that of the model."""
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        for name, built, now in () if stack is None else stack.replaced():
            fix = "write a part of your own (docs/extending.md)"
            raise ValueError(f"{side}.blocks.{name} is {now}, its config builds {built}, and {purpose} {fix}")
