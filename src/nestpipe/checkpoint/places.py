"""Finds the checkpoint that a user means: by a run, a folder of checkpoints, or one checkpoint."""

from __future__ import annotations

import tomllib
from pathlib import Path

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint, Folder
from nestpipe.checkpoint.manifest import step_of
from nestpipe.checkpoint.plain_file import Place
from nestpipe.checkpoint.remote_storage import step_in
from nestpipe.files import Location
from nestpipe.files.url import is_url

FOLDER = "checkpoints"
"""In a run directory, unless its recipe sets checkpoint.path."""


def place_at(text: str) -> Place:
    """A path, or the location of a URL.  file:///a/b is a path, too."""
    return Location(text) if is_url(text) and not text.startswith("file://") else Path(text.removeprefix("file://"))


def folder_at(place: Place) -> tuple[Folder, int | None]:
    """The folder, and the step if `place` is a single checkpoint."""
    if isinstance(place, Location):
        step = step_in(place.leaf)
        return (Folder(place), None) if step is None else (Folder(place.parent), step)
    if not place.is_dir():
        raise CheckpointError(
            f"no directory '{place}': give a run directory, a folder of checkpoints, or one checkpoint"
        )
    step = step_of(place.resolve().name)
    if step is not None:
        return Folder(place.resolve().parent), step
    recipe = place / "recipe.toml"
    if not recipe.is_file():
        return Folder(place / FOLDER if (place / FOLDER).is_dir() else place), None
    try:
        path = tomllib.loads(recipe.read_text(encoding="utf-8")).get("checkpoint", {}).get("path", "none")
    except (ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{recipe} cannot be read ({error}): give the folder of its checkpoints") from None
    return Folder(place / FOLDER if path == "none" else place_at(str(path))), None


def checkpoint_at(place: Place, step: int | None = None) -> tuple[Folder, Checkpoint]:
    """The checkpoint of a step.  Without a step: the one that `place` is, or the last one in it."""
    folder, own = folder_at(place)
    if step is not None and own not in (None, step):
        raise CheckpointError(f"'{place}' is the checkpoint of step {own}: leave --step out")
    found = folder.find(own if step is None else step)
    if found is None:
        raise CheckpointError(f"no checkpoint in {folder.path}")
    return folder, found
