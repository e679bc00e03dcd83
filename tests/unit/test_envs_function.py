"""An own reward: how it is called, and that nothing it does harms the training."""

import asyncio
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlctl import config
from rlctl.envs import function
from rlctl.envs.base import NoVoteError
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

REWARDS = """
import asyncio, subprocess, sys, time
print("printed at import")

def score(prompt, completion, row):
    print("printed in a call")
    if completion == "hang":
        while True:
            pass
    if completion == "child":
        subprocess.run([sys.executable, "-c", f"import time; open({row['file']!r}, 'w').write('x'); time.sleep(60)"])
    if completion == "raise":
        raise ValueError("no such thing")
    if completion == "die":
        import os
        os._exit(1)
    return {"nan": float("nan"), "none": None, "text": "good", "empty": {}, "infinite": float("inf"),
            "parts": {"a": 1, "b": None}}.get(completion, len(completion))

async def later(prompt, completion, row):
    if completion == "hang":
        await asyncio.sleep(60)
    if completion == "block":
        time.sleep(60)
    await asyncio.sleep(0.3)
    return 1.5

def seen(prompt, completion, row, *, bonus):
    return {"prompt": len(prompt), "row": row["answer"], "bonus": bonus}

def trl_text(completions, prompts, answer, **kwargs):
    assert isinstance(prompts[0], str) and isinstance(completions[0], str), (prompts, completions)
    return [float(a in c) for c, a in zip(completions, answer)]

def trl_chat(completions, prompts, completion_ids, **kwargs):
    assert prompts[0][-1]["role"] == "user" and kwargs["answer"] == ["7"]
    return [len(ids) + 0.5 * (c[0]["content"] == "7") for c, ids in zip(completions, completion_ids)]

def trl_column(completions, level, **kwargs):
    return [0.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "acc": extra_info["n"], "source": data_source}

def one_argument(completion):
    return 1.0

not_a_function = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_file.py"
    path.write_text(textwrap.dedent(REWARDS))
    return path


def make(file, name, *, timeout=1.0, style="rlctl", output_key="answer", **options):
    env = config.Env(reward=f"{file}:{name}", reward_style=style, reward_timeout_seconds=timeout)
    data = config.Data(train_path="my.jsonl", input_key="question", output_key=output_key)
    return function.Environment(function.Config(**options), env, data)


def prompt(question="3+4?", **row):
    return Prompt(messages=(), row={"question": question, "answer": "7"} | row, index=4)


def play(environment, replies, one=None):
    """Rewards, or the errors, of replies that run at the same time."""

    async def episode(reply):
        playing = environment.start(one or prompt())
        await playing.step(Message(role="assistant", content=reply, tokens=(1, 2, 3)))
        return await playing.reward()

    async def everything():
        return await asyncio.gather(*map(episode, replies), return_exceptions=True)

    return asyncio.run(everything())


@pytest.fixture(scope="module")
def scoring(file):
    return make(file, "score", workers=2)


def test_a_float_is_the_part_reward_and_a_dict_names_its_parts(scoring):
    assert play(scoring, ["abc", "parts", "none"]) == [{"reward": 3.0}, {"a": 1.0, "b": None}, {"reward": None}]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("raise", r"ValueError: no such thing \(my_file.py:\d+\)"),
        ("nan", "the reward is nan"),
        ("infinite", "the reward is inf"),
        ("text", "'good', not a number"),
        ("empty", "empty dict"),
        ("die", "died during the call"),
    ],
)
def test_a_failing_reward_is_no_vote_and_the_next_call_works(scoring, reply, says):
    failed, fine = play(scoring, [reply, "abc"])
    assert isinstance(failed, NoVoteError)
    assert re.search(says, str(failed))
    assert fine == {"reward": 3.0}


def test_a_hung_reward_is_killed_with_what_it_started_while_others_go_on(scoring, tmp_path):
    started = tmp_path / "started"
    begin = time.monotonic()
    results = play(scoring, ["hang", "child", "abc"], prompt(file=str(started)))
    assert time.monotonic() - begin < 10
    assert [isinstance(r, NoVoteError) for r in results] == [True, True, False]
    assert "took longer than 1 s and was killed" in str(results[0])
    assert started.exists()
    assert str(started) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_async_rewards_run_at_the_same_time_and_a_late_one_is_cancelled(file):
    environment = make(file, "later")
    begin = time.monotonic()
    results = play(environment, ["ok"] * 40 + ["hang"])
    assert time.monotonic() - begin < 6  # one after the other, 40 calls take 12 s
    assert results[:40] == [{"reward": 1.5}] * 40
    assert "took longer than 1 s and was cancelled" in str(results[40])


def test_an_async_reward_that_blocks_its_loop_is_killed_and_replaced(file):
    environment = make(file, "later")
    assert "was killed" in str(play(environment, ["block"])[0])
    assert play(environment, ["ok"]) == [{"reward": 1.5}]


def test_the_function_gets_the_rows_own_prompt_the_row_and_configured_arguments(file):
    environment = make(file, "seen", kwargs={"bonus": 0.25})
    assert play(environment, ["x"]) == [{"prompt": 4.0, "row": 7.0, "bonus": 0.25}]


def test_a_trl_reward_sees_text_for_text_and_messages_for_messages(file):
    assert play(make(file, "trl_text", style="trl"), ["it is 7", "8"]) == [{"reward": 1.0}, {"reward": 0.0}]
    chat = prompt(question=[{"role": "user", "content": "3+4?"}])
    assert play(make(file, "trl_chat", style="trl"), ["7", "8"], chat) == [{"reward": 3.5}, {"reward": 3.0}]


def test_a_trl_reward_that_takes_a_column_needs_it_in_every_row(file):
    environment = make(file, "trl_column", style="trl")
    environment.check([prompt(level=1)])
    with pytest.raises(RlctlError, match="takes `level`, no column of row 5"):
        environment.check([prompt()])


def test_a_verl_reward_gets_ground_truth_and_its_score_is_the_reward(file):
    environment = make(file, "compute_score", style="verl", output_key=None)
    verl = prompt(data_source="gsm8k", reward_model={"style": "rule", "ground_truth": "7"}, extra_info={"n": 1})
    environment.check([verl])
    assert play(environment, ["is 7", "is 8"], verl) == [{"score": 1.0}, {"score": 0.0}]
    with pytest.raises(RlctlError, match="needs a ground truth"):
        environment.check([prompt()])


@pytest.mark.parametrize(
    ("name", "style", "message"),
    [
        ("one_argument", "rlctl", r"takes \(completion\), but env.reward_style `rlctl` calls it with \(prompt, comp"),
        ("score", "verl", r"takes \(prompt, completion, row\), but env.reward_style `verl` calls it with \(data_so"),
        ("not_a_function", "rlctl", "is a int, not a function"),
        ("scores", "rlctl", "has no `scores`"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_start_up(file, name, style, message):
    with pytest.raises(RlctlError, match=message) as caught:
        make(file, name, style=style)
    assert caught.value.exit_status == 2


def test_a_file_that_does_not_import_is_refused_with_its_error(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere")
    with pytest.raises(RlctlError, match="does not import: ModuleNotFoundError"):
        make(broken, "score")


def test_a_reward_file_may_import_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 2.5")
    reward = tmp_path / "reward.py"
    reward.write_text("import neighbour_of_reward\ndef score(p, c, r): return neighbour_of_reward.VALUE\n")
    assert play(make(reward, "score"), ["x"]) == [{"reward": 2.5}]


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed_even_while_they_hang(tmp_path):
    reward = tmp_path / "reward.py"
    pid = tmp_path / "pid"
    hangs = f"    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    while True: pass\n"
    reward.write_text("import os\ndef f(prompt, completion, row):\n" + hangs)
    code = f"from tests.unit.test_envs_function import make, play; play(make({str(reward)!r}, 'f', timeout=60), ['x'])"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: pid.exists() and pid.read_text())
    worker = int(pid.read_text())
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    wait_for(lambda: not running(worker))


def running(process):
    """Whether a process runs; an unreaped one does not."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_training_without_prompts_or_reward_is_refused():
    with pytest.raises(RlctlError, match="no prompts to score"):
        function.Environment(function.Config(), config.Env(reward="a.py:f"), config.Data())
    with pytest.raises(RlctlError, match="needs a reward"):
        function.Environment(function.Config(), config.Env(name="function"), config.Data(train_path="x.jsonl"))
