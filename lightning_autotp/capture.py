"""From a model to its :class:`~lightning_autotp.graph.Graph`: one trace on the meta device, in training mode.

``torch.export.export(strict=False)`` runs the model's Python once on meta tensors. The trace works on a copy (exporting
leaves fake tensors in caches and attributes); every tensor that crosses a module boundary is marked, so that the flat
graph still knows the module tree.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_autotp.graph import Boundary, Graph, Operator, Ref, TensorInfo
from lightning_autotp.trace import RECORD, record

_BOUNDARY = "boundary|"
_ROOT = "model"
# Operators that compute nothing: metadata checks, memory layout, and conversions to the dtype a tensor already has.
_CHECKS = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default"}
_IDENTITIES = {"aten.alias.default", "aten.contiguous.default", "aten.lift_fresh_copy.default"}
_CASTS = {"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default", "aten._to_copy.default"}
_BATCH_PRIMES = (3, 5, 7, 11, 13)
_SEQUENCE_PRIMES = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139)


class CaptureError(RuntimeError):
    """The model could not be traced; the message names the module and the line."""


def capture_local(model: nn.Module, example_inputs: Any) -> Graph:
    """Like :func:`capture`, but where the model's forward raises, the graph of what ran until then.

    For a model that may have been localized wrongly: the comparison then tells where it goes wrong.
    """
    try:
        return capture(model, example_inputs)
    except CaptureError:
        return _capture(model, example_inputs, _TracedUntilFailure)


def capture(model: nn.Module, example_inputs: Any = None) -> Graph:
    """Trace one training forward of ``model`` on the meta device.

    Args:
        model: any module; it is neither changed nor run. Its parameters may be on any device, also on meta.
        example_inputs: one batch: a tensor, a tuple of positional arguments, or a mapping of keyword arguments. May be
            left out for a language model that takes ``input_ids`` and ``labels``.

    Returns:
        The graph, with module boundaries marked and operators that compute nothing left out.

    Raises:
        CaptureError: if tracing fails, naming the module and the source line.
    """
    return _capture(model, language_model_inputs(model) if example_inputs is None else example_inputs, _Traced)


def _capture(model: nn.Module, example_inputs: Any, root: type[_Traced]) -> Graph:
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), _as_call(example_inputs))
    traced = meta_copy(model).train()
    entered: list[str] = []
    try:
        with _marked_boundaries(traced, entered), _quiet_fake_tensors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            called = root(traced, len(args), tuple(kwargs))
            program = torch.export.export(called, (*args, *kwargs.values()), strict=False)
    except Exception as error:
        where = " -> ".join(entered) or "(root)"
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: {type(error).__name__}: {str(error).strip().splitlines()[0]}\n"
            f"  in module {where}\n  at {_user_line(error)}\n"
            "The model is traced once on the meta device: remove what needs a tensor's value (`.item()`, `if tensor:`) "
            "from this line, or give example_inputs that the model accepts."
        ) from error
    return _Reader(traced).read(program)


def language_model_inputs(model: nn.Module) -> dict[str, Any]:
    """A batch for a model that takes ``input_ids`` and ``labels``, of sizes that collide with none of the model's.

    Raises:
        CaptureError: if the model's ``forward`` takes no such inputs.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        raise CaptureError(
            f"{type(model).__name__}.forward takes {', '.join(names) or 'nothing'}: give example_inputs (one batch as "
            "your training step passes it), or set the LightningModule's example_input_array."
        )
    taken = {size for parameter in model.parameters() for size in parameter.shape}
    config = getattr(model, "config", None)
    if config is not None:
        taken |= {value for value in vars(config).values() if isinstance(value, int)}
    batch = next((size for size in _BATCH_PRIMES if size not in taken), _BATCH_PRIMES[-1])
    sequence = next((size for size in _SEQUENCE_PRIMES if size not in taken), _SEQUENCE_PRIMES[-1])
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if "labels" in names:
        inputs["labels"] = torch.zeros_like(ids)
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


def meta_copy(model: nn.Module) -> nn.Module:
    """A deep copy of ``model`` with every tensor on the meta device; the original's tensors are not copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for value in holder.values():
                if not isinstance(value, Tensor) or id(value) in memo:
                    continue
                if isinstance(value, nn.Parameter):
                    twin: Tensor = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
                    twin.__dict__.update(value.__dict__)
                else:
                    twin = value.detach().to("meta")
                memo[id(value)] = twin
    return copy.deepcopy(model, memo)


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


class _Traced(nn.Module):
    """Calls the model and returns its floating-point tensors only (export knows no caches)."""

    def __init__(self, model: nn.Module, positional: int, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.add_module(_ROOT, model)
        self.positional, self.keywords = positional, keywords

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        named = dict(zip(self.keywords, inputs[self.positional :], strict=True))
        result = getattr(self, _ROOT)(*inputs[: self.positional], **named)
        leaves = pytree.tree_leaves(result)
        return tuple(
            getattr(leaf, "local", leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
        )


class _TracedUntilFailure(_Traced):
    """Where the model raises, returns every tensor computed so far, so that the trace shows how far it came."""

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """What the model returns, or everything until its exception."""
        tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
        depth = len(tracer.module_stack)
        with _Results() as seen:
            try:
                return super().forward(*inputs)
            except Exception:
                while len(tracer.module_stack) > depth:  # the tracer leaves modules only when they return
                    tracer.module_stack.popitem()
                return tuple(seen.tensors)


@contextlib.contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """A failure becomes a CaptureError or a partial graph: its traceback need not be logged as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Results(TorchFunctionMode):
    """Keeps every tensor that a function returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [
            leaf for leaf in pytree.tree_leaves(result) if type(leaf) is Tensor or isinstance(leaf, FakeTensor)
        ]
        return result


@contextlib.contextmanager
def _marked_boundaries(model: nn.Module, entered: list[str]) -> Iterator[None]:
    """Mark every floating-point tensor that enters or leaves a module; ``entered`` is the stack of running ones."""

    def mark(path: str, side: str, values: Any) -> Any:
        def one(key: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.is_meta:
                return leaf
            return record(f"{_BOUNDARY}{path}|{side}|{pytree.keystr(key)}", [leaf], leaf.shape)

        return pytree.tree_map_with_path(one, values)

    def before(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            entered.append(path)
            return mark(path, "in", (args, kwargs))

        return hook

    def after(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            entered.pop()
            return mark(path, "out", output)

        return hook

    handles = []
    try:
        for path, module in model.named_modules():
            # The mark of an input comes before the module's own conversions, the mark of an output after them.
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reader:
    """Reads an exported program into a :class:`Graph`."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[Tensor, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(parameter, name)
        self.names = {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}
        self.layers = {
            path: "linear" if isinstance(module, nn.Linear) else "embedding"
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding)
        }
        self.graph = Graph()

    def read(self, program: torch.export.ExportedProgram) -> Graph:
        parameters = program.graph_signature.inputs_to_parameters
        env: dict[torch.fx.Node, Any] = {}
        known: dict[str, Ref] = {}
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            name = parameters.get(node.name)
            if name is None:
                env[node] = self._value(node.meta.get("val"), static=True)
                continue
            name = self.names[name.removeprefix(f"{_ROOT}.")]
            if name not in known:  # a tied parameter has a placeholder per name
                known[name] = self._value(node.meta.get("val"), static=False)
                self.graph.parameters[known[name].tensor] = name
            env[node] = known[name]
        outputs = self._run(program.graph_module, program.graph, env)
        self.graph.outputs = [ref.tensor for ref in pytree.tree_leaves(outputs) if isinstance(ref, Ref)]
        return self.graph

    def _run(self, owner: nn.Module, graph: torch.fx.Graph, env: dict[torch.fx.Node, Any]) -> Any:
        """Read the nodes of one (sub)graph; returns what its output node names."""
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                value = getattr(owner, node.target)
                env[node] = value if isinstance(value, torch.fx.GraphModule) else self._value(value, static=True)
                continue
            arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            if node.op == "output":
                return arguments[0][0]
            args, kwargs = arguments
            name = _target_name(node.target)
            if name in _CHECKS:
                continue
            if name == "getitem" and isinstance(args[0], tuple | list):
                env[node] = args[0][args[1]]
            elif name == "wrap_with_set_grad_enabled":
                inner = dict(zip(args[1].graph.find_nodes(op="placeholder"), args[2:], strict=True))
                env[node] = self._run(args[1], args[1].graph, inner)
            elif self._is_identity(name, node, args):
                env[node] = args[0]
            else:
                env[node] = self._operator(node, name, args, kwargs)
        raise AssertionError("a graph ends with its output node")

    def _is_identity(self, name: str, node: torch.fx.Node, args: Any) -> bool:
        if name in _IDENTITIES:
            return True
        value = node.meta.get("val")
        return (
            name in _CASTS and isinstance(value, Tensor) and self.graph.tensors[args[0].tensor].dtype == _dtype(value)
        )

    def _operator(self, node: torch.fx.Node, name: str, args: Any, kwargs: Any) -> Any:
        arguments = _named_arguments(node.target, args, kwargs)
        boundary = None
        if name == RECORD:
            label = dict(arguments)["name"]
            arguments = (("input", dict(arguments)["inputs"]),)
            name = f"record:{label}"
            if label.startswith(_BOUNDARY):
                boundary, name = Boundary(*label.removeprefix(_BOUNDARY).split("|")), "boundary"
        module = boundary.module if boundary is not None else _module_path(node)
        draft = Operator(name, arguments, (), module, _source_line(node), self.layers.get(module, ""), boundary)
        static = all(self.graph.tensors[tensor].is_static for tensor in draft.inputs)
        value = pytree.tree_map(lambda leaf: self._value(leaf, static), node.meta.get("val"))
        outputs = tuple(leaf.tensor for leaf in pytree.tree_leaves(value) if isinstance(leaf, Ref))
        self.graph.operators.append(replace(draft, outputs=outputs))
        return tuple(value) if isinstance(value, list) else value

    def _value(self, value: Any, static: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        self.graph.tensors.append(
            TensorInfo(
                shape=tuple(int(size) for size in value.shape),
                dtype=_dtype(value),
                itemsize=value.element_size(),
                is_static=static,
                is_differentiable=not static and value.is_floating_point(),
            )
        )
        return Ref(len(self.graph.tensors) - 1)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _named_arguments(target: Any, args: Any, kwargs: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments by the schema's names with its defaults; lists become tuples, dtypes and devices become text."""
    if isinstance(target, torch._ops.OpOverload):
        named: dict[str, Any] = {}
        for position, argument in enumerate(target._schema.arguments):
            if position < len(args) and not argument.kwarg_only:
                named[argument.name] = args[position]
            elif argument.name in kwargs:
                named[argument.name] = kwargs[argument.name]
            else:
                named[argument.name] = argument.default_value
    else:
        named = {str(position): value for position, value in enumerate(args)} | dict(kwargs)
    return tuple((name, _plain(value)) for name, value in named.items())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if value is None or isinstance(value, Ref | bool | int | float | str):
        return value
    return str(value)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = re.sub(r"@\d+$", "", path)
    return path.removeprefix(_ROOT).removeprefix(".")


def _source_line(node: torch.fx.Node) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', node.meta.get("stack_trace") or "")
    ours = [frame for frame in frames if "/torch/" not in frame[0] and "/lightning_autotp/" not in frame[0]]
    if not (ours or frames):
        return ""
    file, line, code = (ours or frames)[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}: {code.strip()}"


def _user_line(error: BaseException) -> str:
    """The innermost line outside torch and this package that led to ``error``."""
    cause: BaseException = error
    traceback = cause.__traceback__
    lines = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not any(part in code.co_filename for part in ("/torch/", "/lightning_autotp/", "/transformers/utils/", "<")):
            lines.append(f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}")
        traceback = traceback.tb_next
    return lines[-1] if lines else "an unknown line"
