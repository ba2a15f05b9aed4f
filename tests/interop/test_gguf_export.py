"""Exported GGUF files: llama.cpp computes the same, they load back to the byte, and what it lacks is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import anyformer as af
from anyformer.config import ConfigError, ModelConfig
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.interop import gguf_file, import_model
from anyformer.interop.families import FAMILIES
from anyformer.interop.family import find_family
from anyformer.interop.gguf_export import Dtype, to_gguf
from anyformer.interop.gguf_tokenizers import SPLITTINGS
from anyformer.interop.gguf_vocabulary import describe
from anyformer.interop.same_model import differences
from anyformer.recipe import BPE, Bytes, LanguageModel
from anyformer.runs.run import Run, write_folder, write_model
from tests.test_cli import done, refused
from tests.test_cli_interop import write_run

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
SPEC, BYTES = LanguageModel(), train_tokenizer(Bytes(), ["a"])
TEXT = "The quick brown fox jumps over the lazy dog, and it's 1234 o'clock! Attention is all you need. "
LENGTH, PROMPT = 320, "The quick"
PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "llama": lambda: af.presets.llama(depth=2, width=32, heads=4, kv_heads=2, vocab=BYTES.size),
    "gpt2": lambda: af.presets.gpt2(depth=2, width=32, heads=4, vocab=BYTES.size, length=LENGTH),
}


def run_of(model: af.Transformer, text: TextTokenizer) -> Run:
    return Run(model.eval(), SPEC.build(text), SPEC, Path("mine"))


def untrained(text: TextTokenizer) -> Run:
    torch.manual_seed(0)
    return run_of(af.Transformer(af.presets.llama(depth=1, width=32, heads=4, vocab=text.size)), text)


@pytest.fixture(scope="module")
def trained() -> dict[str, Run]:
    """A Llama and a GPT-2 that know a text by heart."""
    ids, found = torch.tensor(BYTES.encode(3 * TEXT)).unsqueeze(0), {}
    for name, preset in PRESETS.items():
        torch.manual_seed(0)
        model = af.Transformer(preset()).eval()  # no dropout
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(90):
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        assert loss < 0.1
        found[name] = run_of(model, BYTES)
    return found


def greedy(run: Run, ids: list[int], new: int) -> list[int]:
    return af.generate(run.model, torch.tensor([ids]), max_new_tokens=new)[0, len(ids) :].tolist()


def written(run: Run, folder: Path, dtype: Dtype) -> Path:
    path = folder / f"{dtype}.gguf"
    to_gguf(run, path, dtype=dtype)
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_llama_cpp_gives_our_greedy_ids(trained: dict[str, Run], name: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra `dev-all` (llama.cpp)")
    from tests.interop.llama_cpp import LlamaCpp

    run, ids = trained[name], BYTES.encode(PROMPT)
    exact = LlamaCpp(written(run, tmp_path, "f32"), LENGTH)
    expected = greedy(run, ids, 200)
    assert exact.greedy(ids, 200) == expected
    for prompt in ("all you", "zebra 77"):
        assert exact.greedy(BYTES.encode(prompt), 50) == greedy(run, BYTES.encode(prompt), 50)
    for text in (TEXT, "Größe 한국어 🙂\n\t  <eos>"):
        assert exact.tokenize(text) == BYTES.encode(text)
    for dtype in ("f16", "q8_0"):
        rounded = LlamaCpp(written(run, tmp_path, dtype), LENGTH).greedy(ids, 200)
        assert sum(a == b for a, b in zip(rounded, expected, strict=True)) >= 190


@pytest.mark.parametrize("name", PRESETS)
def test_an_f32_file_loads_back_to_the_byte(trained: dict[str, Run], name: str, tmp_path: Path) -> None:
    run = trained[name]
    path = written(run, tmp_path, "f32")
    back = import_model(path, tmp_path / "run")
    ours, theirs = run.model.state_dict(), back.model.cpu().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(x.numpy().tobytes() == theirs[key].numpy().tobytes() for key, x in ours.items())
    assert not differences(run.config, back.config.model_copy(update={"special": run.config.special}), "")
    assert back.tokenizer.encode(TEXT) == run.tokenizer.encode(TEXT)
    assert (back.tokenizer.bos, back.tokenizer.eos) == (run.tokenizer.bos, run.tokenizer.eos)
    (tmp_path / "again").mkdir()
    again = gguf_file.read(written(back, tmp_path / "again", "f32"))
    assert {name: bytes(x.data()) for name, x in again.tensors.items()} == {
        name: bytes(x.data()) for name, x in gguf_file.read(path).tensors.items()
    }


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("name", PRESETS)
def test_rounded_weights_do_not_change_again(trained: dict[str, Run], name: str, dtype: Dtype, tmp_path: Path) -> None:
    first = gguf_file.read(written(trained[name], tmp_path, dtype))
    assert {x.kind.name for x in first.tensors.values()} == {"F32", dtype.upper()}
    back = import_model(first.path, tmp_path / "run")
    (tmp_path / "again").mkdir()
    second = gguf_file.read(written(back, tmp_path / "again", dtype))
    assert {name: bytes(x.data()) for name, x in first.tensors.items()} == {
        name: bytes(x.data()) for name, x in second.tensors.items()
    }


@pytest.mark.parametrize(
    "config",
    [
        af.presets.neox(depth=1, width=32, heads=4, vocab=BYTES.size),
        af.presets.bloom(depth=1, width=32, heads=4, vocab=BYTES.size),
        af.presets.mixtral(depth=1, width=32, heads=4, kv_heads=2, ff=32, vocab=BYTES.size),
        af.presets.deepseek(depth=2, width=32, heads=4, ff=32, experts=8, vocab=BYTES.size),
    ],
)
def test_a_family_without_an_architecture_is_refused_as_such(config: ModelConfig, tmp_path: Path) -> None:
    """It has a public family, as which a folder of the run is written."""
    with torch.device("meta"):
        run = run_of(af.Transformer(config), BYTES)
    assert find_family(FAMILIES.values(), config)
    with pytest.raises(ConfigError) as error:
        to_gguf(run, tmp_path / "model.gguf")
    assert "no GGUF architecture that is written supports this" in str(error.value)
    assert "no public family" not in str(error.value)


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=32, max_size=32), st.integers(-30, 3))
def test_blocks_of_q8_0_equal_those_of_ggml_and_are_stable(values: list[float], exponent: int) -> None:
    x = torch.tensor([values]) * 2.0**exponent
    blocks, kind = gguf_file.encode(x, "Q8_0"), gguf.GGMLQuantizationType.Q8_0
    theirs = gguf.quants.quantize(x.numpy(), kind)
    read = gguf.quants.dequantize(blocks, kind)
    assert np.array_equal(read, gguf.quants.dequantize(theirs, kind))
    assert np.array_equal(gguf_file.encode(torch.from_numpy(read), "Q8_0"), blocks)


def test_narrow_rows_are_f16_and_large_values_are_refused(tmp_path: Path) -> None:
    run = untrained(BYTES)
    narrow = af.Transformer(af.presets.llama(depth=1, width=24, heads=4, vocab=BYTES.size))
    file = gguf_file.read(written(run_of(narrow, BYTES), tmp_path, "q8_0"))
    assert file.tensors["token_embd.weight"].kind.name == "F16"
    with torch.no_grad():
        run.model.state_dict()["target.table.weight"][3, 3] = 70_000
    with pytest.raises(ConfigError, match=r"token_embd\.weight has values above 65,504, the largest of F16"):
        written(run, tmp_path, "f16")
    assert not (tmp_path / "f16.gguf").exists()


# -- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "default"])
def test_llama_cpp_splits_texts_as_we_do(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra `dev-all` (llama.cpp)")
    from tests.interop.llama_cpp import LlamaCpp

    how = SPLITTINGS[kind]
    inner = Tokenizer(models.BPE(ignore_merges=how.whole_words))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence(list(how.steps)), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT, "naïve 12345 ... isn't we'LL  \n\n  x", "한국어 中文"] * 3, trainer)
    text = TextTokenizer(inner).with_chat({"default": "{{ messages[0]['content'] }}"})
    path = written(untrained(text), tmp_path, "f32")
    theirs = LlamaCpp(path, LENGTH)
    back = import_model(path, tmp_path / "run").tokenizer
    for one in (TEXT, "naïve  don't WE'LL\n\n\n 1234567 a...b\t\t c", "한국어 中文 🙂 'the 12,5%", "   </s> x  "):
        assert text.encode(one) == theirs.tokenize(one) == back.encode(one)
    assert back.chat == text.chat
    assert (back.bos, back.eos) == (0, 1)


def test_our_own_words_come_back_and_llama_cpp_has_the_nearest(tmp_path: Path) -> None:
    text = train_tokenizer(BPE(size=300), [TEXT] * 3)
    with pytest.warns(UserWarning, match="texts are split by the pattern of gpt-2"):
        path = written(untrained(text), tmp_path, "f32")
    back = import_model(path, tmp_path / "run").tokenizer
    for one in (TEXT, "'the 'll हिन्दी"):
        assert back.encode(one) == text.encode(one)


def test_a_normalisation_that_llama_cpp_lacks_is_named() -> None:
    inner = Tokenizer.from_str(BYTES.inner.to_str())
    inner.normalizer = normalizers.NFC()
    with pytest.warns(UserWarning, match="llama.cpp does not normalise texts to NFC"):
        describe(untrained(TextTokenizer(inner)))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (["decoder.blocks.*.feedforward.activation=silu"], "feedforward.activation"),
        (["decoder.blocks.*.mixer.pattern={kind='window', before=3, after=0}"], "mixer.pattern"),
        (["decoder.blocks.*.mixer.kv_heads=1"], "mixer.kv_heads"),
        ([], "tokenizer: is of a kind that llama.cpp does not have"),
    ],
)
def test_what_llama_cpp_lacks_is_named(changes: list[str], what: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *changes)
    lines = refused("export", folder, tmp_path / "out.gguf", "--format", "gguf")
    assert any(what in line for line in lines), lines
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_options_belong_to_formats(tmp_path: Path) -> None:
    folder, out = write_run(tmp_path / "run"), tmp_path / "out"
    assert refused("export", folder, out, "--dtype", "f16") == ["--dtype: is for --format gguf"]
    (line,) = refused("export", folder, out, "--format", "gguf", "--family", "gpt2")
    assert line == "--family: is for --format hf: GGUF has no families"
    out.write_text("")
    assert refused("export", folder, out, "--format", "gguf") == [f"{out}: exists already; choose another file"]


def test_the_commands_write_and_read(trained: dict[str, Run], tmp_path: Path) -> None:
    run, out = trained["gpt2"], tmp_path / "gpt2.gguf"
    files = lambda path: write_model(path, run.model.state_dict(), run.config, SPEC, run.task)  # noqa: E731
    write_folder(tmp_path / "run", files)
    told = done("export", tmp_path / "run", out, "--format", "gguf", "--dtype", "q8_0")
    assert told == f"exported: {out}, as gguf, gpt2 in q8_0\n"
    done("import", out, "--out", tmp_path / "back")
    expected = "The quick brown fox jumps over the lazy dog"
    assert done("generate", tmp_path / "back", "--prompt", PROMPT, "--max-new-tokens", "34") in (
        expected.removeprefix(PROMPT) + "\n",
        expected + "\n",
    )
