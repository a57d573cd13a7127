"""Lanes launch the update from threads of their own, and Triton loads a kernel at its first launch.

A thread that comes meanwhile would launch what is not loaded yet: they come one at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adamw_states import scalars_of

from outcore.kernels import zero_moments

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


class _Kernel:
    """Counts the threads that are launching."""

    def __init__(self) -> None:
        self.num_launches = self.num_inside = self.most_inside = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        self.num_launches += 1
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        time.sleep(0.05)
        self.num_inside -= 1


def _exact() -> None:
    from outcore.kernels import adamw_triton

    moment = torch.zeros(64)
    adamw_triton.adamw_(moment, None, moment, moment, moment, scalars=scalars_of(1))


def _compact() -> None:
    from outcore.kernels import compact_triton

    weight = torch.zeros(64, dtype=torch.bfloat16)
    compact_triton.adamw_compact_(
        weight, None, zero_moments(64), weight, scalars=scalars_of(1), seed=0, step=1,
        first_element=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("update", "name"),
    [(_exact, "adamw_triton._adamw_kernel"), (_compact, "compact_triton._adamw_compact_kernel")],
)
def test_one_thread_launches_at_a_time(
    monkeypatch: pytest.MonkeyPatch, update: Callable[[], None], name: str
) -> None:
    kernel = _Kernel()
    monkeypatch.setattr(f"outcore.kernels.{name}", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    lanes = [threading.Thread(target=update) for _ in range(3)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert kernel.num_launches == 3
    assert kernel.most_inside == 1
