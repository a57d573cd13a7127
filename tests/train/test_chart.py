"""Charts: well-formed, and with every line in its frame."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.train.chart import Series, line_chart

VALUES = st.floats(-1e9, 1e9, allow_subnormal=False)


@given(st.lists(VALUES, min_size=1, max_size=50))
def test_any_values_stay_in_the_frame(values: list[float]) -> None:
    page = line_chart("t", [Series(name="a", points=list(enumerate(values)))])
    svg = page[: page.index("</svg>") + 6]
    line = ElementTree.fromstring(svg).find("polyline")
    assert line is not None
    numbers = [float(n) for n in re.findall(r"-?\d+\.\d", line.attrib["points"])]
    assert all(-1 <= x <= 1001 for x in numbers[::2])
    assert all(-1 <= y <= 241 for y in numbers[1::2])


def test_names_are_escaped_and_gaps_left_out() -> None:
    points = [(1.0, 2.0), (2.0, math.nan), (3.0, 1.0)]
    page = line_chart("<t>", [Series(name="<b>", points=points)])
    assert "<b>" not in page
    assert "nan" not in page


@pytest.mark.parametrize("count", [600, 601, 5000])
def test_many_points_are_thinned(count: int) -> None:
    page = line_chart("t", [Series(name="a", points=[(i, i) for i in range(count)])])
    points = re.search(r'points="([^"]*)"', page)
    assert points is not None
    assert len(points.group(1).split()) <= 600


def test_a_line_ends_where_what_follows_cannot_be_compared() -> None:
    points = [(2.0, 5.0), (4.0, 4.0), (6.0, 9.0), (8.0, 8.0), (10.0, 1.0)]
    page = line_chart("t", [Series(name="a", points=points, breaks=[6, 10])])
    lines = re.findall(r'<polyline points="([^"]*)" class="line s0"', page)
    assert [len(line.split()) for line in lines] == [2, 2, 1]
    assert page.count("<circle") == 5  # one alone is seen too
    assert page.endswith("Last: a 1</p>")


def test_nothing_to_draw() -> None:
    for points in ([], [(1.0, math.nan)]):
        assert "Nothing was measured" in line_chart("t", [Series(name="a", points=points)])
