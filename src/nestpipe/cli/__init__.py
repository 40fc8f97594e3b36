"""The command line: one file per command, each with `add(commands)`; main.py puts them together.

Shared: recipes.py (recipe arguments), workers.py (running on workers), output.py (tables and JSON), ending.py (exit codes),
log.py (the `nestpipe` logger).
"""
