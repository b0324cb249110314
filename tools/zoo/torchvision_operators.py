"""Torchvision's models where its compiled operators do not load.

They load with the build of torch only that its wheel was made for. The zoo's models use none of them, but torchvision
registers on import what two of them give on meta, and that fails where these have no schema. Importing this file gives
them one, if it is missing.
"""

from __future__ import annotations

from contextlib import suppress

import torch

LIBRARY: torch.library.Library | None = None
"""Kept, since a library's schemas end with it."""

try:
    with suppress(ImportError):  # not installed
        import torchvision  # noqa: F401
except RuntimeError:  # operator torchvision::nms does not exist
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
