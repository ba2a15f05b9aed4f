"""Compiled code of a run, read from the user's cache folder and written to it."""

from collections.abc import Iterator
from contextlib import contextmanager

from anyformer.training.job import Job


@contextmanager
def stored_code(job: Job) -> Iterator[None]:
    """Read and write compiled code in the user's cache folder; damaged code is compiled again."""
    if (cache := job.compile_cache) is None or not job.ranks.on_first(cache.hold):
        yield
        return
    if cache.damaged:
        text = f"{cache.folder}: the compiled code was damaged or incomplete, and is compiled again"
        job.console.print(text, highlight=False, markup=False, soft_wrap=True)
    with cache.in_use():
        yield
        record_code(job)


def record_code(job: Job) -> None:
    """Store the digests of the code that is compiled by now."""
    if job.compile_cache is not None and job.ranks.is_first:
        job.compile_cache.record()
