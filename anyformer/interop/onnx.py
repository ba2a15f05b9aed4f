"""Export models to ONNX, for onnxruntime and others: one graph for any batch size and any length.

    inputs    ids [batch, length], mask [batch, length] (1: a token, 0: padding, on either side)
              types [batch, length] where the model has token types
              of an encoder-decoder: source, source_mask, source_types, target, target_mask, target_types
              instead of ids, depending on the config: features [batch, length, size], images [batch, c, h, w]
    output    logits, hidden (without a head) or embeddings, as the model returns it

There is no KV cache: a decoder reads the complete text for every new token. A file is written only if onnxruntime's
outputs equal torch's.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anyformer.attention.layout import Layout
from anyformer.config import (
    Audio,
    ConfigError,
    Fault,
    Features,
    IdInput,
    Input,
    ModelConfig,
    Patches,
    Recurrent,
    StateMixer,
)
from anyformer.interop.weight_files import must_be_new, wrong
from anyformer.kernels.conventions import PADDING
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.merge import merge
from anyformer.runs.processes import workspace
from anyformer.runs.run import Run, writing

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TRACE_SIZES = {"batch": 3, "length": 11, "source_length": 13, "target_length": 11}  # any sizes would do
CHECK_SIZES = (1, 1, 1), (2, 7, 3), (4, 5, 19)  # batch, source's length (or the only one), target's
TOLERANCE = 1e-4  # absolute for values up to 1, relative above


def export_onnx(run: Run | Transformer, path: str | Path) -> Path:
    """Write a model in fp32, with adapters merged, as an ONNX file; above 1.5 GB the weights are in `<path>.data`."""
    path = Path(path)
    for taken in (path, _data(path)):
        must_be_new(taken, "file")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError([Fault("onnx", f"needs {', '.join(missing)}: pip install 'anyformer[export]'")])
    model = _plain(merge(run.model if isinstance(run, Run) else run))
    if found := list(_obstacles(model.config)):
        raise ConfigError(found)
    inputs = _inputs(model)
    with workspace(path) as temporary, writing(path):
        written = temporary / path.name  # under its own name: it names the file of its weights
        _write(model, inputs, written, path)
        _check(model, inputs, written, path)
        if (data := _data(written)).exists():
            os.rename(data, _data(path))
        os.rename(written, path)
    return path


def _plain(model: Transformer) -> Transformer:
    """Return the model in fp32 on the CPU, without a copy if it is already."""
    with torch.device("meta"):
        plain = Transformer(model.config)
    state = model.state_dict()
    if state.keys() != plain.state_dict().keys():
        raise ConfigError([Fault("weights", "are not those of the config: export a model before it is quantised")])
    plain.load_state_dict({name: x.detach().cpu().float() for name, x in state.items()}, assign=True)
    return plain.eval().requires_grad_(False)


def _obstacles(config: ModelConfig) -> Iterator[Fault]:
    for side, stack in config.stacks.items():
        for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
            for i, block in enumerate(blocks):
                if isinstance(block.mixer, Recurrent | StateMixer):
                    what = f"= '{block.mixer.kind}': a recurrence over any length cannot be exported as one graph"
                    yield Fault(f"{side}.{name}.{i}.mixer.kind", what)


# -- inputs and outputs -----------------------------------------------------------------------------------------------


class GraphInput(NamedTuple):
    """An input of the graph."""

    name: str
    sizes: tuple[str | int, ...]  # a name: of any size
    below: int  # integers below this; 0: floats

    def example(self, sizes: dict[str, int], rng: torch.Generator) -> Tensor:
        shape = [sizes[size] if isinstance(size, str) else size for size in self.sizes]
        return torch.randint(self.below, shape, generator=rng) if self.below else torch.randn(shape, generator=rng)


def _inputs(model: Transformer) -> list[GraphInput]:
    config = model.config
    if config.shape == "encoder-decoder":
        assert config.source is not None
        assert config.target is not None
        return [*_read(config.source, "source"), *_read(config.target, "target")]
    if config.image_tower is not None:
        raise ConfigError([Fault("image_tower", "ONNX export reads tokens only: this model also reads images")])
    return _read(config.last_input)


def _read(spec: Input, side: str = "") -> list[GraphInput]:
    """Return the graph inputs of one side; in an encoder-decoder, names and length have the side as prefix."""
    sizes, before = ("batch", f"{side}_length" if side else "length"), f"{side}_" if side else ""
    mask = GraphInput(f"{before}mask", sizes, 2)
    if spec.stream is not None:
        raise ConfigError([Fault("media", "ONNX export reads tokens only: this model also reads other segments")])
    match spec:
        case IdInput():
            types = [GraphInput(f"{before}types", sizes, spec.token_types)] if spec.token_types else []
            longest = spec.spelled_bytes
            spelled = [] if longest is None else [GraphInput("spelled", (*sizes, longest), 257)]
            return [GraphInput(side or "ids", sizes, spec.rows), mask, *types, *spelled]
        case Patches():
            return [GraphInput(side or "images", ("batch", *spec.shape), 0)]
        case Audio():
            return [GraphInput(side or "sounds", ("batch", f"{before}frames", spec.mels), 0)]
        case Features():
            return [GraphInput(side or "features", (*sizes, spec.size), 0), mask]
        case _:
            raise ConfigError([Fault(side or "source", f"= '{spec.kind}': ONNX export has no such input")])


def _output(model: Transformer) -> str:
    head = model.config.head
    return {"none": "hidden", "embedder": "embeddings"}.get(head.output, "potentials" if head.joint else "logits")


class OnnxGraph(nn.Module):
    """A model that takes padding masks instead of segments."""

    def __init__(self, model: Transformer, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        input_ = dict(zip(self.names, inputs, strict=True))

        def side(name: str, prefix: str = "") -> Inputs:
            mask = input_.get(f"{prefix}mask")
            layout = None if mask is None else _layout(mask)
            return Inputs(input_[name], layout, input_.get(f"{prefix}types"), input_.get("spelled"))

        if "target" in input_:
            return self.model(side("source", "source_"), side("target", "target_"))
        return self.model(side(self.names[0]))


def _layout(mask: Tensor) -> Layout:
    """Return the layout of rows with one segment each, positions from 0, and padding anywhere."""
    positions = (mask.cumsum(dim=1) - 1) * mask
    return Layout(positions, mask + PADDING, ordered=True, packed=False)


# -- writing and checking ---------------------------------------------------------------------------------------------


def _write(model: Transformer, inputs: list[GraphInput], written: Path, path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    examples = tuple(input_.example(TRACE_SIZES, rng) for input_ in inputs)
    named = [{i: size for i, size in enumerate(input_.sizes) if isinstance(size, str)} for input_ in inputs]
    dims = {name: torch.export.Dim(name) for name in TRACE_SIZES}
    shapes = tuple({i: dims[size] for i, size in sizes.items()} for sizes in named)
    names = [input_.name for input_ in inputs]
    with _quiet():
        with _as_fault(path, "torch cannot export this model"):
            program = torch.export.export(OnnxGraph(model, names), examples, dynamic_shapes=(shapes,))
            found = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=[_output(model)],
                dynamic_shapes=(tuple(named),),
                custom_translation_table=_translations(),
            )
        assert found is not None
        for node in found.model.graph.all_nodes():
            node.metadata_props.clear()  # lines of this program's source
        found.save(written)


def _translations() -> dict[Any, Any]:
    """Return translations of the ops of experts: a stable sort, and one matmul for each expert's rows."""
    from onnxscript import opset18

    op: Any = opset18

    def sort(x: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
        return op.TopK(x, size, axis=dim, largest=int(descending))  # stable

    def expert_matmul(x: Any, weight: Any, lengths: Any) -> Any:
        ends = op.CumSum(lengths, op.Constant(value_int=0))
        starts = op.Sub(ends, lengths)
        pieces = []
        for i in range(weight.shape[0]):
            at = op.Constant(value_ints=[i])
            rows = op.Slice(x, op.Gather(starts, at), op.Gather(ends, at), op.Constant(value_ints=[0]))
            matrix = op.Gather(weight, op.Constant(value_int=i))
            pieces.append(op.MatMul(rows, op.Transpose(matrix, perm=[1, 0])))
        return op.Concat(*pieces, axis=0)

    return {torch.ops.aten.sort.stable: sort, torch.ops.anyformer.expert_matmul.default: expert_matmul}


def _check(model: Transformer, inputs: list[GraphInput], written: Path, path: Path) -> None:
    """Raise unless onnxruntime's outputs equal torch's, for rows padded on either side."""
    import onnxruntime

    with _as_fault(path, "onnxruntime cannot read it"):
        quiet = onnxruntime.SessionOptions()
        quiet.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(written, quiet, providers=["CPUExecutionProvider"])
    rng = torch.Generator().manual_seed(1)
    ends = [limit for stack in (model.encoder, model.decoder) if stack is not None for limit, _ in stack.ends]
    for batch, *lengths in CHECK_SIZES:
        source, target = (min(length, *ends) if ends else length for length in lengths)
        sizes = {"batch": batch, "length": source, "source_length": source, "target_length": target}
        feed = {input_.name: input_.example(sizes, rng) for input_ in inputs}
        for mask in (x for name, x in feed.items() if name.endswith("mask")):
            mask.fill_(1)
            mask[0, : mask.shape[1] // 3] = 0
            mask[-1, mask.shape[1] - mask.shape[1] // 3 :] = 0
        with torch.no_grad():
            ours = OnnxGraph(model, list(feed))(*feed.values())
        with _as_fault(path, "onnxruntime cannot run it"):
            theirs = torch.from_numpy(session.run(None, {name: x.numpy() for name, x in feed.items()})[0])
        apart = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1))
        if not apart <= TOLERANCE:  # nor where it is NaN
            raise wrong(path, f"is not written: onnxruntime's outputs differ from torch's by {apart:.1e}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and logs of the exporter."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _as_fault(path: Path, what: str) -> Iterator[None]:
    """Turn any error of torch or onnxruntime, which have many types, into a fault of one line."""
    try:
        yield
    except Exception as error:
        raise wrong(path, f"is not written: {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _data(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")
