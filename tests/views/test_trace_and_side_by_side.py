"""Measured spans: a trace that other programs open, and figures beside the predicted ones."""

import json
from pathlib import Path

import pytest
from handmade_plans import GIB, make_plan
from rich.console import Console

from outcore.planning.plan import Span
from outcore.views.side_by_side import Measurement, busy_s, side_by_side, side_by_side_table
from outcore.views.trace import PREDICTED, spans_from_trace, trace, write_trace


def span(lane: str, start_s: float, end_s: float, name: str = "work") -> Span:
    return Span(lane=lane, name=name, start_s=start_s, end_s=end_s)


MEASURED = (
    span("to host", 100.5, 100.75, 'a "quoted" </script> name'),
    span("compute", 100.0, 101.0),
    span("a lane of its own", 100.1, 100.2),
)


def test_spans_come_back_from_a_written_trace(tmp_path: Path) -> None:
    timeline = make_plan().prediction.timeline
    write_trace(MEASURED, tmp_path / "step.json", predicted=timeline)
    data = json.loads((tmp_path / "step.json").read_text())
    for process, spans, zero_s in (("measured", MEASURED, 100.0), (PREDICTED, timeline, 0.0)):
        back = spans_from_trace(data, process)
        assert len(back) == len(spans)
        for one, other in zip(back, spans, strict=True):
            assert (one.lane, one.name) == (other.lane, other.name)
            assert one.start_s == pytest.approx(other.start_s - zero_s, abs=1e-9)
            assert one.end_s == pytest.approx(other.end_s - zero_s, abs=1e-9)


def test_a_trace_is_what_perfetto_expects() -> None:
    events = trace(MEASURED)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(threads) == ["compute", "to host", "a lane of its own"]  # the usual order first
    complete = [e for e in events if e["ph"] == "X"]
    assert complete[0]["ts"] == pytest.approx(500_000)
    assert complete[0]["dur"] == pytest.approx(250_000)
    assert complete[0]["tid"] == threads["to host"]
    assert all(e["dur"] >= 0 for e in complete)


def test_no_spans_make_an_empty_trace() -> None:
    assert spans_from_trace(trace(())) == ()


def test_pieces_that_overlap_count_once() -> None:
    spans = [span("compute", 0, 2), span("compute", 1, 3), span("compute", 5, 6)]
    spans += [span("compute", 5.25, 5.5), span("to host", 0, 1)]
    assert busy_s(spans) == {"compute": 4.0, "to host": 1.0}


def test_rows_of_a_prediction_and_a_measurement() -> None:
    plan = make_plan()
    measured = Measurement(
        step_s=4.0,
        spans=(*(span("compute", i, i + 0.8) for i in range(4)), span("disk read", 0, 0.5)),
        peak_bytes={"device": 22 * GIB, "host": 120 * GIB},
    )
    rows = {row.what: row for row in side_by_side(plan, measured)}
    assert rows["step"].difference == pytest.approx(0.025)
    assert rows["step"].verdict == "within 10%"
    assert rows["speed"].measured == pytest.approx(8192)
    assert rows["compute busy"].measured == pytest.approx(3.2)
    assert rows["disk read busy"].predicted == 0  # was not foreseen, and shows
    assert rows["host cores busy"].difference is None  # was foreseen, and not measured
    assert "disk write busy" not in rows
    assert rows["device peak"].verdict == "within 5%"
    assert rows["host peak"].verdict == "not within 5%"
    assert rows["device peak"].cells()[1:4] == ("22.5 GiB", "22.0 GiB", "+2.3%")


def test_what_a_measurement_cannot_see_is_not_predicted_for_it() -> None:
    plan = make_plan()
    purposes = plan.peak_bytes["device"]
    purpose = next(iter(purposes))
    seen = sum(purposes.values()) - purposes[purpose]
    measured = Measurement(step_s=4.0, peak_bytes={"device": seen, "host": 1}, unseen=(purpose,))
    rows = {row.what: row for row in side_by_side(plan, measured)}
    assert rows[f"device peak without {purpose}"].difference == 0
    assert rows["host peak"].predicted == plan.tier_bytes("host")


def test_one_memory_is_one_row() -> None:
    """A plan for it counts staging of the disk as the device's; a run holds it as the host's."""
    peak_bytes = {"device": {"optimizer state": 3 * GIB, "disk staging": GIB}, "disk": {"all": GIB}}
    measured = {"device": 3 * GIB, "host": GIB, "disk": GIB}
    rows = side_by_side(
        make_plan(peak_bytes=peak_bytes), Measurement(step_s=4.1, peak_bytes=measured)
    )
    memory = {row.what: (row.predicted, row.measured) for row in rows if row.unit == "bytes"}
    assert memory == {"device and host peak": (4 * GIB, 4 * GIB), "disk peak": (GIB, GIB)}


def test_the_table_says_what_was_not_kept() -> None:
    rows = side_by_side(make_plan(), Measurement(step_s=2.0))
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(side_by_side_table(rows))
    assert "not within 10%" in captured.get()
    assert "+105.0%" in captured.get()


def test_a_step_that_was_not_measured_divides_nothing_by_zero() -> None:
    row = side_by_side(make_plan(), Measurement(step_s=0.0))[0]
    assert row.cells()[3:] == ("–", "")
