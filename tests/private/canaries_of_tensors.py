"""Canaries of torch: tensors, their memory, modules, training and processes."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from canaries import canary
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autotp.private.torch_private import is_compiled_call, never_compile, recomputing, set_compiler

# --- torch: tensors and their memory ---


@canary("torch._C.TensorBase.is_meta", "torch._C.TensorBase.device", "torch._C.TensorBase.data")
def _(attribute: Any) -> None:
    """It answers the same when torch.Tensor is given another of its name, which it can be."""
    name = attribute.__name__
    x = torch.ones(2)
    assert name not in vars(Tensor)
    before = attribute.__get__(x)
    setattr(Tensor, name, property(lambda tensor: "disguised"))
    try:
        assert getattr(x, name) == "disguised"
        found = attribute.__get__(x)
        assert torch.equal(found, before) if name == "data" else found == before
    finally:
        delattr(Tensor, name)
    if name == "data":
        attribute.__set__(x, torch.zeros(3))
        assert x.shape == (3,)


@canary("torch._C.TensorBase._version")
def _(attribute: Any) -> None:
    """Writes in place count, also those of optimizers on lists; those through ``.data`` do not."""
    x = nn.Parameter(torch.ones(3))
    before = attribute.__get__(x)
    with torch.no_grad():
        x.mul_(2)
        x[1] = 0
        torch._foreach_add_([x], 1.0)
    counted = attribute.__get__(x)
    assert counted >= before + 3
    x.data.mul_(2)
    assert attribute.__get__(x) == counted


@canary("torch.ops.aten._unsafe_view")
def _(unsafe_view: Any) -> None:
    """The same memory, and what an autograd function gives so can be changed in place, unlike a view."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
            return change(x * 2, (1, 4))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 2 * grad.view(4), None

    made = torch.arange(4.0)
    assert unsafe_view(made, (1, 4)).data_ptr() == made.data_ptr()
    x = torch.ones(4, requires_grad=True)
    Doubled.apply(x, unsafe_view).mul_(3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0] * 4
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Doubled.apply(x, Tensor.view).mul_(3)


@canary("torch.nn.Parameter.__new__")
def _(_: Any) -> None:
    new = nn.Parameter.__dict__["__new__"]
    assert isinstance(new, staticmethod)
    assert list(inspect.signature(new.__func__).parameters) == ["cls", "data", "requires_grad"]


class Wrapping(Tensor):
    """A subclass that refuses every function that asks it, and every operator."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("asked")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} was run")


@canary("torch._C.DisableTorchFunctionSubclass")
def _(disable: Any) -> None:
    x = torch.ones(2).as_subclass(Wrapping)
    with pytest.raises(TypeError, match="asked"):
        x.size()
    with disable():
        assert x.size() == (2,)


@canary("torch.overrides._pop_mode_temporarily", "torch.overrides._len_torch_function_stack")
def _(_: Any) -> None:
    from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode_temporarily

    class Counts(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    before = _len_torch_function_stack()
    with Counts() as mode:
        assert _len_torch_function_stack() == before + 1
        torch.ones(2)
        with _pop_mode_temporarily() as taken:
            assert taken is mode
            torch.ones(2)
        torch.ones(2)
    assert mode.seen == 2


@canary("torch.overrides._pop_mode", "torch.overrides._push_mode", "torch._GLOBAL_DEVICE_CONTEXT")
def _(*_: Any) -> None:
    from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode

    seen: list[str] = []

    class Named(TorchFunctionMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    before = _len_torch_function_stack()
    with Named("outer") as outer, Named("inner") as inner:
        torch.set_default_device("cpu")
        taken = [_pop_mode() for _ in range(before + 3)]
        assert taken[:2] == [inner, outer]
        assert taken[-1] is torch._GLOBAL_DEVICE_CONTEXT.device_context  # below all others
        for mode in (*taken[:1:-1], inner, outer):
            _push_mode(mode)
        seen.clear()
        torch.ones(2)
        found = list(seen)
        torch.set_default_device(None)
    assert getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None
    assert found == ["outer", "inner"]
    assert _len_torch_function_stack() == before


@canary("torch.utils.checkpoint._checkpoint_without_reentrant_generator")
def _(generator: Any) -> None:
    """It is given what the backward pass runs; checkpoint() itself runs the forward pass, or gives it to a function."""
    runs = list[str]()

    def again(function: Any) -> Any:
        return lambda *args: runs.append("again") or function(*args)

    for is_reentrant, wanted in ((False, ["again"]), (True, ["again", "again"])):
        runs.clear()
        x = torch.ones(2, requires_grad=True)
        with recomputing(again):
            y = checkpoint(torch.exp, x, use_reentrant=is_reentrant)
        assert len(runs) == is_reentrant
        y.sum().backward()
        assert runs == wanted
        assert x.grad is not None
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is generator


@canary("torch._dynamo.eval_frame")
def _(_: Any) -> None:
    """What is around a compiled function is of this module; and a frame may keep what it calls from being compiled."""
    around: list[bool] = []
    compiled: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_compiling())
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        around.append(is_compiled_call(sys._getframe(1)))
        return inner(x)

    outer(torch.ones(2))
    never_compile(outer.__code__, with_calls=True)
    torch.compile(outer, backend="eager")(torch.ones(2))
    assert (around, compiled) == ([False, True], [False, False])


@canary(
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
)
def _(_: Any) -> None:
    """A frame runs as it is written, and in it the compiler is switched off and on again."""
    compiled: list[list[str]] = []
    uncompiled: list[bool] = []

    def noted(graph: Any, inputs: Any) -> Any:
        compiled.append([node.name for node in graph.graph.nodes if node.op != "placeholder"])
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def asked(x: Tensor) -> Tensor:
        uncompiled.append(torch.compiler.is_compiling())
        return x.cos()

    def outer(x: Tensor) -> Tensor:
        compiler = set_compiler(None)
        x = asked(x)
        set_compiler(compiler)
        x = inner(x)
        set_compiler(None)
        x = asked(x)
        set_compiler(compiler)
        return x

    never_compile(outer.__code__)
    assert torch.equal(torch.compile(outer, backend=noted)(torch.ones(2)), torch.ones(2).cos().sin().cos())
    assert compiled == [["sin", "output"]]
    assert uncompiled == [False, False]
    assert set_compiler(None) is None


@canary("torch._dynamo.trace_rules.get_tensor_method")
def _(methods: Any) -> None:
    assert torch.Tensor.to in methods()
    assert methods() is methods()


@canary("torch.utils._python_dispatch._disable_current_modes")
def _(disable: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Counts() as mode:
        torch.ones(2)
        with disable():
            torch.ones(2)
        torch.ones(2)
    assert mode.seen == 2


@canary("torch.Tensor._make_wrapper_subclass")
def _(make: Any) -> None:
    made = make(Wrapping, [10**9, 10**9], dtype=torch.float64, device=torch.device("cpu"))
    with torch._C.DisableTorchFunctionSubclass():
        assert (type(made), made.shape, made.dtype) == (Wrapping, (10**9, 10**9), torch.float64)


@canary("torch.Tensor._is_view")
def _(is_view: Any) -> None:
    x = torch.ones(2)
    assert [is_view(x), is_view(x[:1])] == [False, True]


@canary("torch._C.TensorBase._base")
def _(base: Any) -> None:
    x = torch.ones(2)
    assert base.__get__(x) is None
    assert base.__get__(x[:1]) is x


@canary("torch.Tensor._version")
def _(_: Any) -> None:
    x = torch.ones(2)
    before = x._version
    x.data.add_(1)
    x[0] = 3
    assert x._version == before + 1
    with torch.inference_mode():
        assert torch.ones(2).is_inference()


@canary("torch.UntypedStorage._cdata", "torch.multiprocessing.reductions.StorageWeakRef")
def _(_: Any) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    for device in ("cpu", "meta"):
        x, y = torch.empty(4, device=device), torch.empty(4, device=device)
        assert x.untyped_storage()._cdata == x[1:].untyped_storage()._cdata != y.untyped_storage()._cdata
        reference = StorageWeakRef(x.untyped_storage())
        assert not reference.expired()
        del x
        assert reference.expired()


@canary("torch.UntypedStorage._new_with_weak_ptr")
def _(new: Any) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    x = torch.ones(4)
    assert new(StorageWeakRef(x.untyped_storage()).cdata).data_ptr() == x.data_ptr()


@canary("torch._neg_view")
def _(neg_view: Any) -> None:
    x = torch.ones(2)
    view = neg_view(x)
    x[0] = 5
    assert view.is_neg()
    assert view.tolist() == [-5, -1]


@canary("torch._assert_async")
def _(assert_async: Any) -> None:
    assert_async(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="as written here"):
        assert_async(torch.tensor(False), "as written here")


@canary("torch.Tensor._backward_hooks")
def _(_: Any) -> None:
    """Swapping leaves the hooks on a tensor, but nothing calls them until they are set."""
    x, called = nn.Parameter(torch.ones(1)), []
    assert x._backward_hooks is None
    x.register_hook(called.append)
    torch.utils.swap_tensors(x, nn.Parameter(torch.ones(1)))
    x = nn.Parameter(torch.ones(1))
    x.register_hook(called.append)
    hooks = x._backward_hooks
    assert hooks is not None
    assert called.append in hooks.values()
    x._backward_hooks = hooks
    (2 * x).backward()
    assert len(called) == 1


@canary("torch.ops.aten._to_copy")
def _(_: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Names():
        torch.ones(2).to(torch.float64)
    assert seen[-1] == "_to_copy"


# --- torch: modules and training ---


@canary("torch.nn.Module._parameters", "torch.nn.Module._buffers", "torch.nn.Module._modules")
def _(_: Any) -> None:
    """What is put into the dicts takes the place of what was there, under its name; None stays in its place."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    norm, linear = model[0], model[1]
    assert list(model._modules.items()) == [("0", norm), ("1", linear)]
    assert linear._parameters == {"weight": linear.weight, "bias": None}
    assert list(norm._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    other = nn.Parameter(torch.ones(2, 2))
    linear._parameters["weight"] = other
    assert linear.weight is other
    made = nn.Module()
    made._parameters, made._buffers = {"a": other}, {"b": torch.ones(1)}
    assert list(made.state_dict()) == ["a", "b"]


@canary("torch.nn.Module._non_persistent_buffers_set")
def _(_: Any) -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("left", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"left"}
    module._non_persistent_buffers_set = {"kept"}
    assert list(module.state_dict()) == ["left"]


@canary(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
)
def _(_: Any) -> None:
    """They have the hooks of all modules, by number."""
    from torch.nn.modules import module as every

    from lightning_autotp.private.torch_private import HOOKS_OF_ALL_MODULES

    before = [dict(table) for table in HOOKS_OF_ALL_MODULES]
    adding = (
        every.register_module_forward_pre_hook,
        every.register_module_forward_hook,
        every.register_module_full_backward_pre_hook,
        every.register_module_full_backward_hook,
    )
    hooks = [lambda *_, number=number: None for number in range(len(adding))]
    handles = [add(hook) for add, hook in zip(adding, hooks, strict=True)]
    for table, handle, hook in zip(HOOKS_OF_ALL_MODULES, handles, hooks, strict=True):
        assert table[handle.id] is hook
        handle.remove()
    assert [dict(table) for table in HOOKS_OF_ALL_MODULES] == before


@canary("torch.nn.Module._forward_hooks", "torch.nn.Module._forward_pre_hooks")
def _(_: Any) -> None:
    module, called = nn.Identity(), []
    module.register_forward_hook(lambda *_: called.append("after"))
    module.register_forward_pre_hook(lambda *_: called.append("before"))
    module(1)
    assert called == ["before", "after"]
    (number,) = module._forward_hooks
    handle = module.register_forward_hook(print)
    handle.remove()
    assert len({number, handle.id, module.register_forward_hook(print).id}) == 3  # none comes twice
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
    module(1)
    assert called == ["before", "after"]


@canary("torch._has_compatible_shallow_copy_type")
def _(alike: Any) -> None:
    assert alike(torch.zeros(2), torch.zeros(2))


@canary("torch._C._current_graph_task_id")
def _(task: Any) -> None:
    seen: list[int] = []
    x = torch.zeros(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(task()))
    x.sum().backward()
    assert seen[0] >= 0
    assert task() == -1


@canary("torch._C._autograd._get_sequence_nr")
def _(next_number: Any) -> None:
    """Nodes are numbered as they are made."""
    x = torch.ones(2, requires_grad=True)
    before = next_number()
    assert before <= x.exp().grad_fn._sequence_nr() < next_number()


@canary("torch._C._current_autograd_node", "torch._C._FunctionBase._sequence_nr")
def _(_: Any) -> None:
    """A node is the current one while its saved tensors are asked for."""
    seen: list[int] = []

    def unpack(kept: Any) -> Any:
        seen.append(torch._C._current_autograd_node()._sequence_nr())
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        first = torch.ones(2, requires_grad=True).exp()
        second = first.cos()
    second.sum().backward()
    assert seen == [second.grad_fn._sequence_nr(), first.grad_fn._sequence_nr()]
    assert torch._C._current_autograd_node() is None


@canary("torch.autograd.Variable._execution_engine")
def _(engine: Any) -> None:
    """A callback runs once, after all gradients of the pass, and not if the pass fails."""
    seen: list[Any] = []
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    second.register_hook(lambda _: engine.queue_callback(lambda: seen.append((first.grad, second.grad))))
    (first * second.exp()).sum().backward()
    assert len(seen) == 1
    assert seen[0][0] is first.grad
    assert seen[0][1] is second.grad

    def fails(_: Any) -> None:
        engine.queue_callback(lambda: seen.append(None))
        raise ValueError

    first.register_hook(fails)
    with pytest.raises(ValueError):  # noqa: PT011
        first.sum().backward()
    assert len(seen) == 1


@canary("torch._C._will_engine_execute_node")
def _(_: Any) -> None:
    from lightning_autotp.private.torch_private import will_accumulate

    seen: list[bool] = []
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    x.register_hook(lambda _: seen.append(will_accumulate(x)))
    y.register_hook(lambda _: seen.append(will_accumulate(x)))
    x.sum().backward()
    x.sum().backward(inputs=[x])
    assert seen == [True, True]
    torch.autograd.grad((x * y).sum(), [x])
    y.sum().backward()
    assert seen == [True, True, False, False]


@canary("torch._C.DisableTorchFunction")
def _(without: Any) -> None:
    """Neither subclasses nor modes see what runs within."""
    from torch.overrides import TorchFunctionMode

    class Refuses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ValueError(func)

    with Refuses(), without():
        torch.ones(2).view(2)


@canary("torch.nn.parallel.DistributedDataParallel._active_ddp_module")
def _(active: Any) -> None:
    assert active is None


@canary("torch.nn.Module._call_impl")
def _(_: Any) -> None:
    """It is a frame of every call, hooked or not, from its hooks too, with the module as what ``self`` is in it."""
    called: list[Any] = []

    def look(*_: Any) -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                called.append(frame.f_locals["self"])
            frame = frame.f_back

    inner = nn.Identity()
    outer = nn.Sequential(inner)
    inner.register_forward_pre_hook(look)
    outer(1)
    assert called == [inner, outer]


@canary("torch.nn.Module._compiled_call_impl")
def _(_: Any) -> None:
    module = nn.Identity()
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


@canary("torch.utils.weak.WeakIdKeyDictionary")
def _(kind: Any) -> None:
    table, key = kind(), torch.zeros(2)
    table[key] = "found"
    assert key in table
    assert torch.zeros(2) not in table
    assert table[key] == "found"
    del key
    assert len(table) == 0


@canary("torch._dynamo.eval_frame.OptimizedModule._orig_mod")
def _(kind: Any) -> None:
    module = nn.Identity()
    compiled = torch.compile(module)
    assert isinstance(compiled, kind)
    assert compiled._orig_mod is module


@canary("torch.utils.data.DataLoader._iterator")
def _(_: Any) -> None:
    """Lightning ends a loader's workers through it."""
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    class Standing:
        loader = torch.utils.data.DataLoader([0])
        asked = 0

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

        @property
        def _iterator(self) -> Any:
            return self.loader._iterator

        @_iterator.setter
        def _iterator(self, value: Any) -> None:
            Standing.asked += 1
            self.loader._iterator = value

    assert Standing.loader._iterator is None
    combined = CombinedLoader([Standing()])
    iter(combined)
    combined.reset()
    assert Standing.asked


@canary("torch.amp.GradScaler._unscale_grads_", "torch.amp.GradScaler._device")
def _(_: Any) -> None:
    """It is asked of every optimizer before a step, which is made if nothing infinite was found."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    found = []

    class Scaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            answer = super()._unscale_grads_(optimizer, *args)
            found.append(answer)
            return answer

    scaler = Scaler("cpu")
    assert scaler._device == "cpu"
    for values, steps in (([1.0, float("inf")], False), ([1.0, 1.0], True)):
        before = weight.detach().clone()
        weight.grad = scaler.scale(torch.tensor(values))
        scaler.step(optimizer)
        scaler.update()
        assert bool(found[-1][torch.device("cpu")]) is not steps
        assert torch.equal(weight, before) is not steps


# --- torch: gradients, and lists of tensors ---


@canary("torch.Tensor._post_accumulate_grad_hooks")
def _(_: Any) -> None:
    """Set to what it is, its hooks are called also of a tensor that another was swapped with."""
    called = []
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert first._post_accumulate_grad_hooks is None
    first.register_post_accumulate_grad_hook(called.append)
    assert list(first._post_accumulate_grad_hooks.values()) == [called.append]
    torch.utils.swap_tensors(first, second)
    first._post_accumulate_grad_hooks = first._post_accumulate_grad_hooks
    first.sum().backward()
    assert called == [first]


class Counting(Tensor):
    """A subclass that counts the functions that ask it."""

    asked: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@canary("torch._foreach_norm")
def _(norm: Any) -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[1.0, -7.0]])]
    assert norm(gradients, 2, dtype=torch.float64)[0] == torch.tensor(5.0, dtype=torch.float64)
    assert norm(gradients, float("inf"))[1] == 7
    Counting.asked = []
    norm([gradients[0].as_subclass(Counting)])
    assert Counting.asked == [norm]


@canary("torch._foreach_mul_")
def _(multiply: Any) -> None:
    tensors = [torch.ones(2), torch.ones(1, dtype=torch.bfloat16)]
    multiply(tensors, torch.tensor(0.5))
    assert [tensor.sum() for tensor in tensors] == [1, 0.5]
    assert tensors[1].dtype == torch.bfloat16


@canary("torch._amp_foreach_non_finite_check_and_unscale_")
def _(check: Any) -> None:
    gradient, found = torch.tensor([4.0, float("inf")]), torch.zeros(1)
    check([gradient], found, torch.tensor(0.5))
    assert (gradient[0], found) == (2, 1)


@canary("torch.utils._foreach_utils._foreach_supported_types")
def _(types: Any) -> None:
    """torch's clipping uses functions of lists for these classes, and asks for them anew."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0]).as_subclass(Counting)
    for there in (False, True):
        Counting.asked = []
        if there:
            types.append(Counting)
        try:
            assert torch.nn.utils.clip_grad_norm_([parameter], 100.0) == 5
        finally:
            if there:
                types.remove(Counting)
        assert (torch._foreach_norm in Counting.asked) == there


@canary("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype")
def _(grouped: Any) -> None:
    """Norms and clipping look for it in their module, before they do anything with gradients."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clipping = import_module("torch.nn.utils.clip_grad")
    seen: list[Tensor] = []

    def noted(tensors: Any, *args: Any) -> Any:
        seen.append(tensors[0][0].clone())
        return grouped(tensors, *args)

    clipping._group_tensors_by_device_and_dtype = noted
    try:
        torch.nn.utils.get_total_norm([parameter.grad])
        assert torch.equal(seen[0], parameter.grad)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0, foreach=False)
        torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(5.0))
    finally:
        clipping._group_tensors_by_device_and_dtype = grouped
    assert [len(seen), *map(int, seen[1])] == [4, 3, 4]


# --- torch.distributed ---


@contextmanager
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@canary("torch.distributed.distributed_c10d._resolve_process_group")
def _(resolve: Any) -> None:
    with alone() as group:
        assert resolve(group.group_name) is group


@canary("torch.distributed.ProcessGroup._device_types")
def _(_: Any) -> None:
    with alone() as group:
        assert torch.device("cpu") in group._device_types
    dist.init_process_group("meta:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert group._device_types == [torch.device("meta")]
    finally:
        dist.destroy_process_group()


@canary("torch.distributed.distributed_c10d._get_object_coll_device")
def _(device_of: Any) -> None:
    """The host for a group of gloo and others, and for such a group of all processes."""
    with alone() as group:
        assert device_of(group) == device_of(None) == "cpu"
    dist.init_process_group("cpu:gloo,meta:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert device_of(None) == "cpu"
        assert device_of(dist.new_group([0], backend="meta:fake")) == "meta"
    finally:
        dist.destroy_process_group()


@canary("torch.distributed.distributed_c10d._get_default_store")
def _(default_store: Any) -> None:
    with alone():
        store = default_store()
        store.set("a", "b")
        assert store.get("a") == b"b"
        assert (store.check(["a"]), store.check(["c"])) == (True, False)
        assert store.compare_set("a", "b", "d") == b"d"


@canary("torch.distributed.ProcessGroupGloo")
def _(gloo: Any) -> None:
    """What it says of a rank that is silent, and of one that is gone."""
    from lightning_autotp.private.distributed_private import is_lost_connection

    def groups() -> list[Any]:
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda rank: gloo(store, rank, 2, timedelta(seconds=1)), range(2)))

    silent, gone = groups(), groups()
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms") as error:
        silent[0].allreduce(torch.ones(1)).wait()
    assert is_lost_connection(error.value)
    del gone[1]  # before anything is sent to it: what it has not read would make it a reset connection, at times
    with pytest.raises(RuntimeError, match="Connection closed by peer") as error:
        gone[0].allreduce(torch.ones(1)).wait()
    assert is_lost_connection(error.value)
    with pytest.raises((RuntimeError, ValueError)) as other:
        silent[1].allgather([[torch.ones(1), torch.ones(2)]], [torch.ones(1)])
    assert not is_lost_connection(other.value)


@canary("torch.ops._c10d_functional")
def _(collectives: Any) -> None:
    """They take a group's name, and give what is to be waited for."""
    x = torch.arange(4.0)
    with alone() as group:
        name = group.group_name
        made = [
            collectives.all_reduce(x, "sum", name),
            collectives.all_reduce(x, "max", name),
            collectives.all_gather_into_tensor(x, 1, name),
            collectives.reduce_scatter_tensor(x, "sum", 1, name),
        ]
        for result in map(collectives.wait_tensor, made):
            assert torch.equal(result, x)
            assert result.data_ptr() != x.data_ptr()


@canary("torch.ops._c10d_functional_autograd")
def _(_: Any) -> None:
    """What torch.distributed's functions are to a dispatch mode, on tensors with values and without."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.utils._python_dispatch import TorchDispatchMode

    from lightning_autotp.private.distributed_private import communicates

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(communicates(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with alone() as group:
        for call in (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.barrier(),
            lambda: dist.all_gather_object([None], 3),
            lambda: all_gather_tensor_autograd(x, 0, group),
        ):
            found: list[bool] = []
            with Seen():
                call()
            assert any(found)


@canary(
    "torch.distributed.fsdp.fully_shard.state", "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init"
)
def _(_: Any) -> None:
    """The first module that is called takes itself for the outermost one, unless another was before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        fully_shard.state(model)._lazy_init()
        model[0](torch.ones(1, 2))
        assert (fully_shard.state(model)._is_root, fully_shard.state(model[0])._is_root) == (True, False)


@canary(
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._init_mp_dtypes",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
)
def _(_: Any) -> None:
    """The gathered parameter is made once, in a dtype that a policy says; another one may take its place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from lightning_autotp.private.distributed_private import GatherDtype

    with alone():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        layer: Any = fully_shard(nn.Linear(2, 2, bias=False), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        layer.set_reshard_after_forward(True)
        seen: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
        with torch.autocast("cpu", torch.bfloat16):
            pending = layer(torch.ones(1, 2))
        dtype = GatherDtype(layer)
        dtype.use(False)
        layer(torch.ones(1, 2))
        dtype.use(True)
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.ones(1, 2))
        hook.remove()
        assert [weight.dtype for weight in seen] == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert seen[0] is seen[2]
        pending.sum().backward()
        assert layer.weight.grad.dtype == torch.float32


@canary(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.is_unsharded",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
)
def _(_: Any) -> None:
    """What belongs to no block stays gathered after a call, until the end of the backward pass of what is prepared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lightning_autotp.private.distributed_private import is_gathered, is_outermost, prepare_backward

    with alone():
        model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2, bias=False)), mesh=init_device_mesh("cpu", (1,)))
        is_outermost(model)
        assert not is_gathered(model)
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert is_gathered(model)
        result = model[0](torch.ones(1, 2))
        prepare_backward(model, result)
        result.sum().backward()
        assert not is_gathered(model)
        assert model[0].weight.grad.full_tensor().eq(1).all()


@canary("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_gather_result")
def _(_: Any) -> None:
    """It is there from the beginning of a gather until the parameters are needed, or the backward pass has ended."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lightning_autotp.private.distributed_private import is_gathered_ahead

    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model: Any = fully_shard(nn.Sequential(*(fully_shard(nn.Linear(2, 2), mesh=mesh) for _ in range(2))), mesh=mesh)
        first, second = model
        first.set_modules_to_forward_prefetch([second])
        seen = []
        first.register_forward_hook(lambda *_: seen.append(is_gathered_ahead(second)))
        second.register_forward_hook(lambda *_: seen.append(is_gathered_ahead(second)))
        model(torch.ones(1, 2))
        assert seen == [True, False]
        model.register_forward_hook(lambda module, args, output: first(*args))
        result = model(torch.ones(1, 2))
        assert is_gathered_ahead(second)
        result.sum().backward()
        assert not is_gathered_ahead(second)
        first(torch.ones(1, 2))
        second.unshard()
        assert not is_gathered_ahead(second)


@canary("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_backward")
def _(_: Any) -> None:
    """FSDP2 puts it on what a module returns; it gives the gradient back as it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lightning_autotp.private.distributed_private import prepares_backward

    found = []

    class Output(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.register_hook:
                found.append(args[1])
                args = (args[0].as_subclass(Tensor), args[1])
            return super().__torch_function__(func, types, args, kwargs or {})

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).as_subclass(Output)

    with alone():
        model = fully_shard(Model(2, 2), mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 2)).sum().backward()
        (hook,) = found
        assert prepares_backward(hook)
        assert not prepares_backward(lambda grad: None)
        x = torch.ones(2, requires_grad=True) * 2
        arrived = []
        x.register_hook(lambda grad: arrived.append((grad, hook(grad))))
        x.sum().backward()
        assert arrived[0][0] is arrived[0][1]


@canary("torch.distributed.checkpoint.FileSystemWriter.write_data")
def _(_: Any) -> None:
    """What is noted of a stored tensor beside its place travels with it, and torch reads the files all the same."""
    import io
    import zlib

    import torch.distributed.checkpoint as dcp

    from lightning_autotp.private.distributed_private import FileSystemWriter

    with tempfile.TemporaryDirectory() as folder:
        values = {"a": torch.ones(3), "b": torch.ones(2)}
        dcp.save(values, storage_writer=FileSystemWriter(Path(folder)), no_dist=True)
        state = {"a": torch.zeros(3), "b": torch.zeros(2)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        assert state["a"].tolist() == [1, 1, 1]
        places = dcp.FileSystemReader(folder).read_metadata().storage_data
        assert {index.fqn for index in places} == {"a", "b"}
        for index, place in places.items():
            content = (Path(folder) / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            assert torch.equal(torch.load(io.BytesIO(content)), values[index.fqn])
            assert zlib.crc32(content) == place.checksum
