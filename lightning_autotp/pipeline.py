"""The story on one screen: model -> graph -> layouts -> plan -> local model -> proof -> weights."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_autotp.applying.fused_attention import run_layers_of_attention
from lightning_autotp.applying.replace import apply_plan
from lightning_autotp.capture.capture import as_calls, language_model_inputs, meta_copy, refuse_scripted
from lightning_autotp.capture.fingerprint import fingerprint
from lightning_autotp.capture.garbage import relaxed_gc
from lightning_autotp.gradients.data_parallel import hook_gathered, shard_over_data
from lightning_autotp.gradients.sums import average_gradients, synchronize_gradients
from lightning_autotp.guard.guard import Guard
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.step_size import TokensPerStep
from lightning_autotp.loading.parameters import load_parameters, row_extremes
from lightning_autotp.loading.shared_scales import quantize_scales, share_extremes
from lightning_autotp.operators.declared import declared_by_user
from lightning_autotp.operators.graph import Graph
from lightning_autotp.parallel.async_products import ProductReport, overlap_products
from lightning_autotp.parallel.implementations import IMPLEMENTATIONS
from lightning_autotp.parameters.local_blocks import refuse_cut
from lightning_autotp.parameters.lowered_gathers import LoweredGathers
from lightning_autotp.parameters.state import ParallelState, parallel_models
from lightning_autotp.private.distributed_private import device_of_objects, device_to_send, is_outermost
from lightning_autotp.proving.experts import prove_experts
from lightning_autotp.proving.feasible import Proofs, feasible_plan
from lightning_autotp.proving.new_calls import CallProver
from lightning_autotp.proving.read_plan import read_plan
from lightning_autotp.proving.verify import trace, verify
from lightning_autotp.quantized.noted import refuse_quantized
from lightning_autotp.ranks.agreement import first_makes, raise_along, raise_together
from lightning_autotp.ranks.group import TPGroup
from lightning_autotp.ranks.store_barrier import register_process
from lightning_autotp.solving.cost import Profile
from lightning_autotp.solving.expert_modules import constrained_by
from lightning_autotp.solving.options import PlanOptions, documented_by, read
from lightning_autotp.solving.plan_cache import PlanCache
from lightning_autotp.solving.planned import PlanMismatch
from lightning_autotp.solving.solution import Solution
from lightning_autotp.start_report import says_phase, says_plan, says_weights

FindPlan = Callable[[nn.Module, Graph, Any, int, PlanOptions], Plan]
"""How to come by a plan, with the arguments of :func:`find_plan`."""

SYNTHETIC = "a synthetic batch"
"""What was traced, where no batch was given."""


@documented_by(PlanOptions)
def make_plan(  # noqa: D417 (the options are PlanOptions')
    model: nn.Module,
    tensor_parallel_size: int,
    *,
    example_inputs: Any = None,
    tokens_per_step: int | tuple[int, int] | TokensPerStep | None = None,
    keep_whole: Iterable[str] = (),
    cut: Mapping[str, int] | None = None,
    profile: Profile | None = None,
    memory: float | Literal["device"] | None = "device",
    sequence_parallel: bool | Literal["auto"] = False,
    device: torch.device | str | None = None,
) -> tuple[Plan, Solution]:
    """Work out how to split a model: no weights, no process group, no GPU needed.

    The options are those of :class:`~lightning_autotp.solving.options.PlanOptions`.

    Args:
        model: any module (on meta or real); it is only looked at.
        tensor_parallel_size: number of ranks.
        example_inputs: one batch as the training step passes it; not needed for a language model with ``input_ids``.
            A list of batches (mappings, or tuples of positional arguments) that go different ways through the model,
            where no single one reaches all of it.
        device: where the model will run, for code that asks, such as ``"cuda"``; by default where its parameters are,
            and the CPU for those on meta. No such device need be there, but a build of torch for it; without one the
            code for the CPU is traced, and the plan says so.

    Returns:
        The plan, and the solver's solution behind it.

    Raises:
        CaptureError: if the model cannot be traced.
        NothingToShard: if nothing in it divides among so many ranks.
        ValueError: if ``tokens_per_step`` is no positive number, a pattern matches nothing, or a parameter cannot be
            cut as it was said.
        QuantizationError: if its weights are quantized already.
    """
    options = PlanOptions(
        tokens_per_step=tokens_per_step,
        keep_whole=keep_whole,
        cut=cut,
        profile=profile,
        memory=memory,
        sequence_parallel=sequence_parallel,
        device=str(device or ""),
    )
    return plan_with(model, tensor_parallel_size, example_inputs, options)


def plan_with(
    model: nn.Module, tensor_parallel_size: int, example_inputs: Any, options: PlanOptions
) -> tuple[Plan, Solution]:
    """:func:`make_plan`, with its options in one object."""
    refuse_unfit(model)
    inputs, options = _example(model, example_inputs, options)
    with relaxed_gc():
        return feasible_plan(model, trace(model, inputs, device=options.device), inputs, tensor_parallel_size, options)


def refuse_unfit(model: nn.Module) -> None:
    """Refuse a model without Python code, or of whose parameters there is something else than the whole.

    Raises:
        CaptureError: naming a module of TorchScript.
        QuantizationError: naming those that are quantized already.
        RuntimeError: naming those that something else has divided.
    """
    refuse_scripted(model)
    refuse_quantized(model)
    refuse_cut(model)


def _example(model: nn.Module, example_inputs: Any, options: PlanOptions) -> tuple[Any, PlanOptions]:
    """The batch to trace with, and the options that say where it comes from."""
    is_missing = example_inputs is None
    source = options.traced_with or (SYNTHETIC if is_missing else "example_inputs")
    return language_model_inputs(model) if is_missing else example_inputs, replace(options, traced_with=source)


@documented_by(make_plan, PlanOptions)
def parallelize(  # noqa: D417 (the options are PlanOptions', and example_inputs are make_plan's)
    model: nn.Module,
    process_group: dist.ProcessGroup,
    *,
    example_inputs: Any = None,
    tokens_per_step: int | tuple[int, int] | TokensPerStep | None = None,
    keep_whole: Iterable[str] = (),
    cut: Mapping[str, int] | None = None,
    profile: Profile | None = None,
    memory: float | Literal["device"] | None = "device",
    plan: Plan | str | os.PathLike[str] | None = None,
    plan_cache: bool | str | os.PathLike[str] = True,
    sequence_parallel: bool | Literal["auto"] = False,
    async_tensor_parallel: bool = False,
    device: torch.device | str | None = None,
    data_mesh: DeviceMesh | None = None,
    autocast: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> nn.Module:
    """Turn ``model`` into this rank's local model, in place. Collective over ``process_group``.

    The options are those of :class:`~lightning_autotp.solving.options.PlanOptions`, and ``example_inputs`` are as for
    :func:`make_plan`.

    Args:
        model: any module; its parameters may be on meta (then they are loaded or initialized here, this rank's part
            only) or real (then they are sliced).
        process_group: the tensor-parallel group.
        device: where this rank's parameters live; by default the device of ``data_mesh``, or without one where they
            are, and for those on meta the CPU, or the device of a group that takes nothing from the host (nccl).
        data_mesh: the ranks that hold the same part of other copies of the model, as one dim of a device mesh. Then
            FSDP2 shards this rank's part over them (before it takes memory), gathers it block by block, and averages
            the gradients over them. With two dims, the part is sharded over the last one alone, and the replicas along
            the first one have the same (hybrid sharding). Collective over it, too: all copies follow the first one's
            plan.
        autocast: what ``torch.autocast`` computes in around the model's calls, ``torch.bfloat16`` say. With
            ``data_mesh``, FSDP2 gathers in it the parameters of which nothing else is used. Calls outside of autocast
            are right nevertheless.
        cpu_offload: whether what FSDP2 shards is in host memory, with its gradients and optimizer states, and a block's
            parameters on the device only while it runs. It needs a ``data_mesh``, which may be of one rank, and groups
            that take tensors of the host, too (``"cpu:gloo,cuda:nccl"``).

    Returns:
        The same module. ``model.autotp`` is its :class:`~lightning_autotp.parameters.state.ParallelState`: plan, metas.

    Raises:
        PeerError: on every rank, if any rank fails.
        CaptureError: if the model cannot be traced.
        NothingToShard: if nothing in it divides among the ranks.
        PlanMismatch: if ``plan`` does not fit the model or the group, naming the first difference.
        VerificationError: if the local model would not compute the same.
        RuntimeError: if the model is parallel already.
        AsyncTensorParallelError: if products cannot overlap here; in the first training step, if nothing is compiled.
        QuantizationError: if its weights are quantized already.
        CheckpointError: if the weights are missing, broken, or do not fit.
        ValueError: for options that :func:`make_plan` refuses, if the plan's file is missing or holds none, or for
            ``cpu_offload`` without what it needs.
    """
    if cpu_offload:
        refuse_offload(process_group, data_mesh)
    if device is None and data_mesh is None and any(parameter.is_meta for parameter in model.parameters()):
        there = device_of_objects(process_group)
        device = None if there.type == "cpu" else there
    options = PlanOptions(
        tokens_per_step=tokens_per_step,
        keep_whole=keep_whole,
        cut=cut,
        profile=profile,
        memory=memory,
        plan=plan,
        plan_cache=plan_cache,
        sequence_parallel=sequence_parallel,
        async_tensor_parallel=async_tensor_parallel,
        device=str(device or (data_mesh.device_type if data_mesh is not None else "")),
    )
    local = make_local(model, process_group, example_inputs, options, data_mesh)
    return materialize(local, device, data_mesh, autocast, cpu_offload)


def refuse_offload(process_group: dist.ProcessGroup, data_mesh: DeviceMesh | None) -> None:
    """Refuse ``cpu_offload`` where nothing would shard parameters, or no group sends what is in host memory.

    Raises:
        ValueError: saying what is missing.
    """
    if data_mesh is None:
        raise ValueError(
            "cpu_offload=True is FSDP2's, which shards over a data_mesh: give one, of a single rank for one copy of the"
            ' model (init_device_mesh("cuda", (1, ranks), mesh_dim_names=("data", "tensor")))'
        )
    host = torch.device("cpu")
    if any(device_to_send(host, group) != host for group in (process_group, *data_mesh.get_all_groups())):
        raise ValueError(
            "cpu_offload=True: gradients are in host memory, and their norm and checkpoints go over process groups that"
            ' send nothing from there: begin with torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), which is'
            " also the strategies' process_group_backend"
        )


@dataclass(frozen=True)
class LocalModel:
    """A model that is planned for, cut and proved; what is on meta has no values yet.

    Attributes:
        module: the model.
        state: its state, ``module.autotp``.
        guard: what will check its uses.
    """

    module: nn.Module
    state: ParallelState
    guard: Guard


def make_local(
    model: nn.Module,
    process_group: dist.ProcessGroup,
    example_inputs: Any,
    options: PlanOptions,
    data_mesh: DeviceMesh | None = None,
    find: FindPlan | None = None,
) -> LocalModel:
    """Plan for a model, cut it in place, and prove it. Parameters on meta stay there.

    Collective over both axes: the first rank of the first copy plans for all, by ``find`` or else :func:`find_plan`.
    """
    if parallel_models(model):
        raise RuntimeError(
            f"{type(model).__name__} is, or contains, a model that was parallelized already: parallelize it once"
        )
    group = TPGroup.of(process_group)
    register_process()
    with raise_together(process_group, "looking at the model"):
        refuse_unfit(model)
        fused = overlap_products(process_group) if options.async_tensor_parallel else None
    inputs, options = _example(model, example_inputs, options)
    if options.limit is not None and data_mesh is not None:  # FSDP2 divides what a rank of a copy stores
        options = replace(options, memory=data_mesh.shape[-1] * options.limit)
    groups = [process_group, *(data_mesh.get_all_groups() if data_mesh is not None else [])]
    message: list[Any] = [None]
    name = type(model).__name__
    with says_plan(model), relaxed_gc():
        with raise_along(groups, "planning"):
            # The first rank's, for all of them: what a plan is proved against is one computation.
            with says_phase(f"tracing {name}"):
                graph = first_makes(process_group, "planning", lambda: trace(model, inputs, device=options.device))
            if all(dist.get_rank(axis) == 0 for axis in groups):
                with says_phase(f"choosing a plan for {name}"):
                    message = [(find or find_plan)(model, graph, inputs, group.size, options).to_json()]
        for axis in reversed(groups):  # to the first ranks of the copies, and from them to the others
            dist.broadcast_object_list(message, group_src=0, group=axis)
        with (
            raise_along(groups, "building the local model"),
            says_phase(f"proving that the ranks compute what {name} does"),
        ):
            # The solver runs again on every rank, held to the plan: a plan is a claim, whoever made it, and it does
            # not say how tensors lie that are no parameters.
            graph, plan, solution = _read(Plan.from_json(message[0]), model, graph, inputs)
            prove_experts(model, graph, plan)
            original = meta_copy(model)
            state = apply_plan(model, plan, group)
            verify(model, solution, group.rank, inputs)
            state.guard = guard = Guard(model, CallProver(model, original, solution, as_calls(inputs)))
    run_layers_of_attention(model)
    if fused is not None:
        model.register_forward_pre_hook(ProductReport(fused))
        weakref.finalize(model, fused.end)
    return LocalModel(model, state, guard)


def find_plan(
    model: nn.Module, graph: Graph, inputs: Any, ranks: int, options: PlanOptions, proofs: Proofs | None = None
) -> Plan:
    """The plan that is given, or was kept, or is made now; ``proofs`` are those of plans made before for this model."""
    if options.plan is not None:
        return options.plan if isinstance(options.plan, Plan) else read(options.plan)
    settings = (
        ranks,
        options.tokens,
        options.keep_whole,
        options.cut,
        options.hardware,
        options.limit,
        options.sequence_parallel,
        options.traced_with,
        graph.device,
        sorted(graph.units.items()),
    )
    versions = [version(name) for name in ("torch", "transformers")]
    key = fingerprint(model, inputs, *settings, *versions, *declared_by_user())
    cache = PlanCache.of(options.plan_cache)
    plan = cache.find(key)
    if plan is None or not _fits(plan, model, graph, inputs):
        plan, _ = feasible_plan(model, graph, inputs, ranks, options, proofs)
        cache.keep(key, plan)
    return plan


def _fits(plan: Plan, model: nn.Module, graph: Graph, inputs: Any) -> bool:
    """Whether a plan that was kept is of the model's code as it is now."""
    try:
        _read(plan, model, graph, inputs)
    except PlanMismatch:
        return False
    return True


def _read(plan: Plan, model: nn.Module, graph: Graph, inputs: Any) -> tuple[Graph, Plan, Solution]:
    """What a plan means on a graph of the model: the graph as the plan takes it, the plan in full, and its solution.

    Raises:
        PlanMismatch: if it is of another model.
    """
    more = frozenset(plan.opaque) - graph.opaque
    if more and more <= {path for path, _ in model.named_modules()}:
        graph = trace(model, inputs, graph.opaque | more, device=graph.device)
    graph = constrained_by(graph, plan, IMPLEMENTATIONS)
    return graph, *read_plan(plan, graph, IMPLEMENTATIONS)


def materialize(
    local: LocalModel,
    device: torch.device | str | None = None,
    data_mesh: DeviceMesh | None = None,
    autocast: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> nn.Module:
    """Apply FSDP2, load this rank's blocks of the weights, install gradient sums and the guard.

    Collective over both axes. Since :func:`make_local` the parameters may have been brought to another dtype.
    """
    model, group = local.module, local.state.group
    names = frozenset[str]()
    if data_mesh is not None:
        device = device or data_mesh.device_type
        if autocast is not None:
            names = local.guard.calls.used_in(autocast, torch.device(device))
        names = shard_over_data(model, data_mesh, names, autocast, cpu_offload)
    with raise_together(group.process_group, "looking for the extremes of quantized weights"):
        extremes = row_extremes(model, device)
    share_extremes(extremes, group)
    with says_weights(model) as told, raise_together(group.process_group, "loading the weights"):
        load_parameters(model, device, extremes, told)
    quantize_scales(model)
    synchronize_gradients(model)
    if data_mesh is not None:
        for axis in data_mesh.get_all_groups():  # of copies, and of replicas
            average_gradients(model, axis)
        hook_gathered(model)
        is_outermost(model)  # an encoder, say, may be called before the model itself
        if names and autocast is not None:
            local.state.gathers = LoweredGathers(model, names, autocast)
    local.guard.attach()
    return model
