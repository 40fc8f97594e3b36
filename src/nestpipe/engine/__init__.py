"""Runs schedules: the state of batches in flight, what each stage does, and the interpreter.  Knows nothing of models."""
