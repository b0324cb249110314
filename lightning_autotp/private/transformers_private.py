"""What is used of transformers that it does not promise to keep: how it loads and saves weights.

The rest of the package imports it from here, and ``tests/private`` asks each of these names for what is relied
on. What ``from_pretrained`` and ``save_pretrained`` do is public, but only for whole tensors: their steps are not.
"""
# ruff: noqa: E402

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_autotp.private.torch_private import replaced

# transformers imports torchao wherever that is installed, and with it come warnings, from each process, of kernels for
# other devices than this machine's, and of what torch will do without one day.
_TALKATIVE = {logger: logger.level for logger in map(logging.getLogger, ("torchao", "torch.utils._pytree"))}
for _logger in _TALKATIVE:
    _logger.setLevel(logging.ERROR)
from transformers import PreTrainedModel, modeling_utils

for _logger, _level in _TALKATIVE.items():
    _logger.setLevel(_level)

# A cache of keys and values, and its parts.
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

# The conversions that an architecture's checkpoints go through.
from transformers.conversion_mapping import get_model_conversion_mapping

# The step of from_pretrained that renames, merges, splits and casts weights, and the one of save_pretrained that undoes
# it.
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion

# Saves the code of a user's own class beside the weights.
from transformers.dynamic_module_utils import custom_object_save

# Which of tied weights are saved.
from transformers.modeling_utils import remove_tied_weights_from_state_dict

# A tokenizer's class, to copy its files without making one of them (AutoTokenizer would).
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

# How files are called.
from transformers.tokenization_utils_base import (
    ADDED_TOKENS_FILE,
    FULL_TOKENIZER_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
)

# Whether a model's code sees fake tensors, which it takes for a trace. Nothing public.
from transformers.utils import (
    FEATURE_EXTRACTOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    VIDEO_PROCESSOR_NAME,
    hub,
    import_utils,
)
from transformers.utils.hub import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE

__all__ = [
    "SAFE_WEIGHTS_INDEX_NAME",
    "TOKENIZER_CONFIG_FILE",
    "convert_and_load_state_dict_in_model",
    "custom_object_save",
    "get_model_conversion_mapping",
    "remove_tied_weights_from_state_dict",
    "revert_weight_conversion",
    "tokenizer_class_from_name",
]

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # derived classes choose which

TOKENIZER_FILES = frozenset({
    TOKENIZER_CONFIG_FILE, FULL_TOKENIZER_FILE, SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE, CHAT_TEMPLATE_FILE,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_DIR, FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
})  # fmt: skip
"""The files and directories of tokenizers and processors, but for vocabularies."""

INITIALIZES = ("_init_weights",)
"""A model's method that fills in a module's weights: what all others that do so call, and ``model.apply`` is given."""


@contextmanager
def with_loading_step(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, ``from_pretrained`` reads weights by what ``replace`` makes of its own step.

    The step is called with ``model, state_dict, checkpoint_files``, a ``LoadStateDictConfig`` and keyword arguments. It
    returns a ``LoadStateDictInfo``, from which ``from_pretrained`` goes on to initialize, tie and report, and one thing
    more.
    """
    made = staticmethod(replace(PreTrainedModel._load_pretrained_model))
    with replaced(PreTrainedModel, _load_pretrained_model=made):
        yield


def asks_hub_by_own_functions() -> bool:
    """Whether transformers asks the Hub by its own functions, not inside :func:`with_hub_functions`."""
    return hub.cached_files.__module__ == hub.__name__


@contextmanager
def with_hub_functions(
    files: Callable[[Callable[..., Any]], Callable[..., Any]],
    has_file: Callable[[Callable[..., Any]], Callable[..., Any]],
    commit: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Within it, transformers asks the Hub by what the arguments make of its own functions; nothing public would do.

    Args:
        files: of ``cached_files(path_or_repo_id, filenames, ...)``, by which ``cached_file`` gets a single file too.
        has_file: of ``has_file(path_or_repo, filename, ...)``.
        commit: of ``HfApi.resolve_revision(repo_id, revision=..., ...)``, if there is one: older versions have none.
    """
    api = hub.hf_api()
    asked = {"resolve_revision": commit(api.resolve_revision)} if hasattr(api, "resolve_revision") else {}
    with (
        replaced(hub, cached_files=files(hub.cached_files)),
        replaced(modeling_utils, has_file=has_file(modeling_utils.has_file)),
        replaced(api, **asked),
    ):
        yield


def conversions_of(model: nn.Module) -> list[Any] | None:
    """The conversions that a model's checkpoint went through while it was loaded, ``None`` if it was not loaded."""
    return getattr(model, "_weight_conversions", None)


def set_conversions_of(model: nn.Module, conversions: list[Any] | None) -> None:
    """What :func:`revert_weight_conversion` is to undo."""
    model._weight_conversions = conversions  # type: ignore[assignment]


def conversion_key(conversion: Any) -> list[Any]:
    """What tells a conversion from others, as plain data: its kind, the names it takes and gives, and where it acts."""
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    return [type(conversion).__name__, list(sources), list(targets), conversion.scope_prefix]


def names_not_saved(model: PreTrainedModel) -> set[str]:
    """Weights that ``save_pretrained`` leaves out."""
    return set(model._keys_to_ignore_on_save or ())


WAITS_FOR_COPIES = "_is_fsdp_managed_module"
"""The attribute by which ``model.generate()`` goes on until every copy of the model has its text, as with FSDP.

``generate(synced_gpus=...)`` is public and would do, if it were given with every call.
"""


@contextmanager
def fake_tensors_as_ordinary() -> Iterator[None]:
    """Within it models take the ways that they take in training, though tensors are fake: no masks for all cases."""
    with replaced(import_utils, is_fake_tensor=lambda x: False):
        yield


class TrainerSteps(Trainer):
    """Before a ``Trainer`` among a class's bases: steps of its checkpoints, by names that a derived class may override.

    Nothing public is between the whole checkpoint and the files of one process: callbacks come after all of it.
    """

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.save_training_state(output_dir)

    def save_training_state(self, directory: str) -> None:
        """Write what ``optimizer.state_dict()`` gives, and the scheduler's state, where ``args.should_save``."""
        super()._save_optimizer_and_scheduler(directory)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.load_training_state(checkpoint)

    def load_training_state(self, directory: str | None) -> None:
        """Give the optimizer and the scheduler what was written, if it was."""
        super()._load_optimizer_and_scheduler(directory)

    def _save_rng_state(self, output_dir: str) -> None:
        self.save_random_state(output_dir)

    def save_random_state(self, directory: str) -> None:
        """Write this process's random state, whichever process it is."""
        super()._save_rng_state(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.load_weights(self.state.best_model_checkpoint)

    def load_weights(self, directory: str) -> None:
        """Load the model's weights from a checkpoint."""
        super()._load_from_checkpoint(directory)


def slots_of_cache(value: Any) -> list[list[Any]] | None:
    """For each layer the parts of a cache that only its calls change; ``None`` for anything else.

    A cache that makes its parts when it needs them, or moves them to the host meanwhile, is something else.
    """
    if type(value) is EncoderDecoderCache:
        of_itself, of_encoder = map(slots_of_cache, (value.self_attention_cache, value.cross_attention_cache))
        if of_itself is None or of_encoder is None:
            return None
        return [one + other for one, other in zip(of_itself, of_encoder, strict=False)]
    if type(value) is not DynamicCache or value.offloading or value.layer_class_to_replicate is not None:
        return None
    return [[part] for part in value.layers]


def said_of_slots(value: Any) -> dict[int, Any]:
    """What a cache says of its slots, by the number of the layer: whether the encoder's states are in them."""
    return value.is_updated if type(value) is EncoderDecoderCache else {}
