"""Parts that the encoders share: classes by head, and the rules of layers and heads under the names of a family."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anyformer.config import Classifier, Head, MaskedLM, ModelConfig, SpanBounds, TokenLabels
from anyformer.interop.config_fields import Fields
from anyformer.interop.family import Family, Framing
from anyformer.interop.weight_rules import Alias, AnyRule, Rule


def classes(title: str) -> dict[str, str]:
    """Return the classes of a family that has all heads, by their names in `transformers`."""
    return {
        f"{title}ForMaskedLM": "masked_lm",
        f"{title}ForSequenceClassification": "classifier",
        f"{title}ForTokenClassification": "token_labels",
        f"{title}ForQuestionAnswering": "span",
        f"{title}Model": "body",
    }


def read_head(
    fields: Fields,
    masked_lm: MaskedLM,
    body: Head,
    *,
    text: Mapping[str, Any],
    tokens: Mapping[str, Any],
    span: Mapping[str, Any] | None = None,
) -> Head:
    """Return the head of a class: a given one, or labels of a text, of tokens, or a span, with these options."""
    match fields.head:
        case "masked_lm":
            return masked_lm
        case "token_labels":
            return TokenLabels(labels=len(fields.labels()), **tokens)
        case "classifier":
            return Classifier(**{"labels": len(fields.labels()), "pool": "first", **text})
        case "span":  # first and last token
            if (count := len(fields.labels())) != 2:
                fields.refuse("id2label", f"has {count} labels: question answering has two")
            return SpanBounds(**(span or {}))
        case _:
            return body


def encoder_family(
    kind: str,
    title: str,
    body: str,
    read: Callable[[Fields], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    rules: Callable[[ModelConfig], Iterable[AnyRule]],
    **more: Any,
) -> Family:
    """Return a family like BERT: `title` begins its classes, and `body` the names of its weights."""
    usual: dict[str, Any] = {
        "heads": classes(title),
        "text": Framing(before=("bos",), after=("eos",)),
        "buffers": (rf"{body}\.embeddings\.(position_ids|token_type_ids)",),
    }
    options = usual | more
    return Family(kind=kind, shape="encoder", prefix=f"{body}.", read=read, write=write, rules=rules, **options)


@dataclass(frozen=True)
class HeadNames:
    """Names of the weights of heads. Token labels are always `classifier`, and spans `qa_outputs`."""

    table: str  # of words, which the masked LM head shares
    dense: str  # of the masked LM head
    norm: str
    bias: str
    decoder: str  # whose weight and bias are second names
    pooler: str = ""  # "": none
    labelled: tuple[str, str] = ("", "classifier")  # layers of labels of texts; "": the pooler

    def rules(self, config: ModelConfig) -> Iterator[AnyRule]:
        """Yield the rules of the head of a model."""
        match config.head:
            case MaskedLM():
                yield Rule("head.transform.linear", self.dense)
                yield Rule("head.transform.norm", self.norm)
                yield Rule("head.bias", self.bias)
                yield Alias(f"{self.decoder}.weight", of=f"{self.table}.weight")
                if self.bias != f"{self.decoder}.bias":
                    yield Alias(f"{self.decoder}.bias", of=self.bias)
            case Classifier():
                first, last = self.labelled
                yield Rule("head.transform.linear", first or self.pooler)
                yield Rule("head.last.1", last)
            case SpanBounds():
                yield Rule("head.linear", "qa_outputs")
            case _:
                yield Rule("head.transform.linear", self.pooler)
                yield Rule("head.linear", "classifier")
