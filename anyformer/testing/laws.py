"""Laws of a part by itself: its config, weights, cost, gradients and inputs.

A law is a function that raises an `AssertionError`, or returns why it is not for this part.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from anyformer.config import Activation, ConfigError, FeedForward, Mixer, io
from anyformer.config.part import Part
from anyformer.nn.context import Tap
from anyformer.nn.heads import LossTarget
from anyformer.nn.init import allocate, initialise
from anyformer.nn.inspection.cache_growth import cache_growth
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.recipe.schedule import Schedule
from anyformer.testing.subject import LENGTH, ROWS, Subject, built, close, random_inputs

STEPS = (1e-6, 1e-4)  # of finite differences; one of them is enough, as the other may cross a kink


# -- configs and weights ----------------------------------------------------------------------------------------------


def config_survives(subject: Subject) -> None:
    """Its config is the same after writing and reading, with any value of each field."""
    for part in (subject.part, *_variants(subject.part)):
        data = {"kind": part.kind} | {name: getattr(part, name) for name in type(part).model_fields}
        for format in ("toml", "json"):
            try:
                read = io.loads(type(part), io.dumps(part, format), format)
            except ConfigError as error:
                raise AssertionError(f"{part!r} cannot be read back: {error}") from None
            assert (read, hash(read)) == (part, hash(part)), f"{part!r} is {read!r} after writing and reading {format}"
        assert all(getattr(part, name) == value for name, value in data.items())


def _variants(part: Part) -> Iterator[Part]:
    """Yield the part with another value of each field, where one is found."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        for other in _others(value):
            try:
                varied = io.build(type(part), {**part.model_dump(), name: other})
            except ConfigError:
                continue
            kept = getattr(varied, name)
            assert kept == other, f"{name} = {other!r} becomes {kept!r}"
            yield varied
            break


def _others(value: Any) -> list[Any]:
    """Return other values that a field with this one may have."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value]
        case float():
            return [value / 2]
        case None:
            return [1, 0.5, True]
        case _:
            return []


def builds_on_meta(subject: Subject) -> None:
    """It is built on the meta device, then initialised: by the seed alone, and no weight is left out."""
    with torch.device("meta"):
        model = Transformer(subject.config)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, x in tensors.items():
        assert x.device.type == "meta", f"{name} is made on {x.device.type}: leave the device out"
    allocate(model, "cpu")
    for x in [*model.parameters(), *model.buffers()]:
        if x.is_floating_point():
            x.data.fill_(torch.nan)
    first = _initialised(model, subject)
    for name, x in first.items():
        assert not x.is_floating_point() or bool(x.isfinite().all()), (
            f"{name} is not initialised: give its module a `reset`"
        )
    for name, x in _initialised(model, subject).items():
        assert torch.equal(x, first[name]), f"{name} differs from one initialisation with a seed to the next"


def _initialised(model: Transformer, subject: Subject) -> dict[str, Tensor]:
    torch.manual_seed(3)
    initialise(model, subject.config.init, subject.config.width)
    return {name: x.detach().clone() for name, x in [*model.named_parameters(), *model.named_buffers()]}


def weights_are_saved(subject: Subject) -> None:
    """A model with the same state dict has the same outputs."""
    other = built(subject.config, 7)
    other.load_state_dict(subject.model.state_dict())
    with torch.no_grad():
        close(other(subject.ids), subject.out, "with the same state dict, another model has other outputs")


def is_counted(subject: Subject) -> None:
    """`cost`, `matrices` and `stores` are those of the built model: parameters, FLOPs, cache, linear layers."""
    counted = count(subject.config, subject.config.last_input.length or LENGTH, batch=ROWS, bytes_per_value=8)
    own = sum(p.numel() for p in subject.model.parameters())
    assert counted.parameters == own, f"it counts {counted.parameters} parameters of {own}"
    if isinstance(subject.part, Mixer | FeedForward):
        for module in subject.modules(subject.model):
            for matrix in subject.part.matrices(subject.config.width):
                _check_matrix(module, matrix.name, matrix.inputs, matrix.outputs)
    if subject.generates and not subject.model.new_cache(1, 1).recomputes:
        used = cache_growth(subject.model, LENGTH, batch=ROWS)[-1]
        assert counted.cache_bytes == used, f"it counts {counted.cache_bytes} bytes of cache, and takes {used}"
    if isinstance(subject.part, Mixer) and subject.part.has_state:
        return  # chunks of a recurrence are longer than this text
    model = subject.copy()
    model.backend = "eager"  # the counter does not know fused kernels of the CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(subject.ids)
    flops = counter.get_total_flops()
    assert flops <= counted.flops <= 1.5 * flops, f"it counts {counted.flops:,} FLOPs, and matmuls take {flops:,}"


def _check_matrix(module: nn.Module, name: str, inputs: int, outputs: int) -> None:
    try:
        weight = module.get_submodule(name).weight
    except AttributeError:
        raise AssertionError(f"`matrices` names {name}, and {type(module).__name__} has no such layer") from None
    if isinstance(weight, Tensor) and weight.dim() == 2:
        sizes = list(weight.shape)
        assert sizes == [outputs, inputs], f"`matrices` has {name} from {inputs} to {outputs}, its weight is {sizes}"


def factors_are_right(subject: Subject) -> None:
    """The factors of a schedule are numbers that are not negative, of any number of steps; cycles end with the last."""
    assert isinstance(subject.part, Schedule)
    for steps in (1, 2, 10, 1000):
        factors = [subject.part.at(step, steps) for step in range(1, steps + 1)]
        wrong = next((x for x in factors if not math.isfinite(x) or x < 0), None)
        assert wrong is None, f"of {steps} steps, step {factors.index(wrong) + 1} has the factor {wrong}"
        ends = subject.part.cycle_ends(steps)
        assert ends == sorted(set(ends)), f"the cycles of {steps} steps end at {ends}, which is no order of steps"
        assert ends[-1:] == [steps], f"the cycles of {steps} steps end at {ends}, not at the last step"


# -- gradients and values ---------------------------------------------------------------------------------------------


def gradients_are_right(subject: Subject) -> None:
    """The gradient of each weight is that of finite differences."""
    model = subject.copy()
    goal = torch.randn(subject.out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)

    def loss() -> Tensor:
        out: Tensor = model(subject.ids)
        return (out * goal).sum()

    loss().backward()
    named: dict[str, Tensor] = dict(model.named_parameters())
    for name, parameter in named.items():
        assert parameter.grad is not None, f"{name} has no gradient: the output does not depend on it"
    if not _differs(loss, list(named.values())):
        return
    wrong = [f"{name} {found}" for name, parameter in named.items() if (found := _differs(loss, [parameter]))]
    assert not wrong, f"the gradients of weights are not those of finite differences: {', '.join(wrong)}"


@torch.no_grad()
def _differs(loss: Callable[[], Tensor], parameters: list[Tensor]) -> str:
    """Return the derivative along a random direction by gradients and by finite differences, where they differ."""
    random, expected, found = torch.Generator().manual_seed(2), 0.0, list[float]()
    directions = [torch.randn(p.shape, generator=random, dtype=p.dtype) for p in parameters]
    for parameter, direction in zip(parameters, directions, strict=True):
        assert parameter.grad is not None
        expected += float((parameter.grad * direction).sum())

    def add(step: float) -> None:
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.add_(direction, alpha=step)

    for step in STEPS:
        values = list[float]()
        for move in (step, -2 * step):
            add(move)
            values.append(float(loss()))
        add(step)
        found.append((values[0] - values[1]) / (2 * step))
    near = min(found, key=lambda x: abs(x - expected))
    right = abs(near - expected) <= 1e-3 * (abs(near) + abs(expected)) + 1e-6
    return "" if right else f"({expected:.4g}, not {near:.4g})"


def trains(subject: Subject) -> None:
    """In training mode, without dropout, gradients are finite and the same each time."""
    found = list[list[Tensor]]()
    for _ in range(2):
        model = subject.copy().train()
        model(subject.ids).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(bool(grad.isfinite().all()) for grad in found[0]), "not all gradients are finite"
    assert all(map(torch.equal, *found)), "gradients differ from one pass to the next"


def repeats(subject: Subject) -> None:
    """The same input gives the same output, whatever was read before."""
    with torch.no_grad():
        subject.model(random_inputs(subject.config, 5, 2, 4))
        again = subject.model(subject.ids)
        assert torch.equal(again, subject.out), "the same input gives another output the second time"
        copied = subject.model(subject.ids, taps=Tap(lambda name, x: x.clone()))
        close(copied, subject.out, "a tap that changes nothing changes the output")


def output_is_as_said(subject: Subject) -> None:
    """The output has the values that the head says, for each token or row; a loss over tokens is the cross-entropy."""
    head, out, ids = subject.config.head, subject.out, subject.ids
    module = subject.model.target or subject.model.source
    assert module is not None
    each = module.measure(ids)[: 1 if head.per_row else 2]
    said = head.values(subject.config.width, subject.config.vocab)
    assert out.shape[: len(each)] == each, f"the output is {list(out.shape)}, and not of {each} rows or tokens"
    assert out[(0,) * len(each)].numel() == said, f"the output is {list(out.shape)}, and `values` are {said}"
    if head.predicts_tokens:
        at = torch.tensor([2, 5, 7])
        for target in (LossTarget(ids), LossTarget(ids.flatten()[None, at], at=at)):
            loss = subject.model(ids, loss_target=target)
            logits = target.rows_of(out).flatten(0, 1).float()
            expected = F.cross_entropy(logits, target.labels.flatten(), reduction="sum")
            close(loss.detach(), expected, "the loss is not the cross-entropy of the logits")


def inputs_are_left_alone(subject: Subject) -> str | None:
    """It changes no input in place, takes inputs of any strides, and keeps their data type."""
    if isinstance(subject.part, Activation):
        _check_function(subject.part)
        return None
    modules = list(subject.modules(subject.model))
    if not modules:
        return "it has no module of its own"
    for module in modules:
        with _hooked(module, _unchanged, strided=False), torch.no_grad():
            subject.model(subject.ids)
        with _hooked(module, None, strided=True), torch.no_grad():
            close(subject.model(subject.ids), subject.out, "for inputs that are not contiguous, the output differs")
    for dtype in (torch.float32, torch.bfloat16):
        model = subject.copy().to(dtype)
        with torch.no_grad():
            for module in subject.modules(model):
                with _hooked(module, _same_dtype, strided=False):
                    model(subject.ids)
    return None


def _check_function(part: Activation) -> None:
    function = part.function()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    before, y = x.clone(), function(x)
    assert torch.equal(x, before), "it changes its input in place"
    close(function(x.mT.contiguous().mT), y, "for inputs that are not contiguous, the output differs")
    close(torch.stack([function(v) for v in x.flatten()]).view_as(x), y, "it is no function of each number alone")
    for dtype in (torch.float32, torch.bfloat16):
        found = function(x.to(dtype)).dtype
        assert found == dtype, f"of {dtype} it makes {found}"


def _unchanged(before: Tensor, x: Tensor, y: Any) -> None:
    assert torch.equal(before, x), "it changes its input in place"


def _same_dtype(before: Tensor, x: Tensor, y: Any) -> None:
    assert not isinstance(y, Tensor) or y.dtype == x.dtype, f"of {x.dtype} it makes {y.dtype}"


@contextmanager
def _hooked(module: nn.Module, check: Any, strided: bool) -> Iterator[None]:
    """Check a module's input and output; `strided`: give it inputs of the same values that are not contiguous."""
    before = list[Tensor]()

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        before.append(x.clone())
        return (x.mT.contiguous().mT if strided else x, *rest)

    def leave(_: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        if check is not None:
            check(before.pop(), args[0], y)

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
