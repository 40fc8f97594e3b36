"""What can be wrong with a file on object storage, in one line that names the file and what to look at."""

from __future__ import annotations

import os
from pathlib import Path

from nestpipe.errors import NestPipeError
from nestpipe.files.url import Url

PASSING = (
    "NETWORK_CONNECTION", "curlCode", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE", "SLOW_DOWN", "THROTTLING",
    "REQUEST_TIMEOUT", "REQUEST_TIME_OUT", "HTTP status 5", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Connection",
)  # fmt: skip
"""Words in an error of a connection or a server that may be back in a moment."""
REFUSED = ("ACCESS_DENIED", "PERMISSION_DENIED", "HTTP status 403", "UNAUTHENTICATED", "Permission denied")
WRONG_KEY = (
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "EXPIRED_TOKEN",
    "INVALID_CLIENT_TOKEN",
    "InvalidToken",
)
NO_BUCKET = ("NO_SUCH_BUCKET", "Bucket not found", "bucket does not exist")
CREDENTIALS = {
    "s3": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
         "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"),
        (".aws/credentials", ".aws/config"),
    ),
    "gs": (
        "set GOOGLE_APPLICATION_CREDENTIALS",
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        (".config/gcloud/application_default_credentials.json",),
    ),
}  # fmt: skip
"""For each scheme: what to do without credentials, and the variables and files in the home folder that have them."""


class FileError(NestPipeError):
    """A file on object storage cannot be used: credentials, permission, bucket, or its URL.  Trying again is of no use."""

    exit_code = 2


class Unreachable(FileError):
    """The server did not answer, or broke off, until the deadline."""

    exit_code = 1


def is_passing(url: Url, error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if _answers_strangers_with_errors(url, error):
        return False
    return isinstance(error, OSError) and any(word in str(error) for word in PASSING) and not _is_final(error)


def explain(url: Url, error: BaseException) -> FileError:
    """The line for an error that trying again does not mend."""
    text = str(error)
    if any(word in text for word in NO_BUCKET):
        return no_bucket(url)
    if any(word in text for word in WRONG_KEY):
        return FileError(f"{url}: {url.server()} does not accept the credentials ({_reason(text)}): check them")
    advice, found = _credentials(url.scheme)
    refused = any(word in text for word in REFUSED) or isinstance(error, PermissionError)
    if not found and (refused or _answers_strangers_with_errors(url, error)):
        return FileError(f"{url}: no credentials for {url.server()}: {advice}")
    if refused:
        return FileError(f"{url}: no permission: {url.server()} refuses these credentials; allow them, or use others")
    return FileError(f"{url} cannot be used: {_reason(text) or type(error).__name__}")


def no_bucket(url: Url) -> FileError:
    return FileError(f"{url}: no bucket {url.bucket!r} on {url.server()}: create it, or correct the URL")


def unreachable(url: Url, error: BaseException, seconds: float) -> Unreachable:
    return Unreachable(
        f"{url}: {url.server()} did not answer within {seconds:g} s ({_reason(str(error)) or type(error).__name__}): check "
        "that the server runs, the network, and the endpoint"
    )


def _answers_strangers_with_errors(url: Url, error: BaseException) -> bool:
    """Some servers, not Amazon's, take a request without credentials for an error of their own."""
    inside = "INTERNAL_FAILURE" in str(error) or "HTTP status 5" in str(error)
    return inside and bool(url.endpoint()) and not _credentials(url.scheme)[1]


def _is_final(error: BaseException) -> bool:
    return any(word in str(error) for word in (*NO_BUCKET, *WRONG_KEY, *REFUSED))


def _credentials(scheme: str) -> tuple[str, bool]:
    """What to do about credentials, and whether there are any to be found."""
    advice, variables, files = CREDENTIALS.get(scheme, ("log in", (), ()))
    known = scheme not in CREDENTIALS
    known = known or any(os.environ.get(name) for name in variables)
    return advice, known or any((Path.home() / name).is_file() for name in files)


def _reason(text: str) -> str:
    """What an error of pyarrow says, without where it says it and without numbers of requests."""
    line = text.splitlines()[0] if text else ""
    _, found, after = line.rpartition(" operation: ")
    line = after if found else line
    return " ".join(line.partition("(Request ID")[0].split()).rstrip(" .")
