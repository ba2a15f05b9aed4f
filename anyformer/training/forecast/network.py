"""Time of collective operations among GPUs. Imports no torch.

    gather, scatter    bytes · (n - 1) / n / (LINK_SHARE · link) + hops · latency, in a ring through all n GPUs
    all-reduce         twice the bytes; its latency is that of a tree between nodes

The ranks of a group are `stride` apart. A group within a node uses its links. A larger group uses the network of all
its GPUs in a node together, so with r of them it has r times the network of one, and at most the links of the node.
"""

from dataclasses import dataclass
from math import ceil, log2

from anyformer.kernels.gpu_table import GPU

LINK_SHARE = 0.8  # of a link's bandwidth that large messages reach
NODE_HOP, NETWORK_HOP = 2e-6, 5e-6  # seconds, as in the cost model of NCCL (protocol LL128)


@dataclass(frozen=True)
class Group:
    """A group of `size` GPUs that are `stride` ranks apart."""

    gpu: GPU
    size: int
    stride: int = 1

    @property
    def per_node(self) -> int:
        """GPUs of the group in one node."""
        return max(1, min(self.size, self.gpu.node // self.stride))

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)

    @property
    def bandwidth(self) -> float:
        if self.nodes == 1:
            return LINK_SHARE * self.gpu.link
        network = self.per_node * self.gpu.network
        return LINK_SHARE * (min(self.gpu.link, network) if self.per_node > 1 else network)

    def gather(self, size: float, calls: float = 1) -> float:
        """Return the seconds to gather, or to reduce and scatter, `size` bytes in `calls` calls."""
        if self.size == 1:
            return 0.0
        hops = (self.size - self.nodes) * NODE_HOP + (self.nodes - (self.nodes == 1)) * NETWORK_HOP
        return size * (self.size - 1) / self.size / self.bandwidth + calls * hops

    def all_reduce(self, size: float, calls: float = 1) -> float:
        """Return the seconds to sum `size` bytes on all GPUs in `calls` calls."""
        if self.size == 1:
            return 0.0
        hops = 2 * (self.per_node - 1) * NODE_HOP + 2 * log2(self.nodes) * NETWORK_HOP
        return 2 * size * (self.size - 1) / self.size / self.bandwidth + calls * hops
