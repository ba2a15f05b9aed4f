"""Write tokenizers as metadata of GGUF files: the algorithms of llama.cpp, or an error that says what it lacks."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, pre_tokenizers

from anyformer.config import ConfigError, Fault
from anyformer.data.chat_template import DEFAULT
from anyformer.data.sentencepiece import CONTROL, NORMAL, SPACE, UNUSED, USER, PieceReader, UnchangedText
from anyformer.data.vocabulary import WORD
from anyformer.interop.gguf_tokenizers import BEFORE, CHAT, ENDS, IDS, JSON, SPLITTINGS
from anyformer.interop.public_tokenizers import must_be_public
from anyformer.recipe import Encoder
from anyformer.runs.run import Run

Data = dict[str, Any]
NEAREST = "gpt-2"  # pre-tokenizer to our own, which leaves marks with their letters and does not know 's, 't, …
ABSENT = "[PAD{}]"  # a row of the table without a token
UNSCORED = -1e6  # of tokens that no merge makes


def describe(run: Run) -> Data:
    """Return the metadata of a run's tokenizer, with its chat templates."""
    text, rows = run.tokenizer, run.config.vocab
    must_be_public(text)
    tokens, types = _listed(run)
    parts = json.loads(text.inner.to_str())
    if text.reader is not None:
        found = _sentencepiece(text.reader, tokens, types)
    elif parts["model"]["type"] == "BPE" and "ByteLevel" in repr(text.inner.decoder):
        found = _byte_pairs(parts, run)
    elif parts["model"]["type"] == "WordPiece":
        found = _word_pieces(parts, tokens, types)
    else:
        what = (
            "is of a kind that llama.cpp does not have: BPE over bytes, SentencePiece's BPE and word pieces are written"
        )
        raise _wrong(what)
    usual, stops = run.config.special.model_dump(), run.config.special.stops
    known = {
        name: getattr(text, role) if getattr(text, role) is not None else usual.get(role) for role, name in IDS.items()
    }
    known |= dict(zip(ENDS[1:], stops, strict=False))
    found = {"tokens": tokens, "token_type": types} | found | _frame(run, found["model"])
    found |= {name: id for name, id in known.items() if id is not None and id < rows}
    chat = {CHAT if name == DEFAULT else f"{CHAT}.{name}": template for name, template in (text.chat or {}).items()}
    return {key if key == JSON else BEFORE + key: value for key, value in found.items()} | chat


def _listed(run: Run) -> tuple[list[str], list[int]]:
    """Return the tokens by id, as many as the table has rows, and their types."""
    text, rows = run.tokenizer, run.config.vocab
    must_be_public(text)
    by_id = {id: token for token, id in text.inner.get_vocab().items()}
    added = text.inner.get_added_tokens_decoder()
    tokens = [by_id.get(i, ABSENT.format(i)) for i in range(rows)]
    types = [
        UNUSED if i not in by_id else CONTROL if i in text.special else USER if i in added else NORMAL
        for i in range(rows)
    ]
    return tokens, types


def _frame(run: Run, model: str) -> Data:
    """Return which special tokens llama.cpp puts around a text; it puts those of word pieces there by itself."""
    text = run.tokenizer
    before, after = text.around if isinstance(run.spec, Encoder) or getattr(run.spec, "framed", False) else ([], [])
    if model == "bert":
        if (before, after) != ([text.bos], [text.sep if text.sep is not None else text.eos]):
            raise _wrong("must put one token before and one after a text, as llama.cpp does for word pieces")
        return {}
    if before not in ([], [text.bos]):
        raise _wrong("puts other tokens than bos before a text: llama.cpp cannot")
    return {"add_bos_token": before != [], "add_eos_token": False}


# -- algorithms -------------------------------------------------------------------------------------------------------


def _byte_pairs(parts: Data, run: Run) -> Data:
    """Describe BPE over bytes; with the whole tokenizer.json where llama.cpp splits texts in another way."""
    model, steps = parts["model"], list(_steps(parts["pre_tokenizer"]))
    if (normalizer := parts["normalizer"]) and normalizer["type"] != "NFC":
        raise _wrong(f"changes texts first ({normalizer['type']}): llama.cpp cannot")
    if normalizer:
        what = "llama.cpp does not normalise texts to NFC as the run does: the ids of texts in other forms may differ"
        warnings.warn(f"{run.folder}: {what}", stacklevel=4)
    merges = [" ".join(pair) for pair in model["merges"]]
    found = {"model": "gpt2", "merges": merges}
    same = (
        name
        for name, how in SPLITTINGS.items()
        if how.whole_words == model["ignore_merges"]
        and [step for one in how.steps for step in _steps(json.loads(one.__getstate__()))] == steps
    )
    if exact := NEAREST if not merges else next(same, None):
        return found | {"pre": exact}
    ours = pre_tokenizers.Split(Regex(WORD), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    if steps != [step for one in ours for step in _steps(json.loads(one.__getstate__()))]:
        raise _wrong("splits texts into words in a way that llama.cpp does not have")
    what = "in llama.cpp the ids of texts with 's, 't and the like after a quote, or with combining marks, may differ"
    warnings.warn(f"{run.folder}: texts are split by the pattern of {NEAREST}: {what}", stacklevel=4)
    return found | {"pre": NEAREST, JSON: run.tokenizer.inner.to_str()}


def _steps(pre_tokenizer: Data | None) -> Iterator[Data]:
    """Yield the steps of a pre-tokenizer, without what only changes offsets."""
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "Sequence":
        for inner in pre_tokenizer["pretokenizers"]:
            yield from _steps(inner)
    else:
        yield {key: value for key, value in pre_tokenizer.items() if key != "trim_offsets"}


def _sentencepiece(reader: PieceReader, tokens: list[str], types: list[int]) -> Data:
    model = reader.pieces
    if model.unigram:
        raise _wrong("is SentencePiece's unigram model: llama.cpp has it for T5 alone")
    if model.charsmap or model.collapse or not isinstance(reader.prepare, UnchangedText):
        what = "llama.cpp does not normalise texts as the run does: on rare texts its ids differ"
        warnings.warn(what, stacklevel=4)
    pieces = {piece.text: piece for piece in model.table}
    known = [pieces.get(token) for token in tokens]
    scores = [UNSCORED if piece is None else piece.score for piece in known]
    kinds = [kind if piece is None else piece.type for piece, kind in zip(known, types, strict=True)]
    return {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "token_type": kinds,
        "add_space_prefix": model.dummy_prefix,
    }


def _word_pieces(parts: Data, tokens: list[str], types: list[int]) -> Data:
    normalizer, prefix = parts["normalizer"] or {}, parts["model"]["continuing_subword_prefix"]
    if normalizer.get("type") != "BertNormalizer" or (parts["pre_tokenizer"] or {}).get("type") != "BertPreTokenizer":
        raise _wrong("splits texts into words in another way than BERT, the only one of llama.cpp for word pieces")

    def spelt(token: str, type: int) -> str:
        if type != NORMAL:
            return token
        return token.removeprefix(prefix) if token.startswith(prefix) else SPACE + token

    lowercase, strips = normalizer["lowercase"], normalizer["strip_accents"]
    switches = {"normalizer.lowercase": lowercase, "normalizer.strip_accents": lowercase if strips is None else strips}
    return {"model": "bert", "pre": "default", "tokens": list(map(spelt, tokens, types)), **switches}


def _wrong(message: str) -> ConfigError:
    return ConfigError([Fault("tokenizer", message)])
