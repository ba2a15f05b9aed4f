"""Options of decoding from outside: in Python, on the command line and over HTTP, without an edit of the package."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from anyformer.config import ConfigError, import_file
from anyformer.generation.engine.engine import Engine
from anyformer.runs.run import Run, write_folder, write_model
from tests.serve.http.served import serving_engine
from tests.serve.responsive import make_run
from tests.test_cli import done, refused

FILE = Path(__file__).with_name("my_options.py")
TEXT, NEW = "the fox", 12


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    import_file(FILE)


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run("bytes")


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "run"
    write_folder(place, lambda to: write_model(to, run.model.state_dict(), run.config, run.spec, run.task))
    return place


SAMPLED = {"temperature": 1.5, "seed": 3}


@pytest.mark.parametrize(
    "given", [SAMPLED | {"top_n_sigma": 0.5}, {"lowest": 5.0}, {"lowest": 5.0, "beams": 2}], ids=str
)
def test_a_filter_is_an_option_everywhere(run: Run, folder: Path, given: dict[str, float]) -> None:
    (answer,) = run.generate([TEXT], max_new_tokens=NEW, **given)
    plain = {name: value for name, value in given.items() if name not in ("top_n_sigma", "lowest")}
    assert [answer] != run.generate([TEXT], max_new_tokens=NEW, **plain)
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ("generate", folder, "--prompt", TEXT, "--max-new-tokens", str(NEW))
    assert done(*command, *flags, "--import", FILE) == answer + "\n"
    with serving_engine(Engine(run)) as server:
        sent = {"prompt": TEXT, "max_tokens": NEW, "temperature": 0} | given
        if "lowest" in given:
            sent["lowest_ids"] = sent.pop("lowest")
        assert server.ok("/v1/completions", **sent)["choices"][0]["text"] == answer
        fields = server.client.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]["properties"]
        assert "standard deviations" in fields["top_n_sigma"]["description"]


def test_its_range_is_refused_by_the_same_sentence(run: Run, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^top_n_sigma = 0\.0: must be greater than 0$"):
        run.generate([TEXT], temperature=1.0, top_n_sigma=0.0)
    command = ("generate", folder, "--prompt", TEXT, "--temperature", "1", "--top-n-sigma", "0.0")
    assert refused(*command) == ["--top-n-sigma = 0.0: must be greater than 0"]
    with pytest.raises(ConfigError, match=r"top_n_sigma = 1\.0: beam search does not sample"):
        run.generate([TEXT], beams=2, top_n_sigma=1.0)


def test_a_strategy_is_selected_by_its_option(run: Run, folder: Path) -> None:
    assert run.generate([TEXT], max_new_tokens=NEW, nth=1) == run.generate([TEXT], max_new_tokens=NEW)
    (answer,) = run.generate([TEXT], max_new_tokens=NEW, nth=2, lowest=5.0)
    assert done("generate", folder, "--prompt", TEXT, "--max-new-tokens", str(NEW), "--nth", "2", "--lowest", "5") == (
        answer + "\n"
    )
    with serving_engine(Engine(run)) as server:
        sent = {"prompt": TEXT, "max_tokens": NEW, "nth": 2, "lowest_ids": 5.0}
        assert server.ok("/v1/completions", **sent)["choices"][0]["text"] == answer
        assert server.refused("/v1/completions", **sent, stream=True)["message"].startswith("stream: n-th search")
    assert run.generate([TEXT], max_new_tokens=NEW, nth=2) != run.generate([TEXT], max_new_tokens=NEW, nth=1)
    for wrong, message in (
        ({"nth": 2, "beams": 2}, "beams: belongs to beam search, and nth to n-th search"),
        ({"nth": 0}, "nth = 0: must be at least 1"),
        ({"nth": 2, "temperature": 1.0}, "temperature = 1.0: n-th search does not sample"),
    ):
        with pytest.raises(ConfigError, match=message):
            run.generate([TEXT], **wrong)
