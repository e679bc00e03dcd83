"""Checks of option values that several algorithms share; each names the key, the value and the mend."""

from __future__ import annotations

from rlctl.config import Recipe
from rlctl.errors import RlctlError


def within(key: str, value: float | None, *, above: float | None = None, below: float | None = None) -> None:
    """Refuse a value outside an open interval; None is fine.

    Raises:
        RlctlError: exit status 2.
    """
    if value is None or ((above is None or value > above) and (below is None or value < below)):
        return
    limits = [f"above {above:g}" for _ in range(above is not None)] + [
        f"below {below:g}" for _ in range(below is not None)
    ]
    raise RlctlError(f"`{key}` is {value:g}, it must be {' and '.join(limits)}", "set it inside")


def not_negative(key: str, value: float) -> None:
    """Refuse a value below 0.

    Raises:
        RlctlError: exit status 2.
    """
    if value < 0:
        raise RlctlError(f"`{key}` is {value:g}, it must not be negative", "set it to 0 or above")


def clip_range(low: float | None, high: float) -> None:
    """Refuse clip distances that leave no room around a ratio of 1.

    Raises:
        RlctlError: exit status 2.
    """
    within("loss_fn.ratio_clip_min", low, above=0.0, below=1.0)
    within("loss_fn.ratio_clip_max", high, above=0.0)


def advantage_clip(low: float | None, high: float | None) -> None:
    """Refuse bounds that would turn an advantage's sign.

    Raises:
        RlctlError: exit status 2.
    """
    within("grpo.advantage_clip_low", low, below=0.0)
    within("grpo.advantage_clip_high", high, above=0.0)


def compares_samples(recipe: Recipe) -> None:
    """Refuse a group of one where a prompt's samples are each other's baseline.

    Raises:
        RlctlError: exit status 2.
    """
    if recipe.grpo.num_generations_per_prompt < 2:
        raise RlctlError(
            f"`{recipe.algorithm}` compares a prompt's samples, and grpo.num_generations_per_prompt is 1: no gradient",
            "set it to 2 or more, or use reinforce_pp",
        )
