"""Counts what one process's training step holds in memory and does: on fake tensors before a run, on real ones in it.

Every operator below autograd passes through a :class:`Meter`. A storage counts from the operator that makes it to its
end, once, however many views there are of it. So what autograd keeps, what a checkpointed block computes again, and
what the loss needs for a moment are seen as they happen; no operator's needs are written down here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import ceil, prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_autotp.operators import Shapes, record
from lightning_autotp.operators.graph import Ref
from lightning_autotp.private.torch_private import FakeTensor, TorchDispatchMode, schema_of, storage_key, tree_leaves
from lightning_autotp.quantized.weight import QuantizedWeight

Label = Literal["parameters", "quantized", "copies", "dequantized", "gradients", "states", "activations", "other"]
"""What a storage is: a parameter; what is stored of a quantized one; a parameter in another dtype; the numbers that a
quantized one stands for; a gradient; an optimizer's state; what the forward pass keeps for the backward pass; anything
else that is there for a while."""

MOVING: tuple[Label, ...] = ("copies", "dequantized", "gradients", "activations", "other")
"""What comes and goes in a step."""

_OF_PARAMETERS: set[Label] = {"parameters", "quantized", "copies", "dequantized"}

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]

_COLLECTIVES: dict[str, Collective] = {
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
}
FUNCTIONAL = [f"{name}.default" for name in _COLLECTIVES]
"""Operators that communicate. Each makes a tensor of its own."""
_WAIT = "_c10d_functional.wait_tensor"
_DEVICE = torch.ops.prim.device.default
_CAST = "aten._to_copy"
_VALUE = "aten._local_scalar_dense"
_WHERE = "aten.nonzero"
_GROUPED = "aten._grouped_mm"
_QUANTIZED_PRODUCT = "bitsandbytes.gemm_4bit"


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any, **_: Any) -> float:
    """Floating-point operations of a convolution's gradients: for its input and for its weight as many as its own.

    torch's counter ignores the groups, and so counts a depthwise convolution as a dense one.
    """
    is_transposed, (of_input, of_weight, _bias) = options[4], options[7]
    summed = x if is_transposed else gradient
    return 2.0 * summed.numel() * weight[0].numel() * (of_input + of_weight)


_FLOPS = {
    **{str(operator): count for operator, count in flop_registry.items()},
    "aten.convolution_backward": _convolution_backward,
}


class Ran(NamedTuple):
    """One operator that ran.

    Attributes:
        name: such as ``aten.mm``.
        place: path of the repeated block that it is of, also in the backward pass; empty outside of them.
        bytes: that it read and wrote; of a collective, of the whole tensor.
        flops: of a product; ``None`` for any other operator.
        collective: which one it is; empty if it is none.
        fixed: those of the bytes that are the same for any batch: of parameters, of what is computed from them alone,
            of their gradients.
        is_host_copy: whether it copies to host memory, or from there.
        meanwhile: of a collective: how many of the operators that follow it run before it is waited for.
    """

    name: str
    place: str
    bytes: int
    flops: float | None = None
    collective: Collective | Literal[""] = ""
    fixed: int = 0
    is_host_copy: bool = False
    meanwhile: int = 0

    @property
    def is_other(self) -> bool:
        """Whether it is no product, no collective and no copy to host memory or from there."""
        return self.flops is None and not self.collective and not self.is_host_copy

    def bytes_of(self, rows: int) -> int:
        """Those of a batch of so many rows."""
        return self.fixed + rows * (self.bytes - self.fixed)


@dataclass
class Work:
    """What operators did.

    Attributes:
        ran: each, in the order in which they ran; those that move nothing are left out.
    """

    ran: list[Ran] = field(default_factory=list)

    @cached_property
    def products(self) -> Counter[Ran]:
        """How often each product ran, wherever that was."""
        return Counter(one._replace(place="") for one in self.ran if one.flops is not None)

    @cached_property
    def others(self) -> Others:
        """What ran besides products, collectives and copies to host memory and from there."""
        return Others.of(one for one in self.ran if one.is_other)

    @cached_property
    def others_by_name(self) -> dict[str, Others]:
        """The same by names of operators."""
        found: dict[str, list[Ran]] = {}
        for one in self.ran:
            if one.is_other:
                found.setdefault(one.name, []).append(one)
        return {name: Others.of(several) for name, several in found.items()}

    @cached_property
    def host_copies(self) -> Others:
        """What was copied to host memory, and from there."""
        return Others.of(one for one in self.ran if one.is_host_copy)

    @cached_property
    def collectives(self) -> Counter[Sent]:
        """How often each collective ran beside the same products, wherever that was."""
        return Counter(self.sent(number) for number, one in enumerate(self.ran) if one.collective)

    def sent(self, number: int) -> Sent:
        """The collective that ran as the operator of this number."""
        one = self.ran[number]
        beside = self.ran[number + 1 : number + 1 + one.meanwhile]
        return Sent(one._replace(place=""), tuple(each._replace(place="") for each in beside if each.flops is not None))

    @property
    def flops(self) -> float:
        """Floating-point operations of all products."""
        return sum((one.flops or 0.0) * count for one, count in self.products.items())


class Sent(NamedTuple):
    """A collective.

    Attributes:
        ran: itself.
        beside: the products that are computed before it is waited for.
    """

    ran: Ran
    beside: tuple[Ran, ...]


class Moment(NamedTuple):
    """How far a step is: how many changes of memory and operators there were."""

    changes: int
    ran: int


class Change(NamedTuple):
    """Some memory is there from now on, or is not any more.

    Attributes:
        label: what it is.
        bytes: how much; negative, if it is not there any more.
        in_block: whether a repeated block runs.
        made: the number of the change by which it was made.
    """

    label: Label
    bytes: int
    in_block: bool
    made: int


class Held:
    """What is alive, and what was when it was the most.

    Attributes:
        live: bytes that are alive now, by label.
        peak: of the moment at which the most was alive besides parameters and optimizer states: what it was.
        peak_without_gradients: of the moment at which the most was alive besides these and gradients.
        peak_in_blocks: of the moment, of those at which a repeated block ran, at which the most was alive besides
            parameters, also in another dtype, states and gradients.
    """

    def __init__(self) -> None:
        self.live: Counter[Label] = Counter()
        self.restart_peaks()

    def restart_peaks(self) -> None:
        """Forget the peaks so far."""
        self.peak: Counter[Label] = Counter(self.live)
        self.peak_without_gradients: Counter[Label] = Counter(self.live)
        self.peak_in_blocks: Counter[Label] = Counter()
        self._most = sum(self.live[label] for label in MOVING)
        self._most_without_gradients = self._most - self.live["gradients"]
        self._most_in_blocks = 0

    def relabel(self, before: Label, after: Label) -> None:
        """Give all that is alive with one label another one."""
        self.live[after] += self.live.pop(before, 0)

    def change(self, change: Change) -> None:
        """Count some memory that comes or goes."""
        live = self.live
        live[change.label] += change.bytes
        if change.bytes <= 0 or change.label not in MOVING:
            return
        of_batch = live["activations"] + live["other"] + live["dequantized"]
        without = of_batch + live["copies"]
        moving = without + live["gradients"]
        if moving > self._most:
            self.peak, self._most = Counter(live), moving
        if without > self._most_without_gradients:
            self.peak_without_gradients, self._most_without_gradients = Counter(live), without
        if change.in_block and of_batch > self._most_in_blocks:
            self.peak_in_blocks, self._most_in_blocks = Counter(live), of_batch


@dataclass(frozen=True)
class Others:
    """Operators that are neither products nor collectives.

    Attributes:
        count: how many there are.
        fixed_bytes: that they move whatever the batch is.
        bytes: that they move besides.
    """

    count: int
    fixed_bytes: int
    bytes: int

    @classmethod
    def of(cls, ran: Iterable[Ran]) -> Others:
        """Of some operators."""
        several = list(ran)
        fixed = sum(one.fixed for one in several)
        return cls(len(several), fixed, sum(one.bytes for one in several) - fixed)


class Meter(TorchDispatchMode):
    """A mode that counts; enter it after the mode of fake tensors.

    Args:
        model: whose parameters are known as such; quantized ones by what is stored of them.
        chosen: of tokens' choices of experts, the share that is of this rank's, where tensors are fake.

    Attributes:
        held: what is alive.
        changes: of it, in order.
        work: what was done.
        casts: bytes of the whole parameters that autocast has cast, by the repeated block that they were cast in.
        place: the repeated block whose operators run now.
        begun: when the followed blocks began to run, each by its name, those that a checkpointed one runs again too.
        left: when they ended to, first.
        turned: when the backward pass of a followed block began, by its name.
        is_aside: whether operators run that are no part of the step.
    """

    def __init__(self, model: nn.Module, chosen: float = 1.0) -> None:
        super().__init__()
        self._chosen = chosen
        self.work = Work()
        self.casts: dict[str, dict[int, int]] = {}
        self.place = ""
        self._left: list[weakref.ref[Tensor]] = []  # what the last block returned
        self._gathered: set[torch.Size] = set()  # shapes of parameters that were
        # By the memory of a product's result, also in another dtype: which of what ran it is, and the bytes of that.
        self._products: dict[int, tuple[int, int]] = {}
        self._under_way: dict[int, int] = {}  # by the memory of a collective's result: which of what ran it is
        self.begun: list[tuple[str, Moment]] = []
        self.left: dict[str, Moment] = {}
        self.turned: dict[str, Moment] = {}
        self.is_aside = False
        self.held = Held()
        self.changes: list[Change] = []
        self._alive: dict[int, tuple[Label, int, Any, int]] = {}
        for parameter in model.parameters():
            if isinstance(parameter, QuantizedWeight):
                self._add(parameter.in_memory, "quantized")
            else:
                self._add([parameter], "parameters")
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def follow(self, blocks: Mapping[str, nn.Module]) -> None:
        """Know from now on when one of these runs, by the names given, and when its backward pass does."""
        for name, block in blocks.items():
            block.register_forward_pre_hook(partial(self._begin, name), prepend=True, with_kwargs=True)
            block.register_forward_hook(partial(self._leave, name))

    @property
    def now(self) -> Moment:
        """How far the step is."""
        return Moment(len(self.changes), len(self.work.ran))

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.place = name
        self.begun.append((name, self.now))
        for tensor in _with_gradients((args, kwargs)):
            if not any(tensor is left() for left in self._left):  # else the backward pass goes on in the block before
                tensor.register_hook(partial(self._at, ""))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.place = ""
        self.left.setdefault(name, self.now)
        tensors = _with_gradients(output)
        self._left = [weakref.ref(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.register_hook(partial(self._at, name))

    def _at(self, name: str, gradient: Tensor) -> None:
        self.place = name
        self.turned.setdefault(name, self.now)

    def relabel(self, before: Label, after: Label) -> None:
        """Give all that is alive with one label another one."""
        for key, (label, *others) in self._alive.items():
            if label == before:
                self._alive[key] = after, *others
        self.held.relabel(before, after)

    def label(self, tensors: Iterable[Tensor], label: Label) -> None:
        """Say what these tensors are."""
        for tensor in tensors:
            known = self._alive.get(storage_key(tensor))
            if known is None:
                self._add([tensor], label)
            elif known[0] != label:
                self._change(known[0], -known[1], known[3])
                self._change(label, known[1], known[3])
                self._alive[storage_key(tensor)] = label, *known[1:]

    def pack_hook(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
        """Take a tensor for one that is copied to host memory: nothing here keeps it."""
        known = self._alive.get(storage_key(tensor))
        of_parameters = known is not None and known[0] in _OF_PARAMETERS
        self._copy(tensor, of_parameters)
        return tensor.shape, tensor.dtype, of_parameters

    def unpack_hook(self, packed: tuple[torch.Size, torch.dtype, bool]) -> Tensor:
        """Such a tensor, back on the device."""
        shape, dtype, of_parameters = packed
        made = torch.empty(shape, dtype=dtype)
        self._copy(made, of_parameters)
        return made

    def _copy(self, tensor: Tensor, of_parameters: bool) -> None:
        if self.is_aside:
            return
        size = tensor.numel() * tensor.itemsize
        self.work.ran.append(Ran("aten.copy_", self.place, size, fixed=of_parameters * size, is_host_copy=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count."""
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # more often than anything else
            return args[0].device
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if any(not issubclass(kind, Tensor) or kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a subclass takes it apart, and the parts come here
        name = _name(func)
        if name == _VALUE and isinstance(args[0], FakeTensor) and args[0].dtype == torch.bool:
            return True  # checks of the batch: whether all of it is valid
        if name == _WAIT:
            self._waited(args[0])
            return args[0] if isinstance(args[0], FakeTensor) else func(*args)
        if name == _WHERE and isinstance(args[0], FakeTensor) and args[0].dtype == torch.bool:
            return args[0].new_empty((ceil(self._chosen * args[0].numel()), args[0].dim()), dtype=torch.long)
        if name == _QUANTIZED_PRODUCT and isinstance(args[0], FakeTensor):
            with self:
                return _product_of_dequantized(*args, **kwargs)
        is_grouped = name == _GROUPED and isinstance(args[0], FakeTensor)
        if self.is_aside and not is_grouped:
            return func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = _grouped(*operands) if is_grouped else func(*args, **kwargs)
        if self.is_aside:
            return result
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {storage_key(leaf) for leaf in operands}
        labels = {self._alive[key][0] for key in known if key in self._alive}
        of_parameters = bool(known) and labels <= _OF_PARAMETERS and known <= self._alive.keys()
        of_quantized = of_parameters and not labels.isdisjoint({"quantized", "dequantized"})
        new = [leaf for leaf in results if storage_key(leaf) not in known and storage_key(leaf) not in self._alive]
        self._add(new, "dequantized" if of_quantized else "copies" if of_parameters else "other")
        if name == _CAST and isinstance(args[0], nn.Parameter):
            self.casts.setdefault(self.place, {})[id(args[0])] = result.numel() * result.itemsize
        self._count(func, args, kwargs, result, operands, bool(new), of_parameters)
        return result

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        operands: list[Tensor],
        makes: bool,
        of_parameters: bool,
    ) -> None:
        name = _name(func)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        each = {id(leaf): leaf for leaf in (*operands, *results)}.values()
        moved = sum(leaf.numel() * leaf.itemsize for leaf in each)
        ran = partial(Ran, name, self.place)
        if name in _COLLECTIVES:
            kind = _COLLECTIVES[name]
            whole = operands[0] if kind == "reduce_scatter" else results[0]
            if of_parameters:
                self._gathered.add(whole.shape)
            size = whole.numel() * whole.itemsize
            self._under_way[storage_key(results[0])] = len(self.work.ran)
            self.work.ran.append(ran(size, collective=kind, fixed=size if whole.shape in self._gathered else 0))
            return
        # The processor's attention, and what adds a product in place, do what others do.
        count = _FLOPS.get(name.removesuffix("_").replace("_for_cpu", ""))
        if count is not None:
            flops = float(count(*args, **kwargs, out_val=result))
        elif "grouped_mm" in name:  # rows of several matrices after each other: each meets one of the others
            flops = 2.0 * prod(operands[0].shape[-2:]) * operands[1].shape[-1]
        else:
            if makes or schema_of(func).is_mutable:
                self.work.ran.append(ran(moved, fixed=moved if of_parameters else 0))
            if name == _CAST and (made := self._products.get(storage_key(args[0]))) is not None:
                self._products[storage_key(result)] = made
            return
        fixed = sum(leaf.numel() * leaf.itemsize for leaf in each if self._label(leaf) in _OF_PARAMETERS)
        size = sum(leaf.numel() * leaf.itemsize for leaf in results)
        self._products |= {storage_key(leaf): (len(self.work.ran), size) for leaf in results}
        self.work.ran.append(ran(moved, flops, fixed=fixed))

    def _waited(self, tensor: Tensor) -> None:
        number = self._under_way.pop(storage_key(tensor), None)
        if number is not None:
            self.work.ran[number] = self.work.ran[number]._replace(meanwhile=len(self.work.ran) - number - 1)

    def _label(self, tensor: Tensor) -> Label | None:
        known = self._alive.get(storage_key(tensor))
        return None if known is None else known[0]

    def _add(self, tensors: Iterable[Tensor], label: Label) -> None:
        for tensor in tensors:
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if key not in self._alive:
                reference = weakref.ref(storage, partial(self._end, key))
                self._alive[key] = label, storage.nbytes(), reference, len(self.changes)
                self._change(label, storage.nbytes(), len(self.changes))

    def _end(self, key: int, _: Any) -> None:
        label, size, _, made = self._alive.pop(key)
        self._products.pop(key, None)
        self._under_way.pop(key, None)
        self._change(label, -size, made)

    def _change(self, label: Label, size: int, made: int) -> None:
        self.changes.append(Change(label, size, bool(self.place), made))
        self.held.change(self.changes[-1])

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        self.label([parameter.grad], "gradients")
        made = self._products.pop(storage_key(parameter.grad), None)
        if made is not None:  # what the product gave is as large for any batch
            at, size = made
            product = self.work.ran[at]
            self.work.ran[at] = product._replace(fixed=product.fixed + size)


@cache
def _name(operator: Any) -> str:
    """An operator's name without that of its overload."""
    return str(operator.overloadpacket)


def _with_gradients(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _grouped(*operands: Tensor) -> Tensor:
    """The result of a product of several matrices with rows, whose shape torch tells for bfloat16 alone."""
    known = record(f"{_GROUPED}.default")
    assert known is not None
    assert known.results is not None
    names = ("self", "mat2", "offs")[: len(operands)]
    given = tuple((name, Ref(number)) for number, name in enumerate(names))
    ((shape, _),) = known.results(Shapes(given, (), lambda number: tuple(operands[number].shape)))
    return operands[0].new_empty([int(size) for size in shape])


def _product_of_dequantized(
    input: Tensor,
    numbers: Tensor,
    shape: list[int],
    scales: Tensor,
    block: int,
    kind: str,
    **_: None,
) -> Tensor:
    """What bitsandbytes does on a GPU for more than a few tokens: the matrix is dequantized, then multiplied."""
    weight = torch.ops.bitsandbytes.dequantize_4bit(numbers, scales, block, kind, shape, input.dtype)
    return input.reshape(-1, shape[1]).mm(weight.t()).view(*input.shape[:-1], shape[0])
