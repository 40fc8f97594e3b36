"""Imported by the fork server before it forks workers: loads every kernel a small training needs, in float32 and float64."""

import numpy as np
import torch

torch.set_num_threads(1)  # a fork must not inherit a thread pool

import nestpipe  # noqa: E402
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
