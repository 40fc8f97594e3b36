"""A cluster that is not there: the action lists of `schedule/` on a virtual clock with a cost model.  Needs no torch."""
