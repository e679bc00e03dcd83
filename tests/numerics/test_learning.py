"""Every RL algorithm learns: in ten steps the tiny model writes more of what is rewarded."""

from __future__ import annotations

from statistics import fmean

import pytest

from rlctl.log import MACHINE_DEPENDENT
from tests import distributed
from tests.declared import undeclared
from tests.learning_cases import OPTIONS
from tests.numerics.algorithm_cases import ALGORITHMS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    return distributed.run("tests.learning_cases:curves", 1, tmp_path_factory.mktemp("runs"))[0]


def test_every_algorithm_is_tried():
    assert set(OPTIONS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_reward_rises(curves, name):
    rewards = [line["rollout/reward"] for line in curves[name]]
    assert len(rewards) == 10
    assert rewards[0] == pytest.approx(26 / 288, abs=0.05)  # lower-case letters of a random model's vocabulary
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.08, rewards


def test_dynamic_sampling_goes_on_after_a_resume_as_without_it(curves):
    straight, resumed = (
        [{k: v for k, v in line.items() if not k.startswith(MACHINE_DEPENDENT)} for line in curves[name]]
        for name in ("straight", "resumed")
    )
    assert straight == resumed
    assert max(line["rollout/rounds"] for line in straight) > 1


def test_every_figure_of_a_run_is_declared(curves):
    assert not undeclared(name for lines in curves.values() for line in lines for name in line)
