"""ONNX files: onnxruntime says what torch says, for any batch, length and padding; what cannot be is refused."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.config import Block, Classifier, ConfigError, Embedder, Features, ModelConfig, NoMixer, Stack
from anyformer.data.tokenizer import train_tokenizer
from anyformer.generation.generate import generate
from anyformer.interop import onnx
from anyformer.recipe import Characters, LanguageModel
from anyformer.recipe.ready import read_recipe
from anyformer.runs.run import write_folder, write_model
from tests.test_cli import done, refused

runtime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
pytest.importorskip("onnxscript", reason="needs the extra `export`")

TOKENIZER = train_tokenizer(Characters(), ["the quick brown fox jumps over the lazy dog"])
VOCAB, LENGTH = TOKENIZER.size, 40
TOLERANCE = 1e-4
SMALL: dict[str, Any] = {"depth": 1, "width": 24, "heads": 4, "vocab": VOCAB}


def translation() -> ModelConfig:
    """The model of the recipe for Multi30k, smaller."""
    sizes = ["width=24", "encoder.depth=1", "decoder.depth=1", f"source.vocab={VOCAB}", f"target.vocab={VOCAB}"]
    config = read_recipe("multi30k-en-de", [f"model.{size}" for size in sizes]).model
    return config.model_copy(update={"special": config.special.model_copy(update={"start": 1})})


def llama() -> ModelConfig:
    """Rotary positions, grouped heads, and experts in the second of two layers."""
    sizes = SMALL | {"depth": 2, "kv_heads": 2, "ff": 20}
    config, other = af.presets.llama(**sizes), af.presets.mixtral(**sizes)
    assert config.decoder is not None
    assert other.decoder is not None
    blocks = (config.decoder.blocks[0], other.decoder.blocks[0])
    return config.model_copy(update={"decoder": config.decoder.model_copy(update={"blocks": blocks})})


def frames() -> ModelConfig:
    """No tokens, and one vector per row."""
    stack = Stack(depth=1, blocks=(Block(mixer=NoMixer()),))
    return ModelConfig(width=8, source=Features(size=5), encoder=stack, head=Embedder(pool="mean"))


def tagger() -> ModelConfig:
    """The model of the recipe for names, smaller: spelled words, and a CRF."""
    sizes = ["width=8", "encoder.depth=1", "source.spelling.channels=6", f"source.vocab={VOCAB}"]
    return read_recipe("wnut-ner", [f"model.{size}" for size in sizes]).model


CONFIGS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2": lambda: af.presets.gpt2(**SMALL, length=LENGTH),
    "llama": llama,
    "bert": lambda: af.presets.bert(**SMALL, length=LENGTH, head=Classifier(labels=3, pool="mean")),
    "frames": frames,
    "t5": lambda: af.presets.t5(**SMALL),
    "tagger": tagger,
    "multi30k": translation,
}


class Exported(NamedTuple):
    model: af.Transformer  # in fp32
    path: Path
    session: Any

    def runs(self, **inputs: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


def loud(config: ModelConfig) -> af.Transformer:
    """Weights with which a wrong mask or position shows."""
    torch.manual_seed(0)
    model = af.Transformer(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def written(model: af.Transformer, folder: Path) -> Path:
    """A run of it."""
    spec = LanguageModel()
    task = spec.build(TOKENIZER)
    write_folder(folder, lambda path: write_model(path, model.state_dict(), model.config, spec, task))
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Each model is exported once."""
    folder, made = tmp_path_factory.mktemp("onnx"), dict[str, Exported]()

    def get(name: str) -> Exported:
        if name not in made:
            model, path = loud(CONFIGS[name]()), folder / f"{name}.onnx"
            if name == "gpt2":
                run = written(model, tmp_path_factory.mktemp("runs") / "run")
                assert done("export", run, path, "--format", "onnx") == f"exported: {path}, as onnx\n"
            else:
                model = model.bfloat16() if name == "llama" else model  # whose file is in fp32 all the same
                assert onnx.export_onnx(model, path) == path
            assert sorted(folder.iterdir()) == sorted([path, *(other.path for other in made.values())])
            made[name] = Exported(model.float(), path, runtime.InferenceSession(path))
        return made[name]

    return get


def ragged(*lengths: int, side: str = "right", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows of these lengths, the same whichever side the pads are on."""
    rng = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(3, VOCAB, mask.shape, generator=rng)
    ids[mask.bool()] = torch.randint(3, VOCAB, (sum(lengths),), generator=rng)
    return ids, mask


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert float(ours.std()) > 0.1
    return float((ours - theirs).abs().max())


ROWS = [(1,), (2, 1), (23, 4, 17, 1, 9), (LENGTH, LENGTH)]
PADDED = [(rows, side) for rows in ROWS for side in ("right", "left")]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_equal_torch(name: str, exported: Callable[[str], Exported]) -> None:
    one = exported(name)
    for rows, side in PADDED:
        ids, mask = ragged(*rows, side=side)
        with torch.no_grad():
            ours = one.model(ids, segments=mask - 1)
        assert apart(ours, one.runs(ids=ids, mask=mask)) < TOLERANCE, (rows, side)


def test_encoders_equal_torch(exported: Callable[[str], Exported]) -> None:
    one = exported("bert")
    for rows, side in PADDED:
        ids, mask = ragged(*rows, side=side)
        types = (mask.cumsum(1) > 2).long()
        with torch.no_grad():
            ours = one.model(ids, segments=mask - 1, types=types)
        assert apart(ours, one.runs(ids=ids, mask=mask, types=types)) < TOLERANCE, (rows, side)


def test_frames_equal_torch(exported: Callable[[str], Exported]) -> None:
    one = exported("frames")
    for rows, side in PADDED:
        _, mask = ragged(*rows, side=side)
        features = torch.randn(*mask.shape, 5)
        with torch.no_grad():
            ours = one.model(features, segments=mask - 1)
        assert apart(ours, one.runs(features=features, mask=mask)) < TOLERANCE, (rows, side)


def test_spelled_words_and_potentials_equal_torch(exported: Callable[[str], Exported]) -> None:
    one = exported("tagger")
    for rows, side in PADDED:
        ids, mask = ragged(*rows, side=side)
        spelled = torch.randint(257, (*ids.shape, 16)) * torch.randint(2, (*ids.shape, 1))
        with torch.no_grad():
            ours = one.model(ids, segments=mask - 1, spelled=spelled)
        real = mask.bool()
        assert apart(ours[real], one.runs(ids=ids, mask=mask, spelled=spelled)[real]) < TOLERANCE, (rows, side)
    shapes = {node.name: node.shape for node in (*one.session.get_inputs(), *one.session.get_outputs())}
    assert shapes["spelled"] == ["batch", "length", 16]
    assert shapes["potentials"] == ["batch", "length", 14, 13]


@pytest.mark.parametrize("name", ["t5", "multi30k"])
def test_pairs_equal_torch(name: str, exported: Callable[[str], Exported]) -> None:
    one = exported(name)
    for rows, side in PADDED:
        source, source_mask = ragged(*rows, side=side)
        target, target_mask = ragged(*reversed(rows), side=side, seed=1)
        target, target_mask = (torch.cat((x, x[:, :2]), dim=1) for x in (target, target_mask))  # of another length
        with torch.no_grad():
            ours = one.model(source, target, source_segments=source_mask - 1, target_segments=target_mask - 1)
        inputs = {"source": source, "source_mask": source_mask, "target": target, "target_mask": target_mask}
        assert apart(ours, one.runs(**inputs)) < TOLERANCE, (rows, side)


def test_pads_change_nothing(exported: Callable[[str], Exported]) -> None:
    one, lengths = exported("llama"), (5, 17, 1)
    for side in ("right", "left"):
        ids, mask = ragged(*lengths, side=side)
        together = one.runs(ids=ids, mask=mask)
        for row, real, said in zip(ids, mask.bool(), together, strict=True):
            alone = row[real][None]
            assert apart(one.runs(ids=alone, mask=torch.ones_like(alone))[0], said[real]) < TOLERANCE


def test_a_file_decodes_as_the_model_does(exported: Callable[[str], Exported]) -> None:
    one = exported("multi30k")
    source, source_mask = ragged(9, 4, 6)
    ours = generate(one.model, source, segments=source_mask - 1, max_new_tokens=12)
    said = ours[:, :1]
    for _ in range(12):
        mask = torch.ones_like(said)
        logits = one.runs(source=source, source_mask=source_mask, target=said, target_mask=mask)
        said = torch.cat((said, logits[:, -1:].argmax(dim=-1)), dim=1)
    assert said.tolist() == ours.tolist()


def test_inputs_and_outputs_have_names(exported: Callable[[str], Exported]) -> None:
    def named(nodes: Any) -> dict[str, list[str | int]]:
        return {node.name: node.shape for node in nodes}

    pair, both = exported("multi30k").session, ["batch", "length"]
    source, target = ["batch", "source_length"], ["batch", "target_length"]
    assert named(pair.get_inputs()) == {
        "source": source,
        "source_mask": source,
        "target": target,
        "target_mask": target,
    }
    assert named(pair.get_outputs()) == {"logits": [*target, VOCAB]}
    assert named(exported("bert").session.get_inputs()) == {"ids": both, "mask": both, "types": both}
    assert named(exported("bert").session.get_outputs()) == {"logits": ["batch", 3]}
    assert named(exported("frames").session.get_inputs()) == {"features": [*both, 5], "mask": both}
    assert named(exported("frames").session.get_outputs()) == {"embeddings": ["batch", 8]}


def test_nothing_in_a_file_tells_where_it_was_made(exported: Callable[[str], Exported]) -> None:
    assert str(Path(onnx.__file__).parent.parent).encode() not in exported("gpt2").path.read_bytes()


# -- what is refused --------------------------------------------------------------------------------------------------


def wrong(model: af.Transformer, path: Path, *said: str) -> None:
    """Refused in one line, and nothing is left."""
    before = sorted(path.parent.iterdir()) if path.parent.exists() else None
    with pytest.raises(ConfigError) as error:
        onnx.export_onnx(model, path)
    for words in said:
        assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert (sorted(path.parent.iterdir()) if path.parent.exists() else None) == before


@pytest.fixture(scope="module")
def small() -> af.Transformer:
    return loud(CONFIGS["gpt2"]())


@pytest.mark.parametrize("name", ["there.onnx", "there.onnx.data"])
def test_no_file_is_written_over(name: str, small: af.Transformer, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    wrong(small, tmp_path / "there.onnx", f"{name}: exists already")
    assert (tmp_path / name).read_text() == "mine"


def test_the_extra_is_named(small: af.Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    wrong(small, tmp_path / "new" / "a.onnx", "onnxscript", "pip install 'anyformer[export]'")


@pytest.mark.parametrize("mixer", [{"kind": "recurrent"}, {"kind": "gated_delta", "heads": 2}])
def test_recurrent_layers_are_refused_by_their_field(tmp_path: Path, mixer: dict[str, object]) -> None:
    config = af.ModelConfig.model_validate(
        {
            "width": 8,
            "target": {"vocab": VOCAB},
            "decoder": {"depth": 2, "blocks": [{"mixer": {"heads": 2}}, {"mixer": mixer}]},
            "head": "lm",
        }
    )
    wrong(af.Transformer(config), tmp_path / "a.onnx", f"decoder.blocks.1.mixer.kind = '{mixer['kind']}'")


def test_quantised_models_are_refused(small: af.Transformer, tmp_path: Path) -> None:
    wrong(af.quantise(small), tmp_path / "a.onnx", "before it is quantised")


def test_what_torch_cannot_is_told(small: af.Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing\n  in many\n  lines")

    monkeypatch.setattr(torch.export, "export", fail)
    wrong(small, tmp_path / "a.onnx", "torch cannot export this model: no such thing")


def test_other_answers_are_not_written(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = exported("gpt2")
    other = loud(one.model.config)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    monkeypatch.setattr(onnx, "_write", lambda model, inputs, written, path: shutil.copy(one.path, written))
    onnx.export_onnx(one.model, tmp_path / "same.onnx")
    wrong(other, tmp_path / "a.onnx", "onnxruntime's outputs differ")
    monkeypatch.setattr(onnx, "_write", lambda model, inputs, written, path: written.write_bytes(b"none"))
    wrong(other, tmp_path / "a.onnx", "onnxruntime cannot read it")


def test_the_command_refuses_in_one_line(small: af.Transformer, tmp_path: Path) -> None:
    run, out = written(small, tmp_path / "run"), tmp_path / "a.onnx"
    (told,) = refused("export", run, out, "--format", "onnx", "--family", "gpt2")
    assert told.startswith("--family: is for --format hf")
    out.mkdir()
    assert refused("export", run, out, "--format", "onnx") == [f"{out}: exists already; choose another file"]
