"""Models of a training run, a checkpoint or an export for serving."""

from __future__ import annotations

from nestpipe.checkpoint.places import folder_at, place_at
from nestpipe.errors import NestPipeError
from nestpipe.files import Location
from nestpipe.infer.contract import RelayModel
from nestpipe.infer.open_run import open_model
from nestpipe.infer.relay import Relay
from nestpipe.infer.serving_files import is_export
from nestpipe.models.ranking import RankingModel


class NotServable(NestPipeError, ValueError):
    """A run that cannot be served, whatever its checkpoints."""

    exit_code = 2


class RunSource:
    """A path as `open_model` takes it.  `memory`: bytes for rows of an export; None maps them."""

    def __init__(self, path: str, memory: int | None = None) -> None:
        self._path, self._memory = path, memory

    def newest(self) -> str | None:
        place = place_at(self._path)
        if isinstance(place, Location) or is_export(place):
            return self._path  # an export does not change
        folder, own = folder_at(place)
        steps = folder.steps()
        return str(own if own is not None else steps[-1]) if steps else None

    def open(self) -> RelayModel:
        opened = open_model(self._path, self._memory)
        if not isinstance(opened.model, RankingModel):
            opened.close()
            raise NotServable(
                f'{self._path} is no ranking model (model.task = "ranking"): `nestpipe predict {self._path}` scores others'
            )
        return Relay(opened.model, opened.rows, opened.version)
