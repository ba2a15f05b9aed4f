"""The public surface, frozen: a change here is a change that users notice."""

import ast
import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import anyformer as af
from anyformer.cli import app
from tests.pages import PAGES, ROOT, blocks

# Modules whose names are stable (docs/stability.md): pages, examples and claims import no others.
STABLE = ("", ".config", ".config.io", ".presets", ".recipe", ".testing", ".cli.verb", ".explore.view")
STABLE += (".generation.http.app", ".generation.http.service", ".lab.evaluation.harness", ".nn.inspection.plot")
STABLE += (".runs.run_inspection", *(f".{room}.api" for room in ("data", "generation", "lab", "nn", "training")))
STABLE += (".nn.inspection.api", ".lab.figures")

DECODING = [
    "--max-new-tokens",
    "--context",
    "--stop",
    "--task",
    "--seed",
    "--phrases",
    "--regex",
    "--json-schema",
    "--choices",
    "--banned",
    "--prefix",
    "--bits",
    "--cache",
    "--compile",
    "--temperature",
    "--beams",
    "--length-penalty",
    "--early-stopping",
    "--groups",
    "--diversity-penalty",
    "--candidates",
    "--alpha",
    "--draft",
    "--ahead",
    "--lookup",
    "--self-draft",
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--no-repeat-ngram",
    "--min-new-tokens",
    "--top-k",
    "--top-p",
    "--min-p",
    "--typical-p",
]
VERBS = {
    "": ["--install-completion", "--show-completion", "--version"],
    "presets": [],
    "count": ["model", "[changes]", "--length", "--source-length", "--batch", "--json"],
    "doctor": ["--json"],
    "compare": ["runs", "--split", "--out", "--json"],
    "recipes": [],
    "train": ["[recipe]", "[changes]", "--out", "--resume", "--allow-changed-data", "--dry-run"],
    "evaluate": ["run", "[changes]", "--split", "--by", "--bits", "--tasks", "--limit", "--json"],
    "predict": [
        "run",
        "[files]",
        "--out",
        "--label",
        "--scores",
        "--n-best",
        "--prompt-name",
        "--engine",
        "--jobs",
        "--address",
        "--gpus",
        *DECODING,
    ],
    "generate": ["run", "--prompt", "--samples", "--n-best", *DECODING],
    "chat": ["run", "--system", *DECODING],
    "check": ["parts", "[changes]", "--skip", "--json"],
    "plan": [
        "model",
        "[changes]",
        "--gpu",
        "--gpus",
        "--tokens",
        "--batch",
        "--length",
        "--source-length",
        "--rate",
        "--network",
        "--out",
        "--json",
    ],
    "inspect": ["run", "[text]", "--target", "--stack", "--layer", "--head", "--task", "--out"],
    "explore": ["[runs]", "--port", "--no-browser", "--lesson"],
    "serve": [
        "runs",
        "--host",
        "--port",
        "--api-key-file",
        "--allow-anyone",
        "--device",
        "--adapter",
        "--max-rows",
        "--max-queue",
        "--max-streams",
        "--context",
        "--max-prompt-tokens",
        "--max-new-tokens",
        "--max-body-bytes",
        "--pages",
        "--cache",
        "--reproducible",
    ],
    "import": ["source", "--out", "--tokenizer", "--allow-pickle", "--family", "--ignore-field", "--base"],
    "merge": ["run", "--out"],
    "new": [
        "task",
        "[more]",
        "--data",
        "--text",
        "--pair",
        "--label",
        "--source",
        "--target",
        "--words",
        "--tags",
        "--from",
        "--lora",
        "--minutes",
        "--out",
        "--force",
    ],
    "lab": [
        "[what]",
        "--size",
        "--jobs",
        "--out",
        "--steps",
        "--seeds",
        "--wait",
        "--engine",
        "--address",
        "--cpus",
        "--gpus",
        "--retries",
    ],
    "export": ["run", "[out]", "--format", "--family", "--dtype", "--out"],
    "config": [],
    "config schema": ["[of]"],
    "config show": ["model", "[changes]", "--format"],
    "config check": ["files"],
    "config diff": ["left", "right"],
    "tokenizer": [],
    "tokenizer train": ["files", "--out", "--kind", "--size", "--lowercase", "--encoding"],
    "tokenizer show": ["tokenizer", "text"],
    "data": [],
    "data list": [],
    "data fetch": ["names", "--mirror"],
    "data prepare": [
        "files",
        "--out",
        "--tokenizer",
        "--document",
        "--column",
        "--encoding",
        "--sample",
        "--workers",
        "--on-bad-row",
    ],
    "data pack": ["folder", "--out", "--on-bad-file"],
    "data show": ["folder", "--check"],
    "env": [],
    "env record": ["environment", "--out", "--episodes", "--seed", "--policy", "--processes", "--force"],
    "env film": ["run", "environment", "--out", "--seed"],
    "env rollout": [
        "run",
        "environments",
        "--episodes",
        "--seed",
        "--parallel",
        "--temperature",
        "--target",
        "--json",
    ],
}


def test_names() -> None:
    assert sorted(af.__all__) == [
        "ConfigError",
        "Engine",
        "ModelConfig",
        "Reuse",
        "Run",
        "Transformer",
        "__version__",
        "attention_maps",
        "config",
        "count",
        "evaluate",
        "from_hf",
        "generate",
        "load",
        "presets",
        "quantise",
        "recipe",
        "register",
        "show",
        "testing",
        "to_hf",
        "train",
        "training_memory",
    ]
    for name in af.__all__:
        assert getattr(af, name) is getattr(af, name)
        assert name in dir(af)


def imported(code: str) -> set[str]:
    """Return the modules of the package from which code imports, without the package's name."""
    modules = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "anyformer":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {name for name in inner if (ROOT / (name.replace(".", "/") + ".py")).exists()}
            modules |= files | ({node.module} if inner - files else set())
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.split(".")[0] == "anyformer"}
    return {module.removeprefix("anyformer") for module in modules}


def shown_code() -> list[str]:
    files = [path for folder in ("examples", "claims") for path in (ROOT / folder).rglob("*.py")]
    code = [path.read_text(encoding="utf-8") for path in files]
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "python":
                code.append(block.body)
            elif block.language == "pycon":
                code.append("\n".join(example.source for example in doctest.DocTestParser().get_examples(block.body)))
    return code


def test_pages_examples_and_claims_import_stable_names() -> None:
    assert set().union(*map(imported, shown_code())) <= set(STABLE), "import stable names, see docs/stability.md"


def test_stable_modules_hold_what_pages_show() -> None:
    """A name that no page, no example and no claim imports is not promised."""
    trees = [ast.parse(code) for code in shown_code()]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    shown = {(node.module, alias.name) for node in nodes for alias in node.names}
    for module in (f"anyformer{name}" for name in STABLE if name.endswith(".api")):
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        held = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert {name for name in held if (module, name) not in shown} == set(), module


def test_a_function_stays_a_function() -> None:
    """`count` and others share their names with modules further in, which importing must not put in their place."""
    import anyformer.generation.generate
    import anyformer.nn.inspection.attention_maps
    import anyformer.nn.inspection.count
    import anyformer.runs.run_inspection  # noqa: F401

    assert callable(af.count)
    assert callable(af.generate)
    assert callable(af.attention_maps)


def test_wrong_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Transfomer'; did you mean 'Transformer'\?$"):
        af.Transfomer  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zebra'$"):
        af.zebra  # noqa: B018
    with pytest.raises(ImportError):
        from anyformer import nonsense  # noqa: F401


def verbs(command: Any, name: str = "") -> dict[str, list[str]]:
    def shown(parameter: Any) -> str:
        if parameter.param_type_name == "option":
            return str(max(parameter.opts, key=len))
        return str(parameter.name) if parameter.required else f"[{parameter.name}]"

    found = {name: [shown(parameter) for parameter in command.params]}
    for inner, part in getattr(command, "commands", {}).items():
        found |= verbs(part, f"{name} {inner}".strip())
    return found


def test_verbs() -> None:
    found = verbs(typer.main.get_command(app))
    found[""].sort()
    assert found == VERBS


def test_quick_things_need_no_torch(tmp_path: Path) -> None:
    code = """
import sys
import anyformer
assert anyformer.__version__ and "generate" in dir(anyformer)
heavy = {"torch", "pydantic", "typer", "rich", "numpy"} & sys.modules.keys()
assert not heavy, f"import anyformer imports {heavy}"
from typer.testing import CliRunner
from anyformer.cli import app
lines = ["--help", "presets", "count gpt2 depth=2", "config show t5", "config diff gpt2 bert", "config schema recipe"]
lines += ["recipes", "count scan tokenizer=bytes"]
lines += ["tokenizer train pyproject.toml --kind chars --out " + sys.argv[1], "tokenizer show " + sys.argv[1] + " abc"]
made = sys.argv[1] + "/shards"
lines += ["data prepare pyproject.toml --tokenizer bytes --workers 1 --out " + made, "data show " + made]
for line in lines:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    assert "torch" not in sys.modules, f"anyformer {line} imports torch"
    assert line != "--help" or "pydantic" not in sys.modules
"""
    command, root = [sys.executable, "-c", code, tmp_path / "new"], Path(__file__).parent.parent
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


# Files of the package that a name imports, each with those before it; these numbers only fall.
MAX_IMPORTED = {"Transformer": 79, "load": 134, "train": 212}


def test_a_small_import_stays_small() -> None:
    code = """
import sys, anyformer
for name in sys.argv[1:]:
    getattr(anyformer, name)
    print(sum(f"{module}.".startswith("anyformer.") for module in sys.modules))
"""
    command = [sys.executable, "-c", code, *MAX_IMPORTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    counts = dict(zip(MAX_IMPORTED, map(int, done.stdout.split()), strict=True))
    assert all(counts[name] <= most for name, most in MAX_IMPORTED.items()), counts
