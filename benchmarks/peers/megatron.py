"""Tensor parallelism of a Llama by hand, in Megatron's pattern: the fastest that one writes for a single model.

Column- and row-parallel linears with the two conjugate functions f and g around a region, a table and a head cut along
the vocabulary, and the cross-entropy on the parts of the logits (Shoeybi et al., 2019, and Megatron-LM).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class _CopyToRegion(torch.autograd.Function):
    """f: the tensor itself forward, the sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _ReduceFromRegion(torch.autograd.Function):
    """g: the sum of the ranks' tensors forward, the gradient itself backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """The mean loss of this rank's logits ``[tokens, vocab/tp]``; they are overwritten by their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        highest = logits.max(-1).values
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        logits = logits.sub_(highest[:, None])
        here = (targets >= first) & (targets < first + logits.shape[1])
        index = torch.where(here, targets - first, 0)
        predicted = torch.where(here, logits.gather(1, index[:, None]).squeeze(1), 0.0)
        dist.all_reduce(predicted)
        softmax = logits.exp_()
        total = softmax.sum(-1)
        dist.all_reduce(total)
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, index, here)
        return (total.log() - predicted).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, index, here = ctx.saved_tensors
        softmax.scatter_add_(1, index[:, None], -here[:, None].to(softmax.dtype))
        return softmax.mul_(gradient / len(softmax)), None, None


def _part(weight: Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(weight.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class MegatronLlama(nn.Module):
    """A Llama of transformers whose weights are this rank's, with its loss.

    Args:
        model: the whole model, with the same weights on every rank. It is changed in place.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        inner: Any = model
        self.body, self.head, self.table = inner.model, inner.lm_head, inner.model.embed_tokens
        for layer in self.body.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                self._cut(layer.self_attn, name, 0)
            for name in ("gate_proj", "up_proj"):
                self._cut(layer.mlp, name, 0)
            for module, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                self._cut(module, name, 1)
                getattr(module, name).register_forward_hook(lambda m, args, output: _ReduceFromRegion.apply(output))
            layer.self_attn.register_forward_pre_hook(_copy_hidden_states, with_kwargs=True)
            layer.mlp.register_forward_pre_hook(lambda m, args: (_CopyToRegion.apply(args[0]),))
        self._cut(inner, "lm_head", 0)
        self.table.weight = _part(self.table.weight.data, 0)
        self.first = dist.get_rank() * len(self.table.weight)

    @staticmethod
    def _cut(module: Any, name: str, dim: int) -> None:
        linear = getattr(module, name)
        linear.weight = _part(linear.weight.data, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[rows, length] ->`` the mean loss of the next tokens. Collective."""
        here = (tokens >= self.first) & (tokens < self.first + len(self.table.weight))
        embedded = F.embedding(torch.where(here, tokens - self.first, 0), self.table.weight) * here[..., None]
        hidden = self.body(inputs_embeds=_ReduceFromRegion.apply(embedded), use_cache=False).last_hidden_state
        logits = F.linear(_CopyToRegion.apply(hidden), self.head.weight)
        return _VocabParallelCrossEntropy.apply(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), self.first
        )


def _copy_hidden_states(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, "hidden_states": _CopyToRegion.apply(kwargs["hidden_states"])}
