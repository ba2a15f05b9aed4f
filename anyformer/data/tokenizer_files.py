"""The files of a tokenizer: a `tokenizer.json`, or GPT-2's two files. Imports no torch."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anyformer import recipe
from anyformer.config.parse import build
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.sentencepiece import PieceReader
from anyformer.data.vocabulary import BYTES

# The names of each role: our own, then those of public tokenizers. Where several are there, the first counts.
ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "[CLS]", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "[SEP]", "<|endoftext|>"),
    "sep": ("<sep>", "[SEP]", "<|sep|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}

FILE = "tokenizer.json"
NAMED, READER, PART, CHAT = "roles", "sentencepiece", "part", "chat_template"  # our own keys, which come first
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # GPT-2's two files, under both their names

Reader = PieceReader | recipe.Segmented
Loaded = tuple[Tokenizer, dict[str, str] | None, Reader | None, dict[str, str] | None]


def load_file(path: Path, foreign: bool) -> Loaded:
    """Load a `tokenizer.json`, a folder with one, or a folder with GPT-2's two files."""
    file = path / FILE if os.path.isdir(path) else path  # os.path's, unlike Path's, answers for any name
    if file == path or os.path.exists(file):
        return parse(_read(file), file, foreign)
    for vocab, merges in PAIRS:
        if os.path.exists(path / vocab) and os.path.exists(path / merges):
            return _byte_pairs(path / vocab, path / merges), None, None, None
    known = ", nor ".join(f"{vocab} with {merges}" for vocab, merges in PAIRS)
    more = "vocab.txt and SentencePiece .model files are read with a model, by anyformer import"
    raise wrong(path, f"holds no tokenizer: no {FILE}, nor {known} ({more})")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
    except FileNotFoundError:
        what = "no such file or folder"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except ValueError as error:  # a name with a zero in it
        what = f"cannot be read: {error}"
    raise wrong(path, what)


def parse(text: str, name: str | Path, foreign: bool = False) -> Loaded:
    """Parse the text of a `tokenizer.json`; a foreign one is tried in a child process first."""
    ours: dict[str, Any] = {}
    try:
        while begin := re.match(rf'\s*{{\s*"({NAMED}|{READER}|{PART}|{CHAT})"\s*:\s*', text):
            ours[begin[1]], end = json.JSONDecoder().raw_decode(text, begin.end())
            text = "{" + text[end:].lstrip().removeprefix(",")
        reader: Reader | None = PieceReader.from_json(ours[READER]) if READER in ours else None
        if PART in ours:
            reader = _part(ours[PART])
        chat = ours.get(CHAT)
        if chat is not None and not (isinstance(chat, dict) and all(isinstance(one, str) for one in chat.values())):
            raise ValueError(f"{CHAT} must be a table of templates")
        if foreign:
            try_tokenizer(text, name)
        return Tokenizer.from_str(text), ours.get(NAMED), reader, chat
    except ConfigError:
        raise
    except BaseException as error:  # the library's own errors have no narrower type
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise wrong(name, f"is no {FILE}: {first_line(error)}") from None


def _part(stored: Any) -> recipe.Segmented:
    """Return the part whose settings a file stores; its class is one that is known already, never one that it names."""
    kind = str(stored.get("kind") if isinstance(stored, dict) else stored)
    if (cls := recipe.trainable().get(kind)) is None or not issubclass(cls, recipe.Segmented):
        raise ValueError(f"needs the tokenizer {kind!r}: give its file with --import FILE")
    return build(cls, stored)


def _byte_pairs(vocab: Path, merges: Path) -> Tokenizer:
    """Read byte-level BPE (Radford et al. 2019): a vocabulary of byte strings, and the pairs to merge, in order."""
    lines = _read(merges).replace("\r\n", "\n").split("\n")
    pairs = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#version"):
            left, _, right = line.partition(" ")
            if not left or not right or " " in right:
                raise wrong(merges, f"line {number}: must be two tokens with a space between them")
            pairs.append((left, right))
    text = _read(vocab)
    try:
        ids = dict(json.loads(text))
        if lost := next((pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()), None):
            raise wrong(vocab, f"does not belong to {merges.name}: no token for {' + '.join(lost)}")
        inner = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise wrong(vocab, f"is no vocabulary: {first_line(error)}") from None
    if not ids.keys() >= BYTES.keys():
        raise wrong(vocab, "is no byte-level vocabulary: some bytes have no token")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([name for names in ROLES.values() for name in names if name in ids])
    return inner


def panicked(error: BaseException) -> bool:
    """Return whether this is a panic of the library, which has no exception type that can be imported."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    return visible(str(error)).partition("\n")[0]


def wrong(path: str | Path, message: str) -> ConfigError:
    return ConfigError([Fault(visible(str(path)), message)])


# -- trial of a foreign tokenizer in a child process, where it may crash, hang or exhaust memory -----------------------


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
    """Load the text of a `tokenizer.json` in a child process, once; raise ConfigError where that ends badly.

    The `tokenizers` library panics on damaged character maps, gives up on catastrophic regular expressions, and
    multiplies characters as often as a file says. So the child has limits on time and memory, and uses the tokenizer
    on short texts.
    """
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
