"""Make `slow_ids.tar.xz`: train small SentencePiece models, encode lines by slow tokenizers of `transformers` 4.x.

    python tests/interop/slow_ids.py

It makes an environment of its own, with the versions below, in a temporary folder, and runs itself there.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import slow_cases
from slow_cases import Case
from slow_lines import lines, training_lines

VERSIONS = {"transformers": "4.57.6", "sentencepiece": "0.2.2", "protobuf": "7.36.2"}
ALBERT_SYMBOLS = ["(", ")", '"', "-", ".", "–", "£", "€"]
GEMMA_SYMBOLS = ["▁▁", "▁▁▁", "\n", "\n\n", "\t", "<b>", "①", "ㅋㅋ"]
NO_SPACES = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "vocab_size": 700},
    "padded": {"model_type": "unigram", "vocab_size": 700, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "albert": {
        "model_type": "unigram",
        "vocab_size": 700,
        "pad_id": 0,
        "eos_id": -1,
        "unk_id": 1,
        "bos_id": -1,
        "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
        "user_defined_symbols": ALBERT_SYMBOLS,
        "split_by_number": False,
    },
    "llama": {"model_type": "bpe", "vocab_size": 1100, "byte_fallback": True, **NO_SPACES},
    "gemma": {
        "model_type": "bpe",
        "vocab_size": 1100,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        **NO_SPACES,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "bos_piece": "<bos>",
        "eos_piece": "<eos>",
        "user_defined_symbols": GEMMA_SYMBOLS,
    },
    "deberta": {
        "model_type": "unigram",
        "vocab_size": 700,
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "pad_piece": "[PAD]",
        "bos_piece": "[CLS]",
        "eos_piece": "[SEP]",
        "unk_piece": "[UNK]",
    },
    "pairs": {"model_type": "bpe", "vocab_size": 900, "normalization_rule_name": "nmt_nfkc_cf"},
}
ADDED = {"content": "<|new|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", action="store_true", help="this is the environment with these versions")
    if parser.parse_args().inside:
        make()
        return
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        subprocess.run([python, __file__, "--inside"], check=True)


def train(**options: Any) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentences = (" ".join(line.split()) for line in training_lines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, minloglevel=2, hard_vocab_limit=False, **options
    )
    return model.getvalue()


def vocabulary(*models: bytes) -> dict[str, int]:
    """Return a vocab.json: special tokens, some tokens of its own, and most pieces of the models."""
    import sentencepiece

    loaded = [sentencepiece.SentencePieceProcessor(model_proto=model) for model in models]
    pieces = [one.id_to_piece(i) for one in loaded for i in range(3, one.get_piece_size()) if i % 50]
    tokens = ["</s>", "<unk>", "<s>", "<pad>", ">>deu<<", ">>kor<<", "中文句", *pieces]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def make() -> None:
    import sentencepiece
    import transformers

    models = {name: train(**options) for name, options in MODELS.items()}
    bpe, piece, model = "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"
    m2m, marian = vocabulary(models["unigram"]), vocabulary(models["unigram"], models["pairs"])
    size = {
        name: sentencepiece.SentencePieceProcessor(model_proto=one).get_piece_size() for name, one in models.items()
    }

    def case(name: str, like: str | None, kind: str, file: str, of: str, **settings: Any) -> tuple[Any, ...]:
        return name, like, kind, {file: models[of]}, {file: of}, settings

    def named(one: str, **more: Any) -> dict[str, Any]:
        return {"tokenizer_config.json": {"tokenizer_class": one, **more}}

    added = {str(size["llama"]): {**ADDED, "special": False}, str(size["llama"] + 1): {**ADDED, "special": True}}
    added[str(size["llama"] + 1)]["content"] = "<|turn|>"
    specs = [
        case("XLMRoberta", None, "xlm-roberta", bpe, "unigram"),
        case("MBart", "XLMRoberta", "mbart", bpe, "unigram"),
        case("MBart-ko", "XLMRoberta", "mbart", bpe, "unigram", **named("MBartTokenizer", src_lang="ko_KR")),
        case("MBart50", "XLMRoberta", "mbart", bpe, "unigram", **named("MBart50Tokenizer", src_lang="de_DE")),
        case("Nllb", "XLMRoberta", "m2m_100", bpe, "unigram", **named("NllbTokenizer")),
        case("Nllb-saved", "XLMRoberta", "m2m_100", bpe, "unigram", **named("NllbTokenizer", src_lang="kor_Hang")),
        case("Nllb-legacy", "XLMRoberta", "m2m_100", bpe, "unigram", **named("NllbTokenizer", legacy_behaviour=True)),
        case("M2M100", "XLMRoberta", "m2m_100", bpe, "unigram", **{"vocab.json": m2m}),
        case("Pegasus", None, "pegasus", piece, "padded"),
        case("T5", "Pegasus", "t5", piece, "padded"),
        case("T5-new", "Pegasus", "t5", piece, "padded", **named("T5Tokenizer", legacy=False, extra_ids=20)),
        case("MT5", "Pegasus", "mt5", piece, "padded", **named("T5Tokenizer", extra_ids=0)),
        case("Albert", None, "albert", piece, "albert"),
        case("Albert-cased", "Albert", "albert", piece, "albert", **named("AlbertTokenizer", do_lower_case=False)),
        case("Albert-accents", "Albert", "albert", piece, "albert", **named("AlbertTokenizer", keep_accents=True)),
        case("DebertaV2", None, "deberta-v2", "spm.model", "deberta"),
        case("Llama", None, "llama", model, "llama"),
        case("Llama-new", "Llama", "mistral", model, "llama", **named("LlamaTokenizer", legacy=False)),
        case(
            "Llama-added",
            "Llama",
            "phi3",
            model,
            "llama",
            **named(
                "LlamaTokenizer", legacy=False, add_eos_token=True, add_bos_token=False, added_tokens_decoder=added
            ),
        ),
        case("Gemma", None, "gemma", model, "gemma"),
        (
            *("Marian", "XLMRoberta", "marian", {"source.spm": models["unigram"], "target.spm": models["pairs"]}),
            *({"source.spm": "unigram", "target.spm": "pairs"}, {"vocab.json": marian}),
        ),
    ]
    found: dict[str, Case] = {}
    like_of = {}
    for name, like, kind, data, files, settings in specs:
        if name == "Nllb-saved":  # as save_pretrained writes it
            with tempfile.TemporaryDirectory() as folder:
                write(folder, data, settings)
                transformers.NllbTokenizer.from_pretrained(folder).save_pretrained(folder)
                names = ("tokenizer_config.json", "special_tokens_map.json")
                settings = {one: json.loads((Path(folder) / one).read_text()) for one in names}
        found[name], like_of[name] = encode(name, kind, data, files, settings), like
        print(name, sum(map(len, found[name].rows)), flush=True)
    save(found, like_of, models)


def write(folder: str, data: dict[str, bytes], settings: dict[str, Any]) -> None:
    for name, blob in data.items():
        (Path(folder) / name).write_bytes(blob)
    for name, table in settings.items():
        (Path(folder) / name).write_text(json.dumps(table))


def encode(name: str, kind: str, data: dict[str, bytes], files: dict[str, str], settings: dict[str, Any]) -> Case:
    import transformers

    own = settings.get("tokenizer_config.json", {}).get("tokenizer_class", f"{name}Tokenizer")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, data, settings)
        tokenizer = getattr(transformers, own).from_pretrained(folder)
    frame = tokenizer.build_inputs_with_special_tokens([])
    filled = tokenizer.build_inputs_with_special_tokens([5])
    at = filled.index(5)
    assert filled == [*frame[:at], 5, *frame[at:]]

    def ids(text: str, group: str) -> list[int]:
        if group == "special":  # a text never becomes a special token here
            return tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text, split_special_tokens=True))
        whole = tokenizer(text)["input_ids"]
        assert whole == [*frame[:at], *whole[at : len(whole) - len(frame) + at], *frame[at:]]
        return whole[at : len(whole) - len(frame) + at]

    every = lines()
    rows = [ids(text, group) for group, texts in every.items() for text in texts]
    target = []
    if kind == "marian":
        targets = [text for group, texts in every.items() if group != "special" for text in texts]
        target = [tokenizer(text_target=text)["input_ids"][:-1] for text in targets]
    return Case(kind, files, settings, frame[:at], frame[at:], rows, target)


def save(cases: dict[str, Case], like: dict[str, str | None], models: dict[str, bytes]) -> None:
    import sentencepiece
    import transformers

    stored = {}
    for name, case in cases.items():
        base = like[name]
        rows = slow_cases.shifted(case.rows, cases[base].rows, -1) if base else case.rows
        stored[name] = {**case._asdict(), "rows": rows, "like": base}
    versions = {"transformers": transformers.__version__, "sentencepiece": sentencepiece.__version__}
    parts = {f"models/{name}": model for name, model in models.items()}
    parts["cases.json"] = json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode()
    parts["versions.json"] = json.dumps(versions).encode()
    with tarfile.open(slow_cases.ARCHIVE, "w:xz", preset=9) as archive:
        for name, blob in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(blob)
            archive.addfile(entry, io.BytesIO(blob))


if __name__ == "__main__":
    main()
