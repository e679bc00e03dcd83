"""Rollouts: exact masks, seeds and votes, and the same batch for any timing of the engine and number of replicas."""

import json
import subprocess
import sys

import pytest

from rlctl import config, rollout
from rlctl.envs.base import NoVoteError
from rlctl.errors import RlctlError
from rlctl.generation.base import request_seed
from rlctl.models import tiny_tokenizer
from rlctl.phase import write_rollouts
from tests import distributed
from tests.unit import rollout_cases as cases


def test_a_batch_is_ordered_by_group_and_sample_however_completions_arrive():
    batches = [
        cases.as_lists(
            cases.collect(engine=cases.LateEngine(order=order), environment=cases.Dialogue(delay=0.02)).next(1)
        )
        for order in range(4)
    ]
    assert batches[0]["group"] == [0, 0, 1, 1, 2, 2]
    assert all(b == batches[0] for b in batches)


def test_the_mask_covers_exactly_what_the_engine_sampled_stop_token_included():
    engine = cases.LateEngine()
    rollouts = cases.collect(environment=cases.Dialogue(turns=3), engine=engine)
    batch = rollouts.next(1)
    for i, one in enumerate(rollouts.last):
        rows = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        turns = [r for r in engine.submitted if r.id == i]
        assert len(turns) == 3
        expected_tokens, expected_mask, expected_logprobs = [], [], []
        for request in turns:  # a request's prompt is everything so far: what is new in it was not sampled
            added = request.prompt_tokens[len(expected_tokens) :]
            assert list(request.prompt_tokens[: len(expected_tokens)]) == expected_tokens
            sampled = engine.complete(request)
            expected_tokens += [*added, *sampled.tokens]
            expected_mask += [False] * len(added) + [True] * len(sampled.tokens)
            expected_logprobs += [0.0] * len(added) + list(sampled.logprobs)
        assert list(one.tokens) == expected_tokens == batch.tokens[rows].tolist()
        assert list(one.mask) == expected_mask == batch.mask[rows].tolist()
        assert batch.rollout_logprobs[rows].tolist() == pytest.approx(expected_logprobs)
        assert [m.role for m in one.messages] == ["user", "assistant"] * 3
        text = tiny_tokenizer.build(288).decode(expected_tokens)
        assert text.count("<|im_start|>assistant\n") == 3
        assert "and 1<|im_end|>" in text
        assert "and 2<|im_end|>" in text


def test_requests_carry_seeds_of_step_prompt_sample_and_turn():
    engine = cases.LateEngine()
    rollouts = cases.collect(cases.recipe(data__shuffle=False), cases.Dialogue(turns=2), engine)
    rollouts.next(2)
    seeds = {r.seed for r in engine.submitted}
    assert seeds == {request_seed(42, 2, p, s, t) for p in (3, 4, 5) for s in (0, 1) for t in (0, 1)}


def test_a_prompt_that_a_step_takes_twice_gives_different_samples():
    engine = cases.LateEngine()
    cases.collect(cases.recipe(prompts=4), cases.Dialogue(size=2), engine).next(1)
    assert len({r.seed for r in engine.submitted}) == 8


def test_reward_is_the_weighted_sum_of_parts_and_a_part_not_named_counts_once():
    weighted = cases.collect(cases.recipe(env__reward_weights={"b": 0.25}), cases.Dialogue(turns=2)).next(1)
    assert weighted.rewards.tolist() == pytest.approx((weighted.reward_parts["a"] + 0.25 * 2).tolist())


def test_a_weight_for_a_part_that_no_reward_has_is_refused():
    with pytest.raises(RlctlError, match="names `aa`") as caught:
        cases.collect(cases.recipe(env__reward_weights={"aa": 1.0})).next(1)
    assert "did you mean `a`?" in caught.value.hint


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (NoVoteError("took too long"), "took too long"),
        (ValueError("environment down"), "environment down"),
        ({"a": 1.0, "b": None}, "part `b` gave no vote"),
        ({"a": float("nan")}, "part `a` gave no vote"),
    ],
)
def test_a_failing_environment_is_no_vote_counted_and_explained(failure, says):
    environment = cases.Dialogue(fails=lambda prompt, replies: failure if prompt.index == 1 else None)
    rollouts = cases.collect(cases.recipe(data__shuffle=False), environment)
    batch = rollouts.next(1)
    assert batch.valid.tolist() == [True, True, False, False, True, True]
    assert not batch.mask[int(batch.offsets[2]) : int(batch.offsets[4])].any()
    assert batch.rewards[2:4].tolist() == [0.0, 0.0]
    assert rollouts.first_error == says
    assert rollouts.stats["rollout/invalid"] == 2
    assert rollouts.stats["rollout/invalid_share"] == pytest.approx(1 / 3)
    voting = batch.rewards[batch.valid]
    assert rollouts.stats["rollout/reward"] == pytest.approx(float(voting.mean()))
    assert environment.closed == 6


def test_a_step_without_any_vote_ends_the_job_with_the_first_error():
    with pytest.raises(RlctlError, match="none of 6 rollouts has a reward; the first says: down") as caught:
        cases.collect(environment=cases.Dialogue(fails=lambda *a: RuntimeError("down"))).next(1)
    assert caught.value.exit_status == 1


def test_a_completion_cut_by_length_ends_its_episode_and_is_marked():
    made = cases.recipe()
    made.policy.generation.max_new_tokens = 1
    engine = cases.LateEngine()
    batch = cases.collect(made, cases.Dialogue(turns=3), engine).next(1)
    assert batch.truncated.all()
    assert len(engine.submitted) == 6
    assert batch.valid.all()


def test_no_sequence_exceeds_the_total_length_in_any_turn():
    made = cases.recipe()
    made.policy.max_total_sequence_length = 90
    engine = cases.LateEngine()
    batch = cases.collect(made, cases.Dialogue(turns=9), engine).next(1)
    assert int(batch.lengths.max()) <= 90
    assert all(len(r.prompt_tokens) + r.max_new_tokens == 90 for r in engine.submitted)
    assert batch.truncated.all()
    assert (batch.reward_parts["b"] < 9).all()


def test_an_aborted_request_is_no_vote():
    class Drops(cases.LateEngine):
        def complete(self, request):
            done = super().complete(request)
            return done if request.id else cases.Completion(**vars(done) | {"finish_reason": "abort"})

    rollouts = cases.collect(engine=Drops())
    assert rollouts.next(1).valid.tolist() == [False] + [True] * 5
    assert rollouts.first_error == "the engine dropped its request"


def test_long_prompts_are_dropped_before_the_first_step():
    length = len(cases.renderer().prompt(cases.Dialogue().dataset("train")[0].messages))
    made = cases.recipe(data__max_input_seq_length=length)
    rollouts = cases.collect(made, cases.Dialogue(size=12))
    assert (len(rollouts.prompts), rollouts.dropped) == (10, 2)
    with pytest.raises(RlctlError, match="max_input_seq_length 256"):
        cases.collect(cases.recipe(data__max_input_seq_length=256))


def test_weights_are_loaded_awake_and_later_tokens_carry_the_version():
    engine = cases.LateEngine()
    rollouts = cases.collect(engine=engine)
    assert set(rollouts.next(1).version.tolist()) == {0}
    engine.calls.clear()
    rollouts.publish(None, 1)
    assert engine.calls == ["wake weights", "load", "wake kv_cache"]
    assert set(rollouts.next(2).version.tolist()) == {1}
    assert engine.calls[-2:] == ["sleep kv_cache", "sleep weights"]


def test_a_dump_has_a_line_a_rollout_with_text_reward_and_flags(tmp_path):
    environment = cases.Dialogue(fails=lambda prompt, replies: {"a": None} if prompt.index == 1 else None)
    rollouts = cases.collect(cases.recipe(data__shuffle=False), environment)
    batch = rollouts.next(1)
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    write_rollouts(path, rollouts.last, rollouts.renderer.tokenizer)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["group"], x["sample"], x["index"]) for x in lines] == [(g, s, g) for g in range(3) for s in range(2)]
    assert lines[0]["prompt"] == [{"role": "user", "content": "number 0"}]
    assert lines[0]["reward"] == float(batch.rewards[0]) == len(lines[0]["response"]) + 1
    assert lines[0]["response"] == rollouts.last[0].messages[-1].content
    assert (lines[2]["reward"], lines[2]["valid"], lines[2]["error"]) == (None, False, "part `a` gave no vote")
    assert [f.name for f in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("env", "data", "message"),
    [
        ({}, {}, "names no task"),
        ({"name": "arithmetics"}, {}, "unknown environment `arithmetics`"),
        ({"name": "toy", "reward": "a.py:f"}, {}, "are set"),
        ({"name": "toy", "reward_timeout_seconds": 0.0}, {}, "not positive"),
        ({"name": "toy"}, {"train_path": "my.jsonl"}, "data.train_path is set as well"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(tmp_path, monkeypatch, env, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"question": "a"}\n')
    recipe = config.Recipe(env=config.Env(**env), data=config.Data(**data))
    with pytest.raises(RlctlError, match=message) as caught:
        rollout.load_prompts(recipe, rollout.build_environment(recipe))
    assert caught.value.exit_status == 2


def test_own_data_and_reward_need_five_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"q": "3+4?", "a": "7"}\n{"q": "1+1?", "a": "2"}\n')
    (tmp_path / "my_file.py").write_text("def score(prompt, completion, row):\n    return float(len(completion))\n")
    made = cases.recipe(prompts=2)
    made.data = config.Data(train_path="my.jsonl", input_key="q", output_key="a", system_prompt="Be brief.")
    made.env = config.Env(reward="my_file.py:score")
    rollouts = cases.collect(made, rollout.build_environment(made))
    batch = rollouts.next(1)
    assert batch.rewards.tolist() == [len(r.messages[-1].content) for r in rollouts.last]
    assert rollouts.last[0].messages[0].content == "Be brief."


@pytest.fixture(scope="module")
def on_two_ranks():
    """Each case's results by rank; one start of the processes for all of them."""
    by_rank = distributed.run("tests.unit.rollout_cases:in_processes", 2, list(CASES.values()))
    return {name: [results[i] for results in by_rank] for i, name in enumerate(CASES)}


CASES = {  # ranks of an engine, prompts, whether odd prompts fail, or reward all samples alike
    "two engines": (1, 3, False),
    "one engine of two ranks": (2, 3, False),
    "an engine without work": (1, 1, False),
    "failures": (1, 6, True),
    "dynamic sampling": (1, 3, "alike"),
}


def test_a_task_is_judged_without_torch(tmp_path):
    (tmp_path / "my.jsonl").write_text('{"question": "3+4?", "answer": "7"}\n')
    (tmp_path / "my_file.py").write_text("def score(prompt, completion, row): return 1.0\n")
    code = """
import sys
from rlctl import config, rollout
own = {"train_path": "my.jsonl", "output_key": "answer"}
for env, data in (({"name": "arithmetic"}, {}), ({"reward": "my_file.py:score"}, own), ({"name": "math"}, own)):
    recipe = config.Recipe(env=config.Env(**env), data=config.Data(**data))
    assert rollout.load_prompts(recipe, rollout.build_environment(recipe))
print(sorted({"torch", "transformers", "vllm", "megatron"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name != "failures"])
def test_the_batch_is_the_same_on_every_rank_and_for_any_replicas(on_two_ranks, case):
    ranks_per_replica, prompts, odd = CASES[case]
    made = cases.recipe(prompts=prompts, samples=1 if prompts == 1 else 2)
    alone = cases.refilled(cases.Dialogue(turns=2)) if odd else cases.collect(made, cases.Dialogue(turns=2))
    expected = cases.as_lists(alone.next(1))
    results = on_two_ranks[case]
    assert [r[0] for r in results] == [expected] * 2
    assert [r[2] for r in results] == [alone.stats] * 2
    assert results[0][1] == [(r.group, r.sample, r.tokens, r.reward) for r in alone.last]
    played = [r[4] for r in results]
    assert sum(played) == len(expected["group"]) * alone.stats.get("rollout/rounds", 1)
    assert bool(played[1]) == (case in ("two engines", "dynamic sampling")) or case == "an engine without work"


@pytest.mark.slow
def test_votes_and_the_first_error_agree_on_every_rank(on_two_ranks):
    results = on_two_ranks["failures"]
    assert results[0][0] == results[1][0]
    assert sum(results[0][0]["valid"]) == 6
    assert [r[3] for r in results] == ["down", "down"]


def test_rewards_that_differ_in_their_parts_are_refused_by_name():
    """A part that one reply leaves out would count as 0."""
    rollout._check_parts({("a", "b")})
    rollout._check_parts(set())
    with pytest.raises(RlctlError, match="a in one rollout, a, b in another"):
        rollout._check_parts({("a",), ("a", "b")})
