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
from functools import partial, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autotp.capture.capture import CaptureError
from lightning_autotp.checkpoints.files import read_checkpoint, read_stored
from lightning_autotp.checkpoints.state import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from lightning_autotp.export.from_model import ENTRY, describe_models
from lightning_autotp.gradients.norms import clip_gradients_norm, clip_gradients_value
from lightning_autotp.gradients.sums import postponed_sums
from lightning_autotp.guard.checked import CheckedCalls
from lightning_autotp.guard.guard import guarded_models
from lightning_autotp.guard.state_dicts import refuse_whole_optimizer_states
from lightning_autotp.guard.whole_states import drifts_of
from lightning_autotp.lightning.base import AutoTPBase
from lightning_autotp.lightning.discovery import find_models
from lightning_autotp.lightning.loaders import ComparedFirst, CountedNotes, NotedLoader, seed_workers_by
from lightning_autotp.lightning.models_local import count_copies_once
from lightning_autotp.lightning.optimizers import move_to_local, originals, owner_of, then_compute
from lightning_autotp.optimizers.scaler import agreed_scaling
from lightning_autotp.optimizers.stepping import steps_some_of
from lightning_autotp.parallel.head_product import compute_undone
from lightning_autotp.parameters.host_memory import states_to_parameters
from lightning_autotp.parameters.state import is_parallel, parallel_models
from lightning_autotp.pipeline import FindPlan, LocalModel, make_local
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.private.lightning_private import BackwardSync
from lightning_autotp.private.torch_private import uncompiled
from lightning_autotp.ranks.agreement import check_same_weights, raise_together
from lightning_autotp.ranks.drift import Drift
from lightning_autotp.ranks.started import at_end_of_process
from lightning_autotp.solving.options import documented_by


class _ModelParallelStrategy(ModelParallelStrategy):
    """Fabric's, for a strategy that says itself how a model is made local, in ``setup_module``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda module, _: module, **options)


@documented_by(AutoTPBase)
class AutoTPFabricStrategy(AutoTPBase, _ModelParallelStrategy):
    """Tensor parallelism for any model under Fabric, planned from its own graph.

    Ranks ``0 .. tensor_parallel_size - 1`` share one copy of the model, the next ones another copy, and so on. Ranks of
    one copy run the same loop on the same batches with the same random numbers; both are compared before a model is
    called. The options that are not described here are those of :class:`~lightning_autotp.lightning.base.AutoTPBase`.

    Args:
        checked_batches: how many batches of each pass over a loader are compared over the ranks of a copy before the
            model is called with them in training; later ones are compared in ``optimizer.step()``, before anything is
            changed. A negative number: all.
        checked_steps: how many calls of each model with each kind of arguments begin a watch over the loop, as do the
            10th, the 100th, the 1,000th and every 1,000th, until the next call after a step: an error where its code
            takes this rank's part of a parameter for the whole one (:func:`lightning_autotp.checked`). A negative
            number watches always; 0 never.

    Raises:
        ValueError: if ``tokens_per_step`` is no positive number; when ``Fabric`` is made, if the sizes do not multiply
            to the number of devices; in ``fabric.setup``, if the plan's file is missing or holds none.
    """

    _is_launched = False
    _notes: CountedNotes | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoTPFabricStrategy:
        """The strategy itself: a copy of a module that Fabric has set up refers to it, too."""
        return self

    # --- processes ---

    def setup_environment(self) -> None:
        """Start the processes' groups and the watch, as for the Trainer; what Fabric is given is known from then on."""
        super().setup_environment()
        if not self._is_launched:
            self._is_launched = True
            self._modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
            self._optimizers: WeakKeyDictionary[Optimizer, nn.Module | None] = WeakKeyDictionary()
            self._drifts: WeakKeyDictionary[Optimizer, tuple[Drift, Drift]] = WeakKeyDictionary()
            self._checked_calls = CheckedCalls(self.checked_steps, self._modules)
            self._loaders = 0
            BackwardSync(self, postponed_sums)
            at_end_of_process(self.saving.close, self._end_watch)
        if self.tensor_parallel_group.size() > 1:
            self._notes = CountedNotes(self.tensor_parallel_group, self.root_device, self.checked_batches)

    def _end_watch(self, error: BaseException | None) -> None:
        """Stop watching, because this process ends; tell the others if it is because of an error. Not collective."""
        if self.peers is None:
            return
        if error is not None:
            self.peers.report(error)
        elif self.is_global_zero:
            self.peers.wait_for_others()
        self.peers.close()

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
            if self._is_launched:
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
                    f"{type(module).__name__} is, or contains, a model that was set up already: call fabric.setup or"
                    " fabric.setup_module once, and use what it returns"
                )
            self._refuse_optimizers_of(module)
            models, precision = self._models_of(module), str(self.precision.precision)
            self.prepare((model for model, _ in models), precision)
        made = []
        for model, inputs in models:
            check_same_weights(model, None)
            self.fit_into_memory(model, inputs, precision)
            is_only = len(models) == 1 and not self._modules  # as far as is known: others take memory, too
            made.append(self._make_local(model, inputs, self.finder(inputs if is_only else None, precision)))
        self.fill(module, made, precision)
        count_copies_once(module, self.data_parallel_group)
        for local in made:
            if self._notes is not None:
                local.guard.join(partial(ComparedFirst(self._notes).before, local.module))
            local.guard.join(partial(self._checked_calls.before, local.module), self._checked_calls)
        self._modules[module] = None
        self.measure_steps([model for part in self._modules for model, _ in parallel_models(part)], precision)
        return given

    def _models_of(self, module: nn.Module) -> list[tuple[nn.Module, Any]]:
        if self.models or isinstance(module, LightningModule):
            return find_models(module, self.example_inputs, self.models)
        given = self.example_inputs
        inputs = given() if callable(given) else given
        return [(module, inputs if inputs is not None else getattr(module, "example_input_array", None))]

    def _make_local(self, model: nn.Module, inputs: Any, find: FindPlan) -> LocalModel:
        try:
            return make_local(model, self.tensor_parallel_group, inputs, self.options_here, self.copies, find)
        except CaptureError as error:
            if inputs is not None or is_parallel(model):
                raise
            raise CaptureError(
                f"{error} Fabric does not see your training step before it runs: pass one batch, as the model's forward"
                " takes it, in Fabric(strategy=AutoTPFabricStrategy(example_inputs=...))"
            ) from error

    def _refuse_optimizers_of(self, module: nn.Module) -> None:
        for optimizer in self._optimizers:
            if steps_some_of(optimizer, module.parameters()):
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
            owner = owner_of(optimizer, list(self._modules))
            if owner is None:  # perhaps it is a copy's
                owner = owner_of(optimizer, guarded_models())
            self._optimizers[optimizer] = owner
        if owner is not None:
            refuse_whole_optimizer_states(optimizer, owner)
            self.checked_optimizers.check([(optimizer, owner)])
        return optimizer

    # Lightning refuses ``loss.backward()`` under a strategy with a ``backward`` of its own, which a wrapped one is not.
    @wraps(ModelParallelStrategy.backward)
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Compute gradients of a loss, which the ranks compare with later batches."""
        self.passed()
        if self._notes is not None:
            self._notes.note_loss(tensor)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Make a step; parameter groups added since the last one, such as thawed layers, are checked first."""
        if (owner := self._optimizers.get(optimizer)) is not None:
            self.checked_optimizers.check([(optimizer, owner)])
        if self._notes is not None and self._notes.is_waiting:
            self._notes.compare(self._drifts_of(optimizer))
        if (closure := kwargs.get("closure")) is None:
            compute_undone()  # logits that the loop still has
        else:
            kwargs["closure"] = then_compute(optimizer, closure)
        with agreed_scaling(self.precision):
            result = super().optimizer_step(optimizer, **kwargs)
        self.stepped(optimizer)
        return result

    def _drifts_of(self, optimizer: Optimizer) -> Sequence[Drift]:
        """What compares the whole tensors of an optimizer's model, and its states. Others may be garbage on a rank."""
        owner = self._optimizers.get(optimizer)
        if owner is None:
            return ()
        if optimizer not in self._drifts:
            stepping = ref(optimizer)
            self._drifts[optimizer] = drifts_of(ref(owner), lambda: [stepping()], self.tensor_parallel_group)
        return self._drifts[optimizer]

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the whole model's norm, over all ranks. Collective."""
        self._unscale(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_gradients_norm(module, max_norm, float(norm_type), error_if_nonfinite, parameters=parameters)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp every element."""
        self._unscale(optimizer)
        clip_gradients_value(self.precision.main_params(optimizer), clip_val)

    def _unscale(self, optimizer: Optimizer) -> None:
        with agreed_scaling(self.precision):
            self.precision.unscale_gradients(optimizer)

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
        copies = self.data_parallel_group
        seed_workers_by(dataloader, copies.rank())
        read = self.read_alike(
            dataloader,
            "leave the sampler to fabric.setup_dataloaders, or make it with num_replicas="
            f"{copies.size()} (copies of the model) and rank=fabric.global_rank // {self.tensor_parallel_group.size()}",
        )
        if self._notes is None:
            return read
        name = f"dataloader {self._loaders}"
        self._loaders += 1
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
        if storage_options is not None or (filter and self.saving.directories):
            raise ValueError(
                "checkpoints are written without a CheckpointIO, so there are no storage_options; and filter= is for"
                " one file only: use save_distributed_checkpoint=False"
            )
        self.saving.finish()
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
        self.saving.write({**saved, ENTRY: {"models": models}}, target, states)

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
            return self.saving.state_of(value)
        owner = self._optimizers[value]
        assert owner is not None
        return self.saving.state_of_optimizer(value, owner)

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
        self.saving.finish()
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
            states_to_parameters([value], self.root_device)
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
