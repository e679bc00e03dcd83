"""`rlctl bench --simulate`: its options, and what they exclude. Light; simulate_job.py does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rlctl.cli import options, output
from rlctl.errors import ENVIRONMENT, RlctlError

_PANEL = "Predict instead of run"
_OWN = ("gpus", "gpu", "response_tokens", "prompt_tokens")
_SHARED = ("compare", "overrides", "recipe", "model", "recipe_dir", "simulate_", "json", "debug")

Simulate = Annotated[
    bool, typer.Option("--simulate", metavar=options.FLAG, rich_help_panel=_PANEL, help="Start nothing; needs no GPU.")
]
Gpus = Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=_PANEL, help="GPUs, all together.")]
Gpu = Annotated[str | None, typer.Option(metavar="KIND", rich_help_panel=_PANEL, help="a100-80gb, h100, b200, ...")]
ResponseTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", rich_help_panel=_PANEL, help="Mean response; as in rlctl plan.")
]
PromptTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", rich_help_panel=_PANEL, help="Mean prompt; as in rlctl plan.")
]


def check(context: typer.Context) -> bool:
    """Whether to simulate.

    Raises:
        RlctlError: an option of a run with `--simulate`, or one of a simulation without it.
    """
    said = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    wanted = bool(context.params["simulate_"])
    for name in sorted(said - {*_OWN, *_SHARED} if wanted else said & {*_OWN}):
        flag = "--" + name.strip("_").replace("_", "-")
        if wanted:
            raise RlctlError(f"`{flag}` has no meaning with `--simulate`, which runs nothing", "leave one of them out")
        raise RlctlError(f"`{flag}` is for `--simulate`", "add `--simulate`; a run takes the GPUs of this machine")
    return wanted


def run(said: dict[str, Any], backends: Sequence[str]) -> int:
    """Predict, and print.

    Args:
        said: the values of the command's options.
        backends: two or more.

    Raises:
        RlctlError: no GPUs are named, or as simulate_job.answer.
    """
    from rlctl.cli import plan_job, simulate_job  # hydra, see cli/train.py

    for name in ("gpus", "gpu"):
        if said[name] is None:
            raise RlctlError(f"`--{name}` is not given", "say what to simulate, e.g. `--gpus 64 --gpu h100`")
    same = {name: said[name] for name in ("model", "recipe", "gpus", "gpu", "response_tokens", "prompt_tokens")}
    request = plan_job.Request(
        backend=None, recipe_dirs=tuple(said["recipe_dir"] or ()), overrides=tuple(said["overrides"] or ()), **same
    )
    found = simulate_job.answer(request, backends)  # type: ignore[arg-type]
    if said["json"]:
        output.document(found)
    else:
        output.data(simulate_job.text(found))
    return ENVIRONMENT if found["none_fits"] else 0
