"""Log-mel spectrograms, as Whisper computes them (Radford et al. 2022)."""

from functools import cache

import numpy as np

from anyformer.config import Spectrogram


def log_mel(samples: np.ndarray, spec: Spectrogram) -> np.ndarray:
    """Return the log-mel frames [frames, mels] of samples in [-1, 1]; there is a frame for each hop.

    Power of a Fourier transform over Hann windows, centred on each hop, in mel bands; then log10, at most 8 below the
    loudest band, and scaled to about [-1, 1].
    """
    n, half = spec.window, spec.window // 2
    frames = max(1, len(samples) // spec.hop)
    padded = np.pad(samples.astype(np.float64), (half, half), mode="reflect" if len(samples) > half else "constant")
    padded = np.pad(padded, (0, max(0, (frames - 1) * spec.hop + n - len(padded))))
    starts = np.arange(frames)[:, None] * spec.hop + np.arange(n)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / n)
    power = np.abs(np.fft.rfft(padded[starts] * hann, axis=1)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters(spec.rate, n, spec.mels).T, 1e-10))
    return ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


@cache
def mel_filters(rate: int, window: int, mels: int) -> np.ndarray:
    """Return triangular bands [mels, window // 2 + 1], evenly spaced on Slaney's mel scale, each of unit area."""
    edges = _hertz(np.linspace(0.0, _mel(rate / 2), mels + 2))
    bins = np.linspace(0.0, rate / 2, window // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]


LINEAR = 200.0 / 3  # hertz per mel below KNEE; above it mels are logarithmic
KNEE = 1000.0
LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    return hertz / LINEAR if hertz < KNEE else KNEE / LINEAR + float(np.log(hertz / KNEE)) / LOG_STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    knee = KNEE / LINEAR
    return np.where(mels < knee, mels * LINEAR, KNEE * np.exp(LOG_STEP * (mels - knee)))
