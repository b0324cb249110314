"""Losses in the place of kernels that compute them of all classes, where the classes are cut over the ranks.

A function that is declared to be a cross-entropy (:class:`~lightning_autotp.operators.declared.Loss`) is one operator
in a trace. Where its classes stay whole, the kernel itself runs, on every rank. Where they are cut, its call is made in
another way: of logits by :mod:`~lightning_autotp.parallel.cross_entropy`, of hidden states and a head's weight by
:mod:`~lightning_autotp.parallel.linear_cross_entropy`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_autotp.capture import recording
from lightning_autotp.capture.seen_functions import SeenFunction
from lightning_autotp.layouts.plan import ImplementationPlan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.operators.graph import KERNEL_LINEAR_LOSS, KERNEL_LOSS
from lightning_autotp.parallel.cross_entropy import VOCAB_CROSS_ENTROPY
from lightning_autotp.parallel.head_product import HeadProduct
from lightning_autotp.parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from lightning_autotp.parallel.logits import VocabParallelLogits, cross_entropy
from lightning_autotp.private.torch_private import has_values
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.implementations import Implementation


def loss_of_logits(
    use: ImplementationPlan, group: TPGroup, kernel: SeenFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a kernel returns of logits ``[tokens, vocab]``, which look whole, and targets ``[tokens]``. Collective.

    Args:
        use: how the logits are cut.
        group: the tensor-parallel group.
        kernel: the function that the model calls.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: if the logits are not this rank's part.
    """
    given = kernel.declared.loss_arguments(args, kwargs)
    logits, softcap = given.pop("self"), given.pop("softcap")
    if not isinstance(logits, VocabParallelLogits):
        raise TypeError(
            f"{kernel.__name__} in {use.module or 'the model'} is planned on logits whose vocabulary is divided over"
            f" the ranks, but it is given a {type(logits).__name__} {tuple(logits.shape)}"
        )
    if softcap is not None and not logits.is_traced:
        logits = _capped(logits, softcap)
    return kernel.declared.returned(cross_entropy(logits, **given), args, kwargs)


def loss_of_hidden_states(
    use: ImplementationPlan, group: TPGroup, kernel: SeenFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a kernel returns of hidden states, a head and targets, with the loss in fp32. Collective.

    ================  ======================  ===========
    tensor            shape on a rank         type
    ================  ======================  ===========
    hidden states     ``[tokens, hidden]``    Replicate
    weight            ``[vocab/tp, hidden]``  Shard(0)
    bias              ``[vocab/tp]``          Shard(0)
    targets           ``[tokens]``            Invariant
    classes' weights  ``[vocab]``             Invariant
    loss              ``[]`` or ``[tokens]``  Invariant
    ================  ======================  ===========

    Args:
        use: how the head's weight is cut.
        group: the tensor-parallel group.
        kernel: the function that the model calls.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    given = kernel.declared.loss_arguments(args, kwargs)
    head = [given.pop(name) for name in ("input", "linear_weight", "linear_bias")]
    softcap, target, weight = given.pop("softcap"), given["target"], given["weight"]
    assert isinstance(use.layout, Shard)
    ((_, ownership),) = use.layout.dims
    if not has_values(head[0]):
        reads = [x for x in (*head[:2], target, head[2], weight) if x is not None]
        shape = target.shape if given["reduction"] == "none" else ()
        loss = recording.record(VOCAB_KERNEL_LINEAR_LOSS.primitive, reads, shape, ownership.digest)
    else:
        product = HeadProduct.of(*head).stepped(_exact, is_cast=True)
        if softcap is not None:
            product = product.stepped(partial(_capped, softcap=softcap))
        loss = vocab_parallel_linear_cross_entropy(product, ownership=ownership, group=group, **given)
    return kernel.declared.returned(loss, args, kwargs)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap)


VOCAB_KERNEL_LOSS = replace(
    VOCAB_CROSS_ENTROPY, name="vocab cross-entropy of a kernel", operator=KERNEL_LOSS, run=loss_of_logits
)
VOCAB_KERNEL_LINEAR_LOSS = Implementation(
    name="vocab linear cross-entropy",
    operator=KERNEL_LINEAR_LOSS,
    operand="linear_weight",
    dims=(0,),
    primitive="vocab_parallel_linear_cross_entropy",
    reads=("input", "linear_weight", "target", "linear_bias", "weight"),
    communicates=VOCAB_CROSS_ENTROPY.communicates,
    run=loss_of_hidden_states,
)
