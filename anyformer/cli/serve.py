"""The verb that serves runs over HTTP."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from anyformer.cli.app import app

PORT = 8000


@app.command()
def serve(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The folders of runs; a run's name is its model.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen at. One that others can reach needs keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free port.")] = PORT,
    api_key_file: Annotated[Path | None, typer.Option(help="File with keys, one per line; requests need one.")] = None,
    allow_anyone: Annotated[
        bool,
        typer.Option("--allow-anyone", help="Accept requests without keys from any machine that can reach the host."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Device of the models; by default a GPU where there is one.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=RUN", help="LoRA run over a served model's weights; its name is a model. Repeatable."
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Answers that are written together.")] = 256,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that wait; others get 429.")] = 1024,
    max_streams: Annotated[int, typer.Option(min=1, help="Answers that are streamed; others get 429.")] = 256,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompt and answer; by default what each model was trained for."),
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt; others get 400.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Largest max_tokens of a request.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request; others get 413.")] = 2**21,
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of the KV cache; by default by free memory.")] = None,
    cache: Annotated[
        Literal["auto", "none"],
        typer.Option(help="none reads the whole text with each token, one request after the other."),
    ] = "auto",
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Make results bit-equal for any other requests; slower.")
    ] = False,
) -> None:
    """Serve runs over HTTP, by OpenAI's interface and endpoints for encoders and translators.

    SIGTERM or Ctrl-C refuse new requests, let running ones finish and exit with 0; a second signal ends at once.
    """
    from anyformer.config.spec import ConfigError, Fault

    try:
        from anyformer.generation.http.limits import HttpLimits
        from anyformer.generation.http.server import bind, is_loopback, read_keys, serve as run_server
        from anyformer.generation.http.service import Service
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        what = f"needs the package {error.name}: pip install 'anyformer[serve]'"
        raise ConfigError([Fault("serve", what)]) from None
    from anyformer.generation.engine.engine import Engine
    from anyformer.generation.engine.interface import Limits
    from anyformer.runs.run import load

    keys = [] if api_key_file is None else read_keys(api_key_file)
    if not is_loopback(host) and not keys and not allow_anyone:
        what = "can be reached from other machines: give --api-key-file, or --allow-anyone to answer without keys"
        raise ConfigError([Fault("--host", f"= {host}: {what}")])
    names, adapters = [folder.resolve().name for folder in runs], dict[str, dict[str, Path]]()
    for given in adapter or ():
        model, _, folder = given.partition("=")
        if model not in names or not folder:
            raise ConfigError([Fault("--adapter", f"= {given}: must be MODEL=RUN, with a model of {', '.join(names)}")])
        adapters.setdefault(model, {})[Path(folder).resolve().name] = Path(folder)
    known = [*names, *(name for some in adapters.values() for name in some)]
    if doubled := [name for name in known if known.count(name) > 1]:
        raise ConfigError([Fault("RUN", f"two runs are called {doubled[0]}: rename one of the folders")])
    listening = bind(host, port)
    loaded = {name: load(folder, device) for name, folder in zip(names, runs, strict=True)}
    limits = Limits(
        max_rows=max_rows,
        queue=max_queue,
        context=context,
        max_prompt=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        pages=pages,
        reproducible=reproducible,
        cache=cache,
    )
    service = Service(
        Engine(
            loaded,
            limits,
            {model: {name: load(run, device) for name, run in some.items()} for model, some in adapters.items()},
        ),
        HttpLimits(body=max_body_bytes, streams=max_streams),
        keys,
        local=is_loopback(host),
    )
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    run_server(service, listening, lambda: typer.echo(f"{address}  {', '.join(known)}  (Ctrl-C ends it)"))
