"""transformers' ``Trainer``, and trainers derived from it such as TRL's, on a model that ``parallelize`` has divided.

A Trainer takes every process for a copy of the model: each gets its own batches, gradients and losses are averaged over
all of them, and the first one alone writes checkpoints. The ranks of one tensor-parallel model are not copies. Together
they do what a single process would, so each of them is told that it is the only one, and its Trainer does everything as
one process does: the same batches in the same order, gradient accumulation, the scheduler, evaluation.

Three things are left. The norm of the gradients is the whole model's. Batches and random generators are compared before
each step. Checkpoints are written from whole tensors and read into parts, so one process resumes from a checkpoint of
several ranks, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autotp.building.checkpoint_reading import MismatchError, MissingFileError
from lightning_autotp.checkpoints.state import full_optimizer_state, load_full_optimizer_state, load_full_state_dict
from lightning_autotp.checkpoints.stored import original_shape
from lightning_autotp.export.adapters import find_adapted, save_adapter
from lightning_autotp.export.from_model import save_pretrained
from lightning_autotp.gradients.norms import clip_gradients_norm
from lightning_autotp.guard.on_parts import check_optimizer
from lightning_autotp.guard.whole_states import drifts_of
from lightning_autotp.parallel.embedding import VocabParallelEmbedding
from lightning_autotp.parameters.state import ParameterTable, model_group, parallel_models
from lightning_autotp.private.torch_private import replaced
from lightning_autotp.private.transformers_private import TrainerSteps
from lightning_autotp.ranks.agreement import raise_together
from lightning_autotp.ranks.consistency import ReplicaConsistency

if TYPE_CHECKING:
    from transformers import TrainingArguments


class AutoTPTrainerMixin(TrainerSteps):
    """Before ``transformers.Trainer`` among the bases of a class, it trains a model that ``parallelize`` has divided.

    .. code-block:: python

        class Trainer(AutoTPTrainerMixin, transformers.Trainer): ...

    All processes share one copy of the model. Start them with ``torchrun``. While there is one of these, accelerate
    takes each process for the only one, but still only the first one for the main process, which logs and writes.

    Args:
        model: a parallel model.
        args: the training's settings, by name.
        **options: the Trainer's other arguments, by name.

    Raises:
        TypeError: if the model is not parallel.
        ValueError: if the model is not shared by all processes, or for settings that would divide it once more or
            would let a rank decide by itself.
    """

    model: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, model: nn.Module, *, args: TrainingArguments, **options: Any) -> None:
        if not (isinstance(model, nn.Module) and parallel_models(model)):
            raise TypeError(
                f"{type(self).__name__} takes a model that lightning_autotp.parallelize(model, process_group) was"
                f" called with, not a {type(model).__name__} as it is"
            )
        _refuse_settings(args, model)
        _take_for_alone(self)
        loading: Any = args.accelerator_config
        loading.dispatch_batches = False  # one process would read streams for all
        super().__init__(model, args=args, **options)
        for used in (model, options.get("ref_model")):
            if isinstance(used, nn.Module) and parallel_models(used):
                _refuse_other_heads(used)

        def clip(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            return clip_gradients_norm(model, max_norm, norm_type, parameters=parameters)

        self.accelerator.clip_grad_norm_ = clip
        group = model_group(model).process_group
        self.given = ReplicaConsistency(group, args.device)
        self.drifts = drifts_of(lambda: model, lambda: [self.optimizer and _innermost(self.optimizer)], group)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As one process makes it: workers of all ranks draw the same random numbers."""
        with replaced(PartialState(), process_index=0):
            return super().get_train_dataloader()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any) -> Tensor:
        """A step on a batch, which is compared over the ranks first, and so are the random generators; its loss later.

        Collective.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        self.given.note(inputs, f"a batch of step {self.state.global_step}")
        self.given.compare()
        self.given.note_whole(self.drifts)
        loss = super().training_step(model, inputs, *others)
        self.given.note_loss(loss)
        return loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
        """The same for evaluation and prediction.

        Raises:
            RuntimeError: on every rank, if any two ranks differ.
        """
        self.given.note(inputs, f"a batch of an evaluation in step {self.state.global_step}")
        self.given.compare()
        return super().prediction_step(model, inputs, *others, **options)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, which must not need more of a tensor than this rank's part. Collective.

        Raises:
            ValueError: if it does.
        """
        made: torch.optim.Optimizer = super().create_optimizer(model)
        with raise_together(None, "checking the optimizer"):
            check_optimizer(made, self.model)
        return made

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Those that the Trainer estimates for the whole model, which logs and ``trainer_state.json`` have."""
        of_rank: int = super().floating_point_ops(inputs)
        local, whole = _numbers_of_parameters(self.model)
        return of_rank * whole // max(local, 1)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face directory of the whole model, or of its adapters. Collective."""
        directory = output_dir or str(self.args.output_dir)
        if find_adapted(self.model) is not None:
            save_adapter(self.model, directory, every_process=True)
        else:
            save_pretrained(self.model, directory, every_process=True)
        with raise_together(None, f"writing to {directory}"):
            if self.args.should_save:
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(directory)
                torch.save(self.args, Path(directory) / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_training_state(self, directory: str) -> None:
        """Write the optimizer's state of whole tensors, and the scheduler's. Collective."""
        state = full_optimizer_state(_innermost(self.optimizer), self.model, keep=self.args.should_save)
        whole = SimpleNamespace(state_dict=lambda: state)
        with raise_together(None, f"writing the optimizer's state to {directory}"), replaced(self, optimizer=whole):
            super().save_training_state(directory)

    def load_training_state(self, directory: str | None) -> None:
        """Load this rank's part of the optimizer's state, and the scheduler's. Collective."""
        own = _innermost(self.optimizer)
        part = SimpleNamespace(load_state_dict=lambda state: load_full_optimizer_state(own, state, self.model))
        with raise_together(None, f"loading the optimizer's state from {directory}"), replaced(self, optimizer=part):
            super().load_training_state(directory)

    def save_random_state(self, directory: str) -> None:
        """Write the first rank's: it is every rank's. Collective."""
        with raise_together(None, f"writing the random state to {directory}"):
            if self.args.should_save:
                super().save_random_state(directory)

    def load_weights(self, directory: str) -> None:
        """Load this rank's part of the model, or of its adapters. Collective.

        Raises:
            CheckpointError: if the files are not of this model.
        """
        with raise_together(None, f"loading the weights from {directory}"):
            _load_weights(self.model, Path(directory))


_TRAINERS = WeakSet[AutoTPTrainerMixin]()
_AS_SEVERAL: dict[str, Any] = {}
"""What accelerate had recorded before the first of them."""


def _take_for_alone(trainer: AutoTPTrainerMixin) -> None:
    """Let accelerate take each process for the only one, as long as there is such a Trainer."""
    alone = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": dist.get_rank()}
    record = vars(PartialState())  # shared by all of its instances
    if not _TRAINERS:
        _AS_SEVERAL.update({name: record[name] for name in alone})
    record.update(alone)
    finalize(trainer, _as_several_again)  # called after what a set registers later
    _TRAINERS.add(trainer)


def _as_several_again() -> None:
    if not _TRAINERS:
        vars(PartialState()).update(_AS_SEVERAL)


def _refuse_settings(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse what would divide the model once more, change it, or let one rank go another way than its peers.

    Raises:
        ValueError: saying what to do instead.
    """
    ranks, processes = model_group(model).size, dist.get_world_size()
    if ranks != processes:
        raise ValueError(
            f"the model is divided over {ranks} of {processes} processes, and a transformers Trainer trains one copy of"
            ' a parallel model, which all processes share: for several copies use strategy="autotp" of Lightning\'s'
            " Trainer or of Fabric"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this process would use {args.n_gpu} GPUs: start one process for each GPU, with torchrun"
            f" --nproc-per-node {args.n_gpu}"
        )
    refused = [name for name in _REFUSED if getattr(args, name, None)]
    if refused:
        raise ValueError(
            f"TrainingArguments({', '.join(refused)}) does not work with a parallel model: {_REFUSED[refused[0]]}"
        )
    checkpoints = getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing
    if checkpoints and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "TrainingArguments would turn on activation checkpointing after the model was divided and proved: call"
            " model.gradient_checkpointing_enable() before parallelize(model, process_group)"
        )


_REFUSED = {
    "fsdp": "it would divide the model once more",
    "deepspeed": "it would divide the model once more",
    "parallelism_config": "it would divide the model once more",
    "fp16": "each rank would skip steps by its own gradients. Use bf16",
    "auto_find_batch_size": "one rank would start again without the others",
}
"""Settings of TrainingArguments, and why each cannot be used."""


def _refuse_other_heads(model: nn.Module) -> None:
    """TRL's trainers put a forward in a model's place that computes log-probabilities from the head's weight itself.

    Raises:
        ValueError: if that weight is a part.
    """
    table = ParameterTable(model)
    for module in model.modules():
        if "forward" not in vars(module) or not hasattr(module, "get_output_embeddings"):
            continue
        get_head: Any = module.get_output_embeddings
        meta = table.meta(getattr(get_head(), "weight", None))
        if meta is not None and meta.is_parallel:
            raise ValueError(
                f"this trainer replaces {type(module).__name__}.forward by one that uses {meta.name} without its layer,"
                " and each rank has a part of it. Keep it whole:"
                f" parallelize(model, process_group, keep_whole=[{meta.name!r}])"
            )


def _numbers_of_parameters(model: Any) -> tuple[int, int]:
    """Elements of this rank's parameters as the Trainer counts them, and of the whole model's without embeddings."""
    table = ParameterTable(model)
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | VocabParallelEmbedding)
    }
    shapes = [original_shape(each, table.meta(each)) for each in model.parameters() if id(each) not in embeddings]
    return model.num_parameters(exclude_embeddings=True), sum(map(math.prod, shapes))


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _load_weights(model: nn.Module, directory: Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise MissingFileError(f"{directory} has no *.safetensors files to resume {type(model).__name__} from")
    # Mapped into memory: of each tensor only this rank's part is read.
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    own = model.state_dict(keep_vars=True)
    names = dict(zip(own, own, strict=True)) if (peft := find_adapted(model)) is None else _names_in_files(peft, own)
    state = {name: saved[name_in_file] for name, name_in_file in names.items() if name_in_file in saved}
    loaded = {id(own[name]) for name in state}  # of tied tensors, files have one
    missing = sorted(name for name in names if id(own[name]) not in loaded)
    unknown = sorted(saved.keys() - names.values())
    if missing or unknown:
        raise MismatchError(
            f"the files in {directory} are not of this {type(model).__name__}: missing {missing}, unknown {unknown}. A"
            " model whose weights transformers renames or merges while it loads them cannot be resumed in its Trainer"
        )
    load_full_state_dict(model, state, strict=False)


def _names_in_files(model: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """The names that PEFT writes an adapter's tensors by, for each name of theirs in the model."""
    from peft import get_peft_model_state_dict

    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    written = {id(value): name for name, value in get_peft_model_state_dict(model, state_dict=dict(tensors)).items()}
    return {name: written[id(value)] for name, value in tensors.items() if id(value) in written}
