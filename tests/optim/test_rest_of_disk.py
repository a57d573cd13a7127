"""What a disk writes while it would rest: as much as is done in time, and no more."""

from __future__ import annotations

import math

import pytest

from outcore.optim import rest_of_disk
from outcore.optim.rest_of_disk import RestOfDisk


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(rest_of_disk.time, "perf_counter", lambda: self.now_s)


def step(rest: RestOfDisk, clock: Clock, *, room: float, backward_s: float) -> float:
    """One step of a disk that writes 1,000 bytes a second; return how many it held."""
    held = min(rest.limit_bytes, room)
    rest.begin(int(held))
    clock.now_s += held / 1000
    rest.written()
    clock.now_s += max(0.0, backward_s - held / 1000)  # gradients wait for their memory
    rest.end()
    return held


def test_all_is_held_at_first() -> None:
    assert RestOfDisk().limit_bytes == math.inf


def test_what_does_not_end_in_time_is_held_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rest, clock = RestOfDisk(), Clock(monkeypatch)
    held = [step(rest, clock, room=4000, backward_s=2.0) for _ in range(12)]
    assert held[0] == 4000
    assert all(1600 <= each <= 2000 for each in held[5:])


def test_where_there_is_time_all_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rest, clock = RestOfDisk(), Clock(monkeypatch)
    assert [step(rest, clock, room=4000, backward_s=5.0) for _ in range(6)] == [4000] * 6


def test_it_grows_with_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    rest, clock = RestOfDisk(), Clock(monkeypatch)
    for _ in range(8):
        step(rest, clock, room=4000, backward_s=1.0)
    held = [step(rest, clock, room=4000, backward_s=3.0) for _ in range(6)]
    assert held[0] <= 1000
    assert all(2400 <= each <= 3000 for each in held[3:])


def test_writes_that_the_next_step_finds_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rest, clock = RestOfDisk(), Clock(monkeypatch)
    rest.begin(1000)
    clock.now_s += 1.0
    rest.end()
    assert rest.limit_bytes == 800
    rest.end()  # a step that held nothing teaches nothing
    assert rest.limit_bytes == 800
