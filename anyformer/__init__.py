"""Any Transformer is one config away.

    import anyformer as af

    config = af.presets.gpt2(depth=2, width=64, heads=4, vocab=97)
    model = af.Transformer(config)
    tokens = af.generate(model, ids, max_new_tokens=20)

The names below are loaded when first used: importing `anyformer` costs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyformer import config as config, presets as presets, recipe as recipe, testing as testing
    from anyformer.config.model import ModelConfig as ModelConfig
    from anyformer.config.part import register as register
    from anyformer.config.spec import ConfigError as ConfigError
    from anyformer.explore.show import show as show
    from anyformer.generation.engine.engine import Engine as Engine
    from anyformer.generation.generate import generate as generate
    from anyformer.generation.prefix_cache import Reuse as Reuse
    from anyformer.interop.hf_folder import from_hf as from_hf, to_hf as to_hf
    from anyformer.nn.inspection.count import count as count
    from anyformer.nn.inspection.memory import training_memory as training_memory
    from anyformer.nn.model import Transformer as Transformer
    from anyformer.nn.transforms.quantise import quantise as quantise
    from anyformer.runs.run import Run as Run, load as load
    from anyformer.runs.run_inspection import attention_maps as attention_maps
    from anyformer.training.train import evaluate as evaluate, train as train

__version__ = "0.1.0"

# name -> the module that holds it; a module holds itself
_HOMES = {
    "ConfigError": "anyformer.config.spec",
    "Engine": "anyformer.generation.engine.engine",
    "ModelConfig": "anyformer.config.model",
    "Reuse": "anyformer.generation.prefix_cache",
    "Run": "anyformer.runs.run",
    "Transformer": "anyformer.nn.model",
    "attention_maps": "anyformer.runs.run_inspection",
    "config": "anyformer.config",
    "count": "anyformer.nn.inspection.count",
    "evaluate": "anyformer.training.train",
    "from_hf": "anyformer.interop.hf_folder",
    "generate": "anyformer.generation.generate",
    "load": "anyformer.runs.run",
    "presets": "anyformer.presets",
    "quantise": "anyformer.nn.transforms.quantise",
    "recipe": "anyformer.recipe",
    "register": "anyformer.config.part",
    "show": "anyformer.explore.show",
    "testing": "anyformer.testing",
    "to_hf": "anyformer.interop.hf_folder",
    "train": "anyformer.training.train",
    "training_memory": "anyformer.nn.inspection.memory",
}

__all__ = [
    "ConfigError",
    "Engine",
    "ModelConfig",
    "Reuse",
    "Run",
    "Transformer",
    "__version__",
    "attention_maps",
    "config",
    "count",
    "evaluate",
    "from_hf",
    "generate",
    "load",
    "presets",
    "quantise",
    "recipe",
    "register",
    "show",
    "testing",
    "to_hf",
    "train",
    "training_memory",
]


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        module = import_module(home)
        value = module if home == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value  # the next use does not come here
        return value
    message = f"module '{__name__}' has no attribute '{name}'"
    if not name.startswith("_"):  # Python itself looks such names up
        from difflib import get_close_matches

        if close := get_close_matches(name, __all__, n=1):
            message += f"; did you mean '{close[0]}'?"
    raise AttributeError(message, name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
