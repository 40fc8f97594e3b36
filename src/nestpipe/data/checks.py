"""Checks of the fields of a recipe's [data] section.  Every message names the field to change."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPLITS = ("train", "eval")


def check_whole(field: str, value: object, least: int = 1, most: int | None = None) -> None:
    """`value` is a whole number of at least `least` (and at most `most`), or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"data.{field} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"data.{field} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"data.{field} must be at most {most}, not {value}")


def check_number(field: str, value: object, least: float = -math.inf, most: float = math.inf) -> None:
    """`value` is a finite number between `least` and `most`, both allowed, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"data.{field} must be a finite number, not {value!r}")
    if value < least:
        raise ValueError(f"data.{field} must be at least {least:g}, not {value:g}")
    if value > most:
        raise ValueError(f"data.{field} must be at most {most:g}, not {value:g}")


def check_fraction(field: str, value: object) -> None:
    """`value` is a share of the data: 0 or more, less than 1."""
    check_number(field, value, 0.0)
    assert isinstance(value, int | float)
    if value >= 1:
        raise ValueError(f"data.{field} must be less than 1, not {value:g}")


def check_text(field: str, value: object, example: str) -> None:
    """`value` is a text that is not empty; `example` says what it might be."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"data.{field} must be a text such as {example!r}, not {value!r}")


def check_texts(field: str, value: object, example: str, *, empty: bool = False) -> None:
    """`value` is a text or a list of texts; `empty` allows none at all."""
    for one in [value] if isinstance(value, str) else texts(field, value, example, empty):
        check_text(field, one, example)


def texts(field: str, value: object, example: str, empty: bool) -> Sequence[object]:
    if not isinstance(value, list | tuple) or not (value or empty):
        raise ValueError(f"data.{field} must be a text or a list of texts such as {example!r}, not {value!r}")
    return value


def per_feature(field: str, value: int | Sequence[int], features: int, least: int, most: int) -> list[int]:
    """One whole number for each of `features` features: `value` itself, or the one number repeated."""
    if isinstance(value, list | tuple):
        if len(value) != features:
            raise ValueError(f"data.{field} must have {features} entries, one for each feature, not {len(value)}")
        for place, one in enumerate(value):
            check_whole(f"{field}[{place}]", one, least, most)
        return list(value)
    check_whole(field, value, least, most)
    assert isinstance(value, int)
    return [value] * features


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'eval', not {split!r}")
