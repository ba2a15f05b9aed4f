"""Record, replace or change activations of the running model by name. The names:

    embed                          embeddings with positions [b, t, d]
    {i}.{sublayer}.in              input of a sublayer, after its first norm [b, t, d]
    {i}.{sublayer}.q / k / v       queries, new keys and values by head, as attention uses them [b, h, t, k]
    {i}.{sublayer}.weights         attention weights [b, h, t, s]; rows are queries
    {i}.{sublayer}.heads           output of each head: weighted sum of its values [b, h, t, k_v]
    {i}.{sublayer}.gate            gates of the heads' outputs [b, h, t, 1], or of their elements [b, h, t, k_v]
    {i}.mixer.log_decay            log of the decay of a matrix state, by head or channel; `rate` of gated_delta
    {i}.mixer.latent               compressed vector of latent attention [b, t, rank]
    {i}.mixer.state                states of a recurrent mixer, of both directions [b, t, h]
    {i}.feedforward.hidden         hidden activations of the feed-forward [b, t, f]; `shared.hidden` of shared experts
    {i}.feedforward.router         weight of each expert [b, t, experts]; 0 where it is not selected
    {i}.{sublayer}.out             output of a sublayer, added to the residual stream [b, t, d]
    {i}.out                        the residual stream after layer i [b, t, d]
    final                          after the final norm [b, t, d]

Each name begins with `encoder.` or `decoder.`; `{i}` is the layer from 0, `{sublayer}` mixer, cross or feedforward.
`head` alone is the model's output. In an encoder that pools tokens, t and s are the lengths that a layer reads.
"""

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from anyformer.nn.context import Tap
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer


def run_with_taps(
    model: Transformer, names: list[str], *inputs: Tensor | Inputs, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the model's output, and the activations whose names match (`decoder.*.mixer.weights`, `encoder.0.out`)."""
    taps, seen = recording(names)
    output = model(*inputs, **options, taps=taps)
    check_matched(names, seen)
    return output, seen


def hidden_with_taps(
    model: Transformer, names: list[str], *inputs: Tensor | Inputs, **options: Any
) -> dict[str, Tensor]:
    """Return activations as `run_with_taps` does, without the head, whose logits of all tokens may cost as much.

    An encoder-decoder computes them, too: the options of a call are those of both stacks.
    """
    if model.encoder is not None and model.decoder is not None:
        return run_with_taps(model, names, *inputs, **options)[1]
    taps, seen = recording(names)
    stack, (ids,) = model.encode if model.decoder is None else model.decode, inputs
    stack(ids, taps=taps, **options)
    check_matched(names, seen)
    return seen


def recording(names: Collection[str] = ("*",)) -> tuple[Tap, dict[str, Tensor]]:
    """Return a tap, and the activations that it records: those whose names match."""
    seen: dict[str, Tensor] = {}

    def record(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return x

    return Tap(record, lambda name: any(fnmatchcase(name, n) for n in names)), seen


Patch = Tensor | Callable[[Tensor], Tensor]


def run_with_patches(
    model: Transformer, patches: Mapping[str, Patch], *inputs: Tensor | Inputs, **options: Any
) -> Tensor:
    """Return the model's output with activations replaced by a tensor, or by the result of a function of them.

    The names are those of `taps.py`; they may contain `*`. The kernels stay the same, so patching a run with its own
    activations changes no bit. The exception is `weights`: patched weights are applied by the reference
    implementation, which agrees with the kernel up to rounding.
    """
    matched: set[str] = set()

    def change(name: str, x: Tensor) -> Tensor:
        for pattern, patch in patches.items():
            if fnmatchcase(name, pattern):
                new = patch if isinstance(patch, Tensor) else patch(x)
                if new.shape != x.shape:
                    raise ValueError(f"the patch of {name} has shape {list(new.shape)}, expected {list(x.shape)}")
                x = new.to(x)
                matched.add(name)
        return x

    taps = Tap(change, lambda name: any(fnmatchcase(name, pattern) for pattern in patches))
    output = model(*inputs, **options, taps=taps)
    check_matched(patches, matched)
    return output


def check_matched(names: Collection[str], seen: Collection[str]) -> None:
    """Raise if a name matches no activation of the forward pass."""
    if missing := [n for n in names if not any(fnmatchcase(name, n) for name in seen)]:
        raise ValueError(
            f"no activation is called {', '.join(missing)}: anyformer/nn/inspection/taps.py lists the names"
        )
