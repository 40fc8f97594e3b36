"""Imported by the fork server before it forks: loads every module and kernel that a small training or command needs."""

import gc
import tempfile
import threading

import numpy as np
import torch

torch.set_num_threads(1)  # a fork must not inherit a thread pool

import nestpipe  # noqa: E402
import nestpipe.cli.bench  # noqa: E402
import nestpipe.launch.launcher  # noqa: E402
import runs  # noqa: E402
import samples  # noqa: E402
from nestpipe.pipeline.pipeline import TrainPipeline  # noqa: E402

for _name in samples.MODELS:
    for _dtype in ("float32", "float64"):
        for _optimizer in (nestpipe.SGD(), nestpipe.RowWiseAdagrad(), nestpipe.Adagrad(), nestpipe.Adam()):
            _model = samples.model(_name, _dtype)
            _dense = torch.optim.Adam(_model.parameters())  # the first optimizer imports half of torch
            _pipeline = TrainPipeline(_model, _dense, _optimizer, micro_batches=2, world=nestpipe.World.single())
            _pipeline.progress(iter([samples.batch(_name, samples.drawn(_name, 1)[0], _dtype)]))
            _pipeline.rows(samples.tables(_name)[0], np.arange(3))
            _pipeline.close()
for _name in runs.SIZES:
    with tempfile.TemporaryDirectory() as _folder:
        _settings = runs.small(_name, "train.steps=2", "checkpoint.every_steps=1")
        runs.train_run(nestpipe.World.single(), _name, _settings, f"{_folder}/run")
        runs.resume(nestpipe.World.single(), _name, [*_settings, "train.steps=3"], f"{_folder}/run")

assert threading.active_count() == 1, f"a fork would not have these threads: {threading.enumerate()}"
gc.collect()
gc.freeze()  # a collection in a fork would write to, and so copy, all that is shared
