"""A server starts without imports that it does not need."""

import subprocess
import sys

import pytest

CODE = """
import asyncio, sys
import anyformer as af
from anyformer import presets
from tests.serve.mixed_requests import ask

async def main():
    async with af.Engine(af.Transformer(presets.vaswani(depth=1, width=16, heads=2, vocab=64))) as engine:
        await engine.complete(ask((3, 4, 5), 3))

asyncio.run(main())
unneeded = ("sympy", "torch._dynamo", "torch._inductor", "transformers", "fastapi")
print(*(name for name in unneeded if name in sys.modules))
"""


@pytest.mark.system
def test_imports_before_the_first_answer():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
