"""Hash what models compute, to show that a change of the code changes no number.

    python -m tests.unchanged OUT.json                    # on the old commit, then on the new one, with the same torch
    python -m tests.unchanged OUT.json --against OLD.json # exits with 1 and lists the differences

For each config: SHA-256 of its initial weights, logits with padding, packing and a cache, gradients, greedy tokens and
the weights after 20 steps of AdamW with dropout. For each recipe: the run's weights after 20 steps. One thread; only
names from the public interface are used, so that the script runs on commits before and after a refactoring.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import anyformer as af

SMALL = {"depth": 2, "width": 32, "heads": 4, "vocab": 97}
POSITIONS = ["none", "sinusoidal", "rotary", "alibi", "t5", "{kind='learned', length=64}"]
ATTENTION = "decoder.blocks.*.mixer"
DECODERS = ["gpt1", "gpt2", "gpt3", "neox", "bloom", "palm", "llama", "mistral", "mixtral", "qwen3", "gemma", "gemma2"]
ENCODERS = ["bert", "roberta", "bigbird", "modernbert"]

# name -> (preset, overrides)
CONFIGS: dict[str, tuple[str, list[str]]] = {
    **{name: (name, []) for name in [*DECODERS, "gemma3", "deepseek", *ENCODERS, "vit", "vaswani", "t5", "bart"]},
    **{f"gpt2 position {p}": ("gpt2", [f"decoder.position={p}"]) for p in POSITIONS},
    **{
        f"vaswani position {p}": ("vaswani", [f"encoder.position={p}", f"decoder.position={p}"]) for p in POSITIONS[:-1]
    },
    **{f"llama placement {p}": ("llama", [f"decoder.blocks.*.placement={p}"]) for p in ("post", "branch", "sandwich")},
    **{f"gpt2 norm {n}": ("gpt2", [f"decoder.blocks.*.norm={n}"]) for n in ("none", "rms", "batch")},
    **{
        f"gpt2 pattern {p}": ("gpt2", [f"{ATTENTION}.pattern={p}"])
        for p in (
            "{kind='window', before=4, after=0}",
            "{kind='dilated', before=3, after=0, step=2}",
            "{kind='block_local', size=4}",
            "{kind='window', before=3, after=0, globals=2}",
        )
    },
    **{
        f"gpt2 mixer {m}": ("gpt2", [f"{ATTENTION}={m}"])
        for m in (
            "{kind='recurrent', cell='lstm'}",
            "{kind='recurrent', cell='gru'}",
            "{kind='convolution', width=3}",
            "{kind='dense', length=64}",
            "{kind='attention', heads=4, sinks=true}",
            "{kind='attention', heads=4, normalizer='relu'}",
            "{kind='attention', heads=4, cap=5.0}",
            "{kind='attention', heads=4, projections='shared_qk'}",
        )
    },
    **{
        f"gpt2 feedforward {f}": ("gpt2", [f"decoder.blocks.*.feedforward={f}"])
        for f in (
            "none",
            "{kind='experts', count=4, top_k=2, router={kind='sigmoid'}}",
            "{kind='gated', activation='silu'}",
            "{kind='plain', activation='squared_relu'}",
        )
    },
    "gpt2 parallel": ("gpt2", ["decoder.blocks.*.order=parallel"]),
    "gpt2 shared layers": ("gpt2", ["decoder.share=true"]),
    "gpt2 untied": ("gpt2", ["tie=none"]),
    "llama lora": ("llama", ["adapter={kind='lora', rank=2}"]),
    "bert pooled": ("bert", ["encoder.pooling={stages=[1, 1], factor=2, how='mean'}"]),
    "bert window": ("bert", ["encoder.blocks.*.mixer.pattern={kind='window', before=3, after=2}"]),
    "t5 rotary": ("t5", ["encoder.position=rotary", "decoder.position=rotary"]),
    "bart sandwich": ("bart", ["encoder.blocks.*.placement=sandwich", "decoder.blocks.*.placement=sandwich"]),
}

RECIPES: dict[str, list[str]] = {
    "sort": ["data.train.count=300", "data.valid=none", "batches.tokens=512", "data.train.shortest=6"],
    "dates": ["data.train.count=300", "data.valid=none", "batches.tokens=512"],
}


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over shapes, types and bytes."""
    found = hashlib.sha256()
    for x in tensors:
        x = x.detach().contiguous().cpu()
        found.update(f"{tuple(x.shape)} {x.dtype}".encode())
        found.update(x.view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return found.hexdigest()[:16]


def build(preset: str, overrides: list[str]) -> af.Transformer:
    options = dict(SMALL)
    if preset == "vit":
        del options["vocab"]
    if preset in ENCODERS:
        from anyformer.config import MaskedLM

        options["head"] = MaskedLM()  # type: ignore[assignment]
    config = getattr(af.presets, preset)(**options)
    torch.manual_seed(0)
    return af.Transformer(af.config.io.override(config, overrides))


def batch(model: af.Transformer, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Arguments of a call: two packed documents in one row, padding in the other."""
    random = torch.Generator().manual_seed(seed)
    config = model.config
    segments = torch.tensor([[0] * 7 + [1] * 9, [0] * 12 + [-1] * 4])
    ids = torch.randint(3, 97, (2, 16), generator=random)
    if config.encoder is not None and config.decoder is not None:
        target = torch.randint(3, 97, (2, 11), generator=random)
        return (ids, target), {"source_segments": segments.clamp(max=0)}
    if config.shape == "encoder" and type(config.source).__name__ == "Patches":
        return (torch.randn(2, 3, 224, 224, generator=random),), {}
    return (ids,), {"segments": segments}


def measure(model: af.Transformer) -> dict[str, str]:
    found = {"initial": digest(model.state_dict().values())}
    args, options = batch(model, 1)
    model.eval()
    with torch.no_grad():
        found["logits"] = digest([model(*args, **options)])
    if model.config.decoder is not None:
        prompt = args[0][:, :6]
        found["greedy"] = digest([af.generate(model, prompt, max_new_tokens=12)])
        found["sampled"] = digest([af.generate(model, prompt, max_new_tokens=12, temperature=0.8, top_p=0.9, seed=3)])
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    for step in range(20):
        args, options = batch(model, step)
        loss = model(*args, **options).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        if step == 0:
            found["gradients"] = digest(x.grad for x in model.parameters() if x.grad is not None)
        optimiser.step()
    found["trained"] = digest(model.state_dict().values())
    return found


def train(recipe: str, overrides: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        af.train(recipe, out=out, overrides=["train.steps=20", "train.evaluate_every=none", *overrides])
        return {"trained": digest(x for _, x in sorted(load_file(out / "model.safetensors").items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], dict[str, str]]] = {
        **{name: lambda c=c: measure(build(*c)) for name, c in CONFIGS.items()},  # type: ignore[misc]
        **{f"recipe {name}": lambda r=(name, o): train(*r) for name, o in RECIPES.items()},  # type: ignore[misc]
    }
    found = {name: case() for name, case in cases.items()}
    given.out.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} cases, {sum(map(len, found.values()))} digests, torch {torch.__version__}")
    if given.against:
        old = json.loads(given.against.read_text())
        changed = [f"{name}: {key}" for name, keys in old.items() for key in keys if found[name].get(key) != keys[key]]
        print("\n".join(changed) or "all equal")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
