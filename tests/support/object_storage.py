"""A server that speaks the S3 protocol (moto's), on loopback, which tests start, stop and make refuse them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import boto3

KEY, SECRET = "test", "secret"


class Server:
    """`variables` are what a program needs in its environment to reach it."""

    def __init__(self, auth_after: int | None = None) -> None:
        """`auth_after`: credentials and permissions are checked after so many requests."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._environment = dict(os.environ)
        if auth_after is not None:
            self._environment["INITIAL_NO_AUTH_ACTION_COUNT"] = str(auth_after)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=self._environment, stdin=quiet, stdout=quiet, stderr=quiet)
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert time.monotonic() < until and self.process.poll() is None, "the server did not start"
                time.sleep(0.05)

    @property
    def variables(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self, service: str = "s3") -> Any:
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        found = self.client().list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        return [one["Key"] for one in found if not one["Key"].endswith("/")]

    def freeze(self) -> None:
        """Connections are accepted, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(auth_after: int | None = None) -> Iterator[Server]:
    server = Server(auth_after)
    try:
        yield server
    finally:
        server.stop()
