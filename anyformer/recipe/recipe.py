"""The grammar of runs: data, tokenizer, task, batches, optimiser, schedule, and how long. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import LM, Classifier, ConfigError, Embedder, Fault, ModelConfig, Spec
from anyformer.config.spec import BY_KIND, Count, Flag, Fraction, Positive, Probability, Size, did_you_mean
from anyformer.recipe.sources import (
    Additions as Additions,
    ClassFolders as ClassFolders,
    ConllFile as ConllFile,
    CopyDigits as CopyDigits,
    Data as Data,
    Joined as Joined,
    MatchedLines as MatchedLines,
    Mixed as Mixed,
    ParallelFiles as ParallelFiles,
    Part as Part,
    ReverseDigits as ReverseDigits,
    Shards as Shards,
    SortDigits as SortDigits,
    Source as Source,
    Synthetic as Synthetic,
    TableFile as TableFile,
    TextFile as TextFile,
    WrittenDates as WrittenDates,
    misfits,
    shard_faults,
)
from anyformer.recipe.task import (
    LARGEST_TARGET as LARGEST_TARGET,
    AnyTask as AnyTask,
    Classify as Classify,
    Drawn as Drawn,
    Embed as Embed,
    Encoder as Encoder,
    LanguageModel as LanguageModel,
    MaskedLanguageModel as MaskedLanguageModel,
    Metric as Metric,
    Mixture as Mixture,
    MixturePart as MixturePart,
    PrefixLM as PrefixLM,
    Regress as Regress,
    Seq2Seq as Seq2Seq,
    SpanCorruption as SpanCorruption,
    Tag as Tag,
    Task as Task,
    TaskFile as TaskFile,
    columns as columns,
    measures as measures,
    misshapen,
    words_faults,
)
from anyformer.recipe.tokenizer import (
    BPE as BPE,
    AnyTokenizer as AnyTokenizer,
    Bytes as Bytes,
    Characters as Characters,
    DataTokenizer as DataTokenizer,
    RunTokenizer as RunTokenizer,
    Tokenizer as Tokenizer,
    TokenizerFile as TokenizerFile,
    Unigram as Unigram,
    WordPiece as WordPiece,
    Words as Words,
)

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


class Ordered(Spec):
    """`rows` equal parts of one long text side by side: each batch holds the next `length` tokens of all of them.

    A model with `memory` goes on from the batch before; at the end of the text it forgets, and begins again.
    """

    kind: Literal["ordered"] = "ordered"
    rows: Size
    length: Size


Batches = Annotated[Padded | Packed | Crops | Ordered, *BY_KIND]

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


class OwnTokens(Spec):
    """Scheduled sampling: a decoder learns after some tokens that the model itself says in the place of the target's.

    With a share of 1, and as many passes as a target has tokens, it runs free.
    """

    share: Fraction = 0.25  # of the target's tokens that give way
    rise: Count = 0  # steps over which the share rises from 0
    passes: Size = 1  # without gradients before each step: so many tokens in a row are the model's own


class Train(Spec):
    """The loop."""

    steps: Size
    optimizer: Optimizer
    schedule: Schedule = Constant()
    clip: Positive | None = 1.0  # largest gradient norm; None: as it is
    accumulate: Size = 1  # batches per step
    label_smoothing: Probability = 0.0
    own_tokens: OwnTokens | None = None  # None: the decoder reads the target (teacher forcing)
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"  # fp8: products of the blocks; the rest in bf16
    compile: Literal["auto", "on", "off"] = "auto"  # on a GPU, where batches have one shape: not of padded rows
    checkpoint_activations: Flag = False
    ema: Probability | None = None  # decay of a moving average of the weights, which is what is evaluated and kept
    average: Size = 1  # the last so many checkpoints are averaged at the end
    evaluate_every: Size | None = None  # steps; None: at the end only
    save_every: Size | None = None  # steps; None: at the end only
    keep: Size = 2  # newest checkpoints kept, beside the best
    snapshots: Count | Literal["auto"] = "auto"  # steps whose weights `explore` shows; auto: 12, of 256 MiB at most
    best: Metric = "loss"  # by which validation tells the best checkpoint: the lowest loss, or the highest of another
    patience: Size | None = None  # evaluations without improvement before stopping
    max_bad_steps: Size = 10  # non-finite steps in a row before stopping
    init_from: str | None = None  # a run whose weights are the beginning
    freeze: tuple[str, ...] = ()  # weights, or parts by their names, that stay as they are: "encoder.blocks.0"
    layer_decay: Fraction = 1.0  # each layer learns at so much of the rate of the one above; the head at the whole
    log_every: Size = 10


class Processes(Spec):
    """What each of several processes holds (`torchrun`): all of the model, or a part of every weight, gradient and
    optimiser state."""

    shard: Literal["none", "full"] = "none"


class Recipe(Spec):
    """Everything a run is made from."""

    task: Task
    data: Data
    tokenizer: AnyTokenizer
    source_tokenizer: Tokenizer | None = None  # None: one for both sides
    model: ModelConfig  # a vocabulary that is not given is the tokenizer's
    batches: Batches
    train: Train
    parallel: Processes = Processes()
    seed: Count = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if found := list(_rules(self)):
            raise ConfigError(found)
        return self


def _rules(recipe: Recipe) -> Iterator[Fault]:
    """The rules between parts, in the user's words."""
    task, model = recipe.task, recipe.model
    if isinstance(task, Classify | Regress | Embed):
        yield from _of_rows(recipe, task)
    elif isinstance(task, Drawn):
        yield from misshapen(task, model)
        if isinstance(recipe.batches, Ordered):
            yield Fault("batches.kind", f"= 'ordered': the task {task.kind} reads each piece of a text by itself")
    elif not isinstance(task, Tag):
        yield from _writing(recipe, task)
    yield from words_faults(task, model, recipe.batches.kind, recipe.train.label_smoothing)
    if isinstance(task, Seq2Seq | Mixture) and isinstance(recipe.batches, (Crops, Ordered)):
        yield Fault("batches.kind", f"= '{recipe.batches.kind}': pieces of one long text are for the task lm")
    elif model.decoder and model.decoder.memory and not isinstance(recipe.batches, Ordered):
        what = f"= '{recipe.batches.kind}': a model with memory goes on from batch to batch, which is 'ordered'"
        yield Fault("batches.kind", what)
    if isinstance(recipe.batches, Packed) and recipe.batches.length > recipe.batches.tokens:
        yield Fault("batches.length", f"= {recipe.batches.length}: must be at most tokens = {recipe.batches.tokens}")
    side, stack = next(reversed(model.stacks.items()))
    if isinstance(recipe.batches, (Crops, Ordered)) and stack.limit is not None and recipe.batches.length > stack.limit:
        yield Fault("batches.length", f"= {recipe.batches.length}: the {side} has {stack.limit} positions")
    if recipe.train.own_tokens and not isinstance(task, Seq2Seq | Mixture):
        yield Fault("train.own_tokens", f"is for the task seq2seq, and this is {task.kind}")
    if recipe.source_tokenizer and model.shape != "encoder-decoder":
        yield Fault("source_tokenizer", "only an encoder-decoder reads the source by a vocabulary of its own")
    if recipe.source_tokenizer and model.tie in ("inputs", "all"):
        yield Fault("model.tie", f"= '{model.tie}': two tokenizers have two vocabularies")
    for name, source in (("train", recipe.data.train), ("valid", recipe.data.valid), ("test", recipe.data.test)):
        if source is not None:
            yield from (f.under(f"data.{name}") for f in misfits(source, task.kind, columns(task)))
            if isinstance(task, Mixture) and isinstance(source, Mixed):
                yield from (f.under(f"data.{name}.parts") for f in _of_parts(task, source, all_of_them=name == "train"))
    if isinstance(recipe.tokenizer, RunTokenizer) and recipe.train.init_from is None:
        yield Fault("tokenizer", "= 'run': needs train.init_from, the run whose tokenizer it is")
    framed = isinstance(task, LanguageModel) and task.framed
    yield from shard_faults(recipe.data.train, recipe.tokenizer.kind, recipe.batches.kind, framed)
    if model.adapter and recipe.train.init_from is None:
        yield Fault("model.adapter", "needs train.init_from: beside weights that nobody trained it is no use")
    if recipe.train.average > 1 and recipe.train.save_every is None:
        yield Fault("train.average", f"= {recipe.train.average}: needs save_every, to have checkpoints to average")
    if recipe.train.best not in (known := measures(task)):
        yield Fault("train.best", f"= '{recipe.train.best}': the task measures {', '.join(known)}")
    if recipe.train.patience and (recipe.train.evaluate_every is None or recipe.data.valid is None):
        yield Fault("train.patience", f"= {recipe.train.patience}: needs data.valid and evaluate_every")


def _of_parts(task: Mixture, source: Mixed, all_of_them: bool) -> Iterator[Fault]:
    """Of rows for the parts of a mixture."""
    known, given = [part.name for part in task.parts], [part.name for part in source.parts]
    for i, name in enumerate(given):
        if name not in known:
            yield Fault(f"{i}.name", f"= '{name}': the task has no such part; {did_you_mean(name, known)}")
        elif name in given[:i]:
            yield Fault(f"{i}.name", f"= '{name}': has rows already; join them by kind = 'joined'")
    for name in known if all_of_them else ():
        if name not in given:
            yield Fault("", f"there are no rows for '{name}'")


def _writing(recipe: Recipe, task: Seq2Seq | Mixture | LanguageModel) -> Iterator[Fault]:
    """Of tasks whose models say tokens."""
    model = recipe.model
    if not isinstance(model.head, LM):
        yield Fault("model.head", f"= '{model.head.kind}': the task {task.kind} needs 'lm'")
    if model.decoder is None:
        yield Fault("model.decoder", f"the task {task.kind} needs a decoder")
    if isinstance(task, LanguageModel) and model.shape == "encoder-decoder":
        yield Fault("model.encoder", "a language model is decoder-only")
    if isinstance(task, Seq2Seq) and task.prefix and model.shape == "encoder-decoder":
        yield Fault("task.prefix", "= true: is for decoder-only models; an encoder sees all of the source anyway")


def _of_rows(recipe: Recipe, task: Classify | Regress | Embed) -> Iterator[Fault]:
    """Of tasks that say one thing of a row."""
    head, smoothing = recipe.model.head, recipe.train.label_smoothing
    if isinstance(task, Embed) or (isinstance(task, Regress) and task.apart):
        if not isinstance(head, Embedder):
            what = task.kind if isinstance(task, Embed) else "regress of texts apart"
            yield Fault("model.head", f"= '{head.kind}': the task {what} needs 'embedder'")
    elif not isinstance(head, Classifier):
        yield Fault("model.head", f"= '{head.kind}': the task {task.kind} needs 'classifier'")
    elif isinstance(task, Regress) and head.labels != 1:
        yield Fault("model.head.labels", f"= {head.labels}: the task regress says one number")
    if recipe.model.shape == "encoder-decoder":
        yield Fault("model.decoder", f"the task {task.kind} reads each row once: leave out the decoder or the encoder")
    if not isinstance(recipe.batches, Padded):
        yield Fault("batches.kind", f"= '{recipe.batches.kind}': a label is of a whole row, which is 'padded'")
    if smoothing and not (isinstance(task, Classify) and task.separator is None):
        yield Fault("train.label_smoothing", f"= {smoothing}: is for one label of several, and here is no such choice")
