"""Cached prefixes: an arena, a tier behind it, and who may be evicted.  Plain Python: no threads, no clock of its own."""
