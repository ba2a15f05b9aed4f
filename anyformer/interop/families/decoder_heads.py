"""Heads of decoders besides the language model: labels of a text by its last token, and spans."""

from collections.abc import Iterator
from dataclasses import replace

from anyformer.config import Classifier, FactorisedTable, ModelConfig, SpanBounds, Tokens
from anyformer.interop.config_fields import Fields
from anyformer.interop.family import Family
from anyformer.interop.weight_rules import AnyRule, Rule

TITLES = {"gemma3_text": "Gemma3Text"}  # of classes whose names do not begin as that of the language model
WITHOUT = ("cohere", "xglm")  # `transformers` has no such classes
WITH_SPANS = ("gpt2", "gpt_neox", "bloom", "falcon", "mistral", "mixtral")  # others of these have other weight names


def with_heads(family: Family) -> Family:
    """Return a family of decoders with `...ForSequenceClassification`, and some with `...ForQuestionAnswering`."""
    if family.shape != "decoder" or "lm" not in family.heads.values() or family.kind in WITHOUT:
        return family
    model = next(name for name, head in family.heads.items() if head == "lm")
    title = TITLES.get(family.kind, model.removesuffix("ForCausalLM").removesuffix("LMHeadModel"))
    heads = {**family.heads, f"{title}ForSequenceClassification": "classifier"}
    if family.kind in WITH_SPANS:
        heads[f"{title}ForQuestionAnswering"] = "span"

    def read(fields: Fields) -> ModelConfig:
        found = family.read(fields)
        if fields.head not in ("classifier", "span"):
            return found
        if isinstance(found.target, Tokens) and isinstance(found.target.table, FactorisedTable):
            fields.refuse("word_embed_proj_dim", f"= {found.target.table.width}: this head reads hidden_size values")
        if fields.head == "span":
            return found.model_copy(update={"head": SpanBounds()})
        labels = len(fields.labels())
        return found.model_copy(update={"head": Classifier(labels=labels, pool="last", bias=False)})

    def rules(config: ModelConfig) -> Iterator[AnyRule]:
        yield from family.rules(config)
        yield Rule("head.last.1", "score")
        if isinstance(config.head, SpanBounds):
            yield Rule("head.linear", "qa_outputs")

    return replace(family, heads=heads, read=read, rules=rules)
