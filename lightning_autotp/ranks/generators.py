"""The generators of random numbers that devices draw from by default."""

from __future__ import annotations

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a device draws from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    current = module.current_device()  # asked in any case: before a device is used there are no generators
    generator: torch.Generator = module.default_generators[current if device.index is None else device.index]
    return generator
