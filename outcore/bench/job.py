"""What a training benchmark is asked to do, and what comes back from it.

Owns the values that cross the process boundary between the table and the system that is measured:
`BenchJob` goes in as JSON, a `BenchResult` or a `BenchFailure` comes out as JSON.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

__all__ = ["BenchFailure", "BenchJob", "BenchResult", "BenchRow", "row_from_json"]


_Value = TypeVar("_Value", bound="_JsonValue")


class _JsonValue:
    """To and from one line of JSON, for flat dataclasses."""

    def to_json(self) -> str:
        return json.dumps(asdict(cast(Any, self)))

    @classmethod
    def from_json(cls: type[_Value], text: str) -> _Value:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class BenchJob(_JsonValue):
    """One training step to be repeated and timed, the same for every system."""

    config: dict[str, Any]
    """A Hugging Face configuration as plain values, `model_type` among them."""
    sequences: int
    seq_len: int
    warmup_steps: int = 3
    steps: int = 5
    max_grad_norm: float | None = 1.0
    """The norm that gradients are clipped to. A system that cannot clip says so in its notes."""
    lr: float = 1e-5
    micro_batch: int | None = None
    """Sequences that go through the model at once; None is each system's own best."""
    recompute: bool = True
    """Recompute activations in the backward, for the systems that leave the choice."""
    seed: int = 0
    outcore_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `outcore.offload` for Outcore's own row, such as `device_memory`."""
    plan_options: dict[str, Any] | None = None
    """Arguments of `outcore.plan`: Outcore then runs that plan; None: without one."""
    records: bool = False
    """Outcore notes what each lane did in the last timed step; steps take about 1% longer then."""

    def __post_init__(self) -> None:
        for name in ("sequences", "seq_len", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup_steps < 1:
            raise ValueError("warmup_steps must be at least 1: the first step compiles")
        if self.micro_batch is not None and self.sequences % self.micro_batch:
            raise ValueError(
                f"micro_batch {self.micro_batch} does not divide {self.sequences} sequences"
            )

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    def micro_batch_or(self, preferred: int) -> int:
        """The micro-batch asked for, or the largest divisor of the batch up to `preferred`."""
        if self.micro_batch is not None:
            return self.micro_batch
        candidates = range(min(preferred, self.sequences), 0, -1)
        return next(size for size in candidates if self.sequences % size == 0)


@dataclass(frozen=True, kw_only=True)
class BenchResult(_JsonValue):
    """What one system did with a job."""

    name: str
    step_s: float
    """The headline: the median step; the mean for a system that works on between steps."""
    all_step_s: list[float]
    first_step_s: float
    """The first warm-up step, compilation included."""
    tokens_per_s: float
    tflops: float
    device_peak_bytes: int
    """Most bytes in live device tensors while training."""
    device_reserved_bytes: int
    """Most bytes that the allocator held for them."""
    host_rss_bytes: int
    """The process's peak resident set, building the model included."""
    loss: float
    """Of the last step, as a mean over tokens."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What to know when reading the row, e.g. `fp32_master` and `clipping`."""


@dataclass(frozen=True, kw_only=True)
class BenchFailure(_JsonValue):
    """Why one system has no figure: a row of the table, not the end of it."""

    name: str
    failed: str
    """The reason, in one line."""
    log: str = ""
    """The end of what the process wrote, for whoever looks into it."""


BenchRow: TypeAlias = BenchResult | BenchFailure


def row_from_json(text: str) -> BenchRow:
    """The result or the failure that `text` holds."""
    if "failed" in json.loads(text):
        return BenchFailure.from_json(text)
    return BenchResult.from_json(text)
