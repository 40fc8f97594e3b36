"""pyarrow's file system for a URL, made once for all files of a bucket."""

from __future__ import annotations

import functools
import os

import pyarrow.fs as pafs

from nestpipe.files.url import Url

CONNECT_SECONDS, REQUEST_SECONDS = 3.0, 10.0
"""Of one request to S3: to connect; without a byte sent or received."""
ATTEMPTS, UPLOAD_ATTEMPTS = 3, 8
"""How often pyarrow tries a request.  `patience` tries on, except for a part of an upload, which cannot be asked for again."""
OPTIONS = ("region", "scheme", "endpoint_override", "force_virtual_addressing")
"""What the query of an s3 URL may set."""


def system_of(url: Url, attempts: int = ATTEMPTS) -> tuple[pafs.FileSystem, str]:
    """The file system and the path in it.  OSError, or ValueError for a URL that no file system understands."""
    if url.scheme != "s3":
        query = f"?{url.query}" * bool(url.query)
        if url.scheme == "file":
            return pafs.LocalFileSystem(), f"/{url.path}"
        path = f"/{url.path}" if url.scheme == "hdfs" else f"{url.bucket}/{url.path}".rstrip("/")
        return _other(f"{url.scheme}://{url.bucket}/{query}"), path
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    return _s3(url.bucket, url.query, url.endpoint(), region, attempts), f"{url.bucket}/{url.path}".rstrip("/")


@functools.lru_cache(maxsize=64)
def _other(root: str) -> pafs.FileSystem:
    return pafs.FileSystem.from_uri(root)[0]


@functools.lru_cache(maxsize=64)
def _s3(bucket: str, query: str, endpoint: str, region: str, attempts: int) -> pafs.FileSystem:
    options = Url("s3", bucket, "", query).options()
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"s3://{bucket}?{query}: no option {name!r}; there are {', '.join(OPTIONS)}")
    scheme, found, server = endpoint.rpartition("://")
    # A server of one's own has no regions; with Amazon's, the bucket knows.
    region = options.get("region") or region or ("us-east-1" if endpoint else pafs.resolve_s3_region(bucket))
    return pafs.S3FileSystem(
        region=region,
        endpoint_override=server.rstrip("/") or None,
        scheme=options.get("scheme") or (scheme if found else "https"),
        force_virtual_addressing=options.get("force_virtual_addressing", "false").lower() in ("1", "true"),
        connect_timeout=CONNECT_SECONDS,
        request_timeout=REQUEST_SECONDS,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        allow_delayed_open=True,  # a small object is one PUT
        background_writes=False,  # otherwise all of a file that is written faster than it is sent is in memory
    )
