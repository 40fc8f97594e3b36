"""What of the data could not be read and was left out: the same parts on every worker, and after a resume."""

from __future__ import annotations

from collections.abc import Mapping


class Skipped:
    """Parts of a source by name, such as a file or one row group of it, with the samples that each would have had.

    A part that is bad is left out whole, by every worker that meets it, so that no worker's share of it decides what is trained.
    """

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}
        self._news: list[str] = []

    def add(self, part: str, samples: int, why: str) -> None:
        if part not in self.parts:
            self.parts[part] = samples
            self._news.append(f"skipped {part}: {why}")

    def go_on(self, parts: object) -> None:
        """What was left out before a resume stays out, whatever has become of it.  ValueError unless it is what `parts` was."""
        if not isinstance(parts, Mapping) or not all(
            isinstance(name, str) and type(count) is int and count >= 0 for name, count in parts.items()
        ):
            raise ValueError("skipped must be numbers of samples by name")
        self.parts.update(parts)

    def news(self) -> list[str]:
        """In words, what was left out since this was last asked."""
        news, self._news = self._news, []
        return news


def skipped_of(source: object) -> Skipped | None:
    """Of a source that can leave parts out; None of any other."""
    found = getattr(source, "skipped", None)
    return found if isinstance(found, Skipped) else None
