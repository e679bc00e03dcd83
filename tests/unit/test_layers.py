"""The architecture's rules, read off the source: which layer imports which, and who knows devices and libraries."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "rlctl"
FILES = sorted(SOURCE.rglob("*.py"))
LAYER = {  # a name below rlctl -> its layer; imports go down, never up
    "errors": 0, "types": 0, "config": 0, "lazy": 0,
    "device": 1, "parallel": 1, "log": 1, "sinks": 1, "console": 1, "plugins": 1,
    "algorithms": 2, "envs": 2, "models": 2, "data": 2,
    "checkpoint": 3, "policy": 3, "generation": 3,
    "rollout": 4, "phase": 4, "episodes": 4, "supervised": 4, "trainer": 4, "checks": 4, "plan": 4, "eval": 4,
    "export": 4, "restore": 4, "parts": 4, "progress": 4, "estimates": 4, "report": 4, "bench": 4,
    "recipe": 5, "launch": 5, "cli": 5, "__main__": 5,
}  # fmt: skip
APART = {("policy", "generation"), ("generation", "policy")} | {
    (a, b) for a in ("envs", "models", "data") for b in ("algorithms", "envs", "models", "data") if a != b
}
LIBRARY_HOMES = {
    "megatron": {"device.py", "models/", "checkpoint/shards.py", "policy/megatron.py"},
    "vllm": {"generation/"},
    "wandb": {"sinks/"},
    "mlflow": {"sinks/"},
}  # fmt: skip
TORCH_FREE = (
    "recipe",
    "cli",
    "plan",
    "models/resolve.py",
    "models/base.py",
    "data",
    "rollout.py",
    "launch",
    "types.py",
    "sinks",
    "console.py",
)


def top(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> list[tuple[str, bool]]:
    """(module, at the top of the file) of every import."""
    tree = ast.parse(file.read_text())
    at_top = {id(n) for n in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "rlctl" else [node.module]
            found += [(name, id(node) in at_top) for name in names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_go_down_the_layers(file):
    mine = top(file)
    if mine == "__init__":
        return
    for module, _ in imports(file):
        if module.startswith("rlctl."):
            other = module.split(".")[1]
            assert LAYER[other] <= LAYER[mine], f"{mine} (layer {LAYER[mine]}) imports {module}"
            assert (mine, other) not in APART, f"{mine} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_library_stays_in_its_place(file):
    name = str(file.relative_to(SOURCE))
    for module, _ in imports(file):
        homes = LIBRARY_HOMES.get(module.split(".")[0])
        assert homes is None or any(name == h or (h.endswith("/") and name.startswith(h)) for h in homes), module


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_only_device_py_knows_the_hardware(file):
    if file.name == "device.py":
        return
    found = re.findall(r"torch\.cuda|[\"']cuda[\"':]|[\"']nccl|[\"']gloo", file.read_text())
    assert not found, found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_hugging_face_tensor_names_stay_in_models(file):
    if top(file) != "models":
        assert not re.findall(r"self_attn|embed_tokens|lm_head|down_proj", file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_dry_runs_load_nothing_heavy(file):
    name = str(file.relative_to(SOURCE))
    if not any(name.startswith(prefix) for prefix in TORCH_FREE):
        return
    heavy = {
        m for m, at_top in imports(file) if at_top and m.split(".")[0] in ("torch", "transformers", "megatron", "vllm")
    }
    assert not heavy


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_functions_fit_on_a_screen(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{node.name} has {length} lines"


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.name != "__init__.py"], ids=lambda f: str(f.relative_to(SOURCE))
)
def test_every_module_says_what_it_does(file):
    assert ast.get_docstring(ast.parse(file.read_text()))
