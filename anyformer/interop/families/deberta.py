"""DeBERTa-v2 (He et al. 2021) and v3 (He et al. 2023): BERT with scores between content and distance."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig, position_of
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import encoder_family
from anyformer.interop.family import attention, map_blocks, stack_of, with_mixer
from anyformer.interop.weight_rules import AnyRule, Rule

TERMS: dict[str, Literal["content_to_position", "position_to_content"]] = {
    "c2p": "content_to_position",
    "p2c": "position_to_content",
}

LAYER = bert.LAYER | {
    "mixer.inner.qkv": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
}
HEADS = replace(bert.HEADS, table="deberta.embeddings.word_embeddings", pooler="pooler.dense")


def read(fields: Fields) -> ModelConfig:
    width, heads = fields("hidden_size"), fields("num_attention_heads")
    fields.must("conv_kernel_size", 0)  # a convolution of the embeddings beside the first layer
    fields.silent("conv_act", "conv_groups")
    fields.must("embedding_size", width)
    fields.must("attention_head_size", width // heads)
    fields.must("pooler_hidden_size", width)
    fields.must("pooler_dropout", 0)
    fields.silent("legacy")  # the masked LM head has the same layers under other names
    classified = spec.Transform(activation=fields.activation("pooler_hidden_act"))
    family = bert.BertFields(kind="deberta-v2", pooler=None, classified=classified, label_dropout="cls_dropout")
    length = fields("max_position_embeddings")
    absolute = spec.Learned(length=length) if fields("position_biased_input") else spec.NoPosition()
    distances = _distances(fields, length)
    # as published, positions are in the layers alone
    within = None if distances is None or isinstance(absolute, spec.NoPosition) else distances
    position: spec.Position = distances if distances is not None and within is None else absolute
    found = family.read(fields, position)
    head, context = found.head, length if isinstance(absolute, spec.NoPosition) else None
    if isinstance(head, spec.TokenLabels):
        head = head.model_copy(update={"dropout": fields("hidden_dropout_prob")})
    found = found.model_copy(update={"head": head, "context": context})
    return found if within is None else map_blocks(found, lambda block: with_mixer(block, position=within))


def _distances(fields: Fields, length: int) -> spec.Disentangled | None:
    """Return the scheme inside attention; None if there is none."""
    limit, buckets = fields("max_relative_positions", -1, -1), fields("position_buckets", -1, -1)
    limit = limit if limit > 0 else length
    named, norm = fields.names("pos_att_type"), fields.names("norm_rel_ebd")
    eps, shared = fields("layer_norm_eps"), fields("share_att_key", False)
    if unknown := [name for name in named if name not in TERMS]:
        fields.refuse("pos_att_type", f"= {unknown}: only c2p and p2c are supported")
    relative = fields("relative_attention")
    if relative != bool(named):
        what = "the terms of relative_attention; both or neither must be set"
        raise ConfigError([fields.fault("pos_att_type", f"= {named}: {what}")])
    if not relative:
        return None
    return spec.Disentangled(
        buckets=buckets if buckets > 0 else limit,
        max_distance=limit if buckets > 0 else None,
        terms="both" if len(set(named)) > 1 else TERMS.get(named[0], "both"),
        projections="shared" if shared else "separate",
        norm=spec.LayerNorm(eps=eps) if "layer_norm" in norm else spec.NoNorm(),
        dropout=fields("hidden_dropout_prob"),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack, found = stack_of(config), bert.write_body(config)
    absolute = stack.position if isinstance(stack.position, spec.Learned) else None
    found["position_biased_input"] = absolute is not None
    found["max_position_embeddings"] = (config.context or 512) if absolute is None else absolute.length
    scheme = position_of(attention(stack.blocks[0], "encoder"), stack)
    if isinstance(scheme, spec.Disentangled):
        found |= {
            "relative_attention": True,
            "position_buckets": -1 if scheme.max_distance is None else scheme.buckets,
            "max_relative_positions": scheme.max_distance or scheme.buckets,
            "pos_att_type": [name for name, term in TERMS.items() if scheme.terms in (term, "both")],
            "share_att_key": scheme.projections == "shared",
            "norm_rel_ebd": "none" if isinstance(scheme.norm, spec.NoNorm) else "layer_norm",
        }
    if isinstance(config.head, spec.Classifier):
        found["cls_dropout"] = config.head.dropout
        if isinstance(config.head.transform, spec.Transform):
            found["pooler_hidden_act"] = name_of(config.head.transform.activation)
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "deberta", LAYER)
    stack = stack_of(config)
    yield Rule("encoder.schemes.0.tables.relative", "deberta.encoder.rel_embeddings.weight")
    for end in ("weight", "bias"):
        yield Rule(f"encoder.schemes.0.tables.norm_{end}", f"deberta.encoder.LayerNorm.{end}")
    scheme = position_of(attention(stack.blocks[0], "encoder"), stack)
    if isinstance(scheme, spec.Disentangled):
        terms = {"query": "content_to_position", "key": "position_to_content"}  # which do without it
        names = [f"pos_{part}_proj" for part, other in terms.items() if scheme.terms != other]
        for i in range(stack.depth):
            theirs = (f"deberta.encoder.layer.{i}.attention.self.{name}" for name in names)
            yield Rule(f"encoder.blocks.{i}.mixer.inner.own", *theirs)
    yield from HEADS.rules(config)


DEBERTA_V2 = encoder_family(
    "deberta-v2",
    "DebertaV2",
    "deberta",
    read,
    write,
    rules,
    buffers=(r"deberta\.embeddings\.position_ids",),
    unused=(r"(lm|mask)_predictions\..*", r"cls\..*", r"pooler\..*", r"deberta\.encoder\.LayerNorm\..*"),
    older=(
        (r"lm_predictions\.lm_head\.bias", "cls.predictions.bias"),
        (r"lm_predictions\.lm_head\.", "cls.predictions.transform."),
    ),
)
