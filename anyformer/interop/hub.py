"""Download public models by name: `hf:owner/name` or `hf:owner/name@revision`, through the package huggingface_hub.

Its cache and environment variables apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Only files that an import
reads are downloaded, and pickle files only on request.
"""

import re
from pathlib import Path

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.interop import peft
from anyformer.interop.slow_tokenizers import SOURCE, TARGET
from anyformer.interop.weight_files import INDEX, PICKLED, PICKLED_INDEX, WEIGHTS

PREFIX = "hf:"
NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
SETTINGS = (
    *(
        "config.json",
        "adapter_config.json",
        "generation_config.json",
        "modules.json",
        "*sentence*.json",
        "*/config.json",
    ),
    *("preprocessor_config.json", "processor_config.json"),
)
TOKENIZERS = (
    *("tokenizer*", "chat_template*.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.model"),
)
SAFE = (WEIGHTS, INDEX, "model-*.safetensors", peft.WEIGHTS)
PICKLES = (PICKLED, PICKLED_INDEX, "pytorch_model-*.bin", peft.PICKLED)
BODIES = ("", "0_Transformer/")  # older sentence-transformers have the model in a folder
LAYERS = "*_Dense/"  # folders of layers after it


def is_hub_name(source: str | Path) -> bool:
    """Return whether a source is a name for `download` and not a path."""
    return str(source).startswith(PREFIX)


def folder_name(source: str | Path) -> str:
    """Return the name of a folder for the run: of a public name or a folder the last part, of a file its stem.

    A folder that is called `model` has the name of the folder above it.
    """
    path = Path(_parse(str(source))[0] if is_hub_name(source) else source)
    if path.is_file():
        return path.stem
    path = path.resolve()
    return path.parent.name or path.name if path.name.lower() in ("model", "models") else path.name


def download(source: str, allow_pickle: bool = False) -> Path:
    """Return the folder of a public model in the cache of huggingface_hub, after downloading missing files."""
    name, revision = _parse(source)
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        what = "needs the package huggingface_hub: pip install 'anyformer[hf]'"
        raise ConfigError([Fault(visible(source), what)]) from None

    def fetch(*weights: str) -> Path:
        layers = (f"{LAYERS}{file}" for file in (WEIGHTS, *([PICKLED] if allow_pickle else [])))
        bodies = (f"{body}{file}" for body in BODIES for file in (*TOKENIZERS, *weights))
        files = (*SETTINGS, SOURCE, TARGET, *bodies, *layers)
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(files)))

    where = hub.constants.ENDPOINT
    try:
        folder = fetch(*SAFE)
        if not _has_weights(folder) and allow_pickle:
            folder = fetch(*SAFE, *PICKLES)
    except errors.GatedRepoError:
        what = f"is gated: accept its terms on {where}/{name}, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        what = f"has no revision '{revision}'"
    except errors.RepositoryNotFoundError:
        what = f"is not on {where}, or it is private: check the name, or log in with `hf auth login`"
    except errors.LocalEntryNotFoundError:
        cache = hub.constants.HF_HUB_CACHE
        why = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else f"{where} cannot be reached"
        what = f"is not in {cache}, and {why}: import it from a folder instead, or try again with a connection"
    except (errors.HfHubHTTPError, OSError) as error:
        what = f"cannot be downloaded: {str(error).strip().partition(chr(10))[0]}"
    else:
        if _has_weights(folder):
            return folder
        what = f"has no {WEIGHTS}" + ("" if allow_pickle else f"; --allow-pickle also accepts {PICKLED}")
    raise ConfigError([Fault(visible(source), what)])


def _parse(source: str) -> tuple[str, str | None]:
    """Return the name and the revision of `hf:owner/name@revision`."""
    found = NAME.fullmatch(source.removeprefix(PREFIX))
    if found is None:
        raise ConfigError([Fault(visible(source), "is not a name: write hf:owner/name or hf:owner/name@revision")])
    return found["name"], found["revision"]


def _has_weights(folder: Path) -> bool:
    names = (WEIGHTS, INDEX, PICKLED, PICKLED_INDEX, peft.WEIGHTS, peft.PICKLED)
    return any((folder / body / file).exists() for body in BODIES for file in names)
