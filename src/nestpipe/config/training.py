"""`[train]`, `[eval]` and `[memory]`: how long to train, when to evaluate, what a worker may hold."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.config.checks import above_zero, at_least, one_of

PRECISIONS = ("float32", "bf16")


@dataclass(frozen=True)
class TrainConfig:
    """How long and on what to train.  Ends at `steps` or `epochs`, whichever comes first; one epoch if neither is given."""

    batch_size: int = 1024
    """Samples in a batch of one data stream, which is that of one worker unless `streams` says otherwise."""
    streams: int | None = None
    """Data streams that the workers share: with the same number, a run has the same global batches, of streams x batch_size
    samples, on any number of workers; none = as many as there are workers at the start."""
    steps: int | None = None
    """Most steps to train; none = as many as the epochs have."""
    epochs: int | None = None
    """Most times through the data; none = as many as `steps` need, or 1."""
    seed: int = 1
    """Seed of everything that is drawn."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    clip_norm: float | None = None
    """Largest norm of all gradients together, dense and tables; none = as they are."""
    timeout: float = 300.0
    """Seconds that a worker waits for the others before it gives up."""
    threads: int = 1
    """Torch threads of one worker."""
    workers: int = 1
    """Worker processes on this machine; torchrun sets its own."""
    device: str = "cpu"
    """Where to train: "cpu", "cuda", "npu", "auto" (the best there is), or "sim", the simulated accelerator."""
    precision: str = "float32"
    """Of the dense compute: "float32", or "bf16" for bfloat16 autocast.  Rows and optimizer state stay in float32."""
    peak_tflops: float | None = None
    """What a worker's device can do, in 10^12 FLOPs a second, for the model FLOPs utilisation; none = a large product of
    float32 matrices is measured, on a host only."""

    def __post_init__(self) -> None:
        one_of("train.device", self.device, ("cpu", "cuda", "npu", "xpu", "auto", "sim"))
        one_of("train.precision", self.precision, PRECISIONS)
        for key in ("batch_size", "streams", "steps", "epochs", "log_every", "threads", "workers"):
            at_least(f"train.{key}", getattr(self, key), 1)
        at_least("train.seed", self.seed, 0)
        above_zero("train.clip_norm", self.clip_norm)
        above_zero("train.timeout", self.timeout)
        above_zero("train.peak_tflops", self.peak_tflops)


@dataclass(frozen=True)
class EvalConfig:
    """When and how to evaluate on held-out samples."""

    every: int | None = None
    """Steps between evaluations; none = only at the end."""
    batch_size: int = 2048
    """Samples in an evaluation batch of one worker."""
    max_samples: int | None = None
    """Most samples to evaluate on, over all workers; none = all there are."""
    top_k: tuple[int, ...] = (10, 50, 200)
    """Lengths at which hit rate and NDCG are cut."""

    def __post_init__(self) -> None:
        for key in ("every", "batch_size", "max_samples"):
            at_least(f"eval.{key}", getattr(self, key), 1)
        if not self.top_k or min(self.top_k) < 1 or len(set(self.top_k)) < len(self.top_k):
            raise ValueError(f"eval.top_k must be different whole numbers from 1 up, not {list(self.top_k)}")


@dataclass(frozen=True)
class MemoryConfig:
    """What a worker may hold beside its tables."""

    buffer_limit: float | None = None
    """Most MB of row buffers of a worker, for the two batches in flight, or three with early_retrieve; none = as they need."""
    window_limit: float | None = None
    """MB of rows and gradients of the two windows in flight from which on a batch is deduplicated per micro-batch: only
    look_ahead + 1 micro-batches are held then, more rows travel, and sums round differently; none = never."""

    def __post_init__(self) -> None:
        above_zero("memory.buffer_limit", self.buffer_limit)
        above_zero("memory.window_limit", self.window_limit)
