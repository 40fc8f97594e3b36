"""A run as a TOML file: read, overridden, checked, and written back as it was run."""

from __future__ import annotations

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from nestpipe.config.sections import (
    SECTIONS,
    CheckpointSection,
    DenseSection,
    EvalSection,
    MemorySection,
    PipelineSection,
    TablesSection,
    TrainSection,
    show,
    wording,
)
from nestpipe.errors import NestPipeError

T = TypeVar("T")


class RecipeError(NestPipeError, ValueError):
    """The recipe cannot be run; the message is one line and names the key to change."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class Recipe:
    """A whole run.  `data` and `model` are dataclasses, chosen by kind; they have no field `kind` themselves."""

    name: str
    data_kind: str
    data: Any
    model_kind: str
    model: Any
    tables: TablesSection = field(default_factory=TablesSection)
    dense: DenseSection = field(default_factory=DenseSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    memory: MemorySection = field(default_factory=MemorySection)
    train: TrainSection = field(default_factory=TrainSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def to_toml(self) -> str:
        """The recipe with every default written out; reading it gives an equal recipe."""
        lines = [f"name = {toml_value(self.name)}"]
        for section in ("data", "model", *SECTIONS):
            lines += ["", f"[{section}]"]
            if section in ("data", "model"):
                lines.append(f"kind = {toml_value(getattr(self, section + '_kind'))}")
            lines += [f"{_toml_key(key)} = {toml_value(value)}" for key, value in _items(getattr(self, section))]
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
        _convert(str, values.get("name", "run"), "name"),
        data_kind,
        data,
        model_kind,
        model,
        **{section: build(cls, values.get(section, {}), section) for section, cls in SECTIONS.items()},
    )


def build(cls: type[T], values: object, where: str) -> T:
    """A dataclass from a table, checked against its type hints; `where` is the table's place in the recipe.

    The class's own ValueError keeps its message.  For an optional field the string "none" is None, which TOML lacks.
    """
    if not isinstance(values, dict):
        raise RecipeError(f"{where} must be a table, not {show(values)}")
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]  # T is a dataclass
    for key in values:
        if key not in known:
            hint = _nearest(key, known, prefix=f"{where}.") or f"{where} has {', '.join(known) or 'no keys'}"
            raise RecipeError(f"unknown key '{where}.{key}': {hint}")
    for key, f in known.items():
        if key not in values and f.default is MISSING and f.default_factory is MISSING:
            raise RecipeError(f"{where}.{key} is missing: it must be {wording(hints[key])}")
    converted = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**converted)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    """The value as the hint wants it.  Nothing is guessed: the only change of type is from int to float."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where)
    if origin in (Union, UnionType):
        return _convert_union(hint, value, where)
    if origin is Literal:
        if any(type(choice) is type(value) and choice == value for choice in args):
            return value
    elif origin in (list, Sequence, tuple) and isinstance(value, list):
        items = list(args) if origin is tuple and args[-1] is not ... else [args[0]] * len(value)
        if len(items) == len(value):
            return (tuple if origin is tuple else list)(
                _convert(item, v, f"{where}[{i}]") for i, (item, v) in enumerate(zip(items, value))
            )
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _convert(args[1], v, f"{where}.{key}") for key, v in value.items()}
    elif hint is float:
        if type(value) in (int, float) and value == value:  # nan is not a setting
            return float(value)
    elif type(value) is hint:  # not isinstance: true is not the number 1
        return value
    names = [choice for choice in args if isinstance(choice, str)] if isinstance(value, str) else []
    near = _nearest(value, names) if names else ""
    raise RecipeError(f"{where} must be {wording(hint)}, not {show(value)}{near and '; ' + near}")


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    if NoneType in get_args(hint) and value == "none":
        return None
    for member in get_args(hint):
        try:
            return _convert(member, value, where)
        except RecipeError as error:
            if not str(error).startswith(f"{where} must be "):
                raise  # the shape fits this member and something inside does not: say what
    raise RecipeError(f"{where} must be {wording(hint)}, not {show(value)}")


def _build_kind(section: str, table: Any, kinds: Mapping[str, type]) -> tuple[str, Any]:
    """The `kind` of a section, and what it builds from the rest."""
    if not isinstance(table, dict):
        raise RecipeError(f"{section} must be a table, not {show(table)}")
    rest = dict(table)
    kind, valid = rest.pop("kind", None), f"the kinds are {', '.join(kinds)}"
    if kind is None:
        raise RecipeError(f"{section}.kind is missing: {valid}")
    if not isinstance(kind, str) or kind not in kinds:
        raise RecipeError(f"unknown {section}.kind {show(kind)}: {_nearest(str(kind), kinds) or valid}")
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
    return f"unknown {what} '{key}': {_nearest(key, sections) or 'the sections are ' + ', '.join(sections)}"


def _nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name.lower(), list(valid), n=1)
    return f"did you mean '{prefix}{near[0]}'?" if near else ""


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


def _items(section: Any) -> Iterable[tuple[str, Any]]:
    """The fields to write: all but those that are None anyway."""
    for f in fields(section):
        value = getattr(section, f.name)
        if f.init and not (value is None and f.default is None):
            yield f.name, value


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """A value in TOML, on one line; dataclasses and dicts become inline tables."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON lets pass.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    items = value.items() if isinstance(value, dict) else _items(value)
    return "{" + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in items) + "}"
