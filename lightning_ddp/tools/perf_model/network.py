"""Network model: says what a collective costs, in waits for a hop and bytes on the slowest link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_ddp.comm.cost import TransferCost

Kind = Literal["all_reduce", "all_to_all", "all_gather"]
Algorithm = Literal["ring", "tree", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective on the link that holds it up."""

    fixed_s: float
    """Seconds that do not depend on the link's speed: latencies, and what happens within the nodes."""
    link_bytes: float
    """Bytes that pass the link in one direction."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links of one speed between the nodes, faster ones within them.

    * `ring`: 2 (N-1) hops with 1/N of the bytes each, as gloo does it and NCCL with large tensors;
    * `tree`: two binary trees that share the bytes, up and down: as many bytes, 2 log2(N) hops, as NCCL
      does it with many ranks. Only sums: what is gathered travels as in a ring;
    * `hierarchical`: a sum within each node, a ring of one rank a node, a copy within each node, as this
      package's shared-memory transport does it.

    The link is the same in both directions at once, and neither switches nor other jobs slow it down.
    """

    hop: TransferCost
    """A message from a node to the next."""
    ranks_per_node: int = 1
    node_hop: TransferCost | None = None
    """A message within a node; None for one that takes as long as between nodes."""
    algorithm: Algorithm = "ring"
    num_in_flight: int = 1
    """Collectives that may be under way together: 2 with gloo, by its threads, and 1 with NCCL. Their bytes
    pass the link one after the other."""
    cpu_seconds_per_byte: float = 0.0
    """CPU seconds of a rank for each byte that passes the link: kernel, gloo and the sum."""

    def transfer(self, kind: Kind, num_bytes: float, num_ranks: int) -> Transfer:
        """What a collective among ranks that are neighbours takes.

        `num_bytes` are of the tensor of one rank: what it reduces, sends to all others together, or gives to
        each of them.

        >>> network = Network(hop=TransferCost(latency_s=1.0, seconds_per_byte=0.5))
        >>> network.transfer("all_reduce", 100, 4)
        Transfer(fixed_s=6.0, link_bytes=150.0)
        """
        if num_ranks == 1:
            return Transfer(fixed_s=0.0, link_bytes=0.0)
        in_node = min(self.ranks_per_node, num_ranks)
        hops, sent = _flat(kind, num_bytes, num_ranks, is_tree=self.algorithm == "tree")
        if in_node == num_ranks:
            return Transfer(fixed_s=self._node_seconds(hops, sent), link_bytes=0.0)
        if self.algorithm == "hierarchical":
            return self._hierarchical(kind, num_bytes, num_ranks, in_node)
        if kind == "all_to_all":  # all ranks of a node use its link, for the rows that leave the node
            sent = in_node * num_bytes * (num_ranks - in_node) / num_ranks
        return Transfer(fixed_s=hops * self.hop.latency_s, link_bytes=sent)

    def seconds(self, transfer: Transfer) -> float:
        """Seconds of a transfer on a link that is free."""
        return transfer.fixed_s + transfer.link_bytes * self.hop.seconds_per_byte

    def _node_seconds(self, hops: float, num_bytes: float) -> float:
        cost = self.node_hop or self.hop
        return hops * cost.latency_s + num_bytes * cost.seconds_per_byte

    def _hierarchical(self, kind: Kind, num_bytes: float, num_ranks: int, in_node: int) -> Transfer:
        num_nodes = math.ceil(num_ranks / in_node)
        others = in_node - 1
        if kind == "all_reduce":
            # each rank of a node sums its share and the others read it: half of a ring's hops each
            hops, sent = _flat(kind, num_bytes, num_nodes, is_tree=False)
            inside = self._node_seconds(2 * others, 2 * others / in_node * num_bytes)
        elif kind == "all_gather":
            hops, sent = num_nodes - 1.0, num_bytes * (num_ranks - in_node)
            inside = self._node_seconds(2 * others, others * num_bytes + sent)
        else:
            hops, sent = num_nodes - 1.0, in_node * num_bytes * (num_ranks - in_node) / num_ranks
            inside = self._node_seconds(others, num_bytes)
        return Transfer(fixed_s=hops * self.hop.latency_s + inside, link_bytes=sent)


def _flat(kind: Kind, num_bytes: float, num_ranks: int, *, is_tree: bool) -> tuple[float, float]:
    """Hops in a row, and bytes that each rank sends."""
    others = num_ranks - 1
    if kind == "all_reduce":
        hops = 2.0 * math.ceil(math.log2(num_ranks)) if is_tree else 2.0 * others
        return hops, 2 * others / num_ranks * num_bytes
    return float(others), others * num_bytes / (num_ranks if kind == "all_to_all" else 1)
