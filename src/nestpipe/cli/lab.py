"""`nestpipe lab`: hosts in network namespaces with shaped links, to try a cluster on one machine."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """\
Makes hosts out of network namespaces on a bridge, each with a link of the given rate, and removes them.  Needs root and iproute2.
`nestpipe bench ... --link 500mbit` makes and removes its own hosts, and control groups for the disks that it limits.
"""
EPILOG = """\
examples:
  nestpipe lab up --hosts 2 --link 500mbit                     make hosts, and print how to run a command on each
  nestpipe lab up --link 500mbit --inside 5gbit --workers-per-host 2
                                                               and a launch of two workers on each host
  nestpipe lab ls                                              list what is up
  nestpipe lab down                                            remove every lab that nestpipe made, and nothing else
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "lab", help="make hosts with shaped links on this machine", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("what", choices=["up", "down", "ls"], help="make hosts, remove them, or list them")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="up: number of hosts; default: 2")
    parser.add_argument(
        "--link", default="none", metavar="RATE", help="up: the links' rate, such as 500mbit; default: not shaped"
    )
    parser.add_argument(
        "--inside", default="none", metavar="RATE", help="up: rate between workers of a host; default: not shaped"
    )
    parser.add_argument(
        "--workers-per-host", type=int, default=1, metavar="N", help="up: of the launch that is printed; default: 1"
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    {"up": _up, "ls": _list, "down": _down}[args.what](args)
    return 0


def _up(args: argparse.Namespace) -> None:
    from nestpipe.lab.network import Network

    if args.workers_per_host < 1:
        raise ValueError(f"--workers-per-host must be at least 1, not {args.workers_per_host}")
    link, inside = (None if rate == "none" else rate for rate in (args.link, args.inside))
    network = Network(args.hosts, link, owner=0, inside=inside)  # without an owner, the hosts stay until `down`
    network.up()
    _show(network)
    print("a launch of all hosts: on host I, with what is printed beside it before COMMAND")
    first = f"--master-addr {network.hosts[0].address} --master-port 29500"
    print(
        f"  torchrun --nnodes {args.hosts} --nproc-per-node {args.workers_per_host} --node-rank I {first} -m nestpipe ..."
    )


def _list(args: argparse.Namespace) -> None:
    from nestpipe.lab.disks import known_disks
    from nestpipe.lab.network import known

    for network in known():
        _show(network)
    for disks in known_disks():
        print(f"{disks.name}: disks, {disks.rates}, of process {disks.owner}")


def _down(args: argparse.Namespace) -> None:
    from nestpipe.lab.disks import known_disks
    from nestpipe.lab.network import known

    for network in known():
        network.down()
        print(f"{network.name} removed")
    for disks in known_disks():
        outcome = "removed" if disks.down() else f"still used by processes of {disks.owner}: end them first"
        print(f"{disks.name}: disks {outcome}")


def _show(network: Any) -> None:
    inside = f", inside {network.inside}" if network.inside else ""
    print(f"{network.name}: {len(network.hosts)} hosts, links {network.rate or 'not shaped'}{inside}")
    for host in network.hosts:
        print(f"  {host.address}  GLOO_SOCKET_IFNAME={host.interface} {' '.join(host.command(['COMMAND']))}")
