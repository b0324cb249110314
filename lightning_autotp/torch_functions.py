"""What torch's functions do with the elements of a tensor: one table for all who see calls of them on parts.

Which are elementwise is taken from the operators' records, and which operators are, from torch's own tag: importing
this module declares those, so the tracer imports it, too.

A gradient of which a rank has a part, logits, a parameter in code around the model, and what a module's code computes
are each followed by torch's functions, not by its operators. What a function is to a part follows from what it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.operators import declare_elementwise, elementwise_bases
from lightning_autotp.private.torch_private import VIEW_GETTERS, elementwise_operators

declare_elementwise(elementwise_operators())


def functions(names: str, form: str = "{}") -> list[Callable[..., Any]]:
    """The functions of these names, each in this form, in ``torch.Tensor`` and ``torch``."""
    wanted = [form.format(name) for name in names.split()]
    return [
        getattr(space, name) for name in wanted for space in (Tensor, torch) if callable(getattr(space, name, None))
    ]


def functions_of_layers(names: str) -> list[Callable[..., Any]]:
    """The functions of these names in ``torch.nn.functional`` as well."""
    return functions(names) + [getattr(F, name) for name in names.split() if callable(getattr(F, name, None))]


def getters(names: str) -> list[Callable[..., Any]]:
    """By which torch asks a subclass of tensors for these attributes."""
    return [getattr(Tensor, name).__get__ for name in names.split()]


def setters(names: str) -> list[Callable[..., Any]]:
    """By which torch tells modes that these attributes are set."""
    return [getattr(Tensor, name).__set__ for name in names.split()]


_DESCRIBING = (
    "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_conj is_neg"
    " is_inference is_signed has_names __len__ __hash__"
)
_DESCRIBING_ATTRIBUTES = (
    "shape ndim dtype device layout itemsize nbytes requires_grad grad_fn is_leaf is_cpu is_cuda is_meta is_sparse"
    " is_quantized is_nested"
)
_OF_MEMORY = "stride storage_offset is_contiguous is_pinned is_same_size is_shared data_ptr untyped_storage"
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor"
_OTHER_OPERATORS = "radd rsub rmul rtruediv rfloordiv rmod rpow neg pos abs invert eq ne gt ge lt le"
_OTHER_NAMES = (
    "absolute negative subtract divide true_divide not_equal greater greater_equal less less_equal arctan2 fix"
    " float_power isclose resolve_conj resolve_neg"
)
_CASTS = "float double half bfloat16 int long bool cpu cuda"
_INITIALIZATIONS = (
    "uniform normal trunc_normal eye dirac orthogonal sparse"
    " xavier_uniform xavier_normal kaiming_uniform kaiming_normal"
)

DESCRIBING = frozenset(functions(_DESCRIBING) + getters(_DESCRIBING_ATTRIBUTES))
"""Functions and getters that tell sizes, dtypes and the like, and neither values nor where they lie."""

OF_MEMORY = frozenset(functions(_OF_MEMORY) + VIEW_GETTERS)
"""Functions that tell how and where the elements lie."""

NOTING = frozenset(functions("record_stream register_hook register_post_accumulate_grad_hook retain_grad"))
"""Functions that note something on a tensor, whose values they leave alone."""

NOT_READING = DESCRIBING | OF_MEMORY | NOTING
"""Functions that read no values and make no tensor of others."""

_ELEMENTWISE = " ".join((*elementwise_bases(), _OTHER_NAMES))

IN_PLACE = frozenset(functions(_ELEMENTWISE, "{}_") + functions("requires_grad_") + functions(_OPERATORS, "__i{}__"))
"""Elementwise functions that write their first argument."""

ELEMENTWISE = (
    frozenset(functions(_ELEMENTWISE) + functions(f"where {_CASTS}") + getters("data real"))
    | frozenset(functions(_OPERATORS, "__{}__") + functions(_OTHER_OPERATORS, "__{}__"))
    | IN_PLACE
)
"""Functions whose result at an index depends on their arguments there: of a part they make the part of the result.

But for ``where`` of a condition alone, which gives the places where it holds.
"""

DRAWN_INTO = functions("normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_ random_")
"""Functions that fill their first argument with random numbers."""

DRAWN_LIKE = functions("randn_like rand_like randint_like")
"""Functions that draw random numbers of another tensor's shape."""

LISTED = frozenset(functions("tensor as_tensor asarray"))
"""Functions that make a tensor of numbers that are given one by one; where a tensor is given, it stays what it is."""

BY_PLACE = LISTED.union(
    DRAWN_INTO,
    DRAWN_LIKE,
    functions("rand randn randint randperm normal bernoulli poisson binomial multinomial"),
    functions_of_layers("dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d"),
    functions("arange range linspace logspace eye vander tril triu tril_ triu_ tril_indices triu_indices"),
    functions("fill_diagonal_ index_fill index_fill_ bartlett_window blackman_window hamming_window hann_window"),
    (getattr(nn.init, f"{name}_") for name in _INITIALIZATIONS.split()),
)
"""Functions that give each place a number of its own, also where their operands, if any, are alike everywhere.

In a part's shape these are others than the whole tensor has there. Not ``zeros``, ``ones``, ``full``, ``empty``.
"""

UNIFORM = frozenset(functions("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full"))
"""Functions that make tensors whose elements are all the same."""

_WRITES = re.compile(
    r"__(set|delete|setitem|delitem|i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift))__"
    r"|.*[^_]_"
)


def writes(name: str) -> bool:
    """Whether a function of this name writes its first argument, whatever else it does."""
    return _WRITES.fullmatch(name) is not None
