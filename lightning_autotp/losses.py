"""Parts of losses, computed from the logits of a parallel model without gathering them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autotp.parallel.logits import check_vocab_is_last

__all__ = ["token_log_probs"]

_PADDING = -100


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability that the logits give to one token at each position.

    That is ``logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)``, which losses of preferences and
    policies (DPO, PPO, GRPO, distillation on samples) begin with, of vocabulary-sharded logits as of ordinary ones. The
    former are not gathered: three numbers a token are all-reduced, see
    :mod:`~lightning_autotp.parallel.cross_entropy`. Differentiable any number of times. Collective if the logits are
    sharded; the backward pass is not, but for second derivatives.

    Args:
        logits: ``[batch, seq, vocab]``: any dims, the vocabulary last. Shift them and the tokens against each other
            before: slices stay sharded.
        tokens: ids of the whole vocabulary, ``[batch, seq]``, integers, the same on every rank. Those that are -100, as
            labels have it for padding and prompts, get 0.0 and no gradient.

    Returns:
        ``[batch, seq]``, float32 or wider whatever the logits are, the same on every rank.

    Raises:
        ValueError: if the shapes do not fit, or the logits are sharded in another dim than the last.
        TypeError: if the logits are not floating-point numbers, or the tokens not integers.
        IndexError: for an id that is not in the vocabulary and not -100, on every rank (on an accelerator: an assertion
            on the device).

    Example:
        >>> token_log_probs(torch.zeros(1, 3, 8), torch.tensor([[5, 0, -100]]))  # -log(8)
        tensor([[-2.0794, -2.0794,  0.0000]])
    """
    _check(logits, tokens)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        exact.reshape(-1, logits.shape[-1]),
        tokens.reshape(-1).long(),
        ignore_index=_PADDING,
        reduction="none",
    )
    return 0 - losses.view(tokens.shape)  # and so not -0.0 for padding


def _check(logits: Tensor, tokens: Tensor) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits are floating-point numbers, but these are {logits.dtype}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are ids, integers, but these are {tokens.dtype}")
    if logits.dim() < 1 or tuple(logits.shape[:-1]) != tuple(tokens.shape):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need tokens of shape {tuple(logits.shape[:-1])}, one id for each"
            f" position, not {tuple(tokens.shape)}: the vocabulary is the last dim"
        )
    check_vocab_is_last(logits)
