"""Virtual hosts: network namespaces on a bridge, each with a link of a given rate in both directions.

Workers of one host share its link to other hosts.  Between themselves they talk by its loopback: a message to an address
of the own namespace never reaches the link.  So the loopback is the fast link inside a host, and can be shaped too.

Everything is made with `ip` and `tc` from iproute2, carries the lab's own name, and is recorded in a file before it is
made.  So `down` can remove it after a crash, and never touches anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from nestpipe.errors import NestPipeError

REGISTER = Path("/run/nestpipe-lab")
"""Directory with one file per lab: its hosts, and the process that made it."""
MOST_HOSTS = 200
COMMAND_SECONDS = 20.0
BURST_BYTES = 256 * 1024
"""What an idle link passes at once."""
_RATE = re.compile(r"[1-9]\d{0,6}(\.\d+)?(kbit|mbit|gbit)")


def megabytes_per_ms(rate: str) -> float:
    """Converts a link's rate, for example 500mbit."""
    if not _RATE.fullmatch(rate):
        raise LabError(f"a link's rate is a number with kbit, mbit or gbit, for example 500mbit, not {rate!r}")
    return float(rate[:-4]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[rate[-4:]] / 8 / 1e9


class LabError(NestPipeError, RuntimeError):
    """The lab cannot be made here; the message is one line."""


@dataclass(frozen=True)
class Host:
    """One host: a process in its namespace sees `interface` with `address`, and loopback."""

    namespace: str
    interface: str
    address: str

    def command(self, command: list[str]) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


class Network:
    """`hosts` namespaces on one bridge; each port passes `rate` in either direction (None: as fast as the machine).

    `inside`: what all workers of a host together pass to one another, in both directions together, as on a bus (None: as
    fast as the machine).  Use it as a context manager, or call `up` and leave it for `nestpipe lab down`.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None,
        name: str | None = None,
        owner: int | None = None,
        inside: str | None = None,
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise LabError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
        for one in (rate, inside):
            if one is not None:
                megabytes_per_ms(one)
        self.rate, self.inside = rate, inside
        self.name = name or f"np{os.getpid() % 0x1000000:x}"
        self.owner = os.getpid() if owner is None else owner
        self.bridge = f"{self.name}-br"
        octet = sum(self.name.encode()) % 250
        self.hosts = [Host(f"{self.name}-{i}", f"{self.name}-e{i}", f"10.213.{octet}.{i + 1}") for i in range(hosts)]

    @property
    def _file(self) -> Path:
        return REGISTER / f"{self.name}.json"

    def up(self) -> None:
        """Makes the whole lab, or nothing."""
        _check_machine()
        REGISTER.mkdir(exist_ok=True)
        if self._file.exists():
            raise LabError(f"there is a lab {self.name!r} already: `nestpipe lab down` removes it")
        about = {"hosts": len(self.hosts), "rate": self.rate, "inside": self.inside, "owner": self.owner}
        self._file.write_text(json.dumps(about))
        try:
            _ip("link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
            _ip("link", "set", self.bridge, "up")
            for number, host in enumerate(self.hosts):
                self._add(host, f"{self.name}-p{number}")
        except BaseException:
            self.down()
            raise

    def _add(self, host: Host, port: str) -> None:
        inside = ("-n", host.namespace)
        _ip("netns", "add", host.namespace)
        _ip("link", "add", port, "type", "veth", "peer", "name", host.interface, "netns", host.namespace)
        _ip("link", "set", port, "master", self.bridge)
        _ip("link", "set", port, "up")
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
        _ip(*inside, "link", "set", host.interface, "up")
        _ip(*inside, "link", "set", "lo", "up")
        if self.rate is not None:
            _run("tc", "qdisc", "add", "dev", port, *_shape(self.rate))
            _run("tc", *inside, "qdisc", "add", "dev", host.interface, *_shape(self.rate))
        if self.inside is not None:
            _run("tc", *inside, "qdisc", "add", "dev", "lo", *_shape(self.inside))

    def down(self) -> None:
        """Removes whatever `up` made."""
        for host in self.hosts:
            with contextlib.suppress(LabError):
                _ip("netns", "delete", host.namespace)  # and with it both ends of its link
        for number in range(len(self.hosts)):
            with contextlib.suppress(LabError):
                _ip("link", "delete", f"{self.name}-p{number}")
        with contextlib.suppress(LabError):
            _ip("link", "delete", self.bridge)
        self._file.unlink(missing_ok=True)

    def bytes_sent(self) -> list[int]:
        """Bytes that each host has sent since it was made, headers included."""
        sent = []
        for host in self.hosts:
            text = _ip("-n", host.namespace, "-json", "-statistics", "link", "show", "dev", host.interface)
            sent.append(int(json.loads(text)[0]["stats64"]["tx"]["bytes"]))
        return sent

    def __enter__(self) -> Network:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()


def known() -> list[Network]:
    """All labs that were made and not yet removed."""
    found = []
    for path in sorted(REGISTER.glob("np*.json")) if REGISTER.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, LabError):
            values = json.loads(path.read_text())
            inside = values.get("inside")  # labs of older versions have none
            found.append(Network(int(values["hosts"]), values["rate"], path.stem, int(values["owner"]), inside))
    return found


def remove_abandoned() -> list[str]:
    """Removes labs whose maker has ended, for example by a crash."""
    gone = [network for network in known() if network.owner and not Path(f"/proc/{network.owner}").exists()]
    for network in gone:
        network.down()
    return [network.name for network in gone]


def _shape(rate: str) -> tuple[str, ...]:
    """The burst is 2 ms at a gigabit.  The queue holds what TCP has in flight, as packet loss would measure TCP."""
    return ("root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "500ms")


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise LabError(
            "shaped links need root (network namespaces and tc): run it with sudo, or measure with --link none"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(
                f"shaped links need {tool!r} of Debian's iproute2: run `make debian`, or measure with --link none"
            )


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"`{' '.join(command)}` failed: {error}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()
        raise LabError(f"`{' '.join(command)}` failed: {why[0] if why else done.returncode}")
    return done.stdout
