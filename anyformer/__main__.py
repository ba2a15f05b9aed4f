"""`python -m anyformer`, as torchrun needs it."""

from anyformer.cli import main

if __name__ == "__main__":
    main()
