"""A Transformer from scratch: the encoder-decoder of 2017 and GPT-2 by tensor operations alone, in reading order.

`python examples/from_scratch.py` compares each piece with anyformer, on the same weights, and trains a small GPT.

b rows, t tokens that attend (queries), s tokens that they attend to (keys), d width, h heads, k = d / h, v vocabulary.
Nothing is here for speed; dropout, the identity after training, is left out.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import anyformer as af


class Linear(nn.Module):
    """x Wᵀ + b: every output is a weighted sum of all inputs."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T  # [..., inputs] -> [..., outputs]
        return y if self.bias is None else y + self.bias


class LayerNorm(nn.Module):
    """Each token's vector, brought to mean 0 and variance 1; then a learned scale and shift of each feature."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)  # [b, t, d] -> [b, t, 1]
        variance = (x - mean).square().mean(dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def gelu(x: Tensor) -> Tensor:
    """x Φ(x), with the tanh that GPT-2 computes in place of the normal distribution Φ."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class MLP(nn.Module):
    """Two linear layers with an activation between them, the same at every token."""

    def __init__(self, width: int, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.up, self.down, self.act = Linear(width, 4 * width), Linear(4 * width, width), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # [b, t, d] -> [b, t, 4d] -> [b, t, d]


def softmax(scores: Tensor) -> Tensor:
    """Positive weights that sum to 1 along the last axis. Subtracting the largest score avoids overflow."""
    e = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return e / e.sum(dim=-1, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √k) v: each query's mean of the values, weighted by how well their keys match the query."""
    # F.scaled_dot_product_attention(q, k, v, mask) returns the same; the mask is True where a query sees a key
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # [b, h, t, k] and [b, h, s, k] -> [b, h, t, s]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return softmax(scores) @ v  # [b, h, t, s] and [b, h, s, k] -> [b, h, t, k]


def multi_head(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """One attention for each head, side by side. q [b, t, d], k and v [b, s, d] -> [b, t, d]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [b, t, h·k] -> [b, h, t, k]
    return attention(q, k, v, mask).transpose(1, 2).flatten(2)  # [b, h, t, k] -> [b, t, h·k]


def causal_mask(t: int) -> Tensor:
    """[t, t]: token i sees token j if j ≤ i."""
    return torch.ones(t, t, dtype=torch.bool).tril()


class SelfAttention(nn.Module):
    """Tokens attend to tokens of the same text: q, k and v are projections of one x."""

    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads, self.qkv, self.out = heads, Linear(width, 3 * width, bias), Linear(width, width, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # [b, t, 3d] -> three times [b, t, d]
        return self.out(multi_head(q, k, v, self.heads, mask))


class CrossAttention(nn.Module):
    """Tokens of the target attend to those of the source: q is a projection of x, k and v of the encoder's output."""

    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads, self.q, self.kv = heads, Linear(width, width, bias), Linear(width, 2 * width, bias)
        self.out = Linear(width, width, bias)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = self.kv(encoded).chunk(2, dim=-1)  # [b, s, 2d] -> twice [b, s, d]
        return self.out(multi_head(self.q(x), k, v, self.heads, mask))


class EncoderLayer(nn.Module):
    """Self-attention, then an MLP. Each is added to the residual stream, and a norm follows (post-norm)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.self_attention, self.norm_after_self = SelfAttention(width, heads, bias=False), LayerNorm(width, 1e-6)
        self.mlp, self.norm_after_mlp = MLP(width, torch.relu), LayerNorm(width, 1e-6)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm_after_self(x + self.self_attention(x, mask))
        return self.norm_after_mlp(x + self.mlp(x))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder's output, then an MLP (post-norm)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.self_attention, self.norm_after_self = SelfAttention(width, heads, bias=False), LayerNorm(width, 1e-6)
        self.cross_attention, self.norm_after_cross = CrossAttention(width, heads, bias=False), LayerNorm(width, 1e-6)
        self.mlp, self.norm_after_mlp = MLP(width, torch.relu), LayerNorm(width, 1e-6)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm_after_self(x + self.self_attention(x, causal_mask(x.shape[1])))
        x = self.norm_after_cross(x + self.cross_attention(x, encoded, mask))
        return self.norm_after_mlp(x + self.mlp(x))


def waves(t: int, d: int) -> Tensor:
    """[t, d]: a vector for each position p: sin(p / 10000^(2i/d)) and cos(p / 10000^(2i/d)), one after the other."""
    angles = torch.arange(t)[:, None] * 10_000.0 ** -(torch.arange(0, d, 2) / d)  # [t, d / 2]
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class EncoderDecoder(nn.Module):
    """The Transformer of 2017. One table embeds both texts, and its rows are what the logits compare with."""

    def __init__(self, depth: int, width: int, heads: int, vocab: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, width) * width**-0.5)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads) for _ in range(depth))

    def embed(self, ids: Tensor) -> Tensor:
        x = self.table[ids] * math.sqrt(self.table.shape[1])  # [b, t] -> [b, t, d]
        return x + waves(*x.shape[1:]).to(x.dtype)

    def forward(self, source: Tensor, target: Tensor, is_token: Tensor | None = None) -> Tensor:
        """[b, s] and what the decoder reads [b, t] to logits [b, t, v]; `is_token` is False at padding [b, s]."""
        mask = None if is_token is None else is_token[:, None, None]  # [b, 1, 1, s]
        encoded, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            encoded = layer(encoded, mask)
        for layer in self.decoder:
            x = layer(x, encoded, mask)
        return x @ self.table.T  # [b, t, d] -> [b, t, v]


class GPTLayer(nn.Module):
    """Causal self-attention, then an MLP. Each reads the normed residual stream and adds to the stream (pre-norm)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_before_self, self.self_attention = LayerNorm(width, 1e-5), SelfAttention(width, heads, bias=True)
        self.norm_before_mlp, self.mlp = LayerNorm(width, 1e-5), MLP(width, gelu)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.norm_before_self(x), causal_mask(x.shape[1]))
        return x + self.mlp(self.norm_before_mlp(x))


class GPT(nn.Module):
    """GPT-2: a decoder alone. Positions are learned vectors."""

    def __init__(self, depth: int, width: int, heads: int, vocab: int, length: int):
        super().__init__()
        self.token_table = nn.Parameter(0.02 * torch.randn(vocab, width))
        self.position_table = nn.Parameter(0.02 * torch.randn(length, width))
        self.decoder = nn.ModuleList(GPTLayer(width, heads) for _ in range(depth))
        self.final_norm = LayerNorm(width, 1e-5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_table[ids] + self.position_table[: ids.shape[1]]  # [b, t] -> [b, t, d]
        for layer in self.decoder:
            x = layer(x)
        return self.final_norm(x) @ self.token_table.T  # [b, t, d] -> [b, t, v]


# names of the parts above, and of the same parts in anyformer
NAMES = {
    "table": "source.table.weight", "token_table": "target.table.weight", "mlp": "feedforward.inner",
    "self_attention": "mixer.inner", "norm_before_self": "mixer.norm_in", "norm_after_self": "mixer.norm_sum",
    "cross_attention": "cross.inner", "norm_after_cross": "cross.norm_sum", "norm_after_mlp": "feedforward.norm_sum",
    "norm_before_mlp": "feedforward.norm_in", "final_norm": "decoder.final_norm",
    "position_table": "decoder.embedder.tables.positions", **{str(i): f"blocks.{i}" for i in range(100)},
}  # fmt: skip


def name_in_anyformer(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


@torch.no_grad()
def differences(ours: nn.Module, theirs: af.Transformer, *inputs: Tensor) -> dict[str, float]:
    """Copy anyformer's weights by name; return the largest difference between the outputs of each pair of modules."""
    weights, outputs = theirs.state_dict(), dict[tuple[nn.Module, str], Tensor]()
    ours.load_state_dict({name: weights[name_in_anyformer(name)] for name in ours.state_dict()})
    for model in (ours, theirs):
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, args, out, key=(model, name): outputs.update({key: out}))
        model(*inputs)
    pairs = {name_in_anyformer(name): out for (model, name), out in outputs.items() if model is ours}
    return {name: float((out - outputs[theirs, name]).abs().max()) for name, out in pairs.items()}


def train(model: nn.Module, ids: Tensor, length: int, steps: int) -> None:
    """Learn to predict each byte of a text from those before it. A batch is 16 windows of the text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps + 1):
        windows = ids[torch.randint(len(ids) - length, (16, 1)) + torch.arange(length + 1)]  # [b, t + 1]
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step:3}  loss {loss:.2f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    source, target = torch.randint(1, 50, (3, 10)), torch.randint(1, 50, (3, 7))
    pair = af.Transformer(af.presets.vaswani(depth=1, width=32, heads=4, vocab=50)).double().eval()
    found = differences(EncoderDecoder(1, 32, 4, 50).double(), pair, source, target)
    decoder = af.Transformer(af.presets.gpt2(depth=1, width=32, heads=4, vocab=50, length=16)).double().eval()
    further = differences(GPT(1, 32, 4, 50, 16).double(), decoder, target)
    print("the largest difference from anyformer in the output of each module, in float64:")
    for name, difference in (*found.items(), *further.items()):
        print(f"  {difference:.0e}  {name or 'the whole model'}")
    train(GPT(2, 64, 4, 256, 64), torch.tensor(list(Path(__file__).read_bytes())), length=64, steps=100)
