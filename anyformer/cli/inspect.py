"""`inspect`: tokens, attention maps and the strongest links of a run, in the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anyformer.cli.app import app
from anyformer.cli.runs import Folder
from anyformer.cli.torch_import import import_torch

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from anyformer.nn.inspection.terminal_maps import Link
    from anyformer.runs.run import Run
    from anyformer.runs.run_inspection import Reading

SHOWN = 48  # queries and keys of a map in the terminal
LINKS = 10  # of the strongest links


@app.command("inspect")
def inspect_(
    run: Folder,
    text: Annotated[
        str | None, typer.Argument(help="Input of the model. Default: none; the settings of the run are shown.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target text. Default: the greedy output of a model that generates.")
    ] = None,
    stack: Annotated[
        Literal["encoder", "decoder", "cross"] | None,
        typer.Option(help="Which attention. Default: cross-attention, if there is any."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer whose map is shown. Default: the last.")] = None,
    head: Annotated[int | None, typer.Option(help="One head instead of the mean of all.")] = None,
    task: Annotated[str | None, typer.Option(help="Task of a mixture.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a figure of the heads: .png or .svg.")] = None,
) -> None:
    """Show the attention of a run on a text: tokens, a map of weights, the strongest links.

    Without a text, show its model, tokenizer, task and default options of generation.
    """
    import_torch()
    from rich.console import Console

    from anyformer.config.spec import ConfigError, Fault
    from anyformer.runs.run import load, unfinished
    from anyformer.runs.run_inspection import read

    if out is not None and out.suffix.lower() not in (".png", ".svg"):
        raise ConfigError([Fault("--out", f"= {out}: must end in .png or .svg")])
    with _as_options():
        loaded = load(run)
        if note := unfinished(loaded, run):
            typer.echo(f"{run}: {note}", err=True)
        loaded = loaded if task is None else loaded.part(task)
        if text is None:
            given = {"target": target, "stack": stack, "layer": layer, "head": head, "out": out}
            if name := next((name for name, value in given.items() if value is not None), None):
                raise ConfigError([Fault(f"--{name}", "needs a TEXT, the input of the model")])
            _summarise(loaded)
            return
        names, own = _chosen(loaded, stack, layer)
        reading = read(loaded, text, target)
    for note in reading.notes:
        typer.echo(f"warning: {note}", err=True)
    found = _maps(loaded, reading, names, head)
    if nonfinite := [name for name, weights in found.items() if not weights.isfinite().all()]:
        raise FloatingPointError(f"the attention weights of {nonfinite[0]} are not finite: there is no map to show")
    _show(Console(highlight=False), loaded, reading, found, own, head)
    for line in _kernels(loaded, reading):
        typer.echo(line)
    if out is not None:
        _draw(out, loaded, reading, found[own], own, head)


def _summarise(run: "Run") -> None:
    """Print what a run is, and the options of generation that a call need not give."""
    config = run.config
    depth = " + ".join(f"{stack.depth} {side}" for side, stack in config.stacks.items())
    context = "" if config.context is None else f", context {config.context:,}"
    typer.echo(f"model:      {config.shape}, {depth} layers, width {config.width:,}{context}")
    typer.echo(f"parameters: {run.model.num_parameters():,}")
    typer.echo(f"tokenizer:  {run.tokenizer.size:,} tokens")
    typer.echo(f"task:       {run.spec.kind}")
    spec: Any = run.spec
    if prompts := getattr(spec, "prompts", ()):
        names = (f"{one.name}{' (default)' * (one.name == spec.default_prompt)}" for one in prompts)
        typer.echo(f"prompts:    {', '.join(names)}")
    if config.head.kind == "lm":
        typer.echo(f"generation: {run.defaults.describe() or 'greedy; no defaults'}")


def _chosen(run: "Run", stack: str | None, layer: int | None) -> tuple[list[str], str]:
    """The attentions to look at, and the one whose map is shown."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.nn.inspection.attention_maps import format_range
    from anyformer.nn.inspection.sublayers import attentions_by_kind

    by_kind = attentions_by_kind(run.model)
    if not by_kind:
        raise ConfigError([Fault("run", "its model has no attention to look at")])
    kind = stack or next(kind for kind in ("cross", "decoder", "encoder") if kind in by_kind)
    if kind not in by_kind:
        raise ConfigError([Fault("--stack", f"= '{kind}': there is attention in {' and '.join(by_kind)} only")])
    if layer is None:
        return list(by_kind[kind].values()), by_kind[kind][max(by_kind[kind])]
    if layer not in by_kind[kind]:
        raise ConfigError(
            [Fault("--layer", f"= {layer}: must be {format_range(by_kind[kind])}, where {kind} attention is")]
        )
    return [by_kind[kind][layer]], by_kind[kind][layer]


def _maps(run: "Run", reading: "Reading", names: list[str], head: int | None) -> "dict[str, Tensor]":
    """The weights of each attention [h, t, s], or of the one head [1, t, s]."""
    import torch

    from anyformer.config.spec import ConfigError, Fault
    from anyformer.nn.inspection.sublayers import attention_at
    from anyformer.nn.inspection.taps import run_with_taps

    for name in names:
        heads = attention_at(run.model, name).heads
        if head is not None and not 0 <= head < heads:
            raise ConfigError([Fault("--head", f"= {head}: {name} has heads 0 to {heads - 1}")])
    with torch.no_grad():
        taps = [f"{name}.weights" for name in names]
        _, seen = run_with_taps(run.model.eval(), taps, *reading.inputs, **reading.options)
    return {name: seen[f"{name}.weights"][0, slice(None) if head is None else [head]].float().cpu() for name in names}


def _kernels(run: "Run", reading: "Reading") -> list[str]:
    """Return a line for each distinct attention kernel of a forward pass over the text, and each class of modules."""
    import torch

    from anyformer.attention.cache.ring import Step
    from anyformer.attention.layout import make_layout
    from anyformer.kernels.runtime import Runtime
    from anyformer.nn.context import PassOptions
    from anyformer.nn.inspection.sublayers import stacks_of
    from anyformer.nn.pooling import Funnel
    from anyformer.nn.transforms.substitute import explain_model

    weight = next(run.model.parameters())
    runtime, stacks = Runtime(weight.device.type, weight.dtype, training=False), stacks_of(run.model)
    marks = reading.options.get("marks") if len(stacks) == 1 else None
    layouts = {side: make_layout(1, len(reading.tokens[side]), weight.device, marks=marks) for side in stacks}
    lines: dict[str, None] = {}
    with torch.no_grad():
        for side, stack in stacks.items():
            layout, options = layouts[side], PassOptions(run.model.backend)
            levels = Funnel(stack.pooling, layout, 1).layouts
            chosen = stack.relations(levels, {None: Step(layout)}, False, runtime, options)
            if side == "decoder" and "encoder" in layouts:
                chosen += stack.crossings(layout, layouts["encoder"], runtime, options)
            lines.update({f"attention kernel: {r.choice.kernel} ({r.choice.reason})": None for r in chosen})
    return ["", *lines, *(f"modules: {line}" for line in explain_model(run.model))]


def _show(
    console: "Console",
    run: "Run",
    reading: "Reading",
    maps: "dict[str, Tensor]",
    own: str,
    head: int | None,
) -> None:
    from anyformer.nn.inspection.head_patterns import head_statistics
    from anyformer.nn.inspection.sublayers import labels_at, parse_name
    from anyformer.nn.inspection.terminal_maps import map_lines, strongest

    def say(line: object = "") -> None:
        console.print(line, markup=False, soft_wrap=True)

    for side, tokens in reading.tokens.items():
        say(f"{side}  " + "  ".join(f"{i} {token}" for i, token in enumerate(tokens)))
    rows, columns = labels_at(run.model, reading.tokens, own)
    shown, (side, number, sublayer) = maps[own], parse_name(own)
    whose = f"the mean of {len(shown)} heads" if head is None else f"head {head}"
    say(f"\n{own}: {whose}; a row for each query, weights in percent")
    for line in map_lines(shown.mean(dim=0), rows[:SHOWN], columns[:SHOWN], console.width):
        say(line)
    say("a row: how much the token at its left (the query) reads of each token above (the keys); its sum is 100")
    if max(len(rows), len(columns)) > SHOWN:
        say(f"(the first {SHOWN} of {len(rows):,} queries and {len(columns):,} keys)")
    ids = reading.distinct_ids(side)
    same = None if sublayer == "cross" or len(columns) != ids.shape[1] else ids
    (called,) = head_statistics(shown[None, None], same, cross=sublayer == "cross").names()
    names = (f"{i if head is None else head} {name}" for i, name in enumerate(called))
    say(f"\nheads of layer {number}: {', '.join(names)}")
    say("\nthe strongest links, query → key:")
    links: list[Link] = []
    for name, weights in maps.items():
        numbers = list(range(len(weights))) if head is None else [head]
        links += strongest(weights[None], [parse_name(name)[1]], numbers, LINKS)
    for weight, layer, which, query, key in sorted(links, key=lambda link: -link.weight)[:LINKS]:
        name = next(name for name in maps if parse_name(name)[1] == layer)
        a, b = labels_at(run.model, reading.tokens, name)
        say(f"  {weight:.2f}  layer {layer}  head {which}  {query} {a[query]} → {key} {b[key]}")


def _draw(out: Path, run: "Run", reading: "Reading", maps: "Tensor", own: str, head: int | None) -> None:
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.nn.inspection.plot import plot_map
    from anyformer.nn.inspection.sublayers import labels_at
    from anyformer.runs.run import writing

    rows, columns = labels_at(run.model, reading.tokens, own)
    try:
        with writing(out):
            plot_map(maps, rows, columns, out, own if head is None else f"{own}, head {head}")
    except ImportError as error:
        raise ConfigError([Fault("--out", str(error))]) from None
    typer.echo(f"\nfigure: {out}")


@contextmanager
def _as_options() -> Iterator[None]:
    """The fault, by the names that it has on the command line."""
    from anyformer.config.spec import ConfigError, Fault

    names = {"text": "TEXT", "text 1": "TEXT", "target": "--target", "task": "--task"}
    try:
        yield
    except ConfigError as error:
        raise ConfigError(Fault(names.get(path, path), message) for path, message in error.faults) from None
