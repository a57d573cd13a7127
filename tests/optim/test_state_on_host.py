"""State in host memory: built by several threads, which pin it for the GPU that computes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from outcore.blocks import Part
from outcore.optim.state import build_on_host
from outcore.optim.state_format import state_format
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.store.spans import SpanLayout
from outcore.stream.unit import Unit


def unit(index: int) -> Unit:
    parameters = {"weight": nn.Parameter(torch.zeros(1000))}
    part = Part(name=f"u{index}", module=nn.Module(), parameters=parameters, is_block=True)
    layout = SpanLayout.of(parameters)
    weight = torch.zeros(layout.numel)
    return Unit(
        index=index,
        part=part,
        arrives_whole=True,
        layout=layout,
        dtype=torch.float32,
        host_weight=weight,
    )


def test_all_of_it_is_pinned_for_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is new would otherwise begin to use the first one."""
    of_thread: dict[int, int] = {}
    pinned_for: list[int] = []
    me = threading.get_ident
    monkeypatch.setattr(torch.cuda, "current_device", lambda: of_thread.get(me(), 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: of_thread.update({me(): index}))
    monkeypatch.setattr(HostArena, "pin", lambda _: pinned_for.append(of_thread.get(me(), 0)))
    torch.cuda.set_device(1)
    units = [unit(index) for index in range(8)]
    states = build_on_host(
        units, state_format("fp32", torch.float32), ledger=Ledger("host", None), pin=True
    )
    assert len(states) == 8
    assert pinned_for == [1] * 8
