"""Lightning's throughput where several ranks share each batch: a batch, its samples and its FLOPs count once.

Lightning multiplies what one process has seen by the number of processes. The ranks of a copy of the model see the same
batches, and each does its share of them: so every rate is divided by their number. What is summed up to (``batches``,
``samples``, ``lengths``) stays what this process has seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.utilities import throughput
from lightning.pytorch import Callback, callbacks

from lightning_autotp.private.lightning_private import throughputs_of

_SEEN = ("time", "batches", "samples", "lengths")


class SharedThroughput(throughput.Throughput):
    """``Throughput`` of ranks several of which share each batch.

    Args:
        ranks: how many share one.
        **kwargs: Lightning's. ``world_size`` is the number of all ranks.
    """

    def __init__(self, ranks: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ranks = ranks

    def compute(self) -> dict[str, int | float]:
        """The metrics, with rates of all ranks together and of each one's share."""
        return _shared(super().compute(), self.ranks)


class ThroughputMonitor(throughput.ThroughputMonitor):
    """Fabric's ``ThroughputMonitor``, which counts a batch once for the ranks that share it.

    With other strategies it is Lightning's. Its ``flops`` are those of the whole model.

    Args:
        fabric: after ``fabric.launch()``.
        **kwargs: Lightning's.
    """

    def __init__(self, fabric: Fabric, **kwargs: Any) -> None:
        super().__init__(fabric, **kwargs)
        self.ranks: int = getattr(fabric.strategy, "tensor_ranks", 1)

    def compute(self) -> dict[str, int | float]:
        """The metrics, likewise; on global rank 0 only."""
        return _shared(super().compute(), self.ranks)


def share_batches(used: Iterable[Callback], ranks: int) -> None:
    """Let the ``ThroughputMonitor`` callbacks among these, which were set up, count a batch once for so many ranks.

    They are set up anew for each run.
    """
    for callback in used:
        if isinstance(callback, callbacks.ThroughputMonitor):
            made = throughputs_of(callback)
            for stage, one in made.items():
                made[stage] = SharedThroughput(
                    ranks, available_flops=one.available_flops, world_size=one.world_size, **callback.kwargs
                )


def _shared(metrics: dict[str, int | float], ranks: int) -> dict[str, int | float]:
    return {name: value if name in _SEEN else value / ranks for name, value in metrics.items()}
