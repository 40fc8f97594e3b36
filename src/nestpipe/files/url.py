"""The parts of a URL of a file: s3://bucket/path?endpoint_override=127.0.0.1:9000&scheme=http."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

SCHEMES = ("s3", "gs", "hdfs", "file")


def is_url(name: str) -> bool:
    return "://" in name


@dataclass(frozen=True)
class Url:
    """Prints as it was given."""

    scheme: str
    bucket: str
    """Or the server, for hdfs; empty for file."""
    path: str
    """Below the bucket, without slashes around it."""
    query: str = ""

    @staticmethod
    def parse(name: str) -> Url:
        """ValueError, in one line, for what cannot be a file."""
        scheme, _, rest = name.partition("://")
        if scheme not in SCHEMES:
            raise ValueError(f"{name}: no file system {scheme!r}; there are {', '.join(SCHEMES)} and local paths")
        rest, _, query = rest.partition("?")
        bucket, slash, path = rest.partition("/")
        if "@" in bucket and scheme in ("s3", "gs"):
            hidden = f"{scheme}://…@{bucket.rpartition('@')[2]}"
            raise ValueError(
                f"{hidden}{slash}{path}: a URL with a password ends up in logs; set AWS_ACCESS_KEY_ID instead"
            )
        if not bucket and scheme in ("s3", "gs"):
            raise ValueError(f"{name} names no bucket: write {scheme}://BUCKET/PATH")
        return Url(scheme, bucket, path if scheme == "file" else path.strip("/"), query)

    def child(self, name: str) -> Url:
        return replace(self, path=f"{self.path.rstrip('/')}/{name}" if self.path else name)

    def options(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))

    def endpoint(self) -> str:
        """The server, where it is not the provider's own; may begin with http:// or https://."""
        if self.scheme != "s3":
            return self.options().get("endpoint_override", "")
        return (
            self.options().get("endpoint_override")
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or ""
        )

    def server(self) -> str:
        """In messages."""
        if self.scheme == "hdfs":
            return self.bucket or "the name node"
        return self.endpoint() or {"s3": "Amazon S3", "gs": "Google Cloud Storage"}.get(self.scheme, "the file system")

    def __str__(self) -> str:
        below = f"/{self.path}" if self.path or self.scheme == "file" else ""
        return f"{self.scheme}://{self.bucket}{below}" + f"?{self.query}" * bool(self.query)
