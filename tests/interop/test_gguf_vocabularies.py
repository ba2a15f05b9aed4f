"""SentencePiece and word pieces in GGUF files, and vectors of BERT: llama.cpp has our ids and our vectors."""

import json
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.config import Embedder
from anyformer.data.sentencepiece import BYTE, BYTE_PIECES, CONTROL, NORMAL, UNKNOWN, PieceReader
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import import_model
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.bert import BERT
from anyformer.interop.gguf_export import to_gguf
from anyformer.interop.gguf_tokenizers import model_file
from anyformer.interop.public_tokenizers import frame, word_pieces
from anyformer.interop.sentencepiece_conversion import library_form
from anyformer.recipe import AnyTask, Encoder, LanguageModel
from anyformer.runs.run import Run

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("xllamacpp", reason="needs the extra `dev-all` (llama.cpp)")
from tests.interop.llama_cpp import LlamaCpp

LENGTH = 128
TEXTS = ("the cat and the hat", "  Two  spaces, 한 🙂!", "that\nhen", "", "a")


def run_of(model: af.Transformer, text: TextTokenizer, spec: AnyTask) -> Run:
    return Run(model.eval(), spec.build(text), spec, Path("mine"))


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_sentencepiece_has_the_ids_of_llama_cpp(dummy_prefix: bool, tmp_path: Path) -> None:
    words = ["th", "he", "at", "▁t", "an", "the", "▁the", "▁c", "hat", "▁a", "▁and", "hen", "en"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz,."]
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(byte, 0.0, BYTE) for byte in BYTE_PIECES]
    pieces += [(piece, -float(i), NORMAL) for i, piece in enumerate((*words, *letters))]
    reader = PieceReader(model_file(pieces, dummy_prefix))
    inner = library_form(tmp_path, reader, [piece for piece, *_ in pieces])
    frame(inner, ["<s>"], [])
    text = TextTokenizer(inner, {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}, reader)
    torch.manual_seed(0)
    model = af.Transformer(af.presets.llama(depth=1, width=32, heads=4, vocab=text.size))
    to_gguf(run_of(model, text, LanguageModel(framed=True)), tmp_path / "llama.gguf")
    theirs, back = LlamaCpp(tmp_path / "llama.gguf", LENGTH), import_model(tmp_path / "llama.gguf", tmp_path / "run")
    for one in TEXTS:
        assert text.encode(one) == theirs.tokenize(one) == back.tokenizer.encode(one)
    assert theirs.tokenize("the", special=True)[0] == text.bos
    assert (back.tokenizer.around, back.tokenizer.unk) == (text.around, text.unk)
    assert back.tokenizer.decode(text.encode("the cat 한")) == text.decode(text.encode("the cat 한"))


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_bert_has_the_ids_and_vectors_of_llama_cpp(pool: str, tmp_path: Path) -> None:
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "##s",
        "hat",
        "and",
        "a",
        "##t",
        "!",
        ",",
        "二",
    ]
    inner = word_pieces({token: i for i, token in enumerate(tokens)}, "[UNK]", True, True)
    frame(inner, ["[CLS]"], ["[SEP]"])
    roles = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]", "sep": "[SEP]", "mask": "[MASK]"}
    text, spec = TextTokenizer(inner, roles), Encoder()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"vocab_size": len(tokens), "max_position_embeddings": LENGTH, "pad_token_id": 0}
    config = BERT.config(Fields(sizes | more, "config.json"), ["BertModel"])
    torch.manual_seed(0)
    model = af.Transformer(config.model_copy(update={"head": Embedder(pool=pool, normalize=True)}))
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(std=0.1) if x.dim() > 1 else x.add_(0.1 * torch.randn_like(x))
    run = run_of(model, text, spec)
    assert to_gguf(run, tmp_path / "bert.gguf") == "bert"
    theirs, back = (
        LlamaCpp(tmp_path / "bert.gguf", LENGTH, embeds=True),
        import_model(tmp_path / "bert.gguf", tmp_path / "run"),
    )
    for one in ("The cats and thé hat!", "a二 dog, cat"):
        assert text.encode(one) == theirs.tokenize(one) == back.tokenizer.encode(one)
        vectors = [torch.tensor(json.loads(made.predict([one])[0])) for made in (run, back)]
        assert torch.allclose(vectors[0], vectors[1], atol=1e-6)
        assert torch.allclose(vectors[0], torch.tensor(theirs.embed(one)), atol=2e-3)  # its GELU is the tanh form
    assert theirs.tokenize("cat", special=True) == [2, 6, 3]
