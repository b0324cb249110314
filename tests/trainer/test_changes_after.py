"""What a user changes on a model after it was made parallel: as on one process, or an error that says what to do."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from local_model import state_of
from tied_families import CLOSE, FAMILIES, IDS, gradients_of, layers, loss_of, model_of, up
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm
from trainer_ranks import run_trainer_ranks
from training import Task, error_of, loader, tiny_config, trainer
from transformers import AutoModelForCausalLM
from wrapped import Around

from lightning_autotp import full_state_dict, load_full_state_dict, parallelize
from lightning_autotp.guard.guard import Guard
from lightning_autotp.layouts.types import Invariant
from lightning_autotp.parallel import TPGroup
from lightning_autotp.parameters.snapshot import Snapshot
from lightning_autotp.parameters.state import own_modules
from lightning_autotp.parameters.unchanged import check_unchanged

LAST_NORMS = ("transformer.ln_f", "model.norm", "model.final_layernorm")


def last_norm(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name in LAST_NORMS)


# --- right ---


def new_norm(model: Any) -> None:
    norm = last_norm(model)
    norm.weight = nn.Parameter(torch.full_like(norm.weight, 1.5))


def new_attention(model: Any) -> None:
    """Parameters of which several ranks hold the same, too."""
    for name, parameter in list(layers(model)[0].named_parameters()):
        path, _, attribute = name.rpartition(".")
        setattr(layers(model)[0].get_submodule(path), attribute, nn.Parameter(parameter.detach() * 1.5))


def converted(model: Any) -> None:
    model.to(torch.float32).half().to("cpu").double()


def frozen_and_back(model: Any) -> None:
    model.requires_grad_(False)
    with torch.no_grad():
        loss_of(model)
    model.requires_grad_(True)


def modes(model: Any) -> None:
    loss_of(model.eval())
    model.train()


def own_state(model: Any) -> None:
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(saved)


def own_state_beside_another_module(model: Any) -> None:
    """What came later is an error where the model runs, not where it is loaded."""
    loss_of(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.later = nn.Linear(2, 2)
    model.load_state_dict(saved, strict=False)
    del model.later


def wrapped(model: Any) -> None:
    layers(model)[0].mlp = Around(layers(model)[0].mlp)


def around_forwards(model: Any) -> None:
    """What a profiler does, and what ``accelerate`` does with hooks of its own."""
    for module in model.modules():
        forward = module.forward

        @functools.wraps(forward)
        def timed(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            return _forward(*args, **kwargs)

        module.forward = functools.update_wrapper(partial(timed), timed)


def tied_again(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if model.config.tie_word_embeddings:
        model.tie_weights()


def replaced_and_back(model: Any) -> None:
    head, model.lm_head = model.lm_head, nn.Linear(3, 4)
    error_of(loss_of, model)
    model.lm_head = head


def drawn_anew(model: Any) -> None:
    torch.manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()


RIGHT: dict[str, Callable[[Any], Any]] = {
    "another norm weight": new_norm,
    "another layer's values": new_attention,
    "dtypes": converted,
    "frozen and back": frozen_and_back,
    "own state": own_state,
    "wrapped": wrapped,
    "forwards wrapped": around_forwards,
    "tied again": tied_again,
    "drawn anew": drawn_anew,
    "copy of a copy": copy.deepcopy,
    "copy of a wrapped": lambda model: copy.deepcopy(wrapped(model) or model),
}
"""Each of a model that was not used."""

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: None,
    "modes": modes,
    "own state beside another module": own_state_beside_another_module,
    "replaced and back": replaced_and_back,
}
"""One after the other of one model, which trains in between."""


def given_tensors(model: Any, of: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss with other tensors in the parameters' places, whose gradients become the parameters'."""
    named = dict(model.named_parameters())
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in named.items()}

    def call(**inputs: Any) -> Any:
        return functional_call(model, {name: of(leaf) for name, leaf in leaves.items()}, kwargs=inputs)

    loss = loss_of(model, call)
    for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        named[name].grad = gradient
    return loss.detach(), leaves


FUNCTIONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "given leaves": lambda leaf: leaf,
    "given what was computed": lambda leaf: leaf * 1.5,
}


def one_step(model: Any, parallel: bool) -> dict[str, Any]:
    """Loss, gradients and the weights after two steps."""
    seen: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        seen.setdefault("loss", loss.detach())
        seen.setdefault("gradients", gradients_of(model, parallel))
        optimizer.step()
    seen["weights"] = full_state_dict(model) if parallel else {n: v.clone() for n, v in model.state_dict().items()}
    return seen


def results(original: Any, make: Callable[[], Any], parallel: bool) -> dict[str, Any]:
    """Of copies of a model, and in the end of itself."""
    seen: dict[str, Any] = {}
    for name, change in RIGHT.items():
        model = make()
        changed = change(model)
        seen[name] = one_step(changed if isinstance(changed, nn.Module) else model, parallel)
    model = make()
    for name, of in FUNCTIONAL.items():
        loss, _ = given_tensors(model, of)
        seen[name] = {"loss": loss, "gradients": gradients_of(model, parallel)}
        seen[f"{name}, then as before"] = one_step(model, parallel)
    for name, change in OF_ONE.items():
        change(original)
        seen[name] = one_step(original, parallel)
    return seen


# --- wrong ---


def random_module(model: Any) -> None:
    model.apply(model._init_weights)


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def tied(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()


def tied_norms(model: Any) -> None:
    name = "ln_1" if hasattr(model, "transformer") else "input_layernorm"
    getattr(layers(model)[0], name).weight = getattr(layers(model)[1], name).weight


def whole_data(model: Any) -> None:
    model.lm_head.weight.data = torch.zeros(131, model.config.hidden_size, dtype=torch.double)


def another_head(model: Any) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, 131, bias=False).double()


def another_norm(model: Any) -> None:
    path = next(name for name, _ in model.named_modules() if name in LAST_NORMS)
    model.set_submodule(path, copy.deepcopy(last_norm(model)))


def fewer_layers(model: Any) -> None:
    path = next(name for name, module in model.named_modules() if module is layers(model))
    model.set_submodule(path, layers(model)[:1])


def last_layer_gone(model: Any) -> None:
    del layers(model)[-1]


def swapped_layers(model: Any) -> None:
    both = layers(model)
    both[0], both[1] = both[1], both[0]


def no_norm_weight(model: Any) -> None:
    last_norm(model).weight = None


def whole_state(model: Any) -> None:
    model.load_state_dict({name: value * 0 for name, value in model_of(family_of(model)).state_dict().items()})


def untied_by_a_state(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def whole_tensors(model: Any) -> None:
    whole = model_of(family_of(model))
    functional_call(model, dict(whole.named_parameters()), kwargs={"input_ids": IDS})


def half_of_the_tied(model: Any) -> None:
    given = {"lm_head.weight": model.lm_head.weight.detach().clone()}
    functional_call(model, given, kwargs={"input_ids": IDS}, tie_weights=False)


def added(model: Any) -> None:
    """An adapter that hangs on a layer, where a hook might call it."""
    up(model).adapter = nn.Linear(3, 4)


def another_forward(model: Any) -> None:
    block = layers(model)[1].mlp
    block.forward = lambda x: x


def family_of(model: Any) -> str:
    return str(model.config.model_type)


DO_BEFORE = "Make such changes while it is whole, in configure_model() or before parallelize()"
WHOLE = "would treat this rank's part of the model as the whole. Call it while the model is whole, in configure_model()"
WRONG: dict[str, tuple[Callable[[Any], Any], str, list[str]]] = {
    # change, when it is noticed, what is said
    "init_weights": (lambda model: model.init_weights(), "at once", ["init_weights", WHOLE]),
    "initialize_weights": (lambda model: model.initialize_weights(), "at once", ["initialize_weights", WHOLE]),
    "apply": (random_module, "at once", ["_init_weights", WHOLE]),
    "whole state": (whole_state, "at once", ["is whole in this state dict, (131, ", "load_full_state_dict(model, "]),
    "tied norms": (tied_norms, "before", ["weight were two parameters, and are tied now", DO_BEFORE]),
    "whole data": (whole_data, "before", ["weight is (131, ", "this rank's part (", DO_BEFORE]),
    "another head": (another_head, "before", ["lm_head was replaced by another module, a Linear", DO_BEFORE]),
    "another norm": (another_norm, "before", ["was replaced by another module, a ", DO_BEFORE]),
    "fewer layers": (fewer_layers, "before", ["was replaced by another module, a ModuleList", DO_BEFORE]),
    "last layer gone": (last_layer_gone, "before", ["1 is gone", DO_BEFORE]),
    "swapped layers": (swapped_layers, "before", ["1 is at ", "0 is at ", DO_BEFORE]),
    "no norm weight": (no_norm_weight, "before", ["weight is gone", DO_BEFORE]),
    "another forward": (
        another_forward,
        "before",
        ["the forward of ", "1.mlp was replaced by another_forward.<locals>"],
    ),
    "adapter": (added, "before", ["adapter.weight", "joined the parallel"]),
    "weight norm": (
        lambda model: parametrizations.weight_norm(up(model)),
        "before",
        ["parametrizations.weight.original0", "joined the parallel", "in configure_model()"],
    ),
    "spectral norm": (
        lambda model: parametrizations.spectral_norm(up(model)),
        "before",
        ["parametrizations.weight.original joined the parallel"],
    ),
    "old weight norm": (lambda model: weight_norm(up(model)), "before", ["weight_g", "joined the parallel"]),
    "pruned": (
        lambda model: prune.l1_unstructured(up(model), "weight", amount=0.5),
        "before",
        ["weight_orig joined the parallel"],
    ),
    "functional with whole tensors": (whole_tensors, "at once", ["this rank's part (", DO_BEFORE]),
}
OF_UNTIED: dict[str, tuple[Callable[[Any], Any], str, list[str]]] = {
    "tied": (tied, "before", ["weight and lm_head.weight were two parameters, and are tied now", DO_BEFORE]),
}
OF_TIED: dict[str, tuple[Callable[[Any], Any], str, list[str]]] = {
    "untied": (untied, "before", ["weight and lm_head.weight were tied, and are two parameters now", DO_BEFORE]),
    "untied by a state": (untied_by_a_state, "before", ["lm_head.weight were tied, and are two parameters now"]),
    "functional, half of the tied": (half_of_the_tied, "at once", ["were tied, and are two parameters now"]),
}


def wrong_of(family: str) -> dict[str, tuple[Callable[[Any], Any], str, list[str]]]:
    return WRONG | (OF_UNTIED if family == "llama" else OF_TIED)


def refused(model: Any, change: Callable[[Any], Any]) -> tuple[str, str]:
    """When an error comes, and which."""
    error = error_of(change, model)
    if error != "no error":
        return "at once", error
    return "before", error_of(loss_of, model)


class Drawing(nn.Module):
    """A user's module with a matrix of its own, and a way to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(6, 4))
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))) @ self.matrix.T


def on_every_rank(rank: int, world_size: int, family: str) -> dict[str, Any]:
    original = parallelize(model_of(family), dist.group.WORLD)

    def make() -> Any:
        return copy.deepcopy(original)

    seen: dict[str, Any] = {"sums": sorted(original.autotp.gradient_sums)}
    seen["wrong"] = {name: refused(make(), change) for name, (change, _, _) in wrong_of(family).items()}
    model = make()
    before = full_state_dict(model)
    error_of(whole_state, model)
    after = full_state_dict(model)
    seen["untouched"] = all(torch.equal(before[name], after[name]) for name in before)
    seen["right"] = results(original, make, parallel=True)
    load_full_state_dict(model, model_of(family).state_dict())
    drawing = parallelize(Drawing(), dist.group.WORLD, example_inputs=(torch.zeros(3, 4),), cut={"matrix": 0})
    seen["drawn"] = error_of(drawing.reset_parameters)
    return seen


ALL = [(family, ranks) for family in FAMILIES for ranks in (2, 3)]
IN_CI = [("phi", 2)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[] if one in IN_CI else pytest.mark.nightly) for one in ALL],
    ids=str,
)
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    family, ranks = request.param
    return family, run_ranks(on_every_rank, ranks, family)


@cache
def wanted(family: str) -> dict[str, Any]:
    return results(model_of(family), lambda: model_of(family), parallel=False)


def test_what_may_change_is_as_on_one_process(found: tuple[str, list[dict[str, Any]]]) -> None:
    family, ranks = found
    close = CLOSE[family]
    for seen in ranks:
        for name, theirs in wanted(family).items():
            mine = seen["right"][name]
            torch.testing.assert_close(
                mine["loss"], theirs["loss"], rtol=close, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
            for part in theirs.keys() - {"loss"}:
                plain = {where.replace(".inner", ""): value for where, value in theirs[part].items()}
                others = {where.replace(".inner", ""): value for where, value in mine[part].items()}
                assert others.keys() == plain.keys()
                for where in plain:
                    torch.testing.assert_close(
                        others[where], plain[where], rtol=close, atol=close,
                        msg=lambda m, n=f"{name}, {part} of {where}": f"{n}: {m}",
                    )  # fmt: skip


def test_gradients_are_summed(found: tuple[str, list[dict[str, Any]]]) -> None:
    """Else the test above proves nothing of their sums where other tensors take a parameter's place."""
    family, ranks = found
    assert ranks[0]["sums"] or family != "phi"


def test_what_would_be_wrong_is_an_error_on_every_rank(found: tuple[str, list[dict[str, Any]]]) -> None:
    family, ranks = found
    for seen in ranks:
        for name, (_, when, said) in wrong_of(family).items():
            noticed, error = seen["wrong"][name]
            assert error.startswith("RuntimeError: "), f"{name}: {error}"
            assert noticed == when, f"{name}: {error}"
            for text in said:
                assert text in error, f"{name}: {error}"
        assert seen["untouched"]
        assert seen["drawn"].startswith(f"RuntimeError: Drawing.reset_parameters {WHOLE}")


# --- with the Trainer, and with several copies ---


class Changing(Task):
    """Changes its model when it is divided already."""

    def __init__(self, how: str) -> None:
        super().__init__("none")
        self.how = how

    def build(self) -> Any:
        return AutoModelForCausalLM.from_config(tiny_config())

    def on_train_start(self) -> None:
        if self.how == "resized":
            self.model.resize_token_embeddings(70)
        else:
            self.model.lm_head = nn.Linear(32, 67)


def fitted() -> dict[str, str]:
    return {how: error_of(trainer("autotp", 2).fit, Changing(how), loader()) for how in ("resized", "replaced")}


def test_the_trainers_model_too() -> None:
    for seen in run_trainer_ranks(fitted, 2):
        assert (
            "resize_token_embeddings replaces model.embed_tokens.weight, which an optimizer (AdamW)" in seen["resized"]
        )
        assert "lm_head was replaced by another module, a Linear" in seen["replaced"]


def two_by_two(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = parallelize(model_of("gpt2"), mesh["tensor"].get_group(), data_mesh=mesh["data"])
    seen: dict[str, Any] = {"weights": one_step(model, parallel=True)["weights"]}
    for _ in range(2):  # the second time FSDP2 has left some parameters gathered
        loss_of(model.eval())
    given = {name: torch.ones(parameter.shape).double() for name, parameter in model.named_parameters()}
    seen["functional"] = error_of(functional_call, model, given, kwargs={"input_ids": IDS})
    seen["head"] = refused(model, another_head)
    seen["resized"] = error_of(model.resize_token_embeddings, 140)
    return seen


def test_two_copies() -> None:
    whole = one_step(model_of("gpt2"), parallel=False)
    for seen in run_ranks(two_by_two, 4):
        for name, value in whole["weights"].items():
            torch.testing.assert_close(seen["weights"][name], value, rtol=1e-10, atol=1e-10)
        assert "was given for one call, and FSDP2 would use its own" in seen["functional"]
        assert "lm_head was replaced by another module, a Linear" in seen["head"][1]
        assert seen["resized"].startswith("RuntimeError: ")
        assert "GPT2LMHeadModel.resize_token_embeddings: FSDP2 has sharded the parameters" in seen["resized"]


# --- in one process ---


def deep(layers: int) -> Any:
    """A part of a model of so many layers, whose second matrices are cut."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)) for _ in range(layers)))
    model.autotp = state_of(model, TPGroup("", 0, 2), lambda *_: Invariant())  # type: ignore[assignment]
    return model


def calls(run: Callable[[], Any]) -> int:
    """How many functions Python calls, its own and built-in ones."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen)


def test_looking_again_takes_the_same_few_calls_whatever_the_size() -> None:
    counted = {}
    for size in (2, 200):
        model = deep(size)
        places = check_unchanged(model)
        assert calls(partial(check_unchanged, model)) > 10 * size
        snapshot = Snapshot(model, [module for _, module in own_modules(model)], places)
        counted[size] = calls(snapshot.is_current)
        assert snapshot.is_current()
    assert counted[2] == counted[200] < 30


def test_what_is_given_for_one_call_is_not_kept() -> None:
    model = deep(2)
    guard: Any = Guard(model, calls=mock.Mock())  # type: ignore[arg-type]
    model.register_forward_pre_hook(lambda *_: guard._is_unchanged(None))
    given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    functional_call(model, given, torch.zeros(1, 3))
    first = weakref.ref(given.pop("0.0.weight"))
    gc.collect()
    assert first() is None
    model(torch.zeros(1, 3))


def test_every_change_is_named() -> None:
    model = deep(3)
    model[0][0].weight = nn.Parameter(torch.zeros(2, 3))
    model[1][2].bias = None
    with pytest.raises(RuntimeError, match=r"divided:\n  1\.2\.bias is gone\n  0\.0\.weight is \(2, 3\), this"):
        check_unchanged(model)
    model[0] = nn.Sequential(model[0][2], nn.Sequential(model[0][0], nn.ReLU()))
    del model[1]
    with pytest.raises(RuntimeError) as caught:
        check_unchanged(model)
    assert str(caught.value).split("\n")[1:-1] == [
        "  0.2 is at 0.0 now", "  0.0 is at 0.1.0 now", "  2 is at 1 now",
        "  0 was replaced by another module, a Sequential", "  1 is gone",
    ]  # fmt: skip
