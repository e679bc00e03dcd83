"""Where recipes are, and which one a command line means.

Directories: the user's own first (`--recipe-dir`, then RLCTL_RECIPES), then those of the package. A named recipe is
`experiment/NAME.yaml` or `NAME.yaml` in one of them. Experiment recipes are named
`<algorithm>-<model>-<nodes>n<gpus>g-<strategy>`, where the strategy starts with the backend; `0g` needs no GPU.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import RlctlError

_NAME = re.compile(
    r"(?P<algorithm>[a-z_]+)-(?P<model>.+)-(?P<nodes>\d+)n(?P<gpus>\d+)g-(?P<backend>megatron|dtensor)(-.+)?"
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A recipe file, e.g. Source(name="smoke-tiny", folder=Path("recipes"), config="experiment/smoke-tiny")."""

    name: str
    folder: Path
    """Where hydra starts to look for what `defaults:` names."""
    config: str
    """Hydra's name: the path under `folder`, without its ending."""

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.config}.yaml"


@dataclass(frozen=True, kw_only=True)
class NameParts:
    """What an experiment recipe's name says, e.g. grpo-smollm2-135m-1n0g-megatron."""

    algorithm: str
    model: str
    nodes: int
    gpus: int
    backend: str


def packaged() -> Path:
    """The recipes that come with rlctl: in the wheel, or in the checkout of an editable install."""
    package = Path(__file__).parent.parent
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent.parent / "recipes"


def directories(extra: Sequence[Path] = ()) -> list[Path]:
    """All recipe directories, the user's own first.

    Args:
        extra: from `--recipe-dir`.

    Raises:
        RlctlError: one of the user's does not exist.
    """
    listed = os.environ["RLCTL_RECIPES"].split(os.pathsep) if "RLCTL_RECIPES" in os.environ else []
    own = [(f, "--recipe-dir") for f in extra] + [(Path(f), "RLCTL_RECIPES") for f in listed if f]
    for folder, origin in own:
        if not folder.is_dir():
            raise RlctlError(f"no recipe directory `{folder}` ({origin})", "give an existing directory")
    return [*(folder.absolute() for folder, _ in own), packaged()]


def listing(folders: Sequence[Path]) -> list[Source]:
    """All named recipes; a name in an earlier directory hides the same name in a later one."""
    found: dict[str, Source] = {}
    for folder in folders:
        for group in ("experiment", ""):
            for file in sorted((folder / group).glob("*.yaml")):
                if (group or file.stem != "config") and _is_text(file):
                    source = Source(name=file.stem, folder=folder, config=f"{group}/{file.stem}".lstrip("/"))
                    found.setdefault(file.stem, source)
    return sorted(found.values(), key=lambda s: s.name)


def _is_text(file: Path) -> bool:
    """Whether it can be a recipe at all: one bad file in the user's folder must not hide the others."""
    try:
        file.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return True


def named(name: str, folders: Sequence[Path]) -> Source:
    """The recipe that `--recipe NAME or FILE` means.

    Raises:
        RlctlError: no such recipe or file; the hint has the nearest name.
    """
    if "/" in name or name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return _file(Path(name))
    known = {s.name: s for s in listing(folders)}
    if name == "config":
        return defaults(name)
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        raise RlctlError(
            f"unknown recipe `{name}`",
            (f"did you mean `{near[0]}`? " if near else "") + "`rlctl recipes list` shows all",
        )
    return known[name]


def _file(path: Path) -> Source:
    if not path.is_file():
        raise RlctlError(f"no recipe file `{path}`", "give an existing .yaml file, or a name from `rlctl recipes list`")
    if path.suffix != ".yaml":
        raise RlctlError(f"recipe file `{path}` does not end in .yaml", f"rename it to {path.stem}.yaml")
    return Source(name=path.stem, folder=path.absolute().parent, config=path.stem)


def defaults(name: str) -> Source:
    """No recipe: what every key is when nobody sets it."""
    return Source(name=name, folder=packaged(), config="config")


def purpose(source: Source) -> str:
    """The `# Purpose:` line in a recipe's head; empty without one."""
    lines = source.path.read_text().splitlines()
    return next((line.removeprefix("# Purpose:").strip() for line in lines if line.startswith("# Purpose:")), "")


def parts(name: str) -> NameParts | None:
    """What a recipe's name says; None when it does not follow the convention."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return NameParts(
        algorithm=match["algorithm"], model=match["model"], backend=match["backend"],
        nodes=int(match["nodes"]), gpus=int(match["gpus"]),
    )  # fmt: skip


def choose(
    algorithm: str,
    folders: Sequence[Path],
    *,
    model: str | None,
    backend: str | None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
) -> Source:
    """The recipe of a command line without `--recipe`: the smallest experiment that fits it, else the defaults."""
    candidates = []
    for source in listing(folders):
        said = parts(source.name)
        if said and said.algorithm == algorithm and said.model == model:
            candidates.append((said, source))
    for wanted, key in ((backend, "backend"), (nodes, "nodes"), (gpus_per_node, "gpus")):
        if wanted is not None and (key == "backend" or any(getattr(s, key) == wanted for s, _ in candidates)):
            candidates = [(s, source) for s, source in candidates if getattr(s, key) == wanted]
    if not candidates:
        return defaults(f"{algorithm}-{model or 'model'}")
    smallest = min(candidates, key=lambda c: (c[0].nodes * max(c[0].gpus, 1), c[0].backend != "dtensor", c[1].name))
    return smallest[1]
