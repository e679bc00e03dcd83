"""Flags, overrides and a YAML recipe -> one validated Recipe.

1. Find the recipe file (find.py), or start from config.yaml.
2. Refuse overrides whose key the schema does not have; hydra alone would take them.
3. hydra composes plain YAML: the file, what its `defaults:` list names, the flags, the overrides.
4. The result is judged against the schema of config.py and of the plugins that it names, and becomes dataclasses.

The schema's `grpo.*` is `Steps` and the algorithm's `Config.grpo`; `loss_fn.*` its `Config.loss_fn`; `env.<name>.*` the
environment's `Config`; `policy.generation.vllm_cfg.*` the vllm engine's `Config`. What None becomes is derive.py's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlctl import config, plugins
from rlctl.errors import RlctlError
from rlctl.recipe import find, nemo_rl, schema
from rlctl.recipe.overrides import Override, parse
from rlctl.recipe.places import Places, short

NATIVE = "rlctl_recipe"
OmegaConf.register_new_resolver("recipes", lambda: str(find.packaged()), replace=True)  # where recipes' own data are
_LONG = {"fp32": "float32", "bf16": "bfloat16"}  # what other tools write for policy.precision


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A validated recipe, and where it came from."""

    recipe: config.Recipe
    source: find.Source
    overrides: tuple[Override, ...]
    """Arguments and flags that beat the file."""
    translation: nemo_rl.Translation | None = None
    """What a NeMo RL file became; None for a native one."""

    def overridden(self, prefix: str) -> Override | None:
        """The override of a key or of one in its section."""
        return next((o for o in self.overrides if o.key == prefix or o.key.startswith(prefix + ".")), None)


def compose(
    algorithm: str,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    flags: Sequence[Override] = (),
    folders: Sequence[Path] | None = None,
    model: str | None = None,
    backend: str | None = None,
) -> Composed:
    """The recipe of a command line.

    Args:
        algorithm: a file in algorithms/.
        recipe: a name or a file; None chooses by algorithm, model and backend.
        overrides: `key=value` arguments.
        flags: settings written as flags (`--procs 2`); they beat the recipe and must not contradict an override.
        folders: recipe directories; None = the user's from RLCTL_RECIPES and the package's.
        model: the catalogue name by which a recipe is chosen (`policy.model_name` itself comes as flag or override).
        backend: likewise `megatron` or `dtensor`.

    Raises:
        RlctlError: anything that is wrong with the recipe or the arguments.
    """
    plugins.load("algorithm", algorithm)
    folders = find.directories() if folders is None else folders
    settings = _merge(flags, parse(overrides))
    if recipe is None:
        size = {o.key: o.value for o in settings}
        source = find.choose(
            algorithm, folders, model=model, backend=backend,
            nodes=size.get("cluster.num_nodes"), gpus_per_node=size.get("cluster.gpus_per_node"),
        )  # fmt: skip
    else:
        source = find.named(recipe, folders)
    if not _is_foreign(source.path):
        built = _build(algorithm, source, folders, settings)
        return Composed(recipe=built, source=source, overrides=tuple(settings))
    translation = nemo_rl.translate(source.path).require()
    if algorithm not in ("grpo", translation.algorithm):
        raise _other_algorithm(source, translation.algorithm, algorithm)
    return Composed(
        recipe=_build_foreign(translation, settings), source=source, overrides=tuple(settings), translation=translation
    )  # fmt: skip


def algorithm_of(recipe: str, folders: Sequence[Path]) -> str:
    """The algorithm that a recipe is for: it says so, its name does, or it is the default one.

    Raises:
        RlctlError: no such recipe, or no YAML.
    """
    source = find.named(recipe, folders)
    if _is_foreign(source.path):
        return nemo_rl.translate(source.path).require().algorithm
    raw = _read_native(source.path)
    named = find.parts(source.name)
    fallback = named.algorithm if named else config.Recipe().algorithm
    return str(raw["algorithm"]) if "algorithm" in raw else fallback


def foreign(recipe: str, folders: Sequence[Path]) -> nemo_rl.Translation | None:
    """What a NeMo RL file becomes, what is refused included; None for a native recipe.

    Raises:
        RlctlError: no such recipe, or a NeMo RL file that cannot be read.
    """
    source = find.named(recipe, folders)
    return nemo_rl.translate(source.path) if _is_foreign(source.path) else None


def _is_foreign(path: Path) -> bool:
    """Whether it is a NeMo RL file; what is no YAML is told by those who read it."""
    try:
        return nemo_rl.is_theirs(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False


def _build_foreign(translation: nemo_rl.Translation, settings: Sequence[Override]) -> config.Recipe:
    """Their file under our names, then the overrides, then judged like any other."""
    algorithm, values = translation.algorithm, copy.deepcopy(translation.values)
    for override in settings:
        known = recipe_tree(algorithm, _environments_in(override.key))
        schema.lookup(known, override.key, where=f"from `{override.text}`")
        *sections, name = override.key.split(".")
        place = values
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = override.value
    places = Places(overrides=settings, files=[(translation.path, "")])
    values = _resolve(algorithm, values, places)
    _default_environment(values, settings)
    return from_values(values, places)


def _other_algorithm(source: find.Source, said: str, wanted: str) -> RlctlError:
    return RlctlError(
        f"recipe `{source.name}` is for algorithm `{said}`, not `{wanted}`",
        f"run `rlctl train {said}`, or choose another recipe",
    )


def _merge(flags: Sequence[Override], overrides: Sequence[Override]) -> list[Override]:
    said = {o.key: o for o in overrides}
    for flag in flags:
        if flag.key in said and said[flag.key].value != flag.value:
            raise RlctlError(f"`{flag.text}` contradicts `{said[flag.key].text}`", "keep one of them")
    return [*flags, *(o for o in overrides if o.key not in {f.key for f in flags})]


def _build(algorithm: str, source: find.Source, folders: Sequence[Path], settings: Sequence[Override]) -> config.Recipe:
    for override in settings:
        known = recipe_tree(algorithm, _environments_in(override.key))
        schema.lookup(known, override.key, where=f"from `{override.text}`")
    composed, files = _run_hydra(source, folders, settings)
    places = Places(overrides=settings, files=files)
    if NATIVE not in composed:
        raise not_native(source.path)
    if composed[NATIVE] != 1:
        raise RlctlError(f"`{NATIVE}` is {composed[NATIVE]!r} in `{short(source.path)}`", "this version reads 1")
    values = _resolve(algorithm, composed, places)
    if "algorithm" in values and values["algorithm"] != algorithm:
        raise _other_algorithm(source, values["algorithm"], algorithm)
    values["algorithm"] = algorithm
    _default_environment(values, settings)
    return from_values(values, places)


def not_native(path: Path) -> RlctlError:
    """A file that does not say it is a recipe of ours."""
    return RlctlError(
        f"`{short(path)}` does not say `{NATIVE}: 1`, and has no section of a NeMo RL file",
        f"if it is an rlctl recipe, add the line `{NATIVE}: 1`",
    )


def _run_hydra(
    source: find.Source, folders: Sequence[Path], settings: Sequence[Override]
) -> tuple[dict[str, Any], list[tuple[Path, str]]]:
    """Plain maps as hydra composed them, interpolations unresolved, and the files it read with their packages."""
    search = ",".join(f"'file://{f}'" for f in folders)
    arguments = [f"hydra.searchpath=[{search}]", *(o.argument for o in settings)]
    _read_native(source.path)
    try:
        with initialize_config_dir(str(source.folder), version_base="1.3"):
            composed = hydra_compose(source.config, overrides=arguments)
            loader = GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list(source.config, arguments, RunMode.RUN).defaults
    except RecursionError as error:
        raise RlctlError(
            f"recipe `{source.path}`: its `defaults:` lead back to itself", "remove the circle from the defaults lists"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, source.path) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise RlctlError(
            f"recipe `{source.path}` does not compose: {str(error).splitlines()[0]}",
            f"check its `defaults:` list; files are looked up in {', '.join(map(str, [source.folder, *folders]))}",
        ) from error
    files = []
    for entry in defaults:
        homes = [f / f"{entry.config_path}.yaml" for f in (source.folder, *folders)]
        files += [(home, entry.package or "") for home in homes if home.is_file()][:1]
    return OmegaConf.to_container(composed), files  # type: ignore[return-value]


def _read_native(path: Path) -> Mapping[str, Any]:
    """A file as it is; one that is not ours is refused here, for hydra would complain about something else."""
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, path) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RlctlError(f"{path} is not YAML: {str(error).splitlines()[0]}", "give a recipe file") from error
    if not isinstance(raw, Mapping) or (NATIVE not in raw and not isinstance(raw.get("defaults"), list)):
        raise not_native(path)
    foreign = [key for key in raw if not isinstance(key, str) or key == "hydra"]
    if foreign:
        raise RlctlError(f"`{short(path)}` has the section `{foreign[0]}`, which is none of a recipe", "remove it")
    return raw


def _yaml_error(error: yaml.MarkedYAMLError, path: Path) -> RlctlError:
    mark = error.problem_mark or error.context_mark
    place = short(Path(mark.name) if mark and mark.name.startswith("/") else path)
    place += f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return RlctlError(f"{place} is not YAML: {error.problem}", "mend that line")


def _environments_in(key: str) -> list[str]:
    """The environment whose own options a key names."""
    section, _, rest = key.partition(".")
    name = rest.split(".")[0]
    return [name] if section == "env" and name in plugins.names("environment") else []


def recipe_tree(algorithm: str, environments: Sequence[str]) -> schema.Tree:
    """All keys of a recipe for an algorithm, with the options of some environments."""
    known = schema.tree(config.Recipe)
    options = schema.tree(plugins.load("algorithm", algorithm).Config)
    del known["advantage"], known["env"]["options"]
    known["grpo"] |= options["grpo"]
    known["loss_fn"] = options["loss_fn"]
    known["env"] |= {name: schema.tree(plugins.load("environment", name).Config) for name in environments}
    known["policy"]["generation"]["vllm_cfg"] = schema.tree(plugins.load("engine", "vllm").Config)
    return known


def _written_environments(values: Mapping[str, Any]) -> list[str]:
    env = values["env"] if isinstance(values.get("env"), Mapping) else {}
    return [name for name in plugins.names("environment") if name in env]


def _resolve(algorithm: str, composed: dict[str, Any], places: Places) -> dict[str, Any]:
    """Interpolations done; `${policy.precision}` works whether or not the file writes that key."""
    defaults = as_values(_defaults(algorithm))
    try:
        merged = OmegaConf.merge(defaults, composed)
        full = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        raise RlctlError(
            f"`{key}` does not resolve: {str(error).splitlines()[0]} ({places.of(key)})",
            "an interpolation is `${section.key}`, `${oc.env:NAME}`, or `${recipes:}` for the package's recipes",
        ) from error
    return _only_written(full, composed)


def _only_written(full: Any, written: Any) -> Any:
    if isinstance(full, Mapping) and isinstance(written, Mapping):
        return {key: _only_written(full[key], value) for key, value in written.items()}
    return full


def _defaults(algorithm: str) -> config.Recipe:
    options = plugins.load("algorithm", algorithm).Config()
    return config.Recipe(algorithm=algorithm, advantage=options.grpo, loss_fn=options.loss_fn)


def _default_environment(values: dict[str, Any], settings: Sequence[Override]) -> None:
    """A reward function given on the command line replaces the recipe's environment."""
    said = {o.key: o for o in settings}
    env = values.setdefault("env", {}) or {}
    if not isinstance(env, dict) or not env.get("reward"):
        return
    if "env.name" in said and "env.reward" in said and env["name"] != "function":
        raise RlctlError(
            f"`{said['env.name'].text}` contradicts `{said['env.reward'].text}`: environments bring their own reward",
            "keep one of them",
        )
    if "env.reward" in said or env.get("name") is None:
        env["name"] = "function"


def from_values(values: dict[str, Any], places: Places) -> config.Recipe:
    """The dataclasses of a recipe's plain values.

    Raises:
        RlctlError: an unknown key or a wrong type, with the place where it was written.
    """
    algorithm = values["algorithm"]
    policy = values.get("policy")
    if isinstance(policy, dict) and policy.get("precision") in _LONG:
        policy["precision"] = _LONG[policy["precision"]]
    options = plugins.load("algorithm", algorithm).Config
    environments = _written_environments(values)
    known = recipe_tree(algorithm, environments)
    checked = schema.check(known, values, where=places.of)
    steps = {f.name for f in dataclasses.fields(config.Steps)}
    grpo, loss = checked.pop("grpo", {}), checked.pop("loss_fn", {})
    parts = schema.make(options, {"grpo": {k: v for k, v in grpo.items() if k not in steps}, "loss_fn": loss})
    env = checked.setdefault("env", {})
    chosen = {name: env.pop(name) for name in environments}
    recipe = schema.make(config.Recipe, checked)
    recipe.grpo = config.Steps(**{k: v for k, v in grpo.items() if k in steps})
    recipe.advantage, recipe.loss_fn = parts.grpo, parts.loss_fn
    if recipe.env.name is not None:
        env_config = plugins.load("environment", recipe.env.name).Config
        recipe.env.options = schema.make(env_config, chosen.get(recipe.env.name) or {})
    recipe.policy.generation.vllm_cfg = schema.make(
        plugins.load("engine", "vllm").Config, recipe.policy.generation.vllm_cfg or {}
    )
    return recipe


def as_values(recipe: config.Recipe) -> dict[str, Any]:
    """A recipe as users write it: the algorithm's options under `grpo`, the environment's under its name."""
    values = dataclasses.asdict(recipe)
    values["grpo"] |= values.pop("advantage") or {}
    options = values["env"].pop("options")
    if options is not None:
        values["env"][recipe.env.name] = options
    return _plain(values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def to_yaml(recipe: config.Recipe) -> str:
    """The whole recipe, every default written out."""
    return yaml.safe_dump(as_values(recipe), sort_keys=False, width=120)


def dump(recipe: config.Recipe, path: Path) -> None:
    """Write the resolved recipe; `load_resolved` reads it back."""
    path.write_text(to_yaml(recipe))


def load_resolved(path: Path) -> config.Recipe:
    """The recipe that `dump` wrote, with nothing composed or derived; for worker processes."""
    values = yaml.safe_load(path.read_text())
    return from_values(values, Places(overrides=(), files=[(path, "")]))
