"""Heavy modules without their import cost: the first attribute access imports them.

Files that `plan`, `recipes check` and dry runs touch take torch from here, so that those commands never load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch = _LazyModule("torch")
    dist = _LazyModule("torch.distributed")

__all__ = ["dist", "torch"]
