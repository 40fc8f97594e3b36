"""Checkpoints: tables, dense state, data position and random state of one moment, committed as one."""
