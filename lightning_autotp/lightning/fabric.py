"""The strategy for Lightning Fabric: hooks only, over the same functions as the Trainer's.

Order of a run: ``Fabric(...)`` checks the sizes; ``fabric.launch()`` starts processes, which all take rank 0's random
state; ``fabric.init_module()`` builds models without memory; ``fabric.setup(model, optimizer)`` makes a model this
rank's local one and lets the optimizer hold its parameters. The loop is the user's: nothing says when it is over, so
the processes are watched until they end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_autotp.building.pretrained import meta_model
from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.checkpoints.export import ENTRY, describe_models
from lightning_autotp.checkpoints.files import read_checkpoint, read_stored
from lightning_autotp.checkpoints.state import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from lightning_autotp.data.batches import broadcast_loader, check_sampler
from lightning_autotp.gradients.norms import clip_gradients_norm, clip_gradients_value
from lightning_autotp.gradients.sums import postponed_sums
from lightning_autotp.guard.checked import CheckedCalls
from lightning_autotp.guard.guard import check_gradients
from lightning_autotp.guard.state_dicts import refuse_whole_optimizer_states
from lightning_autotp.layouts.plan import Plan
from lightning_autotp.lightning.discovery import find_models
from lightning_autotp.lightning.loaders import ComparedFirst, CountedNotes, NotedLoader, seed_workers_by
from lightning_autotp.lightning.models_local import average_over_copies, count_copies_once, fill_models
from lightning_autotp.lightning.optimizers import CheckedOptimizers, move_to_local, originals, owner_of
from lightning_autotp.lightning.processes import (
    ParallelRanks,
    end_watch,
    same_random_state,
    share_random_state,
    watch_peers,
)
from lightning_autotp.lightning.saving import CheckpointWriter
from lightning_autotp.optimizers.scaler import AgreedGradScaler
from lightning_autotp.parallel.head_product import compute_undone
from lightning_autotp.parameters.state import is_parallel, parallel_models
from lightning_autotp.pipeline import make_local, refuse_unfit
from lightning_autotp.private.lightning_private import (
    BackwardSync,
    FabricModelParallelStrategy,
    default_pg_timeout,
    optimizers_to_device,
)
from lightning_autotp.private.torch_private import uncompiled
from lightning_autotp.ranks.agreement import check_same_weights, raise_together
from lightning_autotp.ranks.peers import PeerWatch
from lightning_autotp.ranks.started import at_end_of_process
from lightning_autotp.solving.options import PlanOptions


class AutoTPFabricStrategy(ParallelRanks, FabricModelParallelStrategy):
    """Tensor parallelism for any model under Fabric, planned from its own graph.

    Ranks ``0 .. tensor_parallel_size - 1`` share one copy of the model, the next ones another copy, and so on. Ranks of
    one copy run the same loop on the same batches with the same random numbers; both are compared before a model is
    called.

    Args:
        tensor_parallel_size: ranks that share one copy; ``"auto"``: all devices divided by ``data_parallel_size``.
        data_parallel_size: copies that train on different data and average their gradients; ``"auto"``: one.
        example_inputs: one batch as the ``forward`` of the models takes it: a tensor, a tuple of positional arguments,
            a mapping of keyword arguments, or a function without arguments that returns one of these. A list of such
            tuples and mappings where no single batch reaches all of the model. Without it a
            model's ``example_input_array`` serves; else a batch is made up, for a model that takes ``input_ids``.
        checked_batches: how many batches of each pass over a loader are compared over the ranks of a copy before the
            model is called with them in training; later ones are compared in ``optimizer.step()``, before anything is
            changed. A negative number: all.
        checked_steps: how many calls of each model with each kind of arguments begin a watch over the loop, until the
            next call: an error where its code takes this rank's part of a parameter for the whole one
            (:func:`lightning_autotp.checked`). A negative number watches always; 0 never.
        broadcast_batches: as for :class:`~lightning_autotp.AutoTPStrategy`, and so are all options below.
        save_distributed_checkpoint: whether ``fabric.save`` writes directories.
        save_async: whether it writes in the background.
        tokens_per_step: what one forward and backward pass of one copy will be given; by default 16,384 tokens.
        keep_whole: what stays whole on every rank.
        cut: what is cut along which dim.
        plan: a plan to follow, or its file.
        plan_cache: where plans are kept.
        sequence_parallel: whether tokens are sharded between tensor-parallel regions.
        async_tensor_parallel: whether compiled code overlaps products with the collectives of sharded tokens.
        process_group_backend: by default the one for the device: nccl or gloo.
        timeout: of collectives.

    Raises:
        ValueError: if ``tokens_per_step`` is no positive number; when ``Fabric`` is made, if the sizes do not multiply
            to the number of devices; in ``fabric.setup``, if the plan's file is missing or holds none.
    """

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        example_inputs: Any = None,
        checked_batches: int = 2,
        checked_steps: int = 1,
        broadcast_batches: bool = False,
        save_distributed_checkpoint: bool = False,
        save_async: bool = False,
        tokens_per_step: int | tuple[int, int] | None = None,
        keep_whole: Sequence[str] = (),
        cut: Mapping[str, int] | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        plan_cache: bool | str | os.PathLike[str] = True,
        sequence_parallel: bool | Literal["auto"] = False,
        async_tensor_parallel: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            lambda module, _: module,  # setup_module says what is done
            data_parallel_size,
            tensor_parallel_size,
            save_distributed_checkpoint,
            process_group_backend,
            timeout,
        )
        BackwardSync(self, postponed_sums)
        self._example_inputs = example_inputs
        self._broadcast_batches = broadcast_batches
        self._plan_options = PlanOptions.given(
            tokens_per_step=tokens_per_step,
            keep_whole=keep_whole,
            cut=cut,
            plan=plan,
            plan_cache=plan_cache,
            sequence_parallel=sequence_parallel,
            async_tensor_parallel=async_tensor_parallel,
        )
        self._modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, nn.Module | None] = WeakKeyDictionary()
        self._checked = CheckedOptimizers()
        self._checked_calls = CheckedCalls(checked_steps, self._modules, self._optimizers)
        self._saving = CheckpointWriter(save_distributed_checkpoint, save_async)
        self._is_started = False
        self._peers: PeerWatch | None = None
        self._checked_batches = checked_batches
        self._notes: CountedNotes | None = None
        self._loaders = 0

    # --- processes ---

    def setup_environment(self) -> None:
        """Start the process groups, watch the peers, and continue everywhere with rank 0's random state."""
        is_first, self._is_started = not self._is_started, True
        with same_random_state(self.root_device):
            super().setup_environment()
        self.share_timeout()
        self._saving.begin()
        self._peers = watch_peers(self, self._peers)
        if is_first:
            at_end_of_process(self._saving.close, lambda error: end_watch(self._peers, self.global_rank, error))
        if self.tensor_parallel_group.size() > 1:
            self._notes = CountedNotes(self.tensor_parallel_group, self.root_device, self._checked_batches)
        precision = self.precision
        if isinstance(precision, MixedPrecision) and not isinstance(precision.scaler, AgreedGradScaler | None):
            precision.scaler = AgreedGradScaler(precision.scaler)
        share_random_state(self.broadcast, self.root_device)

    # --- set-up ---

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around the code that builds a model: it takes no memory, and an error on one rank reaches all. Collective.

        Args:
            empty_init: makes no difference: parameters get their values in ``fabric.setup``, this rank's part only.
        """
        with raise_together(None, "building the model"), self.precision.module_init_context(), meta_model():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Models go to the device in :meth:`setup_module`, this rank's part; what has no parameters goes there now.

        Metrics that go there after ``fabric.launch()`` count each copy of the model once.
        """
        if next(module.parameters(), None) is None:
            module.to(self.root_device)
            if self._is_started:
                count_copies_once(module, self.data_parallel_group)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Make a model local, and let the optimizers of its whole parameters hold the local ones. Collective.

        Raises:
            ValueError: for an optimizer of other parameters, or one that works on whole tensors.
        """
        with raise_together(None, "looking at the optimizers"):
            before = originals(optimizers, uncompiled(module))
        self.setup_module(module)
        for original in before:
            move_to_local(original, uncompiled(module))
            self.setup_optimizer(original.optimizer)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Make a model local, in place: plan, cut, prove, fill. Collective over all processes.

        Of a LightningModule it is the model that the Trainer's strategy would find in it, else the module itself. What
        ``torch.compile`` has made of a module (``_reapply_compile=False``) compiles the local one when it is called.

        Raises:
            CaptureError: if the model cannot be traced; and whatever else :func:`~lightning_autotp.parallelize` raises.
            ValueError: if it was set up already, or an optimizer of its parameters was set up before it.
        """
        given, module = module, uncompiled(module)
        with raise_together(None, "looking for the model to parallelize"):
            if parallel_models(module):
                raise ValueError(
                    f"{type(module).__name__} is, or holds, a model that was set up already: call fabric.setup or"
                    " fabric.setup_module once, and use what it returns"
                )
            self._refuse_optimizers_of(module)
            models = self._models_of(module)
            for model, _ in models:
                refuse_unfit(model)
        copies = self.device_mesh["data_parallel"] if self.data_ranks != 1 else None
        for model, inputs in models:
            check_same_weights(model, None)
            self._make_local(model, inputs, copies)
        fill_models(module, [model for model, _ in models], self.root_device, copies)
        share_random_state(self.broadcast, self.root_device)
        module.to(self.root_device)
        average_over_copies(module, self.data_parallel_group)
        for model, _ in models:
            if self._notes is not None:
                model.register_forward_pre_hook(ComparedFirst(self._notes))
            model.register_forward_pre_hook(self._checked_calls, with_kwargs=True)
        self._modules[module] = None
        return given

    def _models_of(self, module: nn.Module) -> list[tuple[nn.Module, Any]]:
        if isinstance(module, LightningModule):
            return find_models(module, self._example_inputs)
        given = self._example_inputs
        inputs = given() if callable(given) else given
        return [(module, inputs if inputs is not None else getattr(module, "example_input_array", None))]

    def _make_local(self, model: nn.Module, inputs: Any, copies: DeviceMesh | None) -> None:
        try:
            make_local(model, self.tensor_parallel_group, inputs, self._plan_options, copies)
        except CaptureError as error:
            if inputs is not None or is_parallel(model):
                raise
            raise CaptureError(
                f"{error} Fabric does not see your training step before it runs: pass one batch, as the model's forward"
                " takes it, in Fabric(strategy=AutoTPFabricStrategy(example_inputs=...))"
            ) from error

    def _refuse_optimizers_of(self, module: nn.Module) -> None:
        parameters = set(module.parameters())
        for optimizer in self._optimizers:
            if any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} was set up before {type(module).__name__}, whose whole parameters it"
                    " has: call fabric.setup(model, optimizer), or make the optimizer after fabric.setup_module(model)"
                )

    # --- steps ---

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check an optimizer of local parameters. Collective.

        Raises:
            ValueError: if it works on whole tensors, or has the parameters that a model had before it was set up.
        """
        with raise_together(None, "looking at an optimizer"):
            self._optimizers[optimizer] = owner = owner_of(optimizer, list(self._modules))
        if owner is not None:
            refuse_whole_optimizer_states(optimizer, owner)
        self._check_optimizers()
        return optimizer

    def _check_optimizers(self) -> None:
        self._checked.check([(optimizer, owner) for optimizer, owner in self._optimizers.items() if owner is not None])

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Make a step; parameter groups added since the last one, such as thawed layers, are checked first."""
        self._check_optimizers()
        if self._notes is not None and self._notes.is_waiting:
            self._notes.compare()
        closure = kwargs.get("closure")

        def then_compute() -> Any:
            result = closure() if closure is not None else None
            compute_undone()  # logits that the loop still has
            check_gradients(optimizer)
            return result

        if closure is None:
            then_compute()
        else:
            kwargs["closure"] = then_compute
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the whole model's norm, over all ranks. Collective."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_gradients_norm(module, max_norm, float(norm_type), error_if_nonfinite, parameters=parameters)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp every element."""
        self.precision.unscale_gradients(optimizer)
        clip_gradients_value(self.precision.main_params(optimizer), clip_val)

    # --- collectives ---

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the copies of the model, in place: ranks of one copy have the same value, which counts once."""
        return super().all_reduce(tensor, self.over_copies(group), reduce_op)

    # --- data ---

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """What a ``DistributedSampler`` splits by; ``None`` for one copy of the model, which sees all the data.

        Fabric then leaves samplers as they are, so that the data come in the order of one process.
        """
        return None if self.data_ranks == 1 else super().distributed_sampler_kwargs

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let the ranks of one copy read alike: workers are seeded by copy, and batches noted, or read once."""
        mesh = self.device_mesh["data_parallel"]
        check_sampler(
            dataloader,
            mesh.size(),
            mesh.get_local_rank(),
            "leave the sampler to fabric.setup_dataloaders, or make it with num_replicas="
            f"{mesh.size()} (copies of the model) and rank=fabric.global_rank // {self.tensor_parallel_group.size()}",
        )
        seed_workers_by(dataloader, mesh.get_local_rank())
        if self._notes is None:
            return dataloader
        group, name = self.tensor_parallel_group, f"dataloader {self._loaders}"
        self._loaders += 1
        read = broadcast_loader(dataloader, group, self.root_device) if self._broadcast_batches else dataloader
        return NotedLoader(read, self._notes, name, dataloader)

    # --- checkpoints: in the original model's coordinates ---

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint, whole or not at all; an error on one rank reaches all. Collective.

        With ``save_async`` the error of a save is raised at the next save or load, or the process ends with it.

        Raises:
            ValueError: for a URL, ``storage_options``, or a ``filter`` of a distributed checkpoint.
        """
        target = self._local_path(path)
        if storage_options is not None or (filter and self.writes_directories):
            raise ValueError(
                "checkpoints are written without a CheckpointIO, so there are no storage_options; and filter= is for"
                " one file only: use save_distributed_checkpoint=False"
            )
        self._saving.finish()
        saved: dict[str, Any] = {}
        models: dict[str, Any] = {}
        states = [key for key, value in state.items() if self._is_divided(value)]
        for key, value in state.items():
            found = self._state_of(value)
            chosen = (filter or {}).get(key)
            saved[key] = {name: one for name, one in found.items() if chosen(name, one)} if chosen else found
            if isinstance(value, nn.Module):
                for inner, described in describe_models(value)["models"].items():
                    models[f"{key}.{inner}" if inner else key] = {**described, "entry": key, "prefix": inner}
        self._saving.write({**saved, ENTRY: {"models": models}}, target, states)

    def _is_divided(self, value: Any) -> bool:
        """Whether an entry is a model that is divided, or an optimizer of one."""
        if isinstance(value, nn.Module):
            return bool(parallel_models(value))
        return isinstance(value, Optimizer) and self._optimizers.get(value) is not None

    def _state_of(self, value: Any) -> Any:
        """What is saved of an entry; whole tensors are on rank 0 only."""
        if not self._is_divided(value):
            return value.state_dict() if _is_stateful(value) else value
        if isinstance(value, nn.Module):
            return self._saving.state_of(value)
        owner = self._optimizers[value]
        assert owner is not None
        return self._saving.state_of_optimizer(value, owner)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what is named in ``state``, each rank its part; a checkpoint of either kind, or one of plain Fabric.

        Collective. A module or optimizer by itself is loaded from the file of its bare state dict.

        Returns:
            What was not asked for; whole tensors of it are on the CPU.

        Raises:
            KeyError: under ``strict``, naming the entries that the checkpoint lacks.
            RuntimeError: if a model's names or shapes do not match.
            CheckpointError: if the checkpoint cannot be read.
        """
        source = self._local_path(path)
        self._saving.finish()
        with raise_together(None, f"reading the checkpoint {source}"):
            checkpoint = read_checkpoint(source, weights_only, check=self.is_global_zero)
        checkpoint.pop(ENTRY, None)
        with raise_together(None, f"loading the checkpoint {source}"):
            if isinstance(state, nn.Module | Optimizer):
                self._load(state, checkpoint, strict)
                return {}
            wanted = state or {}
            missing = [key for key in wanted if key not in checkpoint]
            if strict and missing:
                raise KeyError(
                    f"{source} has no {', '.join(map(repr, missing))}, only {', '.join(map(repr, checkpoint))}: leave"
                    " what is missing out of the state, or use strict=False"
                )
            for key, value in list(wanted.items()):
                if key in checkpoint and _is_stateful(value):
                    self._load(value, checkpoint.pop(key), strict)
            read_stored(checkpoint)
            for key in list(wanted.keys() & checkpoint.keys()):
                wanted[key] = checkpoint.pop(key)
        return checkpoint

    def _load(self, value: Any, saved: dict[str, Any], strict: bool) -> None:
        if isinstance(value, nn.Module):
            self.load_module_state_dict(value, saved, strict)
        elif isinstance(value, Optimizer) and (owner := self._optimizers.get(value)) is not None:
            load_full_optimizer_state(value, saved, owner)
            optimizers_to_device([value], self.root_device)
        else:
            value.load_state_dict(saved)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The original model's state dict. Collective."""
        return full_state_dict(module) if parallel_models(module) else module.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Each rank takes its part of every tensor. Not collective."""
        if parallel_models(module):
            load_full_state_dict(module, state_dict, strict)
        else:
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict as one process would have it. Collective."""
        owner = self._optimizers.get(optimizer)
        return optimizer.state_dict() if owner is None else full_optimizer_state(optimizer, owner)

    def _local_path(self, path: str | os.PathLike[str]) -> Path:
        """Rank 0's path. Collective."""
        agreed = self.broadcast(path)
        if "://" in str(agreed):
            raise ValueError(f"{agreed}: fabric.save and fabric.load take paths of files that all ranks see, not URLs")
        return Path(agreed)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
