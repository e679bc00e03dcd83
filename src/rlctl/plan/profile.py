"""A plan profile: the constants of own machines (calibrate.py), in a file that RLCTL_PLAN_PROFILE names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rlctl.errors import RlctlError
from rlctl.plan.steptime import Constants
from rlctl.plan.steptime import constants as shipped

VERSION = 1
VARIABLE = "RLCTL_PLAN_PROFILE"


def path() -> Path | None:
    """The profile in use; None: the constants of this release."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def constants() -> Constants:
    """The constants in use.

    Raises:
        RlctlError: as `load`.
    """
    named = path()
    return load(named) if named is not None else shipped()


def write(file: Path, refined: Constants, *, gpus: Sequence[str], reports: Mapping[str, bytes]) -> None:
    """Write a profile.

    Args:
        file: where; not there yet.
        refined: the constants.
        gpus: kinds that they were measured on.
        reports: name -> content of the reports.

    Raises:
        RlctlError: it is there already, or cannot be written.
    """
    profile = {
        "rlctl_plan_profile": VERSION,
        "gpus": sorted(gpus),
        "reports": {name: hashlib.sha256(content).hexdigest() for name, content in reports.items()},
        "constants": {name: float(f"{value:.6g}") for name, value in vars(refined).items()},
    }
    try:
        with file.open("x") as out:
            yaml.safe_dump(profile, out, sort_keys=False)
    except FileExistsError as error:
        raise RlctlError(f"`{file}` exists", "give another with `--write`, or remove it") from error
    except OSError as error:
        raise RlctlError(f"cannot write `{file}`: {error.strerror}", "give another with `--write`") from error


@functools.cache
def load(file: Path) -> Constants:
    """A profile's constants.

    Raises:
        RlctlError: it is not there, or no profile of this version.
    """
    hint = "RLCTL_PLAN_PROFILE names a file that `rlctl plan --calibrate` wrote; unset it for the shipped constants"
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RlctlError(f"cannot read the plan profile `{file}`: {error}", hint) from error
    names = [field.name for field in dataclasses.fields(Constants)]
    if not isinstance(found, dict) or found.get("rlctl_plan_profile") != VERSION:
        raise RlctlError(f"`{file}` is no plan profile of version {VERSION}", hint)
    values = found.get("constants")
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise RlctlError(f"the constants of `{file}` are not those of this rlctl ({', '.join(names)})", hint)
    bad = [n for n, v in values.items() if not isinstance(v, float | int) or not 0 < v < math.inf]
    if bad:
        raise RlctlError(f"`{file}`: constant {bad[0]} is {values[bad[0]]}, not a positive number", hint)
    return Constants(**{name: float(value) for name, value in values.items()})
