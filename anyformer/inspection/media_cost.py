"""Cost of the embeddings of images, sounds and feature vectors."""

import math
from dataclasses import replace
from typing import assert_never

from anyformer.config import ConvStem, ImageSegment, LearnedGrid, Media, NoStem, Spectrogram
from anyformer.config.cost import Cost, linear


def media_cost(media: Media | None, d: int, b: int) -> Cost:
    """Return the cost of a stream's segments: all weights, and the work for one image in each of b rows."""
    if media is None:
        return Cost()
    cost = Cost(d * (1 + len(media.kinds))) if media.types else Cost()
    if media.image is not None:
        cost += _image_cost(media.image, d, b)
    if media.audio is not None:
        cost += audio_cost(media.audio, d, 0)
    if media.features is not None:
        places, values = media.features.places, media.features.values
        size = media.features.size // places
        cost += linear(size, d, 0, True) if values is None else Cost(size * values * d)
        cost += Cost(places * d if places > 1 else 0)
    return cost


def audio_cost(spec: Spectrogram, d: int, places: int) -> Cost:
    """Return the cost of the convolutions of a spectrogram, from its number of places."""
    cost = linear(3 * spec.mels, d, places * spec.stride, True)
    for i in range(spec.strided):
        cost += linear(3 * d, d, places * 2 ** (spec.strided - 1 - i), True)
    return cost


def _image_cost(spec: ImageSegment, d: int, images: int) -> Cost:
    rows, columns = spec.grid
    cost = Cost((rows + columns) * d) if isinstance(spec.position, LearnedGrid) else Cost()
    match spec.stem:
        case NoStem():
            return cost + linear(spec.channels * spec.patch**2, d, images * spec.places, True)
        case ConvStem(channels=channels):
            inputs, (height, width) = int(spec.channels), spec.size
            for i in range(int(math.log2(spec.patch))):
                outputs, height, width = channels * 2**i, height // 2, width // 2
                pixels = images * height * width
                one = linear(9 * inputs, outputs, pixels, True)
                cost += replace(one, parameters=one.parameters + 2 * outputs, saved=pixels * (4 * inputs + 2 * outputs))
                inputs = outputs
            return cost + linear(inputs, d, images * spec.places, True)
        case _:
            assert_never(spec.stem)
