"""Greedy choice and sampling of the next token, with stateless noise.

Softmax sampling is the argmax of logits plus Gumbel noise, -log(-log u). Here u is a hash of (the row's seed, the
step, the token's id) and nothing else. So a sequence with its seed is the same in any batch, in any row, compiled or
not, on any device, as far as its logits are; no generator has a state, and nothing synchronises with the host.

The hash works on 32-bit words held in int64, with multipliers below 2^31: no multiplication overflows, so that every
compiler and device agrees on every bit. `mix` permutes the 32-bit integers; a row's words are folded into two keys,
each with its own start, and a token's id passes through both:

    key_i = mix(mix(mix(start_i ^ seed's low word) ^ its high word) ^ step)        for i = 0, 1
    low   = mix(key_0 ^ id),   high = mix(key_1 ^ low),   u = (52 bits of high, low + 1/2) / 2^52
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.generation.top_k import max_argmax

WORD = 0xFFFFFFFF
STARTS = (0x243F6A88, 0x85A308D3)  # the fraction of pi, as are the multipliers below, made odd


class TokenChoice(NamedTuple):
    """One token per row, and whether its logits have a distribution: no NaN, not all -inf, none +inf.

    Where they have none, the id is still one of the vocabulary; a loop checks `ok` once, at its end.
    """

    ids: Tensor  # int [b]
    ok: Tensor  # bool [b]


def greedy(logits: Tensor) -> TokenChoice:
    """Return the top-1 token of each row of [b, v]; of equals, the one with the lowest id."""
    best, ids = max_argmax(logits)
    return TokenChoice(ids, best.isfinite())  # a maximum with NaN is NaN


def sample(logits: Tensor, seeds: Tensor, steps: Tensor) -> TokenChoice:
    """Sample a token of each row of [b, v] from softmax(logits), by the rows' `seeds` and `steps`, int [b].

    Logits are converted to fp64 (fp32 where a device has none), so that the last bit of a logarithm, in
    which devices differ, decides once in about 10^15 draws rather than once in 10^7.
    """
    noise = gumbel(seeds, steps, logits.shape[-1], widest(logits.device))
    return TokenChoice((logits.to(noise.dtype) + noise).argmax(dim=-1), logits.amax(dim=-1).isfinite())


def choose(logits: Tensor, seeds: Tensor | None, steps: Tensor) -> TokenChoice:
    """Return the top-1 token of each row of [b, v], or with seeds a sampled one."""
    return greedy(logits) if seeds is None else sample(logits, seeds, steps)


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def row_seeds(seed: int, rows: int, device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Derive a seed for each row from `first` on, int64 [rows], from one; the rows of two seeds are independent."""
    row = torch.arange(first, first + rows, device=device)
    words = torch.full_like(row, seed & WORD), torch.full_like(row, seed >> 32 & WORD), row
    return (fold(STARTS[0], *words) >> 1 << 32) | fold(STARTS[1], *words)


def gumbel(seeds: Tensor, steps: Tensor, vocab: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return Gumbel noise [b, vocab], always finite: a token of logit -inf never wins over a possible one."""
    u = (bits(seeds, steps, vocab).to(dtype) + 0.5) * 2.0**-52
    # log(1 - u), not log(u): floats are dense near 0, and the small ones win
    return -(-torch.log1p(-u.clamp(max=1 - torch.finfo(dtype).eps / 2))).log()


def bits(seeds: Tensor, steps: Tensor, vocab: int) -> Tensor:
    """Return 52 random bits for every row and token, int64 [b, vocab]."""
    seeds, steps = seeds.long(), steps.long()
    keys = [fold(start, seeds & WORD, seeds >> 32 & WORD, steps & WORD)[:, None] for start in STARTS]
    low = mix(keys[0] ^ torch.arange(vocab, device=seeds.device))
    high = mix(keys[1] ^ low)
    return high << 20 | low >> 12


def fold(start: int, first: Tensor, *rest: Tensor) -> Tensor:
    """Hash words to one 32-bit word that depends on all their bits."""
    state = mix(start ^ first)
    for word in rest:
        state = mix(state ^ word)
    return state


def mix(x: Tensor) -> Tensor:
    """Permute the 32-bit integers: each bit of x flips each bit of the result in half of all cases."""
    x = (x ^ x >> 16) * 0x3F84D5B5 & WORD
    x = (x ^ x >> 15) * 0x082EFA99 & WORD
    return x ^ x >> 15
