"""The metrics that the code declares."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from rlctl.types import Declared

SOURCE = Path(__file__).parents[1] / "src"


def declared() -> dict[str, Declared]:
    """Every file's `METRICS`, in the order of the names' sections."""
    found: dict[str, Declared] = {}
    for file in sorted((SOURCE / "rlctl").rglob("*.py")):
        if "\nMETRICS = {" in file.read_text():
            parts = file.relative_to(SOURCE).with_suffix("").parts
            metrics = importlib.import_module(".".join(parts)).METRICS
            assert not set(metrics) & set(found), file
            found |= metrics
    return found


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of metrics.jsonl that no declaration has; `val/` repeats other sections."""
    patterns = [re.compile(re.sub("<[^>]*>", ".+", name)) for name in declared()]
    return sorted({name for name in names if name != "step" and not any(p.fullmatch(name) for p in patterns)})
