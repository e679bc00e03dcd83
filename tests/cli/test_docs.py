"""Every command in README.md and docs/ is one that the tool takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlctl.cli.app import run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^    (?:\.venv/bin/)?rlctl (.+)$", text, re.MULTILINE):
            yield pytest.param(shlex.split(line, comments=True), id=f"{page.name}: {line[:60]}")


@pytest.fixture
def readme_files(tmp_path, monkeypatch):
    """The files that the README's examples name."""
    readme = (ROOT / "README.md").read_text()
    recipe = re.search(r"^    rlctl_recipe: 1\n(?:    .+\n)+", readme, re.MULTILINE).group(0)
    (tmp_path / "my_recipe.yaml").write_text(re.sub(r"^    ", "", recipe, flags=re.MULTILINE))
    code = re.search(r"^    # my_file.py\n((?:    .+\n)+)", readme, re.MULTILINE).group(1)
    (tmp_path / "my_file.py").write_text(re.sub(r"^    ", "", code, flags=re.MULTILINE))
    (tmp_path / "my.jsonl").write_text('{"question": "What is 3 + 4?", "answer": "7"}\n' * 64)
    theirs = (ROOT / "tests" / "recipes" / "nemo_rl" / "base.yaml").read_text()
    (tmp_path / "grpo_math_8B.yaml").write_text(theirs)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", commands())
def test_the_command_is_taken(arguments, readme_files, capfd):
    """Training is only planned, recipes run, and of the others the flags are checked."""
    if arguments[0] == "train" and not any(a.startswith("--dry-run") for a in arguments):
        arguments = [*arguments, "--dry-run"]
    if arguments[0] not in ("train", "recipes"):
        arguments = [*arguments, "--help"]  # its flags are known; running it is its own tests' work
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    assert run(arguments) == 0, capfd.readouterr().err
