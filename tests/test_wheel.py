"""A wheel holds its package and nothing else, and works where this repository is not; the sdist holds all."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(project: Path, out: Path) -> Path:
    pytest.importorskip("hatchling", reason="needs the extra `dev`")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "claims", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, claims: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a throw-away environment with both wheels in it; torch and the rest are borrowed from ours."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, claims, cwd=home)
    # Last, or pip would find an editable install of ours satisfying it. Python reads the .pth files of its own
    # site-packages only: what we borrow comes without the editable install's path to this repository.
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    return home / "bin"


@pytest.mark.parametrize("package", ["anyformer", "claims/anyformer_claims"])
def test_a_wheel_holds_the_whole_package_and_nothing_else(package: str, wheel: Path, claims: Path) -> None:
    home, marker = ROOT / package, "py.typed" if package == "anyformer" else "verdicts.json"
    names = set(zipfile.ZipFile(wheel if package == "anyformer" else claims).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {home.name}
    source = {
        path.relative_to(home.parent).as_posix()
        for path in home.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith(f"{home.name}/")} == source
    assert f"{home.name}/{marker}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (ROOT / "claims" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_both_packages_have_one_version(wheel: Path, claims: Path) -> None:
    assert wheel.name.split("-")[1] == claims.name.split("-")[1]


def test_the_sdist_holds_the_whole_repository() -> None:
    """Tests read benchmarks, pages and workflows, too."""
    builder = pytest.importorskip("hatchling.builders.sdist", reason="needs the extra `dev`").SdistBuilder(str(ROOT))
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's list of files")
    held = {file.relative_path for file in builder.recurse_included_files()}
    tracked = run("git", "-c", "core.quotepath=off", "-C", ROOT, "ls-files", cwd=ROOT).splitlines()
    assert not {name for name in tracked if (ROOT / name).exists()} - held


def test_a_model_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = """
import json
import torch
import anyformer as af
model = af.Transformer(af.presets.gpt2(depth=2, width=64, heads=4, vocab=97))
logits = model(torch.arange(10)[None])
print(json.dumps({"file": af.__file__, "shape": list(logits.shape)}))
"""
    said = json.loads(run(installed / "python", "-c", code, cwd=tmp_path))
    assert Path(said["file"]).is_relative_to(installed.parent)
    assert said["shape"] == [1, 10, 97]


def test_a_recipe_trains_from_the_wheel_on_bundled_data(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    small = [
        "train.steps=1",
        "train.schedule=constant",
        "train.evaluate_every=none",
        "model.width=16",
        "data.valid=none",
    ]
    assert "trained: " in run(installed / "anyformer", "train", "shakespeare", *small, cwd=tmp_path)
    assert (tmp_path / "cache" / "anyformer" / "data" / "tinyshakespeare" / "input.txt").is_file()


def test_the_command_runs_from_the_wheel(installed: Path, tmp_path: Path, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    assert version in run(installed / "anyformer", "--version", cwd=tmp_path)
    assert "gpt2" in run(installed / "anyformer", "presets", cwd=tmp_path)


def test_claims_are_measured_from_their_wheel(installed: Path, tmp_path: Path) -> None:
    where = "import anyformer_claims; print(anyformer_claims.__file__)"
    assert Path(run(installed / "python", "-c", where, cwd=tmp_path).strip()).is_relative_to(installed.parent)
    assert "\n26  graph " in run(installed / "anyformer", "lab", cwd=tmp_path)
    assert "\nholds: " in run(installed / "anyformer", "lab", "costs", "--size", "quick", cwd=tmp_path)
