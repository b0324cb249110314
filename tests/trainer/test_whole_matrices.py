"""Optimizers that need whole tensors step them whole, each on one rank: one process's weights and states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from copies import OneKeyHead, alone, trained
from foreign_optimizers import Clipping, Lamb, NeedsCurvature, Noisy, model_of, parameter
from torch import Tensor, nn
from trainer_ranks import run_trainer_ranks
from training import SameStart, SavesAfter, Task, assert_parity, error_of, fit
from transformers import Adafactor, AutoModelForCausalLM, LlamaConfig, Phi3Config

from lightning_autotp import AutoTPStrategy, WholeMatrixOptimizer
from lightning_autotp.guard.on_parts import check_optimizer
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.whole_matrices.transfers import Sharding, balanced

STEPS = 4
HALF = 2
SIZES: dict[str, Any] = {
    "vocab_size": 67, "intermediate_size": 49, "num_hidden_layers": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


class Whole(SameStart, Task):
    """Trains with an optimizer that needs whole tensors, and a learning rate that falls.

    Args:
        model: "llama", with tied embeddings and a frozen norm, or "phi3", with fused projections.
        heads: of queries, and of keys and values.
        kind: the optimizer; "failing" for one that fails on the rank that the first matrix is assigned to.
        wrapped: whether in a :class:`WholeMatrixOptimizer`.
    """

    def __init__(self, model: str, heads: tuple[int, int], kind: str, wrapped: bool = True) -> None:
        super().__init__("config")
        self.save_hyperparameters()

    def begin(self) -> None:
        super().begin()
        self.restore()

    def build(self) -> Any:
        queries, keys = self.hparams["heads"]
        sizes = {**SIZES, "num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 8 * queries}
        # Muon rounds gradients to bfloat16: what differs in the last bit of float32 would come apart there.
        dtype = torch.float64 if self.hparams["kind"] == "Muon" else torch.float32
        if self.hparams["model"] == "phi3":
            return AutoModelForCausalLM.from_config(Phi3Config(**sizes), dtype=dtype)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=True), dtype=dtype)
        model.model.norm.weight.requires_grad_(False)
        return model

    def on_after_backward(self) -> None:
        """A frozen parameter has no gradient to write down."""

    def configure_optimizers(self) -> Any:
        if self.hparams["kind"] == "Muon":
            groups = [
                {"params": [p for p in self.model.model.layers.parameters() if p.ndim == 2], "lr": 0.02},
                {"params": [self.model.model.embed_tokens.weight], "weight_decay": 0.0},
            ]
        else:
            groups = [{"params": list(self.parameters()), "weight_decay": 0.1}]
        kind = Failing if self.hparams["kind"] == "failing" else getattr(torch.optim, self.hparams["kind"])
        optimizer = (
            WholeMatrixOptimizer(self, groups, kind, lr=0.01) if self.hparams["wrapped"] else kind(groups, lr=0.01)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_end(self) -> None:
        (optimizer,) = self.trainer.optimizers
        self.seen["rates"] = [group["lr"] for group in optimizer.param_groups]
        self.seen["held"] = sum(x.numel() for state in optimizer.state.values() for x in state.values())


class Failing(torch.optim.Adafactor):
    """Fails for the largest matrix."""

    def step(self, closure: Any = None) -> Any:
        if any(p.shape[0] == 67 for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("no square root of this one")
        return super().step(closure)


def run(strategy: Any, devices: int, task: Whole, **options: Any) -> dict[str, Any]:
    """Train a new task, or one whose model is divided already."""
    L.seed_everything(3, verbose=False)
    # An epoch is half a run, so that what goes on from a checkpoint sees the batches that come next.
    options = {"max_steps": STEPS, "limit_train_batches": HALF, "gradient_clip_val": 0.5, **options}
    task.begin()
    return fit(strategy, devices, task, **options)


KINDS = ("Muon", "Adafactor")
CASES: dict[str, tuple[str, str]] = {"phi3": ("phi3", "Muon"), **{kind: ("llama", kind) for kind in KINDS}}
HEADS = {2: {"phi3": (3, 3), "llama": (3, 1)}, 3: {"phi3": (5, 5), "llama": (4, 2)}}
"""By the number of ranks: some have more heads than others, and a key/value head may be on several."""


def on_ranks(ranks: int, folder: Path) -> dict[str, Any]:
    def new(model: str, kind: str) -> Whole:
        return Whole(model, HEADS[ranks][model], kind)

    def train(task: Whole, **options: Any) -> dict[str, Any]:
        directories = options.pop("save_distributed_checkpoint", False)
        strategy = AutoTPStrategy(ranks, 1, save_distributed_checkpoint=directories)
        return run(strategy, ranks, task, **options)

    tasks = {case: new(*arguments) for case, arguments in CASES.items()}
    seen: dict[str, Any] = {
        case: train(task, callbacks=[SavesAfter(HALF, folder / f"file {case}.ckpt")]) for case, task in tasks.items()
    }
    for kind in KINDS:
        seen[f"{kind} from one process"] = train(tasks[kind], ckpt_path=folder / f"one {kind}.ckpt")
    half = SavesAfter(HALF, folder / "directory.ckpt")
    train(tasks["Adafactor"], max_steps=HALF, callbacks=[half], save_distributed_checkpoint=True)
    seen["Adafactor from a directory"] = train(new("llama", "Adafactor"), ckpt_path=folder / "directory.ckpt")
    seen["failing"] = error_of(train, new("llama", "failing"))
    return seen


class Ran:
    """What ranks have seen, and what one process's plain optimizer does."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.plainly: dict[str, dict[str, Any]] = {
            case: self.plain(*given, callbacks=[SavesAfter(HALF, folder / f"one {case}.ckpt")])
            for case, given in CASES.items()
        }
        self.seen = run_trainer_ranks(on_ranks, ranks, ranks, folder)
        self.resumed: dict[str, dict[str, Any]] = {
            kind: self.plain("llama", kind, ckpt_path=folder / f"one {kind}.ckpt") for kind in KINDS
        }

    def plain(self, model: str, kind: str, **options: Any) -> dict[str, Any]:
        return run("auto", 1, Whole(model, HEADS[self.ranks][model], kind, False), **options)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(request.param, tmp_path_factory.mktemp("whole"))


def untrained(ran: Ran, model: str, kind: str) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    task = Whole(model, HEADS[ran.ranks][model], kind)
    task.configure_model()
    return dict(task.state_dict())


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_one_process(ran: Ran, case: str) -> None:
    wanted, before = ran.plainly[case], untrained(ran, *CASES[case])
    assert max((wanted["weights"][name] - weight).abs().max() for name, weight in before.items()) > 0.01
    for seen in ran.seen:
        assert_parity(seen[case], wanted)
        assert seen[case]["rates"] == wanted["rates"]
        assert wanted["rates"][0] in (0.02 / (1 + STEPS), 0.01 / (1 + STEPS))


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_shared_out(ran: Ran, case: str) -> None:
    held = [seen[case]["held"] for seen in ran.seen]
    assert sum(held) == ran.plainly[case]["held"] > 0
    if CASES[case][1] == "Muon":  # its state is as large as the parameters; the largest ones are embeddings
        assert max(held) - min(held) <= 67 * 40


@pytest.mark.parametrize("kind", KINDS)
def test_one_processs_checkpoint_goes_on_on_ranks(ran: Ran, kind: str) -> None:
    for seen in ran.seen:
        assert_parity(seen[f"{kind} from one process"], ran.resumed[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_ranks_goes_on_in_one_process(ran: Ran, kind: str) -> None:
    path = ran.folder / f"file {kind}.ckpt"
    assert_parity(ran.plain("llama", kind, ckpt_path=path), ran.resumed[kind])
    states = [
        torch.load(ran.folder / f"{name} {kind}.ckpt", weights_only=False)["optimizer_states"][0]["state"]
        for name in ("file", "one")
    ]
    assert [list(state) for state in states[:1]] == [list(state) for state in states[1:]]
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            assert mine[key].dtype == value.dtype
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_directory_goes_on(ran: Ran) -> None:
    for seen in ran.seen:
        assert_parity(seen["Adafactor from a directory"], ran.resumed["Adafactor"])


def test_a_failure_on_one_assigned_rank_reaches_every_rank(ran: Ran) -> None:
    errors = [seen["failing"] for seen in ran.seen]
    assert sum(error.startswith("ArithmeticError: no square root") for error in errors) == 1
    others = [error for error in errors if not error.startswith("ArithmeticError")]
    assert all(
        error.startswith("PeerError: rank ") and "failed while stepping whole tensors with Failing" in error
        for error in others
    )


class Copied(OneKeyHead):
    """With a scalar and a parameter outside of the model."""

    def configure_optimizers(self) -> Any:
        return WholeMatrixOptimizer(self, self.parameters(), torch.optim.Adafactor, lr=0.05)

    def on_fit_end(self) -> None:
        super().on_fit_end()
        (optimizer,) = self.trainer.optimizers
        self.seen["held"] = sum(x.numel() for state in optimizer.state.values() for x in state.values())


def four_ranks(folder: Path) -> dict[str, Any]:
    seen = {}
    for case, directories in (("file", False), ("directory", True)):
        strategy = AutoTPStrategy(2, 2, save_distributed_checkpoint=directories)
        seen[case] = trained(strategy, 4, Copied, max_steps=STEPS, save=folder / case)
    strategy = AutoTPStrategy(2, 2)
    seen["resumed"] = trained(strategy, 4, Copied, max_steps=STEPS + 1, ckpt_path=folder / "directory")
    return seen


@pytest.mark.nightly
def test_two_copies_equal_one_process(tmp_path: Path) -> None:
    four = run_trainer_ranks(four_ranks, 4, tmp_path)
    wanted = alone(four, "file", kind=Copied, max_steps=STEPS, save=tmp_path / "one")
    for seen in four:
        for case in ("file", "directory"):
            assert_parity({**seen[case], "losses": [], "gradients": []}, {**wanted, "losses": [], "gradients": []})
    assert sum(seen["file"]["held"] for seen in four) == wanted["held"]
    assert max(seen["file"]["held"] for seen in four) < wanted["held"] / 2
    mine, theirs = (
        torch.load(tmp_path / name, weights_only=False)["optimizer_states"][0]["state"] for name in ("file", "one")
    )
    assert sorted(mine) == sorted(theirs)
    for number, values in theirs.items():
        for key, value in values.items():
            torch.testing.assert_close(mine[number][key], value, rtol=1e-4, atol=1e-6)
    again = alone(four, "resumed", kind=Copied, max_steps=STEPS + 1, ckpt_path=tmp_path / "one")
    for seen in four:
        assert_parity({**seen["resumed"], "losses": [], "gradients": []}, {**again, "losses": [], "gradients": []})


# --- without processes ---


def whole_of(kind: Callable[..., Any], *parameters: nn.Parameter, **options: Any) -> WholeMatrixOptimizer:
    """On the first of two ranks that do not exist."""
    return WholeMatrixOptimizer(model_of(kind(list(parameters))), list(parameters), kind, **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, Adafactor, Lamb, torch.optim.AdamW])
def test_what_steps_tensors_by_themselves_is_accepted(kind: Any) -> None:
    parameters = [parameter(6, 8), parameter(6, 8, dims=(1,)), parameter(6, 9, dims=())]
    optimizer = whole_of(kind, *parameters)
    check_optimizer(optimizer, nn.Identity())
    # 96 elements each, whole, and 54: the first is assigned to this rank, the second to the other one.
    assert [optimizer.is_assigned_here(p) for p in parameters] == [True, False, True]
    assert set(kind([nn.Parameter(torch.ones(2, 2))]).param_groups[0]) == set(optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.LBFGS, "its step needs a closure"),
        (Clipping, "depends on the other tensors"),
        (Noisy, "or on random numbers"),
    ],
)
def test_what_needs_more_than_one_tensor_is_refused(kind: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        whole_of(kind, parameter(6, 8), parameter(6, 8))
    assert str(caught.value).startswith(f"{kind.__name__} is not right in a WholeMatrixOptimizer")


def test_what_cannot_be_tried_is_said() -> None:
    with pytest.warns(UserWarning, match="NeedsCurvature could not be checked: on random tensors, RuntimeError"):
        whole_of(NeedsCurvature, parameter(6, 8))


def test_the_trial_draws_nothing_from_the_generator() -> None:
    cut = parameter(6, 8)
    state = torch.get_rng_state()
    whole_of(Lamb, cut)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_optimizer_sees_original_shapes() -> None:
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters.*torch.Size\(\[12\]\)"):
        WholeMatrixOptimizer(model_of(Lamb([first := parameter(6)])), [first], torch.optim.Muon)


def test_without_a_parallel_model_it_is_the_optimizer_itself() -> None:
    def trained_by(make: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = make(model)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step(lambda: model(torch.ones(2, 5)).square().sum().backward())
        return [p.detach() for p in model.parameters()]

    wrapped = trained_by(lambda model: WholeMatrixOptimizer(model, model.parameters(), torch.optim.Adafactor, lr=0.1))
    plain = trained_by(lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1))
    assert all(torch.equal(one, other) for one, other in zip(wrapped, plain, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_assigned_ranks_are_balanced(ranks: int) -> None:
    costs = [1 + 37 * number % 101 for number in range(50)]
    loads = [0] * ranks
    assigned = balanced(costs, loads)
    assert loads == [sum(c for c, where in zip(costs, assigned, strict=True) if where == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 10
    (first,) = balanced([5000], loads)  # what comes later adds to that
    assert set(balanced([5] * 20, loads)) == (set(range(ranks)) - {first} or {first})


LAYOUTS: dict[str, Layout] = {
    "whole": Invariant(),
    "rows": Shard(((0, Ownership.even(7, 3)),)),
    "both": Shard(((0, Ownership.even(7, 3)), (1, Ownership.even(5, 3)))),
    "shared": Shard(((0, Ownership(7, (((0, 2), (4, 5)), ((1, 2), (4, 7)), ((2, 4),)))),)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_sent_once(name: str) -> None:
    layout = LAYOUTS[name]
    for assigned in range(3):
        sharding = Sharding.of_layout((7, 5), layout, 3)
        sent = torch.zeros(7, 5)
        for rank, blocks in enumerate(sharding.blocks):
            for block in sharding.outgoing(rank, assigned):
                sent[tuple(itertools.starmap(slice, block.original))] += 1
                assert rank == assigned or assigned not in block.ranks
            assert sum(block.elements for block in blocks) == sum(block.elements for block in sharding.held(rank))
        owned = torch.zeros(7, 5)
        for block in itertools.chain(*sharding.blocks):
            owned[tuple(itertools.starmap(slice, block.original))] = 1
        assert torch.equal(sent, owned)


def test_rows_of_fsdp() -> None:
    sharding = Sharding.of_rows((5, 2), 4)
    assert [sum(block.elements for block in blocks) for blocks in sharding.blocks] == [4, 4, 2, 0]
