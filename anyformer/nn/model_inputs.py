"""Inputs of a model's sides: one object each, made once from the keywords of a public call.

`model(ids, segments=..., types=...)` and `model(Inputs(ids, layout, types))` are the same call. Code that knows more
of a batch than segments say (all padding on the right, where a cache continues) passes `Inputs` with its `Layout`.
"""

from collections.abc import Collection, Mapping
from typing import TypedDict, cast

from torch import Tensor

from anyformer.attention.cache.paged import AnyCache
from anyformer.attention.cache.segment_memory import Past
from anyformer.attention.layout import Layout, check, check_values, make_layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.config.spec import did_you_mean
from anyformer.nn.inputs import InputModule, Inputs
from anyformer.nn.stack import BlockStack


class StackOptions(TypedDict, total=False):
    """Keywords that describe the tokens of one stack."""

    segments: Tensor | None
    attention_mask: Tensor | None
    positions: Tensor | None
    marks: Tensor | None
    types: Tensor | None
    spelled: Tensor | None
    media: MediaBatch | None


class SideOptions(StackOptions, total=False):
    """Keywords that describe the tokens of all sides; those with a prefix are for encoder-decoders."""

    source_segments: Tensor | None
    source_attention_mask: Tensor | None
    source_types: Tensor | None
    source_positions: Tensor | None
    source_media: MediaBatch | None
    target_positions: Tensor | None
    target_segments: Tensor | None
    target_attention_mask: Tensor | None
    target_types: Tensor | None
    target_media: MediaBatch | None


OWN = tuple(StackOptions.__annotations__)
SIDED = tuple(name for name in SideOptions.__annotations__ if name not in OWN)


def check_options(options: Mapping[str, object], allowed: Collection[str], instead: str, shape: str) -> None:
    """Refuse keywords that a call does not have, and those that a model of this shape cannot use."""
    wrong = []
    for name, value in options.items():
        if name not in OWN and name not in SIDED:
            raise TypeError(f"unexpected keyword argument {name!r}: {did_you_mean(name, (*OWN, *SIDED))}")
        if name not in allowed and value is not None:
            wrong.append(name)
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not for {shape} model, which takes {instead}")


def options_of(side: str, options: SideOptions) -> StackOptions:
    """Return the keywords of one side of an encoder-decoder, without their prefix."""
    named = {name.removeprefix(side): x for name, x in options.items() if name.startswith(side)}
    return cast(StackOptions, named)


def read_inputs(
    module: InputModule,
    stack: BlockStack,
    given: Tensor | Inputs,
    options: StackOptions,
    before: AnyCache | Past | None = None,
) -> tuple[Inputs, Layout]:
    """Return the inputs of a side, and the layout of their tokens, which continue the cache or past `before`.

    The layout has coordinates only if a position scheme of the stack reads them.
    """
    inputs, layout = _read(module, given, options, before)
    if inputs.media is None or module.media is None:
        return inputs, layout
    module.media.check(inputs.media, tuple(inputs.ids.shape))
    if not stack.reads_coordinates:
        return inputs, layout
    return inputs, layout._replace(coordinates=module.media.coordinates(inputs.media, layout.positions))


def _read(
    module: InputModule, given: Tensor | Inputs, options: StackOptions, before: AnyCache | Past | None
) -> tuple[Inputs, Layout]:
    if isinstance(given, Inputs):
        if given.layout is not None and given.layout.continues_cache and not options:  # made by `Cache.next`
            return given, given.layout
        if any(value is not None for value in options.values()):
            raise ValueError(f"{', '.join(options)}: `Inputs` hold these themselves; leave the keywords out")
        inputs = given
    else:
        inputs = Inputs(given, types=options.get("types"), spelled=options.get("spelled"), media=options.get("media"))
    batch, length = module.measure(inputs.ids)
    segments, mask = options.get("segments"), options.get("attention_mask")
    positions, marks, layout = options.get("positions"), options.get("marks"), inputs.layout
    if isinstance(segments, Layout):
        raise TypeError("segments must be a tensor [batch, length]; pass a Layout as `Inputs(ids, layout)`")
    check(batch, length, segments=segments, attention_mask=mask)
    check_values(segments, mask, whole=before is None)
    if before is None:
        if layout is not None:
            return inputs, layout.checked(batch, length)
        facts = {"segments": segments, "attention_mask": mask, "positions": positions, "marks": marks}
        return inputs, make_layout(batch, length, inputs.ids.device, **facts)
    if not isinstance(before, Past):
        if layout is None:
            return inputs, before.make_layout(batch, length, segments, positions, marks, mask)
        if layout.continues_cache:  # made by `Cache.next`
            return inputs, layout.checked(batch, length)
        return inputs, before.make_layout(batch, length, layout.segments, layout.positions, layout.marks)
    if marks is not None or (layout is not None and layout.marks is not None):
        raise ValueError("marks with a past are not supported: earlier tokens would have seen the marked ones")
    if layout is None:
        return inputs, before.make_layout(batch, length, segments, positions, attention_mask=mask)
    return inputs, before.make_layout(batch, length, layout.segments, layout.positions, layout.padding)
