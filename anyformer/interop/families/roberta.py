"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020) and CamemBERT (Martin et al. 2020).

Each is BERT with positions that start after pad_token_id.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from anyformer.config import ConfigError, Gelu, Learned, ModelConfig, Stack
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import HeadNames, encoder_family
from anyformer.interop.family import Family, expect
from anyformer.interop.weight_rules import AnyRule


def read(vocab: int, fields: Fields) -> ModelConfig:
    special = fields.special(fields("vocab_size", vocab), pad=1, bos=0, eos=2)
    if special.pad is None:
        raise ConfigError([fields.fault("pad_token_id", "is missing: positions count from it")])
    offset = special.pad + 1
    position = Learned(length=fields("max_position_embeddings", 512) - offset, offset=offset)
    return bert.read_body(bert.BertDefaults(vocab=vocab), fields, special, position, masked=Gelu())


def write(config: ModelConfig) -> dict[str, Any]:
    position = expect(expect(config.encoder, Stack, "encoder").position, Learned, "encoder.position")
    return bert.write(config) | {"max_position_embeddings": position.length + position.offset}


def heads(body: str) -> HeadNames:
    """Return the names of RoBERTa's heads, for a body of this name."""
    return HeadNames(
        table=f"{body}.embeddings.word_embeddings",
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        bias="lm_head.bias",
        decoder="lm_head.decoder",
        pooler=f"{body}.pooler.dense",
        labelled=("classifier.dense", "classifier.out_proj"),
    )


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "roberta")
    yield from heads("roberta").rules(config)


def _family(kind: str, title: str, vocab: int) -> Family:
    unused = (r"roberta\.pooler\..*", r"lm_head\..*")
    return encoder_family(kind, title, "roberta", partial(read, vocab), write, rules, unused=unused)


ROBERTA = _family("roberta", "Roberta", 50_265)
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta", 30_522)
CAMEMBERT = _family("camembert", "Camembert", 30_522)
