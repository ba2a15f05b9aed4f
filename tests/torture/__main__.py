"""`python -m tests.torture [PART [ARGUMENTS]]`: one part, or all of them one after the other."""

import importlib
import sys

PARTS = ("kills", "restarts", "folders", "configs", "data", "predictions")


def main() -> None:
    wanted, arguments = sys.argv[1:2] or PARTS, sys.argv[2:]
    if unknown := [name for name in wanted if name not in PARTS]:
        sys.exit(f"{unknown[0]}: no such part; there are {', '.join(PARTS)}")
    failed = []
    for name in wanted:
        sys.argv = [f"python -m tests.torture {name}", *arguments]
        try:
            importlib.import_module(f"tests.torture.{name}").main()
        except SystemExit as end:  # the other parts run all the same
            failed += [name] if end.code else []
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
