"""Reading run directories, what is concluded from them, and the page: complete, self-contained, escaped."""

from __future__ import annotations

import fcntl
import html.parser
import json
import re
import shlex

import pytest
import yaml

from rlctl import config
from rlctl.errors import RlctlError
from rlctl.recipe import compose
from rlctl.report import charts, compare, findings, page
from rlctl.report.run import Run, differences, find_runs, open_run, read_samples


def row(step, reward, **more):
    return {
        "step": step, "rollout/reward": reward, "rollout/reward_std": 0.1, "rollout/response_length": 20.0,
        "rollout/total_length": 30.0, "rollout/truncated_share": 0.0, "rollout/invalid_share": 0.0,
        "mismatch/token_mult_prob_error": 1.001, "train/entropy": 2.0, "train/grad_norm": 0.5, "train/loss": 0.0,
        "time/generate_seconds": 3.0, "time/train_seconds": 1.0, "time/step_seconds": 5.0,
    } | more  # fmt: skip


def sample(reward, response="fine", *, valid=True, group=0):
    return {
        "group": group, "sample": 0, "index": group, "prompt": [{"role": "user", "content": "What?"}],
        "response": response, "reward": reward if valid else None, "reward_parts": {"a": reward} if valid else {},
        "valid": valid, "truncated": False, "error": None if valid else "the grader hung", "response_tokens": 3,
    }  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """Make a run directory of metrics rows and dumps."""

    def make(rows, dumps=(), name="run", **steps):
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True)
        recipe = compose.as_values(compose.compose("grpo", "smoke-tiny").recipe)
        recipe["grpo"] |= {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": len(rows)}
        recipe["grpo"] |= steps
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (folder / "command.txt").write_text("rlctl train grpo --recipe smoke-tiny\n")
        for step, samples in dumps:
            lines = "".join(json.dumps(s) + "\n" for s in samples)
            (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines)
        return Run(folder)

    return make


def rising(steps=20, **more):
    return [row(i, i / steps, **more) for i in range(1, steps + 1)]


def test_a_reward_that_rises_beyond_its_noise_is_learning(made):
    answer = findings.learned(made(rising()))
    assert answer.verdict == "good"
    assert "from 0.125 (mean of steps 1 to 4) to 0.925 (mean of steps 17 to 20)" in answer.text


def test_a_rising_reward_beside_bad_health_is_not_called_good(made):
    answer = findings.learned(made(rising(**{"mismatch/token_mult_prob_error": 1.2})))
    assert answer.verdict == "open" and "not all signs of health are good" in answer.text


def test_a_flat_or_falling_reward_is_not(made):
    assert findings.learned(made([row(i, 0.5 + 0.001 * (i % 2)) for i in range(1, 21)])).verdict == "open"
    assert findings.learned(made([row(i, 1 - i / 20) for i in range(1, 21)], name="b")).verdict == "bad"
    assert findings.learned(made([row(1, 0.5)], name="c")).verdict == "open"


def test_training_on_data_is_told_by_its_loss(made):
    rows = [{"step": i, "train/loss": 3.0 - 0.1 * i, "train/margin": 0.1 * i} for i in range(1, 21)]
    run = made(rows)
    answer = findings.learned(run)
    assert answer.verdict == "open" and "loss went from 2.750 (mean of steps 1 to 4) to 1.150" in answer.text
    text = page.page(run)
    Page(text)
    assert "<figcaption>train/margin" in text and "Other metrics" in text


def test_validation_is_told_with_its_best(made):
    rows = [{"step": 0, "val/reward": 0.1}, *rising()]
    rows[10]["val/reward"], rows[20]["val/reward"] = 0.9, 0.7
    text = findings.learned(made(rows)).text
    assert "from 0.100 (after step 0) to 0.700 (step 20); its best is 0.900 (step 10)" in text


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"mismatch/token_mult_prob_error": 1.2}, "mismatch"),
        ({"train/loss": None}, "not finite"),
        ({"rollout/invalid_share": 0.5}, "without a reward"),
        ({"rollout/truncated_share": 0.9}, "cut off"),
        ({"train/entropy": 0.01}, "entropy"),
        ({"train/grad_norm": 99.0}, "gradient norm"),
        ({"train/grad_norm": 0.0}, "teach nothing"),
    ],
    ids=str,
)
def test_each_sign_of_illness_is_found_and_named(made, broken, named):
    rows = rising()
    sick = 1 if broken.get("train/grad_norm") else 8
    for r in rows[-sick:]:
        r.update(broken)
    answer = findings.healthy(made(rows))
    assert answer.verdict == "bad" and named in answer.text
    assert [c.ok for c in findings.checks(made(rows, name="again"))].count(False) == 1


def test_a_healthy_run_passes_all_checks(made):
    run = made(rising())
    assert all(c.ok for c in findings.checks(run)) and len(findings.checks(run)) == 7
    assert findings.healthy(run).verdict == "good"


def test_phases_and_what_is_left_add_up_to_the_step(made):
    found = {p.name: p for p in findings.phases(made(rising()))}
    assert [found[n].share for n in ("generate", "train", "other")] == pytest.approx([0.6, 0.2, 0.2])
    assert found["other"].median_seconds == 1.0
    assert findings.slow(made(rising(), name="b")).text.startswith("Generate: 60% of the steps' time")


def test_a_logged_rest_of_the_step_is_not_lost(made):
    found = {p.name: p.share for p in findings.phases(made(rising(**{"time/other_seconds": 1.0})))}
    assert found == pytest.approx({"generate": 0.6, "train": 0.2, "other": 0.2})


def test_tokens_a_second_count_what_was_sampled_and_what_was_trained(made):
    rates = findings.tokens_per_second(made([row(1, 0.1, **{"rollout/invalid_share": 0.25})]))
    assert [points[0][1] for points in rates.values()] == pytest.approx([20 * 8 * 0.75 / 3, 30 * 8 * 0.75 / 5])


def test_a_step_that_was_done_twice_counts_as_its_later_line(made):
    run = made([row(1, 0.1), row(2, 0.2), row(2, 0.3)])
    assert run.series("rollout/reward") == [(1, 0.1), (2, 0.3)]


def test_a_run_is_running_while_its_lock_is_held(made):
    run = made(rising(), max_num_steps=99)
    assert run.status == "stopped"
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.status == "running"
    assert run.status == "stopped"
    (run.path / "logs").mkdir()
    (run.path / "logs" / "error_rank_0.json").write_text(
        json.dumps({"error": "out of memory", "hint": "", "phase": "train"})
    )
    assert (run.status, run.error) == ("failed", "out of memory")
    assert made(rising(), name="b").status == "finished"


def test_the_steps_of_a_run_are_those_that_its_data_have(made):
    run = made(rising(), max_num_steps=99)
    (run.path / "checkpoints/step_000010").mkdir(parents=True)
    (run.path / "checkpoints/step_000010/trainer.json").write_text('{"epoch_steps": 20}')
    assert (run.planned_steps, run.status) == (20, "finished")


def test_changed_keys_are_those_that_differ_from_the_defaults(made):
    changed = {key: (value, default) for key, value, default in made(rising()).changed}
    assert changed["grpo.num_prompts_per_step"] == (4, config.Steps().num_prompts_per_step)
    assert changed["policy.optimizer.lr"] == (3e-3, config.Optimizer().lr)
    assert "policy.optimizer.betas" not in changed and "env.toy.wanted" not in changed and "grpo.seed" not in changed


def test_runs_are_found_but_evaluations_are_not_runs(made, tmp_path):
    run = made(rising())
    (run.path / "eval" / "one").mkdir(parents=True)
    for name in ("recipe.yaml", "eval.json"):
        (run.path / "eval" / "one" / name).write_text("{}")
    assert [r.path for r in find_runs(tmp_path)] == [run.path]
    assert open_run(run.path).steps == 20


class Page(html.parser.HTMLParser):
    """Collects what a page refers to, and checks that elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.outside = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "data", "srcset")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(made):
    dumps = [(1, [sample(0.0), sample(0.5)]), (20, [sample(1.0), sample(0.25), sample(0, valid=False)])]
    run = made([{"step": 0, "val/reward": 0.1}, *rising(**{"train/kl": 0.01, "val/reward": 0.5})], dumps)
    text = page.page(run)
    parsed = Page(text)
    assert parsed.outside == [] and "script" not in parsed.tags and "link" not in parsed.tags
    assert "url(" not in text and "@import" not in text and "http" not in text
    for heading in ("Did it learn?", "Is it healthy?", "What is slow?", "Samples", "What was run?"):
        assert f"<h2>{heading}</h2>" in text
    for shown in (
        "KL to the reference",
        "Validation reward",
        "Seconds a step, by phase",
        "the grader hung",
        "Step 20, best",
    ):
        assert shown in text
    assert "rlctl train grpo --recipe smoke-tiny" in text and page.rerun_line(run) in text
    assert page.write(run).read_text() == text


def test_what_a_model_writes_cannot_change_the_page(made):
    text = page.page(made(rising(), [(20, [sample(1.0, "</pre><script>alert(1)</script>\x1b[2J")])]))
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;" in text and "\x1b" not in text


def test_a_run_without_a_step_has_a_page(made):
    assert "No step is logged" in page.page(made([]))
    Page(page.page(made([], name="b")))


def test_a_comparison_shows_each_run_and_only_what_differs(made, tmp_path):
    runs = [made(rising(), name="first"), made(rising(), name="second", seed=7)]
    assert differences(runs) == [("grpo.seed", [42, 7])]
    text = compare.write_comparison(runs, tmp_path / "both.html").read_text()
    Page(text)
    assert "grpo.seed" in text and "grpo.max_num_steps" not in text
    assert text.count("first, step 20: 1") >= 1 and text.count("second, step 20: 1") >= 1


def test_damaged_lines_are_left_out_and_named(made):
    run = made(rising(), [(20, [sample(1.0), sample(0.5)])])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "rollout/reward": "much"}\n\xff\xfe\n[1]\n{"step": 22, "rollout/rew')
    dump = run.path / "rollouts/step_000020.jsonl"
    with dump.open("a") as file:
        file.write('{"group": 1}\n{"gro')
    (run.path / "environment.json").write_text("{")
    (run.path / "checks.json").write_text('{"ok": true}')
    assert (run.steps, run.last("rollout/reward"), len(run.rows)) == (20, 1.0, 20)
    assert run.damaged == [
        "metrics.jsonl:21: `rollout/reward` is no number",
        "metrics.jsonl:22: not JSON",
        "metrics.jsonl:23: no line of metrics",
        "metrics.jsonl:24: no end of line",
        "environment.json: not JSON",
        "checks.json: no list of checks",
    ]
    read = read_samples(dump)
    assert [s["reward"] for s in read.rows] == [1.0, 0.5]
    assert read.damaged == [
        "rollouts/step_000020.jsonl:3: no sample: `sample` does not fit",
        "rollouts/step_000020.jsonl:4: no end of line",
    ]
    text = page.page(run)
    assert "metrics.jsonl:22: not JSON" in text and "rollouts/step_000020.jsonl:4: no end of line" in text


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "cannot be read"), ("a: 1", "lacks `algorithm`"), ("- 1", "lacks `algorithm`")], ids=str
)
def test_a_recipe_that_is_none_is_named(made, text, said):
    run = made(rising())
    (run.path / "recipe.yaml").write_text(text)
    with pytest.raises(RlctlError, match=said) as caught:
        page.page(Run(run.path))
    assert str(run.path / "recipe.yaml") in caught.value.message


def test_the_newest_values_are_the_same_read_from_the_end_as_read_whole(made):
    rows = rising()
    rows[4]["val/reward"], rows[-1]["rollout/reward"] = 0.25, None
    run = made(rows)
    names = ["step", "rollout/reward", "val/reward", "train/kl"]
    assert "rows" not in vars(run)
    from_the_end = run.newest(names)
    assert from_the_end == {"step": 20, "rollout/reward": 0.95, "val/reward": 0.25, "train/kl": None}
    assert run.rows and run.newest(names) == from_the_end


def test_start_up_checks_are_shown_and_a_failed_one_is_told(made):
    run = made(rising())
    made_checks = [
        {"name": "one BOS", "ok": True, "expected": "1", "found": "1", "detail": ""},
        {"name": "packing leak", "ok": False, "expected": "0", "found": "0.01", "detail": "sequence 2 <b>"},
    ]
    (run.path / "checks.json").write_text(json.dumps(made_checks[:1]))
    assert findings.healthy(run).text == "Yes. All 7 checks passed, and 1 before the first step."
    (run.path / "checks.json").write_text(json.dumps(made_checks))
    run = Run(run.path)
    answer = findings.healthy(run)
    assert answer.verdict == "bad" and "Before the first step, packing leak did not hold" in answer.text
    text = page.page(run)
    assert "<td>packing leak</td><td>0.01</td><td>0</td><td>sequence 2 &lt;b&gt;</td>" in text


def test_the_mismatch_has_an_answer_of_its_own(made):
    assert findings.mismatch(made(rising())).text.startswith("Yes: mean ratio peaks at 1.0010 (step 1); 1 is exact")
    sick = made(rising(**{"mismatch/token_mult_prob_error": 1.2}), name="b")
    assert findings.mismatch(sick).verdict == "bad" and findings.mismatch(made([], name="c")).verdict == "open"


def test_final_figures_come_with_intervals_over_prompts(made):
    """Reward: 4 steps of 4 prompts, spread 0.1, so 1.96 * 0.1 / sqrt(16); validation: Wilson's for 3 of 4 prompts."""
    run = made(rising())
    reward = findings.final_reward(run)
    assert (reward.low, reward.high) == pytest.approx((0.925 - 0.049, 0.925 + 0.049), abs=1e-4)
    assert findings.final_validation(run) is None
    (run.path / "validation").mkdir()
    lines = [json.dumps(sample(float(i < 3), group=i)) + "\n" for i in range(4)]
    (run.path / "validation" / "step_000020.jsonl").write_text("".join(lines))
    found = findings.final_validation(run)
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.3006, 0.9544), abs=1e-4)
    rows = [*rising()[:-1], row(20, 1.0, **{"val/reward": 0.75})]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert "0.750 after step 20, 95 % interval 0.301 to 0.954" in findings.learned(Run(run.path)).text


def test_a_run_that_did_not_end_shows_the_line_that_goes_on(made):
    run = made(rising(), max_num_steps=99)
    command = "rlctl train grpo --recipe smoke-tiny --run-dir=elsewhere --resume auto 'data.system_prompt=a b'\n"
    (run.path / "command.txt").write_text(command)
    onward = page.resume_line(run)
    assert shlex.split(onward) == [
        *("rlctl", "train", "grpo", "--recipe", "smoke-tiny", "data.system_prompt=a b"),
        *("--run-dir", str(run.path), "--resume", "auto"),
    ]
    assert page.resume_line(made(rising(), name="b")) is None


def test_why_a_run_failed_is_on_its_page(made):
    run = made(rising(), max_num_steps=99)
    (run.path / "logs").mkdir()
    report = {"error": "rank 1 failed: <out> of memory", "hint": "lower x", "phase": "train"}
    (run.path / "logs" / "error_rank_1.json").write_text(json.dumps(report))
    text = page.page(run)
    assert "rank 1 failed: &lt;out&gt; of memory\nphase: train\nhint: lower x" in text
    assert findings.healthy(run).text.startswith("The run failed: rank 1 failed")


def test_values_that_were_not_finite_are_marked_in_the_chart(made):
    rows = rising()
    rows[6]["train/loss"] = None
    assert "loss, step 7: not finite" in page.page(made(rows))


def test_a_page_of_many_steps_stays_small(made):
    parts = {f"rollout/reward/part{i}": 0.1 * i for i in range(8)}
    rows = [row(i, i / 5000, **parts) for i in range(1, 5001)]
    text = page.page(made(rows))
    assert len(text) < 800_000 and "each point is the mean of 17 steps" in text
    assert ">5000</text>" in text


def test_a_line_passes_through_its_points():
    drawn = charts.lines([charts.Series(label="a", points=[(0, 0.0), (5, 1.0), (10, 0.5)])])
    places = re.search(r'polyline class="s0" points="([^"]*)"', drawn)[1].split()
    (x0, y0), (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in places)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11) and x0 < x1 < x2
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.11) and y1 < y2 < y0


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-9, 2e-9], [-5.0, 5e6], [0.1 + i * 1e-12 for i in range(3)]])
def test_ticks_enclose_any_data(values):
    ticks = charts._ticks(min(values), max(values))
    assert ticks[0] <= min(values) + 1e-9 * abs(min(values)) and ticks[-1] >= max(values) - 1e-9 * abs(max(values))
    assert 2 <= len(ticks) <= 8
    assert charts.lines([charts.Series(label="a", points=list(enumerate(values)))])


def test_ticks_can_be_told_apart():
    drawn = charts.lines([charts.Series(label="a", points=[(1, 1.0), (2, 1.000002)])])
    labels = re.findall(r'text-anchor="end">([^<]*)</text>', drawn)
    assert len(labels) == len(set(labels)) > 3


def test_an_evaluation_is_on_the_page_of_its_run(made):
    run = made(rising())
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75}
    found = {
        "task": "toy",
        "samples": 2,
        "step": 10,
        "pass_reward": 0.9,
        "reward": estimate,
        "pass_at_k": {"1": estimate},
    }
    for name, text in (("one", json.dumps(found)), ("two", "{")):
        (run.path / "eval" / name).mkdir(parents=True)
        (run.path / "eval" / name / "results.json").write_text(text)
    text = page.page(run)
    assert "<td>10</td><td>toy</td><td>2</td><td>0.500 [0.250, 0.750]</td><td>reward 0.9</td><td>@1 0.500" in text
    assert "eval/two/results.json: not JSON" in text


def test_long_series_are_thinned_to_means():
    points = [(i, float(i % 2)) for i in range(3000)]
    drawn = charts.lines([charts.Series(label="a", points=points)])
    assert drawn.count("<circle") == 300 and ": 0.5<" in drawn
