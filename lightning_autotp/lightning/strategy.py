"""The Lightning strategy: hooks only. What they do lives in functions that know nothing of Lightning.

Order of a run: the Trainer checks the sizes when it is made; processes start; all ranks take rank 0's random state;
``configure_model()`` builds a model without memory; ``setup`` makes it this rank's local model; optimizers are made on
local parameters. From then on every rank of a tensor-parallel group runs the same steps on the same batches, with the
same random numbers (dropout on Invariant tensors must agree), and the data-parallel groups average their gradients.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer import call as calls_of_hooks
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_autotp.capture.capture import ExampleCall
from lightning_autotp.checkpoints.files import open_checkpoint
from lightning_autotp.checkpoints.state import load_full_optimizer_state, load_full_state_dict
from lightning_autotp.export.adapters import find_adapted, save_adapter
from lightning_autotp.export.from_model import ENTRY, describe_models, save_pretrained
from lightning_autotp.gradients.data_parallel import gather_if_uneven, in_parts_again
from lightning_autotp.gradients.norms import clip_gradients_norm, clip_gradients_value
from lightning_autotp.gradients.sums import postponed_sums
from lightning_autotp.guard.checked import FirstSteps, checked
from lightning_autotp.lightning.averaging import refuse_whole_copies
from lightning_autotp.lightning.base import AutoTPBase
from lightning_autotp.lightning.batch_boundary import BatchBoundarySync
from lightning_autotp.lightning.discovery import find_models, outermost
from lightning_autotp.lightning.models_local import count_as_before, count_copies_once, make_models_local
from lightning_autotp.lightning.optimizers import then_compute
from lightning_autotp.lightning.summary import ParallelSummary
from lightning_autotp.lightning.throughput import share_batches
from lightning_autotp.optimizers.scaler import agreed_scaling
from lightning_autotp.parameters.host_memory import states_to_parameters
from lightning_autotp.pipeline import FindPlan, find_plan
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.private.lightning_private import (
    DeferredSignals,
    add_worker_init_fn,
    summarize_with,
    syncs_batch_norms,
    without_distributed_sampler,
)
from lightning_autotp.private.torch_private import is_compiled, replaced
from lightning_autotp.private.transformers_private import PreTrainedModel
from lightning_autotp.proving.call_kinds import Arguments
from lightning_autotp.ranks.agreement import raise_together
from lightning_autotp.solving.options import documented_by


@documented_by(AutoTPBase)
class AutoTPStrategy(AutoTPBase, ModelParallelStrategy):
    """Tensor parallelism for any model, planned from its own graph.

    Ranks ``0 .. tensor_parallel_size - 1`` share one copy of the model, the next ones another copy, and so on. The
    options that are not described here are those of :class:`~lightning_autotp.lightning.base.AutoTPBase`.

    Args:
        checked_batches: how many training batches of each epoch are compared over the ranks of a tensor-parallel group
            before they are used. Later ones are compared before the next one, with an exchange that is there anyway.
        checked_steps: how many of the first steps of each stage, with each kind of batch, run under
            :func:`lightning_autotp.checked`, as do the 10th, the 100th, the 1,000th and every 1,000th: an error where
            the LightningModule's own code takes this rank's part of a parameter for the whole one. A negative number
            checks all; 0 none. Models that ``torch.compile`` has compiled are not checked.

    Raises:
        ValueError: if ``tokens_per_step`` is no positive number; when the Trainer is made, if the sizes do not multiply
            to the number of devices; when it starts, if the plan's file is missing or holds none.
        RuntimeError: when the Trainer starts, if processes cannot be started, as in a notebook, or other machines not
            be found.
    """

    _exchange: BatchBoundarySync | None = None
    _signals: DeferredSignals | None = None
    _watch: checked | None = None  # from a training step to the next one
    _interrupted_by: BaseException | None = None
    _averaging: Sequence[RemovableHandle] = ()
    _callbacks: Sequence[Callback] = ()
    _as_before = ExitStack()  # puts back what a run has changed of the user's; each run has its own

    @property
    def _module(self) -> LightningModule:
        """What is trained, or evaluated."""
        assert self.lightning_module is not None
        return self.lightning_module

    # --- set-up ---

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands us the optimizers' states like any others."""
        return True

    def setup_environment(self) -> None:
        """Start the processes' groups and the watch, as for Fabric, unless the run has what several ranks cannot do."""
        refuse_whole_copies(self._module.trainer.callbacks)  # type: ignore[attr-defined]
        if syncs_batch_norms(self) and self.data_ranks != 1:
            raise ValueError(
                "sync_batchnorm=True: batch statistics over several copies of the model are not supported. Leave it"
                " out, and each copy normalizes by the statistics of its own batch, or train one copy"
                " (data_parallel_size=1), which is exact without it"
            )
        self._interrupted_by = None
        super().setup_environment()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For the batches of an accumulation but the last: sums over the ranks that can wait are left to that one."""
        with super().block_backward_sync(), postponed_sums(self._module):
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before the gradients of a loss: the ranks compare it between later batches."""
        super().pre_backward(closure_loss)
        self.passed()
        if self._exchange is not None:
            self._exchange.note_loss(closure_loss)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model()``: models are built without memory, and an error on one rank reaches all."""
        with raise_together(None, "building the model in configure_model()"), meta_model():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Make the models local, put them on the device, then make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._as_before = ExitStack()
        module = self._module
        precision, is_fitting = str(self.precision_plugin.precision), trainer.state.fn == TrainerFn.FITTING
        # Before the models are traced, with inputs of the precision's dtype, and before their parameters take memory.
        self.model = self.precision_plugin.convert_module(module)
        with raise_together(None, "looking for the model to parallelize"):
            models = find_models(module, self.example_inputs, self.models)
            self.prepare((model for model, _ in models), precision)
        if self.activation_checkpointing == "auto" and len(models) > 1:
            raise ValueError(
                f'activation_checkpointing="auto" is for one model, but {type(module).__name__} has {len(models)}: say'
                ' "blocks" or None'
            )
        if self.plan_options.plan is not None and len(models) > 1:
            raise ValueError(
                f"plan= is of one model, but {type(module).__name__} has {len(models)}: leave it out, and pin with"
                " keep_whole= and cut="
            )
        if self.world_size > 1:
            groups = self.tensor_parallel_group, self.data_parallel_group
            self._exchange = BatchBoundarySync(trainer, *groups, self.root_device, self.checked_batches)
            self._signals = DeferredSignals(trainer, self._exchange)
        accumulates = trainer.accumulate_grad_batches > 1

        def fit_into_memory(model: nn.Module, example: Any) -> FindPlan:
            if not is_fitting:
                return find_plan
            self.fit_into_memory(model, example, precision, accumulates)
            return self.finder(example if len(models) == 1 else None, precision, accumulates)

        group, options = self.tensor_parallel_group, self.options_here
        made = make_models_local(trainer, models, group, self.copies, options, fit_into_memory)
        for handle in self._averaging:
            handle.remove()
        self._averaging = self.fill(module, made, precision)
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for held in (module, *(value for callback in self._callbacks for value in vars(callback).values())):
            if isinstance(held, nn.Module):
                self._as_before.callback(count_as_before, count_copies_once(held, self.data_parallel_group))
        if self.data_ranks == 1:
            # One copy of the model sees all the data, in the order one process would: Lightning's distributed sampler
            # would only shuffle it, even where the user's does not.
            self._as_before.enter_context(without_distributed_sampler(trainer))
        self._first_steps = FirstSteps(self.checked_steps)
        self._as_before.enter_context(summarize_with(ParallelSummary, self._callbacks))
        share_batches(self._callbacks, self.tensor_parallel_group.size())
        self.barrier()
        if is_fitting:
            self.setup_optimizers(trainer)
            self.measure_steps([model for model, _ in models], precision)
        self.setup_precision_plugin()
        if is_fitting:
            states_to_parameters(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and refuse those that cannot work on parts of tensors."""
        super().setup_optimizers(trainer)
        self.checked_optimizers.forget()
        self._check_optimizers()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make a step; parameter groups added since the last one, such as thawed layers, are checked first."""
        self._check_optimizers()
        result = super().optimizer_step(optimizer, then_compute(optimizer, closure), model, **kwargs)
        self.stepped(optimizer)
        return result

    def _check_optimizers(self) -> None:
        self.checked_optimizers.check([(optimizer, self._module) for optimizer in self.optimizers])

    def setup_precision_plugin(self) -> None:
        """Let gradients be clipped by the whole model's norm, and loss scaling be agreed on."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        clips = {"clip_grad_by_norm": self._clip_by_norm, "clip_grad_by_value": self._clip_by_value}
        self._as_before.enter_context(replaced(plugin, **clips))
        self._as_before.enter_context(agreed_scaling(plugin))

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, which may be waiting for this one."""
        self._interrupted_by = exception
        if self.peers is not None and not self._raised_by_all(exception):
            self.peers.report(exception)

    def _raised_by_all(self, exception: BaseException) -> bool:
        return self._signals is not None and exception is self._signals.agreed

    def after_run(self) -> None:
        """All hooks of a run are over: wait for the other ranks, which may have failed in one, then stop watching."""
        if self.peers is not None:
            if self._signals is not None:
                self._signals.between_batches()  # an exchange
            self.peers.close()
            self.observe_processes(True)

    def teardown(self) -> None:
        """Finish what is being saved, and leave the precision plugin, the callbacks and the Trainer as they were."""
        self._end_watch()
        self._as_before.close()
        try:
            self.saving.close()
        finally:
            if self._signals is not None:
                self._signals.restore()
            if self.peers is not None and self._interrupted_by is not None:
                if self._raised_by_all(self._interrupted_by):
                    self.barrier()  # a launcher may end all processes when the first one has ended
                self.peers.close()
            super().teardown()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_norm(self._module, clip_val, parameters=self.precision_plugin.main_params(optimizer))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_value(self.precision_plugin.main_params(optimizer), clip_val)

    # --- data ---

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed the loader's workers by data-parallel rank, so that one group's ranks augment alike; or read once."""
        add_worker_init_fn(dataloader, self.data_parallel_group.rank())
        return self.read_alike(
            dataloader,
            "make it with the strategy's numbers,"
            " `DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs)`, or leave it to"
            " Lightning (Trainer(use_distributed_sampler=True))",
        )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, and compare it over the tensor-parallel group, at once or with the next exchange."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._exchange is not None:
            self._exchange.note(batch, dataloader_idx)
        return batch

    def on_predict_start(self) -> None:
        """Rows to predict are not padded: the copies of the model may have different numbers of batches."""
        if self.data_ranks != 1:
            batches = self._module.trainer.predict_loop.max_batches
            gather_if_uneven(self._module, batches, self.data_parallel_group)

    def on_predict_end(self) -> None:
        """From now on the copies are called equally often again."""
        if self.data_ranks != 1:
            in_parts_again(self._module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step; the first of a kind are watched, and hooks until the next one. Batches that it reads are compared.

        Of batches whose gradients are accumulated, the next one is that after the optimizer's step. Where hooks of an
        epoch's end or of validation come after a batch, it is of another kind.
        """
        trainer = self._module.trainer
        if self._watch is not None and self._watch.is_complete:
            self._end_watch()
        loop = trainer.fit_loop
        number = 1 + (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx)
        next_hooks = trainer.is_last_batch, number % (trainer.val_check_batch or math.inf) == 0
        if self._watch is None and self._is_watched(("training", *next_hooks), args):
            self._watch = checked(self._module)
            self._watch.begin(hooks=str(calls_of_hooks.__file__))
        output = super().training_step(*self._noting(args), **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and self._module.automatic_optimization and self.world_size > 1:
            raise RuntimeError(
                f"{type(self._module).__name__}.training_step returned no loss, and several processes cannot skip a"
                ' step. A Hugging Face model computes one only where its batch has labels: {"input_ids": ids,'
                ' "labels": ids} for a causal language model. Otherwise return what you compute from its logits'
                " (lightning_autotp.losses)"
            )
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of validation, unless the job has been asked to end; the first of a kind are watched."""
        self._between_batches()
        with self._watch_step("validation", args):
            return super().validation_step(*self._noting(args), **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of testing, unless the job has been asked to end; the first of a kind are watched."""
        self._between_batches()
        with self._watch_step("test", args):
            return super().test_step(*self._noting(args), **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of prediction, unless the job has been asked to end; the first of a kind are watched."""
        # Copies of the model may have different numbers of batches.
        self._between_batches(everyone=self.data_ranks == 1)
        with self._watch_step("prediction", args):
            return super().predict_step(*self._noting(args), **kwargs)

    def _watch_step(self, stage: str, args: Any) -> AbstractContextManager[Any]:
        """A watch over the step, if it is one of the first with such a batch in its stage."""
        return checked(self._module) if self._is_watched(stage, args) else nullcontext()

    def _is_watched(self, when: Hashable, args: Any) -> bool:
        kind = Arguments(ExampleCall(args[:1], {})).kind
        return self._first_steps.has_one((when, kind)) and not is_compiled(self._module)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _between_batches(self, everyone: bool = True) -> None:
        if self._signals is not None:
            self._signals.between_batches(everyone)

    def _noting(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self._exchange is None else self._exchange.noting(args)

    # --- collectives ---

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the copies of the model: the ranks of one copy have the same value, which counts once."""
        return super().reduce(tensor, self.over_copies(group), reduce_op)

    # --- checkpoints: in the original model's coordinates ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict: whole on global rank 0 and empty elsewhere, or held tensors for a distributed checkpoint."""
        if (error := sys.exc_info()[1]) is not None:
            # A callback saves because of an error: if it is this rank's alone, the others wait elsewhere.
            self.on_exception(error)
        return self.state_of(self._module)

    def state_of(self, module: nn.Module) -> dict[str, Any]:
        """As :meth:`lightning_module_state_dict`, of any module with the parallel model's parameters. Collective."""
        return self.saving.state_of(module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state: whole on global rank 0 and empty elsewhere, or held tensors. Collective."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.saving.state_of_optimizer(plain, self._module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, whole or not at all; an error on one rank reaches all. Collective.

        With ``save_async`` the error of a save is raised at the next one, or at the end of the run.
        """
        path = self.broadcast(filepath)
        self.saving.finish()
        checkpoint[ENTRY] = describe_models(self._module)
        if "://" in str(path) or type(self.checkpoint_io) is not TorchCheckpointIO or storage_options is not None:
            with raise_together(None, f"writing the checkpoint {path}"):
                if self.saving.directories:
                    raise ValueError(
                        f"a distributed checkpoint is written to a directory that all ranks see, not to {path} or by a"
                        " CheckpointIO plugin: use save_distributed_checkpoint=False"
                    )
                Strategy.save_checkpoint(self, checkpoint, path, storage_options)
            return
        may_wait = self._module.trainer.training
        self.saving.write(checkpoint, Path(path), ("state_dict", "optimizer_states"), may_wait)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before the one that is being written in the background is finished."""
        if not self.saving.after(lambda: Strategy.remove_checkpoint(self, filepath)):
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint of either kind: what is not this rank's part of a tensor is never read.

        Code that it names is run only with ``weights_only=False``, also where Lightning's own default for URLs is that.
        """
        path = self.broadcast(checkpoint_path)
        self.saving.finish()
        with raise_together(None, f"reading the checkpoint {path}"):
            if "://" in str(path) or type(self.checkpoint_io) is not TorchCheckpointIO:
                return Strategy.load_checkpoint(self, path, weights_only is not False)
            return open_checkpoint(Path(path), weights_only, check=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each rank takes its part of every tensor."""
        with raise_together(None, "loading the checkpoint's weights"):
            load_full_state_dict(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of every state."""
        with raise_together(None, "loading the checkpoint's optimizer states"):
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_full_optimizer_state(optimizer, state, self._module)
        states_to_parameters(self.optimizers, self.root_device)

    def save_pretrained(self, directory: str | os.PathLike[str], model: nn.Module | None = None, **kwargs: Any) -> None:
        """Write the LightningModule's Hugging Face model so that plain ``from_pretrained`` loads it. Collective.

        Of a model with PEFT adapters, only these are written, in PEFT's format.

        Args:
            directory: where to.
            model: which of the LightningModule's models; only needed if it has several.
            **kwargs: for :func:`~lightning_autotp.export.adapters.save_adapter`, or for
                :func:`lightning_autotp.save_pretrained`, such as ``max_shard_size`` and ``dtype``.

        Raises:
            ValueError: if it is not clear which model to write.
        """
        write = self.data_parallel_group.rank() == 0
        if (adapted := find_adapted(model or self._module)) is not None:
            return save_adapter(adapted, directory, write=write, every_process=True, **kwargs)
        models = [model] if model is not None else list(outermost(self._module, PreTrainedModel))
        if len(models) != 1:
            raise ValueError(
                f"{type(self._module).__name__} has {len(models)} Hugging Face models: name one, as in"
                " trainer.strategy.save_pretrained(directory, model=module.model)"
            )
        save_pretrained(models[0], directory, write=write, every_process=True, **kwargs)
