"""Models whose weights are quantized, in one process."""

from __future__ import annotations

from torch import Tensor, nn


def whole_weights(task: nn.Module) -> dict[str, Tensor]:
    """What the quantized weights of one process stand for, and all others."""
    import bitsandbytes

    found = {}
    for path, module in task.named_modules():
        for name, value in module.named_parameters(recurse=False):
            weight = value.detach()
            if isinstance(module, bitsandbytes.nn.Linear4bit) and name == "weight":
                weight = bitsandbytes.functional.dequantize_4bit(value.data, value.quant_state)
            elif isinstance(module, bitsandbytes.nn.Linear8bitLt) and name == "weight":
                state = module.state if value.SCB is None else value  # before the first forward
                weight = bitsandbytes.functional.int8_vectorwise_dequant(value.data, state.SCB)
            elif hasattr(weight, "dequantize") and type(weight) is not Tensor:
                weight = weight.dequantize()
            found[f"{path}.{name}"] = weight.clone()
    return found
