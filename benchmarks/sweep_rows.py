"""Sweep tile sizes of the one-row kernels in a chain of layers, as a decode step runs them (CUDA graph, dependent launch).

    PYTHONPATH=<worktree> python sweep_rows.py [--bits 8 4 16] [--layers 16] [--processes 14]

Each layer is qkv (norm), out (residual), gate and up (norm, gate) and down (residual) of the Llama of 1.2 B weights, with
weights of its own, so that none is in the L2 cache. Attention is left out: `out` reads the first 2,048 values of qkv.
All candidates are compiled first, by several processes, into Triton's cache on disk. Then the tile sizes of one matrix
are changed at a time, all others staying at the best so far (coordinate descent). The chain is also timed without fusion:
norm, gate and sum are kernels of Inductor with dependent launch, as in a compiled step.
"""

import argparse
import itertools
import multiprocessing
import time

import torch
from torch.nn import functional as F

from anyformer.kernels import int4, matmul
from anyformer.kernels.matmul import RowFusion, Shape
from anyformer.transforms.rounding import pack_nibbles, round_off

WIDTH, FF = 2048, 8192
MATRICES = {"gate_up": (2 * FF, WIDTH), "down": (WIDTH, FF), "qkv": (3072, WIDTH), "out": (WIDTH, WIDTH)}


def multiply(bits, weight, x, shape, fusion=RowFusion()):
    w, scale = weight
    out = matmul.row_like(x, w, scale, None, *fusion)
    (int4 if bits == 4 else matmul).launch(x, w, scale, None, out, shape, fusion)
    return out


def rounded(bits, w):
    if bits == 16:
        return w.bfloat16(), None
    r = round_off(w, bits, 32 if bits == 4 else None)
    return (r.q[:, 0], r.scale[:, 0]) if bits == 8 else (int4.interleave(pack_nibbles(r.q)), r.scale)


class Layer:
    def __init__(self, bits):
        self.bits = bits
        self.norms = [torch.rand(WIDTH, device="cuda").bfloat16() + 0.5 for _ in range(2)]
        self.weights = {
            name: rounded(bits, torch.randn(n, k, device="cuda") * k**-0.5) for name, (n, k) in MATRICES.items()
        }

    def fusions(self, x):
        norm, other = (RowFusion(weight, 1e-5) for weight in self.norms)
        add = RowFusion(residual=x)
        return {"qkv": norm, "out": add, "gate_up": other._replace(gated=True), "down": add}

    def fused(self, x, shapes):
        def step(name, x, residual):
            return multiply(self.bits, self.weights[name], x, shapes[name], self.fusions(residual)[name])

        heads = step("qkv", x, x)[..., :WIDTH]
        x = step("out", heads, x)
        return step("down", step("gate_up", x, x), x)

    def apart(self, x, shapes):
        def step(name, x):
            return multiply(self.bits, self.weights[name], x, shapes[name])

        x, y = x if isinstance(x, tuple) else (x, torch.zeros_like(x))
        x, h = add_norm(x, y, self.norms[0])
        x, h = add_norm(x, step("out", step("qkv", h)[..., :WIDTH]), self.norms[1])
        return x, step("down", gate(step("gate_up", h)))


def add_norm(x, y, weight):
    x = x + y
    return x, F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def gate(y):
    a, b = y.chunk(2, -1)
    return F.silu(a) * b


def microseconds(layers, shapes, way="fused", rounds=25):
    """Median time of a captured chain, per layer."""
    x = torch.randn(1, 1, WIDTH, device="cuda", dtype=torch.bfloat16)

    def chain():
        y = x
        for layer in layers:
            y = getattr(layer, way)(y, shapes)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / 3 / len(layers))
    return sorted(found)[len(found) // 2]


def candidates(bits, k):
    if bits == 4:
        for rows, warps, per_warp in itertools.product((2, 4, 8, 16), (1, 2, 4, 8), (512, 1024)):
            if warps * per_warp <= k and k <= 8 * warps * per_warp:
                yield Shape(rows, warps * per_warp, warps)
        return
    size = 2 if bits == 16 else 1
    for rows, columns, warps in itertools.product((2, 4, 8), (512, 1024, 2048), (1, 2, 4, 8)):
        blocks, per_thread = k // columns, rows * columns * size // (32 * warps)
        if 32 <= per_thread <= 64 or (per_thread == 16 and rows == 2):
            for ahead in sorted({1, blocks} | ({4} if blocks > 4 else set())):
                if ahead * per_thread <= 256:
                    yield Shape(rows, columns, warps, True, ahead)
                    if ahead == blocks:
                        yield Shape(rows, columns, warps, False, ahead)


def compile_one(job):
    bits, name, shape = job
    n, k = MATRICES[name]
    with torch.no_grad():
        if (bits, name) not in compiled:
            compiled[bits, name] = rounded(bits, torch.zeros(n, k, device="cuda"))
        x, y = (torch.zeros(1, 1, size, device="cuda", dtype=torch.bfloat16) for size in (k, WIDTH))
        norm = RowFusion(torch.zeros(WIDTH, device="cuda", dtype=torch.bfloat16), 1e-5, name == "gate_up")
        try:
            fusion = RowFusion(residual=y) if name in ("out", "down") else norm
            multiply(bits, compiled[bits, name], x, shape, fusion)
            torch.cuda.synchronize()
            return job, True
        except Exception as error:  # e.g. out of registers
            print(name, shape, error, flush=True)
            return job, False


compiled = {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4, 16])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--processes", type=int, default=14)
    given = parser.parse_args()
    jobs = [
        (bits, name, shape) for bits in given.bits for name, (_, k) in MATRICES.items() for shape in candidates(bits, k)
    ]
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        works = dict(pool.imap_unordered(compile_one, jobs, chunksize=4))
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    global add_norm, gate
    add_norm, gate = (torch.compile(f, options={"triton.enable_pdl": True}) for f in (add_norm, gate))
    with torch.no_grad():
        for bits in given.bits:
            torch.manual_seed(0)
            layers = [Layer(bits) for _ in range(given.layers)]
            read = sum(w.nbytes + (0 if s is None else s.nbytes) for w, s in layers[0].weights.values())
            shapes = {
                name: int4.shape_of(n, k) if bits == 4 else matmul.shape_of(layers[0].weights[name][0])
                for name, (n, k) in MATRICES.items()
            }
            apart, best = microseconds(layers, shapes, "apart"), microseconds(layers, shapes)
            print(
                f"{bits} bits, us per layer: apart {apart:.2f}, fused {best:.2f}; reading at 4.1 TB/s {read / 4.1e6:.2f}"
            )
            for name, (_, k) in MATRICES.items():
                found = [(best, shapes[name])]
                for shape in candidates(bits, k):
                    if works[bits, name, shape]:
                        found.append((microseconds(layers, {**shapes, name: shape}, rounds=7), shape))
                found.sort(key=lambda pair: pair[0])
                best = min((microseconds(layers, {**shapes, name: shape}), shape) for _, shape in found[:5])
                best, shapes[name] = best
                print(
                    f"{bits} bits {name}, {len(found)} shapes:",
                    *(f"{t:.2f} {tuple(s)}" for t, s in found[:6]),
                    sep="\n    ",
                )
            apart, best = microseconds(layers, shapes, "apart"), microseconds(layers, shapes)
            print(
                f"{bits} bits, best: apart {apart:.2f}, fused {best:.2f} us,",
                {k: tuple(v) for k, v in shapes.items()},
                flush=True,
            )
            del layers


if __name__ == "__main__":
    main()
