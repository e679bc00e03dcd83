"""What users get wrong: exit 2 or 3, one `error:` and one `hint:`, no traceback, nothing started.

The messages are kept in tests/golden/mistakes.txt; RLCTL_UPDATE_GOLDEN=1 writes it anew: read it before a commit.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from rlctl import device
from rlctl.cli.app import run
from rlctl.device import Hardware
from rlctl.launch import local

GOLDEN = Path(__file__).parents[1] / "golden" / "mistakes.txt"
HERE = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)

FILES = {
    "broken.yaml": "rlctl_recipe: 1\ngrpo:\n  seed: [1, 2\npolicy: {}\n",
    "other_tool.yaml": "defaults: grpo_math_1B.yaml\npolicy:\n  model_name: x\n",
    "typo.yaml": "rlctl_recipe: 1\npolicy:\n  model_name: tiny-llama\n  optimizer:\n    learning_rate: 1.0e-5\n",
    "type.yaml": "rlctl_recipe: 1\ngrpo:\n  max_num_steps: many\n",
    "dpo.yaml": "rlctl_recipe: 1\nalgorithm: dpo\n",
    "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejectd": "c"}\n',
    "half.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    "data.jsonl": '{"question": "1+1?", "answer": "2"}\n',
    "empty.jsonl": "",
    "reward.py": "def score(prompt, completion, row):\n    return 1.0\n",
    "bad_reward.py": "import not_a_module\n",
    "taken/metrics.jsonl": "{}\n",
    "plain_file": "",
    "no_tokenizer/model.safetensors": "",
    "no_config/model.safetensors": "",
}
TINY_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}  # fmt: skip
OWN = "train grpo --model tiny-llama policy.max_total_sequence_length=64 data.train_path=data.jsonl"
TINY = "train grpo --recipe smoke-tiny"

MISTAKES = {  # what is wrong -> (exit status, command line)
    "misspelt command": (2, "tarin grpo"),
    "misspelt algorithm": (2, "train gpro --model smollm2-135m"),
    "misspelt option": (2, "train grpo --modle smollm2-135m"),
    "no algorithm": (2, "train --model smollm2-135m"),
    "misspelt backend": (2, "train grpo --backend megatorn"),
    "misspelt recipe": (2, "train grpo --recipe smoke-tinny"),
    "missing recipe file": (2, "train grpo --recipe ./mine.yaml"),
    "missing recipe directory": (2, "train grpo --recipe smoke-tiny --recipe-dir mine"),
    "recipe is not YAML": (2, "train grpo --recipe broken.yaml"),
    "recipe of another tool": (2, "train grpo --recipe other_tool.yaml"),
    "recipe of another algorithm": (2, "train grpo --recipe dpo.yaml"),
    "pairs without an answer": (2, "train dpo --recipe smoke-dpo data.train_path=pairs.jsonl"),
    "conversation without an answer": (2, "train sft --recipe smoke-sft data.train_path=half.jsonl"),
    "reward for data that are learned": (2, "train sft --recipe smoke-sft env.reward=reward.py:score"),
    "evaluation of a data set": (2, "eval tiny-llama --recipe smoke-sft"),
    "plan without rollouts": (2, "plan --recipe smoke-sft --gpus 8 --gpu h100"),
    "unknown key in a file": (2, "train grpo --recipe typo.yaml"),
    "wrong type in a file": (2, "train grpo --recipe type.yaml"),
    "misspelt key": (2, f"{TINY} policy.optimiser.lr=1e-5"),
    "new key with a plus": (2, f"{TINY} +new.key=1"),
    "key of another section": (2, f"{TINY} grpo.lr=1e-5"),
    "key below a value": (2, f"{TINY} grpo.seed.x=1"),
    "value for a section": (2, f"{TINY} policy.optimizer=adamw"),
    "deleted key": (2, f"{TINY} ~policy.optimizer.lr"),
    "sweep": (2, f"{TINY} policy.optimizer.lr=1e-5,1e-6"),
    "setting of hydra": (2, f"{TINY} hydra.run.dir=x"),
    "no key=value": (2, f"{TINY} fast"),
    "value that does not parse": (2, f"{TINY} policy.tokenizer.chat_template={{{{x}}}}"),
    "wrong type": (2, f"{TINY} grpo.max_num_steps=many"),
    "null where a number is needed": (2, f"{TINY} policy.optimizer.lr=null"),
    "unknown precision": (2, f"{TINY} policy.precision=float16"),
    "count of zero": (2, f"{TINY} grpo.num_prompts_per_step=0"),
    "key set twice": (2, f"{TINY} grpo.seed=1 grpo.seed=2"),
    "misspelt model": (2, "train grpo --model smolm2-135m"),
    "missing model directory": (2, "train grpo --model ./my_model env.name=arithmetic"),
    "model not downloaded": (3, "train grpo --model someone/some-model env.name=arithmetic"),
    "model without config": (2, "train grpo --model ./no_config env.name=arithmetic"),
    "no tokenizer": (2, "train grpo --model ./no_tokenizer env.name=arithmetic"),
    "no chat template": (2, "train grpo --model llama-3.2-1b env.name=arithmetic"),
    "no model": (2, "train grpo env.name=arithmetic"),
    "no task": (2, "train grpo --model tiny-llama"),
    "misspelt task": (2, "train grpo --model tiny-llama env.name=arithmetik"),
    "bad task option": (2, "train grpo --model smollm2-135m env.arithmetic.digits=9"),
    "option of another task": (2, f"{TINY} env.arithmetic.digits=2"),
    "both backends": (2, f"{TINY} policy.dtensor_cfg.enabled=true"),
    "no backend": (2, f"{TINY} policy.megatron_cfg.enabled=false policy.dtensor_cfg.enabled=false"),
    "backend contradicts a key": (2, f"{TINY} --backend dtensor policy.megatron_cfg.enabled=true"),
    "flag contradicts a key": (2, f"{TINY} --model smollm2-135m policy.model_name=tiny-llama"),
    "key of the other backend": (2, f"{TINY} --backend dtensor policy.megatron_cfg.tensor_model_parallel_size=2"),
    "missing data file": (2, "train grpo --model tiny-llama data.train_path=mine.jsonl env.reward=reward.py:score"),
    "empty data set": (2, "train grpo --model tiny-llama data.train_path=empty.jsonl env.reward=reward.py:score"),
    "wrong column": (2, f"{OWN} env.reward=reward.py:score data.input_key=prompt"),
    "no data for a reward": (2, "train grpo --model tiny-llama env.reward=reward.py:score"),
    "data for a task that makes its own": (2, f"{OWN} env.name=arithmetic"),
    "missing reward file": (2, f"{OWN} env.reward=my_reward.py:score"),
    "reward without function": (2, f"{OWN} env.reward=reward.py"),
    "misspelt reward function": (2, f"{OWN} env.reward=reward.py:scoer"),
    "reward file does not import": (2, f"{OWN} env.reward=bad_reward.py:score"),
    "processes do not divide": (3, f"{TINY} --procs 3 policy.megatron_cfg.tensor_model_parallel_size=2"),
    "heads do not divide": (3, f"{TINY} --procs 3 policy.megatron_cfg.tensor_model_parallel_size=3"),
    "batch smaller than ranks": (3, f"{TINY} --procs 16 grpo.num_prompts_per_step=1"),
    "updates do not divide": (3, f"{TINY} policy.train_global_batch_size=24"),
    "microbatch below a sequence": (3, f"{TINY} policy.sequence_packing.train_mb_tokens=32"),
    "response longer than the sequence": (2, f"{TINY} policy.generation.max_new_tokens=64"),
    "sequence longer than the model's": (3, f"{TINY} policy.max_total_sequence_length=1024"),
    "sequence parallelism alone": (2, f"{TINY} policy.megatron_cfg.sequence_parallel=true"),
    "decay without end": (2, f"{TINY} policy.scheduler.decay_style=cosine"),
    "setting without effect": (2, f"{TINY} policy.scheduler.decay_steps=5"),
    "run directory is taken": (2, f"{TINY} --run-dir taken"),
    "run directory is a file": (2, f"{TINY} --run-dir plain_file"),
    "run directory cannot be made": (2, f"{TINY} --run-dir plain_file/run"),
    "processes and GPUs": (2, f"{TINY} --procs 2 --gpus-per-node 2"),
    "more GPUs than here": (3, f"{TINY} --gpus-per-node 8"),
    "more nodes than one": (3, f"{TINY} --nodes 2"),
    "larger than this host": (3, "train grpo --model qwen2.5-7b-instruct --procs 2 env.name=arithmetic"),
    "padding above the budget": (
        3,
        f"{TINY} policy.megatron_cfg.context_parallel_size=2 policy.max_total_sequence_length=63 "
        "policy.sequence_packing.train_mb_tokens=63",
    ),
    "context parallelism with dtensor": (2, f"{TINY} --backend dtensor policy.dtensor_cfg.context_parallel_size=2"),
    "launcher env outside of one": (3, f"{TINY} --launcher env --run-dir new"),
    "recipe to show is unknown": (2, "recipes show smoke-tinny"),
    "recipe to check is wrong": (2, "recipes check typo.yaml"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "no_tokenizer" / "config.json").write_text(json.dumps(TINY_CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "probe", lambda: HERE)
    monkeypatch.setattr(local, "run", lambda *args, **kwargs: pytest.fail("a job was started"))
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RLCTL_RECIPES"):
        monkeypatch.delenv(name, raising=False)


def _golden() -> dict[str, str]:
    blocks = GOLDEN.read_text().split("\n\n") if GOLDEN.is_file() else []
    return {b.split("\n")[0].removeprefix("# "): b.strip() for b in blocks if b.strip()}


def _told(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and the golden block of a mistake."""
    _, line = MISTAKES[name]
    status = run(shlex.split(line))
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert err.count("error:") == 1 and err.count("hint:") == 1, err
    ending = err[err.index("error:") :].strip().replace(str(Path.cwd()), "CWD")
    ending = re.sub(r"about [\d.]+ GB", "about N GB", ending)  # the memory model has tests of its own
    return status, f"# {name}\n$ rlctl {line}\n{ending}\nexit {status}"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_error_and_one_hint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, block = _told(name, capsys)
    assert status == MISTAKES[name][0]
    if "RLCTL_UPDATE_GOLDEN" in os.environ:
        blocks = {k: v for k, v in _golden().items() if k in MISTAKES} | {name: block}
        GOLDEN.write_text("\n\n".join(blocks[n] for n in MISTAKES if n in blocks) + "\n")
    assert block == _golden()[name]


def test_the_golden_file_has_no_other_mistakes() -> None:
    assert list(_golden()) == list(MISTAKES)


@pytest.mark.parametrize("name", ["misspelt command", "misspelt key", "more GPUs than here", "no task"])
def test_json_tells_an_error_as_one_document_on_stdout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, line = MISTAKES[name]
    status = run([*shlex.split(line), "--json"] if not line.startswith("tarin") else ["tarin", "--json"])
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert status == expected == document["exit_status"]
    assert document["error"] and document["hint"] and err == ""
    assert ("plan" in document) == (name == "more GPUs than here")


def test_no_run_directory_is_left_by_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    run(shlex.split(f"{TINY} --run-dir new grpo.seed=x"))
    run(shlex.split(f"{TINY} --run-dir new --gpus-per-node 8"))
    assert not Path("new").exists()
