"""`recipes`: the recipes that come with the package."""

import typer

from anyformer.cli.app import app


@app.command("recipes")
def recipes_() -> None:
    """List the recipes that come with anyformer, with their data: data sets and whether these are here, and files."""
    from importlib import resources

    from anyformer.data.datasets.registry import registry
    from anyformer.data.datasets.storage import state
    from anyformer.data.files import set_of
    from anyformer.data.paths import named
    from anyformer.recipe.ready import names, read_recipe

    for name in names():
        first = (
            (resources.files("anyformer.recipe.ready") / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
        )
        typer.echo(f"{name:<16} {first.removeprefix('# ')}")
        data = read_recipe(name).data
        sets = [f"{one} ({state(registry()[one])})" for one in data.sets]
        files = dict.fromkeys(f"{file} (your own)" for _, file in named(data) if not set_of(file, data))
        typer.echo(f"{'':<16} data: {', '.join([*sets, *files]) or 'synthetic'}")
