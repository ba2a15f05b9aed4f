"""Whisper: encoder, logits and greedy ids equal to those of `transformers`, the way back, and its special tokens."""

import json
import struct
import wave
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from anyformer.config import Audio, Spectrogram
from anyformer.data.media_files import log_mel
from anyformer.generation.generate import generate
from anyformer.interop import ctranslate2, import_model
from anyformer.recipe import Transcribe
from anyformer.runs.run import Run
from tests.interop.public import EOS, PAD, TOLERANCE, VOCAB, WIDTH, PublicModel, again, tensors, words

MELS, PLACES, NEW = 8, 20, 8
STARTS = ("<|startoftranscript|>", "<|endoftext|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")


def whisper(**settings: Any) -> PublicModel:
    sizes = {
        "vocab_size": VOCAB,
        "num_mel_bins": MELS,
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 24,
        "max_source_positions": PLACES,
        "max_target_positions": 32,
        "pad_token_id": PAD,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": 5,
        "begin_suppress_tokens": None,
    }
    return PublicModel(hf.WhisperForConditionalGeneration, hf.WhisperConfig(**{**sizes, **settings}), seed=3)


def frames(rows: int = 3) -> Tensor:
    return torch.randn(rows, 2 * PLACES, MELS, generator=torch.Generator().manual_seed(0))


def greedy(model: hf.PreTrainedModel, sounds: Tensor) -> Tensor:
    ids = torch.full((len(sounds), 1), model.config.decoder_start_token_id)
    for _ in range(NEW):
        ids = torch.cat((ids, model(sounds.mT, decoder_input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    return ids


WHISPERS = {"whisper": whisper(), "whisper-relu": whisper(scale_embedding=True, activation_function="relu")}


@pytest.mark.parametrize("name", WHISPERS)
@torch.no_grad()
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = WHISPERS[name].saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there", device="cpu")
    sounds, read = frames(), torch.randint(5, VOCAB, (3, 11), generator=torch.Generator().manual_seed(1))
    hidden = theirs.get_encoder()(sounds.mT).last_hidden_state
    expected = theirs(sounds.mT, decoder_input_ids=read).logits
    assert float((run.model.encode(sounds) - hidden).abs().max()) <= TOLERANCE
    assert float((run.model(sounds, read) - expected).abs().max()) <= TOLERANCE
    said = greedy(theirs, sounds)
    assert torch.equal(generate(run.model, sounds, max_new_tokens=NEW), said)
    assert said.unique().numel() > 2
    exported = again(run, tmp_path / "back", hf.AutoModelForSpeechSeq2Seq)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert torch.equal(exported(sounds.mT, decoder_input_ids=read).logits, expected)
    extractor = hf.WhisperFeatureExtractor.from_pretrained(tmp_path / "back")
    assert (extractor.feature_size, extractor.sampling_rate, extractor.hop_length) == (MELS, 16_000, 160)


@torch.no_grad()
def test_a_bias_of_keys_changes_nothing(tmp_path: Path) -> None:
    """So an export may leave it out, whatever its value."""
    whisper().saved(tmp_path)
    model, read = af.from_hf(tmp_path, device="cpu").model, torch.arange(5, 16)[None].expand(3, -1)
    before = model(frames(), read)
    for name, p in model.named_parameters():
        if name.endswith(("qkv.bias", "kv.bias")):
            p[-2 * WIDTH : -WIDTH] += 1.0
    assert float((model(frames(), read) - before).abs().max()) <= TOLERANCE


def test_another_rate_is_not_exported(tmp_path: Path) -> None:
    whisper().saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there", device="cpu")
    run.model.config = run.config.model_copy(update={"source": Audio(mels=MELS, rate=8000)})
    with pytest.raises(af.ConfigError, match=r"source\.rate = 8000: Whisper reads 16000 samples per second"):
        af.to_hf(run, tmp_path / "back", family="whisper")


# -- special tokens ---------------------------------------------------------------------------------------------------


def speaking(folder: Path, many: bool, **generation: Any) -> Run:
    """A run whose tokenizer has Whisper's special tokens, as the last ids of the vocabulary."""
    whisper(vocab_size=VOCAB + len(STARTS), decoder_start_token_id=VOCAB, eos_token_id=VOCAB + 1).saved(folder)
    inner = words()
    inner.add_special_tokens(list(STARTS))
    inner.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    settings = {"eos_token_id": VOCAB + 1, "is_multilingual": many, **generation}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return af.from_hf(folder, device="cpu")


def sound(path: Path, *, rate: int = 16_000, channels: int = 1, seconds: float = 0.3) -> str:
    values = (3000 * np.random.default_rng(0).standard_normal(int(rate * seconds) * channels)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.tobytes())
    return str(path)


def test_openings(tmp_path: Path) -> None:
    """No time stamps; a multilingual model first chooses a language, then the task."""
    sot, _, en, de, task, plain = range(VOCAB, VOCAB + 6)
    one = speaking(tmp_path / "one", many=False, suppress_tokens=[9, -1], begin_suppress_tokens=[11])
    assert one.spec == Transcribe(opening=((plain,),), suppress=(9,), suppress_first=(11,))
    many = speaking(tmp_path / "many", many=True)
    assert many.spec == Transcribe(opening=((en, de), (task,), (plain,)))
    assert many.config.special.start == sot
    af.to_hf(many, tmp_path / "back")
    assert af.from_hf(tmp_path / "back", device="cpu").spec == many.spec


@torch.no_grad()
def test_transcription(tmp_path: Path) -> None:
    """The text is what greedy decoding gives after the opening, without suppressed tokens."""
    plain, file = speaking(tmp_path / "plain", many=True), sound(tmp_path / "a.wav")
    (text,) = plain.predict([file], max_new_tokens=9)
    assert plain.predict([f"<audio:{file}>", "", file], max_new_tokens=9) == [text, "", text]
    samples = np.zeros(2 * PLACES * 160, dtype=np.float32)
    with wave.open(file) as opened:
        values = np.frombuffer(opened.readframes(10**6), "<i2") / 2**15
    samples[: len(values)] = values
    audio = plain.config.source
    assert isinstance(audio, Spectrogram)
    given = torch.from_numpy(log_mel(samples, audio))[None]
    ids = torch.tensor([[plain.config.special.start]])
    for allowed in (*plain.spec.opening, *[()] * 6):
        logits = plain.model(given, ids)[0, -1]
        if allowed:
            logits = torch.full_like(logits, -1e9).index_copy(0, torch.tensor(allowed), logits[list(allowed)])
        ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
    answer = ids[0, 4:].tolist()
    assert text == plain.tokenizer.decode(answer).strip()
    changed = speaking(tmp_path / "other", many=True, suppress_tokens=[answer[1]], begin_suppress_tokens=[answer[0]])
    (other,) = changed.predict([file], max_new_tokens=9)
    assert other != text


def test_files_that_are_refused(tmp_path: Path) -> None:
    """One line each: another rate, two channels, too long, missing, no sound."""
    run, (text,) = speaking(tmp_path / "run", many=False), ["no text"]
    (tmp_path / "bad.wav").write_text(text)
    long = len(range(2 * PLACES)) * 160 / 16_000
    cases = {
        sound(tmp_path / "8k.wav", rate=8000): "has 8000 samples per second, and the model reads 16000: resample it",
        sound(tmp_path / "2.wav", channels=2): "has 2 channels, and the model reads one: mix it down",
        sound(tmp_path / "long.wav", seconds=long + 1): r"has 1\.4 seconds, and the model reads 0: cut it into parts",
        str(tmp_path / "none.wav"): "does not exist",
        str(tmp_path / "bad.wav"): "is no readable WAV file",
    }
    for file, message in cases.items():
        with pytest.raises(af.ConfigError, match=message) as error:
            run.predict([file])
        assert len(error.value.faults) == 1


# -- features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mels", [80, 128])
def test_log_mel_frames_are_those_of_transformers(mels: int) -> None:
    rng, time = np.random.default_rng(0), np.arange(16_000) / 16_000
    samples = 0.3 * np.sin(2 * np.pi * 440 * time**2) + 0.01 * rng.standard_normal(len(time))
    padded = np.pad(samples, (0, 30 * 16_000 - len(samples))).astype(np.float32)
    expected = hf.WhisperFeatureExtractor(feature_size=mels)(samples, sampling_rate=16_000, return_tensors="np")
    found = log_mel(padded, Spectrogram(mels=mels))
    assert np.abs(found - expected.input_features[0].T).max() <= 1e-4


# -- CTranslate2 ------------------------------------------------------------------------------------------------------


def write_ct2(folder: Path, run: Run, quantised: bool = False, spec: str = "WhisperSpec") -> None:
    """A folder as CTranslate2's converter writes it."""
    state = run.model.state_dict()
    found: dict[str, np.ndarray] = {theirs: state[ours].numpy() for ours, theirs in ctranslate2._names(run.config)}
    table = hf.models.whisper.modeling_whisper.sinusoids(PLACES, WIDTH).numpy()
    found |= {"encoder/position_encodings/encodings": table, "decoder/scale_embeddings": np.array(0, np.int8)}
    heads = {"encoder": 5, "decoder": 3}
    found |= {f"{side}/num_heads": np.array(n, np.int16) for side, n in heads.items()}
    for name in [name for name in found if quantised and "linear" in name and name.endswith("weight")]:
        scale = (127 / np.abs(found[name]).max(axis=1)).astype(np.float32)
        found |= {name: np.rint(found[name] * scale[:, None]).astype(np.int8), f"{name}_scale": scale}
    kinds = [np.dtype(kind) for kind in ("float32", "int8", "int16")]

    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    data = struct.pack("<I", 6) + text(spec) + struct.pack("<II", 3, len(found))
    for name, x in found.items():
        data += text(name) + struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
        data += struct.pack("<BI", kinds.index(x.dtype), x.nbytes) + x.tobytes()
    data += struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")
    folder.mkdir()
    (folder / "model.bin").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [9], "suppress_ids_begin": [11], "lang_ids": []}))
    run.tokenizer.inner.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def test_ctranslate2(tmp_path: Path) -> None:
    run = speaking(tmp_path / "run", many=False, suppress_tokens=[9], begin_suppress_tokens=[11])
    write_ct2(tmp_path / "ct2", run)
    found = import_model(tmp_path / "ct2", tmp_path / "imported")
    assert found.spec == run.spec
    assert found.config.special.start == run.config.special.start
    for name, x in run.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name].cpu(), x), name
    file = sound(tmp_path / "a.wav")
    assert found.predict([file], max_new_tokens=9) == run.predict([file], max_new_tokens=9)
    write_ct2(tmp_path / "small", run, quantised=True)
    near = import_model(tmp_path / "small", tmp_path / "imported-small").model.state_dict()
    for name, x in run.model.state_dict().items():
        assert float((near[name].cpu() - x).abs().max()) <= float(x.abs().max()) / 250, name


def test_damaged_files_of_ctranslate2(tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed in its headers, a file is refused or read, without another error."""
    run = speaking(tmp_path / "run", many=False)
    write_ct2(tmp_path / "good", run)
    path = tmp_path / "good" / "model.bin"
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for n in (0, 3, 5, 11, 30, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(af.ConfigError, match=r"model\.bin: .*(cut short|no model of CTranslate2)"):
            ctranslate2.read_variables(path)
    for at in rng.integers(0, 300, 60).tolist():
        changed = bytearray(data)
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(changed))
        with suppress(af.ConfigError):
            ctranslate2.read(tmp_path / "good")
    write_ct2(tmp_path / "other", run, spec="TransformerSpec")
    with pytest.raises(af.ConfigError, match="holds a 'TransformerSpec': of CTranslate2's models, only Whisper"):
        import_model(tmp_path / "other", tmp_path / "out")
    with pytest.raises(af.ConfigError, match="--family: is for folders with a config"):
        import_model(tmp_path / "other", tmp_path / "out", family="whisper")
    assert not (tmp_path / "out").exists()
