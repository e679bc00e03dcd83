"""The trainer does not care when, or in which order, an engine answers."""

from __future__ import annotations

import pytest

from tests import distributed


@pytest.mark.slow
def test_an_engine_that_answers_late_and_out_of_order_gives_the_same_curve(tmp_path):
    curves = []
    for engine in ("late", "prompt"):
        (tmp_path / engine).mkdir()
        ranks = distributed.run("tests.trainer_cases:curve", 2, tmp_path / engine, engine)
        curves.append(ranks[0])
    assert len(curves[0]) == 3
    for late, prompt in zip(*curves, strict=True):
        for name in ("rollout/reward", "rollout/response_length", "train/loss", "train/grad_norm"):
            assert late[name] == pytest.approx(prompt[name], rel=1e-4, abs=1e-5), name
        assert late["mismatch/max_logprob_error"] < 1e-5
