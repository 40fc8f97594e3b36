"""Measuring: ladders of rungs run side by side, peers included."""
