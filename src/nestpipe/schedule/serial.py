"""The plain synchronous schedule: one batch at a time, one stage after another.  What every other schedule must equal."""

from __future__ import annotations

from nestpipe.schedule.action import Action, Name


def serial(batch: int, micro_batches: int) -> list[Action]:
    """All actions of one batch; each waits for the one before it."""
    t = batch
    # State: the tables, the batch as loaded, its routes, its buffer of rows (values and optimizer state), its summed gradients,
    # and the dense parameters with their gradients.
    store, data, routes = ("store",), ("data", t), ("routes", t)
    rows, grads, dense, dense_grads = ("rows", t), ("grads", t), ("dense",), ("dense grads", t)
    plan = [
        Action("load", t, writes=(data,)),
        Action("move", t, reads=(data,), writes=(data,)),
        Action("route", t, reads=(data,), writes=(routes,)),
        Action("retrieve", t, reads=(store, routes), writes=(rows,)),
        Action("sync", t, reads=(routes,), writes=(rows, grads, dense_grads)),
    ]
    for m in range(micro_batches):
        window, window_grads = ("window", t, m), ("window grads", t, m)
        plan += [
            Action("embed", t, m, reads=(rows, routes), writes=(window,)),
            Action("compute", t, m, reads=(data, window, dense), writes=(window_grads, dense_grads)),
            Action("grad", t, m, reads=(window_grads, routes), writes=(("arrived", t, m),)),
            Action("accumulate", t, m, reads=(("arrived", t, m), routes), writes=(grads,)),
        ]
    plan += [
        Action("reduce", t, reads=(), writes=(dense_grads,)),
        Action("agree", t, reads=(grads, dense_grads), writes=(("verdict", t),)),
        Action("step", t, reads=(dense_grads, ("verdict", t)), writes=(dense,)),
        Action("update", t, reads=(grads, ("verdict", t)), writes=(rows,)),
        Action("writeback", t, reads=(rows, routes), writes=(store,)),
    ]
    previous: Name = ("writeback", t - 1, -1)
    chained = []
    for action in plan:
        waits = () if action.batch == 0 and action.stage == "load" else (previous,)
        chained.append(Action(action.stage, t, action.micro, waits, action.reads, action.writes))
        previous = action.name
    return chained
