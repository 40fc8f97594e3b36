"""Models: plain nn.Modules, one file each.  They import nn, ops and data, never the engine."""
