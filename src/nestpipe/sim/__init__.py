"""Simulates a cluster: runs the action lists of `schedule/` on a virtual clock with a cost model.  Needs no torch."""
