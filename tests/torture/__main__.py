"""`python -m tests.torture [PART [ARGUMENTS]]`: one part, or all of them one after the other."""

import importlib
import pkgutil
import sys

import tests.torture

PARTS = ("kills", "folders", "configs", "data")


def main() -> None:
    there = {module.name for module in pkgutil.iter_modules(tests.torture.__path__)}
    parts = [name for name in PARTS if name in there]
    wanted = sys.argv[1:2] or parts
    if unknown := [name for name in wanted if name not in parts]:
        sys.exit(f"{unknown[0]}: no such part; there are {', '.join(parts)}")
    for name in wanted:
        sys.argv = [f"python -m tests.torture {name}", *sys.argv[2:]]
        importlib.import_module(f"tests.torture.{name}").main()


if __name__ == "__main__":
    main()
