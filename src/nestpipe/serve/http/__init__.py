"""The instance over HTTP: Open Inference Protocol v2 with binary tensors, pre-inference, health, metrics, a page."""
