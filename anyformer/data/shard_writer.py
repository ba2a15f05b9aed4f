"""Write shards: tokenise text of any size to files of token ids, in bounded memory. Imports no torch.

`plan.json` is written first, with the inputs and settings. Each shard is written under a temporary name, synced,
renamed, and then listed in `done.jsonl`; `index.json` is written last. So a kill costs only the chunks in progress, and
preparing again with the same plan resumes and gives the same bytes.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from anyformer.config.io import write_file
from anyformer.config.overrides import in_words
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data import chunks
from anyformer.data.chunks import Bad, Chunk, ChunkedFiles, documents, is_text, read_chunks
from anyformer.data.shards import INDEX, Index, ShardContents, digest, wrong
from anyformer.data.tokenizer import FILE, TextTokenizer, train_tokenizer
from anyformer.data.vocabulary import one_thread
from anyformer.recipe import Tokenizer
from anyformer.runs.processes import end_with_parent, locked

PLAN, DONE = "plan.json", "done.jsonl"
TOGETHER = 1_000_000  # characters that are encoded at once
ENDS = 65_536  # bytes of a file, at its beginning, middle and end, by which it is known again
SHOWN = 5  # bad rows that the index names
SAMPLE = 100_000_000  # bytes of text that a tokenizer is trained on
PACKED = 3  # how much longer the text of a packed file may be


class WorkerLost(RuntimeError):
    """A worker process ended without a word."""


@dataclass(frozen=True)
class Done:
    """A chunk whose shard is there."""

    shard: ShardContents
    first_bad: tuple[str, ...]
    read: int  # bytes of the file, as they are on the disk


def prepare(
    paths: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer | TextTokenizer,
    how: ChunkedFiles,
    *,
    sample: int = SAMPLE,
    skip_bad: bool = False,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Index:
    """Write the shards of some files to `out`, or resume, or return the finished ones. A tokenizer spec is trained
    on `sample` bytes of them. `progress` is called with the bytes done and the total of this call."""
    chunks.check_encoding(how.encoding)
    plan = {"files": [_known_by(path) for path in paths], "input": how._asdict(), "chunk": chunks.SIZE}
    if isinstance(tokenizer, TextTokenizer):
        plan |= {"tokenizer": digest(tokenizer)}
    else:
        plan |= {"tokenizer": in_words(tokenizer), "sample": sample}
    with locked(out), _writing(out):
        begun = _begun(out, plan)
        if begun and (out / INDEX).exists():
            (out / DONE).unlink(missing_ok=True)
            return Index.load(out)
        if begun:
            made = TextTokenizer.load(out / FILE)
            if digest(made) != begun["digest"]:
                raise wrong(out / FILE, "is not the tokenizer that the shards were begun with: choose another --out")
        else:
            if isinstance(tokenizer, TextTokenizer):
                made = tokenizer
            else:
                made = train_tokenizer(tokenizer, _sample(paths, how, sample))
            write_file(out / PLAN, json.dumps(plan | {"digest": digest(made)}, indent=1).encode())
            made.save(out / FILE)
        for stale in out.glob(".anyformer-*.tmp"):
            stale.unlink(missing_ok=True)
        return _fill(paths, out, made, how, skip_bad, workers, progress)


def _fill(
    paths: Sequence[Path],
    out: Path,
    tokenizer: TextTokenizer,
    how: ChunkedFiles,
    skip_bad: bool,
    workers: int,
    progress: Callable[[int, int], None],
) -> Index:
    dtype = "<u2" if tokenizer.size <= 2**16 else "<u4"
    done = _done(out, np.dtype(dtype).itemsize)
    left, now = sum(path.stat().st_size for path in paths) - sum(one.read for one in done.values()), 0
    work = ChunkWork(tokenizer.to_json(), how, out, dtype, skip_bad)
    progress(now, left)
    jobs = (job for job in _jobs(paths, how) if job[0] not in done)
    with (out / DONE).open("a", encoding="utf-8") as log:
        for number, one in _inline(work, jobs) if workers == 1 else _spawned(work, jobs, workers):
            done[number] = one
            log.write(json.dumps({"number": number, **asdict(one)}, ensure_ascii=False) + "\n")
            log.flush()
            now += one.read
            progress(now, left)
    made = [done[number] for number in sorted(done)]
    bad = tuple(line for one in made for line in one.first_bad)[:SHOWN]
    index = Index(digest(tokenizer), tokenizer.size, dtype, bad, tuple(one.shard for one in made))
    if not index.total("tokens"):
        raise wrong(out, "there is no text in these files" + (f"; the first bad row: {bad[0]}" if bad else ""))
    write_file(out / INDEX, index.dumps().encode())
    (out / DONE).unlink()
    return index


Job = tuple[int, Chunk, int]  # its number, and how many bytes of the file it is


def _jobs(paths: Sequence[Path], how: ChunkedFiles) -> Iterator[Job]:
    number = 0
    for path in paths:
        before = 0
        for chunk in read_chunks(path, how, chunks.SIZE):
            yield number, chunk, chunk.read - before
            number, before = number + 1, chunk.read


def _sample(paths: Sequence[Path], how: ChunkedFiles, size: int) -> Iterator[str]:
    """The beginning of every chunk, so that all parts of all files are heard; bad rows are passed over."""
    whole = sum(
        path.stat().st_size * (1 if is_text(path) and path.suffix.lower() != ".gz" else PACKED) for path in paths
    )
    for path in paths:
        for chunk in read_chunks(path, how, chunks.SIZE):
            end = chunk.content.find(b"\n", len(chunk.content) * size // whole) + 1 if size < whole else 0
            part = chunk._replace(content=chunk.content[:end], last=False) if end else chunk
            yield from (found.text for found in documents(part, how) if not isinstance(found, Bad))


# -- state of the output folder ------------------------------------------------------------------------------------


def _known_by(path: Path) -> dict[str, Any]:
    """By what a file is known again: its name, its size, and some of its bytes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            seen = hashlib.sha256()
            for at in (0, size // 2, max(0, size - ENDS)):
                file.seek(at)
                seen.update(file.read(ENDS))
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None
    return {"name": visible(path.name), "size": size, "sha256": seen.hexdigest()}


def _begun(out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan of the shards that are begun there, empty if none are; refuses those of anything else."""
    if not (out / PLAN).exists():
        if any(not path.name.startswith(".anyformer-") for path in out.iterdir()):
            raise wrong(out, "is not empty and holds no shards: choose another --out")
        return {}
    try:
        before: dict[str, Any] = json.loads((out / PLAN).read_text(encoding="utf-8"))
        there = {key: before[key] for key in plan}
    except (ValueError, KeyError, TypeError):
        raise wrong(out / PLAN, "cannot be read: it is damaged") from None
    if there != plan:
        raise wrong(out, f"holds shards of something else: {_difference(there, plan)}; choose another --out")
    if (out / FILE).exists():
        return before
    for name in (INDEX, DONE):  # without the tokenizer they mean nothing
        (out / name).unlink(missing_ok=True)
    return {}


def _difference(there: dict[str, Any], plan: dict[str, Any]) -> str:
    """In words, the first."""
    names = [[file["name"] for file in one["files"]] for one in (there, plan)]
    if names[0] != names[1]:
        return f"of the files {', '.join(names[0][:5])}{', ...' if len(names[0]) > 5 else ''}"
    for was, now in zip(there["files"], plan["files"], strict=True):
        if was != now:
            return f"the file {now['name']} has changed since ({was['size']:,} bytes, now {now['size']:,})"
    key = next(key for key in plan if there[key] != plan[key])
    return f"{key} was {there[key]}, and is {plan[key]} now"


def _done(out: Path, itemsize: int) -> dict[int, Done]:
    """The chunks whose shards are there; a line that a kill cut short is none."""
    found: dict[int, Done] = {}
    log = out / DONE
    for line in log.read_text(encoding="utf-8").split("\n") if log.exists() else ():
        try:
            one = json.loads(line)
            shard = ShardContents(**one["shard"])
            if os.path.getsize(out / shard.file) == shard.tokens * itemsize:
                found[one["number"]] = Done(shard, tuple(one["first_bad"]), one["read"])
        except (ValueError, KeyError, TypeError, OSError):
            continue
    write_file(log, "".join(json.dumps({"number": n, **asdict(one)}) + "\n" for n, one in found.items()).encode())
    return found


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise wrong(out, f"cannot be written: {error.strerror}") from None


# -- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkWork:
    """Process one chunk, in this process or in another."""

    tokenizer: str
    how: ChunkedFiles
    out: Path
    dtype: str
    skip_bad: bool

    def ready(self) -> Callable[[Job], Done]:
        tokenizer = TextTokenizer.from_json(self.tokenizer)
        return lambda job: self._encode(tokenizer, *job)

    def _encode(self, tokenizer: TextTokenizer, number: int, chunk: Chunk, read: int) -> Done:
        ids = array("H" if self.dtype == "<u2" else "I")
        end = [] if tokenizer.eos is None else [tokenizer.eos]
        held, size, count, text_bytes = list[chunks.Text](), 0, 0, 0
        bad = list[str]()

        def flush() -> None:
            for found, encoded in zip(held, tokenizer.encode_batch([found.text for found in held]), strict=True):
                ids.extend(encoded)
                ids.extend(end if found.ends else [])
            held.clear()

        for found in documents(chunk, self.how):
            if isinstance(found, Bad):
                bad.append(f"{visible(str(chunk.path))}:{found.line}: {found.why}")
                if not self.skip_bad:
                    raise ConfigError([Fault("", f"{bad[0]}; mend it, or leave such rows out by --on-bad-row skip")])
                continue
            held.append(found)
            size, count = size + len(found.text), count + found.ends
            text_bytes += len(found.text.encode())
            if size >= TOGETHER:
                flush()
                size = 0
        flush()
        content = np.array(ids).astype(self.dtype).tobytes()
        name = f"tokens-{number:05}.bin"
        with _writing(self.out):
            write_file(self.out / name, content)
        shard = ShardContents(name, len(ids), count, text_bytes, len(bad), hashlib.sha256(content).hexdigest())
        return Done(shard, tuple(bad[:SHOWN]), read)


def _inline(work: ChunkWork, jobs: Iterator[Job]) -> Iterator[tuple[int, Done]]:
    """In this process, on one core."""
    with one_thread():
        do = work.ready()
        for job in jobs:
            yield job[0], do(job)


def _spawned(work: ChunkWork, jobs: Iterator[Job], workers: int) -> Iterator[tuple[int, Done]]:
    """Process chunks in worker processes, one chunk at a time each; they end when this process does."""
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    free: list[Connection[Any, Any]] = []
    busy: dict[Connection[Any, Any], int] = {}
    try:
        with one_thread():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                processes.append(context.Process(target=_serve, args=(work, theirs, os.getpid()), daemon=True))
                processes[-1].start()
                theirs.close()
                free.append(ours)
        more = True
        while more or busy:
            while more and free:
                job = next(jobs, None)
                if more := job is not None:
                    free[-1].send(job)
                    busy[free.pop()] = job[0]
            ready = wait(list(busy)) if busy else []
            for pipe in [pipe for pipe in busy if pipe in ready]:
                answer = pipe.recv()
                number = busy.pop(pipe)
                free.append(pipe)
                if isinstance(answer, str):
                    raise ConfigError([Fault("", answer)])
                yield number, answer
    except (EOFError, BrokenPipeError, ConnectionResetError):
        what = "a worker was killed, maybe for memory: run it again, with fewer --workers; finished parts are kept"
        raise WorkerLost(what) from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(work: ChunkWork, pipe: "Connection[Any, Any]", parent: int) -> None:
    """Encode the chunks that come through a pipe, one after the other, as long as the parent process runs."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process gets the signal, and ends this one
    do = work.ready()
    try:
        while True:
            job = pipe.recv()
            try:
                pipe.send(do(job))
            except ConfigError as error:
                pipe.send(str(error))
    except (EOFError, OSError):  # the first process is gone
        return
