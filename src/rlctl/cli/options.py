"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

FLAG = " "  # typer would print the type
_JOB, _WHERE, _OUTPUT = "Job", "Where it runs", "Output"

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", show_default=False, help="Recipe keys, e.g. grpo.max_num_steps=10."),
]
Recipe = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", rich_help_panel=_JOB, help="Recipe; default: by algorithm, model and backend."),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME|DIR", rich_help_panel=_JOB, help="Short name, Hugging Face id, or directory."),
]
Backend = Annotated[
    Literal["megatron", "dtensor"] | None,
    typer.Option(rich_help_panel=_JOB, help="Training backend; beats the recipe."),
]
RecipeDir = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR", rich_help_panel=_JOB, help="Own recipes, searched first; also RLCTL_RECIPES.", show_default=False
    ),
]
Procs = Annotated[
    int | None, typer.Option(min=1, metavar="N", rich_help_panel=_WHERE, help="Processes, on a host without GPUs.")
]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=_WHERE, help="Nodes.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=_WHERE, help="GPUs of each node.")]
Launcher = Annotated[
    Literal["local", "slurm", "env"] | None,
    typer.Option(
        rich_help_panel=_WHERE,
        help="slurm: sbatch, or srun inside an allocation. env: RANK and WORLD_SIZE are set already. Default: local.",
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", rich_help_panel=_OUTPUT, help="A new directory, or see --resume. Default: runs/RECIPE-TIME."
    ),
]
Resume = Annotated[
    Literal["auto", "never", "must"],
    typer.Option(
        rich_help_panel=_OUTPUT,
        help="auto: go on in --run-dir from its newest checkpoint, or start there. must: go on, or refuse.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", metavar=FLAG, rich_help_panel=_OUTPUT, help="One JSON document on stdout.")
]
Debug = Annotated[bool, typer.Option("--debug", metavar=FLAG, rich_help_panel=_OUTPUT, help="Show tracebacks.")]
