"""The wheel, installed outside the checkout, is the whole tool: it finds its recipes and trains."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with the built wheel; its dependencies are this environment's, without the editable install."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    unpack = [sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)]
    subprocess.run(unpack, check=True)
    (folder / "empty").mkdir()
    return folder / "env" / "bin" / "python", folder / "empty"


def run(installed, *arguments):
    python, folder = installed
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_is_the_wheel_that_runs(installed):
    done = run(installed, "-c", "import rlctl; print(rlctl.__file__)")
    assert str(installed[0].parent.parent) in done.stdout, done


def test_it_finds_its_recipes(installed):
    done = run(installed, "-m", "rlctl", "recipes", "list")
    assert done.returncode == 0, done.stderr
    assert "smoke-tiny" in done.stdout


def test_it_trains_the_smoke_recipe(installed):
    done = run(installed, "-m", "rlctl", "train", "grpo", "--recipe", "smoke-tiny", "grpo.max_num_steps=2")
    assert done.returncode == 0, done.stderr
    assert list((installed[1] / "runs").glob("smoke-tiny-*/hf/model.safetensors"))
