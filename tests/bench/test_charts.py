"""Charts of the documentation: points lie where their values say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from benchmark_scripts import script

charts = script("charts")
SVG = "{http://www.w3.org/2000/svg}"


def axis(*ticks: float, is_log: bool = False) -> object:
    return charts.Axis(title="", ticks=[(tick, str(tick)) for tick in ticks], is_log=is_log)


def drawn(*panels: object) -> ElementTree.Element:
    return ElementTree.fromstring(charts.drawing("a < b", panels))


def test_a_logarithmic_axis_has_the_geometric_mean_in_its_middle() -> None:
    assert axis(1024, 65536, is_log=True).share(8192) == pytest.approx(0.5)
    assert axis(1024, 65536).share(33280) == pytest.approx(0.5)


def test_larger_values_are_further_right_and_higher_up() -> None:
    line = charts.Line(name="<a>", points=[(0, 0), (1, 3), (2, 4)], dots=[(2, 4)])
    panel = charts.Panel(title="", x=axis(0, 2), y=axis(0, 4), lines=[line])
    svg = drawn(panel)
    points = svg.find(f".//{SVG}polyline").get("points").split()
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points)
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(3 * (y1 - y2))
    assert y2 < y1 < y0
    dot = svg.find(f".//{SVG}g").find(f"{SVG}circle")
    assert (float(dot.get("cx")), float(dot.get("cy"))) == (x2, y2)


def test_lines_of_one_name_have_one_colour_in_every_panel() -> None:
    panels = [
        charts.Panel(
            title="",
            x=axis(0, 1),
            y=axis(0, 1),
            lines=[charts.Line(name=name, points=[(0, 0), (1, 1)]) for name in names],
        )
        for names in ("abc", "cb")
    ]
    found: dict[str, set[str]] = {}
    for line in drawn(*panels).iter(f"{SVG}polyline"):
        found.setdefault(line.find(f"{SVG}title").text, set()).add(line.get("stroke"))
    assert sorted(found) == ["a", "b", "c"]
    assert all(len(colours) == 1 for colours in found.values())
    assert len(set.union(*found.values())) == 3


def test_the_curves_of_state_formats_differ_by_what_they_differ_by() -> None:
    curves = script("state_formats_curves")
    relative = curves.relative([1.01] * 200, [1.0] * 200)
    assert relative == [(100, pytest.approx(0.01)), (200, pytest.approx(0.01))]
