"""Chat templates of public folders: read from every place, kept with the run, exported unchanged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

import anyformer as af
from anyformer.config import ConfigError
from anyformer.interop import import_model
from anyformer.runs.run import load
from anyformer.tasks.base import ending_ids
from tests.data.chat_cases import CHATML, CONVERSATIONS, STYLES, tokenizer, turns
from tests.test_cli import refused

STYLE = STYLES["chatml"]
ODD = "{# 한국어 你好 #}\r\n" + CHATML + "\n\n"  # a reader that translates line ends would change it


@pytest.fixture(scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "llama"
    inner = tokenizer(STYLE)
    size = inner.get_vocab_size()
    sizes = {"vocab_size": size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = hf.LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=None, eos_token_id=size - 1)
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def folder(_whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(_whole, tmp_path / "llama")


def settings(folder: Path, **more: Any) -> None:
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STYLE.eos, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | more))


def test_a_template_stays_with_the_run_and_its_export(folder: Path, tmp_path: Path) -> None:
    settings(folder, chat_template="of older versions")
    (folder / "chat_template.jinja").write_bytes(ODD.encode())
    import_model(folder, tmp_path / "run")
    run = load(tmp_path / "run")
    af.to_hf(run, tmp_path / "public")
    assert (tmp_path / "public" / "chat_template.jinja").read_bytes() == ODD.encode()
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path / "public")
    assert run.chat_template is not None
    for messages in CONVERSATIONS:
        assert (
            run.chat_template.encode(messages)
            == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )


def test_a_template_in_the_settings(folder: Path, tmp_path: Path) -> None:
    settings(folder, chat_template=ODD)
    assert af.from_hf(folder).tokenizer.chat == {"default": ODD}
    named = [{"name": "default", "template": ODD}, {"name": "tool_use", "template": "tools"}]
    settings(folder, chat_template=named)
    run = af.from_hf(folder)
    assert run.tokenizer.chat == {"default": ODD, "tool_use": "tools"}
    af.to_hf(run, tmp_path / "public")
    assert json.loads((tmp_path / "public" / "tokenizer_config.json").read_text())["chat_template"] == named
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path / "public")
    assert run.chat_template is not None
    assert run.chat_template.render(turns("a")) == theirs.apply_chat_template(
        turns("a"), tokenize=False, add_generation_prompt=True
    )


def test_templates_in_files(folder: Path) -> None:
    settings(folder)
    (folder / "chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "chat_templates" / "rag.jinja").write_text("rag")
    assert af.from_hf(folder).tokenizer.chat == {"default": "plain", "rag": "rag"}


def test_without_a_template(folder: Path, tmp_path: Path) -> None:
    settings(folder, chat_template=None)
    run = af.from_hf(folder)
    assert run.chat_template is None
    af.to_hf(run, tmp_path / "public")
    assert not (tmp_path / "public" / "chat_template.jinja").exists()


def test_wrong_templates_are_refused_by_file(folder: Path, tmp_path: Path) -> None:
    settings(folder, chat_template="{% for %}")
    (line,) = refused("import", folder, "--out", tmp_path / "run")
    assert line.startswith(f"{folder / 'tokenizer_config.json'}: is no chat template: line 1: ")
    for wrong in (3, [3], [{"name": "default"}]):
        settings(folder, chat_template=wrong)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template = "):
            af.from_hf(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: cannot be read"):
        af.from_hf(folder)


def test_ids_that_end_a_turn(folder: Path) -> None:
    """Those of generation_config.json, and the token after an assistant's message where that has none."""
    settings(folder, chat_template=CHATML)
    inner = tokenizer(STYLE)
    end, over = inner.token_to_id("<|im_end|>"), inner.token_to_id("<|endoftext|>")
    run = af.from_hf(folder)
    assert run.chat_template is not None
    assert (run.chat_template.end_of_turn, ending_ids(run.tokenizer, run.config)) == (end, [over])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [over, end]}))
    run = af.from_hf(folder)
    assert ending_ids(run.tokenizer, run.config) == [over, end]
