"""Inference without a pipeline: models opened read-only, prefixes computed block by block, scores.  Imports no training code."""
