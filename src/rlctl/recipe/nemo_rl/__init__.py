"""NeMo RL's recipe files as ours: v0.3 to mid-2026, read with OmegaConf, judged key by key.

1. read.py follows the `defaults:` chain and resolves interpolations, as their loader does.
2. keys.py is the closed table: every key of theirs that is known, and what becomes of it.
3. translate.py applies it: each key is mapped, ignored with a reason, left to the user, or refused by feature.
4. write.py prints a native recipe with comments.
"""

from rlctl.recipe.nemo_rl.read import is_theirs
from rlctl.recipe.nemo_rl.translate import Translation, translate
from rlctl.recipe.nemo_rl.write import to_recipe

__all__ = ["Translation", "is_theirs", "to_recipe", "translate"]
