"""What the Trainer's strategy and Fabric's do alike."""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from subprocess import Popen
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_autotp.building.repeated_blocks import checkpoint_blocks, offload_blocks
from lightning_autotp.capture.capture import as_call, in_small
from lightning_autotp.data.batches import broadcast_loader, check_sampler
from lightning_autotp.gradients.sums import average_gradients
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.layouts.types import Shard
from lightning_autotp.lightning.discovery import copies_of, fill_remaining, parallel_sizes
from lightning_autotp.lightning.optimizers import CheckedOptimizers
from lightning_autotp.lightning.saving import CheckpointWriter
from lightning_autotp.lightning.starting import check_start
from lightning_autotp.lightning.step_report import StepMeasure, StepReport
from lightning_autotp.lightning.tracebacks import BriefErrors
from lightning_autotp.parallel.collectives import all_gather_replicate
from lightning_autotp.parameters.host_memory import to_device
from lightning_autotp.parameters.state import parallel_models
from lightning_autotp.pipeline import FindPlan, LocalModel, find_plan, materialize, refuse_offload, refuse_unfit
from lightning_autotp.planning.checkpointing import KeptActivations, choose, fitting_plan, machine_of, smallest_memory
from lightning_autotp.planning.rehearsal import Precision
from lightning_autotp.private.distributed_private import default_store
from lightning_autotp.private.lightning_private import (
    StrategyInternals,
    collect_rng_states,
    default_pg_timeout,
    set_rng_states,
)
from lightning_autotp.proving.verify import trace
from lightning_autotp.ranks.agreement import first_makes, gather_objects, largest_of_all, raise_together
from lightning_autotp.ranks.group import TPGroup, end_processes, timeout_of_all
from lightning_autotp.ranks.peers import Peer, PeerWatch
from lightning_autotp.ranks.started import let_threads_finish_at_end, wait_at_end
from lightning_autotp.solving.options import PlanOptions, documented_by
from lightning_autotp.start_report import say_kept, say_step

_AUTOCAST: dict[Any, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What Lightning's precisions let autocast compute in."""


@documented_by(PlanOptions)
class AutoTPBase(StrategyInternals):
    """Ranks that share a model: sizes, processes, the collectives of Lightning's API, and what a model is given.

    The options that say how to come by a plan are those of :class:`~lightning_autotp.solving.options.PlanOptions`.

    Args:
        tensor_parallel_size: ranks that share one copy; ``"auto"``: all devices divided by ``data_parallel_size``.
        data_parallel_size: copies that train on different data and average their gradients; ``"auto"``: one. FSDP2
            shards the model over them; with ``(replicas, shards)`` there are ``replicas * shards`` copies, and each
            replica is sharded over its ``shards`` alone (hybrid sharding), as where these are of one machine.
        example_inputs: one batch as the model's ``forward`` takes it: a tensor, a tuple of positional arguments, a
            mapping of keyword arguments, or a function without arguments that returns one of these. A list of such
            tuples and mappings where no single batch reaches all of the model. Of a LightningModule's several models, a
            mapping from their names gives each its own (``{"student": ..., "teacher": ...}``). Where it is left out,
            the ``example_input_array`` of a model that is none of Hugging Face's serves. Without one, under the
            Trainer, it is the call that the first training step makes, if a ``DataLoader`` over a map-style dataset was
            given to ``trainer.fit`` or is what ``train_dataloader()`` returns: it and ``training_step`` run once in a
            forked process, until the model is called. Else a synthetic batch is, for a model that takes ``input_ids``.
        checked_batches: how many batches are compared over the ranks of one copy before they are used.
        checked_steps: how many steps with each kind of batch run under :func:`lightning_autotp.checked`.
        broadcast_batches: let only the first rank of a tensor-parallel group read its dataloaders (and run their
            workers); the others receive every batch from it, whatever can be pickled. Their datasets are not touched.
        save_distributed_checkpoint: write checkpoints as directories, each rank its own part, instead of one file of
            whole tensors that go through rank 0. Both are in the original model's names and shapes, and both load at
            any sizes.
        activation_checkpointing: ``"blocks"`` lets the model's repeated blocks (a decoder's layers) keep only their
            inputs for the backward pass, which computes them again. ``"offload"`` lets them keep all that they compute
            in host memory instead. ``"auto"`` is ``"blocks"`` if the first training step would not fit into a GPU, or
            into ``memory``, otherwise: it is rehearsed without values, with AdamW.
        cpu_offload: FSDP2 keeps parameters, gradients and optimizer states in host memory, and brings a block's
            parameters to the device while it runs; the optimizer steps on the CPU.
        save_async: write checkpoints in the background, from a copy in host memory, while training goes on.
        process_group_backend: by default gloo on CPUs, and on other devices both theirs and gloo
            (``"cpu:gloo,cuda:nccl"``): what ranks agree on between steps is on the host, and goes over gloo without
            waiting for the device.
        timeout: of collectives.
        models: names of the models to divide in the module that is trained (``["student"]``). By default those of a
            LightningModule are its Hugging Face models or, without any, its children with parameters; under Fabric any
            other module is divided as a whole.
    """

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | tuple[int, int] | Literal["auto"] = "auto",
        example_inputs: Any = None,
        checked_batches: int = 2,
        checked_steps: int = 1,
        broadcast_batches: bool = False,
        save_distributed_checkpoint: bool = False,
        save_async: bool = False,
        tokens_per_step: int | tuple[int, int] | None = None,
        keep_whole: Iterable[str] = (),
        cut: Mapping[str, int] | None = None,
        memory: float | Literal["device"] | None = "device",
        plan: Plan | str | os.PathLike[str] | None = None,
        plan_cache: bool | str | os.PathLike[str] = True,
        sequence_parallel: bool | Literal["auto"] = False,
        async_tensor_parallel: bool = False,
        activation_checkpointing: Literal["blocks", "offload", "auto"] | None = None,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        models: Sequence[str] = (),
    ) -> None:
        self._replicas, copies = copies_of(data_parallel_size)
        super().__init__(  # type: ignore[call-arg]  # Lightning's, of the Trainer or of Fabric
            data_parallel_size=copies,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.plan_options = PlanOptions(
            tokens_per_step=tokens_per_step,
            keep_whole=keep_whole,
            cut=cut,
            memory=memory,
            plan=plan,
            plan_cache=plan_cache,
            sequence_parallel=sequence_parallel,
            async_tensor_parallel=async_tensor_parallel,
        )
        self._memory: float | None = None
        self.example_inputs, self.models = example_inputs, models
        self.checked_batches, self.checked_steps = checked_batches, checked_steps
        if activation_checkpointing not in (None, "blocks", "offload", "auto"):
            raise ValueError(
                f'activation_checkpointing={activation_checkpointing!r}: it must be "blocks", "offload", "auto" or None'
            )
        self.activation_checkpointing, self.cpu_offload = activation_checkpointing, cpu_offload
        self._broadcast_batches = broadcast_batches
        self.patience = (timeout or default_pg_timeout).total_seconds()  # with a rank that is stopped
        self.checked_optimizers = CheckedOptimizers()
        self.saving = CheckpointWriter(save_distributed_checkpoint, save_async)
        self.peers: PeerWatch | None = None
        self._measure: StepMeasure | None = None  # in a run that trains one model

    # --- processes ---

    def before_launch(self) -> None:
        """Decide on the sizes; let this process end without a thread at work, and say briefly with which error."""
        let_threads_finish_at_end()
        BriefErrors.begin(self)
        devices = self.num_nodes * self.num_processes
        self.set_sizes(*parallel_sizes(devices, self.tensor_ranks, self.data_ranks))

    def before_start(self) -> None:
        """Refuse where processes cannot be started, or other machines not be found."""
        check_start(self.num_processes, self.num_nodes)

    def after_start(self, processes: list[Popen[bytes]]) -> None:
        """This process ends when those it started have ended, and says if one failed."""
        wait_at_end(processes, self.patience)

    def setup_environment(self) -> None:
        """Start the process groups, watch the peers, and continue everywhere with rank 0's random state."""
        # Lightning seeds all generators again there, as it does not with one process. A GPU that was not used has drawn
        # nothing.
        drawn_on = [self.root_device] if self.root_device.type == "cuda" and torch.cuda.is_initialized() else []
        with isolate_rng(include_cuda=False), torch.random.fork_rng(drawn_on):
            super().setup_environment()  # type: ignore[misc]
        meshes = [self.device_mesh]
        self._copies = self.device_mesh["data_parallel"]
        if self._replicas > 1:
            sizes = self._replicas, self._copies.size() // self._replicas, self.tensor_parallel_group.size()
            meshes.append(
                init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replicas", "shards", "ranks"))
            )
            self._copies = meshes[-1]["replicas", "shards"]
        # Let the groups of a mesh wait as long as that of all processes, the only one that Lightning tells.
        for group in (group for mesh in meshes for group in mesh.get_all_groups()):
            group.set_timeout(timeout_of_all())
        if self.root_device.type != "cpu":
            atexit.register(end_processes)  # which Lightning does for nccl alone
        self.saving.begin()
        self._memory = smallest_memory(self.root_device)
        self._watch_peers()
        self._share_all_random_states()

    def _watch_peers(self) -> None:
        """Watch over the other processes, if there are any, from now on with this watch alone. Collective."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
        if self.world_size > 1:
            peers = gather_objects(Peer.this_process(self.global_rank), None)
            run = self.broadcast(uuid.uuid4().hex)
            self.peers = PeerWatch(peers, self.global_rank, default_store(), run, self.patience, self.kill_processes)
            self.observe_processes(False)

    def _share_all_random_states(self) -> None:
        """Rank 0's random state for every rank: in one process it would have been the only one. Collective."""
        set_rng_states(self.broadcast(collect_rng_states(include_cuda=False)))
        if self.root_device.type == "cuda":
            torch.cuda.set_rng_state(self.broadcast(torch.cuda.get_rng_state(self.root_device)), self.root_device)

    # --- groups, and the collectives of Lightning's API ---

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's copy of the model."""
        return self.device_mesh["tensor_parallel"].get_group()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the other copies."""
        return self.device_mesh["data_parallel"].get_group()

    @property
    def options_here(self) -> PlanOptions:
        """The options, with the device that this rank trains on."""
        return replace(self.plan_options, device=str(self.root_device))

    @property
    def copies(self) -> DeviceMesh | None:
        """The mesh of the copies, if FSDP2 is to shard; with replicas, they are a dim before that of their shards."""
        return self._copies if self.data_ranks != 1 or self.cpu_offload else None

    def over_copies(self, group: Any) -> dist.ProcessGroup:
        """The group of a collective that Lightning's API was given this ``group`` for.

        All processes, the default, means one rank of each copy: ranks of one copy have the same values, which count
        once. Any other group is the caller's choice.
        """
        return self.data_parallel_group if group is None or group is dist.group.WORLD else group

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather what the copies of the model have, ``[...] -> [copies, ...]``; of one copy it is the tensor itself.

        Lightning's own takes torch's, whose gradient is wrong under gloo for any group but that of all processes.

        Args:
            tensor: of the same shape everywhere.
            group: by default the copies.
            sync_grads: whether a copy's tensor gets the gradients of all copies, added up, or none.
        """
        among = self.over_copies(group)
        if among is not self.data_parallel_group:
            return super().all_gather(tensor, among, sync_grads)  # type: ignore[misc]
        copies = TPGroup.of(among)
        if copies.size == 1:
            return tensor
        each_one = Shard(((0, Ownership.even(copies.size, copies.size)),))
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return all_gather_replicate(tensor.unsqueeze(0), copies, each_one)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together over all ranks."""
        yes, no = largest_of_all([int(decision), int(not decision)], None)
        return not no if all else bool(yes)

    # --- models and data ---

    def prepare(self, models: Iterable[nn.Module], precision: str) -> None:
        """Refuse models that cannot be made local, and see to what blocks of the others keep, if that is asked for.

        Args:
            models: that are whole yet.
            precision: of their calls, as Lightning has it.

        Raises:
            CaptureError, QuantizationError, RuntimeError: as :func:`~lightning_autotp.pipeline.refuse_unfit`.
            ValueError: if there are no blocks then, or for ``cpu_offload`` with what it does not go with.
        """
        if self.cpu_offload:
            refuse_offload(self.tensor_parallel_group, self.copies)
            if precision == "16-mixed":
                raise ValueError(
                    'precision="16-mixed" scales the loss, and torch\'s GradScaler takes no gradients in host memory:'
                    ' with cpu_offload=True use "bf16-mixed"'
                )
        for model in models:
            refuse_unfit(model)
            if self.activation_checkpointing == "blocks":
                checkpoint_blocks(model)
            elif self.activation_checkpointing == "offload":
                offload_blocks(model)

    def fit_into_memory(self, model: nn.Module, example: Any, precision: str, accumulates: bool = False) -> None:
        """With ``activation_checkpointing="auto"``, checkpoint a model's blocks if a step does not fit otherwise.

        Collective over all processes.

        Args:
            model: that is whole yet.
            example: its arguments in a training step, of the step's own size.
            precision: of the step, as Lightning has it.
            accumulates: whether it adds to gradients.

        Raises:
            ValueError: if it is not known how much memory there is.
            RehearsalError: if the step cannot be rehearsed.
        """
        if self.activation_checkpointing != "auto":
            return
        options, ranks = self.options_here, self.tensor_parallel_group.size()
        shards = self.copies.shape[-1] if self.copies is not None else 1

        def chosen() -> KeptActivations:
            limit = options.limit or self._memory
            unknown = {
                "how much memory a training step may take (give memory=, the bytes of a GPU)": limit is None,
                "what a training step is given (give example_inputs= of its size)": example is None,
                f"what a step takes in precision {precision}": precision not in get_args(Precision),
            }
            for what, is_so in unknown.items():
                if is_so:
                    raise ValueError(
                        f'activation_checkpointing="auto": it is not known {what}, so say "blocks" or None instead'
                    )
            assert limit is not None
            plan = None
            if ranks > 1:
                small = in_small(model, as_call(example))
                graph = trace(model, small, device=options.device)
                of_copy = None if options.limit is None else shards * options.limit
                plan = find_plan(model, graph, small, ranks, replace(options, memory=of_copy))
            known = cast(Precision, precision)
            return choose(
                model,
                plan,
                example,
                limit,
                precision=known,
                copies=shards,
                accumulates=accumulates,
                cpu_offload=self.cpu_offload,
            )

        found = first_makes(None, "rehearsing a training step", chosen)
        if found.are_recomputed:
            checkpoint_blocks(model)
        say_kept(type(model).__name__, str(found), found.warnings)

    def finder(self, example: Any, precision: str, accumulates: bool = False) -> FindPlan:
        """How to come by the plan of the one model that is trained: for the memory of the device, if that is asked for.

        Args:
            example: its arguments in a training step, of the step's own size; ``None`` where they are not known.
            precision: of the step, as Lightning has it.
            accumulates: whether it adds to gradients.
        """
        limit, is_known = self._memory, example is not None and precision in get_args(Precision)
        if limit is None or self.cpu_offload or not is_known:
            return find_plan
        return partial(
            fitting_plan,
            example=example,
            limit=limit,
            precision=cast(Precision, precision),
            accumulates=accumulates,
            copies=self.copies.shape[-1] if self.copies is not None else 1,
            replicas=self._replicas,
            machine=machine_of(self.root_device),
        )

    # --- steps ---

    def measure_steps(self, models: Sequence[nn.Module], precision: str) -> None:
        """Note what a step takes from now on, if there is one model, on several devices.

        Args:
            models: those that are trained.
            precision: of their calls, as Lightning has it.
        """
        self._measure = None
        if len(models) == 1 and self.world_size > 1:
            shards = self.copies.shape[-1] if self.copies is not None else 1
            self._measure = StepMeasure(
                models[0], self.root_device, shards, precision, self._replicas, self.cpu_offload
            )

    def passed(self) -> None:
        """When a backward pass begins."""
        if self._measure is not None:
            self._measure.passed()

    def stepped(self, optimizer: Optimizer) -> None:
        """After a step of an optimizer; on a GPU one of the first ones says what a step takes."""
        is_time = self._measure is not None and self._measure.stepped(optimizer)
        if is_time and self.global_rank == 0 and self.root_device.type != "cpu":
            report = self.report()
            say_step(report, report.warnings)

    def report(self, machine: str | None = None) -> StepReport:
        """What a training step takes on this rank, predicted and measured. Not collective.

        The prediction is made in the first call, which takes about as long as a trace. On a GPU the strategy prints it
        after the fifth step, with a warning where it is off by more than a fifth.

        Args:
            machine: what the time is predicted for, as ``8xH100`` or a machine's file; by default what the GPUs are.

        Raises:
            RuntimeError: if nothing is trained, or several models are.
            ValueError: for a machine that is not known.
        """
        if self._measure is None:
            raise RuntimeError("strategy.report() is of a run that trains one model, on several devices")
        return self._measure.report(machine)

    # --- models' values ---

    def fill(self, module: nn.Module, models: Iterable[LocalModel], precision: str) -> list[RemovableHandle]:
        """Give local models this rank's part of their values, on its device; then average gradients over the copies.

        Collective over all processes; every backward pass is afterwards.

        Args:
            module: is one of the models, or holds them.
            models: the models that were made local.
            precision: the precision of their calls, as Lightning has it.

        Returns:
            The handles of the gradients' hooks.
        """
        for model in models:
            materialize(model, self.root_device, self.copies, _AUTOCAST.get(precision), self.cpu_offload)
        with raise_together(None, f"initializing the {type(module).__name__}'s own parameters"):
            fill_remaining(module)
        self._share_all_random_states()
        to_device(module, self.root_device)
        averaged = {parameter for model, _ in parallel_models(module) for parameter in model.parameters()}
        return average_gradients(module, self.data_parallel_group, averaged)

    def read_alike(self, dataloader: Any, sampler: str) -> Any:
        """A loader that all ranks of a copy read alike, or the first one for all of them, where that is asked for.

        Args:
            dataloader: the loader.
            sampler: how to make a sampler that is right, for the error about one that is not.

        Raises:
            ValueError: for a sampler that splits the data by rank and not by copy.
        """
        copies = self.data_parallel_group
        check_sampler(dataloader, copies.size(), copies.rank(), sampler)
        if self._broadcast_batches and self.tensor_parallel_group.size() > 1:
            return broadcast_loader(dataloader, self.tensor_parallel_group, self.root_device)
        return dataloader
