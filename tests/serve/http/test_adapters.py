"""LoRA adapters over HTTP: models by name, whose body is served, too."""

from copy import deepcopy
from dataclasses import replace

from anyformer.generation.engine.engine import Engine
from tests.serve.http.served import serving_engine
from tests.serve.responsive import make_run
from tests.serve.test_adapters import adapted


def test_an_adapter_is_a_model() -> None:
    run = make_run("bytes")
    tuned = replace(run, model=adapted(run.model, 1))
    expected = {
        "bytes": run.generate(["the fox"], max_new_tokens=9),
        "tuned": tuned.generate(["the fox"], max_new_tokens=9),
    }
    engine = Engine({"bytes": run}, adapters={"bytes": {"tuned": deepcopy(tuned.model)}})
    with serving_engine(engine) as server:
        assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["bytes", "tuned"]
        for name, texts in expected.items():
            found = server.ok("/v1/completions", model=name, prompt="the fox", max_tokens=9, temperature=0)
            assert (found["model"], [choice["text"] for choice in found["choices"]]) == (name, texts)
        assert server.refused("/v1/completions", 404, model="other", prompt="a")["code"] == "model_not_found"
