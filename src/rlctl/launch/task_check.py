"""Does the task work: its options, own data, own reward? Judged before workers start, in a process of its own.

A process of its own, since an environment may start pools and import the user's file: nothing of that may stay behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rlctl import config
from rlctl.algorithms.base import source
from rlctl.errors import RlctlError
from rlctl.recipe import compose

TIMEOUT_SECONDS = 300


def check_task(recipe: config.Recipe) -> None:
    """Build the environment and read its prompts, or read the data that are learned from.

    Args:
        recipe: resolved.

    Raises:
        RlctlError: the environment's or the data's own complaint.
    """
    with tempfile.TemporaryDirectory() as folder:
        compose.dump(recipe, Path(folder) / "recipe.yaml")
        try:
            child = subprocess.run(
                [sys.executable, "-m", "rlctl.launch.task_check", folder],
                capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RlctlError(
                f"the task did not start in {TIMEOUT_SECONDS} s: {_name(recipe)}",
                "see what its data or reward file waits for",
                exit_status=1,
            ) from error
        result = Path(folder) / "result.json"
        if not result.is_file():
            last = (child.stderr.strip() or f"status {child.returncode}").splitlines()[-1]
            raise RlctlError(f"{_name(recipe)} failed: {last}", "mend its data or reward file", exit_status=1)
        answer = json.loads(result.read_text())
    if answer:
        raise RlctlError(answer["error"], answer["hint"], exit_status=answer["exit_status"])


def _name(recipe: config.Recipe) -> str:
    return f"data `{recipe.data.train_path}`" if recipe.env.name is None else f"environment `{recipe.env.name}`"


def _main(folder: Path) -> None:
    answer: dict[str, str | int] = {}
    try:
        _read(compose.load_resolved(folder / "recipe.yaml"))
    except RlctlError as error:
        answer = {"error": error.message, "hint": error.hint, "exit_status": error.exit_status}
    (folder / "result.json").write_text(json.dumps(answer))


def _read(recipe: config.Recipe) -> None:
    from rlctl import supervised  # only the child needs them
    from rlctl.rollout import build_environment, load_prompts

    validates = bool(recipe.grpo.val_period) or recipe.grpo.val_at_start or recipe.grpo.val_at_end
    if source(recipe.algorithm) != "rollouts":
        supervised.load(recipe)
        if validates:
            supervised.load(recipe, "val_path")
        return
    environment = build_environment(recipe)
    load_prompts(recipe, environment)
    if validates:
        load_prompts(recipe, environment, "validation")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
