"""Runs with random delays, all at once: a process that forks one for each placement.

They sleep most of the time. The process has imported everything and used no thread, so that a fork
is safe. Its order comes pickled on its input, and the runs go back in the same way.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from exactness_models import MODELS

from outcore.verify.exactness import Placement, TrainedRun, VerifyJob, train


def train_at_once(model: str, job: VerifyJob, chosen: Sequence[Placement]) -> dict[str, TrainedRun]:
    """Train each placement in a process of its own, all at the same time; return them by name."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__],
        input=pickle.dumps((model, job, chosen)),
        stdout=subprocess.PIPE,
        check=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    runs = pickle.loads(done.stdout)
    failed = {p.name: run for p, run in zip(chosen, runs, strict=True) if isinstance(run, str)}
    assert not failed, "\n".join(f"{name}: {told}" for name, told in failed.items())
    return {p.name: run for p, run in zip(chosen, runs, strict=True)}


def _fork(model: str, job: VerifyJob, placement: Placement) -> int:
    """Return where the run, or what went wrong with it, can be read."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        result: TrainedRun | str
        try:
            result = train(MODELS[model], placement, job)
        except BaseException:
            result = traceback.format_exc()
        with open(writing, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    return reading


def main() -> None:
    torch.set_num_threads(1)
    model, job, chosen = pickle.load(sys.stdin.buffer)
    MODELS[model]()  # imports what the model needs
    gc.collect()
    gc.freeze()  # what was imported is no garbage, and need not be copied for each process
    pipes = [_fork(model, job, placement) for placement in chosen]
    runs = []
    for pipe in pipes:
        with open(pipe, "rb") as reading:
            runs.append(pickle.load(reading))
        os.wait()
    pickle.dump(runs, sys.stdout.buffer)


if __name__ == "__main__":
    main()
