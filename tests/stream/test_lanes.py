"""Lanes by themselves."""

from __future__ import annotations

import os
import warnings
import weakref

import pytest
import torch
from torch import Tensor

from outcore.errors import LaneError, StoreError
from outcore.stream.lanes import Lane


@pytest.mark.timeout(60)
def test_a_forked_child_is_refused_instead_of_waiting_for_ever() -> None:
    lane = Lane("work")
    lane.submit(lambda: None).block()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that forking with threads may deadlock
        pid = os.fork()
    if pid == 0:
        try:
            lane.submit(lambda: None)  # its thread is in the parent
        except LaneError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lane.submit(lambda: None).block()
    lane.close()


def test_what_failed_first_is_told_once_however_many_lanes_waited_for_it() -> None:
    first, second, third = Lane("first"), Lane("second"), Lane("third")

    def fail() -> None:
        raise StoreError("/disk/w.scratch: no", path="/disk/w.scratch", offset=4096)

    failed = first.submit(fail)
    waiting = second.submit(lambda: None, after=[failed])
    last = third.submit(waiting.block)
    for fence in (failed, waiting, last, last):  # and once more: it stays as it is
        with pytest.raises(StoreError) as caught:
            fence.block()
        error = caught.value
        assert isinstance(error, LaneError)
        assert str(error) == "background work failed: /disk/w.scratch: no"
        assert (error.path, error.offset) == ("/disk/w.scratch", 4096)
        assert type(error.__cause__) is StoreError
        assert error.__cause__.__cause__ is None
    for lane in (first, second, third):
        lane.close()


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), KeyboardInterrupt(), LaneError("no")])
def test_what_is_not_the_disks_is_told_as_a_lanes(error: BaseException) -> None:
    first, second = Lane("first"), Lane("second")

    def fail() -> None:
        raise error

    fence = second.submit(lambda: None, after=[first.submit(fail)])
    with pytest.raises(LaneError) as caught:
        fence.block()
    assert type(caught.value) is LaneError
    assert str(caught.value) == f"background work failed: {str(error) or 'KeyboardInterrupt'}"
    assert caught.value.__cause__ is error
    first.close()
    second.close()


def test_an_error_keeps_nothing_of_what_its_cause_worked_on() -> None:
    """The system call that failed had a staging buffer, and all others are in the same memory."""
    first, second = Lane("first"), Lane("second")
    kept: list[weakref.ref[Tensor]] = []

    def system_call(memory: Tensor) -> None:
        raise OSError(5, f"injected, {memory.numel()} bytes")

    def read() -> None:
        memory = torch.zeros(10)
        kept.append(weakref.ref(memory))
        try:
            system_call(memory)
        except OSError as error:
            raise StoreError("the drive failed") from error

    fence = second.submit(lambda: None, after=[first.submit(read)])
    with pytest.raises(StoreError, match="the drive failed") as caught:
        fence.block()
    assert isinstance(caught.value.__cause__, StoreError)
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    assert [reference() for reference in kept] == [None]
    first.close()
    second.close()
