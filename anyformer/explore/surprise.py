"""View `surprise`: the log-probability of each token of a text, given the tokens before it."""

import math
from typing import Any, Literal

import torch

from anyformer.attention.layout import make_layout
from anyformer.config import ConfigError, Fault
from anyformer.explore.requests import TextRequest
from anyformer.explore.trace import Trace, last_side, predicts_tokens, reads_on
from anyformer.explore.view import TextView
from anyformer.runs.run import Run

CHUNK = 64  # positions whose logits are computed at once


class SurpriseView(TextView):
    """Log-probability, rank and the most probable alternative of each token, and the perplexity.

    A language model predicts every token but the first. Other models predict their answer; the tokens before it have
    no log-probability (None), nor do places of images and sounds.
    """

    kind: Literal["surprise"] = "surprise"
    group, place, key = "prediction", 3, "e"

    @torch.no_grad()
    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        run, side = trace.run, last_side(trace.run)
        if side != "decoder" or not predicts_tokens(run):
            raise ConfigError([Fault("run", "predicts no next token: there is no log-probability of a text")])
        ids, tokens = trace.reading.distinct_ids(side)[0], trace.reading.tokens[side]
        plain = reads_on(run)
        first = 1 if plain else max(1, trace.reading.begins or 1)
        hidden, name = trace.activations[f"{side}.final"], run.tokenizer.token
        rows: list[dict[str, Any] | None] = [None] * first
        for begin in range(first - 1, len(tokens) - 1, CHUNK):
            stop = min(begin + CHUNK, len(tokens) - 1)
            logits = run.model.apply_head(hidden[:, begin:stop], make_layout(1, stop - begin, hidden.device))[0]
            for id, log_p in zip(
                ids[begin + 1 : stop + 1].tolist(), logits.double().cpu().log_softmax(-1), strict=True
            ):
                if id < 0:
                    rows.append(None)
                    continue
                best = int(log_p.argmax())
                rows.append(
                    {
                        "logp": float(log_p[id]),
                        "rank": 1 + int((log_p > log_p[id]).sum()),
                        "best": name(best),
                        "best_p": math.exp(float(log_p[best])),
                    }
                )
        known = [row["logp"] for row in rows if row is not None]
        mean = sum(known) / len(known) if known else None
        return {
            "tokens": tokens,
            "rows": rows[: len(tokens)],
            "count": len(known),
            "mean": mean,
            "perplexity": None if mean is None else math.exp(min(-mean, 700.0)),
            "all": plain,
        }

    def fits(self, run: Run) -> bool:
        return predicts_tokens(run) and run.config.shape != "encoder"
