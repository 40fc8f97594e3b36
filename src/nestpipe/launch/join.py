"""Joins the workers of a launch: ours, torchrun's, or a single process."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.launch.malloc import keep_large_blocks
from nestpipe.launch.quick_start import leave_out_compiler
from nestpipe.launch.restarts import restart_count

log = logging.getLogger("nestpipe.launch")

START_SECONDS = 120.0
"""All workers must have loaded and met by then; on a busy machine they start further apart than they ever are in training."""


def join(timeout: float) -> World:
    """The world of all workers of this launch.

    `timeout` is how long a worker later waits for another; to meet, they have at least START_SECONDS.
    """
    leave_out_compiler()
    keep_large_blocks()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        patience = timedelta(seconds=max(timeout, START_SECONDS))
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # One store serves all restarts, and still has the addresses of workers that ended.
            store = dist.PrefixStore(f"start-{restart_count()}", store)
        backend = os.environ.get("NESTPIPE_BACKEND", "gloo")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        log.info("joined %d workers over %s", size, backend)
    return World.join(timeout)
