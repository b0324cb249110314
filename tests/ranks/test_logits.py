"""Sharded logits that look whole: every function on them gives what it gives on the whole logits, gradients too."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from meta_logits import VOCAB, on_meta
from shards import part
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autotp.capture import recording as trace
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parallel import TPGroup, VocabParallelLogits
from lightning_autotp.parallel.logits import GatheredLogits, elementwise, tensor

TARGET = torch.tensor([[0, 6, 4, 2, 5], [1, 1, 3, 4, 4]])
CHOSEN = TARGET.unsqueeze(-1)
Function = Callable[[Any], Any]

UNARY = ["neg", "abs", "square", "exp", "expm1", "log", "log1p", "sqrt", "tanh", "sigmoid", "relu", "silu", "gelu"]
UNARY += ["nan_to_num"]
BINARY = ["add", "sub", "mul", "div", "true_divide", "pow", "rsub"]
OPERATORS = ["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"]
OPERATORS += ["__div__", "__rdiv__", "__pow__", "__rpow__"]

STAY: dict[str, Function] = {
    "clamp": lambda x: torch.clamp(x, max=1.5),
    "clip": lambda x: x.clip(0.3, 1.2),
    "masked_fill": lambda x: x.masked_fill(torch.arange(5).view(1, 5, 1) > 2, -1.0),
    "lerp": lambda x: torch.lerp(x, x.exp(), torch.tensor(0.3)),
    "maximum": lambda x: torch.maximum(x, 2 - x),
    "minimum": lambda x: x.minimum(torch.tensor(1.0)),
    "where": lambda x: torch.where(torch.arange(5).view(5, 1) > 2, x, 0.0),
    "-x": lambda x: -x,
    "abs(x)": abs,
    "2 - x / 3 ** 2": lambda x: 2 - x / 3**2,
    "2 / x": lambda x: 2 / x,
    "soft cap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "a tensor over tokens": lambda x: x * torch.arange(1.0, 6.0).view(5, 1),
    "a tensor on the left": lambda x: torch.tensor(3.0) + x,
    "both sharded": lambda x: x * x.exp() + x,
    "more dims by broadcasting": lambda x: x + torch.arange(4.0).view(4, 1, 1, 1),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.float64),
    "to like a tensor": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "to a dtype and device": lambda x: x.to("cpu", torch.float64),
    "type_as": lambda x: x.type_as(x.double()),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "view(-1, V)": lambda x: x.view(-1, VOCAB),
    "view(10, -1)": lambda x: x.view(10, -1),
    "view by list": lambda x: x.view([2, 5, 1, VOCAB]),
    "reshape": lambda x: torch.reshape(x, (5, 2, VOCAB)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by name": lambda x: torch.flatten(x, end_dim=-2),
    "shift": lambda x: x[..., :-1, :].contiguous(),
    "last": lambda x: x[:, -2:, :],
    "last token": lambda x: x[:, -1],
    "an ellipsis in front": lambda x: x[..., :],
    "the whole vocabulary, said": lambda x: x[:, 1, 0:VOCAB],
    "None": lambda x: x[None, :, None],
    "None behind": lambda x: x[..., None],
    "a mask": lambda x: x[torch.tensor([[True, False, True, True, False], [False, True, True, False, False]])],
    "token positions": lambda x: x[torch.tensor([0, 1, 1]), torch.tensor([4, 0, 2])],
    "a row of rows": lambda x: x[torch.tensor([1, 0, 1])],
    "permute": lambda x: x.permute(2, 0, 1),
    "permute by tuple": lambda x: torch.permute(x, (1, -1, 0)),
    "transpose": lambda x: x.transpose(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze a dim": lambda x: x[:, :1].squeeze(1),
    "squeeze nothing": lambda x: x.squeeze(-1),
}
for space, names, operands in (
    (torch, UNARY, ()),
    (Tensor, UNARY, ()),
    (F, ["relu", "silu", "gelu"], ()),
    (torch, BINARY, (2.0,)),
    (Tensor, [*BINARY, *OPERATORS], (2.0,)),
):
    for name in names:
        if hasattr(space, name):
            STAY[f"{space.__name__}.{name}"] = lambda x, f=getattr(space, name), rest=operands: f(x, *rest)  # noqa: B008

STAY |= {
    "log_softmax": lambda x: x.log_softmax(-1),
    "torch.log_softmax": lambda x: torch.log_softmax(x.transpose(1, 2) * 3, dim=1),
    "log_softmax in fp64": lambda x: F.log_softmax(x, dim=2, dtype=torch.float64),
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "softmax": lambda x: x.softmax(dim=-1).square(),
    "torch.softmax by position": lambda x: torch.softmax(x - 3, 2),
    "softmax of bf16": lambda x: x.bfloat16().softmax(-1, torch.float32),
    "chunk": lambda x: x.chunk(2)[1],
    "chunk by dim": lambda x: torch.chunk(x, 3, dim=1)[1],
    "split": lambda x: x.split(2, 1)[2],
    "split by sizes": lambda x: torch.split(x, [1, 3, 1], dim=-2)[1],
    "unbind": lambda x: torch.unbind(x, 1)[3],
    "iteration": lambda x: list(x)[1],
    "sum over tokens": lambda x: x.sum(1),
    "mean over sequences and tokens": lambda x: torch.mean(x, (0, 1), keepdim=True),
    "logsumexp of two": lambda x: torch.logsumexp(torch.stack([x, 2 * x]), dim=0),
    "sum after a transpose": lambda x: x.transpose(1, 2).sum(-1),
    "cat": lambda x: torch.cat([x, x.exp()], dim=1),
    "concat": lambda x: torch.concat((x, x), 0),
    "stack": lambda x: torch.stack([x, x + 1], dim=-1),
    "stack in front": lambda x: torch.stack((x, x + 1), 1),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), (x * x).softmax(-1), reduction="none"),
    "kl_div of a mixture": lambda x: F.kl_div(x.log(), x.log_softmax(-1), log_target=True, reduction="none"),
}

PARTS: dict[str, Function] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax of ties": lambda x: torch.argmax(x.clamp(max=1.0), dim=-1, keepdim=True),
    "argmax of nan": lambda x: torch.log(x - 1).argmax(-1),
    "max": lambda x: x.max(-1)[0],
    "max by name": lambda x: torch.max(x, dim=2, keepdim=True).values,
    "max's class": lambda x: x.max(-1).indices,
    "a margin": lambda x: (x - x.max(-1, keepdim=True).values).exp().sum(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "logsumexp, kept": lambda x: x.logsumexp((2,), keepdim=True),
    "logsumexp of what is ruled out": lambda x: x.detach().masked_fill(CHOSEN > 4, -torch.inf).logsumexp(-1),
    "z-loss": lambda x: x.logsumexp(-1).square().mean(),
    "gather": lambda x: x.gather(-1, torch.full((2, 5, 1), 3)),
    "gather some": lambda x: torch.gather(x, 2, torch.tensor([[[0, 6, 2], [5, 5, 1]]])),
    "focal": lambda x: (1 - x.softmax(-1).gather(-1, CHOSEN)).square() * x.log_softmax(-1).gather(dim=-1, index=CHOSEN),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "topk": lambda x: x.topk(2, dim=-1)[0],
    "topk's classes": lambda x: torch.topk(x, k=4).indices,
    "topk of all": lambda x: x.transpose(1, 2).topk(VOCAB, 1).values,
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum in fp64": lambda x: x.sum(axis=-1, dtype=torch.float64),
    "sum": lambda x: x.sum(),
    "sum of chosen tokens": lambda x: x[TARGET > 2].sum(),
    "mean of all": lambda x: torch.mean(x.square()),
    "sum over all but tokens": lambda x: x.sum((0, 2)),
    "logsumexp of all": lambda x: x.logsumexp((0, 1, 2)),
    "kl_div, batchmean": lambda x: F.kl_div(x.log_softmax(-1), (x * x).softmax(-1), reduction="batchmean"),
    "kl_div, summed": lambda x: F.kl_div(x.log(), x.square(), reduction="sum"),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(-1).view(-1, VOCAB), TARGET.flatten(), ignore_index=4),
    "nll_loss, weighted": lambda x: nn.NLLLoss(torch.arange(1.0, 8.0))(x.transpose(1, 2).log_softmax(1), TARGET),
    "nll_loss, summed": lambda x: F.nll_loss(x[0].log_softmax(-1), TARGET[0], reduction="sum"),
    "nll_loss, each": lambda x: F.nll_loss(x[0].log_softmax(-1), TARGET[0], ignore_index=6, reduction="none"),
}
"""What is computed from the ranks' parts, without gathering them."""

OVER_CLASSES: dict[str, Function] = {
    "a bias": lambda x: x + torch.arange(7.0),
    "a bias on the left": lambda x: torch.arange(7.0).view(1, 7) - x,
    "a mask": lambda x: x.masked_fill(torch.arange(7) > 4, -9.0),
    "another dim": lambda x: x.transpose(1, 2) * torch.arange(1.0, 8.0).view(7, 1),
    "of every token": lambda x: torch.where(values() > 1, x, values()),
    "more dims": lambda x: x * torch.arange(1.0, 15.0).view(2, 1, 1, 7),
}
"""Operands with a value for each class: logits stay as they are, unless one rank has all of them."""

GATHER: dict[str, Function] = {
    "softmax over tokens": lambda x: x.softmax(1),
    "argmin": lambda x: x.argmin(-1),
    "max of all": lambda x: x.max(),
    "max of two": lambda x: torch.max(x, torch.ones(())),
    "split of the vocabulary": lambda x: x.split(3, -1)[1],
    "nll_loss over tokens": lambda x: F.nll_loss(x, TARGET[:, :1].expand(2, VOCAB) % 5),
    "topk of tokens": lambda x: x.topk(2, dim=1)[0],
    "smallest": lambda x: x.topk(2, largest=False)[0],
    "stack with others": lambda x: torch.stack([x, torch.ones(2, 5, VOCAB)]),
    "cat over the vocabulary": lambda x: torch.cat([x, x], dim=-1),
    "cat of different maps": lambda x: torch.cat([x, x.transpose(1, 2)[:, :5]], dim=-1),
    "kl_div whose mean torch will change": lambda x: nn.KLDivLoss(reduction="mean")(x.log(), x.square()),
    "kl_div of a plain one": lambda x: F.kl_div(x.log(), values(), reduction="sum"),
    "max over tokens": lambda x: x.amax(1),
    "einsum": lambda x: torch.einsum("bsv,v->bs", x, torch.arange(7.0)),
    "matmul": lambda x: x @ torch.ones(VOCAB, 2),
    "a part of the vocabulary": lambda x: x[..., :5],
    "every other class": lambda x: x[..., ::2],
    "one class": lambda x: x[..., 3],
    "a class for each token": lambda x: x[0, torch.arange(5), torch.tensor([0, 6, 1, 2, 3])],
    "a mask over everything": lambda x: x[values() > 1],
    "one that is computed": lambda x: x[x > 1],
    "merged": lambda x: x.view(-1),
    "merged by flatten": lambda x: x.flatten(1),
    "view as another dtype": lambda x: x.detach().view(torch.int32),
    "transposed operands": lambda x: x[:, :1, :].transpose(1, 2) + x[:, 1:2],
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "a slice that was copied": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "cpu": lambda x: x.cpu(),
}


class Cubed(torch.autograd.Function):
    """Somebody's own fused loss: ``apply`` does not go through ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def values() -> Tensor:
    return torch.rand(2, 5, VOCAB, generator=torch.Generator().manual_seed(0)) + 0.5


def sharded(group: TPGroup, ownership: Ownership) -> tuple[Tensor, VocabParallelLogits]:
    shard = Shard(((2, ownership),))
    local = part(values(), shard, group.rank).requires_grad_()
    return local, VocabParallelLogits(local, shard, group)


def whole_gradient(local: Tensor, ownership: Ownership, rank: int) -> Tensor:
    assert local.grad is not None
    index = torch.tensor(ownership.indices(rank), dtype=torch.long)
    gradient = torch.zeros(2, 5, VOCAB).index_add_(2, index, local.grad.float())
    dist.all_reduce(gradient)
    return gradient


def check(group: TPGroup, ownership: Ownership, name: str, function: Function, stays: bool) -> None:
    local, logits = sharded(group, ownership)
    whole = values().requires_grad_()
    truth, result = function(whole), function(logits)

    def say(text: str) -> str:
        return f"{name}, {ownership}: {text}"

    if stays:
        assert isinstance(result, VocabParallelLogits), say("was gathered")
        assert result.shape == truth.shape, say("wrong shape")
        assert result.dtype == truth.dtype, say("wrong dtype")
        result = result.full()
    assert type(result) in (Tensor, GatheredLogits), say(f"is a {type(result)}")
    torch.testing.assert_close(result, truth, rtol=1e-6, atol=1e-7, msg=say)
    if not truth.requires_grad:
        return
    assert result.requires_grad, say("has no gradient")
    upstream = torch.rand(truth.shape, generator=torch.Generator().manual_seed(1), dtype=truth.dtype) + 0.5
    truth.backward(upstream)
    result.backward(upstream)
    assert whole.grad is not None
    assert whole.grad.abs().sum() > 0, say("nothing to compare")
    torch.testing.assert_close(whole_gradient(local, ownership, group.rank), whole.grad, rtol=1e-5, atol=1e-6, msg=say)


def hugging_face_loss(group: TPGroup, ownership: Ownership) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    labels = torch.tensor([[0, 6, -100, 2, 5], [1, 1, 3, -100, 4]])
    for options in ({}, {"num_items_in_batch": torch.tensor(6)}):
        whole = values().bfloat16().requires_grad_()
        truth = ForCausalLMLoss(whole, labels, vocab_size=VOCAB, **options)
        truth.backward()
        shard = Shard(((2, ownership),))
        local = part(values().bfloat16(), shard, group.rank).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = ForCausalLMLoss(VocabParallelLogits(local, shard, group), labels, vocab_size=VOCAB, **options)
        assert type(loss) is Tensor
        torch.testing.assert_close(loss, truth, rtol=1e-5, atol=0)
        loss.backward()
        assert whole.grad is not None
        torch.testing.assert_close(
            whole_gradient(local, ownership, group.rank), whole.grad.float(), rtol=2**-7, atol=2**-9
        )


def cross_entropies(group: TPGroup, ownership: Ownership) -> None:
    """Every way to call it: with class indices nothing is gathered, and otherwise it is still right."""
    target = torch.tensor([[0, 6, -100, 2, 5], [1, 1, 3, -100, 4]])
    weight = torch.arange(1.0, 8.0)
    probabilities = values().softmax(-1)
    quiet: dict[str, Function] = {
        "function": lambda x: F.cross_entropy(x.view(-1, VOCAB), target.view(-1), label_smoothing=0.1),
        "positional": lambda x: F.cross_entropy(
            x.flatten(0, 1), target.abs().flatten() % 7, weight, None, 3, None, "sum"
        ),
        "module": lambda x: nn.CrossEntropyLoss(weight, reduction="none")(x.transpose(1, 2), target),
        "one token": lambda x: F.cross_entropy(x[0, 1], target[0, 1]),
    }
    gathering: dict[str, Function] = {
        "probabilities": lambda x: F.cross_entropy(x.view(-1, VOCAB), probabilities.view(-1, VOCAB)),
        "the vocabulary is not the class dim": lambda x: F.cross_entropy(x, torch.ones(2, VOCAB, dtype=torch.long)),
        "deprecated reduce": lambda x: F.cross_entropy(x.view(-1, VOCAB), target.view(-1), reduce=False),
    }
    for name, function in quiet.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(group, ownership, name, function, stays=False)
    for name, function in gathering.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(group, ownership, name, function, stays=False)


def learned_operand(group: TPGroup, ownership: Ownership) -> None:
    """A temperature or a bias that is learned gets the gradient of all classes, on every rank."""
    results = []
    for logits in (values(), sharded(group, ownership)[1]):
        temperature = torch.tensor([1.5], requires_grad=True)
        per_token = torch.ones(5, 1, requires_grad=True)
        bias = torch.ones(VOCAB, requires_grad=True)
        used = (logits + bias) / temperature * per_token
        F.cross_entropy(used.view(-1, VOCAB), torch.arange(10) % VOCAB).backward()
        assert temperature.grad is not None
        assert temperature.grad.abs().item() > 1e-3
        results.append((temperature.grad, per_token.grad, bias.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def part_of_an_operand(group: TPGroup, ownership: Ownership) -> None:
    """A plan may give this rank's part of an operand, whose gradients add up over the ranks."""
    whole, bias = values(), torch.arange(7.0, requires_grad=True)
    ((whole + bias) ** 2).sum().backward()
    own = part(bias.detach(), Shard(((0, ownership),)), group.rank).requires_grad_()
    (sharded(group, ownership)[1] + own).square().sum().backward()
    assert own.grad is not None
    found = torch.zeros(VOCAB).index_add(0, torch.tensor(ownership.indices(group.rank)), own.grad)
    dist.all_reduce(found)
    torch.testing.assert_close(found, bias.grad, rtol=1e-5, atol=1e-7)


def beneath_python(group: TPGroup, ownership: Ownership) -> None:
    """What bypasses ``__torch_function__`` sees the whole values, and its gradient arrives."""
    whole = values().requires_grad_()
    Cubed.apply(whole).backward()
    local, logits = sharded(group, ownership)
    loss = Cubed.apply(logits)
    torch.testing.assert_close(loss, (values() ** 3).sum(), rtol=1e-5, atol=0)
    loss.backward()
    assert whole.grad is not None
    torch.testing.assert_close(whole_gradient(local, ownership, group.rank), whole.grad, rtol=1e-5, atol=0)
    plain = logits.detach()
    with torch._C.DisableTorchFunctionSubclass():
        torch.testing.assert_close(logits * 2, values() * 2, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="in place"):
            plain.mul_(2)


def in_place(group: TPGroup, ownership: Ownership) -> None:
    _, logits = sharded(group, ownership)
    changes: list[Function] = [
        lambda x: x.mul_(2),
        lambda x: x.__imul__(2),
        lambda x: x.__setitem__((0, 0, 0), 1.0),
        lambda x: torch.relu_(x),
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.requires_grad_(False),
        lambda x: setattr(x, "data", torch.zeros(1)),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match=r"in place \(VocabParallelLogits.*logits = logits \* 2.*full\(\)"):
            change(logits)
    torch.testing.assert_close(logits.full(), values(), rtol=0, atol=0)


VIEWS: dict[str, Function] = {
    "part of the vocabulary": lambda x: x[..., 2:],
    "an element": lambda x: x[0, 1, 2],
    "narrow": lambda x: x.narrow(-1, 0, 3),
    "split": lambda x: x.split(3, -1)[0],
    "chunk": lambda x: torch.chunk(x, 2, dim=-1)[1],
    "unbind": lambda x: x.unbind(-1)[1],
    "rows": lambda x: next(iter(x[..., 1:])),
    "a view that merges the vocabulary": lambda x: x.view(-1),
    "data": lambda x: x.data,
    "a view of a view": lambda x: x.detach()[..., 1:][0].unsqueeze(0),
    "alias": lambda x: x.view_as(x),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "as_strided": lambda x: x.as_strided((3,), (1,)),
}
WRITES: dict[str, Function] = {
    "fill_": lambda x: x.fill_(9.0),
    "mul_": lambda x: torch.Tensor.mul_(x, 2),
    "+=": lambda x: x.__iadd__(1),
    "[...] =": lambda x: x.__setitem__(..., 1.0),
    "through a view": lambda x: x.view_as(x)[...].fill_(9.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy_": lambda x: x.copy_(torch.ones(())),
    "relu_": lambda x: torch.relu_(x),
    "inplace": lambda x: F.relu(x, inplace=True),
}


def views_are_read_only(group: TPGroup, ownership: Ownership) -> None:
    """In one process these writes would change the logits; here they would be lost."""
    _, logits = sharded(group, ownership)
    for name, view in VIEWS.items():
        with torch.no_grad():
            found, truth = view(logits), view(values())
            for what, write in WRITES.items():
                try:
                    write(found)
                except RuntimeError as error:
                    assert "would change a view of shape" in str(error)  # noqa: PT017 (the case is to be named)
                    assert "logits.full()" in str(error)  # noqa: PT017
                else:
                    pytest.fail(f"{name}: {what} was done")
            with pytest.raises(ValueError, match="read-only"):
                found.numpy()[...] = 1.0
            torch.testing.assert_close(torch.empty_like(truth).copy_(found), truth, rtol=0, atol=0)
            for computed in (
                found * 2,
                found.sum(),
                found.clone(),
                copy.deepcopy(found),
                torch.zeros(1).add_(found.max()),
            ):
                assert type(computed) is Tensor, name
            assert type(pickle.loads(pickle.dumps(found))) is Tensor
            assert found.clone().fill_(3.0).eq(3.0).all()
    with torch.no_grad(), pytest.raises(ValueError, match="read-only"):
        logits.numpy()[...] = 1.0


def kept_gradients(group: TPGroup, ownership: Ownership) -> None:
    """``retain_grad`` keeps the whole gradient, and adds up those of several backward passes."""
    whole = values().requires_grad_()
    _, logits = sharded(group, ownership)
    for x in (whole, logits):
        x.retain_grad()
        for _ in range(2):
            F.cross_entropy(x.flatten(0, 1) * 2, torch.arange(x.shape[0] * x.shape[1]) % x.shape[2]).backward()
    assert whole.grad is not None
    assert type(logits.grad) is Tensor
    torch.testing.assert_close(logits.grad, whole.grad, rtol=1e-5, atol=1e-7)


def gradients_through_views(group: TPGroup, ownership: Ownership) -> None:
    whole = values().requires_grad_()
    whole[..., 2:].pow(2).sum().backward()
    local, logits = sharded(group, ownership)
    part = logits[..., 2:]
    part.retain_grad()
    part.pow(2).sum().backward()
    assert part.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(whole_gradient(local, ownership, group.rank), whole.grad, rtol=1e-5, atol=0)


def gradients_of_logits(group: TPGroup, ownership: Ownership) -> None:
    """``torch.autograd.grad`` of logits gives the whole gradient; it never leaves it out without a word."""
    whole = values().requires_grad_()
    scale = torch.tensor(2.0, requires_grad=True)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), torch.arange(10) % VOCAB) * scale

    wanted = torch.autograd.grad(loss(whole), [whole, scale])
    _, logits = sharded(group, ownership)
    found = torch.autograd.grad(loss(logits), [logits, scale], allow_unused=True)
    torch.testing.assert_close(found, wanted)
    (found,) = torch.autograd.grad(loss(logits), logits)
    torch.testing.assert_close(found, wanted[0])
    with pytest.raises(RuntimeError, match=r"was not computed of VocabParallelLogits"):
        torch.autograd.grad(scale * 2, logits, allow_unused=True)


def says_once(group: TPGroup, ownership: Ownership) -> None:
    _, logits = sharded(group, ownership)
    tensor._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits.argmin(-1)
        logits.argmin(-1)
        logits.full()
    said = [str(warning.message) for warning in caught]
    assert len(said) == (group.rank == 0), said
    if said:
        assert "torch.Tensor.argmin" in said[0]
        assert "(2, 5, 7)" in said[0]


def every_check(rank: int, ranks: int, with_all: bool) -> int:
    """Every check with every ownership; not ``with_all``, each function with one of them, in turn."""
    group = TPGroup.of(dist.group.WORLD)
    ownerships = [Ownership.even(VOCAB, ranks)]
    if ranks == 3:
        ownerships.append(Ownership(VOCAB, (((0, 4), (6, 7)), ((3, 5),), ((4, 7),))))
    if ranks == 2:
        # One class on one of the ranks, none on another, and classes that both have.
        ownerships += [Ownership(VOCAB, held) for held in ((((0, 6),), ((6, 7),)), (((0, 7),), ()))]
        ownerships.append(Ownership(VOCAB, (((0, 4), (6, 7)), ((2, 6),))))
    for number, ownership in enumerate(ownerships):
        step = slice(None) if with_all else slice(number, None, len(ownerships))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name, function in [*STAY.items()][step]:
                check(group, ownership, name, function, stays=True)
            for name, function in [*PARTS.items()][step]:
                check(group, ownership, name, function, stays=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in [*GATHER.items()][step]:
                check(group, ownership, name, function, stays=False)
            stay = all(ownership.local_size(each) < VOCAB for each in range(ranks))
            for name, function in OVER_CLASSES.items():
                check(group, ownership, name, function, stay)
            beneath_python(group, ownership)
            views_are_read_only(group, ownership)
            gradients_through_views(group, ownership)
            kept_gradients(group, ownership)
        cross_entropies(group, ownership)
        gradients_of_logits(group, ownership)
        hugging_face_loss(group, ownership)
        learned_operand(group, ownership)
        if all(1 < ownership.local_size(each) < VOCAB for each in range(ranks)):
            part_of_an_operand(group, ownership)
        in_place(group, ownership)
        says_once(group, ownership)
    return len(ownerships)


@pytest.mark.parametrize(
    ("ranks", "with_all"), [(3, False), *(pytest.param(ranks, True, marks=pytest.mark.nightly) for ranks in (2, 3))]
)
def test_functions_on_sharded_logits_are_those_on_whole_ones(ranks: int, with_all: bool) -> None:
    run_ranks(every_check, ranks, with_all)


def test_every_pointwise_function_is_checked() -> None:
    checked = {*UNARY, *BINARY, *OPERATORS, "__neg__", "__abs__", "clamp", "clip", "masked_fill"}
    checked |= {"lerp", "maximum", "minimum", "where"}
    table = {function.__name__ for function, handler in tensor.HANDLERS.items() if handler is elementwise.pointwise}
    assert table <= checked | {"_wrapped", "wrapped"}, table - checked


def test_what_the_wrapper_knows_needs_no_group() -> None:
    logits = on_meta()
    assert logits.shape == logits.size() == (2, 5, VOCAB)
    assert (logits.size(-1), logits.dim(), logits.ndim, logits.numel(), len(logits)) == (VOCAB, 3, 3, 70, 2)
    assert (logits.dtype, logits.device.type, logits.is_meta) == (torch.float32, "meta", True)
    assert logits.is_floating_point()
    assert torch.is_floating_point(logits)
    assert not logits.requires_grad
    assert logits.grad_fn is None
    assert logits.is_contiguous()
    assert not logits.transpose(0, 1).is_contiguous()
    assert {logits: 1}[logits] == 1
    expected = (
        "VocabParallelLogits(shape=(2, 5, 7), local=(2, 5, 4), S(2: 7 -> [4, 3]), rank 0 of 2, torch.float32, meta)"
    )
    assert repr(logits) == str(logits) == f"{logits}" == expected
    differentiable = VocabParallelLogits(torch.zeros(2, 5, 4, requires_grad=True), logits.shard, logits.group)
    assert differentiable.requires_grad
    assert differentiable.grad_fn is not None
    assert not differentiable.detach().requires_grad
    with torch.no_grad():
        assert not (differentiable * 2).requires_grad


def test_logits_must_fit_their_layout() -> None:
    seven = Ownership.even(VOCAB, 2)
    with pytest.raises(ValueError, match="rank 0 has 4 of the vocabulary"):
        VocabParallelLogits(torch.zeros(2, 3), Shard(((1, seven),)), TPGroup("", 0, 2))
    with pytest.raises(ValueError, match="does not fit a local tensor"):
        VocabParallelLogits(torch.zeros(4), Shard(((1, seven),)), TPGroup("", 0, 2))
    with pytest.raises(ValueError, match="over one dim"):
        VocabParallelLogits(torch.zeros(4, 4), Shard(((0, seven), (1, seven))), TPGroup("", 0, 2))


def test_a_trace_shows_what_happens_to_the_local_part() -> None:
    like = on_meta()

    class Loss(nn.Module):
        def forward(self, local: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            logits = VocabParallelLogits(local, like.shard, like.group)
            logits = trace.record("boundary", [logits], logits.shape)
            assert isinstance(logits, VocabParallelLogits)
            scaled = logits[..., :-1, :] * 2
            return F.cross_entropy(scaled.reshape(-1, VOCAB), target), logits.full()

    inputs = torch.empty(2, 5, 4, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    graph = torch.export.export(Loss(), inputs, strict=False).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    shown = [
        (node.args[0], list(node.args[2])) if "record" in str(node.target) else (str(node.target), list(node.args[1:]))
        for node in calls
    ]
    assert shown == [
        ("boundary", [2, 5, 4]),
        ("aten.slice.Tensor", [1, 0, -1]),
        ("aten.mul.Tensor", [2]),
        ("aten.reshape.default", [[-1, 4]]),
        ("vocab_parallel_cross_entropy", []),
        ("shard_to_invariant", [2, 5, VOCAB]),
    ]
