"""A reshardable checkpoint goes on in any layout and backend: no bit of the state changes, the next updates agree."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rlctl.parallel import Layout
from tests import distributed, tiny
from tests.parity import oracle
from tests.parity.reshard_steps import Move, Place
from tests.parity.test_dtensor import OVERRIDES, TOLERANCE

pytestmark = pytest.mark.slow

MODELS = {"qwen2": dict(tie_word_embeddings=True, num_hidden_layers=4), "qwen3_moe": dict(num_hidden_layers=4)}


def megatron(world: int, **degrees) -> Place:
    return Place("megatron", Layout(world=world, **degrees))


def dtensor(world: int, tp: int = 1) -> Place:
    return Place("dtensor", Layout(world=world, tp=tp))


TP2, DP2, EP2 = megatron(2, tp=2, sp=True), megatron(2), megatron(2, ep=2)
DENSE = [
    (TP2, DP2), (TP2, megatron(2, pp=2)), (TP2, megatron(2, cp=2)), (TP2, dtensor(2)), (TP2, megatron(1)),
    (DP2, TP2), (DP2, dtensor(2, tp=2)), (DP2, megatron(4, pp=4)),
    (dtensor(2), dtensor(2, tp=2)), (dtensor(2), megatron(4, tp=2, sp=True, pp=2)),
]  # fmt: skip
MOVES = [Move("qwen2", "float32", *pair) for pair in DENSE]
MOVES += [Move("qwen3_moe", "float32", EP2, megatron(4, ep=4)), Move("qwen3_moe", "float32", EP2, megatron(2, pp=2))]
MOVES += [Move("qwen2", "bfloat16", TP2, DP2), Move("qwen2", "bfloat16", DP2, dtensor(2))]


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """(move -> what its target found, model and origin -> weights after three straight updates)."""
    root = tmp_path_factory.mktemp("reshard")
    folders = {
        kind: tiny.save(kind, root / kind, seed=i, **(OVERRIDES.get(kind, {}) | overrides))
        for i, (kind, overrides) in enumerate(MODELS.items())
    }
    straight = distributed.run("tests.parity.reshard_steps:origins", 2, folders, MOVES, root / "runs")[0]
    found = {}
    for world in (1, 2, 4):
        mine = [m for m in MOVES if m.target.layout.world == world]
        ranks = distributed.run("tests.parity.reshard_steps:targets", world, folders, mine, root / "runs")
        found |= dict(zip(mine, ranks[0], strict=True))
    return found, straight


def whole(checkpoint):
    """(quantity, name) -> tensor, over all files."""
    return {
        (path.name.rpartition("-")[0], name): tensor
        for path in (checkpoint / "policy" / "whole").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_every_bit_of_weights_and_optimizer_survives_the_move(moved):
    for move, one in moved[0].items():
        before, now = whole(one["from"]), whole(one["again"])
        assert {quantity for quantity, _ in before} == {"main", "exp_avg", "exp_avg_sq"}
        assert before.keys() == now.keys(), move
        for key, tensor in before.items():
            assert tensor.dtype == now[key].dtype == torch.float32
            assert torch.equal(tensor.view(torch.int32), now[key].view(torch.int32)), (move, key)
        assert any(bool(tensor.any()) for (quantity, _), tensor in before.items() if quantity == "exp_avg_sq")


def test_the_count_of_updates_survives_the_move(moved):
    for one in moved[0].values():
        assert json.loads((one["again"] / "trainer.json").read_text())["updates"] == 1


def test_the_next_two_updates_are_those_of_the_run_that_stayed(moved):
    """In float32: in bfloat16 the gradients themselves depend on the layout, by rounding."""
    found, straight = moved
    for move, one in found.items():
        if move.precision != "float32":
            continue
        wanted = straight[f"{move.model} {move.precision} {move.origin}"]
        assert one["weights"].keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert oracle.error(one["weights"][name], tensor) < TOLERANCE, (move, name)


def test_a_state_is_spread_over_files_of_every_rank(moved):
    files = {len(list((one["from"] / "policy" / "whole").iterdir())) for one in moved[0].values()}
    assert min(files) >= 3 * 2


def test_saving_changes_nothing_for_the_run_that_goes_on(moved):
    """In bfloat16 too, where gradients and parameters differ in type."""
    _, straight = moved
    for name, weights in straight.items():
        if not name.startswith("unsaved "):
            for key, tensor in straight[f"unsaved {name}"].items():
                assert torch.equal(tensor, weights[key]), (name, key)
