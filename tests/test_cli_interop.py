"""The verbs import and export: what they say, how they end, and that a refusal leaves nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import Characters, LanguageModel
from anyformer.runs.run import Run, write_folder, write_model
from tests.test_cli import done, refused, run

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENIZER = train_tokenizer(Characters(), [TEXT])


def write_run(folder: Path, *changes: str) -> Path:
    torch.manual_seed(0)
    config = af.presets.gpt2(depth=1, width=8, heads=2, vocab=TOKENIZER.size, length=16)
    model = af.Transformer(af.config.io.override(config, changes)).eval()
    spec = LanguageModel()
    made = Run(model, spec.build(TOKENIZER), spec, folder)
    write_folder(folder, lambda path: write_model(path, model.state_dict(), model.config, spec, made.task))
    return folder


@pytest.fixture(scope="module")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interop")
    out = folder / "공개 公开"
    assert done("export", write_run(folder / "run"), out) == f"exported: {out}, as gpt2\n"
    return out


@pytest.fixture
def public(_exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_exported, tmp_path / "public"))


def only(folder: Path, *names: str) -> None:
    """Nothing else was left there, hidden files included."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_import(public: Path, tmp_path: Path) -> None:
    out, size = tmp_path / "가져온 것", af.from_hf(public).model.num_parameters()
    said = done("import", public, "--out", out)
    assert said.splitlines()[0] == f"imported: {out}, {size:,} parameters, {TOKENIZER.size} tokens"
    (tmp_path / "in.txt").write_text(f"{TEXT[:5]}\n")
    assert done("predict", out, tmp_path / "in.txt", "--max-new-tokens", "4").strip()
    assert done("export", out, tmp_path / "again") == f"exported: {tmp_path / 'again'}, as gpt2\n"
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (public / file).read_bytes()


def test_import_refuses(public: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "full").mkdir()
    (line,) = refused("import", public, "--out", tmp_path / "full")
    assert line == f"{tmp_path / 'full'}: exists already; choose another --out"
    (line,) = refused("import", tmp_path / "nowhere", "--out", out)
    assert line.startswith(f"{tmp_path / 'nowhere'}: is of no kind that is read: give a folder with a config.json")
    config = json.loads((public / "config.json").read_text())
    (public / "config.json").write_text(json.dumps({**config, "model_type": "gtp2"}))
    (line,) = refused("import", public, "--out", out)
    assert line == f"{public / 'config.json'}: model_type = 'gtp2': did you mean 'gpt2'?"
    (public / "config.json").write_text(json.dumps({**config, "model_type": "zebra"}))
    (line,) = refused("import", public, "--out", out)
    assert "model_type = 'zebra': known here: albert, bart, bert" in line
    (public / "config.json").write_text(json.dumps({**config, "add_cross_attention": True}))
    (line,) = refused("import", public, "--out", out)
    name, hint = "add_cross_attention", "; --ignore-field add_cross_attention reads the file without it"
    assert line == f"{public / 'config.json'}: {name} = True: only False is supported{hint}"
    (public / "config.json").write_text(json.dumps(config))
    for name, words in (
        ("tokenizer.json", "holds no tokenizer"),
        ("model.safetensors", "holds no weights"),
        ("config.json", "cannot be read: No such file"),
    ):
        (public / name).unlink()
        (line,) = refused("import", public, "--out", out)
        assert words in line
        assert str(public) in line
    only(tmp_path, "public", "full")


def test_import_warns(public: Path, tmp_path: Path) -> None:
    """On standard error, in one line each, and goes on."""
    from safetensors.torch import load_file, save_file

    weights = load_file(public / "model.safetensors")
    weights["transformer.ln_f.bias"][0] = float("nan")
    save_file(weights, public / "model.safetensors")
    result = run("import", public, "--out", tmp_path / "run")
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line == f"warning: {public / 'model.safetensors'}: transformer.ln_f.bias: some values are not finite"


def test_an_imported_run_has_no_data(public: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done("import", public, "--out", out)
    (line,) = refused("evaluate", out)
    instead = f"--tasks FILE evaluates it on rows of a file, train.init_from={out} trains it on data of a recipe"
    assert line == f"{out}: has no recipe.toml: it was not trained here, and has no data; {instead}"


@pytest.mark.parametrize("format", ["gguf", "onnx"])
def test_the_ending_of_a_file_is_its_format(tmp_path: Path, format: str) -> None:
    pytest.importorskip(format)
    made, file = write_run(tmp_path / "run"), tmp_path / f"model.{format}"
    (line,) = refused("export", made, file, "--family", "gpt2")
    assert line == f"--family: is for --format hf: {format.upper()} has no families"


def test_export_refuses(tmp_path: Path) -> None:
    made, out = write_run(tmp_path / "run"), tmp_path / "out"
    (tmp_path / "full").mkdir()
    (line,) = refused("export", made, tmp_path / "full")
    assert line == f"{tmp_path / 'full'}: exists already; choose another folder"
    (line,) = refused("export", made, out, "--family", "gtp2")
    assert line == "family = 'gtp2': did you mean 'gpt2'?"
    assert refused("export", made, out, "--family", "llama")
    (line,) = refused("export", made, out, "--family", "bert")
    assert line.startswith("is decoder: bert is encoder")
    (line,) = refused("export", tmp_path / "none", out)
    assert "there is no such folder" in line
    (line,) = refused("export", made, out, "--format", "onnx", "--family", "gpt2")
    assert line.startswith("--family: is for --format hf")
    other = write_run(tmp_path / "other", "head.cap=3.0")
    (line,) = refused("export", other, out)
    assert line.startswith("head.cap = 3.0: gpt2 has nothing")
    only(tmp_path, "run", "other", "full")


def test_a_verb_of_no_format(tmp_path: Path) -> None:
    result = run("export", tmp_path, tmp_path / "out", "--format", "tflite")
    assert result.exit_code == 2
    assert "hf" in result.stderr
