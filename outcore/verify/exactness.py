"""Train the same model in every placement and compare every bit with the resident run.

A run is 20 steps with clipping, a schedule, weight decay and the model's own dropout. Weights and
moments are compared by digest, so that verifying a large model needs no second copy of it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import outcore
from outcore.blocks import find_parts
from outcore.stream.lanes import injected_delays

ModelFactory = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class VerifyJob:
    """What each run trains on, and how."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    steps: int = 20
    sequences: int = 4
    seq_len: int = 16
    micro_batch: int | None = 2
    lr: float = 1e-4
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    seed: int = 0
    disk: str | None = None  # a directory for scratch files, for placements that need one
    options: dict[str, Any] = field(default_factory=dict)  # of offload, for every placement


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A named choice of homes, with random delays of up to ``max_delay_s`` if asked for.

    ``cycles`` are options that go round over the blocks: one entry for each block in turn.
    """

    name: str
    options: dict[str, Any]
    cycles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    losses: list[float]
    digests: dict[str, str]  # of every weight, moment and remainder
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One placement against the resident run."""

    name: str
    losses_equal: bool
    differing: list[str]
    num_tensors: int
    seconds: float

    @property
    def is_exact(self) -> bool:
        return self.losses_equal and not self.differing


RESIDENT = Placement(
    name="resident",
    options={"weights": "device", "state": "device", "activations": "recompute"},
)


def placements(max_delay_s: float = 0.05) -> list[Placement]:
    """Return every placement that must have the bits of the resident run."""
    both = {"weights": "host", "state": "host"}
    recompute = {"activations": "recompute"}
    return [
        Placement(
            name="weights streamed", options={"weights": "host", "state": "device", **recompute}
        ),
        Placement(
            name="state on host", options={"weights": "device", "state": "host", **recompute}
        ),
        Placement(name="both, recomputed", options={**both, **recompute}),
        Placement(name="both, kept", options={**both, "activations": "keep"}),
        Placement(name="both, inputs on host", options={**both, "activations": "offload"}),
        *(
            Placement(name=f"both, {n} slot{'s' * (n > 1)}", options={**both, "num_slots": n})
            for n in (1, 2, 4)
        ),
        Placement(name="both, state visiting", options={**both, **recompute, "num_visits": 2}),
        Placement(
            name="homes mixed over blocks",
            options={"num_visits": 2},
            cycles={
                "weights": ("host", "device"),
                "state": ("device", "host", "host"),
                "activations": ("offload", "keep", "keep", "recompute"),
            },
        ),
        Placement(
            name="both, random delays",
            options={**both, "num_visits": 2, "num_slots": 2},
            cycles={"activations": ("keep", "offload")},
            max_delay_s=max_delay_s,
        ),
    ]


def disk_placements(max_delay_s: float = 0.05) -> list[Placement]:
    """Return the placements over three tiers, for jobs that name a disk."""
    return [
        Placement(name="state on disk", options={"state": "disk", "activations": "recompute"}),
        Placement(name="weights and state on disk", options={"weights": "disk", "state": "disk"}),
        Placement(
            name="three tiers, random delays",
            options={"num_slots": 2, "num_visits": 2},
            cycles={
                "weights": ("disk", "host", "device"),
                "state": ("disk", "disk", "host"),
                "activations": ("offload", "keep", "recompute"),
            },
            max_delay_s=max_delay_s,
        ),
    ]


def verify(
    make_model: ModelFactory,
    job: VerifyJob,
    chosen: list[Placement] | None = None,
    *,
    reference: TrainedRun | None = None,
) -> Iterator[Comparison]:
    """Yield the comparison of each placement with the resident run, as it is done.

    ``reference`` is the resident run, for a caller that has trained it already.
    """
    if reference is None:
        reference = train(make_model, RESIDENT, job)
    for placement in placements() if chosen is None else chosen:
        yield compare(placement.name, train(make_model, placement, job), reference)


def compare(name: str, run: TrainedRun, reference: TrainedRun) -> Comparison:
    """Return where ``run`` differs from ``reference``."""
    names = sorted(reference.digests.keys() | run.digests.keys())
    return Comparison(
        name=name,
        losses_equal=[_bits(loss) for loss in run.losses]
        == [_bits(loss) for loss in reference.losses],
        differing=[n for n in names if run.digests.get(n) != reference.digests.get(n)],
        num_tensors=len(names),
        seconds=run.seconds,
    )


def train(make_model: ModelFactory, placement: Placement, job: VerifyJob) -> TrainedRun:
    """Train one placement and return its losses and digests."""
    start = time.perf_counter()
    torch.manual_seed(job.seed)
    model = make_model().train()
    num_blocks = sum(part.is_block for part in find_parts(model))
    options = {"disk": job.disk, **job.options, **placement.options}
    for name, cycle in placement.cycles.items():
        options[name] = [cycle[i % len(cycle)] for i in range(num_blocks)]
    model = outcore.offload(
        model, device=job.device, dtype=job.dtype, micro_batch=job.micro_batch, **options
    )
    optimizer = outcore.AdamW(
        param_groups(model, job.weight_decay),
        lr=job.lr,
        betas=(0.9, 0.95),
        max_grad_norm=job.max_grad_norm,
    )
    engine = outcore.engine_of(model)
    try:
        with injected_delays(placement.max_delay_s, job.seed):
            losses = run_steps(model, optimizer, job)
            optimizer.synchronize()
        return TrainedRun(
            losses=losses,
            digests=_digests(model, optimizer),
            seconds=time.perf_counter() - start,
        )
    finally:
        engine.close()
        del model, optimizer, engine
        free_memory()


def run_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    job: VerifyJob,
    *,
    rounds_otherwise: bool = False,
) -> list[float]:
    """Run the job's steps with a warm-up and a falling schedule; return the losses.

    ``rounds_otherwise`` takes each batch's sequences in reverse, and in halves: the same sums in
    another order, of products of other shapes.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - 0.5 * step / job.steps)
    )
    losses: list[Tensor] = []
    torch.manual_seed(job.seed + 1)  # dropout
    for batch in batches(model, job):
        loss = torch.zeros((), device=job.device)
        for part, share in _halves(batch) if rounds_otherwise else [(batch, 1.0)]:
            part_loss = model(**part).loss
            (part_loss if share == 1 else part_loss * share).backward()
            loss += part_loss.detach() * share
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss)
    return [float(loss) for loss in losses]


def _halves(batch: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yield both halves of a batch in reverse, with their shares of the labels that count."""
    num_sequences, counted = len(batch["labels"]), int((batch["labels"] != -100).sum())
    backwards = {name: tensor.flip(0) for name, tensor in batch.items()}
    for half in filter(len, torch.arange(num_sequences).tensor_split(2)):
        cut = slice(int(half[0]), int(half[-1]) + 1)
        part = {name: tensor[cut] for name, tensor in backwards.items()}
        yield part, int((part["labels"] != -100).sum()) / counted


def batches(model: nn.Module, job: VerifyJob) -> Iterator[dict[str, Tensor]]:
    """Yield random token batches; some labels are masked, and one sequence is padded."""
    generator = torch.Generator().manual_seed(job.seed)
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    for _ in range(job.steps):
        shape = (job.sequences, job.seq_len)
        ids = torch.randint(1, vocabulary, shape, generator=generator)
        labels = ids.clone()
        labels[:, : job.seq_len // 4] = -100
        mask = torch.ones_like(ids)
        mask[0, -job.seq_len // 4 :] = 0
        labels[mask == 0] = -100
        if "Classification" in type(model).__name__:
            labels = _class_labels(model, labels, generator)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        yield {name: tensor.to(job.device) for name, tensor in batch.items()}


def _class_labels(model: nn.Module, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return random labels for a head of classes, of sequences or of the ``tokens`` that count."""
    config: Any = model.config
    num_labels = int(config.num_labels)
    if "ForTokenClassification" in type(model).__name__:
        labels = torch.randint(num_labels, tokens.shape, generator=generator)
        return labels.masked_fill(tokens == -100, -100)
    if num_labels == 1 or config.problem_type == "regression":
        shape = (len(tokens),) if num_labels == 1 else (len(tokens), num_labels)
        return torch.rand(shape, generator=generator)
    if config.problem_type == "multi_label_classification":
        return torch.randint(2, (len(tokens), num_labels), generator=generator).float()
    return torch.randint(num_labels, (len(tokens),), generator=generator)


def free_memory() -> None:
    """Give back the memory of a run whose model nobody holds any more, before the next one."""
    gc.collect()  # a model and its engine refer to each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices, but not norms and biases, as is usual."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def _digests(model: nn.Module, optimizer: outcore.AdamW) -> dict[str, str]:
    named = dict(_tensors(model, optimizer))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing holds no lock on the interpreter
        return dict(zip(named, pool.map(_digest, named.values()), strict=True))


def _tensors(model: nn.Module, optimizer: outcore.AdamW) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict().items()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor) and key != "step":
                    yield f"{names[id(parameter)]}.{key}", value


def _bits(loss: float) -> bytes:
    return struct.pack("d", loss)  # == would call NaN different from itself, and -0.0 equal to 0.0


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()
