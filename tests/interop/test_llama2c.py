"""llama2.c's files: a model as its own program would run it, its tokenizer, and what is refused."""

import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import anyformer as af
from anyformer.data.sentencepiece import BYTE_PIECES
from anyformer.interop import import_model
from anyformer.interop.llama2c import PIECES, read, read_tokenizer
from tests.test_cli import done, refused

D, F, N, H, G, S = 24, 20, 2, 6, 3, 16  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, seq_len
Entry = tuple[bytes, float]
PIECE = [(c, -50.0 - i) for i, c in enumerate([" ", "a", "b", "c", "é", "\n"])]
WORDS: list[tuple[str, float]] = [("ab", -1), (" a", -2), ("ca", -3), (" ab", -4), ("abc", -5), ("aa", -6), ("aaa", -7)]


def vocabulary(pieces: list[tuple[str, float]]) -> list[Entry]:
    special = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(token.encode() for token in BYTE_PIECES)]
    return [*((text, 0.0) for text in special), *((piece.encode(), score) for piece, score in pieces)]


def tokenizer_file(path: Path, entries: list[Entry]) -> Path:
    parts = [struct.pack("<fi", score, len(text)) + text for text, score in entries]
    path.write_bytes(struct.pack("<i", max(len(text) for text, _ in entries)) + b"".join(parts))
    return path


Weights = dict[str, np.ndarray]


def model_file(path: Path, vocab: int, tied: bool) -> Weights:
    """A random model, written as llama2.c's export does."""
    rng, k = np.random.default_rng(0), D // H
    shapes = {
        "table": (vocab, D),
        "norm": (N, D),
        "wq": (N, D, D),
        "wk": (N, G * k, D),
        "wv": (N, G * k, D),
        "wo": (N, D, D),
        "ff_norm": (N, D),
        "w1": (N, F, D),
        "w2": (N, D, F),
        "w3": (N, F, D),
        "final": (D,),
        "angles": (2, S, k // 2),
        **({} if tied else {"wcls": (vocab, D)}),
    }
    weights = {name: rng.normal(size=shape).astype("<f4") * 0.4 for name, shape in shapes.items()}
    header = struct.pack("<7i", D, F, N, H, G, vocab if tied else -vocab, S)
    path.write_bytes(header + b"".join(x.tobytes() for x in weights.values()))
    return weights


def forward(weights: Weights, ids: list[int]) -> np.ndarray:
    """Token by token as run.c does it, in float64."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    k, logits = D // H, []
    keys: list[list[np.ndarray]] = [[] for _ in range(N)]
    values: list[list[np.ndarray]] = [[] for _ in range(N)]

    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + 1e-5) * weight

    def turn(x: np.ndarray, at: int) -> np.ndarray:
        out = x.copy()
        for i in range(0, len(x), 2):  # neighbours turn together
            angle = at * 10000.0 ** (-(i % k) / k)
            c, s = np.cos(angle), np.sin(angle)
            out[i], out[i + 1] = x[i] * c - x[i + 1] * s, x[i] * s + x[i + 1] * c
        return out

    for at, token in enumerate(ids):
        x = w["table"][token]
        for n in range(N):
            y = rms(x, w["norm"][n])
            q = turn(w["wq"][n] @ y, at)
            keys[n].append(turn(w["wk"][n] @ y, at))
            values[n].append(w["wv"][n] @ y)
            heads = []
            for h in range(H):
                own = slice(h * k, (h + 1) * k)
                g = h // (H // G)
                shared = slice(g * k, (g + 1) * k)
                scores = np.array([q[own] @ key[shared] for key in keys[n]]) / np.sqrt(k)
                p = np.exp(scores - scores.max())
                heads.append(sum(a * value[shared] for a, value in zip(p / p.sum(), values[n], strict=True)))
            x = x + w["wo"][n] @ np.concatenate(heads)
            y = rms(x, w["ff_norm"][n])
            gate = w["w1"][n] @ y
            x = x + w["w2"][n] @ (gate / (1 + np.exp(-gate)) * (w["w3"][n] @ y))
        logits.append(w.get("wcls", w["table"]) @ rms(x, w["final"]))
    return np.stack(logits)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    entries = vocabulary(WORDS + PIECE)
    model_file(tmp_path / "model.bin", len(entries), tied=True)
    return tmp_path / "model.bin", tokenizer_file(tmp_path / "tok.bin", entries)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_a_plain_forward(tmp_path: Path, tied: bool) -> None:
    entries = vocabulary(WORDS + PIECE)
    weights = model_file(tmp_path / "model.bin", len(entries), tied)
    model, *_ = read(tmp_path / "model.bin", tokenizer_file(tmp_path / "tok.bin", entries))
    ids = torch.randint(len(entries), (1, 40))
    expected = torch.from_numpy(forward(weights, ids[0].tolist()))
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_run_is_made_of_it(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = done("import", files[0], "--tokenizer", files[1], "--out", out)
    assert f"imported: {out}, " in said
    assert f"next:     anyformer generate {out} --prompt" in said
    run, (model, tokenizer, _) = af.load(out, device="cpu"), read(*files)
    ids = torch.randint(run.tokenizer.size, (2, 9))
    with torch.no_grad():
        assert run.model(ids).equal(model(ids))
    assert run.tokenizer.encode("abc cab") == tokenizer.encode("abc cab")
    assert (run.tokenizer.bos, run.tokenizer.eos) == (1, 1)  # what begins a text ends the one before
    assert run.task.prompts(["", "ab"], run.config) == [[1], [1, *tokenizer.encode("ab")]]  # type: ignore[attr-defined]
    for text, ids in (("", [1]), ("ab", [1, *tokenizer.encode("ab")])):
        whole = af.generate(run.model, torch.tensor([ids]), max_new_tokens=9, stop=[1])[0].tolist()
        assert text + done("generate", out, "--prompt", text, "--max-new-tokens", "9") == tokenizer.decode(whole) + "\n"
    (line,) = refused("import", files[0], "--tokenizer", files[1], "--out", out)
    assert line == f"{out}: exists already; choose another --out"


# -- text -------------------------------------------------------------------------------------------------------------


def merged(pieces: list[tuple[str, float]], text: str) -> list[int]:
    """llama2.c's way: the leftmost of the best pairs, until there is none."""
    ids = {piece: PIECES + i for i, (piece, _) in enumerate(pieces)}
    score = dict(pieces)
    parts = list(" " + text) if text else []
    known = [part if part in ids else None for part in parts]
    found = [p if p is not None else [3 + b for b in c.encode()] for p, c in zip(known, parts, strict=True)]
    flat: list[str | int] = [x for part in found for x in (part if isinstance(part, list) else [part])]
    while True:
        best: tuple[float, int] | None = None
        for i, (a, b) in enumerate(pairwise(flat)):
            if isinstance(a, str) and isinstance(b, str) and a + b in ids and (best is None or score[a + b] > best[0]):
                best = score[a + b], i
        if best is None:
            return [ids[x] if isinstance(x, str) else x for x in flat]
        i = best[1]
        flat[i : i + 2] = [str(flat[i]) + str(flat[i + 1])]


@st.composite
def learnt(draw: st.DrawFn) -> list[tuple[str, float]]:
    """A vocabulary as training makes it: each piece is made of two that were there before."""
    pieces = [" ", "a", "b", "é"]
    for _ in range(draw(st.integers(0, 12))):
        piece = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if piece not in pieces and len(piece) < 8:
            pieces.append(piece)
    ties = draw(st.integers(1, 3))  # so many pieces have one score: then the leftmost is merged first
    return [(piece, -float(i // ties)) for i, piece in enumerate(pieces[4:])] + [
        (c, -90.0 - i) for i, c in enumerate(" abé")
    ]


@given(learnt(), st.text("ab é한\n<s>", max_size=20))
def test_text_is_merged_as_llama2c_does(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[str, float]], text: str
) -> None:
    path = tmp_path_factory.mktemp("tok") / "tok.bin"
    tokenizer = read_tokenizer(tokenizer_file(path, vocabulary(pieces)))
    assert tokenizer.encode(text) == merged(pieces, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_is_equal_after_an_export_as_gguf(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("gguf")
    entries = vocabulary(WORDS + PIECE)
    model_file(tmp_path / "model.bin", len(entries), tied)
    tokenizer_file(tmp_path / "tok.bin", entries)
    check_gguf(import_model(tmp_path / "model.bin", tmp_path / "run", tokenizer=tmp_path / "tok.bin"), tmp_path)


def check_gguf(run: af.Run, folder: Path) -> None:
    """Export a run and read it again: ids, texts, logits and what ends a text are the same."""
    done("export", run.folder, folder / "model.gguf", "--format", "gguf")
    again = import_model(folder / "model.gguf", folder / "again")
    for text in ("", "abc cab", "  Once upon\na time, there was a big cat.", "é<s> 한국어 中文 \t\U0001f600"):
        ids = run.tokenizer.encode(text)
        assert again.tokenizer.encode(text) == ids
        assert again.tokenizer.decode(ids) == run.tokenizer.decode(ids) == text
        assert again.task.prompts([text], again.config) == run.task.prompts([text], run.config)  # type: ignore[attr-defined]
    assert (again.tokenizer.bos, again.tokenizer.eos) == (run.tokenizer.bos, run.tokenizer.eos) == (1, 1)
    ids = torch.randint(run.tokenizer.size, (2, 40))
    with torch.no_grad():
        assert torch.equal(again.model(ids), run.model(ids))


# -- what is refused --------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_file_that_is_cut_or_too_long_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    entries = vocabulary(WORDS + PIECE)
    model_file(folder / "model.bin", len(entries), tied=False)
    tokenizer_file(folder / "tok.bin", entries)
    name = data.draw(st.sampled_from(["model.bin", "tok.bin"]))
    whole = (folder / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    (folder / name).write_bytes(data.draw(st.sampled_from([whole[:at], whole + whole[: at + 1]])))
    with pytest.raises(af.ConfigError) as told:
        import_model(folder / "model.bin", folder / "run", tokenizer=folder / "tok.bin")
    assert len(told.value.faults) == 1
    assert str(told.value).startswith(str(folder))
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("at", "value", "line"),
    [
        (0, struct.pack("<i", 0x616B3432), "is of llama2.c's version 20: only version 0 is read"),
        (8, struct.pack("<i", -3), "are no sizes"),
        (0, struct.pack("<i", 2**30), "are no sizes"),
        (12, struct.pack("<i", 7), "make no heads of an even width"),
        (4, struct.pack("<i", 21), "its header needs"),
        (28 + 4 * 5, struct.pack("<f", float("nan")), "is damaged: at byte 48, in table, there is a number"),
    ],
)
def test_a_garbled_model_is_refused(files: tuple[Path, Path], tmp_path: Path, at: int, value: bytes, line: str) -> None:
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:at] + value + whole[at + 4 :])
    (told,) = refused("import", files[0], "--tokenizer", files[1], "--out", tmp_path / "run")
    assert told.startswith(f"{files[0]}: ")
    assert line in told


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda entries: entries[:-1], "has 271 tokens, and the model in model.bin has 272"),
        (lambda entries: [*entries[:-1], (b"ab", -99.0)], "token 271, 'ab', is there twice"),
        (lambda entries: [*entries[:-1], (b"", -99.0)], "is empty"),
        (lambda entries: [*entries[:-1], (b"\xff", -99.0)], "token 271 is not UTF-8"),
        (lambda entries: [*entries[:-1], (b"bb", float("nan"))], "the score of token 271 is not finite"),
        (lambda entries: entries[1:] + entries[:1], "ids 3 to 258 are not the bytes"),
    ],
)
def test_a_garbled_tokenizer_is_refused(files: tuple[Path, Path], tmp_path: Path, change: object, line: str) -> None:
    assert callable(change)
    tokenizer_file(files[1], change(vocabulary(WORDS + PIECE)))
    (told,) = refused("import", files[0], "--tokenizer", files[1], "--out", tmp_path / "run")
    assert told.startswith(f"{files[1]}: ")
    assert line in told


def test_what_is_missing_is_told(files: tuple[Path, Path], tmp_path: Path) -> None:
    (line,) = refused("import", files[0], "--out", tmp_path / "run")
    assert line.startswith("--tokenizer: is missing")
    (line,) = refused("import", tmp_path / "none.bin", "--tokenizer", files[1], "--out", tmp_path / "run")
    assert line == f"{tmp_path / 'none.bin'}: cannot be read: No such file or directory"
    (line,) = refused("import", tmp_path / "model.h5", "--tokenizer", files[1], "--out", tmp_path / "run")
    assert "is of no kind that is read" in line
    (line,) = refused("import", tmp_path, "--out", tmp_path / "run")
    assert line == f"{tmp_path}: holds files of llama2.c: anyformer import {files[0]} --tokenizer {files[1]}"


# -- public weights, where there are some -----------------------------------------------------------------------------


@pytest.mark.skipif("ANYFORMER_WEIGHTS" not in os.environ, reason="ANYFORMER_WEIGHTS names no folder of weights")
def test_stories_are_told_as_llama2c_tells_them(tmp_path: Path) -> None:
    folder = Path(os.environ["ANYFORMER_WEIGHTS"]) / "stories260K"
    run = import_model(folder / "stories260K.bin", tmp_path / "run", tokenizer=folder / "tok512.bin")
    device = next(run.model.parameters()).device
    ids = af.generate(run.model, torch.tensor([[1]], device=device), max_new_tokens=256, stop=[1])
    expected = (folder / "greedy_reference.txt").read_text(encoding="utf-8")
    assert run.tokenizer.decode(ids[0].tolist()) == run.generate([""], max_new_tokens=256)[0] == expected
    check_gguf(run, tmp_path)
