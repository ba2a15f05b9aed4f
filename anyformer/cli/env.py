"""`env`: demonstrations of environments, and rollouts of runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from anyformer.cli.app import Json, app

if TYPE_CHECKING:
    from anyformer.tasks.environments.rollout import RolloutReport

env_app = typer.Typer(no_args_is_help=True, help="Record demonstrations of environments, and evaluate runs in them.")
app.add_typer(env_app, name="env")

Name = Annotated[
    str, typer.Argument(metavar="ENVIRONMENT", help="key-to-door, or a name of Gymnasium: BabyAI-GoToLocal-v0.")
]


@env_app.command("record")
def env_record(
    environment: Name,
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to record.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode; the next have the following ones.")] = 0,
    policy: Annotated[
        Literal["expert", "random"],
        typer.Option(help="Source of actions. Episodes in which the expert fails are left out."),
    ] = "expert",
    processes: Annotated[int, typer.Option(min=1, help="Processes that play episodes.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Record demonstrations to a .npz file of trajectories. The file is written at the end, or not at all."""
    from anyformer.cli.progress import counting
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.tasks.environments.record import record

    if out.suffix.lower() != ".npz":
        raise ConfigError([Fault("out", f"= '{out}': must end with .npz")])
    if out.exists() and not force:
        raise ConfigError([Fault("out", f"= '{out}': exists; --force replaces it")])
    with counting(episodes, "episodes") as advance:
        found = record(environment, episodes, seed, policy=policy, processes=processes, progress=advance)
    found.recording.save(out)
    steps = int(found.recording.arrays()["lengths"].sum())
    typer.echo(f"{out}: {episodes:,} episodes, {steps:,} steps, {out.stat().st_size / 2**20:.1f} MiB")
    last = seed + found.played - 1
    success = "" if found.successes is None else f"; success {found.successes / found.played:.1%}"
    typer.echo(f"seeds {seed} to {last}, {found.played:,} played{success}")


@env_app.command("rollout")
def env_rollout(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    environments: Annotated[list[str], typer.Argument(metavar="ENVIRONMENT...", help="One or more environments.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes in each environment.")] = 512,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first episode; choose seeds that were not recorded for training.")
    ] = 1_000_000,
    parallel: Annotated[int, typer.Option(min=1, help="Episodes played at once.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: the most probable action; above 0: sampled.")] = 0.0,
    target: Annotated[
        float | None, typer.Option(help="Return to aim at, in runs with returns. Default: the highest bin.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run by rollouts: success rate, where the environment defines it, and mean return.

    Both have 95 % confidence intervals.
    """
    from anyformer.cli.progress import counting
    from anyformer.runs.run import load
    from anyformer.tasks.environments.rollout import rollout, summarise

    loaded, reports = load(run), []
    for name in environments:
        with counting(episodes, f"episodes of {name}") as advance:
            results = rollout(
                loaded,
                name,
                episodes,
                seed,
                parallel=parallel,
                temperature=temperature,
                target=target,
                progress=advance,
            )
        reports.append(summarise(name, results))
    if as_json:
        typer.echo(json.dumps([report._asdict() for report in reports], indent=2))
        return
    for report in reports:
        typer.echo("\n".join(describe(report)))


def describe(report: "RolloutReport") -> Iterator[str]:
    """Yield the lines about an evaluation."""
    yield f"{report.environment}: {report.episodes} episodes, {report.mean_steps:.1f} steps"
    if report.success is not None and report.success_interval is not None:
        low, high = report.success_interval
        yield f"  success  {report.success:.1%}  (95 %: {low:.1%} to {high:.1%})"
    least, most = report.return_interval
    yield f"  return   {report.mean_return:.3f}  (95 %: {least:.3f} to {most:.3f})"


@env_app.command("film")
def env_film(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    environment: Annotated[
        str, typer.Argument(metavar="ENVIRONMENT", help="A name of MiniGrid or BabyAI: BabyAI-GoToLocal-v0.")
    ],
    out: Annotated[Path, typer.Option(help="The .gif file to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 1_000_000,
) -> None:
    """Let a run play one episode, and write it as an animated picture."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.runs.run import load
    from anyformer.tasks.environments.rollout import film

    if out.suffix.lower() != ".gif":
        raise ConfigError([Fault("out", f"= '{out}': must end with .gif")])
    result = film(load(run), environment, seed, out)
    typer.echo(f"{out}: {'success' if result.success else 'failure'} after {result.steps} steps")
