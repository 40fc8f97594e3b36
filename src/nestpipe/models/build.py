"""From a recipe to its model, for training and for inference."""

from __future__ import annotations

import torch
from torch import nn

from nestpipe.config.recipe import Recipe
from nestpipe.data.source import Source
from nestpipe.models.kinds import make_model
from nestpipe.tables.config import TableDefaults


def build_model(recipe: Recipe, source: Source) -> nn.Module:
    """The recipe's model.  Its dense parameters depend on the seed alone."""
    torch.manual_seed(recipe.train.seed)
    tables = TableDefaults(recipe.tables.dtype, recipe.tables.init, recipe.tables.init_scale, recipe.tables.eviction())
    model = make_model(recipe.model_kind, recipe.model, source, tables)
    return model.double() if recipe.dense.dtype == "float64" else model
