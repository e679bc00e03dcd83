"""`rlctl doctor`: is this machine ready?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rlctl.cli import options, output
from rlctl.errors import ENVIRONMENT

EXAMPLES = """[bold]Examples[/bold]
rlctl doctor
rlctl doctor --imports --json"""


def doctor(
    imports: Annotated[
        bool,
        typer.Option("--imports", metavar=options.FLAG, help="Also import torch, Megatron, transformers and vLLM."),
    ] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Look at this machine: packages, devices, memory, disk, network; exit 3 if something needed is missing."""
    from rlctl.launch import doctor as machine  # its findings need modules that `--help` may not wait for

    findings = machine.examine(imports=imports)
    absent = [finding.name for finding in findings if finding.state == "missing"]
    if json:
        output.document({"ready": not absent, "checks": [asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            output.data(f"{finding.state:<8}{finding.name:<{width}}  {finding.value}")
            if finding.mend:
                output.data(f"{'':<{8 + width}}  -> {finding.mend}")
        output.note(f"not ready: {', '.join(absent)}" if absent else "ready")
    return ENVIRONMENT if absent else 0
