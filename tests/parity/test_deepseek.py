"""Latent attention against that of DeepSeek-V3 in `transformers`, with the same weights."""

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Dense, Relation
from anyformer.config import Attention, Latent, Rotary
from anyformer.nn.attention_variants.latent import LatentAttention
from anyformer.nn.context import Context

WIDTH, HEADS, RANK, CONTENT, TURNING, VALUE, LENGTH = 32, 4, 12, 10, 6, 7, 20


def halves(rows: Tensor, heads: int, kept: int) -> Tensor:
    """Rows of heads of `kept` + TURNING: pairs (0, 1), (2, 3), ... of the turning part as (0, n/2), (1, n/2 + 1)."""
    content, turning = rows.unflatten(0, (heads, kept + TURNING)).split((kept, TURNING), dim=1)
    return torch.cat((content, turning[:, 0::2], turning[:, 1::2]), dim=1).flatten(0, 1)


def apart(rows: Tensor) -> Tensor:
    """Rows of heads of [content, value] as all contents, then all values."""
    content, value = rows.unflatten(0, (HEADS, CONTENT + VALUE)).split((CONTENT, VALUE), dim=1)
    return torch.cat((content.flatten(0, 1), value.flatten(0, 1)))


@pytest.mark.parametrize("query_rank", [None, 9])
@torch.no_grad()
def test_equals_deepseek(query_rank: int | None):
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=RANK,
        q_lora_rank=query_rank,
        qk_nope_head_dim=CONTENT,
        qk_rope_head_dim=TURNING,
        v_head_dim=VALUE,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="eager",
    )
    theirs, angles = DeepseekV3Attention(config, 0).eval(), DeepseekV3RotaryEmbedding(config)
    for parameter in theirs.parameters():
        parameter.normal_(std=0.3)
    weights = {name.removesuffix(".weight"): weight for name, weight in theirs.named_parameters()}

    compress = Latent(rank=RANK, rotary_width=TURNING, query_rank=query_rank)
    spec = Attention(heads=HEADS, key_width=CONTENT + TURNING, value_width=VALUE, compress=compress)
    ours = LatentAttention(spec, WIDTH).eval()
    queries = halves(weights["q_b_proj" if query_rank else "q_proj"], HEADS, CONTENT)
    down = (weights["q_a_proj"] if query_rank else queries, halves(weights["kv_a_proj_with_mqa"], 1, RANK))
    found = {
        "latent.down.weight": torch.cat(down),
        "latent.norm.weight": weights["kv_a_layernorm"],
        "latent.up.weight": apart(weights["kv_b_proj"]),
        "out.weight": weights["o_proj"],
    }
    if query_rank:
        found |= {"latent.query_norm.weight": weights["q_a_layernorm"], "latent.query_up.weight": queries}
    ours.load_state_dict(found)

    x, layout, rotary = torch.randn(2, LENGTH, WIDTH), Layout(torch.arange(LENGTH)[None]), Rotary()
    relation = Relation(Dense(causal=True), rotation=rotary.prepare(layout.positions, TURNING), scheme=rotary)
    ahead = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, angles(x, layout.positions), ahead)
    torch.testing.assert_close(ours(x, Context(layout, layout, relation)), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1
