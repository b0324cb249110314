"""What is used of torch that it does not promise to keep, but for processes (:mod:`.distributed_private`).

The rest of the package imports it from here, and ``tests/private`` asks each of these names for what is relied
on. A comment says what a name is for, and what public API would do instead, where there is one in sight.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch
import torch._jit_internal
import torch._ops
import torch._tensor
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

# The compiler of the frames that Python is about to run, switched on and off, and code whose frames it leaves alone.
# (torch.compiler.disable is public, but then nothing that such code calls is compiled either.)
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

# Function transforms: whether one runs, whether it is vmap, and the tensors that its wrappers stand for.
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor

# Within it modes that see operators before autograd does are asked at all. Nothing public.
from torch._dispatch.python import enable_python_dispatcher

# Autograd functions that run under a transform: by default a mode is refused there.
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import dispatch_functorch

# Tensors without memory that a trace works on, what they raise where values are asked for, and real ones in the middle
# of a trace. (torch.export is public and uses them, but takes no model whose Python asks for values.)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.schema_check_mode import SchemaCheckMode

# A tensor's memory, known without being kept.
from torch.multiprocessing.reductions import StorageWeakRef

# Modes that see functions, taken off and put back.
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.overrides import (
    TorchFunctionMode,
    _len_torch_function_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

# Which tensors torch gives to its functions of lists: those of exactly these classes.
from torch.utils._foreach_utils import _foreach_supported_types

# Sees every operator, below autograd (torch's notes on extending it name this class, under its private path); and such
# modes taken off and put back.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Nested values, with the names of places in them. Nothing public.
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

# Tensors as keys by identity, not kept alive.
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "TransformType",
    "WeakIdKeyDictionary",
    "custom_function_call",
    "dispatch_functorch",
    "enable_python_dispatcher",
    "get_interpreter_stack",
    "get_unwrapped",
    "is_functorch_wrapped_tensor",
    "set_compiler",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "unset_fake_temporarily",
]


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within it an object, a class or a module has these attributes of its own; then those that it had, if any."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, attribute in attributes.items():
            setattr(owner, name, attribute)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


# --- nested values ---


def registered_children(value: Any) -> tuple[list[str] | None, list[Any], Callable[[Sequence[Any]], Any]] | None:
    """One level of a container that torch's pytrees know; ``None`` for what they do not.

    Returns:
        Names of its children, or ``None`` if its class was registered without; the children; and what makes another
        such container of others.
    """
    if tree_is_leaf(value):
        return None
    children, spec = tree_flatten(value, is_leaf=lambda inner: inner is not value)
    names: list[str] | None = None
    try:
        named, _ = tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
        names = [keystr(path) for path, _ in named]
    except ValueError:
        pass
    return names, children, lambda new: tree_unflatten(new, spec)


# --- tensors and their memory ---


# A tensor's attributes themselves, also while ``torch.Tensor`` has others of these names (:func:`with_tensors`).
def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: it is neither on the meta device nor one of a trace."""
    return not ((isinstance(tensor, FakeTensor) and not _fakes_have_values) or tensor.is_meta)


_fakes_have_values = False


@contextmanager
def values_in_fake_tensors() -> Iterator[None]:
    """Within it fake tensors pass for tensors with values: a parallel model runs as in training, collectives too."""
    global _fakes_have_values
    before, _fakes_have_values = _fakes_have_values, True
    try:
        yield
    finally:
        _fakes_have_values = before


is_meta: Callable[[Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
device_of: Callable[[Tensor], torch.device] = vars(torch._C.TensorBase)["device"].__get__
data_of: Callable[[Tensor], Tensor] = vars(torch._C.TensorBase)["data"].__get__
set_data_of: Callable[[Tensor, Tensor], None] = vars(torch._C.TensorBase)["data"].__set__

# How often a tensor was written in place, by which autograd knows that what it kept has changed. Nothing public.
writes_into: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__

without_subclasses = torch._C.DisableTorchFunctionSubclass
"""Within it functions take a subclass of tensors for what it is, and do not ask it. Nothing public."""

without_functions = torch._C.DisableTorchFunction
"""Within it neither subclasses nor modes see functions. Nothing public."""

VIEW_GETTERS: list[Callable[..., Any]] = [Tensor._is_view, vars(torch._C.TensorBase)["_base"].__get__]
"""By which torch asks a subclass of tensors whether it is a view, and of what."""


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """Equal for what lies in the same memory; another memory may get the key when this one is gone.

    ``data_ptr()`` is public, but zero for all that is on meta.
    """
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    return int(storage._cdata)


def storage_behind(reference: StorageWeakRef) -> torch.UntypedStorage:
    """The memory that a weak reference means, which must not have expired. Nothing public."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place; ``-1`` for an inference tensor, which does not count. Nothing public."""
    return -1 if tensor.is_inference() else tensor._version


def neg_view(tensor: Tensor) -> Tensor:
    """The view of a tensor that has the other sign, as ``tensor.conj().imag`` is one. Nothing public makes any."""
    return torch._neg_view(tensor)


base_of: Callable[[Tensor], Tensor | None] = vars(torch._C.TensorBase)["_base"].__get__
"""The tensor that this one is a view of, the same object with the attributes it was given. Nothing public."""


def own_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The same memory in another shape, which counts as no view of the tensor. ``view`` makes one that does.

    Autograd refuses to change a view in place that a function of its own gave; the tensor must not be used after.
    """
    return torch.ops.aten._unsafe_view(tensor, shape)


def assert_async(condition: Tensor, message: str) -> None:
    """Raise if ``condition`` is false, on an accelerator at some time later: the host does not wait. Nothing public."""
    torch._assert_async(condition, message)


def wrapper(kind: type[Tensor], shape: list[int], like: Tensor) -> Any:
    """A tensor of a subclass without memory of its own, with the dtype and device of ``like``.

    torch documents it for subclasses, under its private name.
    """
    return Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)


def gradient_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """The hooks on a tensor's gradient, which are called from now on.

    ``torch.utils.swap_tensors`` leaves the dict of hooks on the tensor, but not what calls them: setting it does.
    ``register_hook`` is public, asking which there are is not.
    """
    hooks = tensor._backward_hooks
    if hooks is None:
        return []
    tensor._backward_hooks = hooks
    return list(hooks.values())


def hook_tables(tensors: Sequence[Tensor]) -> list[dict[int, Callable[..., Any]] | None]:
    """What holds the hooks on tensors' gradients, first those of :func:`gradient_hooks`, then of the others."""
    return [*map(_GRADIENT_HOOKS, tensors), *map(_ACCUMULATED_HOOKS, tensors)]


_GRADIENT_HOOKS = vars(torch._C.TensorBase)["_backward_hooks"].__get__
_ACCUMULATED_HOOKS = vars(torch._C.TensorBase)["_post_accumulate_grad_hooks"].__get__


def accumulated_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """The hooks that are called when a tensor's gradient has been added to it, kept as the others are."""
    hooks = tensor._post_accumulate_grad_hooks
    if hooks is None:
        return []
    tensor._post_accumulate_grad_hooks = hooks
    return list(hooks.values())


@contextmanager
def with_tensors(
    new_parameter: Callable[[Callable[..., Tensor]], Callable[..., Tensor]], attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Within it ``torch.Tensor`` has these attributes, and ``nn.Parameter`` is made otherwise; then as before.

    Args:
        new_parameter: makes a function ``(cls, data=None, requires_grad=True)`` of the one that makes parameters.
        attributes: by their names.
    """
    # What the compiler takes for a tensor's methods it looks up once, at its first use, which may be within
    # (``block.compile()`` in ``configure_model()``). The import is here, where models are built: it takes long.
    from torch._dynamo.trace_rules import get_tensor_method

    get_tensor_method()
    made = staticmethod(new_parameter(nn.Parameter.__dict__["__new__"].__func__))
    with replaced(nn.Parameter, __new__=made), replaced(Tensor, **attributes):
        yield


# --- operators ---

HANDING_OVER = frozenset(
    module.__file__ for module in (torch.overrides, torch._tensor, torch._jit_internal, torch._ops)
)
"""Files whose functions hand a call over to handlers of torch functions: no frame of these is the caller's."""


def call_by_call(function: Any) -> Any:
    """A function of torch that is written in Python, as one of which handlers of torch functions see every call.

    Torch hands it over as a whole, and takes the handler off meanwhile; a handler that puts itself back and goes on
    is given the same function again, because that asks ``has_torch_function`` first. Here the answer is no.
    """
    names = {**function.__globals__, "has_torch_function": _is_handed_over}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_handed_over(tensors: object) -> bool:
    return False


TO = "_to_copy"
"""The operator that ``tensor.to()`` becomes, by name. Nothing public."""


def schema_of(operator: Any) -> Any:
    """An operator's schema: its arguments by name with defaults, and which of them it writes. Nothing public."""
    return operator._schema


def elementwise_operators() -> Iterator[str]:
    """The names of torch's operators that it tags as elementwise, and which make a tensor: they write none.

    Without ``equal``, which has the tag, and ``polygamma``, whose form in place takes its arguments in another order.
    """
    for base in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, base)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            found = getattr(packet, overload)
            is_tagged = torch.Tag.pointwise in found.tags and base not in ("equal", "polygamma")
            if is_tagged and not found._schema.is_mutable:
                yield str(found)


def is_made_of_others(operator: Any) -> bool:
    """Whether a kernel of torch does nothing but call other operators, which give tensors. Nothing public."""
    made = operator._schema.returns
    return operator.namespace == "aten" and operator._can_decompose() and bool(made) and "Tensor" in str(made[0].type)


_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


class PreDispatchMode(SchemaCheckMode):
    """A dispatch mode that sees operators as they are called, before autograd takes them apart.

    torch lets only its own classes do so; SchemaCheckMode is the plainest of them and is a base for its type alone.
    torch takes a fifth of a trace to bring a call to such a mode: it looks for tensors in all arguments, and makes a
    context manager. So while the mode is on, the operators that were seen have a shorter way, in torch's own table of
    what an operator does at a dispatch key.
    """

    seen: ClassVar[set[torch._ops.OpOverload[Any, Any]]] = set()

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=_PRE_DISPATCH)
        self.entered = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether ``torch.compile`` is held off at each operator, which takes time: a trace runs it never."""
        return False

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call of an operator gives; within it, this mode is off."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The way that torch knows."""
        self.seen.add(func)
        self.shorten(func)
        return self.see(func, args, kwargs or {})

    def shorten(self, func: Any) -> None:
        """Let calls of an operator come here directly from now on."""
        func._dispatch_cache[_PRE_DISPATCH] = partial(self.directly, func)

    def directly(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The same without detours."""
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):  # no mode is to see it
            with without_python_dispatcher():
                return func(*args, **kwargs)
        modes = torch._ops.mode_stack_state_for_pre_dispatch()
        modes._schema_check_mode = None
        torch._C._dispatch_tls_set_dispatch_key_included(_PRE_DISPATCH, False)
        try:
            return self.see(func, args, kwargs)
        finally:
            modes._schema_check_mode = self
            torch._C._dispatch_tls_set_dispatch_key_included(_PRE_DISPATCH, True)

    def __enter__(self) -> PreDispatchMode:
        """Switch it on."""
        super().__enter__()
        self.entered += 1
        for func in self.seen:
            self.shorten(func)
        return self

    def __exit__(self, *raised: Any) -> None:
        """Switch it off, and leave nothing in torch's tables."""
        super().__exit__(*raised)
        self.entered -= 1
        if not self.entered:
            for func in self.seen:
                func._uncache_dispatch(_PRE_DISPATCH)


without_python_dispatcher = torch._C._DisablePythonDispatcher
"""A context in which operators run as outside of a :class:`PreDispatchMode`, which needs that dispatcher. Nothing
public."""


@contextmanager
def beneath_modes() -> Iterator[None]:
    """Neither modes of Python's functions nor a :class:`PreDispatchMode` see what is called within. Nothing public."""
    before = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
    with without_functions(), torch._C._ExcludeDispatchKeyGuard(before), without_python_dispatcher():
        yield


def fake_like(value: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor with the shape, strides and dtype of another, on another device; a parameter if that is one.

    What ``torch.empty_strided`` and ``nn.Parameter`` make under the mode is the same, and takes five times as long.
    Nothing public.
    """
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.is_contiguous():
        memory = torch.empty(value.shape, dtype=value.dtype, device="meta")
    else:  # the same, but written in Python for the meta device
        memory = torch.empty_like(value.detach(), device="meta")
    made = FakeTensor(mode, memory, device)
    made.requires_grad_(value.requires_grad)
    if isinstance(value, nn.Parameter):
        made._is_param = True
    return made


# --- lists of tensors ---

foreach_norm: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
"""The norms of many tensors at once. Nothing public does it; ``torch.nn.utils.get_total_norm`` uses it."""

foreach_multiply: Callable[..., None] = torch._foreach_mul_
"""Many tensors times one number, in place. Nothing public does it; ``torch.nn.utils.clip_grads_with_norm_`` uses it."""

check_and_unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""What ``torch.amp.GradScaler`` does to a list of gradients; its second argument says whether one was not finite."""

LIST_UPDATES = frozenset(
    function
    for name, function in vars(torch).items()
    if re.match("_foreach_(?!mm|norm|powsum|max$)|_fused_(ad|sgd)", name)
)
"""Elementwise functions of lists of tensors, as torch's optimizers and its clipping use them. None is public."""


class AllowedInLists:
    """Lets torch's clipping use functions of lists for gradients of a class, too, until it is removed. Nothing public.

    torch asks for a tensor's exact class, so that nothing changes for tensors of other classes. Without it a norm of
    each gradient is taken alone, with a collective of its own.

    Args:
        kind: the class.
    """

    def __init__(self, kind: type[Tensor]) -> None:
        self.kind = kind
        _foreach_supported_types.append(kind)

    def remove(self) -> None:
        """End it."""
        _foreach_supported_types.remove(self.kind)


class BeforeClipping:
    """Calls something before torch takes the norm of gradients or scales them, until it is removed. Nothing public.

    The three functions of ``torch.nn.utils`` that do so group tensors first, by a function that they look for anew in
    each call; so they need not be called by any particular name.

    Attributes:
        call: what is called.
        grouped: that function.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.grouped = call, clip_grad._group_tensors_by_device_and_dtype
        clip_grad._group_tensors_by_device_and_dtype = self.group

    def group(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of that function."""
        if not torch.compiler.is_compiling():
            self.call()
        return self.grouped(*args, **kwargs)

    def remove(self) -> None:
        """End it."""
        clip_grad._group_tensors_by_device_and_dtype = self.grouped


# --- modules ---


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name; what is put there replaces them.

    ``named_parameters`` and ``register_parameter`` are public, but leave out those that are None or tied, and look at
    the name anew; setting the attribute asks parametrizations.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Its own buffers, with those that are None."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Its children under all their names, with those that are None; ``named_children`` has each once."""
    return module._modules


def module_like(module: nn.Module, tensors: Callable[[dict[str, Any]], dict[str, Any]]) -> nn.Module:
    """A plain module with what ``tensors`` makes of the parameters and buffers, saved as before, and no children."""
    made = nn.Module()
    made._parameters = tensors(module._parameters)
    made._buffers = tensors(module._buffers)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return made


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The tables of hooks around its forward. Nothing public: only who registered a hook has its handle."""
    return module._forward_hooks, module._forward_pre_hooks


def is_operator(function: Any) -> bool:
    """Whether a function is an operator itself, as modes get it that see operators. Nothing public."""
    return isinstance(function, torch._ops.OpOverload)


def moves_alike() -> Callable[..., bool]:
    """What ``nn.Module.to()`` asks of a tensor and a moved one. Nothing public."""
    return torch._has_compatible_shallow_copy_type


def is_in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return backward_pass() != -1


backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is running in this thread; -1 if none is. Nothing public."""


def next_node() -> int:
    """The number that the next node of this thread's graph gets: they count up. Nothing public."""
    return torch._C._autograd._get_sequence_nr()


def node_in_backward() -> int:
    """The number of the node of which a backward pass computes the gradient now; -1 if none is. Nothing public."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def after_backward(callback: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running, unless that fails. Nothing public."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def will_accumulate(leaf: Tensor) -> bool:
    """Whether the backward pass that is running adds to this tensor's ``.grad``; not in ``torch.autograd.grad``.

    Nothing public.
    """
    with without_functions():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:  # said of leaves in torch.autograd.grad
            return False


def running_data_parallel() -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward is running. Nothing public."""
    return DistributedDataParallel._active_ddp_module


class ModuleHooks:
    """A module's hooks, by number in the order in which they run; what is put there replaces them. Nothing public.

    Attributes:
        before: its forward pre-hooks.
        after: its forward hooks.
        backward: its backward hooks.
        first: numbers of the hooks that were there when this object was made.
    """

    def __init__(self, module: nn.Module) -> None:
        self.before, self.after, self.backward = module_hook_tables(module)
        self.first = frozenset((*self.before, *self.after, *self.backward))


_Hooks = dict[int, Callable[..., Any]]


def module_hook_tables(module: nn.Module) -> tuple[_Hooks, _Hooks, _Hooks]:
    """A module's forward pre-hooks, forward hooks and backward hooks, now and later: by number. Nothing public."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_hooks


HOOKS_OF_ALL_MODULES: tuple[Mapping[int, Callable[..., Any]], ...] = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)
"""Tables of the hooks that every module of this process runs, by number. Only adding one is public."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped, or the module itself. Nothing public."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled a module, or one in it. Nothing public."""
    return any(map(is_compiled_itself, module.modules()))


def compiled_in_place(modules: Iterable[nn.Module]) -> bytes:
    """For each of these modules, whether ``module.compile()`` was called. Nothing public."""
    return bytes(map(is_not, map(_COMPILED_CALL, modules), repeat(None)))


_COMPILED_CALL = attrgetter("_compiled_call_impl")


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled a module, and what is in it with it. Nothing public."""
    return uncompiled(module) is not module or any(compiled_in_place([module]))


@contextmanager
def run_as_written(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, those of the modules on which ``module.compile()`` was called run uncompiled; compiled they still are.

    What is public (``torch.compiler.set_stance``) is for all compiled code of the process, also for kernels that only
    compiled code runs in little memory.
    """
    compiled = [(module, call) for module in modules if (call := _COMPILED_CALL(module)) is not None]
    for module, _ in compiled:
        module._compiled_call_impl = module._call_impl
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


@contextmanager
def without_modes() -> Iterator[None]:
    """Within it no mode sees functions or operators that was active before."""
    with ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


@contextmanager
def recomputing(again: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, of a function that ``torch.utils.checkpoint`` is given, the backward pass runs ``again(function)``.

    So does the forward pass with ``use_reentrant=True``. What is public (``context_fn``) is for whoever calls it.
    """
    generator, function = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction

    def pausing(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(again(run), *args, **kwargs)

    def apply(run: Callable[..., Any], *args: Any) -> Any:
        return function.apply(again(run), *args)

    function_here = SimpleNamespace(apply=apply)
    with replaced(checkpointing, _checkpoint_without_reentrant_generator=pausing, CheckpointFunction=function_here):
        yield


def never_compile(code: CodeType, with_calls: bool = False) -> None:
    """Let ``torch.compile`` run frames of this code as they are, and ``with_calls`` also what they call."""
    calls = _FrameAction.SKIP if with_calls else _FrameAction.DEFAULT
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, calls))


def is_compiled_call(frame: FrameType | None) -> bool:
    """Whether a frame is that of ``torch.compile`` around a function."""
    return frame is not None and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def modules_being_called(frame: FrameType | None) -> Iterator[nn.Module | None]:
    """The modules whose calls have led to a frame, innermost first; ``None`` for compiled code, which may have any.

    Nothing public says which calls are under way.
    """
    call = nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is call:
            yield frame.f_locals["self"]
        elif is_compiled_call(frame):
            yield None
        frame = frame.f_back


def put_below(mode: TorchFunctionMode) -> None:
    """Begin a mode below those that are on: code that is within these now will leave them as if it were not there.

    But above that of ``torch.set_default_device``, which has to stay the lowest.
    """
    modes = _taken_off()
    at = 1 if modes[:1] == [getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)] else 0
    for each in (*modes[:at], mode, *modes[at:]):
        _push_mode(each)


def take_out(mode: TorchFunctionMode) -> None:
    """End a mode, wherever it is among those that are on."""
    for each in _taken_off():
        if each is not mode:
            _push_mode(each)


def function_modes() -> list[TorchFunctionMode]:
    """The modes of torch functions that are on, outermost first."""
    modes = _taken_off()
    for each in modes:
        _push_mode(each)
    return modes


def _taken_off() -> list[TorchFunctionMode]:
    """The modes that were on, outermost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Within it fake tensors that fail log nothing: the exception says it all."""
    with replaced(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True):
        yield


# --- compiling ---


Decided = TypeVar("Decided", bound=Callable[..., Any])


def decided_while_compiling(function: Decided) -> Decided:
    """Let ``torch.compile`` run a function while it traces, and take its result for a constant.

    ``torch.compiler.assume_constant_result`` is public, but imports the compiler, which takes long and is for nothing
    where nothing is compiled.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced_frames() -> Iterator[tuple[CodeType, dict[str, Any], int]]:
    """The frames of the code that ``torch.compile`` is tracing, innermost first: code, globals, and line.

    Nothing public tells them. To be called by a function that is :func:`decided_while_compiling`.
    """
    frame = inspect.currentframe()
    while frame is not None and not hasattr(frame.f_locals.get("tx"), "symbolic_locals"):
        frame = frame.f_back
    traced = frame.f_locals["tx"] if frame is not None else None
    while traced is not None:
        positions = traced.current_instruction.positions
        yield traced.f_code, traced.f_globals, positions.lineno if positions else traced.lineno
        traced = traced.parent


@contextmanager
def with_autograd() -> Iterator[None]:
    """Within it operators are recorded by autograd, also inside an operator of one's own, below autograd.

    Nothing public does that.
    """
    inside = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        inside = inside.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), inside), torch.enable_grad():
        yield


# --- training ---


class LoaderOfLoader:
    """Stands for another loader, :attr:`loader`, whose attributes it has, also where Lightning ends a loader's workers.

    Lightning does so through the private iterator of a ``DataLoader``, and has no other way.
    """

    loader: Any

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # an object that is being copied has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, where the system cannot write to a file, as on a full disk, the error names the file.

    The system's own names none. And what comes of it is not the system's: ``torch.save`` ends its archive all the same,
    and says that the archive is not as long as it should be.

    Raises:
        OSError: the system's, with the file's name.
    """
    handled = sys.exc_info()[1]  # by whoever writes
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not handled and not isinstance(found, OSError | None):
            found = found.__context__
        if found is handled or not isinstance(found, OSError) or found.errno is None or found.filename is not None:
            raise
        raise OSError(found.errno, found.strerror, os.fspath(path)) from error


class GradScaler(torch.amp.GradScaler):
    """torch's, of which :meth:`unscale_gradients` may be overridden. Only whole scalers are public.

    Args:
        scaler: whose state it has, all of it: what one of the two is told, the other one knows.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.__dict__ = vars(scaler)

    def unscale_gradients(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        """Divide by the scale in place; whether some gradient was not finite, by device."""
        return super()._unscale_grads_(optimizer, *args)

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, *args)
