"""From a mapping to a Recipe: types and names, each problem in the user's terms. Torch-free.

Whatever is wrong is left out and remembered, so that the checks of ``check.py`` still run on the rest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from moesaic.config.fields import RecipeField, list_fields, section_fields
from moesaic.config.problem import Problem, show
from moesaic.config.recipe import DIST_CONFIGS, LISTED_SECTIONS, RL_FIELDS, SHORTHAND_SECTIONS, Recipe

# Older FSDPTurbo recipes name the experts' modules; here, as in its present form, the model's spec does.
SPEC_DECIDES = ("ep_modules", "ep_fsdp_modules")

# Names of other trainers, and what they are called here; verl's are beside the fields (``verl_names.py``).
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "batching_strategy": "packing",
        "beta": "kl_config.coef",
        "clip_ratio": "algorithm.clip_ratio_low",
        "dataset": "train_dataset",
        "deterministic": "full_determinism",
        "epsilon": "algorithm.clip_ratio_low",
        "epsilon_high": "algorithm.clip_ratio_high",
        "enable_activation_checkpointing": "activation_checkpointing",
        "flash_attn": "attn_implementation",
        "gradient_accumulation_steps": "global_batch_size",
        "gradient_checkpointing": "activation_checkpointing",
        "lr_scheduler_type": "lr_scheduler_config.name",
        "max_completion_length": "rollout.sampling.max_tokens",
        "model_name_or_path": "model",
        "num_generations": "rollout.sampling.n",
        "offload_params": "offload",
        "per_device_train_batch_size": "micro_batch_size",
        "reward_funcs": "reward.functions",
        "rollout_n": "rollout.sampling.n",
        "timeout": "dist_timeout",
    }
)

# Sections of verl's configuration that no recipe has.
VERL_SECTIONS = ("actor_rollout_ref", "data", "trainer", "custom_reward_function")
# Keys that mean something in their own section alone.
ANYONES = ("name", "path")

# What pydantic says (patterns), and what it means to the writer of a recipe.
PYDANTIC_WORDS = (
    ("input should be", "must be"),
    ("a valid dictionary or .*", "a section"),
    ("a valid tuple", "a list"),
    ("a valid string", "text, in quotes where YAML would read a number"),
    ("tuple should", "must"),
    (" after validation", ""),
)

# A key as near as this to a field of its own section is that field, misspelt; whatever other sections have.
ALMOST_SURE = 0.85

# Stands in for a required field that is missing, while the rest is checked.
PLACEHOLDER = "missing"


def parse_recipe(data: Mapping[str, Any]) -> tuple[Recipe, list[Problem], frozenset[str]]:
    """Recipe, problems, and the dotted names of fields (or whole sections) that couldn't be read.

    Unread fields hold their defaults in the recipe, so it may be used only to look for further problems.
    """
    fields = {field.path: field for field in list_fields()}
    plain = {key: _copy(value) for key, value in data.items()}
    problems: list[Problem] = []
    unread: set[str] = set()
    _drop_empty_sections(plain, Recipe.model_fields)
    _list_datasets(plain)
    _settle_dist_name(plain, problems, unread)
    _take_unknown_keys(plain, fields, problems, unread)
    while True:
        try:
            return Recipe.model_validate(plain), problems, frozenset(unread)
        except ValidationError as error:
            _take_bad_values(plain, error, fields, problems, unread)


def _copy(value: Any) -> Any:
    """New dictionaries and lists, all the way down: what is wrong is taken out of them."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _drop_empty_sections(plain: dict[str, Any], infos: Mapping[str, FieldInfo]) -> None:
    """``kernel_config:`` with nothing behind it means the default, as an absent one does; in sections too."""
    for name, info in infos.items():
        inner = section_fields(info)
        if name == "dist_config" or inner:
            if not info.is_required() and plain.get(name, 0) is None:
                del plain[name]
            elif isinstance(plain.get(name), dict):
                _drop_empty_sections(plain[name], inner)


def _list_datasets(plain: dict[str, Any]) -> None:
    """Sections that may be lists as lists of new dictionaries; what is neither path nor section stays for pydantic."""
    for name in LISTED_SECTIONS:
        if name not in plain:
            continue
        items = [{SHORTHAND_SECTIONS[name]: item} if isinstance(item, str) else item for item in _items(plain, name)]
        plain[name] = [dict(item) if isinstance(item, dict) else item for item in items]


def _settle_dist_name(plain: dict[str, Any], problems: list[Problem], unread: set[str]) -> None:
    """Where ``dist_config`` has no valid name, note it and let the rest of the section be read under a likely one."""
    section = plain.get("dist_config")
    if not isinstance(section, dict):
        return
    name = section.get("name")
    if isinstance(name, str) and name in DIST_CONFIGS:
        return
    names = ", ".join(DIST_CONFIGS)
    close = difflib.get_close_matches(str(name), DIST_CONFIGS, n=1)
    remedy = f"did you mean {close[0]}?" if close else "`moesaic` for expert parallelism, `fsdp2` for FSDP2 alone"
    problems.append(Problem(field="dist_config.name", value=name, rule=f"must be one of {names}", remedy=remedy))
    unread.add("dist_config.name")
    section["name"] = close[0] if close else ("fsdp2" if len(section) < 2 else "fsdpturbo")


def _take_unknown_keys(
    plain: dict[str, Any], fields: Mapping[str, RecipeField], problems: list[Problem], unread: set[str]
) -> None:
    """Remove keys that no field has; a field that was probably meant counts as unread."""
    sections = dict.fromkeys(path.rpartition(".")[0] for path in fields)  # "" is the top level
    for section, mapping in [(name, item) for name in sections for item in _items(plain, name)]:
        prefix = f"{section}." if section else ""
        if not isinstance(mapping, dict):
            continue
        for key in [key for key in mapping if not _is_known(f"{prefix}{key}", plain, fields)]:
            problem, meant = _explain_unknown_key(section, str(key), mapping[key], plain, fields)
            problems.append(problem)
            if meant and not _is_given(plain, meant):
                unread.add(meant)
            del mapping[key]


def _items(plain: Mapping[str, Any], section: str) -> list[Any]:
    """The values of a section: one, or those of all sections in a list; the recipe itself where ``section`` is ""."""
    values: list[Any] = [plain]
    for key in section.split(".") if section else ():
        inner = [value.get(key) for value in values if isinstance(value, dict)]
        values = [item for value in inner for item in (value if isinstance(value, list) else [value])]
    return values


def _is_known(path: str, plain: Mapping[str, Any], fields: Mapping[str, RecipeField]) -> bool:
    field = fields.get(path)
    return field is not None and (not field.variants or plain["dist_config"]["name"] in field.variants)


def _is_given(plain: Mapping[str, Any], path: str) -> bool:
    section, _, key = path.rpartition(".")
    items = _items(plain, section)
    return len(items) == 1 and isinstance(items[0], dict) and key in items[0]


def _explain_unknown_key(
    section: str, key: str, value: Any, plain: Mapping[str, Any], fields: Mapping[str, RecipeField]
) -> tuple[Problem, str | None]:
    """The problem of a key that ``section`` ("" is the top level) doesn't have, and the field probably meant."""
    prefix = f"{section}." if section else ""
    siblings = [
        path.removeprefix(prefix) for path in fields if path.startswith(prefix) and "." not in path[len(prefix) :]
    ]
    siblings = [name for name in siblings if _is_known(f"{prefix}{name}", plain, fields)]
    close = difflib.get_close_matches(key, siblings, n=1)
    is_slip = bool(section and difflib.get_close_matches(key, siblings, n=1, cutoff=ALMOST_SURE))
    longer = [name for name in siblings if section and f"_{key}_" in f"_{name}_"]
    renamed = _renamed(section, key, fields)
    elsewhere = [] if is_slip or (section and key in ANYONES) else _elsewhere(key, bool(close), plain, fields)
    place = f"in {section}" if section else "at the top level"
    meant: str | None = None
    if key in SPEC_DECIDES:
        rule = "is no field of a recipe: the model's spec decides which modules hold experts"
        remedy = "remove it; for a family without a spec, call moesaic.register_spec"
    elif f"{prefix}{key}" in fields:
        variants = fields[f"{prefix}{key}"].variants
        rule = f"{section}.name: {plain[section]['name']} has no such field; it belongs to {' and '.join(variants)}"
        remedy = f"remove it, or choose another name (to replace the section by an override: {section}={{name: ...}})"
    elif not section and key in VERL_SECTIONS and isinstance(value, dict):
        rule = "is a section of verl's configuration, and no field of a recipe"
        remedy = "moesaic check --from verl FILE makes a recipe of a whole configuration"
    elif len(longer) == 1:
        rule, meant = f"is no field {place}", f"{prefix}{longer[0]}"
        remedy = f"did you mean {meant}?"
    elif section and key in fields:
        rule, meant = f"belongs to the top level, not into {section}", key
        remedy = f"move it to the top level: `{key}: {show(value)}`"
    elif renamed is not None:
        rule, meant = f"is no field {place}; here it is called {renamed}", renamed
        remedy = f"write {renamed} ({fields[renamed].type_text}): {fields[renamed].description}"
    elif elsewhere:
        rule, meant = f"is no field {place}", elsewhere[0]
        remedy = f"did you mean {' or '.join(elsewhere)}?"
    else:
        rule = f"is no field {place}"
        meant = f"{prefix}{close[0]}" if close else None
        known = ", ".join(siblings) if section else "those of docs/recipe.md"
        remedy = f"did you mean {meant}?" if meant else f"remove it; known fields: {known}"
    return Problem(field=f"{prefix}{key}", value=value, rule=rule, remedy=remedy), meant


def _renamed(section: str, key: str, fields: Mapping[str, RecipeField]) -> str | None:
    """The field that another trainer calls ``key``. Of verl's fields of that name the one meant in ``section`` goes
    first; another section's counts where no field of the recipe has that name."""
    if key in RENAMED:
        return RENAMED[key]
    theirs = [path for path, field in fields.items() if key in [name.rpartition(".")[2] for name in field.verl_names]]
    here = [path for path in theirs if path.rpartition(".")[0] == section]
    if key in ANYONES or any(path.rpartition(".")[2] == key for path in fields):
        return next(iter(here), None)
    return next(iter([*here, *sorted(theirs, key=lambda path: "." in path)]), None)


def _elsewhere(key: str, is_near: bool, plain: Mapping[str, Any], fields: Mapping[str, RecipeField]) -> list[str]:
    """Fields of this name in other sections. Where ``stage`` is another, those for reinforcement learning are meant
    only if there are no others, and no field of nearly that name (``is_near``)."""
    found = [path for path in fields if path.rpartition(".")[2] == key and key != "name"]
    others = [path for path in found if path.partition(".")[0] not in RL_FIELDS]
    return others if (others or is_near) and plain.get("stage") != "rl" else found


def _take_bad_values(
    plain: dict[str, Any],
    error: ValidationError,
    fields: Mapping[str, RecipeField],
    problems: list[Problem],
    unread: set[str],
) -> None:
    """Note each of pydantic's errors, and remove the value behind it so that the next attempt succeeds."""
    for item in error.errors(include_url=False, include_context=False):
        path = _field_path(item["loc"], fields)
        key = path.rpartition(".")[2]
        mapping = _mapping_at(plain, item["loc"], path)
        if path not in unread:  # else its misspelt name, or another part of its value, has been noted already
            unread.add(path)
            value = None if item["type"] == "missing" else mapping[key]
            problems.append(_explain_bad_value(fields[path], value, item["msg"], item["type"] == "missing"))
        if fields[path].is_required:
            mapping[key] = PLACEHOLDER
        else:
            mapping.pop(key, None)


def _mapping_at(plain: Mapping[str, Any], location: Sequence[int | str], path: str) -> Any:
    """The section that holds the field ``path`` at a pydantic location; of a list, the right one."""
    value: Any = plain
    positions = list(location)
    for key in path.split(".")[:-1]:
        del positions[: positions.index(key) + 1]
        value = value[key]
        if isinstance(value, list):
            value = value[int(positions[0])]
    return value


def _field_path(location: Iterable[int | str], fields: Mapping[str, RecipeField]) -> str:
    """Dotted field of a pydantic location: without the union's tag, and without positions and keys inside a value."""
    parts = [str(part) for part in location if isinstance(part, str)]
    if parts[0] == "dist_config" and len(parts) > 1 and parts[1] in DIST_CONFIGS:
        del parts[1]
    while ".".join(parts) not in fields:
        del parts[-1]
    return ".".join(parts)


def _explain_bad_value(field: RecipeField, value: Any, message: str, is_missing: bool) -> Problem:
    if is_missing:
        rule, remedy = "is required", f"set it ({field.type_text}): {field.description}"
        return Problem(field=field.path, value=None, rule=rule, remedy=remedy)
    rule = message[0].lower() + message[1:]
    for theirs, ours in PYDANTIC_WORDS:
        rule = re.sub(theirs, ours, rule)
    options = re.findall(r"'([^']+)'", message)
    close = difflib.get_close_matches(str(value).lower(), options, n=1)
    if close:
        return Problem(field=field.path, value=value, rule=rule, remedy=f"did you mean {close[0]}?")
    default = "" if field.is_required else f", or remove it for the default {show(field.default)}"
    return Problem(field=field.path, value=value, rule=rule, remedy=f"set it by its type ({field.type_text}){default}")
