"""LoRA adapters of PEFT: trained there, the same logits here; trained here, the same logits there."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.config import ConfigError, LoRA
from anyformer.interop import import_model
from anyformer.interop.config_fields import Fields
from anyformer.interop.peft import _pattern, export_peft
from anyformer.runs.run import Run
from tests.interop.public import TOLERANCE, VOCAB, PublicModel
from tests.interop.test_decoders import falcon, gpt2, llama, neox, qwen3_next
from tests.interop.test_encoders import bert
from tests.interop.test_pairs import t5
from tests.test_cli import done, refused

peft = pytest.importorskip("peft", reason="needs the package peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft

IDS = torch.randint(5, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))


def trained(model: PublicModel, folder: Path, **settings: Any) -> Any:
    """A model with an adapter after some steps of PEFT, saved with its base."""
    base = model.saved(folder / "base")
    torch.manual_seed(0)
    found = peft.get_peft_model(base, peft.LoraConfig(**({"r": 2, "lora_alpha": 12} | settings)))
    learned = [p for p in found.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(learned, lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        logits(found, model).square().mean().backward()
        optimiser.step()
    found.save_pretrained(folder / "adapter")
    return found.eval()


def logits(model: Any, of: PublicModel) -> torch.Tensor:
    more = {"decoder_input_ids": IDS[:, :7]} if of.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **more).logits


def ours(run: Run) -> torch.Tensor:
    return run.model(IDS, IDS[:, :7]) if run.config.encoder and run.config.decoder else run.model(IDS)


ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "llama": (llama(), {"target_modules": [*ATTENTION, "k_proj", "o_proj", "down_proj"]}),
    "some parts": (llama(), {"target_modules": ATTENTION, "lora_dropout": 0.1}),
    "some layers": (llama(), {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]}),
    "ranks": (
        llama(),
        {
            "target_modules": [*ATTENTION, "o_proj"],
            "rank_pattern": {"o_proj": 5},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
        },
    ),
    "rslora": (llama(), {"target_modules": "all-linear", "use_rslora": True}),
    "gpt2": (gpt2(), {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    "neox": (neox(), {"target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "falcon": (falcon(new_decoder_architecture=True, num_kv_heads=2), {"target_modules": ["query_key_value", "dense"]}),
    "t5": (t5(), {"target_modules": ["q", "v", "wo"]}),
    "labels": (
        bert("SequenceClassification"),
        {"target_modules": ["query", "value"], "modules_to_save": ["classifier"], "bias": "none"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    model, settings = CASES[name]
    theirs = trained(model, tmp_path, **settings)
    run = import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base")
    plain = af.from_hf(tmp_path / "base")
    with torch.no_grad():
        expected = logits(theirs, model)
        torch.testing.assert_close(ours(af.load(tmp_path / "run")), expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ours(run.merge()), expected, rtol=0, atol=TOLERANCE)
        assert (ours(plain) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (llama(), ("*.blocks",)),
        (llama(), ("decoder.blocks.1.mixer", "*.down")),
        (gpt2(), ("*.blocks",)),
        (neox(), ("*.qkv",)),
        (t5(), ("*.cross", "*.up")),
    ],
)
def test_an_adapter_of_ours_loads_in_peft(tmp_path: Path, model: PublicModel, targets: tuple[str, ...]) -> None:
    base = model.saved(tmp_path / "base")
    plain = af.from_hf(tmp_path / "base")
    lora = LoRA(rank=3, alpha=5.0, targets=targets)
    adapted = af.Transformer(plain.config.model_copy(update={"adapter": lora}))
    torch.manual_seed(0)
    low_rank = {name: 0.3 * torch.randn_like(x) for name, x in adapted.state_dict().items() if ".lora." in name}
    adapted.load_state_dict(plain.model.state_dict() | low_rank)
    run = Run(adapted.eval(), plain.task, plain.spec, tmp_path)
    family = export_peft(run, tmp_path / "adapter", family=model.config.model_type)
    assert family == model.config.model_type
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(theirs, model), ours(run), rtol=0, atol=TOLERANCE)
        again = import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base")
        torch.testing.assert_close(ours(again), ours(run), rtol=0, atol=TOLERANCE)
    assert again.config.adapter is not None
    assert again.config.adapter.rank == 3


def test_layers_in_one_public_weight_are_refused(tmp_path: Path) -> None:
    """Qwen3-Next stores queries and gates in one matrix; here they are two layers."""
    qwen3_next(num_hidden_layers=4).saved(tmp_path / "base")
    plain = af.from_hf(tmp_path / "base")
    for target in ("*.mixer.inner.qkv", "*.mixer.inner.gate"):
        model = af.Transformer(plain.config.model_copy(update={"adapter": LoRA(rank=2, targets=(target,))}))
        with pytest.raises(ConfigError, match=r"blocks\.3\.mixer\.inner\.qkv: has an adapter"):
            export_peft(Run(model, plain.task, plain.spec, tmp_path), tmp_path / "out", family="qwen3_next")


def test_commands(tmp_path: Path) -> None:
    trained(llama(), tmp_path, target_modules=ATTENTION)
    (line,) = refused("import", tmp_path / "adapter", "--out", tmp_path / "run")
    assert line.startswith("--base: is missing")
    done("import", tmp_path / "base", "--out", tmp_path / "base-run")
    done("import", tmp_path / "adapter", "--base", tmp_path / "base-run", "--out", tmp_path / "run")
    done("export", tmp_path / "run", tmp_path / "again", "--format", "peft")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert {name for name in second if "q_proj" in name} == {name for name in first if "q_proj" in name}
    (line,) = refused("export", tmp_path / "base-run", tmp_path / "x", "--format", "peft")
    assert line == "adapter: the run has no LoRA adapter: export it with --format hf"
    (line,) = refused("import", tmp_path / "base", "--base", tmp_path / "base", "--out", tmp_path / "x")
    assert line.startswith("--base: is for adapters of PEFT")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    done("import", tmp_path / "adapter", "--out", tmp_path / "by-name")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True: is not supported"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3': only 'LORA' is supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': it changes the base model"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
        ({"alpha_pattern": {"(?i)Q_PROJ": 1}}, "alpha_pattern: the pattern (?i)Q_PROJ, character 3: "),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj = nan: must be a finite number"),
        ({"lora_alpha": math.inf}, "lora_alpha = inf: must be a finite number"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    trained(llama(), tmp_path, target_modules=ATTENTION)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as error:
        import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "pattern", ["q_proj", r".*\.1\..*_proj", "^model.layers.0.self_attn.q_proj$", "(w+)+[xp]|o_proj"]
)
def test_patterns_select_what_python_selects(pattern: str) -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qo"]
    automaton = _pattern(pattern, Fields({}, "adapter_config.json"))
    assert [automaton.accepts(name) for name in names] == [
        re.match(rf"(.*\.)?({pattern})$", name) is not None for name in names
    ]


def test_a_pattern_takes_time_linear_in_the_name() -> None:
    assert not _pattern("(w+w*)+x", Fields({}, "adapter_config.json")).accepts("w" * 1000)


def test_an_alpha_of_0_switches_the_adapter_off(tmp_path: Path) -> None:
    trained(llama(), tmp_path, target_modules=ATTENTION)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 0}))
    run = import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base")
    with torch.no_grad():
        assert torch.equal(ours(run.merge()), ours(af.from_hf(tmp_path / "base")))


def test_options_for_the_base_are_used_or_refused(tmp_path: Path) -> None:
    trained(llama(), tmp_path, target_modules=ATTENTION)
    done("import", tmp_path / "base", "--out", tmp_path / "base-run")
    adapter = ("import", tmp_path / "adapter", "--out", tmp_path / "run", "--base")
    for option, value in (("--ignore-field", "x"), ("--tokenizer", tmp_path / "base")):
        (line,) = refused(*adapter, tmp_path / "base-run", option, value)
        assert line == f"{option}: is for public folders: --base is a run, which is read as it is"
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": "odd"}))
    refused(*adapter, tmp_path / "base")
    done(*adapter, tmp_path / "base", "--ignore-field", "rope_theta")


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "classifier"])
def test_an_adapter_with_nan_warns(tmp_path: Path, part: str) -> None:
    trained(bert("SequenceClassification"), tmp_path, target_modules=["query"], modules_to_save=["classifier"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if part in name)
    tensors[name].view(-1)[-1] = math.nan
    save_file(tensors, file)
    public = name.removeprefix("base_model.model.")
    with pytest.warns(UserWarning, match=re.escape(f"{file}: {public}: some values are not finite")):
        import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base")


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    trained(llama(), tmp_path, target_modules=ATTENTION)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)

    def refusal(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(ConfigError) as error:
            import_model(tmp_path / "adapter", tmp_path / "run", base=tmp_path / "base")
        return str(error.value)

    name = next(name for name in whole if "q_proj.lora_B" in name)
    assert "lora_A and lora_B do not fit together" in refusal({key: x for key, x in whole.items() if key != name})
    assert "its adapter is" in refusal(whole | {name: whole[name][1:].contiguous()})
    for odd in (torch.ones(()), torch.ones(2, 2, 2)):
        assert "lora_A and lora_B do not fit together" in refusal(whole | {name: odd})
    a, b = name.replace("lora_B", "lora_A"), name
    empty = {a: whole[a][:0].contiguous(), b: whole[b][:, :0].contiguous()}
    assert "q_proj: lora_A and lora_B have rank 0" in refusal(whole | empty)
    assert "has no place for: model.embed_tokens.lora_embedding_A" in refusal(
        whole | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 3)}
    )
