"""`nestpipe serve`: a ranking model over HTTP, from a training run."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, write_json

if TYPE_CHECKING:
    from nestpipe.config.serving import ServingConfig

DESCRIPTION = """\
Serves the newest checkpoint of a run, or an export for serving, as one instance: Open Inference Protocol v2 with binary tensors,
pre-inference of prefixes, Prometheus metrics, and a page at /.  SIGTERM and Ctrl-C let running requests end.
"""
EPILOG = """\
examples:
  nestpipe serve runs/hstu-ranking-20261118-090000                      on http://127.0.0.1:8000
  nestpipe serve RUN --port 9000 --arena 2GB --dram 8GB                 memory for cached prefixes, and the tier behind it
  nestpipe serve RUN --follow                                           each new checkpoint of a run that still trains
  nestpipe serve RUN --control-port 9001                                POST /v2/repository/models/MODEL/load brings a newer one
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="serve a ranking model over HTTP", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run directory, a folder of checkpoints, a checkpoint, or an export for serving"
    )
    parser.add_argument("--name", metavar="M", help="name of the model in URLs; default: the recipe's, as RUN has it")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0: any free one")
    parser.add_argument(
        "--control-port",
        type=int,
        metavar="P",
        help="where `load` is answered, on this machine only; --port's own makes it public",
    )
    parser.add_argument("--arena", metavar="SIZE", help="memory from which rankings read prefixes; default 2GB")
    parser.add_argument("--dram", metavar="SIZE", help="memory of the tier behind it; default 8GB, 0: none")
    parser.add_argument(
        "--dram-dtype", metavar="T", help="float32 (exact; default), float16 or bfloat16 (half the bytes, rounded)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory for rows of an export larger than memory; default: mapped"
    )
    parser.add_argument("--queue", type=int, metavar="N", help="rankings that may wait; default 1024")
    parser.add_argument(
        "--deadline-ms", type=float, metavar="MS", help="of requests without X-Deadline-Ms; default 1000"
    )
    parser.add_argument("--slow-ms", type=float, metavar="MS", help="what counts as slow for /debug/slow; default 100")
    parser.add_argument("--follow", action="store_true", help="load each new checkpoint of the run")
    parser.add_argument("--record", metavar="FILE", help="write every request here, for replay")
    parser.add_argument(
        "--json", metavar="FILE", help="write addresses, model and version here once it serves ('-': standard output)"
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.config.serving import bytes_of

    check_writable(args.json)
    check_writable(args.record, "--record")
    memory = None if args.memory is None else bytes_of("--memory", args.memory)
    config = _config(args)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop
    except ImportError:
        raise ValueError(
            "`nestpipe serve` needs packages that are not installed: pip install 'nestpipe[serve]'"
        ) from None
    import torch

    torch.set_num_threads(1)  # one thread computes; a product of several threads may round by how many there are
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args, config, memory))
    return 0


def _config(args: argparse.Namespace) -> ServingConfig:
    from nestpipe.config.serving import ServingConfig, bytes_of

    given = {
        "arena": None if args.arena is None else bytes_of("--arena", args.arena),
        "dram": None if args.dram is None else bytes_of("--dram", args.dram),
        "dram_dtype": args.dram_dtype,
        "queue": args.queue,
        "deadline_ms": args.deadline_ms,
        "slow_ms": args.slow_ms,
    }
    try:
        return ServingConfig(**{key: value for key, value in given.items() if value is not None})
    except ValueError as error:
        # The flag, not the field.
        said = str(error).removeprefix("serving.")
        field, _, rest = said.partition(" ")
        raise ValueError(f"--{field.replace('_', '-')} {rest}") from None


async def _serve(args: argparse.Namespace, config: ServingConfig, memory: int | None) -> None:
    from nestpipe.serve.http.app import App
    from nestpipe.serve.http.recording import Recording
    from nestpipe.serve.http.server import listen
    from nestpipe.serve.http.server import run as run_servers
    from nestpipe.serve.instance.instance import Instance
    from nestpipe.serve.instance.run_source import RunSource

    source = RunSource(args.run, memory)
    name = args.name or _name_of(args.run)
    model = await asyncio.to_thread(source.open)  # a run that cannot be served ends here, before a port is taken
    sock = listen(args.host, args.port, "--port")
    port = sock.getsockname()[1]
    one_port = args.control_port is not None and args.control_port == args.port != 0
    app = App(name, control=one_port)
    apps = [(app, sock)]
    if args.control_port is not None and not one_port:
        control = listen("127.0.0.1", args.control_port, "--control-port")
        apps.append((App(name, control=True, identity=app.identity), control))
    recording = Recording(Path(args.record)) if args.record else None
    instances: list[Instance] = []

    async def open_instance() -> None:
        instance = await asyncio.to_thread(Instance, source, config, model)
        instances.append(instance)
        app.serve(instance, recording)
        for other, _ in apps[1:]:
            other.serve_like(app)
        if args.follow:
            instance.loader.follow(on_load=lambda version: _say(f"version {version} serves", args))
        _say(f"{name}, version {instance.version}, serves on http://{args.host}:{port}", args)
        told = {"model": name, "version": instance.version, "url": f"http://{args.host}:{port}", "pid": os.getpid()}
        if len(apps) > 1:
            told["control"] = f"http://127.0.0.1:{apps[1][1].getsockname()[1]}"
        write_json(args.json, told)

    try:
        await run_servers(apps, config, asyncio.ensure_future(open_instance()))
    finally:
        for instance in instances:
            await asyncio.to_thread(instance.stop)
        if recording is not None:
            recording.close()
    if instances:
        counts = instances[0].compute.snapshot["counts"]
        done, full, late = (counts.get(what, 0) for what in ("done", "full", "expired"))
        _say(f"drained: {done:,} ranked, {full:,} refused, {late:,} too late", args)


def _say(what: str, args: argparse.Namespace) -> None:
    import sys

    print(f"nestpipe: {what}", file=sys.stderr if args.json == "-" else sys.stdout, flush=True)


def _name_of(run: str) -> str:
    """The recipe's name in a run directory's (NAME-DATE-TIME), else the last part of the path, as a URL can have it."""
    import re

    last = next(
        (
            part
            for part in reversed(Path(run).resolve().parts)
            if part != "checkpoints" and not part.startswith("step-")
        ),
        "model",
    )
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", re.sub(r"-\d{8}-\d{6}.*$", "", last)).strip("-") or "model"
