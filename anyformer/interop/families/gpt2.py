"""GPT-2 (Radford et al. 2019)."""

from functools import partial
from typing import Any

from anyformer.config import InvSqrtKey, Learned, ModelConfig, Normal, Unscaled
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import GPT_NAMES, DecoderFields, decoder_family, decoder_rules
from anyformer.interop.weight_rules import Transposed

FIELDS = DecoderFields(
    names=GPT_NAMES, vocab=50_257, width=768, depth=12, heads=12, dropout=0.1, tied=True, bos=50_256, eos=50_256
)
LAYER = {
    "mixer.norm_in": "ln_1",
    "mixer.inner.qkv": "attn.c_attn",
    "mixer.inner.out": "attn.c_proj",
    "feedforward.norm_in": "ln_2",
    "feedforward.inner.up": "mlp.c_fc",
    "feedforward.inner.down": "mlp.c_proj",
}


def read(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.must("scale_attn_by_inverse_layer_idx", False)
    fields.silent("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation")
    fields.silent("summary_proj_to_labels", "summary_first_dropout")
    scale = InvSqrtKey() if fields("scale_attn_weights", True) else Unscaled()
    block = FIELDS.block(fields, bias=True, mixer={"scale": scale})
    found = FIELDS.decoder(fields, block, Learned(length=fields("n_positions", 1024)))
    return found.model_copy(update={"init": Normal(residual=True)})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return parts.fields() | {
        "n_positions": parts.positions,
        "scale_attn_weights": parts.mixer.scale == InvSqrtKey(),
    }


rules = partial(
    decoder_rules,
    "transformer.h",
    LAYER,
    conversions={part: Transposed() for part in LAYER if ".inner." in part},
    positions="transformer.wpe.weight",
    table="transformer.wte",
    norm="transformer.ln_f",
)
GPT2 = decoder_family(
    "gpt2",
    "GPT2",
    read,
    write,
    rules,
    heads={"GPT2LMHeadModel": "lm", "GPT2Model": "body"},
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
