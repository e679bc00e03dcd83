"""Each start-up check catches the fault that it is for, and a sound run passes all and is left as it was."""

from __future__ import annotations

import json

import pytest

from tests import distributed
from tests.checks_cases import FAULTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["dtensor", "megatron"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(backend, tmp_path_factory):
    folder = tmp_path_factory.mktemp(backend)
    return distributed.run("tests.checks_cases:outcomes", 1, folder, backend)[0], folder


def test_a_sound_run_passes_before_and_after(outcomes):
    assert outcomes[0]["sound"] == outcomes[0]["sound again"] == "passed"


@pytest.mark.parametrize(("check", "fault"), [(c, f.__name__) for c, faults in FAULTS.items() for f in faults])
def test_a_fault_is_told_by_its_check(check, fault, outcomes):
    assert outcomes[0][fault].startswith(f"4 start-up check `{check}` failed: expected "), outcomes[0][fault]


def test_the_results_are_in_the_run_directory(outcomes):
    results = json.loads((outcomes[1] / "checks.json").read_text())
    assert [r["name"] for r in results] == [
        "identity", "template", "gold", "packing", "ratio", "split", "weight sync"
    ]  # fmt: skip
    assert all(r["ok"] and r["expected"] and r["found"] and r["seconds"] >= 0 for r in results)


def test_checks_change_neither_weights_nor_optimizer_nor_random_numbers(backend, tmp_path):
    assert distributed.run("tests.checks_cases:unchanged", 1, tmp_path, backend)[0] == {"state": True, "random": True}
