"""Code outside of a parallel model that uses its parameters: what gives the whole model's values goes on."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from io import BytesIO
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiny import tiny_model
from torch import Tensor, distributions, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.functional import mean_squared_error
from trainer_ranks import run_trainer_ranks
from training import error_of

from lightning_autotp import AutoTPStrategy, UnsoundUse, checked, full_gradients, full_tensor, parallelize

IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(1))

Use = Callable[[Any, Tensor], Any]


def recomputed(model: Any, hidden: Tensor) -> None:
    """The backward pass calls blocks by themselves."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    model.gradient_checkpointing_disable()


def drawn_into(shape: torch.Size) -> Tensor:
    buffer = torch.zeros(2, *shape)
    buffer[0].normal_()
    return buffer[0]


def first_rows(shape: torch.Size) -> Tensor:
    mask = torch.ones(shape)
    mask[:3] = 0
    return mask


MADE: dict[str, Callable[[torch.Size], Tensor]] = {
    "random numbers": lambda shape: torch.randn(shape) * 0.1,
    "random rows": lambda shape: torch.rand(shape[0], 1),
    "a mask that is drawn": lambda shape: torch.bernoulli(torch.full(shape, 0.5)),
    "a mask of rows": first_rows,
    "an order": lambda shape: torch.randperm(shape[0]).float().unsqueeze(1),
    "row numbers": lambda shape: torch.arange(shape[0])[:, None].float(),
    "steps": lambda shape: torch.linspace(0, 1, shape[0]).view(-1, 1),
    "a list": lambda shape: torch.tensor([[0.5]] * shape[0]),
    "initialized ones": lambda shape: nn.init.kaiming_uniform_(torch.empty(shape)),
    "a buffer that is drawn into": drawn_into,
}
"""Tensors that have another number at each place, of a shape that is asked for."""


def histogram(model: Any, hidden: Tensor) -> None:
    with TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_histogram("head", model.lm_head.weight, 0)


def averaged(model: Any, hidden: Tensor) -> None:
    """By torch's own averages of a model: the copy is one of parts, too."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        average.update_parameters(model)
    whole = full_tensor(model, "lm_head.weight").detach()
    torch.testing.assert_close(full_tensor(average.module, "lm_head.weight").detach(), whole)


def beside_a_part(make: Callable[[torch.Size], Tensor]) -> Use:
    return lambda m, h: m.lm_head.weight.data.add_(make(m.lm_head.weight.shape))


def beside_a_gradient(make: Callable[[torch.Size], Tensor]) -> Use:
    return lambda m, h: m.lm_head.weight.grad.mul_(make(m.lm_head.weight.grad.shape))


UNSOUND: dict[str, tuple[Use, str]] = {
    "an own head": (lambda m, h: F.linear(h, m.lm_head.weight), "linear on lm_head.weight"),
    "matmul": (lambda m, h: h @ m.lm_head.weight.t(), "on lm_head.weight"),
    "transposed": (lambda m, h: h @ m.lm_head.weight.T, "on lm_head.weight"),
    "transposed data": (lambda m, h: m.lm_head.weight.data.mT.norm(), "norm on lm_head.weight"),
    "norms of columns": (lambda m, h: m.lm_head.weight.data.norm(dim=0), "norm on lm_head.weight"),
    "rows of an embedding": (
        lambda m, h: m.model.embed_tokens.weight[IDS], "__getitem__ on model.embed_tokens.weight"
    ),
    "lookup": (lambda m, h: F.embedding(IDS, m.model.embed_tokens.weight), "embedding on model.embed_tokens.weight"),
    "L2 of a part": (lambda m, h: m.lm_head.weight.pow(2).sum(), "sum on lm_head.weight"),
    "norm of data": (lambda m, h: m.lm_head.weight.data.norm(), "norm on lm_head.weight"),
    "norm of a copy": (lambda m, h: (m.lm_head.weight.detach().clone() * 2).norm(), "norm on lm_head.weight"),
    "L2 of all": (lambda m, h: sum(p.pow(2).sum() for p in m.parameters()), "sum on model.embed_tokens.weight"),
    "new rows": (lambda m, h: m.lm_head.weight.data.__setitem__(slice(-5, None), 0), "__setitem__ on lm_head.weight"),
    "noise": (lambda m, h: m.lm_head.weight.data.add_(torch.randn_like(m.lm_head.weight)), "randn_like on lm_head"),
    "initialized": (lambda m, h: nn.init.normal_(m.lm_head.weight), "normal_ on lm_head.weight"),
    "L2-SP": (
        lambda m, h: nn.MSELoss(reduction="sum")(m.lm_head.weight, torch.zeros_like(m.lm_head.weight).clone()),
        "mse_loss on lm_head.weight",
    ),
    "one vector": (lambda m, h: nn.utils.parameters_to_vector(m.parameters()), "view on model.embed_tokens.weight"),
    "norm of all": (lambda m, h: nn.utils.get_total_norm(m.parameters()), "norm on model.embed_tokens.weight"),
    "distance": (
        lambda m, h: nn.CosineSimilarity()(m.lm_head.weight, m.lm_head.weight).mean(), "mean on lm_head.weight"
    ),
    "broadcast": (
        lambda m, h: (m.lm_head.weight - torch.arange(3.0)[:, None, None]).square().amin(0).sum(),
        "sum on lm_head.weight",
    ),
    "another part beside it": (
        lambda m, h: m.lm_head.weight * m.model.layers[0].mlp.up_proj.weight[:1], "__getitem__ on model.layers.0.mlp"
    ),
    "places": (lambda m, h: torch.where(m.lm_head.weight.data > 0), "where on lm_head.weight"),
    "stacked": (lambda m, h: torch.stack([m.lm_head.weight.float()]).norm(), "norm on lm_head.weight"),
    "L1": (lambda m, h: nn.L1Loss()(m.lm_head.weight, torch.ones(m.lm_head.weight.shape)), "l1_loss on lm_head.weight"),
    "pairwise distance": (
        lambda m, h: nn.PairwiseDistance()(m.lm_head.weight, torch.ones(m.lm_head.weight.shape)).sum(),
        "sum on lm_head.weight",
    ),
    "of one vector": (
        lambda m, h: nn.utils.vector_to_parameters(torch.ones(99_999), m.parameters()), "view_as on model.embed_tokens"
    ),
    "a distribution": (lambda m, h: distributions.Normal(m.lm_head.weight, 1.0), "all on lm_head.weight"),
    "a histogram": (histogram, "numpy on lm_head.weight"),
    **{f"{what} of a part's shape": (beside_a_part(make), "add_ on lm_head.weight") for what, make in MADE.items()},
    **{f"{what} for a gradient": (beside_a_gradient(make), "mul_ on lm_head.weight") for what, make in MADE.items()},
    "copied noise": (lambda m, h: m.lm_head.weight.data.copy_(2 * torch.randn(m.lm_head.weight.shape)), "copy_ on lm"),
    "noise in its place": (
        lambda m, h: setattr(m.lm_head.weight, "data", torch.randn(m.lm_head.weight.shape)), "__set__ on lm_head.weight"
    ),
    "noise for a gradient": (
        lambda m, h: setattr(m.lm_head.weight, "grad", torch.randn(m.lm_head.weight.shape)), "__set__ on lm_head.weight"
    ),
    "noise in lists": (
        lambda m, h: torch._foreach_add_([m.lm_head.weight.data], [torch.randn(m.lm_head.weight.shape)]),
        "_foreach_add_ on lm_head.weight",
    ),
}  # fmt: skip
SOUND: dict[str, Use] = {
    "the model": lambda m, h: m(input_ids=IDS, labels=IDS).loss.backward(),
    "activation checkpointing": recomputed,
    "a copy of the model": lambda m, h: copy.deepcopy(m)(input_ids=IDS, labels=IDS).loss.backward(),
    "shapes": lambda m, h: (m.lm_head.weight.shape, m.lm_head.weight.dtype, m.lm_head.weight.device),
    "scaled": lambda m, h: m.lm_head.weight.data.mul_(0.99),
    "copied": lambda m, h: m.lm_head.weight.data.copy_(m.lm_head.weight.detach().clone()),
    "frozen": lambda m, h: m.lm_head.weight.requires_grad_(False).requires_grad_(True),
    "whole parameters": lambda m, h: m.model.norm.weight.pow(2).sum(),
    "elements in their place": lambda m, h: m.lm_head.weight.data.__setitem__(..., m.lm_head.weight.data * 2),
    "a view of more dims": lambda m, h: m.lm_head.weight.data.unsqueeze(0)[None].mul_(2),
    "an average": lambda m, h: torch._foreach_lerp_(
        [p.data.clone() for p in m.parameters()], [p.data for p in m.parameters()], 0.1
    ),
    "an averaged model": averaged,
    "saved parts": lambda m, h: torch.save(m.state_dict(), BytesIO()),
    "one random number": lambda m, h: m.lm_head.weight.data.add_(torch.rand(1)).add_(torch.randn(())),
    "other numbers by column": lambda m, h: m.lm_head.weight.data.mul_(torch.arange(64.0)),
    "a mask of the whole": lambda m, h: m.lm_head.weight.grad.mul_(torch.arange(131)[:, None] > 9),
    "noise of the whole": lambda m, h: m.lm_head.weight.grad.add_(torch.randn(131, 64)),
    "noise": lambda m, h: m.lm_head.weight.grad.add_(torch.randn_like(m.lm_head.weight.grad)),
    "an own momentum": lambda m, h: m.lm_head.weight.data.sub_(
        torch.zeros(m.lm_head.weight.shape).add_(m.lm_head.weight.grad).mul_(torch.full(m.lm_head.weight.shape, 0.1))
    ),
    "own tensors": lambda m, h: F.cross_entropy(h @ torch.ones(64, 5), torch.zeros(9, dtype=torch.long)),
}


def own_gradients(model: Any) -> float:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) + float(model.lm_head.weight.grad.norm())


def own_gradients_in_a_list(model: Any) -> float:
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 2.0)
    return float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], foreach=False))


def own_buffers(model: Any) -> float:
    model(input_ids=IDS, labels=IDS).loss.backward()
    buffers = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for buffer, parameter in zip(buffers, model.parameters(), strict=True):
        buffer.mul_(0.9).add_(parameter.grad)
    return float(torch.stack([buffer.norm() for buffer in buffers]).norm())


def own_gradients_in_a_step(model: Any) -> float:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 2.0)
    optimizer.step()
    return float(model.lm_head.weight.grad.norm())


def checkpointed_loss(model: Any) -> float:
    """Computed again in the backward pass, of logits that are there."""

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    loss: Tensor = checkpoint(loss_of, model(input_ids=IDS).logits, use_reentrant=False)
    loss.backward()
    return loss.item() + float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


def tracked_memory(model: Any) -> float:
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return loss.item() + float(model.lm_head.weight.grad.norm())


def under_a_mode(kind: Callable[[], Any], model: Any) -> float:
    """With a mode that sees every operator; one that also hooks what modules return is an error (``late_logits``)."""
    with kind():
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return loss.item() + float(model.lm_head.weight.grad.norm())


def balanced_losses(model: Any) -> float:
    """As GradNorm weighs two losses, by the norms of their gradients for some weights."""
    output = model(input_ids=IDS, labels=IDS)
    losses = output.loss, output.logits.square().mean()
    weights = [model.model.layers[-1].mlp.down_proj.weight, model.model.norm.weight]
    one, other = (nn.utils.get_total_norm(torch.autograd.grad(loss, weights, retain_graph=True)) for loss in losses)
    (losses[0] + one / other * losses[1]).backward()
    return float(one / other) + float(model.lm_head.weight.grad.norm())


def rows_of_length_one(model: Any) -> float:
    """Of a weight that is cut by rows: each rank has their norms."""
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.div_(weight.norm(dim=1, keepdim=True))
        weight.mul_(weight.softmax(-1).amax(1).unsqueeze(1))
    return float(model(input_ids=IDS, labels=IDS).loss)


AS_IN_ONE_PROCESS: dict[str, Callable[[Any], float]] = {
    "rows of length one": rows_of_length_one,
    "own gradients are clipped": own_gradients,
    "own gradients in a list": own_gradients_in_a_list,
    "own gradients in a step": own_gradients_in_a_step,
    "own buffers": own_buffers,
    "a loss that is computed again": checkpointed_loss,
    "losses weighed by their gradients": balanced_losses,
    "a tracker of memory": tracked_memory,
    "a debugging mode": partial(under_a_mode, DebugMode),
    "a mode that logs": partial(under_a_mode, LoggingTensorMode),
}


def read_alike(model: Any, whole: Any) -> int:
    for name, use in AS_IN_ONE_PROCESS.items():
        wanted = use(whole)
        assert use(model) == pytest.approx(wanted, rel=1e-5), name
        whole.zero_grad()
        model.zero_grad()
        wanted = use(whole)
        with checked(model):
            assert use(model) == pytest.approx(wanted, rel=1e-5), f"{name}, watched"
        whole.zero_grad()
        model.zero_grad()
    return len(AS_IN_ONE_PROCESS)


class ThroughData(torch.optim.SGD):
    """An optimizer of the user's whose writes no tensor counts."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def late_logits(model: Any) -> str:
    """Of weights that were written since, so that they cannot be computed any more; and an error of a mode that hooks.

    Returns:
        What is said in the end.
    """
    model.zero_grad()
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    ThroughData(model.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="not needed until now, and the weight that they are made of changed"):
        output.logits.clone()
    for write in (lambda w: w.data.mul_(2), lambda w: torch._foreach_mul_([w.data], 2.0)):
        with checked(model):
            output = model(input_ids=IDS)
            model.model.norm.weight.data.mul_(2)  # not what logits are made of
            assert output.logits[:, 1:].isfinite().all()
            output = model(input_ids=IDS)
            write(model.lm_head.weight)
        with pytest.raises(RuntimeError, match="not needed until now, and the weight that they are made of changed"):
            output.logits.clone()
    with CommDebugMode(), pytest.raises(RuntimeError) as hooked:
        model(input_ids=IDS, labels=IDS).loss.backward()
    return str(hooked.value)


class Pair(nn.Module):
    """Two models that share their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (tiny_model("llama", seed, num_hidden_layers=1) for seed in (1, 2))
        self.other.model.embed_tokens.weight = self.one.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        losses = [model(input_ids=input_ids, labels=input_ids).loss for model in (self.one, self.other)]
        return losses[0] + 2 * losses[1]


def shared_embeddings() -> str:
    pair = Pair()
    whole = copy.deepcopy(pair)
    parallelize(pair, dist.group.WORLD, example_inputs={"input_ids": torch.zeros(5, 61, dtype=torch.long)})
    for each in pair, whole:
        each(IDS).backward()
    gradients = full_gradients(pair)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    one, other = Pair().children()
    parallelize(one, dist.group.WORLD)
    return error_of(parallelize, other, dist.group.WORLD)


def uses(model: Any) -> int:
    model(input_ids=IDS, labels=IDS).loss.backward()
    hidden = torch.randn(9, 64)
    for name, (use, text) in UNSOUND.items():
        with checked(model), pytest.raises(UnsoundUse) as raised:
            use(model, hidden)
        assert text in str(raised.value), name
        assert "test_checked.py:" in str(raised.value), name
        assert "full_tensor" in str(raised.value), name
    weight = model.lm_head.weight
    with checked(model), pytest.raises(UnsoundUse, match=r"on lm_head\.weight.*\n  at mse\.py"):
        mean_squared_error(weight, torch.ones(weight.shape))
    for use in SOUND.values():
        with checked(model):
            use(model, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with checked(model):
        optimizer.step()
        with pytest.raises(UnsoundUse, match=r"mean on lm_head\.weight"):
            optimizer.state[model.lm_head.weight]["exp_avg"].mean()
        with pytest.raises(UnsoundUse, match=r"on lm_head\.weight"):
            optimizer.state[model.lm_head.weight]["exp_avg"][1:3] = 0.0
        optimizer.state[model.lm_head.weight]["exp_avg"].mul_(0.5)
    return len(UNSOUND) + len(SOUND)


def summed(rank: int, size: int) -> None:
    """A norm over heads: every rank has its weight, and its gradients are summed."""
    model: Any = tiny_model("qwen3", num_hidden_layers=1)
    parallelize(model, dist.group.WORLD)
    weight = model.model.layers[0].self_attn.q_norm.weight
    with checked(model):
        with pytest.raises(UnsoundUse, match="its gradient is summed over the ranks"):
            weight.square()
        weight.detach().square().sum()
        with torch.no_grad():
            weight.square().sum()
        loss = model(input_ids=IDS, labels=IDS).loss
        (gradient,) = torch.autograd.grad(loss, [weight], retain_graph=True)
        loss.backward()
        torch.testing.assert_close(gradient, weight.grad)


def test_a_penalty_on_a_parameter_whose_gradient_is_summed_would_count_on_every_rank() -> None:
    run_ranks(summed, 3)


def submodules(model: Any) -> torch.Size:
    with checked(model):
        model.model(input_ids=IDS)  # gives what is whole
        shape: torch.Size = model.model.layers[0].self_attn.q_proj(torch.randn(1, 2, 64)).shape
        return shape


def of_one_model(rank: int, size: int) -> dict[str, Any]:
    """What parts of these tests find, in turn: an error in one of them ends all."""
    model: Any = tiny_model("llama", num_hidden_layers=1)
    whole = copy.deepcopy(model)
    parallelize(model, dist.group.WORLD)
    return {
        "submodules": submodules(model),
        "read alike": read_alike(model, whole),
        "uses": uses(model),
        "late": late_logits(model),
        "shared embeddings": shared_embeddings(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(of_one_model, 2)


def test_a_submodule_called_by_itself_gives_what_is_whole(two: list[dict[str, Any]]) -> None:
    assert all(seen["submodules"] == (1, 2, 64) for seen in two)


def test_gradients_that_code_makes_itself_are_read_as_in_one_process(two: list[dict[str, Any]]) -> None:
    assert all(seen["read alike"] == len(AS_IN_ONE_PROCESS) for seen in two)


def test_uses_of_a_part_are_errors_and_others_go_on(two: list[dict[str, Any]]) -> None:
    assert all(seen["uses"] == len(UNSOUND) + len(SOUND) for seen in two)


def test_logits_that_are_late_are_an_error(two: list[dict[str, Any]]) -> None:
    said = r"torch\.distributed\._tools\.mod_tracker, line \d+ added a hook .* keep_whole="  # by which that mode hooks
    assert all(re.match(said, seen["late"]) for seen in two)


def test_two_models_share_embeddings_as_one(two: list[dict[str, Any]]) -> None:
    assert all("is also a parameter of" in seen["shared embeddings"] for seen in two)


OPTIMIZERS: list[Any] = []


class Penalised(L.LightningModule):
    """Adds a penalty on the head in the step that it is told to; all runs train one model, which is divided once."""

    def begin(self, at: int, optimizer: Any) -> None:
        self.at, self.optimizer = at, optimizer
        self.losses: list[float] = []
        self.zero_grad()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_model("llama", num_hidden_layers=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        if batch_idx == self.at:
            loss = loss + self.model.lm_head.weight.square().sum()
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(input_ids=batch)

    def configure_optimizers(self) -> Any:
        OPTIMIZERS.append(self.optimizer(self.parameters(), 0.01, momentum=0.9))
        return OPTIMIZERS[-1]


class Outside(L.Callback):
    """Uses weights in a hook, outside of the training step."""

    def __init__(self, hook: str, use: Callable[[nn.Parameter], Any]) -> None:
        self.calls = 0

        def called(trainer: L.Trainer, task: L.LightningModule, *_: Any) -> None:
            self.calls += 1
            use(task.model.lm_head.weight)

        setattr(self, hook, called)


def lars(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad *= weight.norm() / weight.grad.norm()


def look_for(weight: nn.Parameter) -> None:
    """As BaseFinetuning looks for a parameter among those of an optimizer."""
    assert torch.equal(weight, weight)
    assert not torch.equal(weight, weight.detach() + 1.0)
    assert not torch.equal(weight, torch.ones(weight.shape))


HOOKS: dict[str, tuple[str, Callable[[nn.Parameter], Any], str]] = {
    "LARS": ("on_before_optimizer_step", lars, "norm on"),
    "LARS, with accumulation": ("on_before_optimizer_step", lars, "norm on"),
    "each epoch": ("on_train_epoch_end", lambda p: p.data[-3:, -3:].zero_(), "__getitem__ on"),
    "a later validation": ("on_validation_end", lambda p: p.mean(), "mean on"),
    "validation by steps": ("on_validation_end", lambda p: p.mean(), "mean on"),
    "comparing": ("on_train_batch_end", look_for, ""),
    "equal parts": ("on_train_batch_end", lambda p: torch.equal(p, p.clone()), "equal on"),
    "noise": ("on_train_batch_end", lambda p: p.data.add_(torch.randn_like(p)), "randn_like on"),
    "before validation": ("on_validation_start", lambda p: p.mean(), "mean on"),
    "a gradient's part": ("on_train_batch_end", lambda p: OPTIMIZERS[-1].state[p]["momentum_buffer"].mean(), ""),
    "decay": ("on_before_optimizer_step", lambda p: p.data.mul_(0.99), ""),
    "an average": ("on_train_batch_end", lambda p: p.detach().clone().lerp_(p.data, 0.1), ""),
}


class Normed(torch.optim.SGD):
    """An optimizer of the user's that asks for norms: whether it may step parts was tried."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad.as_subclass(Tensor), alpha=group["lr"])
                parameter.norm()
        return loss


def fit(
    task: Penalised,
    at: int,
    checked_steps: int,
    outside: Outside | None = None,
    optimizer: Any = torch.optim.SGD,
    **options: Any,
) -> str:
    trainer = L.Trainer(
        strategy=AutoTPStrategy(checked_steps=checked_steps),
        accelerator="cpu", devices=2, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[outside] if outside else None,
        **{"val_check_interval": 1} | options,
    )  # fmt: skip
    task.begin(at, optimizer)
    try:
        data = DataLoader(IDS.repeat(4, 1), batch_size=2)
        trainer.fit(task, data, data if outside else None)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    assert not torch.overrides._get_current_function_mode_stack()
    return f"{len(task.losses)} steps"


SIMILAR_HOOKS = {"a later validation", "before validation", "decay", "an average", "noise"}
"""Much like others, for nightly tests."""


def fits(names: list[str]) -> list[Any]:
    options: dict[str, Any] = {
        "LARS, with accumulation": {"accumulate_grad_batches": 2},
        "each epoch": {"limit_train_batches": 2},
        "a later validation": {"val_check_interval": 2, "num_sanity_val_steps": 0},
        "validation by steps": {
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "limit_train_batches": 2,
        },
    }
    task = Penalised()
    hooked = {name: fit(task, 3, 1, Outside(*HOOKS[name][:2]), **options.get(name, {})) for name in names}
    hooked["an optimizer"] = fit(task, 3, 1, None, Normed)
    return [fit(task, 0, 1), fit(task, 2, 1), fit(task, 2, -1), fit(task, 0, 0), hooked]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in HOOKS if name not in SIMILAR_HOOKS], id="daily"),
        pytest.param(sorted(SIMILAR_HOOKS), id="similar", marks=pytest.mark.nightly),
    ],
)
def test_first_steps_of_training_are_checked(names: list[str]) -> None:
    for first, later, always, never, hooked in run_trainer_ranks(fits, 2, names):
        assert hooked.pop("an optimizer") == "3 steps"
        for name, error in hooked.items():
            said = HOOKS[name][2]
            assert error.startswith("UnsoundUse: ") == bool(said), (name, error)
            assert f"{said} model.lm_head.weight" in error or f"{said} lm_head.weight" in error if said else error
        assert "sum on model.lm_head.weight" in first or "sum on lm_head.weight" in first
        assert "loss + self.model.lm_head.weight.square().sum()" in first
        assert later == "3 steps"  # what begins later is seen where more steps are checked
        assert "UnsoundUse: sum on" in always
        # Without the watch each rank adds the penalty of its part; their losses tell.
        assert never.startswith("RuntimeError: the ranks of a tensor-parallel group have different losses")
