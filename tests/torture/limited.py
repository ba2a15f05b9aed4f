"""Run many small cases in child processes with limits of time and memory, so that a hang or a crash is one verdict."""

import multiprocessing
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

BLOCK = 500  # cases of one child
MEMORY = 2 * 2**30  # bytes that a child may take beside what it has when it begins
SHOWN = 20  # broken cases that are printed


class Broken(Exception):
    """A law does not hold for a case."""


class Verdict(NamedTuple):
    """The result of a case, in one word to be counted, and how long it took."""

    number: int
    word: str
    broken: str  # the law that is broken, or empty
    seconds: float


def run_cases(work: Callable[[int], str], numbers: range, seconds: float, name: str) -> bool:
    """Call `work(number)` for each number. Print how often it returned each word, and every broken law.

    A case breaks a law if it raises, takes more than `seconds` of the processor, hangs, or ends its process. Return
    whether none does.
    """
    words, broken, slowest, console = Counter[str](), list[Verdict](), 0.0, Console()
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task, at = bar.add_task("", total=len(numbers)), numbers.start
        while at < numbers.stop:
            for verdict in _block(work, range(at, min(at + BLOCK, numbers.stop)), seconds):
                at, slowest = verdict.number + 1, max(slowest, verdict.seconds)
                words[verdict.word] += 1
                broken += [verdict] if verdict.broken else []
                bar.advance(task)
    counts = ", ".join(f"{count:,} {word}" for word, count in words.most_common())
    console.print(f"{name}: {len(numbers):,} cases: {counts}; the slowest took {slowest:.2f} s", soft_wrap=True)
    for verdict in broken[:SHOWN]:
        print(f"case {verdict.number}: {verdict.broken}", file=sys.stderr)
    console.print(f"{name}: {len(broken):,} broken laws")
    return not broken


def _block(work: Callable[[int], str], numbers: range, seconds: float) -> list[Verdict]:
    """The verdicts of a child; where it hangs or ends early, those up to that case."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, numbers, seconds, theirs))
    child.start()
    theirs.close()
    found = list[Verdict]()
    try:
        while len(found) < len(numbers):
            if not ours.poll(patience := 6 * seconds):
                found.append(Verdict(numbers[len(found)], "hung", f"takes more than {patience} s", patience))
                break
            found.append(ours.recv())
    except EOFError:
        child.join()
        found.append(Verdict(numbers[len(found)], "crashed", f"ended its process with {child.exitcode}", 0.0))
    finally:
        child.kill()
        child.join()
        ours.close()
    return found


def _child(work: Callable[[int], str], numbers: range, seconds: float, out: Connection) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))
    for number in numbers:
        began, broken = time.process_time(), ""  # other processes do not count
        try:
            word = work(number)
        except Broken as error:
            word, broken = "broken", str(error)
        except BaseException as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            word, broken = "raised", f"{type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})"
        passed = time.process_time() - began
        if passed > seconds:
            word, broken = "slow", broken or f"took {passed:.1f} s"
        out.send(Verdict(number, word, broken, passed))
