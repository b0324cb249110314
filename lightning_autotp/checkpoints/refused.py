"""A model's own ways to save itself, which know nothing of other ranks: errors on a parallel model."""

from __future__ import annotations

from typing import Any

from torch import nn


class SavesWholeOnly:
    """Stands for the ``save_pretrained`` of a model of which this rank has a part.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        """Save a state dict of whole tensors.

        Raises:
            RuntimeError: without one.
        """
        kind: Any = type(self._model)
        if state_dict is None:
            raise RuntimeError(
                f"{kind.__name__}.save_pretrained would write this rank's part of the model. Call"
                " trainer.strategy.save_pretrained(directory) or lightning_autotp.save_pretrained(model, directory)"
                " instead (lightning_autotp.save_adapter for a PeftModel), on every rank"
            )
        return kind.save_pretrained(self._model, *args, state_dict=state_dict, **kwargs)


def refuse_saving_parts(model: nn.Module) -> None:
    """Make an error of ``save_pretrained`` (and so of ``push_to_hub``) without a state dict of whole tensors.

    Args:
        model: a parallel model; also the models in it get the error.
    """
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            vars(module)["save_pretrained"] = SavesWholeOnly(module)
