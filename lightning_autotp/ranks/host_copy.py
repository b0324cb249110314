"""A tensor's values for the host, which waits only for what the device was given before."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The values of a small tensor as they are now, on their way to the host.

    Args:
        tensor: on any device. One on the host is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._there: torch.Event | None = None
        self._values = tensor.detach().to("cpu", non_blocking=True)
        if tensor.device.type != "cpu":
            self._there = torch.Event(tensor.device)
            self._there.record()

    def read(self) -> Tensor:
        """The values, on the host. What the device was given after the copy is not waited for."""
        if self._there is not None:
            self._there.synchronize()
        return self._values
