"""Training schedules as lists of actions.  Pure Python: knows nothing of torch, devices or models."""

from nestpipe.schedule.action import LANES, STAGES, Action
from nestpipe.schedule.serial import serial

BUILDERS = {"serial": serial}
"""Name to builder; a builder gives the actions that one step of training issues, in order."""

__all__ = ["BUILDERS", "LANES", "STAGES", "Action", "serial"]
