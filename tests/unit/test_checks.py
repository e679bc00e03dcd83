"""Each start-up check catches the fault that it is for, and a sound run passes all and is left as it was."""

from __future__ import annotations

import json

import pytest

from tests import distributed
from tests.checks_cases import DATA_FAULTS, FAULTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["dtensor", "megatron"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(backend, tmp_path_factory):
    folder = tmp_path_factory.mktemp(backend)
    return distributed.run("tests.checks_cases:outcomes", 1, folder, backend)[0], folder


CASES = [
    (algorithm, check, fault.__name__)
    for algorithm, table in (("grpo", FAULTS), ("dpo", DATA_FAULTS))
    for check, faults in table.items()
    for fault in faults
]


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_sound_run_passes_before_and_after(algorithm, outcomes):
    told = outcomes[0][algorithm]
    assert told["sound"] == told["sound again"] == "passed"


@pytest.mark.parametrize(("algorithm", "check", "fault"), CASES)
def test_a_fault_is_told_by_its_check(algorithm, check, fault, outcomes):
    told = outcomes[0][algorithm][fault]
    assert told.startswith(f"4 start-up check `{check}` failed: expected "), told


def test_a_later_probe_tells_an_engine_with_other_weights(outcomes):
    told = outcomes[0]["later"]
    assert told["sound"] == "passed"
    assert told["head"].startswith("4 weight sync after step 1: expected the largest difference"), told
    assert told["nothing"].startswith("4 weight sync after step 1: expected the largest difference"), told


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ("grpo", ["identity", "template", "gold", "packing", "ratio", "split", "weight sync"]),
        ("dpo", ["identity", "rows", "packing", "alignment", "reference", "split"]),
    ],
)
def test_the_results_are_in_the_run_directory(algorithm, names, outcomes):
    results = json.loads((outcomes[1] / algorithm / "checks.json").read_text())
    assert [r["name"] for r in results] == names
    assert all(r["ok"] and r["expected"] and r["found"] and r["seconds"] >= 0 for r in results)


def test_checks_change_neither_weights_nor_optimizer_nor_random_numbers(outcomes):
    assert outcomes[0]["unchanged"] == {"state": True, "random": True}
