"""Models: plain nn.Modules, one file each.  They know the collections and nothing of engine, workers or schedules."""
