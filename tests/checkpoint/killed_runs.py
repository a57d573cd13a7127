"""Training runs that end by SIGKILL: a server that forks one process for each of them.

It has imported everything and used no thread, so that a fork is safe and a run takes a fraction of
a second. Orders come as lines of JSON on its input, answers go out in the same way.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_run import ALL_PLACEMENTS, CONFIG
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.checkpoint import calls, run_state, snapshot
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.data.batches import Batches, BatchOptions
from outcore.data.cache_format import BuildReport
from outcore.data.cache_writer import CacheWriter
from outcore.data.encode import Document
from outcore.data.token_cache import open_cache
from outcore.optim.updates import ChunkUpdate

STEPS = 6
SAVE_EVERY = 2
MADE_FROM = {"made": "here"}
POINTS = (
    *calls.__dict__.keys() & {"create", "write_at", "sync", "sync_directory", "rename"},
    *calls.__dict__.keys() & {"remove_tree", "make_directory"},
    "copy",
    "update",
)


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run: in which placement, and how it ends."""

    placement: int
    kill_after_s: float | None = None
    point: str | None = None  # one of POINTS, at which it ends itself
    moment: str = "before"  # "during" and "after" too
    count: int = 0  # of the times that it comes there before
    waits: bool = True  # for its last checkpoint, before it ends


@dataclass(frozen=True, kw_only=True)
class Answer:
    killed: bool
    wall_s: float
    error: str


def make_cache(directory: Path) -> None:
    """Write a data set of short documents."""
    writer = CacheWriter(directory, max_token_id=60)
    numbers = np.random.default_rng(0)
    for index in range(23):
        ids = numbers.integers(0, 61, 3 + index % 7).astype(np.uint32)
        counts = np.ones(len(ids), dtype=np.bool_)
        writer.add(Document(ids=ids, counts=counts, content_hash=index))
    report = BuildReport(num_rows=23, num_bad_rows=0, num_empty_rows=0, first_bad_rows=())
    writer.finish(made_from=MADE_FROM, row_format="text", pad_token_id=0, report=report)


def train(work: Path, order: Order) -> None:
    """Train to the last step, from the newest checkpoint if there is one."""
    folder = CheckpointFolder(work / "checkpoints")
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
    options = ALL_PLACEMENTS[order.placement]
    model = outcore.offload(model, device="cpu", disk=str(work / "scratch"), **options)
    optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    cache = open_cache(work.parent / "cache", MADE_FROM)
    assert cache is not None
    batches = Batches(cache, BatchOptions(batch_size=2, seq_len=8, seed=3))
    resumed = run_state.load(folder, model, optimizer)
    if resumed is not None:
        batches.load_state_dict(resumed.values["data"])
        schedule.last_epoch = resumed.values["schedule"]
    checkpoints = AsyncCheckpoints(folder, model, optimizer)
    log = os.open(work / "losses", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while optimizer.num_steps < STEPS:
        batch = next(batches)
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        os.write(log, f"{optimizer.num_steps} {float(loss.detach()).hex()}\n".encode())
        if optimizer.num_steps % SAVE_EVERY == 0:
            checkpoints.begin({"data": batches.state_dict(), "schedule": schedule.last_epoch})
    if order.waits:
        checkpoints.close()
    (work / "final.new").write_text(digest(model, optimizer))
    (work / "final.new").rename(work / "final")


def digest(model: Any, optimizer: Any) -> str:
    """Return a digest of every weight and every moment."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    for index, entry in sorted(optimizer.state_dict()["state"].items()):
        for key in sorted(entry):
            found.update(f"{index} {key}".encode() + entry[key].contiguous().numpy().tobytes())
    return found.hexdigest()


def end_at(order: Order) -> None:
    """Arrange that this process is killed at the point that was ordered."""
    left = order.count

    def wrapped(call: Callable[..., Any], half: Callable[..., Any] | None) -> Callable[..., Any]:
        def at(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left != -1:
                return call(*args)
            if order.moment == "during" and half is not None:
                half(*args)
            elif order.moment == "after":
                call(*args)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return at

    if order.point == "update":
        whole = ChunkUpdate.apply

        def first_half(update: ChunkUpdate, tensors: Any, gradient: Any) -> None:
            middle = update.chunk.numel // 256 * 128
            update.state.format.update_(
                update.state.format.cut(tensors, 0, middle),
                gradient[:middle],
                update.scalars[0],
                update.rounding,
                update.chunk.unit.first_element + update.chunk.start,
            )

        ChunkUpdate.apply = wrapped(whole, first_half)  # type: ignore[method-assign]
    elif order.point == "copy":
        copying = snapshot._copying
        snapshot._copying = lambda target, source: wrapped(copying(target, source), None)
    elif order.point is not None:
        halves = {
            "write_at": lambda fd, data, offset: os.pwrite(fd, data[: data.size // 2], offset),
            "remove_tree": lambda path: next(iter(sorted(path.iterdir()))).unlink(),
        }
        call = getattr(calls, order.point)
        setattr(calls, order.point, wrapped(call, halves.get(order.point)))


def carry_out(work: Path, order: Order) -> Answer | None:
    """Fork a run and see it end; None in the forked process."""
    (work / "scratch").mkdir(parents=True, exist_ok=True)
    errors = work / "errors"
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = errors.open("w")
        try:
            end_at(order)
            train(work, order)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if order.waits:
            os._exit(0)
        return None  # and ends as programs do
    deadline = None if order.kill_after_s is None else start + order.kill_after_s
    while True:
        pid, status = os.waitpid(child, 0 if deadline is None else os.WNOHANG)
        if pid:
            break
        if deadline is not None and time.perf_counter() >= deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        else:
            time.sleep(0.001)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    failed = not killed and status != 0
    error = f"status {status}: {errors.read_text()}" if failed else ""
    return Answer(killed=killed, wall_s=time.perf_counter() - start, error=error)


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # offload collects garbage: what was imported is none, and takes most of the time
    for line in sys.stdin:
        values = json.loads(line)
        work = Path(values.pop("work"))
        answer = carry_out(work, Order(**values))
        if answer is None:
            return
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main()
