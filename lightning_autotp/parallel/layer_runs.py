"""Whether a parallel layer has run. Code that uses its weight directly skips the communication that the layer does.

Such code may look at what no trace shows: an environment variable, or whether it is being traced. So each parallel
layer notes that it runs, and :mod:`~lightning_autotp.guard.bypassed` asks before an optimizer's step, and after a
forward without gradients.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from lightning_autotp.private.torch_private import decided_while_compiling


class NotesRuns(nn.Module):
    """A layer that notes whether its forward runs.

    Attributes:
        has_run: whether it did since that was set to ``False``. In compiled code it is not noted.
        is_compiled: whether ``torch.compile`` has traced any such layer in this process.
    """

    has_run: bool = False
    is_compiled: ClassVar[bool] = False

    def note_run(self) -> None:
        """Note that the forward runs."""
        if torch.compiler.is_compiling():
            _note_compiled()
        else:
            self.__dict__["has_run"] = True  # torch's own way of setting attributes takes several times as long


@decided_while_compiling
def _note_compiled() -> bool:
    NotesRuns.is_compiled = True
    return True
