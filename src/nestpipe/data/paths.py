"""From what a recipe names to the files that are read: paths, globs and folders, local or on object storage."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from nestpipe.data.source import DataError
from nestpipe.files import FileError, Location


class NoSuchFiles(DataError):
    """A folder or a glob stands for no file."""


def find_files(field: str, names: str | Sequence[str], pattern: str) -> list[Location]:
    """The files of `names` in their order, each glob and folder sorted; DataError where one stands for no file.

    A folder stands for what matches `pattern` in it, at any depth, except names that begin with "_" or ".": those are
    markers that other tools leave there.
    """
    found: dict[Location, None] = {}
    for name in [names] if isinstance(names, str) else names:
        find = _find_remote if Location(name).remote else _find_local
        found.update(dict.fromkeys(find(field, name, pattern)))
    return list(found)


def _find_local(field: str, name: str, pattern: str) -> list[Location]:
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(p for p in path.rglob(pattern) if p.is_file())
        files = [p for p in inside if not any(part[0] in "_." for part in p.relative_to(path).parts)]
        if not files:
            raise NoSuchFiles(f"data.{field}: folder {name} has no {pattern} file")
    elif path.exists():
        files = [path]
    elif glob.has_magic(name):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        files = sorted(p for p in map(Path, matches) if p.is_file())
        if not files:
            raise DataError(f"data.{field}: no file matches {name}")
    else:
        raise DataError(f"data.{field}: no such file: {name}")
    return [Location(str(file)) for file in files]


def _find_remote(field: str, name: str, pattern: str) -> list[Location]:
    """As on local disk.  A "?" begins the URL's options: it is no wildcard."""
    place = Location(name)
    address, question, options = name.partition("?")
    try:
        if glob.has_magic(address):
            start = re.split(r"[*\[]", address, maxsplit=1)[0].rpartition("/")[0]
            root, wanted = Location(start + question + options), address[len(start) + 1 :]
            files = [root / one for one in _files_below(root) if _matches(one.split("/"), wanted.split("/"))]
            if not files:
                _check_reachable(root)
                raise DataError(f"data.{field}: no file matches {name}")
            return files
        if place.is_file():
            return [place]
        below = _files_below(place)
        inside = [one for one in below if fnmatch.fnmatchcase(one.rpartition("/")[2], pattern)]
        files = [place / one for one in inside if not any(part[0] in "_." for part in one.split("/"))]
        if below and not files:
            raise NoSuchFiles(f"data.{field}: folder {name} has no {pattern} file")
        if not files:
            place.size()  # says what is missing: the file, or its bucket
        return files
    except FileNotFoundError:
        raise DataError(f"data.{field}: no such file: {name}") from None
    except FileError as error:
        error.args = (f"data.{field}: {error}",)
        raise


def _check_reachable(root: Location) -> None:
    """FileError where the bucket is not there.  An empty folder is not an error here."""
    with contextlib.suppress(FileNotFoundError):
        (root / "-").size()


def _files_below(root: Location) -> list[str]:
    return [entry.name for entry in root.entries(deep=True) if entry.is_file]


def _matches(parts: list[str], wanted: list[str]) -> bool:
    """Whether a path matches a pattern, part by part; "**" is any number of parts, and hidden names need a dot."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        hidden = bool(parts) and parts[0].startswith(".")
        return _matches(parts, wanted[1:]) or (bool(parts) and not hidden and _matches(parts[1:], wanted))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])
