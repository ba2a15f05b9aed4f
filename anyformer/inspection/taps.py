"""Looking at the activations of the real model by name.

    embed                          embeddings with positions [b, t, d]
    {i}.{sublayer}.in              what a sublayer reads, after its first norm [b, t, d]
    {i}.{sublayer}.q / k / v       queries, new keys and values by head, as attention uses them [b, h, t, k]
    {i}.{sublayer}.weights         attention weights [b, h, t, s]; rows are queries
    {i}.{sublayer}.heads           what each head read [b, h, t, k_v]
    {i}.mixer.latent               what latent attention compresses tokens to [b, t, rank]
    {i}.mixer.state                the states of a recurrent mixer, of both its ways [b, t, h]
    {i}.feedforward.hidden         activations of the feed-forward [b, t, f]; of experts, `shared.hidden` of the shared
    {i}.feedforward.router         how much each expert counts [b, t, experts]; 0 where it does not read the token
    {i}.{sublayer}.out             what a sublayer adds to the residual stream [b, t, d]
    {i}.out                        the residual stream after layer i [b, t, d]
    final                          after the final norm [b, t, d]

each behind `encoder.` or `decoder.`, with `{i}` the layer from 0 and `{sublayer}` mixer, cross or feedforward; and
`head`, what the model returns. Where an encoder pools its tokens, t and s count what a layer reads.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from anyformer.nn.context import Tap
from anyformer.nn.model import Transformer


def run_with_taps(
    model: Transformer, names: list[str], *inputs: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output, and the activations whose names match (`decoder.*.mixer.weights`, `encoder.0.out`)."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return x

    output = model(*inputs, **options, taps=Tap(keep, lambda name: any(fnmatchcase(name, n) for n in names)))
    check_met(names, seen)
    return output, seen


def check_met(names: Collection[str], seen: Collection[str]) -> None:
    """An error for names that no activation of a run had."""
    if missing := [n for n in names if not any(fnmatchcase(name, n) for name in seen)]:
        raise ValueError(f"no activation is called {', '.join(missing)}: see anyformer.inspection.taps for the names")
