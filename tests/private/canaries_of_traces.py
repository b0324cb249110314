"""Canaries of torch: traces, operators, transforms and nested values."""

from __future__ import annotations

import sys
from inspect import signature
from types import FrameType
from typing import Any

import pytest
import torch
from canaries import canary
from torch import Tensor, nn

# --- torch: a trace ---


@canary("torch._subclasses.fake_tensor.FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensor")
def _(_: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made = fake.from_tensor(torch.empty(2, 3, device="meta"))
    parameter = fake.from_tensor(nn.Parameter(torch.empty(2, 3, device="meta")))
    with fake:
        out = made @ torch.ones(3, 4, device="meta")
        assert torch.tensor(3).constant == 3
    assert isinstance(made, FakeTensor)
    assert isinstance(out, FakeTensor)
    assert isinstance(parameter, nn.Parameter)
    assert (out.shape, out.device.type) == ((2, 4), "meta")


@canary("torch.nn.Parameter._is_param")
def _(_: Any) -> None:
    """A fake tensor that is made directly, and one that is a parameter, are what torch's own functions make."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lightning_autotp.private.torch_private import fake_like

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        made = torch.empty_strided((2, 3), (1, 2), dtype=torch.half, device="cuda")
        parameter = nn.Parameter(made)
        assert (fake_like(torch.ones(2, 3), fake, torch.device("cpu")) @ torch.empty(3)).shape == (2,)
    meta = torch.empty_strided((2, 3), (1, 2), dtype=torch.half, device="meta")
    for value, truth in ((meta, made), (nn.Parameter(meta), parameter), (nn.Parameter(meta, False), made)):
        mine = fake_like(value, fake, torch.device("cuda", 0))
        assert (type(mine), mine.shape, mine.stride()) == (type(truth), truth.shape, truth.stride())
        assert (mine.dtype, mine.device, mine.is_leaf) == (truth.dtype, truth.device, truth.is_leaf)
        assert isinstance(mine, nn.Parameter) == isinstance(value, nn.Parameter)
        assert mine.requires_grad == value.requires_grad


@canary(
    "torch._subclasses.fake_tensor._BypassDispatchCache",
    "torch._subclasses.fake_tensor.FakeTensorMode._validate_cache_key",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_enabled",
)
def _(_: Any) -> None:
    """Where the memory of results is from is what torch's cache says, which has nothing of a mode without it."""
    from torch._subclasses._fake_tensor_utils import _CacheKeyState
    from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache, _DispatchCacheValidEntry

    from lightning_autotp.private.fake_tensors_private import RememberingFakeTensorMode, _Given

    aten = torch.ops.aten
    cases: list[tuple[Any, tuple[Any, ...], list[_Given | int | None]]] = [
        (aten.add.Tensor, (1, 1), [None]),
        (aten.view.default, (1, [6]), [0]),
        (aten.add_.Tensor, (1, 1), [_Given(0)]),
        (aten.aminmax.default, (1,), [None, None]),
        (aten.nonzero.default, (1,), []),
    ]
    own: Any = RememberingFakeTensorMode()
    for fake in (FakeTensorMode(), own):
        with fake:
            x = torch.empty(2, 3)
            for func, arguments, places in cases:
                args = tuple(x if one == 1 else one for one in arguments)
                kept = len(FakeTensorMode.cache)
                if func is aten.nonzero.default:
                    with pytest.raises(_BypassDispatchCache):
                        fake._validate_cache_key(func, args, {})
                    assert own.sources(func, args, {}, [x]) == places
                    continue
                result = func(*args)
                values = result if isinstance(result, tuple) else (result,)
                assert own.sources(func, args, {}, values) == places
                if fake is own:
                    assert len(FakeTensorMode.cache) == kept
                    continue
                entry: Any = fake.cache.get(fake._cache_key(_CacheKeyState(), func, args, {}))
                assert isinstance(entry, _DispatchCacheValidEntry)
                infos = [_Given(i.inplace_idx) if i.inplace_idx is not None else i.view_idx for i in entry.output_infos]
                assert infos == places


@canary(
    "torch._subclasses.fake_tensor.extract_tensor_metadata",
    "torch._C._DisableTorchDispatch",
    "torch.Tensor._make_subclass",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._get_default_device",
    "torch._C._dispatch_key_set",
)
def _(_: Any) -> None:
    """What a mode that remembers gives the second time is what it gave the first time, and what torch's own gives."""
    from torch._subclasses.fake_tensor import FakeTensorMode, extract_tensor_metadata

    from lightning_autotp.private.fake_tensors_private import RememberingFakeTensorMode

    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        y = nn.functional.linear(x, weight)
        z = y.transpose(0, 1).contiguous()
        made = [x, weight, y, z, *z.view(5, 4).chunk(2, -1), weight[0], torch.view_as_complex(x), torch.empty_like(z.T)]
        new = [torch.zeros(2, dtype=torch.half), torch.arange(3), x.to(torch.bfloat16), *y.topk(1), *torch.aminmax(x)]
        return [*made, *new, x.add_(1)]

    def about(tensors: list[Tensor]) -> list[Any]:
        memory = [tensor.untyped_storage()._cdata for tensor in tensors]
        return [
            (extract_tensor_metadata(tensor), tensor.is_leaf, tensor._is_view(), memory.index(place))
            for tensor, place in zip(tensors, memory, strict=True)
        ]

    found = []
    for fake in (FakeTensorMode(allow_non_fake_inputs=True), RememberingFakeTensorMode()):
        with fake:
            x, weight = torch.empty(2, 5, 2), torch.empty(2, 2, requires_grad=True)
            first, second = run(x, weight), run(x, weight)
            found += [about(first), about(second)]
            assert first[2].untyped_storage()._cdata != second[2].untyped_storage()._cdata
    assert found[0] == found[1] == found[2] == found[3]
    assert {torch.ops.aten.mm.default, torch.ops.aten._unsafe_view.default} <= {func for func, *_ in fake.remembered}


@canary("torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo")
def _(_: Any) -> None:
    """A mode can say that nothing holds the compiler off; what is compiled runs as it is written all the same."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Plain(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert Plain.__torch_dispatch__.__qualname__.endswith("Plain.__torch_dispatch__")
    assert not hasattr(Plain.__torch_dispatch__, "__wrapped__")
    with torch.compiler.set_stance("force_eager"), Plain():
        assert torch.compile(lambda x: sys._getframe(0).f_code.co_name)(torch.ones(1)) == "<lambda>"


@canary("torch._C._DisablePythonDispatcher", "torch._C._ExcludeDispatchKeyGuard", "torch._C.DispatchKeySet")
def _(_: Any) -> None:
    """Beneath the modes none of them sees an operator, and what it makes has a gradient all the same."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.overrides import TorchFunctionMode

    from lightning_autotp.private.torch_private import PreDispatchMode, beneath_modes, without_python_dispatcher

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("function")
            return func(*args, **(kwargs or {}))

    class Operators(PreDispatchMode):
        def see(self, func: Any, args: Any, kwargs: Any) -> Any:
            seen.append(str(func))
            with without_python_dispatcher():
                return func(*args, **kwargs)

    x = torch.ones(2, 2, requires_grad=True)
    with enable_python_dispatcher(), Operators(), Functions():
        with beneath_modes():
            y = x.view(4)
        x.matmul(x)
    assert y.grad_fn is not None
    assert seen == ["function", "aten.matmul.default"]


@canary("torch._subclasses.fake_tensor.unset_fake_temporarily")
def _(unset: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(), unset():
        assert not isinstance(torch.zeros(2), FakeTensor)


@canary("torch._subclasses.fake_tensor.DataDependentOutputException")
def _(error: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert issubclass(error, RuntimeError)
    with FakeTensorMode() as fake, pytest.raises(error):
        fake.from_tensor(torch.empty(1, device="meta")).item()


@canary("torch._subclasses.fake_tensor.DynamicOutputShapeException")
def _(error: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert issubclass(error, RuntimeError)
    with FakeTensorMode() as fake, pytest.raises(error):
        fake.from_tensor(torch.empty(4, device="meta")).nonzero()


@canary("torch._subclasses.fake_tensor")
def _(module: Any) -> None:
    assert module.log.name == "torch._subclasses.fake_tensor"


@canary(
    "torch._subclasses.schema_check_mode.SchemaCheckMode",
    "torch._C.DispatchKey.PreDispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch.TorchDispatchMode._dispatch_key",
    "torch._dispatch.python.enable_python_dispatcher",
)
def _(_: Any) -> None:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.schema_check_mode import SchemaCheckMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[list[str]] = [[], []]

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[0].append(str(func))
            return func(*args, **kwargs or {})

    class Above(SchemaCheckMode):
        def __init__(self) -> None:
            TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[1].append(str(func))
            return func(*args, **kwargs or {})

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with Below():
        layer(x)
    with enable_python_dispatcher(), Above():
        layer(x)
    assert "aten.linear.default" not in seen[0]
    assert seen[1] == ["aten.linear.default"]


@canary(
    "torch._ops.OpOverload._dispatch_cache",
    "torch._ops.OpOverload._uncache_dispatch",
    "torch._ops.mode_stack_state_for_pre_dispatch",
    "torch._ops._ModeStackStateForPreDispatch._schema_check_mode",
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "torch._C._dispatch_tls_set_dispatch_key_included",
)
def _(_: Any) -> None:
    from torch._dispatch.python import enable_python_dispatcher

    from lightning_autotp.private.torch_private import PreDispatchMode

    seen: list[str] = []
    state = torch._ops.mode_stack_state_for_pre_dispatch()

    class Operators(PreDispatchMode):
        def see(self, func: Any, args: Any, kwargs: Any) -> Any:
            assert state._schema_check_mode is None
            assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
            seen.append(f"{self.name}: {func}")
            return func(*args, **kwargs)

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.detours = name, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.detours += 1
            return super().__torch_dispatch__(func, types, args, kwargs)

    linear, outer, x = torch.ops.aten.linear.default, Operators("outer"), torch.ones(1, 2)
    layer = nn.Linear(2, 2)
    for _ in range(2):
        with enable_python_dispatcher(), outer:
            layer(x), layer(x)
    assert outer.detours <= 1  # torch's own way is gone once
    with enable_python_dispatcher(), outer:
        with torch._C._DisableTorchDispatch():
            layer(x)  # nobody is to see it
        layer(x)
        assert state._schema_check_mode is outer
    assert seen == ["outer: aten.linear.default"] * 5
    assert torch._C.DispatchKey.PreDispatch not in linear._dispatch_cache
    layer(x)
    assert len(seen) == 5


@canary("torch._ops.OpOverload._can_decompose")
def tells_what_only_calls_others(found: Any) -> None:
    assert torch.ops.aten.subtract.Tensor._can_decompose()
    assert not torch.ops.aten.sub.Tensor._can_decompose()


@canary("torch._ops.OpOverload._schema")
def _(_: Any) -> None:
    schema = torch.ops.aten.add_.Tensor._schema
    assert schema.is_mutable
    assert [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert [a.is_write for a in schema.arguments] == [True, False, False]
    assert [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments] == [True, False, False]
    assert [(a.kwarg_only, a.default_value) for a in schema.arguments] == [(False, None), (False, None), (True, 1)]


@canary("torch._tensor.__file__", "torch._jit_internal.__file__", "torch._ops.__file__")
def _(_: Any) -> None:
    """Between a call and its handler are frames of torch's that hand it over, and of no other file."""
    from torch.overrides import TorchFunctionMode

    files: set[str] = set()

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            frame = sys._getframe(1)
            while frame.f_code.co_filename != __file__:
                files.add(frame.f_code.co_filename)
                assert frame.f_back is not None
                frame = frame.f_back
            return func(*args, **kwargs or {})

    x = torch.ones(2, 2)
    with Calls():
        assert (1 - x).sum() + torch.max_pool1d(x, 1).sum() + nn.functional.relu(x).split(1)[0].sum() is not None
    handing = {torch.overrides.__file__, torch._tensor.__file__, torch._jit_internal.__file__, torch._ops.__file__}
    assert torch._tensor.__file__ in files
    assert files <= handing | {nn.functional.__file__, torch.functional.__file__}


@canary(
    "torch._C._functorch.TransformType",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
)
def _(_: Any) -> None:
    from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor

    assert not get_interpreter_stack()
    kinds = []

    def look(x: Tensor) -> Tensor:
        stack = get_interpreter_stack()
        assert stack is not None
        assert is_functorch_wrapped_tensor(x)
        kinds.append((stack[-1].key(), get_unwrapped(x).dim() - x.dim()))
        return x.sum()

    torch.vmap(look)(torch.ones(3, 2))
    torch.func.grad(look)(torch.ones(2))
    assert kinds[0] == (TransformType.Vmap, 1)
    assert kinds[1][0] == TransformType.Grad


@canary("torch._functorch.autograd_function.custom_function_call", "torch._functorch.pyfunctorch.dispatch_functorch")
def _(_: Any) -> None:
    """By default a mode is refused where an autograd function runs under a transform; it can be let in."""
    from torch._functorch.autograd_function import custom_function_call
    from torch._functorch.pyfunctorch import dispatch_functorch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Mode.seen += 1
            return func(*args, **kwargs or {})

    def run(mode: Any, function: Any, *operands: Any) -> Any:
        with mode:
            return dispatch_functorch(custom_function_call, (function, *operands), {})

    custom_function_call.py_impl(Mode)(run)
    with Mode():
        assert torch.equal(torch.vmap(Double.apply)(torch.ones(3)), torch.full((3,), 2.0))
    assert Mode.seen


# --- torch: nested values ---


@canary(
    "torch.utils._pytree.keystr",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_is_leaf",
    "torch.utils._pytree.tree_unflatten",
)
def _(_: Any) -> None:
    """One level of a container is opened, named, and closed again."""
    from collections import OrderedDict

    from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_is_leaf, tree_unflatten

    value = OrderedDict(a=[1], b=(None, 2))
    assert (tree_is_leaf(value), tree_is_leaf(nn.Module())) == (False, True)
    children, spec = tree_flatten(value, is_leaf=lambda inner: inner is not value)
    assert children == [[1], (None, 2)]
    named, _ = tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    assert [(keystr(path), child) for path, child in named] == [("['a']", [1]), ("['b']", (None, 2))]
    assert tree_unflatten([3, 4], spec) == OrderedDict(a=3, b=4)


@canary("torch.utils._pytree")
def _(module: Any) -> None:
    """Its logger is quiet while transformers imports torchao."""
    assert module.log.name == "torch.utils._pytree"


@canary("torch.utils._pytree.tree_leaves")
def _(tree_leaves: Any) -> None:
    assert tree_leaves({"a": [1, (None, 2)]}) == [1, None, 2]


@canary("torch.utils._pytree.tree_map", "torch.utils._pytree.tree_map_only")
def _(_: Any) -> None:
    from torch.utils._pytree import tree_map, tree_map_only

    assert tree_map(str, {"a": [1, (2,)]}) == {"a": ["1", ("2",)]}
    assert tree_map_only(int, str, ["a", 1, {"b": 2.0}]) == ["a", "1", {"b": 2.0}]


@canary("torch._dynamo.decorators.justknobs_check._dynamo_marked_constant")
def _(_: Any) -> None:
    def lines(argument: str) -> tuple[str, list[tuple[str, bool, int]]]:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not hasattr(frame.f_locals.get("tx"), "symbolic_locals"):
            frame = frame.f_back
        assert frame is not None
        traced, found = frame.f_locals["tx"], []
        while traced is not None:
            line = traced.current_instruction.positions.lineno
            found.append((traced.f_code.co_name, traced.f_globals is globals(), line))
            traced = traced.parent
        return argument, found

    def inner(x: Tensor) -> Tensor:
        seen.append(lines("given"))
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x)

    lines._dynamo_marked_constant = True  # type: ignore[attr-defined]
    seen: list[Any] = []
    torch.compile(outer, backend="eager", fullgraph=True)(torch.ones(1))
    first = inner.__code__.co_firstlineno
    assert seen == [("given", [("inner", True, first + 1), ("outer", True, outer.__code__.co_firstlineno + 1)])]


@canary(
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
)
def _(_: Any) -> None:
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    x = torch.ones(1, requires_grad=True)
    with torch._C._ForceDispatchKeyGuard(include, exclude | torch._C._dispatch_keyset_full()):
        below = torch._C._dispatch_tls_local_exclude_set()
        assert below.has(torch._C.DispatchKey.AutogradFunctionality)
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            below = below.remove(key)
    with torch._C._AutoDispatchBelowAutograd():
        assert not (x * 2).requires_grad
        with torch._C._ForceDispatchKeyGuard(include, below & exclude):
            assert (x * 2).requires_grad


@canary(
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
    "torch.distributed._symmetric_memory.rendezvous",
    "torch.distributed._symmetric_memory.empty",
)
def _(found: Any) -> None:
    wanted = {"enable_symm_mem_for_group": ["group_name"], "rendezvous": ["tensor", "group"]}
    if found.__name__ in wanted:
        assert list(signature(found).parameters) == wanted[found.__name__]
    assert callable(found)


@canary("torch._inductor.config._micro_pipeline_tp", "torch._inductor.config.post_grad_custom_post_pass")
def _(value: Any) -> None:
    from torch._inductor import config

    assert not value
    assert {"_micro_pipeline_tp", "post_grad_custom_post_pass"} <= set(config.shallow_copy_dict())


@canary(
    "torch._inductor.custom_graph_pass.CustomGraphPass", "torch._inductor.custom_graph_pass.get_custom_graph_passes"
)
def _(_: Any) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

    assert {"__call__", "uuid"} <= CustomGraphPass.__abstractmethods__
    assert get_custom_graph_passes(None) == ()
    assert get_custom_graph_passes([print]) == (print,)


@canary("torch.nn.functional.has_torch_function")
def _(_: Any) -> None:
    """A copy of the function that does not ask it is not handed over, and is the same function otherwise."""
    from torch.overrides import TorchFunctionMode

    from lightning_autotp.private.torch_private import call_by_call

    seen: list[str] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **kwargs or {})

    function = nn.functional.multi_head_attention_forward
    x, weight, out = torch.randn(3, 2, 4), torch.randn(12, 4), torch.randn(4, 4)
    arguments = (x, x, x, 4, 2, weight, None, None, None, False, 0.0, out, None)
    with Calls():
        handed_over = function(*arguments, need_weights=False)[0]
        assert seen == ["multi_head_attention_forward"]
        inside = call_by_call(function)(*arguments, need_weights=False)[0]
    assert {"linear", "view", "scaled_dot_product_attention"} <= {*seen[1:]}
    assert "multi_head_attention_forward" not in seen[1:]
    assert torch.equal(handed_over, inside)
