"""Processes: starting local workers, joining them, restarts, signals, and why a worker ended."""
