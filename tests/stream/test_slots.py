"""Slots under random use: whatever the order, the delays and the updates, the weights are right."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outcore.blocks import Part
from outcore.errors import LaneError
from outcore.store.ledger import Ledger
from outcore.store.spans import SpanLayout
from outcore.stream.lanes import Fence, Lane, injected_delays
from outcore.stream.slots import Slots
from outcore.stream.unit import Unit

CPU = torch.device("cpu")


def make_units(sizes: list[int], resident: frozenset[int] = frozenset()) -> list[Unit]:
    units = []
    for index, size in enumerate(sizes):
        parameters = {"w": nn.Parameter(torch.zeros(size))}
        layout = SpanLayout.of(parameters)
        unit = Unit(
            index=index,
            part=Part(name=f"b{index}", module=nn.Module(), parameters=parameters, is_block=True),
            arrives_whole=True,
            layout=layout,
            dtype=torch.float32,
        )
        home = torch.full((layout.numel,), float(index))
        if index in resident:
            unit.device_weight = home
        else:
            unit.host_weight = home
        units.append(unit)
    return units


def update(unit: Unit, value: float, lane: Lane) -> None:
    """What an optimizer does: mark the unit, then change its home some time later."""
    home = unit.host_weight if unit.host_weight is not None else unit.device_weight
    assert home is not None
    fence = Fence()
    unit.update_queued([*(f for f in unit.pending if not f.is_done), fence])

    def write() -> None:
        home.fill_(value)

    lane.submit(write, fence=fence)


use = st.tuples(
    st.just("use"), st.sampled_from(["forward", "backward", "inference"]), st.integers(0, 4)
)
change = st.tuples(st.just("update"), st.just(""), st.integers(0, 4))
ahead = st.tuples(st.just("prefetch"), st.just(""), st.just(0))
actions = st.lists(st.one_of(use, use, use, change, ahead), max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    actions,
    st.integers(1, 4),
    st.integers(0, 3),
    st.frozensets(st.integers(0, 4), max_size=2),
)
def test_every_use_sees_the_newest_weights(
    actions: list[tuple[str, str, int]], num_slots: int, seed: int, resident: frozenset[int]
) -> None:
    units = make_units([7, 300, 128, 1, 129], resident)
    copy_in, updater = Lane("copy-in"), Lane("updater")
    ledger = Ledger("device", None)
    streamed = [unit for unit in units if unit.device_weight is None]
    slots = Slots(
        streamed,
        num_slots=num_slots,
        device=CPU,
        dtype=torch.float32,
        copy_in=copy_in,
        ledger=ledger,
    )
    expected = {unit.index: float(unit.index) for unit in units}
    value = 100.0
    try:
        with injected_delays(0.001, seed):
            for action, phase, index in actions:
                unit = units[index]
                if action == "use":
                    weights = slots.acquire(unit, phase)
                    assert weights.numel() == unit.layout.numel
                    assert bool((weights == expected[index]).all())
                    slots.release(unit)
                elif action == "update":
                    value += 1
                    expected[index] = value
                    update(unit, value, updater)
                else:
                    slots.prefetch()
    finally:
        copy_in.close()
        updater.close()
    assert slots.num_slots == num_slots
    assert ledger.taken_bytes == num_slots * max(u.layout.numel for u in streamed) * 4


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(0, 100))
def test_weights_stay_while_they_are_in_use(num_slots: int, seed: int) -> None:
    """Prefetches and other blocks' copies never land in a slot that is being read."""
    units = make_units([64] * 6)
    lane = Lane("copy-in")
    slots = Slots(
        units,
        num_slots=num_slots,
        device=CPU,
        dtype=torch.float32,
        copy_in=lane,
        ledger=Ledger("device", None),
    )
    try:
        with injected_delays(0.001, seed):
            for _ in range(3):
                for unit in [*units, *reversed(units)]:
                    weights = slots.acquire(unit, "forward")
                    for _ in range(3):
                        slots.prefetch()
                        assert bool((weights == unit.index).all())
                        time.sleep(0.0005)
                    slots.release(unit)
    finally:
        lane.close()


def test_a_repeated_round_has_no_misses() -> None:
    units = make_units([64] * 5)
    lane = Lane("copy-in")
    slots = Slots(
        units, num_slots=2, device=CPU, dtype=torch.float32, copy_in=lane, ledger=Ledger("d", None)
    )

    def go_round() -> None:
        for phase, order in (("forward", units), ("backward", units[::-1])):
            for unit in order:
                slots.acquire(unit, phase)
                slots.release(unit)

    go_round()
    slots.prefetch()
    go_round()
    misses, fetches = slots.num_misses, slots.num_fetches
    slots.prefetch()
    go_round()
    lane.close()
    assert slots.num_misses == misses
    assert slots.num_fetches - fetches <= 10


def test_a_failed_copy_is_raised_where_the_weights_are_needed() -> None:
    units = make_units([64, 64])
    lane = Lane("copy-in")
    slots = Slots(
        units, num_slots=1, device=CPU, dtype=torch.float32, copy_in=lane, ledger=Ledger("d", None)
    )
    failed = Fence()
    failed.error = OSError("disk on fire")
    failed.mark_issued()
    units[0].update_queued([failed])
    try:
        with pytest.raises(LaneError, match="disk on fire"):
            slots.acquire(units[0], "forward")
        # The failure must not have cost the only slot.
        weights = slots.acquire(units[1], "forward")
        assert bool((weights == 1).all())
        slots.release(units[1])
    finally:
        lane.close()


def test_lanes_keep_their_order_and_wait_for_fences() -> None:
    seen: list[int] = []
    first, second = Lane("first"), Lane("second")
    gate = threading.Event()
    held = first.submit(lambda: gate.wait(5) and seen.append(1))
    after = second.submit(lambda: seen.append(2), after=[held])
    last = second.submit(lambda: seen.append(3))
    time.sleep(0.02)
    assert seen == []
    assert not after.is_done
    gate.set()
    last.block()
    assert seen == [1, 2, 3]
    first.close()
    second.close()


def test_a_failure_passes_on_to_what_waits_for_it_and_to_nothing_else() -> None:
    lane, other = Lane("lane"), Lane("other")

    def fail() -> None:
        raise ValueError("broken")

    failed = lane.submit(fail)
    dependent = other.submit(lambda: None, after=[failed])
    independent = lane.submit(lambda: None)
    independent.block()
    for fence in (failed, dependent):
        with pytest.raises(LaneError, match="broken"):
            fence.block()
        assert not fence.is_done
    lane.close()
    other.close()


def test_a_closed_lane_drops_its_queue_and_refuses_more() -> None:
    lane, gate = Lane("lane"), threading.Event()
    lane.submit(lambda: gate.wait(5) and None)
    dropped = lane.submit(lambda: None)
    threading.Timer(0.05, gate.set).start()
    lane.close()
    with pytest.raises(LaneError, match="closed"):
        dropped.block()
    with pytest.raises(LaneError, match="closed"):
        lane.submit(lambda: None)
