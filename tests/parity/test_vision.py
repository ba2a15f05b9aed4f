"""ViT: hidden states and pooler equal to those of `transformers`, with the same weights."""

from functools import cache

import pytest
import torch
import transformers as hf
from torch import Tensor

from anyformer import presets
from anyformer.nn.model import Transformer
from tests.parity import names
from tests.parity.families import FF, HEADS, WIDTH, Family, matched
from tests.parity.names import DEPTH

SIZE = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "ff": FF}
TOLERANCE, VISIBLE = 1e-5, 1e-4


@cache
def built(channels: int) -> tuple[Transformer, hf.PreTrainedModel]:
    settings = {"image_size": 12, "patch_size": 4, "num_channels": channels, "attn_implementation": "eager"}
    config = hf.ViTConfig(
        hidden_size=WIDTH, intermediate_size=FF, num_hidden_layers=DEPTH, num_attention_heads=HEADS, **settings
    )
    ours = presets.vit(**SIZE, image=12, patch=4, channels=channels)
    return matched(Family(ours, names.VIT, lambda: hf.ViTModel(config)))


def images(channels: int) -> Tensor:
    return torch.randn(3, channels, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels", [1, 3])
@torch.no_grad()
def test_hidden_states_and_pooler(channels: int) -> None:
    (ours, theirs), given = built(channels), images(channels)
    expected = theirs(given)
    assert ours.encode(given).shape == (3, 10, WIDTH)
    assert float((ours.encode(given) - expected.last_hidden_state).abs().max()) <= TOLERANCE
    assert float((ours(given) - expected.pooler_output).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("channels", [1, 3])
@torch.no_grad()
def test_a_mistake_is_seen(channels: int) -> None:
    """Rows for columns; another order of the patches."""
    (ours, theirs), given = built(channels), images(channels)
    expected = theirs(given).last_hidden_state
    for wrong in (given.transpose(2, 3), given.roll(4, dims=3)):
        assert float((ours.encode(wrong) - expected).abs().max()) > VISIBLE
