"""What runs inside the processes of tests/unit/test_trainer.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl import device, plugins, trainer
from rlctl.log import RunLog
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive
from tests import late_engine

LOAD = plugins.load


def _load_late(kind: str, name: str) -> Any:
    return late_engine if kind == "engine" else LOAD(kind, name)


def curve(folder: Path, engine: str) -> list[dict[str, Any]]:
    """The metrics of three smoke steps."""
    import torch.distributed as dist

    overrides = ["grpo.max_num_steps=3", "checkpointing.enabled=false", f"cluster.procs={dist.get_world_size()}"]
    recipe = derive(compose("grpo", "smoke-tiny", overrides), device.probe()).recipe
    plugins.load = _load_late if engine == "late" else LOAD
    log = RunLog(folder, writes=dist.get_rank() == 0, tensorboard=False, console=None)
    assert trainer.train(recipe, folder, log, stop=lambda seconds: False)
    log.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
