"""What comes from outside: memory that cannot be pinned, Ctrl-C, closing, copying."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from typing import Any

import pytest
import torch
from families import BY_NAME, LR, batch_of, offloaded
from training import outcore_threads

import outcore
from outcore.errors import LaneError
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger

LLAMA = BY_NAME["llama"]


class _NoPinning:
    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
        return 2

    def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
        raise AssertionError("nothing was registered")


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", _NoPinning)
    monkeypatch.setattr(HostArena, "_warned_pageable", False)
    monkeypatch.setattr("outcore.store.host_arena._forget_cuda_error", lambda: None)
    ledger = Ledger("host", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arenas = [HostArena(1000, purpose="weights", ledger=ledger, pin=True) for _ in range(3)]
        spans = [arena.span(100, torch.float32) for arena in arenas]
    assert len(caught) == 1
    assert "pinned" in str(caught[0].message)
    assert "ulimit" in str(caught[0].message)
    for span in spans:
        span.fill_(3.0)
        assert float(span.sum()) == 300.0
    assert not any(arena.is_pinned for arena in arenas)


_INTERRUPTED = """
    import sys, threading
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {folder!r})
    from families import BY_NAME, LR, batch_of, offloaded
    import outcore
    from outcore.stream.lanes import injected_delays

    model = offloaded(BY_NAME["llama"].make(), {options})
    optimizer = outcore.AdamW(model, lr=LR, {adamw})
    with injected_delays(0.05, seed=0):
        for step in range(10**9):
            loss = model(**batch_of(seed=step % 3)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                print("running", flush=True)
"""


@pytest.mark.parametrize(
    ("options", "adamw"),
    [
        ("num_slots=1", "max_grad_norm=1.0"),
        ("num_slots=2, num_visits=2", "max_grad_norm=1.0"),
        ("num_visits=1", "update_during_backward=True"),
    ],
)
def test_ctrl_c_in_the_middle_of_a_step(options: str, adamw: str) -> None:
    """The process ends within 5 s with the exit code of an interrupt: no thread holds it up."""
    from pathlib import Path

    script = textwrap.dedent(_INTERRUPTED).format(
        folder=str(Path(__file__).parent), options=options, adamw=adamw
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.stderr and process.stderr.read()
        time.sleep(0.07)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
        assert time.monotonic() - start < 5
        assert "KeyboardInterrupt" in errors
        assert "Fatal" not in errors
        assert process.returncode in (1, 130, -signal.SIGINT), (process.returncode, errors)
    finally:
        process.kill()


def test_an_interrupt_while_updates_are_queued_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some units are marked by then: whoever waits for their updates is told."""
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR)
    model(**batch_of()).loss.backward()
    readers, held_up = outcore.engine_of(model).backend._readers, []

    def interrupted(update: Any) -> None:
        held_up.append(update)
        if len(held_up) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(readers, "hold_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(f.is_issued for unit in outcore.engine_of(model).units for f in unit.pending)
    with pytest.raises(LaneError, match="background work failed: KeyboardInterrupt"):
        model(**batch_of())


def test_close_ends_every_thread_and_parameters_stay_readable() -> None:
    model = offloaded(LLAMA.make(), num_visits=2)
    optimizer = outcore.AdamW(model, lr=LR)
    for step in range(2):
        model(**batch_of(seed=step)).loss.backward()
        optimizer.step()
    optimizer.synchronize()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcore.engine_of(model).close()
    outcore.engine_of(model).close()
    assert outcore_threads() == []
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    with pytest.raises(outcore.OutcoreError):
        optimizer.step()


def test_copying_an_offloaded_model_says_what_to_do() -> None:
    model = offloaded(LLAMA.make())
    with pytest.raises(TypeError, match=r"save_pretrained.*release"):
        copy.deepcopy(model)
    outcore.release(model)
    assert copy.deepcopy(model)(**batch_of()).loss == model(**batch_of()).loss
