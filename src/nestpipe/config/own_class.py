"""A user's own class in a recipe, named `module:Class` where a built-in kind would stand."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from nestpipe.config.build import RecipeError
from nestpipe.config.wording import wording

HOW = "your own class as 'module:Class'"


class Kinds(dict[str, type]):
    """The built-in kinds of a section by name, each with the dataclass of its keys; `own` finds that of a user's class."""

    def __init__(self, built_in: Mapping[str, type], own: Callable[[str], type]) -> None:
        super().__init__(built_in)
        self.own = own
        """From `module:Class` to the dataclass of its keys.  Imports the module.  RecipeError where it does not fit."""


def is_own(kind: object) -> bool:
    """Whether a kind names a user's class.  Imports nothing."""
    return isinstance(kind, str) and ":" in kind


def own_class(name: str, where: str) -> type:
    """The class `module:Class`; imports the module, from the current directory or the Python environment.

    RecipeError, in one line that begins with `where`, if there is none.
    """
    module_name, _, class_name = name.partition(":")
    if not _is_name(class_name) or not _is_name(module_name, dots=True) or module_name.endswith(".py"):
        right = module_name.removesuffix(".py").strip("./").replace("/", ".")
        fits = _is_name(class_name) and _is_name(right, dots=True)
        example = f"{right}:{class_name}" if fits else "my_package.my_module:Ranker"
        raise RecipeError(f"{where} must be 'module:Class', such as {example!r}")
    module = _import(module_name, where)
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    file = f" ({module.__file__})" if getattr(module, "__file__", None) else ""
    if found is not None:
        raise RecipeError(f"{where}: {class_name!r} in module {module_name!r}{file} is {_a(found)}, not a class")
    own = [k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
    hint = _near(class_name, own) or (f"its classes are {', '.join(own)}" if own else "it defines no class")
    raise RecipeError(f"{where}: module {module_name!r}{file} has no class {class_name!r}; {hint}")


def check_keys(cls: type, where: str) -> None:
    """RecipeError unless `cls` is a frozen dataclass whose fields TOML can fill."""
    if not (is_dataclass(cls) and isinstance(cls, type)):
        raise RecipeError(f"{where} is {_a(cls)}, not a dataclass: write @dataclass(frozen=True) above it")
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise RecipeError(f"{where} is a dataclass that is not frozen: write @dataclass(frozen=True) above it")
    try:
        hints = get_type_hints(cls)
    except Exception as error:
        raise RecipeError(f"{where} has a field whose type cannot be read ({error})") from error
    for field in fields(cls):
        if not field.init:
            continue
        if field.name == "kind":
            raise RecipeError(f"{where} has a field 'kind', which names the class in a recipe: rename it")
        try:
            wording(hints[field.name])
        except TypeError:
            raise RecipeError(
                f"{where}: the type of field {field.name!r} cannot be given in TOML: use numbers, strings, true or "
                "false, lists, dicts or frozen dataclasses of these"
            ) from None


def _import(name: str, where: str) -> ModuleType:
    # First, as `python -m` has it: so a command and the workers that it starts find the same module.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, where, error) from error  # the module is there, and misses another
        near = _near(error.name, (path.stem for path in Path(here).glob("*.py")))
        raise RecipeError(
            f"{where}: there is no module {error.name!r} in the current directory ({here}), on PYTHONPATH or in the "
            f"Python environment ({sys.prefix}){near and '; ' + near}"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(name, where, error) from error


def _failed(name: str, where: str, error: BaseException) -> RecipeError:
    """What went wrong inside a module, and where in the user's files."""
    if isinstance(error, SyntaxError):
        return RecipeError(
            f"{where}: module {name!r} cannot be imported: {error.msg} ({error.filename} line {error.lineno})"
        )
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and "importlib" not in f.filename
    ]
    mine = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())] or frames[:1]
    place = f" ({mine[-1].filename} line {mine[-1].lineno})" if mine else ""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return RecipeError(f"{where}: module {name!r} cannot be imported: {text}{place}")


def _is_name(text: str, dots: bool = False) -> bool:
    return all(part.isidentifier() for part in (text.split(".") if dots else [text]))


def _near(name: str, valid: Iterable[str]) -> str:
    by_lower = {one.lower(): one for one in valid}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}?" if near else ""


def _a(what: Any) -> str:
    """What something is, in words."""
    if isinstance(what, type):
        return f"the class {what.__name__}"
    return f"a {type(what).__name__}"
