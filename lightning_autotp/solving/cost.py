"""What a layout costs, in seconds of one training step.

``cost = communication + computation + held memory``

* communication (:func:`Profile.collective`): latency plus bytes over bandwidth. A gather or scatter along an inner
  dim also moves its bytes once more through memory, to bring the ranks' parts into order.
* computation (:func:`Profile.compute`): forward and backward, the slowest rank's share; products by FLOPs, everything
  else by the bytes it touches. Of attention's scores in memory, which a kernel does not have, the mean share counts:
  they must not drive the plan to evener cuts than a kernel has.
* held memory (:func:`Profile.memory`): a model is split to make it fit, so a parameter byte that is held has a price,
  at least the time in which an optimizer steps it.
  It is relative, so that a small model is planned like a large one: a matrix of median size
  (:func:`typical_matrix`) held whole costs as much as ``Profile.matrix_price`` all-reduces of a hidden state of median
  size. A parameter so small that dividing it is worth no communication (a router, a norm's weight) is held for
  nothing. A sharded parameter counts as an even share: units that do not divide, or that several ranks share, cost
  time, but must not drive the plan to odder cuts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """A simple hardware profile.

    Defaults are round numbers for one H100 in an NVSwitch node: half of the vendor's dense bf16 rate (what training
    reaches), HBM3 and NVLink 4 bandwidth per direction, the latency of a small NCCL collective, and reduction in the
    switch (NCCL's NVLS), with which an all-reduced byte crosses a GPU's link once. In a ring it crosses it twice.

    Attributes:
        flops: floating-point operations per second.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second and direction between two ranks.
        latency: seconds per collective.
        all_reduce_passes: how often an all-reduced byte crosses the link (1 in a switch, 2 in a ring).
        matrix_price: all-reduces of a hidden state that one matrix held whole may cost.
        activation_price: all-reduces of an activation that this activation held whole may cost.
        imbalance: by how much the rank whose experts the most tokens choose has more to do than an even share (the
            capacity factor with which mixtures are usually trained, as in Fedus et al. 2022, "Switch Transformers").
    """

    flops: float = 4e14
    memory_bandwidth: float = 3e12
    link_bandwidth: float = 3e11
    latency: float = 1e-5
    all_reduce_passes: float = 1.0
    matrix_price: float = 10.0
    activation_price: float = 0.0
    imbalance: float = 1.25

    def collective(self, kind: str, size: float, ranks: int) -> float:
        """Seconds of an ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"`` of ``size`` (whole) bytes."""
        if kind == "all_reduce":
            return self.latency + self.all_reduce_passes * (ranks - 1) / ranks * size / self.link_bandwidth
        ordering = 2 * size / self.memory_bandwidth
        return self.latency + (ranks - 1) / ranks * size / self.link_bandwidth + ordering

    def compute(self, flops: float, touched: float, share: float) -> float:
        """Seconds of an operator, forward and backward, of which the slowest rank does ``share``."""
        return 3 * share * (flops / self.flops + touched / self.memory_bandwidth)

    def busiest(self, share: float) -> float:
        """The most that a rank has to do of work of which its share would be this if tokens chose evenly."""
        return min(1.0, self.imbalance * share)

    def memory(self, size: int, share: float, matrix: float, hidden: float, ranks: int) -> float:
        """Seconds charged for holding ``share`` of a parameter of ``size`` bytes.

        Args:
            size: the parameter's bytes.
            share: the part of it that a rank holds.
            matrix: median bytes of the model's matrices.
            hidden: median bytes of its hidden states.
            ranks: size of the group.
        """
        if size * _NEXT_TO_NOTHING <= matrix:
            return 0.0
        stepped = _STEPPED * size / self.memory_bandwidth
        return share * max(self.matrix_price * self.collective("all_reduce", hidden, ranks) * size / matrix, stepped)

    def activation(self, size: float, share: float, ranks: int) -> float:
        """Seconds charged for holding ``share`` of an activation of ``size`` bytes."""
        if not self.activation_price:
            return 0.0
        return self.activation_price * self.collective("all_reduce", size, ranks) * share


def typical_matrix(parameters: Sequence[tuple[tuple[int, ...], int]]) -> float:
    """Median bytes of a model's matrices, from every parameter's shape and bytes.

    Where most of them are slivers, these do not count: the two factors of a low-rank update stand beside every large
    matrix and would be the median, though the model's bytes are elsewhere.
    """
    matrices = [(sorted(shape)[-2], size) for shape, size in parameters if len(shape) > 1]
    widest = max((narrow for narrow, _ in matrices), default=0)
    broad = [size for narrow, size in matrices if narrow * _SLIVER > widest]
    return statistics.median((broad if 2 * len(broad) < len(matrices) else [size for _, size in matrices]) or [1])


_STEPPED = 7  # AdamW reads a parameter, its gradient and its two states, and writes all but the gradient
_NEXT_TO_NOTHING = 8  # so many times smaller than the median matrix, a parameter is held for nothing
_SLIVER = 8  # a matrix is one if its second-largest dim is so many times smaller than that of the model's widest
