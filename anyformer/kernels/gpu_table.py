"""Data-sheet figures of GPUs, in one table. Imports no torch.

Peaks are dense FLOP/s of matmuls that accumulate in fp32; fp32 is without TF32, which torch does not use by default.
Links are bytes per second of one GPU in one direction: half of what the data sheets give for NVLink. `network` is that
of the vendor's own servers (DGX or HGX), or one port of 100 Gbit/s for every four GPUs; clusters differ.
"""

from collections.abc import Mapping
from typing import NamedTuple

NVLINK3, NVLINK4, NVLINK5 = 300e9, 450e9, 900e9
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
GBIT = 1e9 / 8
DATA_SHEETS = "https://resources.nvidia.com/en-us-tensor-core/"
PRODUCTS = "https://www.nvidia.com/en-us/"


class GPU(NamedTuple):
    """One kind of GPU; `memory` in bytes, rates in FLOP/s and bytes per second."""

    label: str  # part of the name that torch reports; the first match in the table counts
    memory: float
    bandwidth: float  # of its memory
    flops: Mapping[str, float]  # by precision
    link: float  # to the other GPUs of its node
    network: float  # to other nodes
    node: int  # GPUs of a node
    source: str  # address of the data sheet


def _peaks(half: float, single: float, eighth: float | None = None, bf16: bool = True) -> dict[str, float]:
    """Return peaks by precision from those of fp16, fp32 and fp8 in TFLOP/s."""
    peaks = {"fp16": half * 1e12, "fp32": single * 1e12}
    return peaks | ({"bf16": half * 1e12} if bf16 else {}) | ({"fp8": eighth * 1e12} if eighth else {})


_H100, _H200 = f"{DATA_SHEETS}nvidia-tensor-core-gpu-datasheet", f"{DATA_SHEETS}hpc-datasheet-sc23-h200"
_A100 = f"{PRODUCTS}data-center/a100/"

GPUS: Mapping[str, GPU] = {
    "h100-pcie": GPU("H100 PCIe", 80e9, 2.0e12, _peaks(756, 51, 1513), PCIE5, 100 * GBIT, 8, _H100),
    "h100-nvl": GPU("H100 NVL", 94e9, 3.9e12, _peaks(835, 60, 1671), PCIE5, 100 * GBIT, 8, _H100),
    "h100": GPU("H100", 80e9, 3.35e12, _peaks(989, 67, 1979), NVLINK4, 400 * GBIT, 8, _H100),
    "h200-nvl": GPU("H200 NVL", 141e9, 4.8e12, _peaks(835, 60, 1671), PCIE5, 100 * GBIT, 8, _H200),
    "h200": GPU("H200", 141e9, 4.8e12, _peaks(989, 67, 1979), NVLINK4, 400 * GBIT, 8, _H200),
    "gh200": GPU("GH200", 96e9, 4.0e12, _peaks(989, 67, 1979), NVLINK4, 400 * GBIT, 1,
                 f"{DATA_SHEETS}grace-hopper-superchip"),
    "b200": GPU("B200", 180e9, 7.7e12, _peaks(2250, 75, 4500), NVLINK5, 400 * GBIT, 8,
                f"{PRODUCTS}data-center/dgx-b200/"),
    "a100-40gb": GPU("A100 SXM4 40GB", 40e9, 1.555e12, _peaks(312, 19.5), NVLINK3, 200 * GBIT, 8, _A100),
    "a100-40gb-pcie": GPU("A100 PCIE 40GB", 40e9, 1.555e12, _peaks(312, 19.5), PCIE4, 25 * GBIT, 8, _A100),
    "a100-80gb-pcie": GPU("A100 80GB PCIe", 80e9, 1.935e12, _peaks(312, 19.5), PCIE4, 25 * GBIT, 8, _A100),
    "a100-80gb": GPU("A100", 80e9, 2.039e12, _peaks(312, 19.5), NVLINK3, 200 * GBIT, 8, _A100),
    "l40s": GPU("L40S", 48e9, 864e9, _peaks(362, 91.6, 733), PCIE4, 25 * GBIT, 8, f"{PRODUCTS}data-center/l40s/"),
    "l4": GPU("L4", 24e9, 300e9, _peaks(121, 30.3, 242), PCIE4, 25 * GBIT, 8, f"{PRODUCTS}data-center/l4/"),
    "rtx-4090": GPU("RTX 4090", 24e9, 1008e9, _peaks(165, 82.6, 330), PCIE4, 25 * GBIT, 8,
                    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
    "rtx-3090": GPU("RTX 3090", 24e9, 936e9, _peaks(71, 35.6), PCIE4, 25 * GBIT, 8,
                    f"{PRODUCTS}geforce/graphics-cards/30-series/rtx-3090-3090ti/"),
    "v100": GPU("V100", 32e9, 900e9, _peaks(125, 15.7, bf16=False), 150e9, 100 * GBIT / 2, 8,
                f"{PRODUCTS}data-center/v100/"),
    "t4": GPU("T4", 16e9, 320e9, _peaks(65, 8.1, bf16=False), PCIE3, 25 * GBIT, 8,
              f"{PRODUCTS}data-center/tesla-t4/"),
}  # fmt: skip


def find_gpu(label: str) -> GPU | None:
    """Return the GPU of a name that torch reports; None if it is not in the table.

    MIG slices and laptop GPUs share a name with a larger GPU and are left out.
    """
    words = f" {label.replace('-', ' ')} "
    if " MIG " in words or " Laptop " in words:
        return None
    return next((gpu for gpu in GPUS.values() if f" {gpu.label} " in words), None)
