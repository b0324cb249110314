"""Log-probabilities of tokens on vocabulary-sharded logits, against ``log_softmax`` and ``gather`` in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from shards import maps, part
from tiny import tiny_model, token_batch
from torch import Tensor

from lightning_autotp import full_gradients, parallelize
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Shard
from lightning_autotp.losses import token_log_probs
from lightning_autotp.parallel import TPGroup, VocabParallelLogits, convert

PADDING = -100


def truth(logits: Tensor, tokens: Tensor) -> Tensor:
    """By the definition, zero for padding."""
    found = logits.log_softmax(-1).gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(tokens == PADDING, 0.0)


def example(classes: int, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits = 4 * torch.randn(2, 5, classes, generator=generator, dtype=torch.double)
    tokens = torch.randint(0, classes, (2, 5), generator=generator)
    tokens[0, :2] = torch.tensor([PADDING, classes - 1])
    return logits.to(dtype), tokens


def weights(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.double)


def derivatives(of: Any, whole: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values, their gradient, and the gradient of a penalty on it."""
    x = whole.clone().requires_grad_()
    values = of(x, tokens)
    (gradient,) = torch.autograd.grad((values.exp() * weights(values.shape)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.pow(3).sum(), x)
    return values.detach(), gradient.detach(), second


def on_every_map(rank: int, size: int) -> dict[str, Any]:
    group = TPGroup.of(dist.group.WORLD)
    seen: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is gathered
        for name, ownership in maps(size).items():
            shard = Shard(((2, ownership),))

            def divided(x: Tensor, tokens: Tensor, shard: Shard = shard) -> Tensor:
                return token_log_probs(VocabParallelLogits(convert(x, Invariant(), shard, group), shard, group), tokens)

            seen[name] = derivatives(divided, *example(ownership.size))
            low, tokens = example(ownership.size, torch.bfloat16)
            seen[f"{name}, bf16"] = divided(low, tokens)
    shard = Shard(((1, Ownership.even(7, size)),))
    logits, tokens = example(7)
    sharded = VocabParallelLogits(part(logits.flatten(0, 1), shard, rank), shard, group)
    seen["one dim"] = token_log_probs(sharded, tokens.flatten().int())
    seen["nothing"] = token_log_probs(sharded[:0], tokens.flatten()[:0])
    tries = mistakes(sharded, tokens.flatten()) | {"transposed": (sharded.transpose(0, 1), tokens.flatten()[:7])}
    for case, arguments in tries.items():
        try:
            token_log_probs(*arguments)
        except (ValueError, TypeError, IndexError) as error:
            seen[case] = f"{type(error).__name__}: {error}"
    return seen


def mistakes(logits: Tensor, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        "out of range": (logits, tokens.masked_fill(tokens == 3, 7)),
        "negative": (logits, tokens.masked_fill(tokens == PADDING, -1)),
        "shape": (logits, tokens.view(2, 5)),
        "integers": (logits.long(), tokens),
        "probabilities": (logits, tokens.double()),
    }


@pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_every_map_equals_one_process(number: int) -> None:
    for seen in run_ranks(on_every_map, number):
        for name, ownership in maps(number).items():
            wanted = derivatives(truth, *example(ownership.size))
            for found, value in zip(seen[name], wanted, strict=True):
                assert value.abs().max() > 0
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
            low, tokens = example(ownership.size, torch.bfloat16)
            assert seen[f"{name}, bf16"].dtype == torch.float32
            torch.testing.assert_close(seen[f"{name}, bf16"], truth(low.float(), tokens), rtol=1e-5, atol=1e-5)
            assert not seen[name][0][0, 0].signbit()
        logits, tokens = example(7)
        torch.testing.assert_close(seen["one dim"], truth(logits, tokens).flatten())
        assert seen["nothing"].shape == (0,)
        assert seen["out of range"].startswith("IndexError")
        assert seen["negative"].startswith("IndexError")
        assert "need tokens of shape (10,)" in seen["shape"]
        assert "sharded in dim 0, but the vocabulary must be the last dim" in seen["transposed"]
        assert "logits are floating-point numbers" in seen["integers"]
        assert "tokens are ids, integers" in seen["probabilities"]


@pytest.mark.parametrize("dtype", [torch.double, torch.float32, torch.bfloat16])
def test_ordinary_logits(dtype: torch.dtype) -> None:
    logits, tokens = example(131, dtype)
    exact = logits.to(torch.promote_types(dtype, torch.float32))
    for found, wanted in zip(
        derivatives(token_log_probs, logits, tokens), derivatives(truth, exact, tokens), strict=True
    ):
        torch.testing.assert_close(
            found, wanted.to(found.dtype), rtol=1e-2 if found.dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )


def test_mistakes_with_ordinary_logits() -> None:
    logits, tokens = example(7)
    for arguments in mistakes(logits.flatten(0, 1), tokens.flatten()).values():
        with pytest.raises((ValueError, TypeError, IndexError)):
            token_log_probs(*arguments)


# --- a preference loss on a real model ---


def preference(model: Any) -> Tensor:
    """DPO's loss against a reference of zero, with everything but the answer masked."""
    chosen, rejected = token_batch(1), token_batch(2)
    sums = []
    for batch in (chosen, rejected):
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        sums.append(token_log_probs(logits / 0.7, batch["labels"][:, 1:]).sum(-1))
    return -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1])).mean()


def preferred(rank: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    model = tiny_model("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96).double()
    parallelize(model, dist.group.WORLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is divided over the ranks.*")
        loss = preference(model)
        loss.backward()
    return loss.detach(), full_gradients(model)


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_preference_loss(number: int) -> None:
    model = tiny_model("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96).double()
    wanted = preference(model)
    wanted.backward()
    for loss, gradients in run_ranks(preferred, number):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error, scale = (gradients[name] - parameter.grad).abs().max(), parameter.grad.abs().max()
            assert scale > 0
            assert error < 1e-4 * scale, f"{name} is off by {error / scale:.1e}"
