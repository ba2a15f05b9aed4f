"""The grammar of runs: data, tokenizer, task, batches, optimiser, schedule, and how long. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import LM, ConfigError, Fault, ModelConfig, Spec
from anyformer.config.spec import BY_KIND, Count, Flag, Fraction, Positive, Probability, Size

# -- where examples come from -----------------------------------------------------------------------------------------

Encoding = str  # a Python codec: utf-8, latin-1, cp949, ...


class TextFile(Spec):
    """Plain text for a language model. `start` and `stop` take a part of it, counted in characters; a line that is a
    document is in the part where it begins."""

    kind: Literal["text"] = "text"
    path: str
    encoding: Encoding = "utf-8"
    document: Literal["file", "line"] = "file"  # what one document is
    start: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    stop: Fraction = 1.0


class ParallelFiles(Spec):
    """Two files, line by line."""

    kind: Literal["parallel"] = "parallel"
    source: str
    target: str
    encoding: Encoding = "utf-8"


class TableFile(Spec):
    """Named columns of a .tsv, .csv or .jsonl file; without a header (JSON: lists) they are called 0, 1, 2, ..."""

    kind: Literal["table"] = "table"
    path: str
    source: str | None = None
    target: str | None = None
    text: str | None = None
    format: Literal["tsv", "csv", "jsonl"] | None = None  # None: by the suffix
    header: Flag = True
    encoding: Encoding = "utf-8"


class MatchedLines(Spec):
    """Whole lines that a regular expression takes apart by its named groups `source` and `target`, or `text`."""

    kind: Literal["lines"] = "lines"
    path: str
    pattern: str
    encoding: Encoding = "utf-8"


class SortDigits(Spec):
    """3 1 2 -> 1 2 3"""

    kind: Literal["sort"] = "sort"
    count: Size
    shortest: Size = 6
    longest: Size = 11


class CopyDigits(Spec):
    """3 1 2 -> 3 1 2"""

    kind: Literal["copy"] = "copy"
    count: Size
    shortest: Size = 6
    longest: Size = 11


class ReverseDigits(Spec):
    """3 1 2 -> 2 1 3"""

    kind: Literal["reverse"] = "reverse"
    count: Size
    shortest: Size = 6
    longest: Size = 11


class WrittenDates(Spec):
    """tuesday, march 5 1996 -> 1996-03-05, in a dozen ways of writing dates."""

    kind: Literal["dates"] = "dates"
    count: Size


class Additions(Spec):
    """17+25 -> 42, with numbers of up to so many digits, the highest digit first."""

    kind: Literal["addition"] = "addition"
    count: Size
    digits: Annotated[int, Field(strict=True, ge=1, le=100)] = 3


Synthetic = SortDigits | CopyDigits | ReverseDigits | WrittenDates | Additions
Source = Annotated[TextFile | ParallelFiles | TableFile | MatchedLines | Synthetic, *BY_KIND]


class Data(Spec):
    """What is trained on, what is watched, what is reported. Relative paths stand under `root`."""

    train: Source
    valid: Source | None = None
    test: Source | None = None
    root: str = ""  # where relative paths begin; else the environment's ANYFORMER_DATA, else here
    on_bad_row: Literal["error", "skip"] = "error"


# -- tokenizers -------------------------------------------------------------------------------------------------------


class Characters(Spec):
    """One token per character."""

    kind: Literal["chars"] = "chars"
    lowercase: Flag = False


class Bytes(Spec):
    """256 tokens, and any text at all."""

    kind: Literal["bytes"] = "bytes"


class Words(Spec):
    """What stands between spaces."""

    kind: Literal["words"] = "words"
    size: Size = 50_000
    lowercase: Flag = False


class BPE(Spec):
    """Byte-pair encoding over bytes: nothing is unknown."""

    kind: Literal["bpe"] = "bpe"
    size: Size
    lowercase: Flag = False


class Unigram(Spec):
    """SentencePiece's unigram model."""

    kind: Literal["unigram"] = "unigram"
    size: Size
    lowercase: Flag = False


class WordPiece(Spec):
    """BERT's."""

    kind: Literal["wordpiece"] = "wordpiece"
    size: Size
    lowercase: Flag = False


class TokenizerFile(Spec):
    """A `tokenizer.json`, or a folder that holds one, or GPT-2's `vocab.bpe` and `encoder.json`."""

    kind: Literal["file"] = "file"
    path: str


Tokenizer = Annotated[Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile, *BY_KIND]

# -- tasks ------------------------------------------------------------------------------------------------------------


class Seq2Seq(Spec):
    """A target for each source: an encoder–decoder, or a decoder that reads `source <sep> target`."""

    kind: Literal["seq2seq"] = "seq2seq"
    metrics: tuple[Literal["exact_match", "bleu", "chrf"], ...] = ("exact_match",)
    bleu_tokenize: Literal["13a", "none", "char", "zh", "ko-mecab", "ja-mecab", "intl"] = "13a"
    max_source: Size | None = None  # in tokens; longer rows are bad rows
    max_target: Size | None = None


class LanguageModel(Spec):
    """The next token of a text."""

    kind: Literal["lm"] = "lm"


Task = Annotated[Seq2Seq | LanguageModel, *BY_KIND]


class TaskFile(Spec):
    """What the task.json of a run holds."""

    task: Task


# -- batches ----------------------------------------------------------------------------------------------------------


class Padded(Spec):
    """Rows of similar length padded to the longest, at most `tokens` in a batch, pads included."""

    kind: Literal["padded"] = "padded"
    tokens: Size
    pool: Size = 50  # batches that are shuffled together before they are sorted by length


class Packed(Spec):
    """Several documents or pairs in a row of `length` tokens, kept apart by segments."""

    kind: Literal["packed"] = "packed"
    tokens: Size
    length: Size


class Crops(Spec):
    """`rows` random pieces of `length` tokens of one long text."""

    kind: Literal["crops"] = "crops"
    rows: Size
    length: Size


Batches = Annotated[Padded | Packed | Crops, *BY_KIND]

# -- optimisation -----------------------------------------------------------------------------------------------------


class AdamW(Spec):
    """Adam with decoupled weight decay on matrices (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: Positive
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(strict=True, ge=0)] = 0.1


class Adam(Spec):
    """Adam with the settings of the 2017 Transformer (Kingma & Ba 2015)."""

    kind: Literal["adam"] = "adam"
    lr: Positive
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    eps: Positive = 1e-9


Optimizer = Annotated[AdamW | Adam, *BY_KIND]


class Constant(Spec):
    """The peak rate after a warm-up."""

    kind: Literal["constant"] = "constant"
    warmup: Count = 0


class Linear(Spec):
    """Down in a straight line to `floor` times the peak."""

    kind: Literal["linear"] = "linear"
    warmup: Count = 0
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0


class Cosine(Spec):
    """Down along half a cosine to `floor` times the peak (Loshchilov & Hutter 2017)."""

    kind: Literal["cosine"] = "cosine"
    warmup: Count = 0
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.1


class InverseSqrt(Spec):
    """sqrt(warmup / step) after a linear warm-up: with lr = (d · warmup)^-0.5 the 2017 schedule."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Size = 4000


class WSD(Spec):
    """Warm-up, stable, and a linear decay over the last `decay` of the steps."""

    kind: Literal["wsd"] = "wsd"
    warmup: Count = 0
    decay: Fraction = 0.2
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0


Schedule = Annotated[Constant | Linear | Cosine | InverseSqrt | WSD, *BY_KIND]


class Train(Spec):
    """The loop."""

    steps: Size
    optimizer: Optimizer
    schedule: Schedule = Constant()
    clip: Positive | None = 1.0  # largest gradient norm; None: as it is
    accumulate: Size = 1  # batches per step
    label_smoothing: Probability = 0.0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    checkpoint_activations: Flag = False
    ema: Probability | None = None  # decay of a moving average of the weights, which is what is evaluated and kept
    average: Size = 1  # the last so many checkpoints are averaged at the end
    evaluate_every: Size | None = None  # steps; None: at the end only
    save_every: Size | None = None  # steps; None: at the end only
    keep: Size = 2  # newest checkpoints kept, beside the best
    patience: Size | None = None  # evaluations without improvement before stopping
    max_bad_steps: Size = 10  # non-finite steps in a row before stopping
    init_from: str | None = None  # a run whose weights are the beginning
    log_every: Size = 10


class Recipe(Spec):
    """Everything a run is made from."""

    task: Task
    data: Data
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None = None  # None: one for both sides
    model: ModelConfig  # a vocabulary that is not given is the tokenizer's
    batches: Batches
    train: Train
    seed: Count = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if found := list(_rules(self)):
            raise ConfigError(found)
        return self


def _rules(recipe: Recipe) -> Iterator[Fault]:
    """The rules between parts, in the user's words."""
    task, model = recipe.task, recipe.model
    if not isinstance(model.head, LM):
        yield Fault("model.head", f"= '{model.head.kind}': the task {task.kind} needs 'lm'")
    if model.decoder is None:
        yield Fault("model.decoder", f"the task {task.kind} needs a decoder")
    if isinstance(task, LanguageModel) and model.shape == "encoder-decoder":
        yield Fault("model.encoder", "a language model is decoder-only")
    if isinstance(task, Seq2Seq) and isinstance(recipe.batches, Crops):
        yield Fault("batches.kind", "= 'crops': pieces of one long text are for the task lm")
    if isinstance(recipe.batches, Packed) and recipe.batches.length > recipe.batches.tokens:
        yield Fault("batches.length", f"= {recipe.batches.length}: must be at most tokens = {recipe.batches.tokens}")
    if recipe.source_tokenizer and model.shape != "encoder-decoder":
        yield Fault("source_tokenizer", "only an encoder-decoder reads the source by a vocabulary of its own")
    if recipe.source_tokenizer and model.tie in ("inputs", "all"):
        yield Fault("model.tie", f"= '{model.tie}': two tokenizers have two vocabularies")
    for name, source in (("train", recipe.data.train), ("valid", recipe.data.valid), ("test", recipe.data.test)):
        if source is not None:
            yield from (f.under(f"data.{name}") for f in _source(source, task))
    if recipe.train.average > 1 and recipe.train.save_every is None:
        yield Fault("train.average", f"= {recipe.train.average}: needs save_every, to have checkpoints to average")
    if recipe.train.patience and (recipe.train.evaluate_every is None or recipe.data.valid is None):
        yield Fault("train.patience", f"= {recipe.train.patience}: needs data.valid and evaluate_every")


def _source(source: Source, task: Task) -> Iterator[Fault]:
    pairs = isinstance(task, Seq2Seq)
    match source:
        case TextFile() if pairs:
            yield Fault("kind", "= 'text': the task seq2seq needs pairs: parallel, table or lines")
        case _ if not pairs and not isinstance(source, TextFile | TableFile | MatchedLines):
            yield Fault("kind", f"= '{source.kind}': the task lm needs text: text, table or lines")
        case TextFile(start=start, stop=stop) if start >= stop:
            yield Fault("start", f"= {start}: must be before stop = {stop}")
        case TableFile(source=None) | TableFile(target=None) if pairs:
            yield Fault("", "the task seq2seq needs the columns `source` and `target`")
        case TableFile(text=None) if not pairs:
            yield Fault("text", "is required: the column that the task lm reads")
        case SortDigits() | CopyDigits() | ReverseDigits() if source.shortest > source.longest:
            yield Fault("shortest", f"= {source.shortest}: must be at most longest = {source.longest}")
        case _:
            return
