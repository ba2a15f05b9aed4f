"""Inspection of small models that are trained here in seconds.

What is asserted follows from the task, which cannot be solved otherwise, or is a property of these weights.
"""

from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import anyformer as af
from anyformer.config import LM, Attention, Block, LayerNorm, ModelConfig, NoFeedForward, Stack, Tokens, Window, Xavier
from anyformer.data.synthetic import generate
from anyformer.nn.inspection.ablation import log_probability, run_without_heads
from anyformer.nn.inspection.head_patterns import head_statistics
from anyformer.nn.inspection.logit_terms import logit_lens
from anyformer.nn.model import Transformer
from anyformer.recipe import SortDigits, WrittenDates
from anyformer.runs.run import Run

VOCAB = 24


def trained(recipe: str, out: Path, *changes: str) -> Run:
    few = ["data.valid.count=20", "data.test.count=20"]
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):  # it takes longer than the training
        return af.train(recipe, out, [*few, *changes])


def repeated(rows: int, length: int, times: int) -> Tensor:
    """Return random tokens without repetition, repeated `times` times."""
    return torch.rand(rows, VOCAB).argsort(dim=1)[:, :length].repeat(1, times)


def test_an_induction_head():
    """A model of repeated random sequences must find what followed the earlier occurrence of a token.

    Two attention layers suffice: the first, which sees two tokens, copies the previous token; the second attends to
    the position whose previous token is the current one.
    """
    local, whole = (
        Block(mixer=Attention(heads=2, pattern=pattern), feedforward=NoFeedForward())
        for pattern in (Window(before=1, after=0), None)
    )
    stack = Stack(depth=2, blocks=(local, whole), final_norm=LayerNorm())
    model = Transformer(ModelConfig(width=32, target=Tokens(vocab=VOCAB), decoder=stack, head=LM(), init=Xavier()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    for step in range(600):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 20)
        length = int(torch.randint(4, 13, ()))
        ids = repeated(32, length, 3)
        logits = model(ids[:, :-1])[:, length:]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.03:
            break
    model.eval()
    ids = repeated(16, 10, 2)
    maps = af.attention_maps(model, ids)["decoder"]
    statistics = head_statistics(maps, ids)
    names = statistics.names()
    assert "previous token" in names[0]
    assert "induction" in names[1]
    assert float(statistics.induction[1].max()) > 0.8
    assert float(head_statistics(maps[:, :, :, :10, :10], ids[:, :10]).induction.nan_to_num().max()) == 0.0

    labels = torch.full_like(ids, -100)
    labels[:, 10:-1] = ids[:, 11:]
    measure, labelled = log_probability(labels), (labels >= 0).sum()
    finders = {"decoder.1.mixer": [i for i, name in enumerate(names[1]) if name == "induction"]}
    with torch.no_grad():
        lost = (measure(run_without_heads(model, finders, ids)) - measure(model(ids))) / labelled
    assert float(lost) < -1.0  # nats per token, of about 3
    lens = logit_lens(model, ids)  # the prediction appears after the second layer, not before
    right = (lens[:, :, 10:-1].argmax(dim=-1) == ids[:, 11:]).float().mean(dim=(1, 2))
    assert float(right[2]) > 0.9
    assert float(right[:2].max()) < 0.3


def test_attention_of_a_model_that_sorts(tmp_path: Path):
    """While generating, a one-layer model attends to the digits to sort, and most to the digit it generates next."""
    sizes = [f"data.{split}.{name}" for split in ("train", "valid", "test") for name in ("shortest=4", "longest=6")]
    quick = ["train.steps=200", "data.train.count=3000", "train.schedule.warmup=30", "batches.tokens=448"]
    run = trained("sort", tmp_path / "run", *sizes, *quick, "model.decoder.depth=1", "model.width=32")
    rows, n, token = generate(SortDigits(count=40, shortest=6, longest=6), "test", 0), 6, run.tokenizer
    pairs = zip(rows["source"], rows["target"], strict=True)
    ids = torch.tensor([[*token.encode(a), token.sep, *token.encode(b)] for a, b in pairs])
    maps = af.attention_maps(run.model, ids)["decoder"][0, :, :, n : 2 * n, :n]  # from <sep> on, to the source
    is_next = ids[:, None, :n] == ids[:, n + 1 :, None]  # [b, t, s]: the digits to generate next
    share = (maps * is_next[:, None]).sum(dim=-1).mean(dim=(0, 2))
    uniform = is_next.sum(dim=-1).float().mean() / (n + n / 2 + 0.5)  # the share under uniform attention
    head = int(share.argmax())
    assert float(share[head]) > 2 * uniform
    assert float(maps[:, head].sum(dim=-1).mean()) > 0.7


def test_cross_attention_finds_the_year(tmp_path: Path):
    """While the decoder generates a year, one of its heads attends to the year in the source, wherever it is."""
    quick = ["train.steps=200", "data.train.count=6000", "train.schedule.warmup=30", "batches.tokens=512"]
    small = ["model.encoder.depth=1", "model.decoder.depth=1", "train.optimizer.lr=5e-3"]
    run = trained("dates", tmp_path / "run", *quick, *small)
    rows, shares, uniform, starts = generate(WrittenDates(count=60), "test", 0), [], [], set()
    for source, target in zip(rows["source"], rows["target"], strict=True):
        at = source.index(target[:4])
        maps = af.attention_maps(run, source, target=target, stacks=["cross"])["cross"][0, 0]  # [h, t, s]
        shares.append(maps[:, :4, at : at + 4].sum(dim=-1).mean(dim=-1))
        uniform.append(4 / maps.shape[-1])
        starts.add(at)
    share = torch.stack(shares).mean(dim=0).max()
    assert len(starts) > 5
    assert float(share) > 0.5
    assert float(share) > 1.7 * sum(uniform) / len(uniform)
