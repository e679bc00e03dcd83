"""`rlctl recipes`: list, show and check recipes, without torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlctl.cli import options, output
from rlctl.errors import RlctlError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="List, show and check recipes.",
    epilog="Example: [bold]rlctl recipes show smoke-tiny[/bold]",
)  # fmt: skip
Name = Annotated[str, typer.Argument(metavar="NAME|FILE", show_default=False, help="A recipe, or a file.")]


@app.command("list", epilog="Example: [bold]rlctl recipes list[/bold]")
def list_(recipe_dir: options.RecipeDir = None, json: options.Json = False, debug: options.Debug = False) -> int:
    """List recipes by name, with their purpose."""
    from rlctl.recipe import find  # see cli/train.py

    rows = [
        {"name": s.name, "path": str(s.path), "purpose": find.purpose(s)}
        for s in find.listing(find.directories(recipe_dir or ()))
    ]
    if json:
        output.document(rows)
    else:
        width = max(len(r["name"]) for r in rows)
        output.data("\n".join(f"{r['name']:<{width}}  {r['purpose']}" for r in rows))
    return 0


@app.command(epilog="Example: [bold]rlctl recipes show smoke-tiny grpo.max_num_steps=5[/bold]")
def show(
    name: Name,
    overrides: options.Overrides = None,
    recipe_dir: options.RecipeDir = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Print a recipe in full: what it writes, and the default of every other key. null: derived at start."""
    from rlctl.recipe import compose, find  # see cli/train.py

    folders = find.directories(recipe_dir or ())
    composed = compose.compose(compose.algorithm_of(name, folders), name, overrides or (), folders=folders)
    if json:
        output.document(compose.as_values(composed.recipe))
    else:
        output.data(compose.to_yaml(composed.recipe).rstrip())
    return 0


@app.command(epilog="Example: [bold]rlctl recipes check my.yaml[/bold]")
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILE", show_default=False, help="Default: all recipes."),
    ] = None,
    recipe_dir: options.RecipeDir = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Check keys, types, sizes and layout of recipes."""
    from rlctl import device  # see cli/train.py
    from rlctl.recipe import compose, derive, find

    folders = find.directories(recipe_dir or ())
    rows: list[dict[str, Any]] = []
    for name in names or [s.name for s in find.listing(folders)]:
        try:
            composed = compose.compose(compose.algorithm_of(name, folders), name, folders=folders)
            resolved = derive.derive(composed, device.probe())
            rows.append({"name": name, "ok": True, "layout": str(resolved.layout)})
        except RlctlError as problem:
            if names is not None and len(names) == 1:
                raise
            rows.append({"name": name, "ok": False, "error": problem.message, "hint": problem.hint})
    if json:
        output.document(rows)
    else:
        output.data(
            "\n".join(
                f"{'ok ' if r['ok'] else 'BAD'} {r['name']}: {r['layout'] if r['ok'] else r['error']}" for r in rows
            )
        )
    wrong = [r for r in rows if not r["ok"]]
    if wrong and not json:
        raise RlctlError(f"{len(wrong)} of {len(rows)} recipes are wrong", wrong[0]["hint"])
    return 2 if wrong else 0
