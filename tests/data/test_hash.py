"""Ids of texts: the same for ever, and the same for every way a column can hold them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.hash import hash_text

GOLDEN = {
    "": -780787492076525413,
    "a": 198367012849983736,
    "item 17": -4050683210676104791,
    "Zürich": -4152719896068212131,
    "the quick brown fox jumps over the lazy dog": -5374011222298850695,
}


def plain_hash(data: bytes) -> int:
    """FNV-1a and the finalizer of splitmix64, written plainly."""
    mask = 2**64 - 1
    x = 0xCBF29CE484222325
    for byte in data:
        x = (x ^ byte) * 0x100000001B3 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def test_golden_values() -> None:
    """Ids never change: a checkpoint of today is read by the library of next year."""
    assert hash_text(list(GOLDEN)).tolist() == list(GOLDEN.values())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=8))
def test_hash_is_the_documented_one(texts: list[str]) -> None:
    """Against a plain Python version, for any text, the empty one included."""
    assert hash_text(texts).tolist() == [plain_hash(text.encode()) for text in texts]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=8), st.data())
def test_the_type_of_the_column_does_not_matter(texts: list[str], data: st.DataObject) -> None:
    """Strings, binary, views, dictionaries, slices and chunks of the same texts have the same ids."""
    expected = hash_text(texts)
    array = pa.array(texts, pa.string())
    for kind in [pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()]:
        assert np.array_equal(hash_text(array.cast(kind)), expected)
    assert np.array_equal(hash_text(array.dictionary_encode()), expected)
    assert np.array_equal(hash_text(array.cast(pa.binary()).dictionary_encode()), expected)
    assert np.array_equal(hash_text(pa.chunked_array([array, array])), np.tile(expected, 2))
    start = data.draw(st.integers(0, len(texts)))
    for sliced in [array.slice(start), array.dictionary_encode().slice(start)]:
        assert np.array_equal(hash_text(sliced), expected[start:])


def test_fixed_size_binary() -> None:
    """Binary of a fixed width is hashed by the same bytes."""
    assert np.array_equal(hash_text(pa.array([b"ab", b"cd"], pa.binary(2))), hash_text(["ab", "cd"]))


def test_short_texts_have_different_ids() -> None:
    """A million numbers as text have a million ids, spread over all bits (what the finalizer is for)."""
    ids = hash_text(pa.array(np.arange(1_000_000)).cast(pa.string()))
    assert len(np.unique(ids)) == 1_000_000
    top = np.bincount((ids.view(np.uint64) >> np.uint64(54)).astype(np.int64), minlength=1024)
    assert top.min() / 976.6 > 0.8 and top.max() / 976.6 < 1.2


def test_what_has_no_hash() -> None:
    """Nulls, also those hidden in a dictionary, and numbers are refused."""
    with pytest.raises(ValueError, match="null"):
        hash_text(pa.array(["a", None]))
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", None]))
    with pytest.raises(ValueError, match="null"):
        hash_text(hidden)
    with pytest.raises(ValueError, match="int64"):
        hash_text(pa.array([1]))
