"""Writes into a parallel model's parameters between set-up and its first use: one process's result, or an error."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tied_families import CLOSE, loss_of, model_of, up
from torch import Tensor, nn
from trainer_ranks import run_trainer_ranks
from training import Task, error_of, fit, loader, tiny_config, trainer
from transformers import AutoModelForCausalLM

from lightning_autotp import (
    AutoTPStrategy,
    checked,
    full_gradients,
    full_state_dict,
    full_tensor,
    load_full_state_dict,
    parallelize,
)
from lightning_autotp.parameters.known_writes import parts_of
from lightning_autotp.parameters.state import parallel_state
from lightning_autotp.parameters.writes import Writes


def weight(model: Any) -> Any:
    return up(model).weight


# --- one process's result ---


def halved(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
            parameter.data += 0.01


def in_checked(write: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with checked(model):
            write(model)

    change.__name__ = f"{write.__name__} in checked"
    return change


def moved(model: Any) -> None:
    """Nothing is written in place."""
    model.to(torch.float32).half().double()


def back_again(model: Any) -> None:
    weight(model).data[-1].mul_(2).div_(2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    halved(model)
    model.load_state_dict(saved)


def filled_anew(model: Any) -> None:
    """Nothing is left of rows that were written before."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    last_rows(model)
    model.load_state_dict(saved)


def loaded(model: Any) -> None:
    own = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(own)


def whole_rows(model: Any) -> None:
    """What every rank has whole."""
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data[-3:] = 0.25


def drawn(model: Any) -> None:
    """As a whole tensor, and loaded."""
    name = next(name for name, parameter in model.named_parameters() if parameter is weight(model))
    if hasattr(model, "autotp"):
        whole = full_tensor(model, name).detach().clone()
        fill(whole)
        load_full_state_dict(model, {name: whole}, strict=False)
    else:
        fill(weight(model).data)


def fill(whole: Tensor) -> None:
    nn.init.xavier_uniform_(whole)
    whole[-5:] = 0.25
    whole[[0, 3]] *= 2


def reset(model: Any) -> None:
    """A layer of this package draws for the whole tensor."""
    torch.manual_seed(3)
    model.get_output_embeddings().reset_parameters()


def optimized(model: Any) -> None:
    """After the first use anybody may write."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    halved(model)


def by_its_base(model: Any) -> None:
    """The base model is a use as well."""
    model.base_model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    halved(model)


RIGHT = (in_checked(halved), back_again, filled_anew, loaded, whole_rows, drawn, reset, optimized, by_its_base, moved)
"""The last one leaves buffers converted."""


def results(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    if hasattr(model, "autotp"):
        gradients, weights = full_gradients(model), full_state_dict(model)
    else:
        named = model.named_parameters(remove_duplicate=False)
        gradients, weights = {name: parameter.grad for name, parameter in named}, model.state_dict()
    found = {f"gradient of {name}": value for name, value in gradients.items() if value is not None}
    return {"loss": loss.detach(), **found, **weights}


def parallel(family: str) -> Any:
    return parallelize(model_of(family), dist.group.WORLD)


def as_set_up(model: Any, whole: dict[str, Tensor]) -> None:
    load_full_state_dict(model, whole)
    model.zero_grad()
    parallel_state(model).writes = Writes()
    parallel_state(model).writes.begin(parts_of(model))


def right_and_wrong(rank: int, size: int, family: str) -> dict[str, dict[str, Any]]:
    model = parallel(family)
    return {"right": right_ones(model, family), "wrong": wrong_ones(model, family)}


def right_ones(model: Any, family: str) -> dict[str, dict[str, Tensor]]:
    whole, found = model_of(family).state_dict(), {}
    for change in RIGHT:
        as_set_up(model, whole)
        torch.manual_seed(2)
        change(model)
        found[change.__name__] = results(model)
    return found


# --- an error ---


def last_rows(model: Any) -> None:
    with torch.no_grad():
        weight(model)[-5:] = 0


def rows_by_index(model: Any) -> None:
    with torch.no_grad():
        weight(model)[torch.tensor([0, 2])] = 1.0


def rows_of_data(model: Any) -> None:
    weight(model).data[-5:] = 0


def random_numbers(model: Any) -> None:
    nn.init.normal_(weight(model))


def through_numpy(model: Any) -> None:
    weight(model).detach().numpy()[-1] = 0


def on_one_rank(model: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        weight(model).data[0, 0] = 7


def then_known(model: Any) -> None:
    """What was written before a known writer came is remembered."""
    last_rows(model)
    with checked(model):
        pass


def another_tensor(model: Any) -> None:
    weight(model).data = torch.randn(weight(model).shape) * weight(model).std()


WRONG = (last_rows, rows_by_index, rows_of_data, random_numbers, through_numpy, another_tensor, on_one_rank, then_known)


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def wrong_ones(model: Any, family: str) -> dict[str, Any]:
    whole, found = model_of(family).state_dict(), {}
    for change in WRONG:
        as_set_up(model, whole)
        name = next(name for name, parameter in model.named_parameters() if parameter is weight(model))
        change(model)
        found[change.__name__] = name, refused(lambda model=model: loss_of(model))
    as_set_up(model, whole)
    last_rows(model)
    ids = torch.tensor([[3, 4, 5]])
    found["by its base"] = name, refused(lambda: model.base_model(input_ids=ids, use_cache=False))
    return found


Written = tuple[str, list[dict[str, dict[str, Any]]]]


@pytest.fixture(
    scope="module",
    params=[("phi", 3), *(pytest.param((family, 2), marks=pytest.mark.nightly) for family in ("llama", "gpt2"))],
    ids=str,
)
def written(request: pytest.FixtureRequest) -> Written:
    family, size = request.param
    return family, run_ranks(right_and_wrong, size, family)


def test_writes_that_are_known_give_one_processs_results(written: Written) -> None:
    family, ranks = written
    for change in RIGHT:
        model = model_of(family)
        torch.manual_seed(2)
        change(model)
        wanted = results(model)
        for found in ranks:
            got = found["right"][change.__name__]
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                said = f"{change.__name__}, {name}"
                torch.testing.assert_close(
                    got[name], value, rtol=CLOSE[family], atol=CLOSE[family], msg=lambda m, said=said: f"{said}: {m}"
                )


def test_other_writes_are_errors_on_every_rank_before_the_first_use(written: Written) -> None:
    for found in written[1]:
        for change, (name, error) in found["wrong"].items():
            assert error.startswith(name), (change, error)
            assert "written in place after it was divided" in error
            for remedy in ("configure_model()", "full_tensor(model, name)", "load_full_state_dict", "checked(model)"):
                assert remedy in error


def copies(model: Any, family: str) -> dict[str, str]:
    other = copy.deepcopy(model)
    halved(other)  # copies are not watched
    found = {"copy": refused(lambda: loss_of(other)), "original": refused(lambda: loss_of(model))}
    as_set_up(model, model_of(family).state_dict())
    last_rows(model)
    assert "written in place" in refused(lambda: loss_of(model))
    return {**found, "written": refused(lambda: loss_of(model))}  # and it stays an error


# --- after the first use ---


def stepped(model: Any) -> None:
    for optimizer in (
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.optim.SGD(model.parameters(), foreach=False),
    ):
        loss_of(model).backward()
        optimizer.step()


def loaded_later(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    load_full_state_dict(model, full_state_dict(model))


def looked_at_once(model: Any) -> None:
    for run in (in_checked(halved), halved):
        run(model)
        loss_of(model)


def of_a_copy(model: Any) -> None:
    other = copy.deepcopy(model)
    loss_of(other)
    halved(other)
    del other
    gc.collect()  # else the next optimizer's step finds it, and warns of it


def before_a_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    last_rows(model)
    optimizer.step()


def after_moving(model: Any) -> None:
    model.to(torch.float32).to(torch.float64)
    loss_of(model)
    halved(model)


KNOWN_LATER = (stepped, loaded_later, of_a_copy, whole_rows, looked_at_once)
"""In this order: what code that was looked at once writes is right from then on, whoever writes it."""
UNKNOWN_LATER = (last_rows, halved, random_numbers, before_a_step, after_moving)


def on_two_ranks(rank: int, size: int) -> dict[str, Any]:
    model = parallel("llama")
    return {"copies": copies(model, "llama"), "later": later_warnings(model)}


def later_warnings(original: Any) -> dict[str, list[str]]:
    """By change, of which those that are known are of one model, one after the other."""
    found, known = {}, copy.deepcopy(original)
    for change in (*KNOWN_LATER, *UNKNOWN_LATER):
        model = known if change in KNOWN_LATER else copy.deepcopy(original)
        loss_of(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            change(model)
            loss_of(model)
            loss_of(model)
        found[change.__name__] = [str(one.message) for one in said if "code that was not checked" in str(one.message)]
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


def test_an_untouched_copy_and_its_original_are_used_as_before(two: list[dict[str, Any]]) -> None:
    for found in (seen["copies"] for seen in two):
        assert found["copy"] == found["original"] == "nothing"
        assert "written in place" in found["written"]


def test_writes_after_the_first_use_are_warned_of_once(two: list[dict[str, Any]]) -> None:
    """An optimizer's, a loader's and those that were looked at are not."""
    for found in (seen["later"] for seen in two):
        assert {name for name, said in found.items() if said} == {change.__name__ for change in UNKNOWN_LATER}
        for change in UNKNOWN_LATER:
            (said,) = found[change.__name__]
            assert "model.layers.0.mlp.up_proj.weight" in said or "others were written" in said


# --- with the Trainer ---


class Writing(Task):
    """Writes into its model when it is divided already."""

    def __init__(self, rows: bool) -> None:
        super().__init__("none")
        self.rows = rows

    def build(self) -> Any:
        return AutoModelForCausalLM.from_config(tiny_config())

    def on_fit_start(self) -> None:
        head = self.model.lm_head.weight
        with torch.no_grad():
            if self.rows:
                head[-2:] = 0
            else:
                whole = full_tensor(self, "model.lm_head.weight").detach().clone()
                whole[-2:] = 0
                load_full_state_dict(self, {"model.lm_head.weight": whole}, strict=False)


class Lookahead(L.Callback):
    """Every second step the weights go half of the way from where they last were so, element by element."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.slow = [parameter.detach().clone() for parameter in pl_module.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step % 2 == 0:
            for slow, parameter in zip(self.slow, pl_module.parameters(), strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def ahead(strategy: Any, devices: int) -> tuple[dict[str, Tensor], list[str]]:
    """The weights after it, and the warnings of writes."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seen = fit(strategy, devices, Task("config", 0.1, "SGD"), callbacks=[Lookahead()], max_steps=5)
    return seen["weights"], [str(one.message) for one in said if "code that was not checked" in str(one.message)]


def fitted() -> list[Any]:
    errors = [error_of(trainer("autotp", 2, max_steps=1).fit, Writing(rows), loader()) for rows in (True, False)]
    return [*errors, *(ahead(AutoTPStrategy(checked_steps=steps), 2) for steps in (1, 2))]


def test_the_trainers_model_too() -> None:
    alone, _ = ahead("auto", 1)
    for wrong, right, unseen, seen in run_trainer_ranks(fitted, 2):
        assert "lm_head.weight of the parallel LlamaForCausalLM were written in place" in wrong
        assert right == "no error"
        for weights, _ in (unseen, seen):
            for name, value in alone.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
        (said,) = unseen[1]
        assert "AutoTPStrategy(checked_steps=...)" in said
        assert seen[1] == []
