"""Their YAML as plain values: the `defaults:` chain merged, interpolations resolved. It knows no key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlctl.errors import RlctlError
from rlctl.recipe.places import short

NATIVE = "rlctl_recipe"
SECTIONS = (  # one of these at the top, and no `rlctl_recipe`: a file of theirs
    "policy", "grpo", "sft", "dpo", "rm", "ppo", "distillation", "loss_fn", "checkpointing", "cluster", "eval",
)  # fmt: skip


def _divide(a: float, b: float) -> float:
    quotient = a / b
    return int(quotient) if isinstance(a, int) and isinstance(b, int) and a % b == 0 else quotient


RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda *n: math.prod(n),
    "add": lambda *n: sum(n),
    "sub": lambda a, b: a - b,
    "div": _divide,
    "max": lambda *n: max(n),
    "min": lambda *n: min(n),
}


def is_theirs(raw: Any) -> bool:
    """Whether a parsed YAML file is NeMo RL's: it says no `rlctl_recipe`, and has a section or parent of theirs."""
    if not isinstance(raw, Mapping) or NATIVE in raw:
        return False
    parents = raw.get("defaults", [])
    if isinstance(parents, list):  # of hydra's lists only plain file names are theirs as well
        named = bool(parents) and all(isinstance(p, str) and p.endswith((".yaml", ".yml")) for p in parents)
        return named or ("defaults" not in raw and any(s in raw for s in SECTIONS))
    return isinstance(parents, str)


def read(path: Path) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """A file's values and the files that it is made of, the first ancestor first.

    Raises:
        RlctlError: a missing file, a circle, no YAML, or an interpolation that does not resolve.
    """
    merged, files = _chain(path.absolute(), ())
    for name, function in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, ArithmeticError, TypeError, ValueError) as error:
        key = getattr(error, "full_key", None) or "an interpolation"
        raise RlctlError(
            f"`{short(path)}`: `{key}` does not resolve: {str(error).splitlines()[0]}",
            f"resolvers: {', '.join('${' + n + ':a,b}' for n in RESOLVERS)}, and `${{section.key}}`",
        ) from error
    finally:
        for name in RESOLVERS:  # they are no part of native recipes
            OmegaConf.clear_resolver(name)
    assert isinstance(values, dict)
    return values, files  # type: ignore[return-value]


def _chain(path: Path, below: tuple[Path, ...]) -> tuple[DictConfig, tuple[Path, ...]]:
    """A file merged over its parents; parents' names are relative to the file that names them."""
    if path in below:
        raise RlctlError(
            f"`{short(path)}`: its `defaults:` lead back to itself", "remove the circle from the `defaults:` lines"
        )
    if not path.is_file():
        by = f", named by `defaults:` of `{short(below[-1])}`" if below else ""
        raise RlctlError(f"no recipe file `{short(path)}`{by}", "copy that file beside it, or correct the name")
    own = _load(path)
    parents = own.pop("defaults") if "defaults" in own else []
    names = [parents] if isinstance(parents, str) else parents
    merged: Any = OmegaConf.create({})
    files: tuple[Path, ...] = ()
    for name in names:
        if not isinstance(name, str):
            raise RlctlError(f"`{short(path)}`: `defaults:` has {name!r}", "name a YAML file, or a list of them")
        parent, read_ = _chain(Path(path.parent, name).resolve(), (*below, path))
        merged, files = OmegaConf.merge(merged, parent), (*files, *read_)
    return OmegaConf.merge(merged, own), (*files, path)  # type: ignore[return-value]


def _load(path: Path) -> DictConfig:
    try:
        own = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise RlctlError(f"{short(path)}{line} is not YAML: {error.problem}", "mend that line") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise RlctlError(f"{short(path)} is not YAML: {str(error).splitlines()[0]}", "give a recipe file") from error
    if not isinstance(own, DictConfig):
        raise RlctlError(f"`{short(path)}` holds no sections", "give a recipe file")
    foreign = [k for k in own if not isinstance(k, str)]
    if foreign:
        raise RlctlError(f"`{short(path)}` has the section `{foreign[0]!r}`, which is none of a recipe", "remove it")
    return own
