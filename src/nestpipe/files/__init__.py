"""Files by name, wherever they are: on local disk or on object storage."""

from nestpipe.files.errors import FileError, Unreachable
from nestpipe.files.location import Location

__all__ = ["FileError", "Location", "Unreachable"]
