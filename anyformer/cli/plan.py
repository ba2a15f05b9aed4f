"""`plan`: memory, time and price of a training run on GPUs that need not be there."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from anyformer.cli.app import Json, app
from anyformer.cli.models import Changes, Named
from anyformer.kernels.gpu_table import GBIT, GPUS

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MAX_GPUS = 2**20


@app.command()
def plan(
    model: Named,
    changes: Changes = None,
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs: 8; 8,64,512; or 1-1024, with all powers of two between.")
    ] = "1-1024",
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens of the run: 300e9, 300B, 15T. Default: those of a recipe, else 20 per parameter."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a step, over all GPUs. Default: those of a recipe, else 524,288 tokens."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row. Default: those of a recipe, else as in `count`.")
    ] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row of the source. Default: --length.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="Price of an hour of one GPU; adds a column.")] = None,
    network: Annotated[
        float | None,
        typer.Option(min=0.001, help="Gbit/s of each GPU to other nodes. Default: those of the vendor's servers."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a figure: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Forecast memory, time and price of a training run on GPUs, with the fastest split for each number of them."""
    from anyformer.cli.resolve import model_of, read
    from anyformer.config.spec import ConfigError, Fault, did_you_mean
    from anyformer.recipe import Recipe
    from anyformer.training.forecast.report import Forecasts
    from anyformer.training.forecast.workload import StepSizes, model_workload, recipe_workload

    if gpu.lower() not in GPUS:
        raise ConfigError([Fault("--gpu", f"= '{gpu}': no such GPU in the table; {did_you_mean(gpu, GPUS)}")])
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError([Fault("--out", f"= {out}: must end in .png, .svg or .pdf")])
    kind = GPUS[gpu.lower()]
    kind = kind if network is None else kind._replace(network=network * GBIT)
    given = read(model, changes)
    config, sizes = model_of(given), StepSizes(batch, length, source_length)
    work, own = (
        recipe_workload(given, config, sizes, kind)
        if isinstance(given, Recipe)
        else model_workload(config, sizes, kind)
    )
    result = Forecasts.of(work, gpu.lower(), kind, _counts(gpus), own if tokens is None else _number(tokens), rate)
    typer.echo(json.dumps(result.to_dict()) if as_json else str(result))
    if out is not None:
        result.draw(out)
        typer.echo(f"figure: {out}", err=as_json)


def _counts(text: str) -> list[int]:
    """Return the numbers of GPUs: one, several with commas, or a range with a hyphen."""
    from anyformer.config.spec import ConfigError, Fault

    try:
        first, hyphen, last = text.partition("-")
        if hyphen:
            low, high = int(first), int(last)
            found = [low << i for i in range(max(1, high // max(1, low)).bit_length()) if low << i <= high]
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > MAX_GPUS:
        what = f"= '{text}': must be a number from 1 to {MAX_GPUS:,}, several (8,64) or a range (1-1024)"
        raise ConfigError([Fault("--gpus", what)])
    return found


def _number(text: str) -> float:
    """Return a number of tokens, with or without a unit."""
    from anyformer.config.spec import ConfigError, Fault

    unit = UNITS.get(text[-1:].lower(), 1.0)
    try:
        found = float(text if unit == 1.0 else text[:-1]) * unit
    except ValueError:
        found = 0.0
    if not 1 <= found < math.inf:
        raise ConfigError([Fault("--tokens", f"= '{text}': must be a number such as 300e9, 300B or 15T")])
    return found
