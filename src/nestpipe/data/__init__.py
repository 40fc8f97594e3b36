"""Batches, jagged tensors, the kinds of data a recipe can name, and the stream that deals them to workers."""
