"""Published config.json files at tiny sizes, and what an import makes of them beside `transformers`.

`published/*.json` holds each file's fields with the repository, path and commit that they were read from. `cut` names
fields that are shortened there, `beside` is the content of files beside it, and `refused` is what an import has to name
if it cannot load the model. Sizes are made small here, every other field stays as it was published.
`python -m tests.interop.shrunk` writes the figures of docs/interop.md.
"""

import json
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from anyformer.config import ConfigError, Embedder, NoHead, NoTransform
from anyformer.generation.generate import generate
from anyformer.interop.families import FAMILIES
from anyformer.interop.hf_folder import read_model
from anyformer.nn.model import Transformer
from tests.interop import test_decoders as decoders, test_encoders as encoders, test_pairs as pairs
from tests.interop.public import LENGTH, VOCAB, Ragged, furthest, loud, ragged

FOLDER = Path(__file__).parent / "published"
BIG_IDS = 16  # rows after the vocabulary of the tests, for special ids that are too large for it
PROMISE = 1e-4  # largest difference of logits or hidden states of about 1
NEW = 3  # greedy tokens that are compared
KEY, WIDE_KEY = 8, 16  # width of a head; of one that is rotated in part


class Published(NamedTuple):
    """A published config.json."""

    file: str
    repository: str
    path: str
    commit: str
    config: dict[str, Any]
    cut: Sequence[str] = ()
    beside: Sequence[dict[str, Any]] = ()  # files of sentence-transformers, each with its own source
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.path}".removesuffix("/config.json").removesuffix(".json")

    @property
    def family(self) -> str:
        """The model_type, or for files that have none, the name of their group."""
        return self.config.get("model_type", self.file)


class Outcome(NamedTuple):
    """The result of an import: a distance to `transformers`, or why it was refused."""

    distance: float = 0.0
    greedy: bool = True
    refused: str = ""
    warned: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "refused" if self.refused else "equal" if self.greedy and self.distance <= PROMISE else "wrong"


def entries() -> dict[str, Published]:
    found = [
        Published(path.stem, **entry)
        for path in sorted(FOLDER.glob("*.json"))
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]
    assert len({entry.name for entry in found}) == len(found)
    return {entry.name: entry for entry in found}


# -- sizes ------------------------------------------------------------------------------------------------------------


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config at a tiny size. Fields that are not sizes, and relations between sizes, are kept."""
    small = dict(config)

    def put(value: int, *names: str) -> None:
        small.update((name, value) for name in names if config.get(name) is not None)

    heads, groups = _heads(config)
    partial = {"rotary_pct", "partial_rotary_factor", "rotary_dim"} & config.keys()
    key = WIDE_KEY if partial else KEY
    width = heads * (key + (2 if "head_dim" in config or "d_kv" in config else 0))
    depth = _depth(config)
    put(heads, "num_attention_heads", "n_head", "n_heads", "num_heads")
    put(heads, "encoder_attention_heads", "decoder_attention_heads")
    put(groups, "num_key_value_heads", "num_kv_heads")
    put(key, "head_dim", "d_kv")
    put(width, "hidden_size", "n_embd", "n_embed", "d_model", "dim", "pooler_hidden_size")
    put(40, "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim")
    put(48, "intermediate_size")
    put(16, "moe_intermediate_size")
    put(depth, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
    put(depth, "encoder_layers", "decoder_layers")
    put(4, "num_experts", "num_local_experts")
    put(2 * (config.get("n_group") or 1), "n_routed_experts")
    put(min(1, config.get("first_k_dense_replace") or 0), "first_k_dense_replace")
    put(KEY, "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    put(4, "qk_rope_head_dim")
    put(min(2, config.get("num_experts_per_tok") or 2), "num_experts_per_tok")
    put(VOCAB + BIG_IDS, "vocab_size", "decoder_vocab_size")
    put(KEY, "sliding_window", "sliding_window_size", "window_size")
    put(WIDE_KEY // 4, "rotary_dim")
    put(2 * KEY, "local_attention", "position_buckets")
    put(16, "image_size")
    put(4, "patch_size")
    put(min(depth, config.get("max_window_layers") or 0), "max_window_layers")
    narrow = next((config[name] for name in ("hidden_size", "n_embd") if name in config), None)
    for name in ("embedding_size", "word_embed_proj_dim", "pooler_output_size"):
        put(width if config.get(name) == narrow else 12, name)
    if scalar := config.get("query_pre_attn_scalar"):
        small["query_pre_attn_scalar"] = max(1, scalar * key // config["head_dim"])
    for name in ("layer_types", "attention_layers"):
        if name in config:
            small[name] = config[name][:depth]
    if "attention_types" in config:  # of GPT-Neo: the same in short
        small["attention_types"] = [[[kind], 1] for kind in small["attention_layers"]]
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "original_max_position_embeddings"):
        put(_length(config.get(name) or 0), name)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(name), dict) and "original_max_position_embeddings" in rope:
            small[name] = {**rope, "original_max_position_embeddings": LENGTH // 4}
    return _ids(small)


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    """Return a small number of heads and of key/value heads: multi-head, grouped or multi-query as published."""
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
    heads = next((config[name] for name in names if name in config), 4)
    groups = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if groups == heads:
        return 4, 4
    each = min(3, heads // groups)
    return (each, 1) if groups == 1 else (2 * each, 2)


def _depth(config: dict[str, Any]) -> int:
    if kinds := config.get("layer_types") or config.get(
        "attention_layers"
    ):  # up to the first layer of the second kind, and one more
        return min(next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 1) + 2, len(kinds))
    return 4 if "global_attn_every_n_layers" in config else 2


def _length(positions: int) -> int:
    """Return `LENGTH` positions, plus the offset of the first token in some tables (514, 1026)."""
    extra = positions - (1 << positions.bit_length() - 1) if positions else 0
    return LENGTH + (extra if extra <= 2 else 0)


def _ids(config: dict[str, Any]) -> dict[str, Any]:
    """Replace special ids that are too large for the vocabulary, each with its own row."""
    found = {name: value for name, value in config.items() if name.endswith("_token_id")}
    flat = [i for value in found.values() for i in (value if isinstance(value, list) else [value])]
    large = sorted({i for i in flat if i is not None and i >= VOCAB})
    assert len(large) <= BIG_IDS
    new = {i: VOCAB + n for n, i in enumerate(large)}
    fit = {k: [new.get(i, i) for i in v] if isinstance(v, list) else new.get(v, v) for k, v in found.items()}
    return config | fit


# -- beside transformers ----------------------------------------------------------------------------------------------


@torch.no_grad()
def outcome(entry: Published, folder: Path, **options: Any) -> Outcome:
    """Import a tiny model with the published fields, and compare it to the model of `transformers` that wrote it."""
    config = shrink(entry.config)
    theirs = reference(config, entry.family)
    if theirs is None:  # config.json alone has to be enough for the refusal
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    else:
        theirs.save_pretrained(folder)
    for name, content in {"config.json": config, **{file["name"]: file["content"] for file in entry.beside}}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = read_model(folder, **options)
        except ConfigError as error:
            return Outcome(refused=str(error).replace(str(folder), ""))
    assert theirs is not None
    warned = tuple(str(warning.message) for warning in caught)
    return _compared(theirs, found.model)._replace(warned=warned)


def class_of(config: dict[str, Any], family: str) -> type[hf.PreTrainedModel] | None:
    """Return the class that a config names, or the usual one of the family; None if `transformers` does not have it."""
    titles = {"bert": "BertModel", "roberta": "RobertaModel", "gpt2": "GPT2LMHeadModel", "bloom": "BloomForCausalLM"}
    name = next(iter(config.get("architectures") or [titles.get(family, "")]))
    return getattr(hf, re.sub("^LLaMA", "Llama", name), None)


def reference(config: dict[str, Any], family: str) -> hf.PreTrainedModel | None:
    """Return the model that `transformers` builds from a config of a supported family; None for an unknown class."""
    if family not in FAMILIES or "quantization_config" in config:
        return None
    model = class_of(config, family)
    if model is None:
        return None
    settings = hf.CONFIG_MAPPING[family].from_dict(config)
    settings.dtype, settings._attn_implementation = torch.float32, "eager"
    made = model(settings)
    made.generation_config = hf.GenerationConfig()  # only for models that write text, which may have invalid ids
    if family in ("t5", "mt5") and not config.get("tie_word_embeddings", True):
        pairs.untie(made)
    return loud(made, seed=3)


def _compared(theirs: hf.PreTrainedModel, ours: Transformer) -> Outcome:
    match ours.config.shape:
        case "encoder-decoder" if isinstance(ours.config.head, NoHead):
            return Outcome(_body(theirs, ours))
        case "encoder-decoder":
            return _pair(theirs, ours)
        case "decoder":
            return _decoder(theirs, ours)
        case "encoder":
            return Outcome(_encoder(theirs, ours))


def _decoder(theirs: hf.PreTrainedModel, ours: Transformer) -> Outcome:
    prompt = ragged(20, 17, 7, side="left")
    said = generate(ours, prompt.ids, segments=prompt.segments, max_new_tokens=NEW)[:, -NEW:]
    batch = prompt.extended(said)
    expected = decoders.logits(theirs, batch)
    distance = furthest(ours(batch.ids, segments=batch.segments), expected, batch.real)
    return Outcome(distance, torch.equal(said, expected[:, -NEW - 1 : -1].argmax(-1)))


def _pair(theirs: hf.PreTrainedModel, ours: Transformer) -> Outcome:
    source = ragged(20, 17, 7)
    said = generate(ours, source.ids, segments=source.segments, max_new_tokens=NEW)  # with the token before the first
    read = Ragged(said, torch.ones_like(said, dtype=torch.bool))
    expected = pairs.logits(theirs, source, read)
    found = ours(source.ids, said, source_segments=source.segments, target_segments=read.segments)
    starts = torch.full((len(said), 1), theirs.config.decoder_start_token_id)
    return Outcome(
        furthest(found, expected, read.real), torch.equal(said, torch.cat((starts, expected[:, :-1].argmax(-1)), 1))
    )


def _body(theirs: hf.PreTrainedModel, ours: Transformer) -> float:
    source, read = ragged(20, 17, 7), ragged(17, 7, 20, seed=1)
    found = ours(source.ids, read.ids, source_segments=source.segments, target_segments=read.segments)
    given = {"decoder_input_ids": read.ids, "decoder_attention_mask": read.mask}
    return furthest(found, theirs(source.ids, attention_mask=source.mask, **given).last_hidden_state, read.real)


def _encoder(theirs: hf.PreTrainedModel, ours: Transformer) -> float:
    if theirs.config.model_type == "vit":
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return _far(ours(images), encoders.vectors(theirs, images)[1])
    batch = ragged(20, 17, 7)
    found, (hidden, output) = ours(batch.ids, segments=batch.segments), encoders.answers(theirs, batch)
    match ours.config.head:
        case NoHead():
            expected = hidden
        case Embedder(pool=pool, normalize=normalize, transform=NoTransform()):
            means = (hidden * batch.real[..., None]).sum(1) / batch.real.sum(1, keepdim=True)
            expected = {"mean": means, "first": hidden[:, 0]}[pool]
            expected = expected / expected.norm(dim=-1, keepdim=True) if normalize else expected
        case _:
            expected = output
    return furthest(found, expected, batch.real) if expected.dim() == 3 else _far(found, expected)


def _far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")


# -- figures of the page ----------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
TOLD = ("model_type", "architectures")
BEGIN, END = "<!-- made by python -m tests.interop.shrunk -->\n", "<!-- end of published -->\n"


def sentence(found: Iterable[Published]) -> str:
    """Return the figures as text, by the expected outcome of each file."""
    found = list(found)
    unnamed = [entry for entry in found if "model_type" not in entry.config]
    refused = sorted(entry.refused for entry in found if entry.refused and entry not in unnamed)
    values = {field: [name for name in refused if name.startswith(f"{field} =")] for field in TOLD}
    others = [f"`{name.removesuffix(' = ')}`" for name in refused if not name.startswith(TOLD)]
    families, classes = (", ".join(name.partition(" = ")[2].replace("'", "`") for name in values[f]) for f in TOLD)
    loaded, sources = len(found) - len(unnamed) - len(refused), len({entry.repository for entry in found})
    text = f"""
        {len(found)} published `config.json` files from {sources} repositories are in
        [`published/`](../tests/interop/published), each with its source (`python -m tests.interop.shrunk`). {loaded}
        load as they are and equal `transformers` to {PROMISE:g} at a tiny size. {len(unnamed)} have no `model_type` and
        do so with `--family`. {len(refused)} are refused: {len(values["model_type"])} of families that are not
        supported ({families}), {len(values["architectures"])} of classes that are not supported ({classes}), and
        {len(others)} because of a field ({", ".join(others)})."""
    return textwrap.fill(" ".join(text.split()), 140, break_long_words=False, break_on_hyphens=False) + "\n"


def main() -> None:
    for name, entry in entries().items():
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(entry, Path(folder))
        print(found.kind, name, flush=True)
        assert found.kind == ("refused" if entry.refused else "equal"), found
        assert entry.refused in found.refused, found
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + sentence(entries().values()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
