"""Code that reads and writes ``p.grad`` as in one process, on parts of gradients: the same code, run in both."""

from __future__ import annotations

import copy
import io
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from expected_norms import NORMS, expected_gradients, loss_of
from local_model import Original, local_model
from tiny import tiny_model, token_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter

from lightning_autotp import clip_gradients_norm, full_gradients, full_state_dict, grad_norms, parallelize
from lightning_autotp.gradients.parts import GradientPart, marked
from lightning_autotp.gradients.sums import synchronize_gradients
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Shard
from lightning_autotp.parameters.part import PartOf
from lightning_autotp.ranks.group import TPGroup

Named = dict[str, nn.Parameter]

RANKS = [pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)]


def gradients_of(named: Named) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


# --- what is read ---


def own(gradient: Tensor) -> Tensor:
    """A plain tensor of one's own."""
    return torch.zeros(gradient.shape, dtype=gradient.dtype)


def into_own(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """What a gradient was written into, in some way."""

    def written(gradient: Tensor) -> Tensor:
        buffer = own(gradient)
        write(buffer, gradient)
        return buffer

    return written


INTO_OWN = {
    "an own buffer": into_own(lambda b, g: b.add_(g)),
    "an own average": into_own(lambda b, g: b.lerp_(g.abs(), 0.1).mul_(2.0)),
    "an own buffer in a view": into_own(lambda b, g: b.view_as(b).copy_(g)),
    "a plus": into_own(lambda b, g: b.__iadd__(g)),
    "what out= names": into_own(lambda b, g: torch.mul(g, 3, out=b)),
    "own buffers in a list": into_own(lambda b, g: torch._foreach_add_([own(g), b], [own(g), g])),
}


def read(named: Named) -> dict[str, Any]:
    """Numbers of gradients, as loops take them."""
    gradients = gradients_of(named)
    found: dict[str, Any] = {}
    for order in NORMS:
        for foreach in (None, True, False):
            found[f"total norm {order}, foreach {foreach}"] = torch.nn.utils.get_total_norm(
                list(gradients.values()), order, foreach=foreach
            )
        for name, gradient in gradients.items():
            found[f"norm {order} of {name}"] = gradient.norm(order)
            found[f"vector norm {order} of {name}"] = torch.linalg.vector_norm(gradient, ord=order)
    for name, gradient in gradients.items():
        found |= {
            f"{what} of {name}": function(gradient)
            for what, function in {
                "norm": lambda g: g.norm(),
                "norm of data": lambda g: g.data.norm(2),
                "norm of a detached one": lambda g: torch.norm(g.detach(), p=2.0),
                "norm of a copy": lambda g: torch.linalg.norm(g.clone() * 2),
                "norm of a deep copy": lambda g: copy.deepcopy(g).norm(),
                "norm of float": lambda g: g.float().norm(dtype=torch.float64),
                "norm of a list": lambda g: torch._foreach_norm([g])[0],
                "sum": lambda g: g.sum(),
                "mean of sizes": lambda g: g.abs().mean(),
                "deviation": lambda g: g.std().nan_to_num(),
                "biased deviation": lambda g: torch.std(g, False),
                "variance": lambda g: torch.var(input=g, correction=2).nan_to_num(),
                "biased variance": lambda g: g.var(unbiased=False),
                "greatest": lambda g: torch.max(g.abs()),
                "least": lambda g: g.min(),
                "zeros": lambda g: (g == 0).any(),
                "finite": lambda g: torch.isfinite(g).all(),
                "nan": lambda g: torch.isnan(g).any(),
                "how many": lambda g: torch.count_nonzero(g > 1),
                "equal": lambda g: torch.equal(g, g.clone()),
                "unequal": lambda g: torch.equal(g, g * (g < 20)),
                "close": lambda g: torch.allclose(g, 1.01 * g),
                **{f"norm of {what}": lambda g, into=into: into(g).norm() for what, into in INTO_OWN.items()},
            }.items()
        }
        if gradient.dim() == 2:
            found[f"norm of rows of {name}"] = gradient[1:3].norm()
            found[f"sum of a block of {name}"] = gradient[..., 1:].sum() + gradient[:-1, :2].sum()
    return found


# --- what is written ---


def whole_like(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + seed)
    return torch.rand(shape, generator=generator, dtype=torch.double) - 0.5


def clip(named: Named, order: float, foreach: bool | None) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(named.values(), 7.5, order, error_if_nonfinite=True, foreach=foreach)


def clip_to_half(named: Named) -> Tensor:
    norm = torch.nn.utils.get_total_norm(list(gradients_of(named).values()))
    torch.nn.utils.clip_grads_with_norm_(named.values(), float(norm) / 2, norm)
    return norm


def clip_values(named: Named) -> None:
    torch.nn.utils.clip_grad_value_(named.values(), 3.0)


def add_noise(named: Named) -> None:
    for gradient in gradients_of(named).values():
        gradient += torch.randn_like(gradient)
        gradient.add_(torch.empty_like(gradient).uniform_(-1, 1)).sub_(torch.rand_like(gradient))


def mask(named: Named) -> None:
    """With whole masks."""
    for name, parameter in named.items():
        if parameter.grad is not None:
            chosen = whole_like(name, WHOLE[name], 1) > 0
            parameter.grad *= chosen
            parameter.grad.masked_fill_(whole_like(name, WHOLE[name], 2) > 0.3, 5.0)
            parameter.grad = torch.where(whole_like(name, WHOLE[name], 3) > 0.3, parameter.grad, -1.0)


def mask_by_index(named: Named) -> None:
    for name, gradient in gradients_of(named).items():
        gradient[whole_like(name, WHOLE[name], 1) > 0] = 0
        gradient[gradient.abs() > 4] = 1.5


def freeze(named: Named) -> None:
    """Rows and columns, in all ways of saying which."""
    for name, gradient in gradients_of(named).items():
        sizes = WHOLE[name]
        if sizes:
            gradient[:1] = 0
            gradient[-1] = 0.5
            gradient[[0, sizes[0] // 2]] = -2.0
            gradient[torch.tensor([sizes[0] - 1])] = torch.tensor(0.25, dtype=torch.double)
            gradient[::3] = 1.25
            gradient[1:].mul_(2.0)
            gradient[: sizes[0] // 2] += 1
        if len(sizes) == 2:
            gradient[..., 1] = 3.0
            gradient[:, 1:][1:] *= 0.5
            gradient[1:3, :2] = whole_like(name, (2, 2), 4)[: min(2, sizes[0] - 1), : min(2, sizes[1])]
            gradient[:2].zero_()
            gradient[-1:].normal_(mean=1.0, std=0.1)
            gradient[:, 0] = torch.tensor(7.0, dtype=torch.double)


WRITTEN: dict[str, Callable[[Named], Any]] = {
    **{f"clip by {order}, {foreach}": lambda n, o=order, f=foreach: clip(n, o, f) for order, foreach in [
        (2.0, None), (1.0, True), (float("inf"), False), (3.5, True), (2.0, False)
    ]},
    "clip to half": clip_to_half,
    "clip values": clip_values,
    "noise": add_noise,
    "masks": mask,
    "masks as indices": mask_by_index,
    "frozen rows": freeze,
}  # fmt: skip
WHOLE = {name: tuple(parameter.shape) for name, parameter in Original().named_parameters()}


def part_of_original(rank: int) -> nn.Module:
    model, _ = local_model()
    model.double()
    synchronize_gradients(model)
    loss_of(model, rank, 0, parts=True).backward()
    return model


def on_every_rank(rank: int, size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"read": read(dict(part_of_original(rank).named_parameters()))}
    for what, write in WRITTEN.items():
        model = part_of_original(rank)
        torch.manual_seed(11)
        value = write(dict(model.named_parameters()))
        seen[what] = value, full_gradients(model), torch.rand(()).item()
        loss_of(model, rank, 1, parts=True).backward()
        clip(dict(model.named_parameters()), 2.0, None)
        seen[f"{what}, and another pass"] = full_gradients(model)
    seen["refused"] = refused(part_of_original(rank))
    seen["norms"] = norms_agree(part_of_original(rank))
    seen["multiplied"] = multiplied_by_clipping(part_of_original(rank))
    seen["hooks"] = own_hooks(rank)
    seen["copies"] = copies(part_of_original(rank))
    seen["scaled"] = scaled(part_of_original(rank))
    seen["other gradients"] = [type(part_of_original(rank).get_parameter(name).grad) for name in ("same", "scalar")]
    return seen


def refused(model: nn.Module) -> dict[str, str]:
    """What would mislead, with what is said."""
    gradient, other = model.even.grad, model.box.grad
    assert isinstance(gradient, Tensor)
    texts = {}
    for what, function in REFUSED.items():
        try:
            function(gradient, other)
        except RuntimeError as error:
            texts[what] = str(error)
    return texts


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "sum along a dim": lambda g, _: g.sum(0),
    "norm along a dim": lambda g, _: g.norm(dim=1),
    "spectral norm": lambda g, _: torch.linalg.norm(g, 2),
    "norm of order 0": lambda g, _: g.norm(0),
    "largest of rows": lambda g, _: g.max(dim=0),
    "std along a dim": lambda g, _: g.std(0),
    "std that keeps dims": lambda g, _: g.std(keepdim=True),
    "median": lambda g, _: g.median(),
    "histogram": lambda g, _: g.float().histc(10),
    "histogram of TensorBoard": lambda g, _: SummaryWriter(tempfile.mkdtemp()).add_histogram("gradient", g),
    "view": lambda g, _: g.view(-1),
    "transposed": lambda g, _: g.T,
    "product": lambda g, _: g @ g,
    "places": lambda g, _: torch.where(g > 0),
    "sorted": lambda g, _: g.topk(1),
    "numpy": lambda g, _: g.numpy(),
    "list": lambda g, _: g.tolist(),
    "number": lambda g, _: float(g),
    "rows read by a list": lambda g, _: g[[0, 1]],
    "a row": lambda g, _: g[0],
    "a new dim": lambda g, _: g[None],
    "rows written by pairs": lambda g, _: g.__setitem__(([0, 1], [1, 2]), 0.0),
    "loop": lambda g, _: list(g),
    "stacked": lambda g, _: torch.stack([g]),
    "outer": lambda g, _: g + torch.ones(2, *g.shape),
    "two gradients": lambda g, other: g + other[:, :1],
    "into one of several": lambda g, _: torch.zeros(2, *g.shape, dtype=g.dtype)[0].add_(g),
    "into rows": lambda g, _: torch.zeros(9, 3, dtype=g.dtype)[: len(g)].copy_(g),
    "into another shape": lambda g, _: torch.zeros(1, *g.shape, dtype=g.dtype).add_(g),
    "dropout": lambda g, _: torch.nn.functional.dropout(g),
    "summed over these ranks": lambda g, _: dist.all_reduce(g),
    "as gradients of others": lambda g, _: g.__array__(),
}


class Products(TorchDispatchMode):
    """Counts the operators that multiply in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mul_, torch.ops.aten._foreach_mul_):
            self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def multiplied_by_clipping(model: nn.Module) -> dict[str, int]:
    """What multiplies gradients where they are clipped."""
    with Products() as products:
        clip_gradients_norm(model, 1e-3)
    return dict(products.calls)


def norms_agree(model: nn.Module) -> list[float]:
    """The package's own norms, and torch's."""
    named = dict(model.named_parameters())
    return [
        float(norm)
        for norm in (
            grad_norms(model)["grad_2.0_norm_total"],
            torch.nn.utils.get_total_norm(list(gradients_of(named).values())),
            clip_gradients_norm(model, 1e-3),
        )
    ]


def own_hooks(rank: int) -> dict[str, Tensor]:
    """Hooks of the user's see what each backward pass contributes."""
    model, _ = local_model()
    model.double()
    synchronize_gradients(model)
    add_hooks(dict(model.named_parameters()))
    for step in range(2):
        loss_of(model, rank, step, parts=True).backward()
    return full_gradients(model)


def add_hooks(named: Named) -> None:
    def first_row_frozen(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:1] = 0
        return gradient

    def normalized(gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1)

    for parameter in named.values():
        if parameter.requires_grad and parameter.dim():
            parameter.register_hook(first_row_frozen)
            parameter.register_hook(normalized)


def copies(model: nn.Module) -> dict[str, Any]:
    """What becomes of the kind of tensor that it is."""
    gradient = model.even.grad
    assert isinstance(gradient, Tensor)
    several = [gradient * number for number in range(9)]
    copied = [made.as_subclass(Tensor) for made in copy.deepcopy(several)]
    saved = io.BytesIO()
    torch.save(gradient, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=True)
    model.even.square().sum().backward()
    kept = model.even.grad is gradient
    model.zero_grad(set_to_none=False)
    zero = bool((model.even.grad == 0).all())
    (first,) = torch.autograd.grad(model.even.square().sum(), model.even)
    weights = model.even.detach().clone().requires_grad_()
    with torch.no_grad():
        for written in (model.even, weights):
            written.sub_(gradient)
    return {
        "stepped": type(model.even) is nn.Parameter and type(weights) is Tensor,
        "copied": all(map(torch.equal, copied, [one.as_subclass(Tensor) for one in several])),
        "saved": type(again) is Tensor and again.shape == gradient.shape,
        "kept": kept,
        "zero": zero and isinstance(model.even.grad, GradientPart),
        "autograd.grad": isinstance(first, GradientPart),
        "plain": type(gradient.as_subclass(Tensor)) is Tensor,
        "said": repr(gradient).startswith("this rank's part of the gradient of even ("),
    }


def scaled(model: nn.Module) -> list[bool]:
    """Whether steps are made: the first of all ranks, the second of none, for one rank's gradient is not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    made = []
    for value in (1.0, float("inf")):
        before = full_state_dict(model)["even"]
        assert isinstance(model.even.grad, Tensor)
        model.even.grad[:1] = value
        scaler.step(optimizer)
        scaler.update()
        made.append(not torch.equal(full_state_dict(model)["even"], before))
    return made


@pytest.fixture(scope="module", params=RANKS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(on_every_rank, request.param)


def alone(size: int, steps: int = 1) -> Named:
    """The whole parameters, with the gradients of the first passes together."""
    wanted = expected_gradients(size, steps)
    named = dict(Original().double().named_parameters())
    for name, parameter in named.items():
        parameter.grad = wanted[name].double() if name in wanted else None
    return named


def assert_equal(found: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}")


def test_what_is_read_is_of_the_whole(ranks: list[dict[str, Any]]) -> None:
    wanted = read(alone(len(ranks)))
    for seen in ranks:
        assert seen["read"].keys() == wanted.keys()
        for what, value in wanted.items():
            assert_equal(seen["read"][what], value, what)


@pytest.mark.parametrize("what", WRITTEN)
def test_what_is_written_is_written_to_the_whole(ranks: list[dict[str, Any]], what: str) -> None:
    named = alone(len(ranks))
    torch.manual_seed(11)
    value = WRITTEN[what](named)
    state = torch.rand(()).item()
    first = {name: gradient.clone() for name, gradient in gradients_of(named).items()}
    both, once = expected_gradients(len(ranks), 2), expected_gradients(len(ranks), 1)
    for name, gradient in gradients_of(named).items():
        gradient += both[name].double() - once[name].double()
    clip(named, 2.0, None)
    for seen in ranks:
        found, gradients, then = seen[what]
        if value is not None:
            assert_equal(found, value, what)
        assert then == state, "the ranks' common stream of random numbers"
        for name, gradient in first.items():
            assert_equal(gradients[name], gradient, f"{what}: {name}")
            assert_equal(seen[f"{what}, and another pass"][name], named[name].grad, f"{what}, then: {name}")


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_mislead_is_refused(ranks: list[dict[str, Any]], what: str) -> None:
    for seen in ranks:
        text = seen["refused"][what]
        assert "was called on this rank's part of the gradient of even (" in text
        assert f"] of [12, 3], S(0: 12 -> {12 // len(ranks)})" in text
        assert (
            "lightning_autotp.full_gradients(model)['even'] is the whole one (for histograms, too: TensorBoard's"
            in text
        )
        assert "lightning_autotp.WholeMatrixOptimizer(module, parameters, kind, lr=...)" in text


def test_norms_are_the_same_in_three_ways(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["norms"] == pytest.approx([seen["norms"][0]] * 3, rel=1e-12)


def test_gradients_are_clipped_in_one_product_of_all(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["multiplied"] == {"aten._foreach_mul_": 1} for seen in ranks)


def test_hooks_of_the_users_see_parts_that_answer_for_the_whole(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    once, both = expected_gradients(size, 1), expected_gradients(size, 2)
    named = alone(size)
    for parameter in named.values():
        parameter.grad = None
    add_hooks(named)
    for pass_ in (once, {name: both[name].double() - once[name].double() for name in both}):
        torch.stack([(named[n] * g.double()).sum() for n, g in pass_.items() if n in named]).sum().backward()
    for seen in ranks:
        for name, gradient in gradients_of(named).items():
            assert_equal(seen["hooks"][name], gradient, name)


def test_the_kind_of_tensor_is_kept_and_not_saved(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert all(seen["copies"].values()), seen["copies"]
        assert seen["other gradients"] == [Tensor, Tensor], "these are whole"


def test_torchs_scaler_skips_the_steps_that_one_process_skips(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["scaled"] == [True, False] for seen in ranks)


# --- optimizers ---

PART = PartOf("weight", (12, 4), Shard(((0, Ownership.even(12, 2)),)), TPGroup("", 0, 2))
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (kind, {"lr": 0.1, **options})
    for kind in (
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    )
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}, {"maximize": True, "foreach": True})
    if "fused" not in options or kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
] + [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "foreach": foreach})
    for foreach in (False, True)
] + [
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.1, "foreach": foreach})
    for foreach in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_torchs_optimizers_work_on_parts(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    def steps(mark: bool) -> list[Tensor]:
        torch.manual_seed(3)
        parameters = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))]
        optimizer = kind(parameters, **options)  # type: ignore[arg-type]
        for _ in range(5):
            for place, parameter in enumerate(parameters):
                gradient = torch.randn(6, 4)
                parameter.grad = marked(gradient, PART) if mark and not place else gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        state = copy.deepcopy(optimizer.state_dict())["state"]
        return [*(p.detach() for p in parameters), *(x for each in state.values() for x in each.values())]

    for found, wanted in zip(steps(True), steps(False), strict=True):
        assert torch.equal(found.as_subclass(Tensor), wanted)


# --- whole models ---

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 1},
    "gpt2": {"n_embd": 64, "n_head": 4, "attn_pdrop": 0.0},
}
"""Tied embeddings over uneven shares; one key/value head that all share; dropout of the hidden states."""


def family_of(name: str) -> nn.Module:
    return tiny_model(name, seed=5, num_hidden_layers=1, **FAMILIES[name]).double().train()


def train(model: nn.Module, table: str, vocabulary: int = 131) -> list[float]:
    """Steps with all that a loop of one's own may do between them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    words = model.get_parameter(table)
    words.register_hook(lambda gradient: gradient * (torch.arange(vocabulary).unsqueeze(1) > 9))
    losses = []
    torch.manual_seed(1)
    for step in range(3):
        for part in range(2):
            loss = model(**token_batch(2 * step + part)).loss
            loss.backward()
            losses.append(loss.item())
        assert words.grad is not None
        words.grad[20:40] = 0
        words.grad[[3, vocabulary - 1]] = 0
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.001 * torch.randn_like(parameter.grad)
        each = torch.stack([parameter.grad.detach().norm() for parameter in model.parameters()])
        losses += [norm.item(), each.norm().item()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def norm_of_copy(model: nn.Module) -> float:
    """Of the gradients of a copy, whose parameters are other objects, some of them replaced once more."""
    again = copy.deepcopy(model)
    for module in again.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    again(**token_batch(30)).loss.backward()
    return torch.nn.utils.get_total_norm([p.grad for p in again.parameters() if p.grad is not None]).item()


TABLES = {"llama": "model.embed_tokens.weight", "qwen2": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def families(rank: int, size: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for name, table in TABLES.items():
        model = family_of(name)
        parallelize(model, dist.group.WORLD, example_inputs=token_batch(0))
        numbers = train(model, table)
        found[name] = [*numbers, norm_of_copy(model)], full_state_dict(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_a_loop_of_ones_own(size: int) -> None:
    results = run_ranks(families, size)
    for name, table in TABLES.items():
        model = family_of(name)
        losses = train(model, table)
        losses.append(norm_of_copy(model))
        for result in results:
            assert result[name][0] == pytest.approx(losses, rel=1e-5), name
            for key, value in model.state_dict().items():
                torch.testing.assert_close(result[name][1][key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


# --- cut again over the data axis ---


def steps(model: nn.Module) -> list[float]:
    """Clipped by torch, after what is elementwise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    numbers = []
    for step in range(3):
        for part in range(2):
            loss = model(**token_batch(2 * step + part)).loss
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0).clamp_(-0.5, 0.5)
        gradients = [parameter.grad for parameter in model.parameters()]
        numbers.append(torch.nn.utils.get_total_norm([gradient * 2 for gradient in gradients], float("inf")).item())
        numbers.append(torch.stack([gradient.detach().norm() for gradient in gradients]).norm().item())
        buffers = [torch.zeros_like(parameter.detach()).add_(parameter.grad) for parameter in model.parameters()]
        numbers.append(torch.stack([buffer.norm() for buffer in buffers]).norm().item())
        buffers = [torch.zeros_like(parameter.detach()) for parameter in model.parameters()]
        for lists in ([gradients, buffers], [buffers, gradients]):
            torch._foreach_add_(*lists)
        numbers.append(torch.stack([buffer.norm() for buffer in buffers]).norm().item())
        doubled = torch._foreach_mul(gradients, 2.0)
        numbers.append(torch.stack([gradient.norm() for gradient in doubled]).norm().item())
        assert all(parameter.type_as(parameter.grad) is parameter for parameter in model.parameters())
        numbers.append(torch.stack([gradient.abs().sum() for gradient in gradients]).sum().item())
        numbers.append(sum(gradient.std().item() for gradient in gradients))
        numbers.append(float(torch.stack([torch.isnan(gradient).any() for gradient in gradients]).any()))
        numbers.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=(None, True, False)[step]).item()
        )
        numbers.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return numbers


def two_by_two(rank: int, size: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = family_of("llama")
    parallelize(model, mesh["tensor"].get_group(), data_mesh=mesh["data"], example_inputs=token_batch(0))
    numbers = steps(model)
    model(**token_batch(9)).loss.backward()
    gradient = model.get_parameter("model.layers.0.mlp.up_proj.weight").grad
    texts = []
    for function in (lambda g: g.__setitem__(slice(2), 0), lambda g: g.sum(0), torch.randn_like, lambda g: g.view(-1)):
        try:
            function(gradient)
        except RuntimeError as error:
            texts.append(str(error))
    return numbers, full_state_dict(model), texts


@pytest.mark.slow
def test_what_fsdp_has_cut_again() -> None:
    results = run_ranks(two_by_two, 4)
    model = family_of("llama")
    numbers = steps(model)
    for found, state, texts in results:
        assert found == pytest.approx(numbers, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert len(texts) == 4
        assert all("of the gradient of model.layers.0.mlp.up_proj.weight (" in text for text in texts)
