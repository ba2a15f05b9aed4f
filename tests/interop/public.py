"""Tiny random models of `transformers`, written as it writes them, and what both say of the same rows."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

import anyformer as af
from anyformer.runs.run import Run
from tests.ragged import Ragged as Ragged, ragged as rows

hf.logging.disable_progress_bar()
hf.logging.set_verbosity_error()

VOCAB, LENGTH, WIDTH = 97, 64, 30
PAD, BOS, EOS = 1, 0, 2
TOLERANCE = 5e-5  # of logits and hidden states of about 1; the promise is 1e-4
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def words(*frame: str) -> Tokenizer:
    """Letters and pairs of them, `VOCAB` tokens in all, and what stands around a text."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pairs = [a + b for a in "abc" for b in letters][: VOCAB - len(SPECIAL) - len(letters) - 1]
    vocab = {token: i for i, token in enumerate((*SPECIAL, "▁", *letters, *pairs))}
    assert len(vocab) == VOCAB
    inner = Tokenizer(models.BPE(vocab, [(pair[0], pair[1]) for pair in pairs], unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if frame:
        known = [(token, vocab[token]) for token in frame if token != "$A"]
        inner.post_processor = processors.TemplateProcessing(single=" ".join(frame), special_tokens=known)
    return inner


def write_tokenizer(folder: Path, *frame: str) -> None:
    words(*frame).save(str(folder / "tokenizer.json"))
    names = {f"{role}_token": token for role, token in zip(("bos", "pad", "eos", "unk", "mask"), SPECIAL, strict=True)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def loud(model: hf.PreTrainedModel, seed: int = 0) -> hf.PreTrainedModel:
    """Weights with which a wrong mask, position, eps or activation shows in the logits."""
    torch.manual_seed(seed)
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:  # waves
                continue
            if p.dim() == 1:  # norms around 1 (Gemma's around 0), biases around 0
                p.copy_(p + (0.2 if name.endswith("weight") else 0.02) * torch.randn_like(p))
            elif name in {*tables, "lm_head.weight"} and "relative" not in name:
                p.normal_(std=0.05)  # quiet, so that the first norm's eps counts
            else:
                p.normal_(std=0.3)
    return model.eval()


class PublicModel(NamedTuple):
    """A class of theirs with a config, and what stands around its texts."""

    model: type[hf.PreTrainedModel]
    config: hf.PretrainedConfig
    frame: tuple[str, ...] = ()
    changed: Callable[[hf.PreTrainedModel], object] = lambda model: None
    seed: int = 0  # with which it does not say the same all the time

    def built(self) -> hf.PreTrainedModel:
        self.config._attn_implementation = "eager"
        model = self.model(self.config)
        self.changed(model)
        return loud(model, self.seed)

    def saved(self, folder: Path) -> hf.PreTrainedModel:
        model = self.built()
        model.save_pretrained(folder)
        write_tokenizer(folder, *self.frame)
        return model


# -- comparing --------------------------------------------------------------------------------------------------------


ragged = partial(rows, first=5, vocab=VOCAB, pad=PAD)


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    return {name: (str(x.dtype), x.contiguous().numpy().tobytes()) for name, x in found.items()}


def again(run: Run, folder: Path, auto: Any, family: str | None = None) -> hf.PreTrainedModel:
    """A run as a public folder, read by `transformers` with nothing missing and nothing left."""
    af.to_hf(run, folder, family=family)
    model, report = auto.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    missing = set(report["missing_keys"])
    if family == "big_bird":  # every class has a pooler there, and only the body uses it
        missing -= {"bert.pooler.weight", "bert.pooler.bias"}
    assert not missing
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def same_tokens(run: Run, folder: Path) -> None:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    auto = (
        hf.PreTrainedTokenizerFast if kind == "qwen2" else hf.AutoTokenizer
    )  # which for Qwen2 takes no other than its
    theirs = auto.from_pretrained(folder)
    for text in ("abc zebra", "  <pad> a b", "cab"):
        assert (
            run.tokenizer.around[0] + run.tokenizer.encode(text) + run.tokenizer.around[1]
            == theirs(text, split_special_tokens=True)["input_ids"]
        )
    for role in ("pad", "bos", "eos", "unk", "mask"):
        assert getattr(run.tokenizer, role) == getattr(theirs, f"{role}_token_id"), role


def furthest(ours: Tensor, theirs: Tensor, real: Tensor) -> float:
    return float((ours - theirs)[real].abs().max())
