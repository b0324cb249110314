"""The Lightning strategy: hooks only. What they do lives in functions that know nothing of Lightning.

Order of a run: the Trainer checks the sizes when it is made; processes start; all ranks take rank 0's random state;
``configure_model()`` builds a model without memory; ``setup`` makes it this rank's local model; optimizers are made on
local parameters. From then on every rank of a tensor-parallel group runs the same steps on the same batches, with the
same random numbers (dropout on Invariant tensors must agree), and the data-parallel groups average their gradients.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from transformers import PreTrainedModel

from lightning_autotp.agreement import check_same_batch, check_same_weights, raise_together
from lightning_autotp.checkpoint import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    save_pretrained,
    write_atomically,
)
from lightning_autotp.discovery import fill_remaining, find_models, outermost, parallel_sizes
from lightning_autotp.gradients import average_gradients, clip_gradients_norm
from lightning_autotp.layers.group import TPGroup
from lightning_autotp.pipeline import parallelize
from lightning_autotp.pretrained import meta_model

WHOLE_TENSOR_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers whose update of an element depends on the whole tensor or on all of them."""


class AutoTPStrategy(ModelParallelStrategy):
    """Tensor parallelism for any model, planned from its own graph.

    Ranks ``0 .. tensor_parallel_size - 1`` share one copy of the model, the next ones another copy, and so on.

    Args:
        tensor_parallel_size: ranks that share one copy; ``"auto"``: all devices divided by ``data_parallel_size``.
        data_parallel_size: copies that train on different data and average their gradients; ``"auto"``: one.
        example_inputs: one batch as the model's ``forward`` takes it: a tensor, a tuple of positional arguments, a
            mapping of keyword arguments, or a function without arguments that returns one of these. Not needed for a
            model that takes ``input_ids``; otherwise the LightningModule's ``example_input_array`` serves too.
        checked_batches: how many batches of each stage and epoch are compared over the ranks of a tensor-parallel
            group.
        process_group_backend: by default the one for the device: nccl or gloo.
        timeout: of collectives.

    Raises:
        ValueError: when the Trainer is made, if the sizes do not multiply to the number of devices.
    """

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        example_inputs: Any = None,
        checked_batches: int = 2,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, False, process_group_backend, timeout)
        self._example_inputs = example_inputs
        self._checked_batches = checked_batches
        self._seen_batches: dict[Any, int] = {}
        self._averaging: list[RemovableHandle] = []

    # --- before there are processes ---

    def _configure_launcher(self) -> None:
        devices = self.num_nodes * self.num_processes
        self._tensor_parallel_size, self._data_parallel_size = parallel_sizes(
            devices, self._tensor_parallel_size, self._data_parallel_size
        )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                'precision="16-mixed" scales the loss, and each rank would decide by its own part of the gradients'
                ' whether to skip a step: use precision="bf16-mixed"'
            )
        super()._configure_launcher()

    # --- groups ---

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's copy of the model."""
        return self.device_mesh["tensor_parallel"].get_group()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the other copies."""
        return self.device_mesh["data_parallel"].get_group()

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands us the optimizers' states like any others."""
        return True

    # --- set-up ---

    def setup_environment(self) -> None:
        """Start the process groups, and continue everywhere with rank 0's random state."""
        super().setup_environment()
        self._share_random_state()

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around ``configure_model()``: models are built without memory, and an error on one rank reaches all."""
        with raise_together(None, "building the model in configure_model()"), meta_model():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Make the models local, put them on the device, then make the optimizers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        with raise_together(None, "looking for the model to parallelize"):
            models = find_models(module, self._example_inputs)
        for model, inputs in models:
            check_same_weights(model, None)
            parallelize(model, self.tensor_parallel_group, example_inputs=inputs, device=self.root_device)
        with raise_together(None, "initializing the LightningModule's own parameters"):
            fill_remaining(module)
        self._share_random_state()
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        for metric in module.modules():
            # Ranks of one tensor-parallel group have the same values: counted once.
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self.data_parallel_group
        for handle in self._averaging:
            handle.remove()
        self._averaging = average_gradients(module, self.data_parallel_group)
        if self._data_parallel_size == 1:
            # One copy of the model sees all the data, in the order one process would: Lightning's distributed sampler
            # would only shuffle it, even where the user's does not.
            trainer._accelerator_connector.use_distributed_sampler = False
        self._seen_batches.clear()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and refuse those that cannot work on parts of tensors."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS):
                raise ValueError(
                    f"{type(optimizer).__name__} computes its update from whole tensors, of which a rank has only a"
                    " part: use an elementwise optimizer such as SGD, Adam or AdamW"
                )

    def setup_precision_plugin(self) -> None:
        """Let gradients be clipped by the whole model's norm."""
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def teardown(self) -> None:
        """Leave the precision plugin as it was."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = self.precision_plugin.main_params(optimizer)
        clip_gradients_norm(parameters, TPGroup.of(self.tensor_parallel_group), clip_val)

    def _share_random_state(self) -> None:
        """Rank 0's random state for every rank: in one process it would have been the only one."""
        _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))
        if self.root_device.type == "cuda":
            torch.cuda.set_rng_state(self.broadcast(torch.cuda.get_rng_state(self.root_device)), self.root_device)

    # --- data ---

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed the loader's workers by data-parallel rank, so that one group's ranks augment alike."""
        _auto_add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; the first few of each stage are compared over the tensor-parallel group."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        place = trainer.state.stage, dataloader_idx, trainer.current_epoch
        seen = self._seen_batches.get(place, 0)
        if seen < self._checked_batches:
            self._seen_batches[place] = seen + 1
            where = f"batch {seen} of the {place[0]} data (dataloader {dataloader_idx}, epoch {place[2]})"
            check_same_batch(batch, self.tensor_parallel_group, where)
        return batch

    # --- logging and decisions ---

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks: those of one tensor-parallel group have the same value."""
        return super().reduce(tensor, group if group is not None else self.data_parallel_group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0

    # --- checkpoints: one file, in the original model's coordinates ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict, on global rank 0; empty elsewhere."""
        assert self.lightning_module is not None
        if self.distributed_sampler_kwargs["rank"] > 0:
            return {}
        return full_state_dict(self.lightning_module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's whole state, on global rank 0; empty elsewhere."""
        assert self.lightning_module is not None
        if self.distributed_sampler_kwargs["rank"] > 0:
            return {}
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state(plain, self.lightning_module, keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Global rank 0 writes the file, whole or not at all; an error there reaches all ranks."""
        with raise_together(None, f"writing the checkpoint {filepath}"):
            if (
                "://" in str(filepath)
                or type(self.checkpoint_io) is not TorchCheckpointIO
                or storage_options is not None
            ):
                Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            elif self.is_global_zero:
                write_atomically(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint, mapped: what is not this rank's part of a tensor is never read."""
        path = self.broadcast(checkpoint_path)
        with raise_together(None, f"reading the checkpoint {path}"):
            if "://" in str(path) or type(self.checkpoint_io) is not TorchCheckpointIO:
                return Strategy.load_checkpoint(self, path, weights_only)
            if not Path(path).is_file():
                raise FileNotFoundError(f"checkpoint file {path} does not exist (rank {self.global_rank})")
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each rank takes its part of every tensor."""
        assert self.lightning_module is not None
        with raise_together(None, "loading the checkpoint's weights"):
            load_full_state_dict(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each rank takes its part of every state."""
        assert self.lightning_module is not None
        with raise_together(None, "loading the checkpoint's optimizer states"):
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_full_optimizer_state(optimizer, state, self.lightning_module)
        _optimizers_to_device(self.optimizers, self.root_device)

    def save_pretrained(self, directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write the LightningModule's Hugging Face model so that plain ``from_pretrained`` loads it. Collective.

        Args:
            directory: where to.
            **kwargs: for ``transformers.PreTrainedModel.save_pretrained``.

        Raises:
            ValueError: if the LightningModule does not have exactly one such model.
        """
        assert self.lightning_module is not None
        models = list(outermost(self.lightning_module, PreTrainedModel))
        if len(models) != 1:
            raise ValueError(
                f"{type(self.lightning_module).__name__} has {len(models)} Hugging Face models: call"
                " lightning_autotp.save_pretrained(model, directory) for each of them, on every rank"
            )
        save_pretrained(models[0], directory, write=self.distributed_sampler_kwargs["rank"] == 0, **kwargs)


StrategyRegistry.register(
    "autotp", AutoTPStrategy, description="Tensor parallelism for any model, planned from its own graph", override=True
)
