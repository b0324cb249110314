"""A training step of one rank on fake tensors: the local model's own code, forward, backward and optimizer step.

Nothing is computed and nothing is sent, but every tensor is made, kept and dropped as it would be. It takes seconds for
the largest models, and needs neither a GPU nor a process group.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.building.repeated_blocks import OffloadedForward, blocks_of_their_own, repeated_blocks
from lightning_autotp.capture.capture import ExampleCall, meta_copy
from lightning_autotp.gradients.data_parallel import embeddings_of_their_own
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.parameters.state import is_parallel, parallel_state
from lightning_autotp.planning.alike_blocks import NotAlike, Repeats, Sampled, repeats_of
from lightning_autotp.planning.meter import FUNCTIONAL, Held, Label, Meter, Others, Work
from lightning_autotp.private.fake_tensors_private import RememberingFakeTensorMode
from lightning_autotp.private.torch_private import fake_like, tree_map_only, values_in_fake_tensors
from lightning_autotp.private.transformers_private import PreTrainedModel, fake_tensors_as_ordinary
from lightning_autotp.quantized.formats import library_of
from lightning_autotp.quantized.noted import format_of, note_quantization
from lightning_autotp.quantized.weight import QuantizedWeight
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.solving.cost import Profile

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
Optimizer = Literal["adamw", "sgd", "sgd-momentum", "none"]
Quantization = Literal["nf4", "fp4", "int8"]
"""Formats of bitsandbytes: ``load_in_4bit`` with this ``bnb_4bit_quant_type``, or ``load_in_8bit``."""

_CPU = torch.device("cpu")

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, foreach=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, foreach=True),
}
"""By name, as torch makes them on a GPU by default: for all parameters at once."""


Loss = Callable[[Any, dict[str, Any]], Tensor]
"""What a training step makes of what the model returns and of one row of its batch: the loss, without values."""


class RehearsalError(RuntimeError):
    """A model's step cannot be rehearsed: its code asks for values that only a real step has, or there is no loss."""


@dataclass(frozen=True)
class Rehearsal:
    """What one step of a rank holds and does. Bytes.

    Attributes:
        parameters: of this rank.
        quantized: how much of it is what is stored of quantized ones, which copies of the model do not divide.
        gradients: once all are there.
        averaged: of the gradients in the dtype in which copies of the model average them: float32 for those in 16 bits.
        states: the optimizer's.
        activations: what the forward pass keeps for the backward pass.
        copies: parameters in another dtype that it keeps (autocast's).
        dequantized: the numbers that quantized parameters stand for, where it keeps them (torchao's products do).
        peak: by label, at the moment at which parameters and states aside the most is there.
        peak_without_gradients: likewise, gradients aside as well.
        peak_in_blocks: likewise, while a repeated block runs, parameters in another dtype aside as well.
        update: what the optimizer's step needs for a moment, beside parameters, gradients and states.
        block: of the largest repeated block's parameters, quantized ones aside.
        block_casts: of those of its parameters that autocast casts, cast.
        casts: of all blocks' such parameters.
        rest: of the parameters in no repeated block, quantized ones aside.
        looked_up: of the embeddings among these that copies of the model gather only while they run.
        work: of forward and backward pass.
        forward: how many of its operators are the forward pass's: the first ones.
        update_work: of the optimizer's step.
        left_out: how many blocks were not run, as others do the same.
    """

    parameters: int
    quantized: int
    gradients: int
    averaged: int
    states: int
    activations: int
    copies: int
    dequantized: int
    peak: Counter[Label]
    peak_without_gradients: Counter[Label]
    peak_in_blocks: Counter[Label]
    update: int
    block: int
    block_casts: int
    casts: int
    rest: int
    looked_up: int
    work: Work
    forward: int
    update_work: Work
    left_out: int = 0

    @property
    def divided(self) -> int:
        """Of the parameters, what copies of the model divide."""
        return self.parameters - self.quantized

    @property
    def kept_on_host(self) -> Others:
        """What blocks keep in host memory for the backward pass."""
        return Work(self.work.ran[: self.forward]).host_copies


def fullest_rank(plan: Plan) -> int:
    """The rank that stores the most of the parameters."""
    return max(range(plan.ranks), key=plan.bytes)


def local_model(model: nn.Module, plan: Plan | None, rank: int = 0) -> nn.Module:
    """A copy of the model on meta; of a rank's part of it, where there is a plan."""
    local = meta_copy(model)
    if plan is not None:
        apply_plan(local, plan, TPGroup("", rank, plan.ranks))
    return local.train()


def check_adapters(lora: int, quantize: Quantization | None) -> None:
    """Whether these are a rank of adapters, and a format of the base that they are on.

    Raises:
        ValueError: if not.
    """
    if lora < 0:
        raise ValueError(f"lora={lora}: a rank must not be negative")
    if quantize is not None and (quantize not in get_args(Quantization) or not lora):
        known = ", ".join(get_args(Quantization))
        raise ValueError(f"quantize={quantize!r}: known are {known}, of the frozen base of adapters (lora=16)")


def as_trained(model: nn.Module, precision: Precision) -> nn.Module:
    """The model with parameters as they are trained."""
    dtype = dtype_of(precision)
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return model
    return nn.Module.to(local_model(model, None), dtype)  # transformers' own refuses what is quantized


def with_adapters(model: nn.Module, precision: Precision, lora: int, quantize: Quantization | None = None) -> Any:
    """A copy of the model with adapters on all its linear layers, as it is trained.

    Args:
        model: transformers'.
        precision: as the Trainer has it.
        lora: rank of the adapters.
        quantize: how bitsandbytes quantizes what they are on.

    Returns:
        PEFT's model.

    Raises:
        ValueError: if the model is not transformers', or is quantized already and is to be.
        QuantizationError: if its weights cannot be quantized part by part, or the library is missing.
    """
    from peft import LoraConfig, get_peft_model

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"lora={lora}: {type(model).__name__} is no model of transformers: put the adapters in yourself"
        )
    dtype = dtype_of(precision)
    base: Any = nn.Module.to(local_model(model, None), dtype)
    if quantize is not None:
        if any(format_of(parameter) for parameter in base.parameters()):
            raise ValueError(f"quantize={quantize!r}: {type(model).__name__} is quantized already: leave it out")
        note_quantization(base, bitsandbytes_config(quantize, precision))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for an attribute by its old name
        adapted = get_peft_model(base, LoraConfig(r=lora, target_modules="all-linear"))
    return nn.Module.to(adapted, dtype)  # PEFT makes them in float32, and the Trainer's precision casts them


def dtype_of(precision: Precision) -> torch.dtype:
    """In which parameters are trained."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def bitsandbytes_options(quantize: Quantization, precision: Precision) -> dict[str, Any]:
    """Of a ``BitsAndBytesConfig``, whose products are computed in the precision of the others."""
    if quantize == "int8":
        return {"load_in_8bit": True}
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    return {"load_in_4bit": True, "bnb_4bit_quant_type": quantize, "bnb_4bit_compute_dtype": dtype}


def bitsandbytes_config(quantize: Quantization, precision: Precision) -> BitsAndBytesConfig:
    """A ``quantization_config``."""
    library_of("bitsandbytes")
    return BitsAndBytesConfig(**bitsandbytes_options(quantize, precision))


def one_row(model: nn.Module, made: dict[str, Any], length: int) -> dict[str, Any]:
    """One row of a language model's batch, of so many tokens or as many as the model has positions for."""
    length = min(length, positions(model) or length)
    return tree_map_only(Tensor, lambda x: x.new_zeros((1, length, *x.shape[2:])), made)


def rows_of(batch: dict[str, Any]) -> int | None:
    """How many rows a batch has: the first tensor's; ``None`` if it has none."""
    return next((x.shape[0] for x in batch.values() if isinstance(x, Tensor) and x.dim()), None)


def first_row(batch: dict[str, Any]) -> dict[str, Any]:
    """The first row of a batch: of what has as many rows as the batch."""
    rows = rows_of(batch)
    return tree_map_only(Tensor, lambda x: x[:1] if x.dim() and x.shape[0] == rows else x, batch)


def positions(model: nn.Module) -> int | None:
    """How many tokens of a row a model has positions for, if its config says so."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def named_arguments(model: nn.Module, call: ExampleCall) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(inspect.signature(model.forward).parameters, call.args, strict=False)), **call.kwargs}


def rehearse(
    local: nn.Module,
    batch: Any,
    *,
    precision: Precision = "bf16-mixed",
    optimizer: Optimizer = "adamw",
    imbalance: float = Profile().imbalance,
    are_alike: bool = False,
    loss: Loss | None = None,
) -> Rehearsal:
    """Run a step of a local model without values.

    Args:
        local: from :func:`local_model`; its parameters have the dtype in which they are trained.
        batch: what the model is given: a mapping of tensors on any device, of the size of the step.
        precision: ``"bf16-mixed"`` runs it under autocast.
        optimizer: a name in :data:`OPTIMIZERS`, or ``"none"``.
        imbalance: by how much more tokens than an even share choose this rank's experts, where it has whole ones.
        are_alike: whether blocks were left out of a rehearsal of the same model that keeps something else of them.
        loss: of what the model returns and the batch; by default its ``loss``, or itself or its first element, where
            that is one number.

    Raises:
        RehearsalError: if its code asks for values, or it is not known what the loss is.
    """
    repeats = repeats_of(local)
    if repeats:
        try:
            return _rehearsed(local, batch, precision, optimizer, imbalance, repeats, are_alike, loss)
        except (NotAlike, RehearsalError):
            pass
    return _rehearsed(local, batch, precision, optimizer, imbalance, [], loss=loss)


def _rehearsed(
    local: nn.Module,
    batch: Any,
    precision: Precision,
    optimizer: Optimizer,
    imbalance: float,
    repeats: Sequence[Repeats],
    are_alike: bool = False,
    loss: Loss | None = None,
) -> Rehearsal:
    fake = RememberingFakeTensorMode(functional=FUNCTIONAL)
    model = meta_copy(local, partial(_stand_in, fake))
    given = tree_map_only(Tensor, partial(_stand_in, fake), batch)
    blocks = [_bytes(block) for block in blocks_of_their_own(model)]
    ranks = parallel_state(model).group.size if is_parallel(model) else 1
    meter = Meter(model, min(1.0, imbalance / ranks))
    for module in model.modules():
        if isinstance(module.forward, OffloadedForward):
            module.forward.host = meter
    sampled = Sampled(model, repeats, fake, meter, are_alike)
    repeated = set(repeated_blocks(model))
    meter.follow({path: x for path, x in model.named_modules() if x in repeated and path not in sampled.like})
    with _modes(fake, meter):
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                summed = _loss_of(model(**given)) if loss is None else loss(model(**given), given)
            meter.relabel("other", "activations")
            middle = meter.now
            summed.backward()
            del summed
        except (NotAlike, RehearsalError):
            raise
        except Exception as error:
            raise RehearsalError(
                f"a step of {type(local).__name__} cannot be rehearsed without values: {type(error).__name__}: {error}"
            ) from error
        step, held = sampled.step(middle), Held()
        for change in step.changes[: step.middle.changes]:
            held.change(change)
        held.relabel("other", "activations")
        kept = Counter(held.live)
        for change in step.changes[step.middle.changes :]:
            held.change(change)
        stepped = sampled.stepped(held)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    peaks = (held.peak, held.peak_without_gradients, held.peak_in_blocks)
    peak, without, in_blocks = (_told_apart(found, kept["activations"]) for found in peaks)
    casts = {place: sum(sizes.values()) for place, sizes in meter.casts.items() if place}
    casts |= {path: casts[other] for path, other in sampled.like.items() if other in casts}
    update = _update(optimizer, stepped)
    stored = held.live["parameters"]
    return Rehearsal(
        parameters=stored + held.live["quantized"],
        quantized=held.live["quantized"],
        gradients=held.live["gradients"],
        averaged=sum(parameter.numel() * max(parameter.itemsize, 4) for parameter in trained),
        states=update.states,
        activations=kept["activations"],
        copies=kept["copies"],
        dequantized=kept["dequantized"],
        peak=peak,
        peak_without_gradients=without,
        peak_in_blocks=in_blocks,
        update=update.most,
        block=max(blocks, default=0),
        block_casts=max(casts.values(), default=0),
        casts=sum(casts.values()),
        rest=stored - sum(blocks),
        looked_up=sum(map(_bytes, embeddings_of_their_own(model))),
        work=Work(step.ran),
        forward=step.middle.ran,
        update_work=update.work,
        left_out=len(sampled.like),
    )


def _loss_of(output: Any) -> Tensor:
    """The loss among what a model returns.

    Raises:
        RehearsalError: if there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        found = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {[*output.shape]}" if isinstance(output, Tensor) else type(output).__name__
        raise RehearsalError(
            f"what the model returns ({kind}) has no loss: say how it is computed, as"
            " recommend(model, example_inputs=..., loss=lambda output, row: ...)"
        )
    return found


def _stand_in(fake: RememberingFakeTensorMode, value: Tensor) -> Tensor:
    format = format_of(value)
    if format is None:
        return fake_like(value, fake, _CPU)
    with fake:
        made = torch.empty_strided(value.shape, value.stride(), dtype=format.dtype, device=_CPU)
    made = QuantizedWeight.without_values(made, format, value.dtype)
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


@contextmanager
def _modes(fake: RememberingFakeTensorMode, meter: Meter) -> Iterator[None]:
    with ExitStack() as modes:
        modes.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for mode in (fake_tensors_as_ordinary(), values_in_fake_tensors(), fake, meter):
            modes.enter_context(mode)
        yield


class _Update(NamedTuple):
    """An optimizer's step: bytes of its states, those that it needs for a moment, what it does."""

    states: int
    most: int
    work: Work


def _update(optimizer: Optimizer, trained: Iterable[nn.Parameter]) -> _Update:
    """The step of these parameters.

    It does the same to every element, so that one flat parameter of each dtype stands for all of them. What has no
    dims, such as the number of steps, is there for each parameter.
    """
    if optimizer == "none":
        return _Update(0, 0, Work())
    elements: Counter[torch.dtype] = Counter()
    counts: Counter[torch.dtype] = Counter()
    for parameter in trained:
        elements[parameter.dtype] += parameter.numel()
        counts[parameter.dtype] += 1
    fake = RememberingFakeTensorMode()
    with fake:
        flat = [nn.Parameter(torch.empty(size, dtype=dtype, device="cpu")) for dtype, size in elements.items()]
        gradients = [torch.empty_like(parameter) for parameter in flat]
    for parameter, gradient in zip(flat, gradients, strict=True):
        parameter.grad = gradient
    meter = Meter(nn.ParameterList(flat))
    with _modes(fake, meter):
        meter.label(gradients, "gradients")
        stepping = OPTIMIZERS[optimizer](flat)
        stepping.step()
        made = once = 0
        for one, state in stepping.state.items():
            for leaf in state.values():
                if isinstance(leaf, Tensor):
                    size = leaf.numel() * leaf.itemsize
                    made, once = made + size, once + size * (1 if leaf.dim() else counts[one.dtype])
    most = meter.held.peak_without_gradients
    return _Update(once, max(0, most["other"] + most["copies"] + most["activations"] - made), meter.work)


def _told_apart(found: Counter[Label], activations: int) -> Counter[Label]:
    """A peak in the forward pass, where it was not known yet what would be kept."""
    told = Counter(found)
    if not found["activations"]:
        told["activations"] = min(activations, found["other"])
        told["other"] -= told["activations"]
    return told


def _bytes(module: nn.Module) -> int:
    """Of the parameters that FSDP2 would cut."""
    cut = (parameter for parameter in module.parameters() if not isinstance(parameter, QuantizedWeight))
    return sum(parameter.numel() * parameter.itemsize for parameter in cut)
