"""Which optimizers are right on parts of tensors is found out by running them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from foreign_optimizers import Clipping, Lamb, NeedsCurvature, Noisy, Simple, model_of, parameter
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Adafactor

from lightning_autotp.guard import on_parts as optimizers
from lightning_autotp.guard.on_parts import check_optimizer

Make = Callable[[list[nn.Parameter]], Optimizer]


class Lion(Simple):
    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        update = momentum.lerp(gradient, 0.1).sign()
        momentum.lerp_(gradient, 0.01)
        return update


class RowNorms(Simple):
    """Looks at whole rows: right where a matrix is cut by rows."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class Late(Simple):
    """Uses a preconditioner from the 26th step on."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return gradient.sign() if state["step"] < 26 else gradient / gradient.norm()


class MatricesAndRest(Simple):
    """Orthogonalizes matrices of one kind of group, and is elementwise otherwise."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if not group["matrices"]:
            return gradient.sign()
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        return u @ v


class TwoModes(Simple):
    """Averages its steps, and must be told when it trains."""

    training = False

    def train(self) -> None:
        self.training = True

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if not self.training:
            raise RuntimeError("call optimizer.train() first")
        average = state.setdefault("average", p.clone())
        average.lerp_(p, 0.1)
        return gradient + 0.1 * (p - average)


class Wrapper(Optimizer):
    """Keeps another optimizer, and slow weights that follow its steps."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.steps % 3 == 0:
                    p.data.copy_(slow.lerp_(p.detach(), 0.5))


ELEMENTWISE: dict[str, Make] = {
    **{
        name: lambda ps, name=name: getattr(torch.optim, name)(ps, lr=0.01)  # type: ignore[misc]
        for name in (
            "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
        )
    },
    "foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True, weight_decay=0.1),
    "tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-3)),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
    "Lion": Lion,
    "two modes": TwoModes,
    "wrapper": lambda ps: Wrapper(torch.optim.AdamW(ps)),
    "untrusting": lambda ps: Lamb(ps, trust=False),
}  # fmt: skip
WHOLE: dict[str, Make] = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "transformers' Adafactor": Adafactor,
    "Muon": torch.optim.Muon,
    "Lamb": Lamb,
    "late": Late,
    "clipping": Clipping,
    "noisy": Noisy,
    "wrapper of Muon": lambda ps: Wrapper(torch.optim.Muon(ps)),
}
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((6, 8), (0,)),
    "columns": ((6, 8), (1,)),
    "vector": ((6,), (0,)),
    "experts": ((4, 6, 8), (2,)),
}


def verdict(optimizer: Optimizer) -> str:
    """What the check says, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            check_optimizer(optimizer, model_of(optimizer))
        except ValueError as error:
            return str(error)
        return "right"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_pass(name: str, kind: str) -> None:
    shape, dims = KINDS[kind]
    assert verdict(ELEMENTWISE[name]([parameter(*shape, dims=dims)])) == "right"


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("name", WHOLE)
def test_others_are_refused_on_sharded_parameters_and_pass_on_whole_ones(name: str, kind: str) -> None:
    shape, dims = KINDS[kind]
    optimizer = WHOLE[name]([parameter(*shape, dims=dims, name="layers.0.weight")])
    message = verdict(optimizer)
    assert message.startswith(f"{type(optimizer).__name__} computes its update from whole tensors")
    assert f"parameter group 0, which has layers.0.weight (cut along dim {dims[0]})" in message
    assert f"lightning_autotp.WholeMatrixOptimizer(module, parameters, {type(optimizer).__name__}, lr=...)" in message
    assert verdict(WHOLE[name]([parameter(*shape, dims=()), nn.Parameter(torch.randn(6, 8))])) == "right"


def test_only_the_dims_that_are_cut_count() -> None:
    assert verdict(RowNorms([parameter(6, 8, dims=(0,))])) == "right"
    assert "whole tensors" in verdict(RowNorms([parameter(6, 8, dims=(1,))]))
    assert "whole tensors" in verdict(RowNorms([parameter(6, 8, dims=(0,)), parameter(6, 8, dims=(1,))]))
    assert "whole tensors" in verdict(RowNorms([parameter(6, 8, dims=(0, 1))]))


def test_groups_are_checked_each_with_its_options() -> None:
    def groups(dims: tuple[int, ...]) -> Iterable[dict[str, Any]]:
        yield {"params": [parameter(6, 8)], "matrices": False}
        yield {"params": [parameter(6, 8, dims=dims, name="last")], "matrices": True}

    assert "group 1, which has last" in verdict(MatricesAndRest(groups((0,))))
    assert verdict(MatricesAndRest(groups(()))) == "right"


def test_a_learning_rate_that_is_being_warmed_up_hides_nothing() -> None:
    optimizer = Lamb([parameter(6, 8)])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    assert "whole tensors" in verdict(optimizer)
    elementwise = torch.optim.AdamW([parameter(6, 8)])
    torch.optim.lr_scheduler.LambdaLR(elementwise, lambda step: 0.0)
    assert verdict(elementwise) == "right"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, TwoModes, Lamb])
def test_nothing_is_disturbed(kind: Any) -> None:
    called: list[Any] = []
    named = [("first", parameter(6, 8)), ("second", parameter(6))]
    optimizer = kind(named)
    optimizer.register_step_post_hook(lambda *_: called.append(0))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    parameters = [p for _, p in named]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step = lambda *_: called.append("the original's")  # what schedulers and profilers put there
    before = [p.detach().clone() for p in parameters], repr(optimizer.state_dict()), list(vars(optimizer))
    verdict(optimizer)
    assert called == []
    for p, value in zip(parameters, before[0], strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, torch.ones_like(p))
    assert repr(optimizer.state_dict()) == before[1]
    assert list(vars(optimizer)) == before[2]


def test_it_can_be_asked_in_the_middle_of_training() -> None:
    matrix = parameter(6, 8)
    for optimizer, expected in ((torch.optim.AdamW([matrix]), "right"), (Adafactor([matrix]), "Adafactor computes")):
        for _ in range(3):
            matrix.grad = torch.randn_like(matrix)
            optimizer.step()
        assert verdict(optimizer).startswith(expected)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (NeedsCurvature, "RuntimeError: backward"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (lambda ps: _with(Lion(ps), model=nn.Linear(2, 2)), "it holds a module, Linear"),
        (lambda ps: _with(Lion(ps), buffer=torch.zeros(10_000)), "it holds a tensor of 10000 elements"),
        (lambda ps: Lion(ps, lr=float("nan")), "makes no update that could be compared"),
    ],
)
def test_what_cannot_be_tried_is_said_once(make: Make, reason: str) -> None:
    optimizer = make([parameter(6, 8), parameter(6)])
    with pytest.warns(UserWarning, match="could not be checked") as caught:
        check_optimizer(optimizer, model_of(optimizer))
    assert len(caught) == 1
    assert reason in str(caught[0].message)


def _with(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    vars(optimizer).update(attributes)
    return optimizer


def test_generators_that_an_optimizer_keeps_are_left_alone() -> None:
    optimizer = _with(
        Lion([parameter(6, 8)]),
        generator=torch.Generator().manual_seed(5),
        drawn=random.Random(5),
        held={"a": (1, [2])},
    )
    states = optimizer.generator.get_state(), optimizer.drawn.getstate()  # type: ignore[attr-defined]
    assert verdict(optimizer) == "right"
    assert torch.equal(optimizer.generator.get_state(), states[0])  # type: ignore[attr-defined]
    assert optimizer.drawn.getstate() == states[1]  # type: ignore[attr-defined]


def test_what_fsdp_cuts_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parameter(6, 4, dims=(), name="router")
    lamb, lion = Lamb([whole]), Lion([whole])
    check_optimizer(lamb, model_of(lamb))
    monkeypatch.setattr(optimizers, "shard_group", lambda _: object())
    with pytest.raises(ValueError, match=r"router \(cut along dim 0\)"):
        check_optimizer(lamb, model_of(lamb))
    check_optimizer(lion, model_of(lion))


def test_learning_rates_by_layer_take_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []

    def difference(optimizer: Optimizer, tensor: Tensor, ndim: int, dims: tuple[int, ...]) -> None:
        tried.append(dims)

    monkeypatch.setattr(optimizers, "_difference", difference)
    groups = [{"params": [parameter(6, 8)], "lr": 0.1 * 0.5**layer} for layer in range(4)]
    different = {"params": [parameter(6, 8)], "lr": 0.1, "alpha": 0.75}
    assert verdict(torch.optim.RMSprop([*groups, different], alpha=0.875)) == "right"
    assert tried == [(0,), (0,)]
