"""The table of public families in docs/interop.md, measured: `make families`.

Each row is the worst of the tiny models of a family that the tests compare: random weights, fp32, rows of unequal
length up to 44 tokens, pads on either side.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from anyformer.interop.families import FAMILIES
from tests.interop.measure import Measured, measure
from tests.interop.public import PublicModel
from tests.interop.test_clip import MODELS as CLIPS
from tests.interop.test_decoders import DECODERS
from tests.interop.test_encoders import ENCODERS, LABELS, vit
from tests.interop.test_pairs import PAIRS
from tests.interop.test_whisper import WHISPERS

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
BEGIN, END = "<!-- made by make families -->\n", "<!-- end -->\n"
HEADS = {"lm": "LM", "masked_lm": "masked LM", "token_labels": "token labels", "classifier": "labels"}
HEADS |= {"span": "spans", "body": "body"}
IMAGES = {"vit": vit("Model"), "vit-labels": vit("ForImageClassification", **LABELS), **CLIPS}


def measured() -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = defaultdict(list)
    every: dict[str, PublicModel] = {**DECODERS, **ENCODERS, **PAIRS, **IMAGES, **WHISPERS}
    for i, (name, public) in enumerate(every.items(), 1):
        with tempfile.TemporaryDirectory() as folder:
            found[public.config.model_type].append(measure(public, Path(folder)))
        print(f"{i}/{len(every)} {name}", flush=True)
    return found


def table(found: dict[str, list[Measured]]) -> str:
    """In the order in which families are looked for."""
    lines = ["| family | shape | heads | models | hidden states | logits | greedy | way back |", "| --- " * 8 + "|"]
    for kind, family in FAMILIES.items():
        rows = found[kind]
        said = {row.greedy for row in rows}
        greedy = "" if said == {None} else "equal" if said == {True} else "differs"
        back = "to the byte" if all(row.back for row in rows) else "differs"
        heads = ", ".join(HEADS[head] for head in dict.fromkeys(family.heads.values()))
        far = f"{max(row.hidden for row in rows):.0e} | {max(row.output for row in rows):.0e}"
        lines.append(f"| `{kind}` | {family.shape} | {heads} | {len(rows)} | {far} | {greedy} | {back} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    page = parser.parse_args().page
    torch.set_num_threads(1)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table(measured()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
