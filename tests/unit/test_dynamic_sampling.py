"""Dynamic sampling: groups without spread are replaced by new prompts, exactly, up to a cap, and across a resume."""

from __future__ import annotations

import json

import pytest
import torch

from rlctl import plugins
from rlctl.algorithms.base import Refill
from rlctl.errors import RlctlError
from tests.numerics import algorithm_cases
from tests.unit import rollout_cases as cases


def spread(batch):
    """[B] bool, by plain Python."""
    rewards = list(zip(batch.group.tolist(), batch.rewards.tolist(), strict=True))
    return torch.tensor([len({r for h, r in rewards if h == g}) > 1 for g, _ in rewards])


def rollouts(dull, *, prompts=3, size=12, rounds=10, multiplier=1.0, engine=None):
    """Prompts 0, 1, ... in this order; those that `dull` says reward every sample alike."""
    made = cases.recipe(prompts=prompts, samples=4, data__shuffle=False)
    environment = cases.Dialogue(
        size=size, fails=lambda prompt, _: {"a": 0.5, "b": 1.0} if dull(prompt.index) else None
    )
    refill = Refill(teaches=spread, max_rounds=rounds, batch_multiplier=multiplier)
    return cases.collect(made, environment, engine, refill=refill)


def prompts_of(found):
    return [rollout.prompt.index for rollout in found.last if rollout.sample == 0]


def test_groups_that_teach_are_kept_in_order_and_the_others_replaced():
    found = rollouts(lambda i: i % 2)
    batch = found.next(1)
    assert prompts_of(found) == [0, 2, 4]  # rounds of 0 1 2, 3 4 5
    assert batch.group.tolist() == [g for g in range(3) for _ in range(4)]
    assert spread(batch).all()
    for i, rollout in enumerate(found.last):
        rows = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        assert list(rollout.tokens) == batch.tokens[rows].tolist()
        assert (rollout.group, rollout.reward) == (int(batch.group[i]), float(batch.rewards[i]))


def test_metrics_are_of_everything_that_was_drawn():
    engine = cases.LateEngine()
    found = rollouts(lambda i: i % 2, engine=engine)
    batch = found.next(1)
    assert (found.stats["rollout/rounds"], found.stats["rollout/prompts_drawn"]) == (2, 6)
    assert (found.stats["rollout/prompts_teaching"], found.stats["rollout/prompts_filled"]) == (3, 0)
    dull = 3 * 4 * 1.5  # three prompts of four samples with parts 0.5 and 1
    assert found.stats["rollout/reward"] == pytest.approx((float(batch.rewards.sum()) + dull) / 24)
    assert len({r.seed for r in engine.submitted}) == 24


def test_one_too_many_comes_first_in_the_next_step_and_is_drawn_anew():
    found = rollouts(lambda i: i in (0, 4))
    found.next(1)
    assert prompts_of(found) == [1, 2, 3]  # of 0 1 2, 3 4 5: 5 is one too many
    assert found.queue.position == {"taken": 6, "returned": [5]}
    found.publish(None, 1)
    batch = found.next(2)
    assert prompts_of(found) == [5, 6, 7]
    assert set(batch.version.tolist()) == {1}


def test_the_cap_fills_with_groups_without_spread_and_counts_them():
    found = rollouts(lambda i: i != 7, rounds=3)
    batch = found.next(1)
    assert prompts_of(found) == [7, 0, 1]
    assert spread(batch).tolist() == [True] * 4 + [False] * 8
    assert found.stats["rollout/prompts_filled"] == 2
    assert found.queue.position == {"taken": 9, "returned": []}


def test_a_round_takes_the_multiple_of_a_steps_prompts():
    found = rollouts(lambda i: i % 2, multiplier=1.5)
    found.next(1)
    assert found.stats["rollout/prompts_drawn"] == 5  # 4.5, rounded up; 0 2 4 teach
    assert found.stats["rollout/rounds"] == 1


def test_a_prompt_that_comes_again_in_a_step_gives_new_samples():
    engine = cases.LateEngine()
    found = rollouts(lambda i: i != 0, prompts=2, size=3, rounds=4, engine=engine)
    found.next(1)
    assert prompts_of(found) == [0, 0]
    assert len({r.seed for r in engine.submitted}) == len(engine.submitted) == 4 * 4  # 0 1, 2 0


def test_a_resume_goes_on_as_without_it():
    def dull(index):
        return index % 3 == 0

    straight = rollouts(dull)
    expected = [cases.as_lists(straight.next(step)) for step in (1, 2, 3)]
    before, after = rollouts(dull), rollouts(dull)
    assert [cases.as_lists(before.next(1))] == expected[:1]
    after.queue.position = json.loads(json.dumps(before.queue.position))
    assert [cases.as_lists(after.next(step)) for step in (2, 3)] == expected[1:]


def dapo(**options):
    config = algorithm_cases.options("dapo")
    config.grpo.use_dynamic_sampling = True
    config.grpo.dynamic_sampling_max_gen_batches, config.grpo.batch_multiplier = 10, 1.0
    for name, value in options.items():
        setattr(config.grpo, name, value)
    return algorithm_cases.algorithm("dapo", config)


def test_dapo_judges_rewards_before_shaping_among_those_that_count():
    """As in the paper: between none and all of a group right. Lengths alone make no group worth training on."""
    made = algorithm_cases.batch(
        lengths=(8, 3, 4, 8, 4, 5), group=torch.tensor([0, 0, 1, 1, 2, 2]),
        rewards=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]),
        truncated=torch.tensor([False, False, False, True, False, False]),
    )  # fmt: skip
    assert dapo().refill.teaches(made).tolist() == [False, False, True, True, True, True]
    assert dapo()._penalty(made)[:2].tolist() == [-1.0, 0.0]
    filtering = dapo(overlong_filtering=True).refill.teaches
    assert filtering(made).tolist() == [False, False, False, False, True, True]
    voteless = made.replace(valid=torch.tensor([True] * 5 + [False]))
    assert dapo().refill.teaches(voteless).tolist() == [False, False, True, True, False, False]


def test_what_teaches_has_an_advantage_and_what_does_not_has_none():
    made, _ = algorithm_cases.mixed()
    rule = dapo()
    rule.config.grpo.reward_shaping.overlong_buffer_length = 0
    teaches = rule.refill.teaches(made) & (made.sequence_sum(made.mask.long()) > 0)
    assert teaches.tolist() == (made.sequence_sum(rule.advantages(made).abs()) > 0).tolist()
    assert 0 < int(teaches.sum()) < len(made)


def test_options_of_dynamic_sampling_are_derived_with_it_and_refused_without_it():
    recipe = cases.recipe()
    recipe.policy.generation.max_new_tokens = 16
    config = plugins.load("algorithm", "dapo").Config()
    config.complete(recipe)
    assert (config.grpo.dynamic_sampling_max_gen_batches, config.grpo.batch_multiplier) == (None, None)
    config.grpo.use_dynamic_sampling = True
    config.complete(recipe)
    assert (config.grpo.dynamic_sampling_max_gen_batches, config.grpo.batch_multiplier) == (10, 1.0)
    for name in ("dynamic_sampling_max_gen_batches", "batch_multiplier"):
        for on, value, says in ((True, 0, f"`grpo.{name}` is 0"), (False, 2, f"`grpo.{name}` has no effect without")):
            config = plugins.load("algorithm", "dapo").Config()
            config.grpo.use_dynamic_sampling = on
            setattr(config.grpo, name, value)
            with pytest.raises(RlctlError, match=says):
                config.complete(recipe)
