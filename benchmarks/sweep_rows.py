"""Find the fastest tile sizes of the one-row matmul kernels: `python -m benchmarks.sweep_rows [--bits 8 4 16]`.

They are timed in a chain of layers, as a decode step runs them: one CUDA graph, each kernel launched before the last
has ended. A layer is qkv (with norm), out (with residual), gate and up (with norm and gate) and down (with residual) of
a Llama with 1.2 B weights, without attention: `out` reads the first values of qkv. Layers share no weights, so that
none is in the L2 cache. All candidates are compiled first, by several processes, into Triton's cache on disk.
Then the tile sizes of one matrix are changed at a time, those of the others being the best so far.
"""

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from anyformer.kernels import int4, matmul
from anyformer.kernels.matmul import RowFusion, TileShape
from anyformer.nn.transforms.rounding import pack_nibbles, round_off

WIDTH, FF = 2048, 8192
MATRICES = {"gate_up": (2 * FF, WIDTH), "down": (WIDTH, FF), "qkv": (3072, WIDTH), "out": (WIDTH, WIDTH)}
BYTES_PER_THREAD = range(32, 65)  # of the weights that a thread loads at once
MOST_BYTES_AHEAD = 256
LAYERS, ROUNDS, REPLAYS, FINALISTS = 16, 15, 3, 4

Weight = tuple[Tensor, Tensor | None]  # and the scales
Job = tuple[int, str, TileShape]


def rounded(bits: int, w: Tensor) -> Weight:
    if bits == 16:
        return w.bfloat16(), None
    r = round_off(w, bits, 32 if bits == 4 else None)
    return (r.q[:, 0], r.scale[:, 0]) if bits == 8 else (int4.interleave(pack_nibbles(r.q)), r.scale)


def multiply(bits: int, weight: Weight, x: Tensor, shape: TileShape, fusion: RowFusion) -> Tensor:
    w, scale = weight
    out = matmul.row_like(x, w, scale, None, *fusion)
    if bits == 4:
        assert scale is not None
        int4.launch(x, w, scale, None, out, shape, fusion)
    else:
        matmul.launch(x, w, scale, None, out, shape, fusion)
    return out


def fusion_of(name: str, norm: Tensor, residual: Tensor) -> RowFusion:
    return RowFusion(residual=residual) if name in ("out", "down") else RowFusion(norm, 1e-5, name == "gate_up")


class Layer:
    """Random weights of one layer."""

    def __init__(self, bits: int):
        self.bits, self.norm = bits, torch.rand(WIDTH, device="cuda").bfloat16() + 0.5
        self.weights = {
            name: rounded(bits, torch.randn(n, k, device="cuda") * k**-0.5) for name, (n, k) in MATRICES.items()
        }

    def __call__(self, x: Tensor, shapes: dict[str, TileShape]) -> Tensor:
        def run(name: str, given: Tensor, residual: Tensor) -> Tensor:
            fusion = fusion_of(name, self.norm, residual)
            return multiply(self.bits, self.weights[name], given, shapes[name], fusion)

        x = run("out", run("qkv", x, x)[..., :WIDTH], x)
        return run("down", run("gate_up", x, x), x)


def microseconds(layers: list[Layer], shapes: dict[str, TileShape]) -> float:
    """Return the median time of a layer in a captured chain."""
    x = torch.randn(1, 1, WIDTH, device="cuda", dtype=torch.bfloat16)

    def chain() -> Tensor:
        y = x
        for layer in layers:
            y = layer(y, shapes)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / REPLAYS / len(layers))
    return statistics.median(found)


def candidates(bits: int, name: str) -> Iterator[TileShape]:
    _, k = MATRICES[name]
    if bits == 4:
        for rows, warps, per_warp in itertools.product((2, 4, 8, 16), (1, 2, 4, 8), (512, 1024)):
            if warps * per_warp <= k <= 8 * warps * per_warp:
                yield TileShape(rows, warps * per_warp, warps)
        return
    for rows, columns, warps in itertools.product((2, 4, 8), (512, 1024, 2048), (1, 2, 4, 8)):
        blocks, bytes_per_thread = k // columns, rows * columns * bits // 8 // (32 * warps)
        if bytes_per_thread in BYTES_PER_THREAD:
            for ahead in sorted({1, min(4, blocks)}):
                if ahead * bytes_per_thread <= MOST_BYTES_AHEAD:
                    yield TileShape(rows, columns, warps, True, ahead)


@torch.no_grad()
def compile_one(job: Job) -> None:
    bits, name, shape = job
    n, k = MATRICES[name]
    x, norm, residual = (torch.zeros(1, 1, size, device="cuda").bfloat16() for size in (k, WIDTH, WIDTH))
    fusion = fusion_of(name, norm.flatten(), residual)
    multiply(bits, rounded(bits, torch.zeros(n, k, device="cuda")), x, shape, fusion)
    torch.cuda.synchronize()


@torch.no_grad()
def sweep(bits: int) -> None:
    torch.manual_seed(0)
    layers = [Layer(bits) for _ in range(LAYERS)]
    shapes = {
        name: int4.shape_of(n, k) if bits == 4 else matmul.shape_of(layers[0].weights[name][0])
        for name, (n, k) in MATRICES.items()
    }
    read = sum(x.nbytes for weight in layers[0].weights.values() for x in weight if x is not None)
    print(f"{bits} bits, {read / 1e6:.1f} MB: {microseconds(layers, shapes):.2f} us a layer", flush=True)
    for name in MATRICES:
        tried = sorted((microseconds(layers, {**shapes, name: shape}), shape) for shape in candidates(bits, name))
        final = {shapes[name], *(shape for _, shape in tried[:FINALISTS])}
        best, shapes[name] = min((microseconds(layers, {**shapes, name: shape}), shape) for shape in final)
        print(f"{bits} bits, {name}: {best:.2f} us with {shapes[name]}, the best of {len(tried)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4, 16], choices=[8, 4, 16])
    parser.add_argument("--processes", type=int, default=14, help="for compiling")
    given = parser.parse_args()
    jobs = [(bits, name, shape) for bits in given.bits for name in MATRICES for shape in candidates(bits, name)]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        pool.map(compile_one, jobs, chunksize=2)
    for bits in given.bits:
        sweep(bits)


if __name__ == "__main__":
    main()
