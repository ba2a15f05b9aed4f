"""Compilation of constraints: a request that is cancelled does not affect the others."""

import asyncio

import pytest

from anyformer.data.tokenizer import train_tokenizer
from anyformer.decoding.constraints.constraint import Constraint
from anyformer.recipe import Bytes
from anyformer.serve.http.compiler import Compiler, Rules, Vocabulary
from anyformer.serve.http.errors import ApiError
from tests import loop

SLOW, FAST = (Rules("regex", pattern, True) for pattern in ("(ab|cd|ef){1,900}", "a*b"))


def vocabulary() -> Vocabulary:
    tokenizer = train_tokenizer(Bytes(), [])
    return Vocabulary(tokenizer, tokenizer.size, (1,))


def test_a_cancelled_request_leaves_the_process():
    async def run() -> None:
        compiler, words = Compiler(30.0, 100_000), vocabulary()
        try:
            await compiler.compile("model", words, FAST)
            process = compiler._process
            assert process is not None
            slow = asyncio.create_task(compiler.compile("model", words, SLOW))
            same = asyncio.create_task(compiler.compile("model", words, SLOW))
            other = asyncio.create_task(compiler.compile("model", words, Rules("regex", "c*", True)))
            await asyncio.sleep(0.05)
            slow.cancel()
            for task in (same, other):
                assert isinstance(await task, Constraint)
            assert slow.cancelled()
            assert compiler._process is process
            assert process.returncode is None
        finally:
            await compiler.close()
        assert process.returncode is not None

    loop.run(run())


def test_closing_ends_what_is_being_compiled():
    async def run() -> None:
        compiler, words = Compiler(30.0, 100_000), vocabulary()
        await compiler.compile("model", words, FAST)
        tasks = [
            asyncio.create_task(compiler.compile("model", words, rules)) for rules in (SLOW, Rules("regex", "c*", True))
        ]
        await asyncio.sleep(0.05)
        await compiler.close()
        for task in tasks:
            with pytest.raises(ApiError) as raised:
                await task
            assert raised.value.status == 503
        assert compiler._process is None

    loop.run(run())
