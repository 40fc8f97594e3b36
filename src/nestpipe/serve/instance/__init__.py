"""One instance: cache, scheduler and models put together, the thread that computes, and model versions."""
