"""The directory is the registry: `algorithms/grpo.py` is the algorithm `grpo`. Adding one is adding a file.

A kind's own helpers (`base`, `ops`, ...) are not plugins: a module is one when it defines the attribute its kind asks
for. From outside the package, `package.module:name` or `file.py:name` is taken as it is.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.errors import RlctlError

KINDS = {  # kind -> (package, the name that makes a module a plugin)
    "algorithm": ("rlctl.algorithms", "Algorithm"),
    "environment": ("rlctl.envs", "Environment"),
    "engine": ("rlctl.generation", "Engine"),
    "backend": ("rlctl.policy", "Policy"),
    "model": ("rlctl.models", "rules"),
}
_HELPERS = {"base", "__init__"}


def names(kind: str) -> list[str]:
    """All plugins of a kind, found without importing any of them."""
    package, attribute = KINDS[kind]
    folder = Path(__file__).parent / package.split(".")[1]
    return sorted(f.stem for f in folder.glob("*.py") if f.stem not in _HELPERS and _defines(f, attribute))


@functools.cache  # parsing a package's files costs more than all else that a dry run does
def _defines(file: Path, attribute: str) -> bool:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == attribute:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == attribute for t in node.targets):
            return True
    return False


def load(kind: str, name: str) -> ModuleType:
    """The module of a plugin.

    Raises:
        RlctlError: no such plugin; the hint has the nearest name and all of them.
    """
    known = names(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        near.sort(key=lambda other: sorted(other) != sorted(name))  # swapped letters are the likeliest slip
        raise RlctlError(
            f"unknown {kind} `{name}`",
            (f"did you mean `{near[0]}`? " if near else "") + f"known: {', '.join(known)}",
        )
    return importlib.import_module(f"{KINDS[kind][0]}.{name}")


def load_object(reference: str, *, what: str) -> Any:
    """The object that `file.py:name` or `package.module:name` names.

    Raises:
        RlctlError: the file is missing, does not import, or has no such name.
    """
    location, _, attribute = reference.rpartition(":")
    if not location or not attribute:
        raise RlctlError(
            f"{what} `{reference}` is not of the form file.py:name",
            f"write e.g. my_file.py:score, or package.module:score (got {reference!r})",
        )
    module = _import_file(Path(location), what) if location.endswith(".py") else _import_module(location, what)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=1)
        raise RlctlError(
            f"{what}: `{location}` has no `{attribute}`",
            (f"did you mean `{near[0]}`? " if near else "") + f"it defines: {', '.join(public) or 'nothing callable'}",
        )
    return getattr(module, attribute)


def _import_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise RlctlError(f"{what}: no file `{path}`", f"give an existing file (looked in {path.absolute().parent})")
    name = f"rlctl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own file: any error is theirs to see
        raise RlctlError(
            f"{what}: `{path}` does not import: {type(error).__name__}: {error}", "mend the file and run again"
        ) from error
    return module


def _import_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise RlctlError(
            f"{what}: module `{name}` does not import: {type(error).__name__}: {error}",
            "check the name and that it is installed",
        ) from error
