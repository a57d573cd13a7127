"""Lanes by themselves."""

from __future__ import annotations

import os
import warnings

import pytest

from outcore.errors import LaneError
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
