"""The command line as a whole: which commands there are, and how their errors are told."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer
from typer import _click

from rlctl.cli import bench, convert, doctor, options, output, recipes, runs, train
from rlctl.cli import eval as evaluation
from rlctl.cli import plan as planning
from rlctl.errors import INTERRUPTED, RlctlError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: [bold]rlctl train grpo --model smollm2-135m --backend megatron[/bold]",
)  # fmt: skip
app.command("train", rich_help_panel="Run", epilog=train.EXAMPLES, no_args_is_help=True)(train.train)
app.add_typer(convert.app, name="convert", rich_help_panel="Run")
app.add_typer(bench.app, name="bench", rich_help_panel="Run")
app.command("eval", rich_help_panel="Run", epilog=evaluation.EXAMPLES, no_args_is_help=True)(evaluation.evaluate)
app.command("plan", rich_help_panel="Look and check", epilog=planning.EXAMPLES, no_args_is_help=True)(planning.plan)
app.add_typer(runs.app, name="runs", rich_help_panel="Look and check")
app.add_typer(recipes.app, name="recipes", rich_help_panel="Look and check")
app.command("doctor", rich_help_panel="Look and check", epilog=doctor.EXAMPLES)(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        output.data(f"rlctl {metadata.version('rlctl')}")
        raise typer.Exit


@app.callback()
def rlctl(
    version: Annotated[
        bool,
        typer.Option("--version", metavar=options.FLAG, callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Post-train language models by reinforcement learning, from one CPU machine to a cluster."""


def run(arguments: Sequence[str]) -> int:
    """Run a command line.

    Args:
        arguments: without the program's name.

    Returns:
        The exit status: 0 done, 1 job or I/O, 2 usage, 3 sizes or machine, 4 a check failed, 130 interrupted.
    """
    as_json, debug = "--json" in arguments, "--debug" in arguments
    try:
        status = app(args=_normalized(arguments), prog_name="rlctl", standalone_mode=False, obj=list(arguments))
        return status if isinstance(status, int) else 0
    except _click.exceptions.NoArgsIsHelpError:  # its message is the help, which is printed already
        return 2
    except _click.exceptions.UsageError as mistake:
        return output.error(_usage(mistake), as_json=as_json, debug=debug)
    except RlctlError as problem:
        return output.error(problem, as_json=as_json, debug=debug)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as failure:  # the last resort: `--debug` shows where
        return output.error(output.unforeseen(failure), as_json=as_json, debug=debug)


def _normalized(arguments: Sequence[str]) -> list[str]:
    """`--dry-run` takes an optional value, after `=` only: the next argument is never its value."""
    arguments = bench.normalized(arguments)
    return ["--dry-run=plan" if a == "--dry-run" else a for a in arguments]


def _usage(mistake: _click.exceptions.UsageError) -> RlctlError:
    """A parser's complaint in our form."""
    command = mistake.ctx.command_path if mistake.ctx else "rlctl"
    hint = f"`{command} --help` shows what it takes"
    message = mistake.message.rstrip(".").replace("'", "`")
    if isinstance(mistake, _click.exceptions.NoSuchOption):
        message, known = f"unknown option `{mistake.option_name}`", _options(mistake)
        near = difflib.get_close_matches(mistake.option_name, known, n=1)
        hint = f"did you mean `{near[0]}`? {hint}" if near else hint
    elif isinstance(mistake, _click.exceptions.BadParameter) and not message.startswith("Missing"):
        message = mistake.format_message().replace("Value error, ", "").rstrip(".").replace("'", "`")
    elif message.startswith("No such command"):
        message, _, near_command = message.partition(". Did you mean ")
        hint = f"did you mean {near_command.rstrip('?')}? {hint}" if near_command else hint
    return RlctlError(message[0].lower() + message[1:], hint)


def _options(mistake: _click.exceptions.UsageError) -> list[str]:
    return [o for p in mistake.ctx.command.params for o in p.opts] if mistake.ctx else []
