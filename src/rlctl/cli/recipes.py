"""`rlctl recipes`: list, show and check recipes, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
    """Check keys, types, sizes and layout of recipes; of a NeMo RL file, show what becomes of each key."""
    from rlctl import device  # see cli/train.py
    from rlctl.recipe import compose, derive, find

    folders = find.directories(recipe_dir or ())
    rows: list[dict[str, Any]] = []
    for name in names or [s.name for s in find.listing(folders)]:
        try:
            rows.append(_theirs(name, folders, show=not json))
            composed = compose.compose(compose.algorithm_of(name, folders), name, folders=folders)
            resolved = derive.derive(composed, device.probe())
            rows[-1] |= {"ok": True, "layout": str(resolved.layout)}
            if composed.translation is not None:
                rows[-1] |= {"recipe": compose.as_values(resolved.recipe)}
                if not json:
                    output.data(compose.to_yaml(resolved.recipe).rstrip())
        except RlctlError as problem:
            keys = rows.pop() if rows and rows[-1]["name"] == name and "ok" not in rows[-1] else {}
            if names is not None and len(names) == 1 and not (json and "keys" in keys):
                raise
            rows.append(keys | {"name": name, "ok": False, "error": problem.message, "hint": problem.hint})
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


def _theirs(name: str, folders: Sequence[Path], *, show: bool) -> dict[str, Any]:
    """The row of a recipe before it is judged; for a NeMo RL file with its keys, which are printed unless --json."""
    from rlctl.cli import foreign  # see cli/train.py
    from rlctl.recipe import compose

    translation = compose.foreign(name, folders)
    if translation is None:
        return {"name": name}
    if show:
        output.data("\n".join([*foreign.mapping(translation), *foreign.summary(translation), ""]))
    return {
        "name": name, "algorithm": translation.algorithm, "because_of": translation.reason,
        "keys": foreign.rows(translation),
    }  # fmt: skip


@app.command("import", epilog="Example: [bold]rlctl recipes import grpo_math_8B.yaml > my_recipe.yaml[/bold]")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False, help="A NeMo RL recipe file.")],
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Write a NeMo RL file as a native recipe that resolves to the same; comments say where each value comes from."""
    from rlctl.recipe import compose, nemo_rl  # see cli/train.py

    translation = compose.foreign(file, [])
    if translation is None:
        raise RlctlError(f"`{file}` is not a NeMo RL file", "it may be native already: rlctl recipes check FILE")
    text = nemo_rl.to_recipe(translation)
    if json:
        output.document(translation.values)
    else:
        output.data(text.rstrip())
    return 0
