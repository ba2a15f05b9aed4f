"""CTranslate2 with the weights of one of our encoder–decoders: the same answers, by another engine."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.attention.layout import make_layout
from anyformer.nn.model import Transformer
from benchmarks.sheet import Way


def ctranslate(build: Callable[[], Transformer], ids: Tensor, new: int, beams: int, kind: str = "float32") -> Way:
    """Kind: of its numbers, float32 or int8."""

    def make() -> Callable[[], Tensor]:
        import ctranslate2

        names = [list(map(str, row)) for row in ids.tolist()]
        with tempfile.TemporaryDirectory() as folder:
            described(build()).save(folder)
            threads = {"inter_threads": 1, "intra_threads": torch.get_num_threads()}
            engine = ctranslate2.Translator(folder, compute_type=kind, **threads)
        lengths = {"min_decoding_length": new, "max_decoding_length": new}

        def run() -> Tensor:
            found = engine.translate_batch(names, beam_size=beams, **lengths)
            return torch.tensor([list(map(int, one.hypotheses[0])) for one in found])

        return run

    return Way("theirs", make)


def described(model: Transformer) -> Any:
    """CTranslate2 spec of a model as in Vaswani et al.: post-norm, sinusoidal positions, one embedding table."""
    from ctranslate2.specs import TransformerSpec

    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    first = model.config.stacks["decoder"].blocks[0]
    spec = TransformerSpec.from_config(model.config.stacks["encoder"].depth, first.mixer.heads, pre_norm=False)
    table, width = model.table(model.source), model.config.width
    assert table is not None
    places = table.new_zeros(1, 512, width)
    for name, stack in stacks.items():
        assert stack is not None
        side = getattr(spec, name)
        side.scale_embeddings = width**0.5
        side.position_encodings.encodings = plain(stack.embed(places, make_layout(1, 512, places.device))[0])
        embedding = side.embeddings[0] if name == "encoder" else side.embeddings
        embedding.weight = plain(table)
        for layer, block in zip(side.layer, stack.blocks, strict=True):
            attention(layer.self_attention, block.mixer, ["qkv", "out"])
            if name == "decoder":
                attention(layer.attention, block.cross, ["q", "kv", "out"])
            fill(layer.ffn.linear_0, block.feedforward.inner.up)
            fill(layer.ffn.linear_1, block.feedforward.inner.down)
            norm(layer.ffn.layer_norm, block.feedforward.norm_sum)
    spec.decoder.projection.weight = plain(table)
    words = list(map(str, range(len(table))))
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.decoder_start_token = str(model.config.special.start)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "0", "2", "3"
    spec.config.layer_norm_epsilon = first.norm.eps
    spec.validate()
    spec.optimize()
    return spec


def attention(spec: Any, part: Any, names: list[str]) -> None:
    for linear, name in zip(spec.linear, names, strict=True):
        fill(linear, getattr(part.inner, name))
    norm(spec.layer_norm, part.norm_sum)


def fill(spec: Any, linear: nn.Linear) -> None:
    spec.weight = plain(linear.weight)
    if linear.bias is not None:
        spec.bias = plain(linear.bias)


def norm(spec: Any, one: Any) -> None:
    spec.gamma, spec.beta = plain(one.weight), plain(one.bias)


def plain(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()
