"""`nestpipe lab`: hosts in network namespaces with shaped links, to try a cluster on one machine."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """\
Makes hosts out of network namespaces on a bridge, each with a link of the rate asked for (needs root and iproute2), and removes
them.  `nestpipe bench … --link 500mbit` makes and removes its own, and control groups for disks that it shapes.

  nestpipe lab up --hosts 2 --link 500mbit      prints how to run a command on each host
  nestpipe lab ls                               what is up
  nestpipe lab down                             removes every lab that nestpipe made, and nothing else
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "lab",
        help="make hosts with shaped links on this machine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["up", "down", "ls"])
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many; default 2")
    parser.add_argument("--link", default="none", metavar="RATE", help="such as 500mbit; default none: not shaped")
    parser.set_defaults(command=_lab)


def _lab(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.lab.disks import known_disks
    from nestpipe.lab.network import Network, known

    if args.what == "up":
        network = Network(
            args.hosts, None if args.link == "none" else args.link, owner=0
        )  # nobody's: stays until `down`
        network.up()
        _tell(network)
    elif args.what == "ls":
        for network in known():
            _tell(network)
        for disks in known_disks():
            print(f"{disks.name}: disks, {disks.rates}, of process {disks.owner}")
    else:
        for network in known():
            network.down()
            print(f"{network.name} removed")
        for disks in known_disks():
            removed = disks.down()
            print(
                f"{disks.name}: disks {'removed' if removed else f'still used by processes of {disks.owner}: end them first'}"
            )
    return 0


def _tell(network: Any) -> None:
    print(f"{network.name}: {len(network.hosts)} hosts, links {network.rate or 'not shaped'}")
    for host in network.hosts:
        print(f"  {host.address}  GLOO_SOCKET_IFNAME={host.interface} {' '.join(host.command(['COMMAND']))}")
