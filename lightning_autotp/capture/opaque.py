"""Modules whose Python depends on values that a trace does not have, or that cannot be traced for another reason.

A value is how many tokens an expert got, say; another reason an operator without a form for meta tensors. Such a module
is one operator to the analysis: nothing in it is sharded, and the model trains all the same. The shapes of what it
returns are found by running a copy of it once, on the CPU, with random numbers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autotp.capture.nested import map_tensors, tensors_in
from lightning_autotp.capture.static_values import NoValue
from lightning_autotp.capture.tracer import Tracer
from lightning_autotp.operators.graph import OPAQUE
from lightning_autotp.private.torch_private import (
    buffers_of,
    forward_hooks,
    parameters_of,
    unset_fake_temporarily,
)


class NotRun(NoValue):
    """A module could not be run for the shapes of what it returns."""


LARGEST = 2**31
"""Bytes of parameters up to which a module is run for its shapes."""


class OpaqueForward:
    """Takes the place of a module's forward in a trace."""

    def __init__(self, module: nn.Module, tracer: Tracer) -> None:
        self.module, self.tracer = module, tracer
        self.forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note one operator, from the tensors given and all the module's parameters to what the module returns."""
        with self.tracer.pause():
            with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                try:
                    result = self._run(args, kwargs)
                except Exception as error:
                    raise NotRun(f"{type(error).__name__}: {error}") from error
            result = map_tensors(self.tracer.without_values, result)
        inputs = tensors_in((args, kwargs))
        self.tracer.note(OPAQUE, [*inputs, *self.module.parameters()], tensors_in(result))
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        real: dict[int, Any] = {}
        for module in self.module.modules():
            inner = module.__dict__.get("forward")
            if isinstance(inner, OpaqueForward):  # it refers to the whole trace
                real[id(inner)] = None
            # Hooks may be methods of an outer module, which would be copied with everything that a trace made of it.
            real |= {id(hooks): OrderedDict() for hooks in forward_hooks(module)}
            for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
                if tensor is not None:
                    known = self.tracer.real.get(id(tensor))
                    value = _random(tensor) if known is None else known.clone()  # its code may write into it
                    is_parameter = name in parameters_of(module)
                    real[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        copied = copy.deepcopy(self.module, real)
        for module in copied.modules():
            if module.__dict__.get("forward", self) is None:
                del module.forward
        args, kwargs = map_tensors(self._value, (args, kwargs))
        return copied.forward(*args, **kwargs)

    def _value(self, tensor: Tensor) -> Tensor:
        try:
            return self.tracer.value(tensor)
        except NoValue:
            return _random(tensor)


def _random(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device="cpu") * 0.02
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
