"""Modules that have moved: the old names in earlier guides still import, with a warning. Imports no torch."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {
    "decoding.beam": "decoding.beam_search",
    "decoding.constrain": "decoding.constraints.constraint",
    "inspection.ablate": "inspection.ablation",
    "inspection.curves": "inspection.position_curves",
    "inspection.growth": "inspection.cache_growth",
    "inspection.lens": "inspection.logit_lens",
    "inspection.maps": "inspection.attention_maps",
    "inspection.measures": "inspection.scalar_outputs",
    "inspection.patch": "inspection.patching",
    "inspection.patterns": "inspection.head_patterns",
    "inspection.terms": "inspection.score_terms",
    "nn.latent": "nn.attention_variants.latent",
    "nn.mask": "attention.layout",
    "nn.quantise": "transforms.quantise",
    "reading": "run_inspection",
}
NAMES = {"nn.mask": {"lay_out": "make_layout"}}  # old module: old name → new name


class MovedModules(MetaPathFinder, Loader):
    """Finds the old modules; asked last, when no module of that name exists."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.removeprefix("anyformer.") in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.removeprefix("anyformer.")
        new = import_module(f"anyformer.{MODULES[old]}")
        warnings.warn(f"anyformer.{old} is now {new.__name__}", FutureWarning, stacklevel=2)
        public = {name: value for name, value in vars(new).items() if not name.startswith("__")}
        vars(module).update(public | {name: public[now] for name, now in NAMES.get(old, {}).items()})
