"""Files in a recipe directory that are no recipes, or not ones of this version."""

from __future__ import annotations

import pytest

from rlctl.errors import RlctlError
from rlctl.recipe import find
from rlctl.recipe.compose import compose


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.yaml").write_text("rlctl_recipe: 1\nenv: {name: toy}\n")
    return tmp_path


def test_one_bad_file_does_not_hide_the_others(folder):
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "folder.yaml").mkdir()
    (folder / "dangling.yaml").symlink_to(folder / "nothing")
    names = {source.name for source in find.listing([folder])}
    assert names == {"good"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rlctl_recipe: 2\n", "2"),
        ("rlctl_recipe: 1\nhydra: {verbose: true}\n", "hydra"),
        ("rlctl_recipe: 1\n1: x\n", "1"),
        ("defaults: [bad, _self_]\nrlctl_recipe: 1\n", "bad.yaml"),
    ],
)
def test_a_file_that_is_no_recipe_of_this_version_is_refused(folder, text, named):
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(RlctlError, match=named) as caught:
        compose("grpo", str(folder / "bad.yaml"), [])
    assert caught.value.exit_status == 2
