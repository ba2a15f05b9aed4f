"""A newcomer's first minute: a small decoder learns to sort digits, answers unseen rows, and shows where it looks.

python examples/sort.py --out runs/demo
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

import anyformer as af
from anyformer.config import LM, Attention, Block, LayerNorm, ModelConfig, Plain, Rotary, Special, Stack, Tokens
from anyformer.inspection.plot import plot_map

SEP, EOS, PAD = 10, 11, 12
SHORTEST, LONGEST = 6, 11

CONFIG = ModelConfig(
    width=64,
    target=Tokens(vocab=13, pad=PAD),
    decoder=Stack(
        depth=2,
        blocks=Block(mixer=Attention(heads=4), feedforward=Plain(width=128), norm=LayerNorm()),
        position=Rotary(),
        final_norm=LayerNorm(),
    ),
    head=LM(),
    special=Special(pad=PAD, eos=EOS),
)


def held_out(digits: Tensor) -> Tensor:
    """Whether a row [n, length] is kept for testing: one in sixteen, by its own digits, so never seen in training."""
    mixed = (digits * torch.tensor([7**i for i in range(digits.shape[1])])).sum(dim=1)
    return mixed % 16 == 0


def rows(count: int, length: int, test: bool, generator: torch.Generator) -> Tensor:
    """Random rows of digits of one length, for training or for testing."""
    digits = torch.randint(0, 10, (count * (40 if test else 2), length), generator=generator)
    return digits[held_out(digits) == test][:count]


def batch(digits: Tensor) -> tuple[Tensor, Tensor]:
    """What the model reads, `3 1 2 <sep> 1 2 3`, and what it must say, `1 2 3 <eos>` from the separator on."""
    n, length = digits.shape
    sep, eos = torch.full((n, 1), SEP), torch.full((n, 1), EOS)
    whole = torch.cat((digits, sep, digits.sort(dim=1).values, eos), dim=1)
    labels = whole[:, 1:].clone()
    labels[:, :length] = -100  # the digits to sort are given, not predicted
    return whole[:, :-1], labels


def train(model: af.Transformer, steps: int, generator: torch.Generator, console: Console) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps, pct_start=0.1)
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    start, tokens = time.perf_counter(), 0
    with bar:
        task = bar.add_task("", total=steps, loss=float("nan"), rate=0.0)
        for step in range(1, steps + 1):
            length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
            ids, labels = batch(rows(64, length, test=False, generator=generator))
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            tokens += ids.numel()
            rate = tokens / (time.perf_counter() - start)
            bar.update(task, advance=1, loss=loss.item(), rate=rate)
            if not console.is_terminal and step % (steps // 10 or 1) == 0:
                left = (steps - step) * (time.perf_counter() - start) / step
                console.print(f"step {step}/{steps}  loss {loss.item():.3f}  {rate:,.0f} tokens/s  {left:.0f} s left")


def answer(model: af.Transformer, digits: Tensor) -> Tensor:
    """The model's own continuation of the rows, token by token."""
    prompt = torch.cat((digits, torch.full((len(digits), 1), SEP)), dim=1)
    return af.generate(model, prompt, max_new_tokens=digits.shape[1] + 1, stop=[EOS])[:, digits.shape[1] + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the figure goes")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)  # products so small that a second thread mostly waits
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)

    model = af.Transformer(CONFIG)
    console.print(f"a decoder of {model.num_parameters():,} parameters learns to sort {SHORTEST} to {LONGEST} digits")
    start = time.perf_counter()
    train(model, options.steps, generator, console)
    console.print(f"trained in {time.perf_counter() - start:.0f} s; now on rows that it has never seen:\n")

    right = total = 0
    for length in range(SHORTEST, LONGEST + 1):
        digits = rows(170, length, test=True, generator=generator)
        said = answer(model, digits)[:, :length]
        good = (said == digits.sort(dim=1).values).all(dim=1)
        right, total = right + int(good.sum()), total + len(digits)
        asked, told = (" ".join(map(str, row.tolist())) for row in (digits[0], said[0]))
        console.print(f"  {asked:<22} →  {told:<22} {'right' if good[0] else 'wrong'}")
    console.print(f"\n{right} of {total} unseen rows sorted exactly ({right / total:.1%})")

    digits = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    ids, _ = batch(digits)
    names = [str(i) if i < SEP else "→" for i in ids[0].tolist()]
    maps = af.attention_maps(model, ids)["decoder"]  # [layers, b, heads, t, s]
    path = plot_map(maps[-1, 0], names, names, options.out / "attention.png", "Sorting 3 1 4 1 5 9 2 6: the last layer")
    console.print(f"attention map: {path}")


if __name__ == "__main__":
    main()
