"""Laws for a model with any part: what every part of the package obeys, too."""

from itertools import pairwise

import torch

import anyformer as af
from anyformer.config import ModelConfig, io
from anyformer.nn.context import Tap

VOCAB = 11


def model_with(**parts) -> ModelConfig:
    """A decoder of two blocks, of attention where no other mixer is given."""
    block = {"mixer": {"heads": 2}, "norm": "rms", **{key: part for key, part in parts.items() if key != "position"}}
    stack = {"depth": 2, "blocks": block, "position": parts.get("position", "none"), "final_norm": "rms"}
    data = {"width": 8, "target": {"kind": "tokens", "vocab": VOCAB}, "decoder": stack, "head": {"kind": "lm"}}
    return io.build(ModelConfig, data)


def built(config: ModelConfig, seed: int = 0) -> af.Transformer:
    torch.manual_seed(seed)
    model = af.Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def holds_its_laws(config: ModelConfig) -> None:
    """Round trips, costs, taps, causality, padding, packing, caching, segment memory and compiling."""
    for format in ("toml", "json"):
        assert io.loads(ModelConfig, io.dumps(config, format), format) == config
    with torch.device("meta"):
        assert sum(p.numel() for p in af.Transformer(config).parameters()) == af.count(config, length=6).parameters
    model = built(config)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    copied = model(ids, taps=Tap(lambda name, x: x.clone()))
    assert torch.allclose(copied, whole), "a tap that changes nothing changes the output"
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    assert torch.allclose(model(changed)[:, :6], whole[:, :6]), "reads later tokens"
    padded = torch.cat((ids, ids[:, :3]), dim=1)
    segments = torch.zeros(padded.shape, dtype=torch.long)
    segments[:, 9:] = -1
    assert torch.allclose(model(padded, segments=segments)[:, :9], whole), "reads padding"
    packed = torch.cat((ids[:1], ids[1:]), dim=1)
    of = torch.arange(2).repeat_interleave(9)[None]
    assert torch.allclose(model(packed, segments=of)[0, 9:], whole[1]), "reads the row packed before it"
    cache, outs = model.new_cache(2, 9), []
    for a, b in pairwise((0, 4, 5, 6, 9)):
        outs.append(model.decode(ids[:, a:b], cache=cache))
    assert torch.allclose(torch.cat(outs, dim=1), model.decode(ids)), "with a cache it computes something else"
    if not any(block.mixer.has_state for block in config.decoder.blocks):
        data = config.model_dump()
        data["decoder"]["memory"] = 9
        reader = af.Transformer(io.build(ModelConfig, data)).double().eval()
        reader.load_state_dict(model.state_dict())
        past, outs = reader.new_past(2), []
        for part in ids.split((4, 3, 2), dim=1):
            out, past = reader(part, past=past)
            outs.append(out)
        assert torch.allclose(torch.cat(outs, dim=1), whole), "with a segment memory it computes something else"
    model.train()
    model(ids).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    is_traced(config.model_copy(update={"decoder": config.decoder.model_copy(update={"depth": 1})}))


def is_traced(config: ModelConfig) -> None:
    """The compiler traces a pass without a graph break."""
    model, ids = built(config), torch.arange(VOCAB)[None]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(ids, segments=ids // 6), model(ids, segments=ids // 6))
