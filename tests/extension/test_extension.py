"""Parts from outside the package: of a file, of an installed package, and registered in a program."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import anyformer as af
from anyformer.config import Alibi, ConfigError, ModelConfig, Norm, Position, import_file, io
from anyformer.config.cost import Cost
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.interop.gguf_export import to_gguf
from anyformer.interop.hf_folder import to_hf
from anyformer.recipe.ready.from_run import config_of_run
from anyformer.testing.subject import model_with
from tests import loop
from tests.serve.mixed_requests import ask
from tests.serve.test_engine import answer
from tests.training.small import assert_same_run, pairs, run as train, stop_at

FILE = Path(__file__).with_name("my_parts.py")
DECODER = "decoder.blocks.0"
CHANGES = [
    "decoder.position=logarithm",
    f"{DECODER}.mixer={{kind='double', heads=2}}",
    f"{DECODER}.norm=scale",
    f"{DECODER}.feedforward={{kind='bottleneck', rank=3}}",
    "target=digits",
    "head=softmaxes",
]


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    import_file(FILE)


def anyformer(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anyformer", *map(str, args)]
    own = {key: value for key, value in os.environ.items() if key != "ANYFORMER_IMPORT"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=own)


def test_a_table_that_is_not_there_cannot_be_tied() -> None:
    for change, why in (
        ({"input": {"kind": "digits", "vocab": 9}}, "an input of kind 'digits' has no table to tie"),
        ({"head": {"kind": "softmaxes"}}, "a head of kind 'softmaxes' has no vocabulary to tie"),
    ):
        config = model_with(**change).model_dump()
        with pytest.raises(ConfigError, match=f"tie = 'output': {why}"):
            io.build(ModelConfig, config | {"tie": "output"})


def test_a_run_with_them_resumes_with_the_same_bits(tmp_path: Path) -> None:
    recipe = pairs("decoder", steps=6, save_every=2)
    own = model_with(input={"kind": "digits"}, head="softmaxes")
    change = {"target": own.target, "head": own.head}
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=change)})
    train(recipe, tmp_path / "whole")
    assert stop_at(recipe, tmp_path / "stopped", 3)
    train(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_the_schema_knows_parts_from_outside() -> None:
    schema = json.dumps(io.schema(ModelConfig))
    own = "logarithm", "strided", "scale", "mish", "bottleneck", "double", "mean", "digits", "softmaxes"
    assert [kind for kind in own if f'"{kind}"' not in schema] == []
    assert "width of the hidden layer" in schema  # the comment beside the field


def test_an_adapter_finds_their_linear_layers() -> None:
    config = model_with(feedforward="bottleneck").model_dump()
    config["adapter"] = {"kind": "lora", "rank": 2, "targets": ["*.feedforward"]}
    model = af.Transformer(io.build(ModelConfig, config))
    assert {name.split(".")[-3] for name, _ in model.named_parameters() if ".lora." in name} == {"down", "up"}


def test_faults_name_parts_from_outside() -> None:
    with pytest.raises(ConfigError, match="unknown kind; did you mean 'logarithm'"):
        model_with(position="logaritm")
    with pytest.raises(ConfigError, match=r"blocks\.0\.feedforward\.rank = 0: must be at least 1"):
        model_with(feedforward={"kind": "bottleneck", "rank": 0})


def test_a_family_is_built_by_the_kind_of_a_part() -> None:
    assert io.build(Position, "logarithm").kind == "logarithm"
    assert io.build(Position, {"kind": "alibi", "factor": 2.0}) == Alibi(factor=2.0)
    with pytest.raises(ConfigError, match=r"^factor = -1: must be greater than 0$"):
        io.build(Position, {"kind": "alibi", "factor": -1})
    with pytest.raises(ConfigError, match=r"unknown kind; known here: alibi, .*; or give a file .* by --import FILE$"):
        io.build(Position, "kerple")


class Double(Norm):
    """Twice the input."""

    kind: Literal["twice"] = "twice"

    def build(self, width):
        import torch

        return torch.nn.Identity()

    def cost(self, width, rows):
        return Cost()


def test_a_class_is_known_once_it_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"kind 'twice' is not registered: call anyformer.register\(Double\)"):
        af.config.Block(mixer="none", norm=Double())
    af.register(Double)
    assert io.build(af.config.Block, {"mixer": "none", "norm": "twice"}).norm == Double()
    af.register(Double)  # again, as in a notebook


def test_what_is_no_whole_part_is_refused() -> None:
    class Nameless(Norm):
        """Without a kind."""

    class Costless(Norm):
        kind: Literal["costless"] = "costless"

        def build(self, width):
            return None

    class Other(Double):
        kind: Literal["rms"] = "rms"

    for part, what in (
        (Nameless, "has no kind"),
        (Costless, "lacks cost"),
        (Other, "which anyformer.config.norm.RMSNorm"),
    ):
        with pytest.raises(ValueError, match=what):
            af.register(part)
    with pytest.raises(ValueError, match="is no part"):
        af.register(dict)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with parts of the file, trained by the command alone."""
    folder = tmp_path_factory.mktemp("outside") / "run"
    few = ["train.steps=4", "data.train.count=64", "data.valid.count=16", "data.test.count=16"]
    changes = [f"model.{change}" for change in CHANGES]
    done = anyformer("train", "sort", "--out", folder, *few, *changes, "--import", FILE)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.system
def test_a_run_with_them_is_used_like_any_other(run: Path, tmp_path: Path) -> None:
    recorded = json.loads((run / "parts.json").read_text())
    assert {"Position logarithm", "Mixer double", "Norm scale", "Input digits", "Head softmaxes"} <= recorded.keys()
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()
    (tmp_path / "in.txt").write_text("n1 n3 n2\n" * 3)
    for verb in (["count", run], ["evaluate", run], ["predict", run, tmp_path / "in.txt"], ["config", "show", run]):
        done = anyformer("--import", FILE, *verb)
        assert done.returncode == 0, done.stderr


def test_a_page_shows_a_run_with_them(run: Path) -> None:
    loaded = af.load(run)
    workspace = Workspace({"run": OpenRun("run", loaded, run)})

    def shown(view: str, **fields: object) -> dict[str, Any]:
        return workspace.answer(view, {"run": "run", "text": "n3 n1 n2", **fields})

    block, path = shown("block"), shown("path")
    assert block["input"]["decoder"]["details"] == {"vocab": loaded.config.vocab, "tables": 2, "size": 8}
    for stage in (*path["sides"][0]["begin"], *path["sides"][0]["end"], *path["head"]):
        shown("stage", stage=stage)
    assert shown("stage", stage="head.logits")["formula"] == ["y = softmaxes(h)"]
    assert path["follow"] == []
    with pytest.raises(ConfigError, match="SoftmaxesModule has no frozen form"):
        shown("follow", level="parts")
    for view in ("next", "lens", "salience", "cache", "effects"):
        shown(view)


def test_they_are_served_and_refused_by_name_where_no_format_has_them(run: Path, tmp_path: Path) -> None:
    loaded, ids = af.load(run), (3, 4, 5)

    async def served():
        async with af.Engine(loaded.model) as engine:
            return await answer(engine, ask(ids, 5))

    tokens, _ = loop.run(served())
    assert tokens == af.generate(loaded.model, torch.tensor([ids]), max_new_tokens=5)[0, 3:].tolist()
    for export in (to_hf, to_gguf):
        with pytest.raises(ConfigError, match="softmaxes"):
            export(loaded, tmp_path / "out")


@pytest.mark.system
def test_a_run_imports_nothing_that_its_folder_names(run: Path, tmp_path: Path) -> None:
    """Not even where the copy of the file lies beside the program."""
    (run.parent / FILE.name).write_text("raise SystemExit('imported')")
    command = [sys.executable, "-m", "anyformer", "predict", "run", "in.txt"]
    (run.parent / "in.txt").write_text("n1 n2\n")
    own = {key: value for key, value in os.environ.items() if key != "ANYFORMER_IMPORT"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=run.parent, env=own)
    assert (done.returncode, "imported" in done.stdout + done.stderr) == (2, False)
    assert f"needs the part 'logarithm' (Position) of {FILE.name}: give it with --import {FILE.name}" in done.stderr
    assert f"the folder has a copy, {Path('run') / FILE.name}: read it first" in done.stderr


def test_a_changed_file_is_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyformer.config import outside

    changed = outside._SOURCES["my_parts"]._replace(sha256="0" * 64)
    monkeypatch.setitem(outside._SOURCES, "my_parts", changed)
    with pytest.warns(UserWarning, match="my_parts.py has changed since the run was saved"):
        config_of_run(run)


def test_a_file_of_the_same_name_beside_a_config_is_not_read(tmp_path: Path) -> None:
    """Only run folders have such a record; a user's own file may be called parts.json, too."""
    (tmp_path / "parts.json").write_text("[1, 2]")
    io.save(model_with(norm="rms"), tmp_path / "model.toml")
    assert io.load(ModelConfig, tmp_path / "model.toml") == model_with(norm="rms")


@pytest.mark.system
def test_an_installed_package_needs_no_option(tmp_path: Path) -> None:
    """What pip writes of a package with an entry point; its parts are found where a config names one."""
    (tmp_path / "lab_parts.py").write_text(FILE.read_text())
    info = tmp_path / "lab_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-parts\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[anyformer.parts]\nlab = lab_parts\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = anyformer(
        "count", "gpt2", "depth=1", "width=16", "heads=2", "vocab=11", f"{DECODER}.mixer=mean", PYTHONPATH=path
    )
    assert done.returncode == 0, done.stderr
    assert "decoder mean" in done.stdout


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "cannot be read: No such file or directory"),
        ("x = 1", "defines no part"),
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_file_without_parts_is_refused(text: str | None, what: str, tmp_path: Path) -> None:
    file = tmp_path / f"refused_{abs(hash(what))}.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=what):
        import_file(file)
