"""When trainer and engine disagree: a warning, and the end of the run where the recipe asks for it."""

from __future__ import annotations

import io
import math

import pytest

from rlctl.errors import CHECK_FAILED, RlctlError
from rlctl.log import RunLog
from rlctl.trainer import judge_mismatch


@pytest.fixture
def judge(tmp_path):
    console = io.StringIO()
    log = RunLog(tmp_path, writes=True, tensorboard=False, console=console)

    def call(*values, limit=None):
        for step, value in enumerate(values, start=1):
            judge_mismatch(log, limit, step, {"mismatch/token_mult_prob_error": value})
        return console.getvalue()

    return call


def test_agreement_is_not_worth_a_word(judge):
    assert judge(1.0, 1.05) == ""


def test_a_mismatch_above_1_05_is_told_once(judge):
    assert judge(1.01, 1.06, 1.2).splitlines() == [
        "warning: step 2: mismatch/token_mult_prob_error is 1.060, above 1.05: engine and trainer disagree"
    ]


@pytest.mark.parametrize("value", [1.51, math.inf, math.nan])
def test_the_run_ends_above_the_recipes_limit(judge, value):
    with pytest.raises(RlctlError, match="step 2: .* above checks.stop_above_mismatch 1.5") as caught:
        judge(1.5, value, limit=1.5)
    assert caught.value.exit_status == CHECK_FAILED


def test_training_on_data_has_no_mismatch_to_judge(tmp_path):
    log = RunLog(tmp_path, writes=True, tensorboard=False, console=None)
    judge_mismatch(log, 1.0, 1, {"train/loss": 1.0})
