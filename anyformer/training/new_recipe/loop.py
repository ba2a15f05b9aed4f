"""Batches and settings of the training loop for each task, as commented lines of a recipe. Imports no torch."""

import math
from collections.abc import Iterator

from anyformer.recipe import PARTS
from anyformer.training.new_recipe.models import DataFacts, RecipeLine


def batches(facts: DataFacts) -> RecipeLine:
    """Return the batches of a task."""
    if facts.task.kind != "lm":
        if length := facts.packed_row:
            value = f'{{ kind = "packed", tokens = {max(facts.tokens, length)}, length = {length} }}'
            return RecipeLine("batches", value, "several texts in a row: one shape, which a GPU compiles once")
        if facts.gpu and not facts.compares:
            value = f'{{ kind = "padded", tokens = {facts.tokens}, few_shapes = true }}'
            return RecipeLine("batches", value, "rows of similar length, padded to one of a few")
        value = f'{{ kind = "padded", tokens = {facts.tokens} }}'
        return RecipeLine("batches", value, "rows of similar length, padded to the longest")
    longest = 256 if facts.gpu else 128
    limits = [stack.limit for stack in facts.first[1].stacks.values()] if facts.first else []
    length = max(8, min([longest, facts.inputs.characters // 20, *(n for n in limits if n is not None)]))
    rows = max(1, facts.tokens // longest)
    return RecipeLine(
        "batches", f'{{ kind = "crops", rows = {rows}, length = {length} }}', f"{rows} random parts of {length} tokens"
    )


def training(facts: DataFacts, steps: int, reason: str, minutes: float | None, cycles: int) -> Iterator[RecipeLine]:
    """Yield the settings of the training loop."""
    rate, decay = _rate(facts), 0.01 if facts.first else 0.05
    if minutes is None:
        yield RecipeLine("steps", str(steps), reason)
    else:
        steps = PARTS
        yield RecipeLine("minutes", f"{minutes:g}", f"of the whole training: {reason}")
        yield RecipeLine("steps", str(steps), "parts of this time, by which warm-up and evaluations are counted")
    adam = f'{{ kind = "adamw", lr = {rate}, betas = [0.9, 0.98], weight_decay = {decay} }}'
    yield RecipeLine(
        "optimizer", adam, "lr: the peak of the learning rate" + (", low for pretrained weights" * (rate < 5e-4))
    )
    warmup = max(1, steps // (2**cycles - 1) // 10)
    more, why = "", "rises over the first tenth, then falls to 0"
    if cycles > 1:
        more, why = f", cycles = {cycles}", "the data are read many times: the best end of a cycle is kept"
    yield RecipeLine("schedule", f'{{ kind = "cosine", warmup = {warmup}, floor = 0.0{more} }}', why)
    if facts.first and not facts.lora:
        yield RecipeLine("layer_decay", "0.9", "lower layers learn more slowly")
    if facts.task.kind == "seq2seq" or (
        facts.task.kind == "classify" and getattr(facts.task, "separator", None) is None
    ):
        yield RecipeLine("label_smoothing", "0.1", "keeps probabilities away from 0 and 1")


def _rate(facts: DataFacts) -> float:
    """Return the learning rate: that of the usual batch, times the square root of the ratio of their tokens."""
    if facts.first is not None and not facts.lora:
        usual = 5e-5 if facts.first[1].width >= 768 else 1e-4
    else:
        usual = 2e-3 if facts.task.kind in ("lm", "tag") and not facts.first else 1e-3
    return float(f"{usual * math.sqrt(facts.tokens / facts.usual_tokens):.2g}")
