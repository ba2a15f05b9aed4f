"""Layers after pooling and prompts of sentence-transformers: the vectors of that package, and the way back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import anyformer as af
from anyformer.config import ConfigError, DenseLayer, Embedder, Identity, Relu, Tanh
from anyformer.interop import import_model
from anyformer.recipe import Prompt
from tests.interop.test_bad_input import change
from tests.interop.test_sentence_transformers import BODIES, POOLER, TEXTS, said, sentences
from tests.test_cli import run as invoke

package = pytest.importorskip("sentence_transformers")

PROMPTS = {"query": "zebra: ", "document": "", "passage": "abba "}
STACKS = {
    "one": [(14, nn.Tanh(), True)],
    "projection": [(10, nn.Identity(), False)],
    "several": [(20, nn.ReLU(), False), (9, nn.Identity(), True), (11, nn.Identity(), False)],
}
pytestmark = [POOLER, pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers")]


def write_layered(folder: Path, stack: str, *, unit: bool = True, **about: Any) -> Any:
    """Write a folder by the package itself, and return its model."""
    sentences(folder / "plain", BODIES["bert"], "mean", unit=False)
    whole = package.SentenceTransformer(str(folder / "plain"), device="cpu", **about)
    torch.manual_seed(0)
    dense, normalize = (type_of(name) for name in ("Dense", "Normalize"))
    steps, width = list(whole), whole[1].pooling_output_dimension
    for out, activation, bias in STACKS[stack]:
        steps.append(dense(width, out, bias=bias, activation_function=activation))
        width = out
    model = package.SentenceTransformer(modules=[*steps, *([normalize()] if unit else [])], device="cpu", **about)
    model.save(str(folder / "there"))
    return model


def type_of(name: str) -> Any:
    return getattr(__import__("sentence_transformers.models", fromlist=[name]), name)


def vectors(model: Any, texts: list[str], **options: Any) -> Tensor:
    return torch.from_numpy(model.encode(texts, **options))


@pytest.mark.parametrize("stack", STACKS)
def test_layers_there_and_back(stack: str, tmp_path: Path) -> None:
    """The vectors of the package, before and after our export; weights come back to the byte."""
    theirs = write_layered(tmp_path, stack, unit=stack != "several")
    run = import_model(tmp_path / "there", tmp_path / "run")
    texts = [*TEXTS, "abcd " * 30]
    assert float((said(run, texts) - vectors(theirs, texts)).abs().max()) <= 1e-5
    assert torch.equal(said(af.load(tmp_path / "run"), texts), said(run, texts))

    af.to_hf(run, tmp_path / "back")
    again = af.from_hf(tmp_path / "back")
    assert (again.config, again.spec) == (run.config, run.spec)
    assert torch.equal(said(again, texts), said(run, texts))
    reread = package.SentenceTransformer(str(tmp_path / "back"), device="cpu")
    assert torch.equal(vectors(reread, texts), vectors(theirs, texts))
    for i in range(len(STACKS[stack])):
        there, back = (load_file(tmp_path / side / f"{i + 2}_Dense/model.safetensors") for side in ("there", "back"))
        assert there.keys() == back.keys()
        assert all(torch.equal(x, back[name]) for name, x in there.items())


def test_config_of_layers(tmp_path: Path) -> None:
    write_layered(tmp_path, "several", unit=False)
    layers = (DenseLayer(width=20, activation=Relu(), bias=False), DenseLayer(width=9, activation=Identity()))
    assert af.from_hf(tmp_path / "there").config.head == Embedder(pool="mean", layers=layers, projection=11)
    write_layered(tmp_path / "other", "one")
    one = Embedder(pool="mean", layers=(DenseLayer(width=14, activation=Tanh()),), normalize=True)
    assert af.from_hf(tmp_path / "other" / "there").config.head == one


def test_prompts(tmp_path: Path) -> None:
    """A prompt is read before the text, by its name or by default, in Python, on the command line and after export."""
    theirs = write_layered(tmp_path, "one", prompts=PROMPTS, default_prompt_name="passage")
    run = import_model(tmp_path / "there", tmp_path / "run")
    assert run.spec.default_prompt == "passage"
    assert Prompt(name="query", text="zebra: ") in run.spec.prompts
    for options in ({}, {"prompt_name": "query"}, {"prompt_name": "document"}):
        found = torch.tensor([json.loads(line) for line in run.predict(TEXTS, **options)])
        assert float((found - vectors(theirs, TEXTS, **options)).abs().max()) <= 1e-5
    plain = torch.tensor([json.loads(line) for line in run.predict(TEXTS, prompt_name="")])
    assert float((plain - vectors(theirs, TEXTS, prompt="")).abs().max()) <= 1e-5

    (tmp_path / "texts").write_text("\n".join(TEXTS) + "\n")
    printed = invoke("predict", tmp_path / "run", tmp_path / "texts", "--prompt-name", "query").stdout.splitlines()
    assert printed == run.predict(TEXTS, prompt_name="query") != run.predict(TEXTS)

    af.to_hf(run, tmp_path / "back")
    assert af.from_hf(tmp_path / "back").spec == run.spec
    reread = package.SentenceTransformer(str(tmp_path / "back"), device="cpu")
    for options in ({}, {"prompt_name": "query"}):
        assert torch.equal(vectors(reread, TEXTS, **options), vectors(theirs, TEXTS, **options))


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    write_layered(tmp_path, "one", prompts=PROMPTS)
    run = import_model(tmp_path / "there", tmp_path / "run")
    with pytest.raises(ConfigError, match="prompt_name = 'qwery': did you mean 'query'"):
        run.predict(TEXTS, prompt_name="qwery")
    (tmp_path / "texts").write_text("a\n")
    wrong = invoke("predict", tmp_path / "run", tmp_path / "texts", "--prompt-name", "qwery")
    assert wrong.exit_code == 2
    assert "did you mean 'query'" in wrong.stderr
    change(tmp_path / "there" / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(ConfigError, match="include_prompt = False: only True"):
        af.from_hf(tmp_path / "there")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "activation_function = "),
        ({"use_residual": True}, "use_residual = True: only False"),
        ({"out_features": 0}, "out_features"),
        ({"out_features": 15}, "2_Dense.linear.weight has shape [14, 30], but the config needs [15, 30]"),
        ({"bias": False}, "2_Dense.linear.bias is a weight that no bert with this head has"),
        ({"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings'"),
    ],
)
def test_layers_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_layered(tmp_path, "one")
    change(tmp_path / "there" / "2_Dense" / "config.json", **changes)
    with pytest.raises(ConfigError) as error:
        af.from_hf(tmp_path / "there")
    assert words in str(error.value)
