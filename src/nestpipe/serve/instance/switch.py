"""Model versions of an instance: the one that serves, one that is coming, and those that still finish their requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from nestpipe.infer.contract import RelayModel


class Switch:
    """A version is dropped when it does not serve any more and the last job that began under it has ended."""

    def __init__(self, model: RelayModel) -> None:
        self.current = model
        self.next: RelayModel | None = None
        self.until = 0.0
        self._on_done: Callable[[], None] = lambda: None
        self._models = {model.version: model}
        self._uses: Counter[str] = Counter()

    @property
    def versions(self) -> list[str]:
        """All that are in memory, the serving one first."""
        return sorted(self._models, key=lambda version: version != self.current.version)

    def model_of(self, version: str) -> RelayModel:
        """The model of a version that a job or a pin still uses."""
        return self._models[version]

    def enter(self, version: str) -> None:
        self._uses[version] += 1

    def leave(self, version: str) -> bool:
        """Whether the version was dropped by this."""
        self._uses[version] -= 1
        assert self._uses[version] >= 0
        self._drop_unused()
        return version not in self._models

    def prepare(self, model: RelayModel, until: float, on_done: Callable[[], None]) -> None:
        assert self.next is None and model.version not in self._models
        self.next, self.until, self._on_done = model, until, on_done
        self._models[model.version] = model

    def take_over(self) -> None:
        """From now on, new requests are the next version's."""
        assert self.next is not None
        self.current, self.next = self.next, None
        self._drop_unused()
        on_done, self._on_done = self._on_done, lambda: None
        on_done()

    def _drop_unused(self) -> None:
        kept = {self.current.version, *([self.next.version] if self.next is not None else [])}
        for version in [v for v in self._models if v not in kept and not self._uses[v]]:
            del self._models[version], self._uses[version]
