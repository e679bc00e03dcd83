"""Training checkpoints: a directory that appears whole, by one rename, after its manifest is written.

`checkpoints/step_000010/` holds `policy/rank_N.pt` (each rank's part, in the run's layout), `trainer.json` (counters,
identity, metrics) and `manifest.json` (every file with its size and hash, written last). A reshardable one has the
policy's state in `policy/whole/QUANTITY-NNNNN.safetensors` instead, as whole tensors by Hugging Face name, and in
`policy/rank_N.pt` only what belongs to a process. What is being written or removed has another name (`*.partial`),
which nothing takes for a checkpoint.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rlctl.config import Checkpointing
from rlctl.errors import CHECK_FAILED, ENVIRONMENT, RlctlError
from rlctl.lazy import dist, torch

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
WHOLE = "policy/whole"
CHUNK_BYTES = 1 << 28  # of a file of whole tensors, at least one
METRICS = "metrics.jsonl"
NOTHING = -1  # for `rewind`: a validation at the start has a line with step 0

Named = Sequence[tuple[str, "torch.Tensor"]]
Entry = tuple[str, int, str]  # a file's name in the checkpoint, its bytes, its hash


def save(
    run_dir: Path,
    *,
    step: int,
    local: Mapping[str, Any],
    trainer: Mapping[str, Any],
    options: Checkpointing,
    whole: Iterable[tuple[str, Named]] = (),
) -> Path:
    """Write the checkpoint of a step and remove those that `options` does not keep. Collective.

    Args:
        run_dir: of the run; must be one file system for all ranks.
        step: steps completed.
        local: this rank's state: tensors and plain values.
        trainer: the same on every rank, for trainer.json; its `metrics` are what `metric_name` ranks by.
        options: retention.
        whole: chunks of (quantity, whole tensors); the same number on every rank, empty where another holds them.

    Raises:
        RlctlError: on every rank, exit status 3, when a rank cannot write; the checkpoints from before are intact.
    """
    final = run_dir / "checkpoints" / f"step_{step:06d}"
    rank = dist.get_rank()
    names = [f"{final.name}.{time.time_ns():x}.partial"]  # one name an attempt: a rank of a dead run writes elsewhere
    dist.broadcast_object_list(names, src=0)
    partial = final.with_name(names[0])

    def begin() -> None:
        if rank == 0:
            clear(run_dir)
            (partial / WHOLE).mkdir(parents=True)

    def write() -> list[Entry]:
        return [*_write_whole(partial, whole), _write_tensors(partial, f"policy/rank_{rank}.pt", local)]

    def publish(entries: list[Entry]) -> None:
        if rank == 0:
            entries = [*entries, _write_json(partial, TRAINER, {"step": step, **trainer})]
            if (run_dir / METRICS).exists():
                _sync(run_dir / METRICS)  # a resume keeps its lines up to this step
            files = {name: {"bytes": size, "xxh3_128": digest} for name, size, digest in entries}
            _write_json(partial, MANIFEST, {"step": step, "files": files})
            if not any((partial / WHOLE).iterdir()):
                (partial / WHOLE).rmdir()
            for folder in (partial / WHOLE, partial / "policy", partial):
                if folder.exists():
                    _sync(folder)
            if final.exists():
                _remove(final)
            partial.rename(final)
            _sync(final.parent)
            for old in _superfluous(complete(run_dir), options):
                _remove(old)

    _together(begin, partial)
    entries = _together(write, partial)
    _together(lambda: publish([entry for of_rank in entries for entry in of_rank]), partial)
    return final


def complete(run_dir: Path) -> list[Path]:
    """The complete checkpoints, oldest first, by step number."""
    found = (run_dir / "checkpoints").glob("step_*")
    named = [
        (int(m.group(1)), p) for p in found if (m := re.fullmatch(r"step_(\d+)", p.name)) and (p / MANIFEST).exists()
    ]
    return [path for _, path in sorted(named)]


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, as rank 0 sees it. Collective."""
    found = [complete(run_dir)[-1:]]
    dist.broadcast_object_list(found, src=0)
    return found[0][0] if found[0] else None


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """What `save` got as `trainer`, and the step.

    Raises:
        RlctlError: it is not what the manifest says.
    """
    _verify(checkpoint, TRAINER)
    return json.loads((checkpoint / TRAINER).read_text())


def load(checkpoint: Path) -> dict[str, Any]:
    """This rank's state.

    Raises:
        RlctlError: a file is missing, has another size or another hash than the manifest says.
    """
    mine = f"policy/rank_{dist.get_rank()}.pt"
    saved_by = sum(name.startswith("policy/rank_") for name in _manifest(checkpoint))
    if saved_by != dist.get_world_size():
        raise RlctlError(
            f"`{checkpoint}` was saved by {saved_by} processes, this run has {dist.get_world_size()}",
            "resume with as many processes; checkpointing.optimizer_format=reshardable frees later checkpoints of it",
            exit_status=ENVIRONMENT,
        )
    _verify(checkpoint, mine)
    # weights_only would refuse optimizer groups; the file is ours, its hash checked
    return torch.load(checkpoint / mine, weights_only=False, map_location="cpu")


def is_reshardable(checkpoint: Path) -> bool:
    """Whether any layout, number of processes and backend can go on from it."""
    return any(name.startswith(f"{WHOLE}/") for name in _manifest(checkpoint))


def reader(checkpoint: Path) -> Callable[[str, str], torch.Tensor]:
    """(quantity, Hugging Face name) -> whole tensor, of a reshardable checkpoint. Collective: ranks share the hashing.

    Raises:
        RlctlError: on every rank; a file is not what the manifest says.
    """
    from safetensors import safe_open  # imports torch, which dry runs must not

    names = sorted(name for name in _manifest(checkpoint) if name.startswith(f"{WHOLE}/"))

    def verify() -> None:
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            _verify(checkpoint, name)

    _agree(verify)
    opened = [(Path(n).name.rpartition("-")[0], safe_open(checkpoint / n, framework="pt")) for n in names]
    places = {(quantity, key): file for quantity, file in opened for key in file.keys()}  # noqa: SIM118  no mapping
    return lambda quantity, name: places[quantity, name].get_tensor(name)


def rewind(run_dir: Path, step: int) -> None:
    """Drop what a run wrote after a step, and what it left unfinished: metrics, rollouts, partial checkpoints."""
    clear(run_dir)
    metrics = run_dir / METRICS
    if metrics.is_file():
        with metrics.open("rb+") as file:
            kept = 0
            for line in file:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
                kept += len(line)
            file.truncate(kept)
            os.fsync(file.fileno())
    for folder in ("rollouts", "validation"):
        for path in (run_dir / folder).glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()


def clear(run_dir: Path) -> None:
    """Remove partial checkpoints."""
    for partial in (run_dir / "checkpoints").glob("*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _superfluous(checkpoints: list[Path], options: Checkpointing) -> list[Path]:
    """All but the newest and the `keep_top_k` best; without a metric, the newest are the best."""
    name, sign = options.metric_name, 1.0 if options.higher_is_better else -1.0

    def score(i: int) -> tuple[float, int]:
        value = None if name is None else read_trainer(checkpoints[i])["metrics"].get(name)
        return (-math.inf if value is None else sign * value, i)

    ranked = sorted(range(len(checkpoints)), key=score, reverse=True)
    kept = {*ranked[: options.keep_top_k], len(checkpoints) - 1}
    return [path for i, path in enumerate(checkpoints) if i not in kept]


def _remove(checkpoint: Path) -> None:
    """A removal that is cut short must not leave half a checkpoint under its name."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.{time.time_ns():x}.partial")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# --- writing --------------------------------------------------------------------------------------------------------


def _together[T](work: Callable[[], T], partial: Path) -> list[T]:
    """Each rank's result; a rank's error is raised by all, after the partial checkpoint is removed. Collective."""
    try:
        return _agree(work, partial)
    except RlctlError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _agree[T](work: Callable[[], T], folder: Path = Path()) -> list[T]:
    """Each rank's result; a rank's error is raised by all. Collective."""
    mine: tuple[T | None, RlctlError | None] = (None, None)
    try:
        mine = (work(), None)
    except RlctlError as error:
        mine = (None, error)
    except OSError as error:
        mine = (None, _disk_error(error, folder, 0))
    outcomes = [mine] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise errors[0]
    return [value for value, _ in outcomes]  # type: ignore[misc]


def _write_whole(folder: Path, chunks: Iterable[tuple[str, Named]]) -> list[Entry]:
    """Write the chunks that this rank holds. After an error it takes the rest all the same: others wait for it."""
    entries, first = [], None
    for i, (quantity, tensors) in enumerate(chunks):
        if tensors and first is None:
            try:
                entries.append(_write_tensors(folder, f"{WHOLE}/{quantity}-{i:05d}.safetensors", dict(tensors)))
            except (RlctlError, OSError) as error:
                first = error
    if first is not None:
        raise first
    return entries


def _write_tensors(folder: Path, name: str, local: Mapping[str, Any]) -> Entry:
    from safetensors.torch import save as safetensors_bytes  # see `reader`

    path = folder / name
    try:
        with path.open("wb") as file:
            if path.suffix == ".safetensors":
                file.write(safetensors_bytes({key: value.contiguous() for key, value in local.items()}))
            else:
                torch.save(dict(local), file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        cause = _os_error(error)
        if cause is None:
            raise
        raise _disk_error(cause, path, _num_bytes(local)) from error
    return name, path.stat().st_size, _hash(path)


def _write_json(folder: Path, name: str, content: Mapping[str, Any]) -> Entry:
    path = folder / name
    try:
        with path.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _disk_error(error, path, len(json.dumps(content, indent=1))) from error
    return name, path.stat().st_size, _hash(path)


def _os_error(error: BaseException) -> OSError | None:
    """torch.save follows a failed write by a RuntimeError of its own; the cause is what it happened in."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return at


def _disk_error(error: OSError, path: Path, needed: int) -> RlctlError:
    written = path.stat().st_size if path.is_file() else 0
    free = written + shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
    sizes = f": it needs {needed:,} bytes, {free:,} were free" if error.errno == errno.ENOSPC and needed else ""
    return RlctlError(
        f"cannot write `{path}`: {error.strerror}{sizes}",
        "free space there, then resume with `--resume auto`; earlier checkpoints are intact",
        exit_status=ENVIRONMENT,
    )


def _num_bytes(value: Any) -> int:
    """Of all tensors in it."""
    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0


# --- reading --------------------------------------------------------------------------------------------------------


def _manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    return json.loads((checkpoint / MANIFEST).read_text())["files"]


def _verify(checkpoint: Path, name: str) -> None:
    path, stated = checkpoint / name, _manifest(checkpoint)[name]
    if not path.exists() or path.stat().st_size != stated["bytes"] or _hash(path) != stated["xxh3_128"]:
        raise RlctlError(
            f"`{path}` is not what its manifest says",
            f"remove `{checkpoint}` and resume from an older checkpoint",
            exit_status=CHECK_FAILED,
        )


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
