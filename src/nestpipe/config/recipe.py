"""A run as a TOML file: read, overridden, checked, and written back as it was run."""

from __future__ import annotations

import datetime
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nestpipe.config.build import RecipeError, build, convert, nearest
from nestpipe.config.checkpoint import CheckpointConfig
from nestpipe.config.dense import DenseConfig
from nestpipe.config.own_class import HOW, Kinds, is_own
from nestpipe.config.pipeline import PipelineConfig
from nestpipe.config.tables import TablesConfig
from nestpipe.config.toml import toml_items, toml_key, toml_value
from nestpipe.config.training import EvalConfig, MemoryConfig, TrainConfig
from nestpipe.config.wording import show

SECTIONS: dict[str, type] = {
    "tables": TablesConfig,
    "dense": DenseConfig,
    "pipeline": PipelineConfig,
    "memory": MemoryConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
}


@dataclass(frozen=True)
class Recipe:
    """A whole run.  `data` and `model` are dataclasses, chosen by kind; they have no field `kind` themselves."""

    name: str
    data_kind: str
    data: Any
    model_kind: str
    model: Any
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def to_toml(self) -> str:
        """The recipe with every default written out; reading it gives an equal recipe."""
        lines = [f"name = {toml_value(self.name)}"]
        for section in ("data", "model", *SECTIONS):
            lines += ["", f"[{section}]"]
            if section in ("data", "model"):
                lines.append(f"kind = {toml_value(getattr(self, section + '_kind'))}")
            lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in toml_items(getattr(self, section))]
        return "\n".join(lines) + "\n"


def load_recipe(
    path: str | Path,
    overrides: Iterable[str],
    data_kinds: Mapping[str, type],
    model_kinds: Mapping[str, type],
    shipped: Path | None = None,
) -> Recipe:
    """The recipe in a file, or the shipped one of that name, with `section.key=value` overrides applied in order."""
    file = _find(Path(path), shipped)
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise RecipeError(f"cannot read recipe '{file}': {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        # tomllib names the line except when it runs off the end of the file.
        reason = str(error).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise RecipeError(f"recipe '{file}' is not valid TOML: {reason}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe '{file}' is not text in UTF-8: {error.reason} at byte {error.start}") from error
    for override in overrides:
        _override(values, override)
    values.setdefault("name", file.stem)
    return make_recipe(values, data_kinds, model_kinds)


def parse_recipe(text: str, data_kinds: Mapping[str, type], model_kinds: Mapping[str, type]) -> Recipe:
    """The recipe that `to_toml` has written."""
    try:
        return make_recipe(tomllib.loads(text), data_kinds, model_kinds)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"not a recipe: {error}") from error


def make_recipe(values: dict[str, Any], data_kinds: Mapping[str, type], model_kinds: Mapping[str, type]) -> Recipe:
    """A recipe from what TOML gives: `name` and the sections; only `name`, `data` and `model` have to be there."""
    # Before the kinds, so that [modle] is called misspelt and not model missing.
    unknown = [key for key in values if key not in ("name", "data", "model", *SECTIONS)]
    if unknown:
        raise RecipeError(_unknown_section(unknown[0], values[unknown[0]]))
    data_kind, data = _build_kind("data", values.get("data", {}), data_kinds)
    model_kind, model = _build_kind("model", values.get("model", {}), model_kinds)
    return Recipe(
        convert(str, values.get("name", "run"), "name"),
        data_kind,
        data,
        model_kind,
        model,
        **{section: build(cls, values.get(section, {}), section) for section, cls in SECTIONS.items()},
    )


def _build_kind(section: str, table: Any, kinds: Mapping[str, type]) -> tuple[str, Any]:
    """The `kind` of a section, and what it builds from the rest."""
    if not isinstance(table, dict):
        raise RecipeError(f"{section} must be a table, not {show(table)}")
    rest = dict(table)
    kind, valid = rest.pop("kind", None), f"the kinds are {', '.join(kinds)}"
    if isinstance(kinds, Kinds):
        if is_own(kind):
            return kind, build(kinds.own(kind), rest, section)
        valid += f", or {HOW}"
    if kind is None:
        raise RecipeError(f"{section}.kind is missing: {valid}")
    if not isinstance(kind, str) or kind not in kinds:
        hint = nearest(str(kind), kinds) or valid
        if isinstance(kinds, Kinds) and isinstance(kind, str) and "." in kind:
            module, _, name = kind.rpartition(".")
            hint = f"for your own class write '{module}:{name}', with a colon"
        raise RecipeError(f"unknown {section}.kind {show(kind)}: {hint}")
    return kind, build(kinds[kind], rest, section)


def _unknown_section(key: str, value: Any) -> str:
    """What to say about a name at the top level that is no section: misspelt, or a key without its section."""
    sections = ["data", "model", *SECTIONS]
    near = difflib.get_close_matches(key.lower(), sections, n=1)
    if isinstance(value, dict) and value and near:
        inner = next(iter(value))
        return f"unknown key '{key}.{inner}': did you mean '{near[0]}.{inner}'?"
    homes = [f"'{section}.{key}'" for section, cls in SECTIONS.items() if key in {f.name for f in fields(cls)}]
    if homes:
        return f"unknown key '{key}': did you mean {' or '.join(homes)}?"
    what = "section" if isinstance(value, dict) else "key"
    return f"unknown {what} '{key}': {nearest(key, sections) or 'the sections are ' + ', '.join(sections)}"


def _find(path: Path, shipped: Path | None) -> Path:
    if path.is_file():
        return path
    recipes = {file.stem: file for file in sorted(shipped.glob("*.toml"))} if shipped else {}
    name = path.name.removesuffix(".toml")
    # A bare name may mean a shipped recipe; a path with folders means that file and no other.
    if len(path.parts) == 1 and name in recipes:
        return recipes[name]
    raise RecipeError(f"no recipe '{path}' here; the shipped ones are {', '.join(recipes) or '(none)'}")


def _override(values: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`; a value that is not TOML is a string as it stands."""
    path, equals, text = override.partition("=")
    parts = [part.strip() for part in path.split(".")]
    if not equals or not all(parts):
        raise RecipeError(f"an override must be section.key=value, not {show(override)}")
    table = values
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            taken = ".".join(parts[:depth])
            raise RecipeError(f"unknown key '{'.'.join(parts)}': {taken} is {show(table)}, not a table")
    table[parts[-1]] = _override_value(text.strip())


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    # A line break can smuggle in a second key, and no recipe key is a date: 2024-01-01 is a folder's name here.
    whole = len(parsed) == 1 and not isinstance(value, datetime.date | datetime.time)
    return value if whole else text
