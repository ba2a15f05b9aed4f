"""Models for each task, as commented lines of a recipe. Imports no torch.

The sizes are those of the recipes that come with anyformer, which were tuned on data of similar size.
"""

from dataclasses import dataclass
from typing import NamedTuple

from anyformer.config import ModelConfig
from anyformer.recipe import Lengths, Task
from anyformer.training.new_recipe.texts import MAX_PIECES, MAX_PREDICTED_ON_CPU, TextStats, pieces, whole_words, words

SMALL, LARGE = 20_000, 100_000  # rows
MAX_CLASSIFIED = 2048  # tokens of a text that a classifier reads; longer ones are cut
MAX_CRF_LABELS = 40  # a CRF has a score for each pair of labels
GPU_FACTOR = 4  # tokens in the batch on a GPU for which the learning rates were tuned ÷ those on a CPU
GPU_TOKENS = 2**15  # of a batch on a GPU: enough work for its kernels
# batches of an epoch on a GPU, from scratch and in fine-tuning: of few rows, batches are small
MIN_BATCHES = {False: 16, True: 64}
ROW = 128  # tokens of a packed row, for which there is a kernel of short attention
LONG_ROW = 512  # tokens of a packed row from which attention reads each document by itself
MAX_MASKED_ROW = 512  # tokens of a row of masked tokens
EPOCHS = {"seq2seq": 40, "lm": 20, "mlm": 20, "classify": 15, "tag": 20, "regress": 20, "embed": 20}
FINE_TUNING_EPOCHS = 4


class RecipeLine(NamedTuple):
    """A setting of a recipe, and why it has this value."""

    key: str
    value: str
    why: str = ""


Sections = dict[str, list[RecipeLine]]


def as_toml(sections: Sections) -> str:
    """Return a recipe with the reasons as comments."""
    text = ""
    for name, lines in sections.items():
        text += f"\n[{name}]\n" * bool(name)
        text += "".join(f"{line.key} = {line.value}" + f"  # {line.why}" * bool(line.why) + "\n" for line in lines)
    return text


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data, the task and the machine."""

    task: Task
    inputs: TextStats
    outputs: TextStats | None  # targets of seq2seq
    rows: int
    labels: int  # different labels of the rows; 0: none
    gpu: bool
    first: tuple[str, ModelConfig] | None = None  # the run that fine-tuning starts from
    lora: bool = False
    lengths: Lengths | None = None  # in tokens; None: they are not known yet

    @property
    def compares(self) -> bool:
        """True if the model compares vectors of texts: it is wide, and has one layer."""
        return self.task.kind == "embed" or (self.task.kind == "regress" and self.pairs)

    @property
    def width(self) -> int:
        return 256 if self.gpu or self.compares else 128

    @property
    def depth(self) -> int:
        if self.task.kind in ("lm", "mlm"):
            return 6 if self.gpu else 4
        return 4 if self.gpu else 2

    @property
    def layers(self) -> str:
        """The number of layers, of both stacks where there are two."""
        if self.compares:
            return "1"
        return f"{self.depth} + {self.depth}" if self.task.kind == "seq2seq" else str(self.depth)

    @property
    def amount(self) -> str:
        """The size of the data in words."""
        return f"{self.inputs.characters:,} characters" if self.task.kind == "lm" else f"{self.rows:,} rows"

    @property
    def pairs(self) -> bool:
        return bool(getattr(self.task, "pairs", False))

    @property
    def dropout(self) -> float:
        return 0.3 if self.rows < SMALL else 0.2 if self.rows < LARGE else 0.1

    @property
    def usual_tokens(self) -> int:
        """Tokens of the batch for which the learning rate was tuned."""
        if self.task.kind == "lm":
            return 64 * 256 if self.gpu else 8 * 128 if self.first else 12 * 128
        usual = 1024 if self.first else 4096 if self.task.kind == "embed" else 2048
        return usual * (GPU_FACTOR if self.gpu else 1)

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        if not self.gpu:
            return self.usual_tokens
        if self.lengths is None:
            return GPU_TOKENS
        most = self.lengths.total // MIN_BATCHES[self.first is not None]
        least = max(GPU_FACTOR * 256, 0 if self.task.kind == "lm" else self.lengths.longest)
        return max(_next_power(least), min(GPU_TOKENS, _next_power(most + 1) // 2))

    @property
    def packed_row(self) -> int | None:
        """Tokens of a row that holds several texts; None: each row holds one."""
        one_output = self.task.kind in ("classify", "regress", "embed") or self.has_crf
        if not self.gpu or self.lengths is None or self.first or one_output or self.task.kind == "lm":
            return None
        longest = self.lengths.longest
        if self.task.kind == "mlm":
            longest = min(longest, MAX_MASKED_ROW)
        return ROW if longest <= ROW else max(LONG_ROW, _next_power(longest))

    @property
    def has_crf(self) -> bool:
        return self.task.kind == "tag" and getattr(self.task, "spans", False) and self.labels <= MAX_CRF_LABELS

    @property
    def attention(self) -> str:
        """Attention of a new model; kernels that read each document of a long row by itself drop no weights."""
        return "{ heads = 4 }" if (self.packed_row or 0) >= LONG_ROW else "{ heads = 4, dropout = 0.1 }"

    @property
    def epochs(self) -> int:
        return FINE_TUNING_EPOCHS if self.first else EPOCHS[self.task.kind]

    @property
    def best(self) -> str:
        match self.task.kind:
            case "classify":
                return "accuracy"
            case "tag":
                return "span_f1" if getattr(self.task, "spans", False) else "accuracy"
            case "regress":
                return "spearman"
            case "embed":
                return "mrr"
            case "seq2seq" if "chrf" in getattr(self.task, "metrics", ()):
                return "chrf"  # texts are often better where the loss is no longer lowest
            case _:
                return "loss"


def _next_power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def max_length(facts: DataFacts) -> int:
    """Return how many tokens of a text a classifier reads."""
    limits = [stack.limit for stack in facts.first[1].stacks.values()] if facts.first else []
    return min([MAX_CLASSIFIED, facts.tokens, *(n for n in limits if n is not None)])


def tokenizer(facts: DataFacts) -> RecipeLine:
    """Return the tokenizer that fits the texts of a task."""
    if facts.first is not None:
        return RecipeLine("tokenizer", '"run"', "that of the run")
    match facts.task.kind:
        case "tag":
            why = "the file has words; rare ones are read by their spelling, too"
            return RecipeLine("tokenizer", whole_words(facts.inputs), why)
        case "regress" if facts.pairs:
            return RecipeLine("tokenizer", '"chars"', "rows are few: letters are seen more often than words")
        case "classify" | "regress":
            return RecipeLine("tokenizer", *words(facts.inputs))
        case "lm":
            if facts.inputs.characters < 4_000_000:
                return RecipeLine(
                    "tokenizer", '"chars"', f"{facts.inputs.characters:,} characters: few enough to read one by one"
                )
        case "seq2seq" if _is_spelling(facts):
            return RecipeLine("tokenizer", '"chars"', "short strings without spaces: letters to letters")
    return RecipeLine("tokenizer", *pieces(facts.inputs, MAX_PIECES if facts.gpu else MAX_PREDICTED_ON_CPU))


def _is_spelling(facts: DataFacts) -> bool:
    sides = [side for side in (facts.inputs, facts.outputs) if side is not None]
    return all(side.mean_length < 25 and side.words < 2 for side in sides)


def model(facts: DataFacts) -> Sections:
    """Return the sections `model` and below."""
    if facts.first is not None:
        return _from_run(facts, *facts.first)
    match facts.task.kind:
        case "seq2seq":
            return _encoder_decoder(facts)
        case "lm":
            return _decoder(facts)
        case "regress" if facts.pairs:
            return _similarity(facts)
        case "embed":
            return _bag(facts)
        case _:
            return _encoder(facts)


def head(facts: DataFacts) -> RecipeLine:
    """Return the head of a task."""
    pool = "mean"
    if facts.first is not None and facts.first[1].head.output == "embedder":
        pool = facts.first[1].head.pooling or pool
    drop = 0.1 if facts.first else 0.3
    match facts.task.kind:
        case "classify":
            value = f'{{ kind = "classifier", labels = "auto", pool = "{pool}", dropout = {drop} }}'
            return RecipeLine("head", value, f"one score for each of the {facts.labels} labels")
        case "regress" if facts.pairs:
            return RecipeLine(
                "head", f'{{ kind = "embedder", pool = "{pool}" }}', "the number is the cosine of two vectors"
            )
        case "regress":
            value = f'{{ kind = "classifier", labels = 1, pool = "{pool}", dropout = {drop} }}'
            return RecipeLine("head", value, "one number")
        case "tag":
            crf = str(facts.has_crf).lower()
            value = f'{{ kind = "token_labels", labels = "auto", crf = {crf}, dropout = {drop} }}'
            why = "a CRF also scores which tag follows which" if facts.has_crf else "one label for each word"
            return RecipeLine("head", value, why)
        case "embed":
            return RecipeLine("head", f'{{ kind = "embedder", pool = "{pool}" }}', "the vector of a text")
        case "mlm":
            return RecipeLine("head", '"masked_lm"', "predicts masked tokens")
        case _:
            return RecipeLine("head", '"lm"', "predicts the next token")


def _from_run(facts: DataFacts, path: str, config: ModelConfig) -> Sections:
    lines = [RecipeLine("from", f'"{path}"', "body and weights of this run; only what differs is below")]
    if facts.task.kind not in ("lm", "seq2seq"):
        lines.append(head(facts))
    if facts.lora:
        value = '{ kind = "lora", rank = 8, alpha = 16.0, dropout = 0.05 }'
        lines.append(RecipeLine("adapter", value, "trains small matrices beside the weights, which stay as they are"))
    for side, stack in config.stacks.items():
        drops = "dropout = 0.1, mixer.dropout = 0.1"
        if not all(block.attention for block in stack.blocks):
            drops = "dropout = 0.1"
        if not any(block.dropout for block in stack.blocks):
            lines.append(RecipeLine(f"{side}.blocks", f"{{ {drops} }}", "against overfitting"))
    return {"model": lines}


def _block(facts: DataFacts) -> str:
    return f'feedforward = {{ kind = "plain", width = {2 * facts.width} }}, dropout = {facts.dropout}'


def _blocks(block: str, why: str = "", norm: str = "layer") -> list[RecipeLine]:
    return [RecipeLine("final_norm", f'"{norm}"'), RecipeLine("blocks", f"{{ {block} }}", why)]


def _input(facts: DataFacts, extra: str = "") -> str:
    return f'{{ scale = "sqrt_width", dropout = {facts.dropout}, pad = 0{extra} }}'


def _sizes(facts: DataFacts) -> list[RecipeLine]:
    where = "a GPU" if facts.gpu else "a CPU"
    return [
        RecipeLine("width", str(facts.width), f"of each vector: small, for {facts.rows:,} rows and {where}"),
        RecipeLine("init", '"xavier"', "random weights at the start"),
        head(facts),
    ]


def _encoder_decoder(facts: DataFacts) -> Sections:
    attention = facts.attention
    why = f"{facts.rows:,} rows: against overfitting" if facts.dropout > 0.1 else "many rows: little is needed"
    return {
        "model": [
            *_sizes(facts),
            RecipeLine("tie", '"all"', "one table of vectors for source, target and output"),
            RecipeLine("source", _input(facts), why),
            RecipeLine("target", _input(facts)),
        ],
        "model.encoder": [
            RecipeLine("depth", str(facts.depth), "layers that read the source"),
            RecipeLine("position", '"sinusoidal"', "of any length"),
            *_blocks(f"mixer = {attention}, {_block(facts)}"),
        ],
        "model.decoder": [
            RecipeLine("depth", str(facts.depth), "layers that write the target"),
            RecipeLine("position", '"sinusoidal"'),
            *_blocks(f"mixer = {attention}, cross = {attention}, {_block(facts)}", "cross: attention to the source"),
        ],
    }


def _decoder(facts: DataFacts) -> Sections:
    block = 'mixer = { heads = 4 }, feedforward = { kind = "plain", activation = "gelu", bias = false }, norm = "rms"'
    drop = 0.1 if facts.inputs.characters < 5_000_000 and facts.gpu else 0.0
    return {
        "model": [
            RecipeLine("width", str(facts.width), "of each vector: small, for " + ("a GPU" if facts.gpu else "a CPU")),
            head(facts),
            RecipeLine("tie", '"output"', "one table of vectors for input and output"),
            RecipeLine("init", '{ kind = "normal", residual = true }', "random weights at the start, as in GPT-2"),
            RecipeLine("target", "{}"),
        ],
        "model.decoder": [
            RecipeLine("depth", str(facts.depth), "layers"),
            RecipeLine("position", '"rotary"', "relative positions"),
            *_blocks(f"{block}, dropout = {drop}", norm="rms"),
        ],
    }


def _encoder(facts: DataFacts) -> Sections:
    spelling = ""
    mixer, why = facts.attention, "attention: every token sees every other"
    position = RecipeLine("position", '"rotary"', "relative positions")
    if facts.task.kind == "tag":
        spelling = ', spelling = { kind = "bytes", width = 32, channels = 128, kernel = 5, longest = 16 }'
    elif facts.task.kind == "classify" and facts.inputs.is_cjk:
        mixer, why = '{ kind = "convolution", width = 5 }', "neighbouring pieces: better than attention on few rows"
        position = RecipeLine("position", '"none"', "convolutions see the order")
    lines = _sizes(facts)
    if facts.task.kind == "mlm":
        lines.append(RecipeLine("tie", '"output"', "one table of vectors for input and output"))
    lines.append(RecipeLine("source", _input(facts, spelling), f"{facts.rows:,} rows: dropout against overfitting"))
    return {
        "model": lines,
        "model.encoder": [
            RecipeLine("depth", str(facts.depth), "layers"),
            position,
            *_blocks(f"mixer = {mixer}, {_block(facts)}", why),
        ],
    }


def _similarity(facts: DataFacts) -> Sections:
    wide = "of each vector: wide, so that random vectors are nearly orthogonal"
    shallow = "shallow: similarity of spelling ranks pairs already before training"
    return _one_layer(facts, 'mixer = { kind = "convolution", width = 3 }, feedforward = "none"', wide, shallow)


def _bag(facts: DataFacts) -> Sections:
    shallow = "shallow: a mean of tokens is hard to beat on few rows"
    layer = 'mixer = "none", feedforward = { kind = "plain", width = 512 }'
    return _one_layer(facts, layer, "of each vector", shallow)


def _one_layer(facts: DataFacts, layer: str, wide: str, shallow: str) -> Sections:
    """Return an encoder of one layer, with the reasons for its width and depth."""
    return {
        "model": [
            RecipeLine("width", str(facts.width), wide),
            RecipeLine("init", '"xavier"'),
            head(facts),
            RecipeLine("source", "{ dropout = 0.2, pad = 0 }"),
        ],
        "model.encoder": [
            RecipeLine("depth", "1", shallow),
            RecipeLine("blocks", f"{{ {layer}, dropout = 0.2 }}"),
        ],
    }
