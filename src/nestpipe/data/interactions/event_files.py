"""The files of an event log, Parquet or CSV, one table of rows after another."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from nestpipe.data.source import DataError
from nestpipe.files.location import Location

PARQUET = (".parquet", ".pq")
TABS = (".tsv", ".tab", ".data")
ROWS = 1 << 18
"""Rows of a Parquet file that are read at a time."""
NEWLINE = b"\n"
BLOCK_BYTES = 1 << 24
"""Bytes of a CSV file that are read at a time.  A longer line is an error."""


@dataclass
class Lines:
    """Lines of a CSV file that were left out, by what was wrong with them."""

    skipped: int = 0
    first: str = ""
    """What was wrong with the first of them, and where."""

    def add(self, text: str, count: int = 1) -> None:
        self.first = self.first or text
        self.skipped += count


@dataclass(frozen=True)
class EventFile:
    """One file of a log."""

    location: Location
    delimiter: str | None = None
    """Of a CSV file.  None: a tab for names that end so, a comma for others."""
    skip: bool = False
    """Leave out lines of a CSV file that cannot be read, instead of failing."""
    ids: tuple[str, ...] = ()
    """Columns of ids, which may be text."""
    numbers: tuple[str, ...] = ()
    """Columns that must be numbers, whole or not."""
    time: str = ""
    text_ids: bool = False
    """Ids of a CSV file are text, whatever they look like."""
    lines: Lines = field(default_factory=Lines)

    @property
    def is_parquet(self) -> bool:
        return self._bare_name.endswith(PARQUET)

    @property
    def _bare_name(self) -> str:
        return self.location.name.lower().removesuffix(".gz").removesuffix(".zst").removesuffix(".bz2")

    def schema(self) -> pa.Schema:
        """Of a CSV file: what its first block looks like."""
        with self._one_line():
            if self.is_parquet:
                with pq.ParquetFile(self.location.open()) as file:
                    return file.schema_arrow
            with self._stream() as stream:
                block = stream.read(BLOCK_BYTES)
            block = block if len(block) < BLOCK_BYTES else block[: block.rfind(b"\n") + 1]
            rows, broken = self._parse_most(block)
            if len(rows) + 1 + broken < _lines_in(block):  # the header is one
                block, _ = self._whole_lines(block, 1)
                rows, _ = self._parse_most(block)
            schema = rows.schema
        for name in (*self.ids, self.time, *self.numbers):
            if name in schema.names:
                schema = schema.set(schema.get_field_index(name), pa.field(name, self._type_of(name, schema, block)))
        return schema

    def _type_of(self, name: str, schema: pa.Schema, block: bytes) -> pa.DataType:
        """Of a column: one broken line must not make text of numbers, nor fractions of whole numbers."""
        kind = schema.field(name).type
        if name in self.ids and self.text_ids:
            return pa.string()
        if name in self.numbers:  # 1 in one file and 1.0 in the next are one flag
            kind = pa.float64() if pa.types.is_integer(kind) else kind
            wanted = pa.float64()
        else:
            wanted = pa.int64()
        if not (pa.types.is_string(kind) or (pa.types.is_floating(kind) and name not in self.numbers)):
            return kind
        text = self._parse(block, None, {name: pa.string()}, [name], lambda row: "skip")[name]
        fitting = _converts(text, wanted)
        if (fitting.true_count or 0) < 0.5 * len(fitting):
            return kind
        if self.skip:
            return wanted
        place = pa.compute.index(fitting, False).as_py()
        other = "set data.text_ids = true if ids are text, or " if name in self.ids else ""
        raise DataError(
            f"{self.location} line {_line_of_row(block, place + 1)}: {text[place].as_py()!r} in column {name!r}, where most "
            f"are {'numbers' if name in self.numbers else 'whole numbers'}: mend it, {other}set data.on_error = 'skip' to "
            "leave such lines out"
        )

    def count(self) -> int:
        """Rows of a Parquet file; of a CSV file, its bytes: what tells how far its reading is."""
        with self._one_line():
            if self.is_parquet:
                with pq.ParquetFile(self.location.open()) as file:
                    return int(file.metadata.num_rows)
            return self.location.size()

    def read(self, names: list[str], types: dict[str, pa.DataType]) -> Iterator[tuple[pa.Table, int, int]]:
        """Some rows of these columns, the number of the first of them in the file, and how much of `count` is done.

        `types` are those of the first CSV file: what looks like numbers there must be numbers everywhere.
        """
        with self._one_line():
            yield from self._parquet(names) if self.is_parquet else self._csv(names, types)

    def _parquet(self, names: list[str]) -> Iterator[tuple[pa.Table, int, int]]:
        with pq.ParquetFile(self.location.open(), page_checksum_verification=True) as file:
            first = 0
            for batch in file.iter_batches(ROWS, columns=names, use_threads=False):
                rows = pa.Table.from_batches([batch])
                yield rows, first, first + len(rows)
                first += len(rows)

    def _csv(self, names: list[str], types: dict[str, pa.DataType]) -> Iterator[tuple[pa.Table, int, int]]:
        """Block by block, so that an error can name its line."""
        header: list[str] | None = None
        line, first, done, rest = 1, 0, 0, b""
        with self._stream() as stream:
            while True:
                read = stream.read(BLOCK_BYTES)
                done += len(read)
                block = rest + read
                end = len(block) if not read else block.rfind(b"\n") + 1
                block, rest = block[:end], block[end:]
                if read and not end:
                    if len(rest) > 2 * BLOCK_BYTES:
                        raise DataError(f"{self.location} line {line}: no line end in {BLOCK_BYTES:,} bytes")
                    continue
                if not block.strip():
                    if not read:
                        return
                    continue
                has_header = header is None
                if has_header:
                    header = self._header(block)
                    if not block[block.find(b"\n") + 1 :].strip():
                        line += 1
                        continue
                    block = block[block.find(b"\n") + 1 :]
                    line += 1
                rows = self._block(block, header, names, types, line)
                line += block.count(b"\n")
                if len(rows):
                    yield rows, first, done
                first += len(rows)

    def _header(self, block: bytes) -> list[str]:
        table = self._parse(block[: block.find(b"\n") + 1] or block, None, {})
        return list(table.schema.names)

    def _block(
        self, block: bytes, header: list[str] | None, names: list[str], types: dict[str, pa.DataType], line: int
    ) -> pa.Table:
        error: pa.ArrowInvalid | None = None
        try:
            rows = self._parse(block, header, types, names)
            if len(rows) >= _lines_in(block):
                return rows
        except pa.ArrowInvalid as found:
            error = found
        block, wrong = self._whole_lines(block, line)
        if error is not None and not self.skip:
            raise DataError(f"{self.location} line {_line_of(error, block, line)}: {_reason(error)}") from None
        # Some line is broken: read all of it as text, and leave out what does not convert.

        def leave_out(row: Any) -> str:
            wrong.append(f"{row.actual_columns} values instead of {row.expected_columns}")
            return "skip"

        rows = self._parse(block, header, dict.fromkeys(names, pa.string()), names, leave_out)
        good = pa.array([True] * len(rows))
        for name in names:
            if not pa.types.is_string(types[name]):
                good = pa.compute.and_(good, _converts(rows[name], types[name]))
        bad = len(rows) - (good.true_count or 0)
        if bad:
            wrong += ["a value that is not of its column's type"] * bad
            rows = rows.filter(good)
        self.lines.add(f"{self.location}, lines {line} to {line + block.count(NEWLINE)}: {wrong[0]}", len(wrong))
        trimmed = [
            column if pa.types.is_string(types[name]) else pa.compute.utf8_trim_whitespace(column)
            for name, column in zip(rows.schema.names, rows.columns)
        ]
        wanted = pa.schema([(name, types[name]) for name in rows.schema.names])
        return pa.table(trimmed, names=rows.schema.names).cast(wanted)

    def _parse_most(self, block: bytes) -> tuple[pa.Table, int]:
        """The rows of a block with its header, types as they look, and how many lines have too many or too few values."""
        broken = 0

        def leave_out(row: Any) -> str:
            nonlocal broken
            broken += 1
            return "skip"

        return self._parse(block, None, {}, invalid=leave_out), broken

    def _whole_lines(self, block: bytes, line: int) -> tuple[bytes, list[str]]:
        """The block without lines in which a quote is not closed, and what is wrong with each of these.

        For a block that has fewer rows than lines, or none: such a quote swallows the lines behind it.  A value must not
        have a line break, which looks the same.
        """
        lines = block.split(NEWLINE)
        odd = [number for number, text in enumerate(lines) if text.count(b'"') % 2]
        if not odd:
            return block, []
        if not self.skip:
            raise DataError(
                f"{self.location} line {line + odd[0]}: a quote that is not closed in its line (values with line breaks "
                "cannot be read); data.on_error = 'skip' leaves such lines out"
            )
        out = set(odd)
        kept = [text for number, text in enumerate(lines) if number not in out]
        return NEWLINE.join(kept), ["a quote that is not closed in its line"] * len(odd)

    def _parse(
        self,
        block: bytes,
        header: list[str] | None,
        types: dict[str, pa.DataType],
        names: list[str] | None = None,
        invalid: Any = None,
    ) -> pa.Table:
        return pacsv.read_csv(
            io.BytesIO(block),
            read_options=pacsv.ReadOptions(use_threads=False, column_names=header, block_size=2 * len(block) + 1),
            parse_options=pacsv.ParseOptions(delimiter=self._delimiter(), invalid_row_handler=invalid),
            convert_options=pacsv.ConvertOptions(
                column_types=types, include_columns=names, null_values=[""], strings_can_be_null=True
            ),
        )

    def _delimiter(self) -> str:
        return self.delimiter or ("\t" if self._bare_name.endswith(TABS) else ",")

    def _stream(self) -> Any:
        file = self.location.open()
        codec = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}.get(self.location.name.lower().rsplit(".", 1)[-1])
        return file if codec is None else pa.CompressedInputStream(file, codec)

    def _one_line(self) -> _OneLine:
        return _OneLine(str(self.location))


class _OneLine:
    """What a file cannot be read for, as one line that names it."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | pa.ArrowException):
            raise DataError(f"{self._file} cannot be read: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    strerror = getattr(error, "strerror", None)
    return strerror or (str(error).splitlines() or [type(error).__name__])[0]


def _line_of(error: BaseException, block: bytes, line: int) -> str:
    """pyarrow counts the rows of a block from 1, and empty lines not at all."""
    text = str(error)
    if "Row #" in text:
        row = int("".join(c for c in text.split("Row #", 1)[1].split(":")[0] if c.isdigit()))
        return str(line + _line_of_row(block, row - 1) - 1)
    return f"{line} to {line + block.count(NEWLINE)}"


def _lines_in(block: bytes) -> int:
    """Lines that are not empty."""
    lines = block.count(NEWLINE) + (not block.endswith(NEWLINE))
    if b"\n\n" in block or b"\n\r\n" in block or block.startswith((b"\n", b"\r\n")):
        lines = sum(1 for text in block.split(NEWLINE) if text.strip(b"\r"))
    return lines


def _line_of_row(block: bytes, row: int) -> int:
    """The line, counted from 1, of a row of a block, counted from 0."""
    full = [number for number, text in enumerate(block.split(NEWLINE), start=1) if text.strip(b"\r")]
    return full[min(row, len(full) - 1)]


def _converts(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Of each text, whether it converts."""
    if pa.types.is_integer(kind):
        pattern = r"^[ \t]*-?[0-9]{1,19}[ \t]*$"
    elif pa.types.is_floating(kind):
        pattern = r"^[ \t]*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?[ \t]*$"
    elif pa.types.is_boolean(kind):
        pattern = r"^(0|1|[Tt]rue|[Ff]alse|TRUE|FALSE)$"
    else:
        pattern = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?)?Z?$"
    matches = pa.compute.match_substring_regex(column, pattern)
    if pa.types.is_integer(kind):  # of 19 digits, not all numbers fit
        digits = pa.compute.utf8_trim(column, " \t-")
        fits = pa.compute.less_equal(digits, "9223372036854775807")
        matches = pa.compute.and_(matches, pa.compute.or_(pa.compute.less(pa.compute.utf8_length(digits), 19), fits))
    return pa.compute.fill_null(matches, True).combine_chunks()
