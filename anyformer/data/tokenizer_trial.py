"""Trial of a foreign tokenizer in a child process: it may crash, hang or exhaust memory there. Imports no torch.

The `tokenizers` library panics on damaged character maps, gives up on catastrophic regular expressions, and multiplies
characters as often as a file says. So a file from elsewhere is loaded and used on short texts in a child with limits on
time and memory, before it is loaded here.
"""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from anyformer.config.spec import ConfigError, Fault, visible

TRIAL_SECONDS = 60.0  # for loading and all probes; a vocabulary of 250,000 tokens takes about 3 s on one core
TRIAL_BYTES = 16 << 30  # of address space
PROBE_SECONDS = 5  # of CPU time for all probes after loading; usual tokenizers take some milliseconds
PROBE_BYTES = 1 << 30  # of address space for all probes, beside the loaded tokenizer
MAX_GROWTH = 100  # characters or tokens for each character of a text; NFKC makes up to 18
MULTIPLIES = 3  # exit code of the child
CHILD = """
import json, sys
trial_bytes, probe_seconds, probe_bytes, max_growth, multiplies = map(int, sys.argv[1:])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (trial_bytes,) * 2)
except (ImportError, ValueError, OSError):
    pass
from tokenizers import Tokenizer
runs = [c * 80 + end for c in map(chr, range(32, 127)) for end in ("", "\\x00\\u00a7")]
mixed = ["", "Hello, world 12", "\\ud55c\\uad6d \\u4e2d\\u6587 \\u00fc\\u00df", "\\ufb01 \\u2460 e\\u0301"]
mixed += ["\\u1112\\u1161\\u11ab", "\\u0645\\u0631", "\\U0001f469\\u200d", " \\t\\r\\n\\u3000" * 9, "aB1 " * 40]

def replaced(part):
    if isinstance(part, dict) and part.get("type") == "Replace" and "String" in part["pattern"]:
        yield part["pattern"]["String"]
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from replaced(inner)

def limit_probes():
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + probe_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # at the second it kills
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (min(trial_bytes, held + probe_bytes),) * 2)

def check(text, made):
    if len(made) > max_growth * max(len(text), 10):
        sys.stdout.write(f"{len(made):,} of {len(text)}")
        sys.exit(multiplies)

try:
    tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
    parts = [json.loads(part.__getstate__()) for part in (tokenizer.normalizer, tokenizer.decoder) if part is not None]
    try:
        limit_probes()
    except (NameError, ValueError, OSError):
        pass
    for text in mixed + runs + [each * 40 for each in replaced(parts)]:
        try:
            if tokenizer.normalizer is not None:
                check(text, tokenizer.normalizer.normalize_str(text))
            ids = tokenizer.encode(text).ids
            check(text, ids)
            check(text, tokenizer.decode(ids))
        except Exception:
            pass  # such as a missing unknown token: reported for the text that needs it
except Exception:
    pass  # reported with its reason when the file is loaded
except SystemExit:
    raise
except BaseException as error:
    sys.stdout.write(str(error))
    sys.exit(1)
"""


_PASSED: set[str] = set()  # SHA-256 of each text that passed in this process


def try_tokenizer(text: str, path: str | Path) -> None:
    """Load the text of a `tokenizer.json` in a child process, once; raise ConfigError where that ends badly."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest not in _PASSED:
        _try(text, path)
        _PASSED.add(digest)


def _try(text: str, path: str | Path) -> None:
    limits = (TRIAL_BYTES, PROBE_SECONDS, PROBE_BYTES, MAX_GROWTH, MULTIPLIES)
    command = [sys.executable, "-c", CHILD, *map(str, limits)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=TRIAL_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused(path, f"it takes more than {TRIAL_SECONDS:g} s to load and to read short texts") from None
    except OSError as error:
        raise _refused(path, f"no process can be started to try it in: {error.strerror}") from None
    probes = "short texts, which it may multiply"
    if done.returncode == MULTIPLIES:
        raise _refused(path, f"it multiplies texts: it makes {done.stdout.decode()} characters")
    if done.returncode == -signal.SIGXCPU:
        raise _refused(path, f"it takes more than {PROBE_SECONDS} s of CPU time to read {probes}")
    if done.returncode == -signal.SIGABRT and b"memory allocation of" in done.stderr:
        raise _refused(path, f"it takes more than {PROBE_BYTES / 2**20:,.0f} MiB of memory to read {probes}")
    if done.returncode < 0:
        raise _refused(path, f"the tokenizers library crashes on it ({signal.Signals(-done.returncode).name})")
    if done.returncode > 0:
        reason = done.stdout.decode("utf-8", "replace") or done.stderr.decode("utf-8", "replace").strip()[-200:]
        raise _refused(path, f"the tokenizers library fails on it: {visible(reason).partition(chr(10))[0]}")


def _refused(path: str | Path, reason: str) -> ConfigError:
    return ConfigError([Fault(visible(str(path)), f"is refused: {reason}")])
