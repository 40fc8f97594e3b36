"""`nestpipe verify`: compares a schedule with `serial`, bit for bit, on this recipe and this machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, write_json
from nestpipe.cli.recipes import add_recipe_arguments
from nestpipe.cli.workers import add_result_argument, result_of_workers

if TYPE_CHECKING:
    from nestpipe.comm.world import World
    from nestpipe.config.recipe import Recipe

DESCRIPTION = """\
Runs 100 steps of a recipe (or --steps) twice from one seed, under `serial` and under the given schedule, and compares losses,
every row, every optimizer state and every dense parameter bit for bit.  Exits with 1 and names the first difference if there is
one.  `semi_async` is stale by one batch by design and never called equal: it is compared with `serial` that reads rows of the
batch before as they were before its update, and exits with 1 if it is not bit for bit that.
"""
EPILOG = """\
examples:
  nestpipe verify dlrm --schedule dbp --workers 2 --steps 200
  nestpipe verify my.toml --schedule nested --set pipeline.micro_batches=8
  nestpipe verify my.toml --check staleness --json verified.json
  nestpipe verify my.toml --device sim --steps 10 --orders 10    on the simulated accelerator: missing waits, races, host syncs
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare a schedule with serial, bit for bit", description=DESCRIPTION, epilog=EPILOG
    )
    add_recipe_arguments(parser)
    parser.add_argument(
        "--against",
        choices=["same", "exact"],
        default="same",
        help="serial with the recipe's pipeline.replicas, or with replicas that stay equal; default: %(default)s",
    )
    parser.add_argument("--check", choices=["staleness"], help="also verify the version of every row that is read")
    parser.add_argument(
        "--orders",
        type=int,
        default=3,
        metavar="N",
        help="with --device sim: run its streams late, and in N seeded orders; default: %(default)s",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result here ('-': standard output)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_result_argument(parser)
    parser.set_defaults(command=run, steps=100)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    def work(recipe: Recipe, world: World) -> dict[str, Any]:
        from nestpipe.train.display import Display
        from nestpipe.train.verify import verify

        with Display(f"verify {recipe.name}", on=world.rank == 0 and not args.quiet) as display:
            staleness = args.check == "staleness"
            return verify(
                recipe,
                args.steps,
                world,
                display.show,
                check_staleness=staleness,
                orders=args.orders,
                against_exact=args.against == "exact",
            )

    check_writable(args.json)
    result = result_of_workers(args, arguments, work)
    if result is None:
        return 0
    write_json(args.json, result)
    return _show(result)


def _show(result: dict[str, Any]) -> int:
    compared = result["compared"]
    workers = f"{result['workers']} worker" + "s" * (result["workers"] > 1)
    workers += f" in groups of {result['group_size']}" if "group_size" in result else ""
    what = f"{result['schedule']} and serial, {workers}, {result['steps']} steps"
    races = result.get("simulated", {}).get("races", [])
    for race in races:
        print(f"nestpipe: race: {race}", file=sys.stderr)
    designed = "as_designed" in result
    if "row_reads" in result:
        reads = result["row_reads"]
        print(
            f"not equal to serial, by design: {result['schedule']} reads rows shared with the batch before one batch stale "
            f"({100 * reads['one_batch_stale'] / max(1, reads['all']):.1f} % of row reads)",
            file=sys.stderr,
        )
        what = f"{result['schedule']} and serial that reads such rows one batch old, {workers}, {result['steps']} steps"
    elif designed:
        print(f"not equal to synchronous training, by design: {result['inexact']}", file=sys.stderr)
        what = f"{what}, serial with the same averaging, which is itself not synchronous training"
    if result["equal"] or result.get("as_designed"):
        evicted = f", {compared['evicted']:,} evicted keys" if compared["evicted"] else ""
        print(
            f"{'as designed' if designed else 'equal'}: {what}: {compared['losses']} losses, {compared['rows']:,} rows, "
            f"{compared['state']:,} numbers of optimizer state{evicted} and {compared['dense']} dense tensors are the same, bit "
            "for bit",
            file=sys.stderr,
        )
        if "simulated" in result:
            _show_simulated(result["simulated"])
        return 1 if races else 0
    print(f"nestpipe: different: {what}: {result['first_difference']['text']}", file=sys.stderr)
    return 1


def _show_simulated(found: dict[str, Any]) -> None:
    syncs = found["host_syncs_per_step"]
    total = sum(count for places in syncs.values() for count in places.values())
    threads = ", ".join(f"{sum(places.values()):.1f} on {thread}" for thread, places in syncs.items() if places)
    print(
        f"simulated device: {found['orders']} orders, {len(found['races'])} races, {total:.1f} host syncs a step ({threads})",
        file=sys.stderr,
    )
