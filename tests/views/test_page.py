"""The page: everything is on it, nothing is fetched, and no name becomes markup."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from handmade_plans import GIB, make_machine, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.planning.compare import compare
from outcore.planning.plan import Plan, Span
from outcore.planning.smaller_budget import SmallerBudget
from outcore.views.page import plan_page
from outcore.views.page_tiles import RunFigures
from outcore.views.page_timeline import MOST_PIECES, pieces_of, timeline
from outcore.views.side_by_side import Measurement

EVIL = "</title></script><script>alert(1)</script><img src=x onerror='a'>\"&\x00\ud800"
VOID = {"meta"}


class Page(HTMLParser):
    """Every tag, attribute and text of a page; fails where tags do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID and tag != "br":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def whole_page(plan: Plan) -> str:
    machine = make_machine()
    measured = Measurement(
        step_s=4.3,
        spans=tuple(
            replace(s, start_s=s.start_s + 77, end_s=s.end_s + 77) for s in plan.prediction.timeline
        ),
        peak_bytes={"device": 23 * GIB, "host": 150 * GIB},
    )
    comparison = compare(
        plan, machine, num_parameters=7_600_000_000, hidden_size=3584, train_tokens=1e9
    )
    smaller = SmallerBudget(device_bytes=20 * GIB, refusal=f"It needs more. {plan.model}")
    return plan_page(
        plan, machine=machine, smaller=smaller, measured=measured, comparison=comparison
    )


def with_names(name: str) -> Plan:
    plan = make_plan(model=name, machine=name, peak_bytes={"device": {name: 9 * GIB, "s": GIB}})
    span = Span(lane=name, name=name, start_s=0.5, end_s=1.0)
    prediction = replace(
        plan.prediction,
        binding_lane=name,
        busy_s={**plan.prediction.busy_s, name: 1.0},
        timeline=(span, *plan.prediction.timeline[:9]),
    )
    return replace(plan, prediction=prediction)


def test_every_fact_is_on_the_page() -> None:
    text = Page(whole_page(make_plan())).text
    for fact in (
        "qwen2.5-7b on h200-pcie5",
        "32,768 tokens a step (16 × 2,048)",
        "4.10 s",
        "7,992",
        "The binding lane is host cores",
        "from 45,000 tokens a step",
        "With 20.0 GiB of device memory it does not fit",
        "compute: forward 3, ",
        "Predicted",
        "Measured",
        "device: 22.5 GiB of 24.0 GiB at the peak (94%)",
        "kept activations",
        "blocks 2-21",
        "not within 5%",
        "without offloading",
    ):
        assert fact in text, fact


def tiles_of(source: str) -> dict[str, str]:
    return dict(re.findall(r'<div class="tile"><dt>(.*?)</dt><dd>(.*?)</dd></div>', source))


def test_the_top_of_a_runs_page_is_what_was_measured_and_says_what_is_not() -> None:
    plan = make_plan()
    measured = Measurement(step_s=8.2, peak_bytes={"device": 23 * GIB, "host": 150 * GIB})
    before, after = tiles_of(plan_page(plan)), tiles_of(plan_page(plan, measured=measured))
    assert "predicted step" in before
    assert not [name for name in before if name.startswith("measured")]
    tflops = f"{plan.prediction.tflops / 2:,.0f}"
    assert after == {
        "measured step": "8.20 s",
        "measured tokens/s": "3,996",
        "measured TFLOPS": tflops,
        "predicted binding lane": before["binding lane"],
        "measured device peak": "23.0 GiB",
        "measured host peak": "150.0 GiB",
        "micro-batch": before["micro-batch"],
        "slots": before["slots"],
    }
    in_part = replace(measured, unseen=("working memory",))
    assert tiles_of(plan_page(plan, measured=in_part))["predicted device peak"] == "22.5 GiB"
    unknown = tiles_of(plan_page(plan, figures=RunFigures()))
    assert unknown["predicted tokens/s"] == before["tokens/s"]


def test_nothing_is_fetched_and_only_its_own_script_runs() -> None:
    source = whole_page(make_plan())
    page = Page(source)
    assert page.tags.count("script") == 1
    assert not {"img", "link", "iframe", "object", "form", "a"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "action"} & names
    assert not any(name.startswith("on") for name in names)
    assert "url(" not in source
    assert "@import" not in source
    script = source.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source


def test_hostile_names_stay_texts() -> None:
    source = whole_page(with_names(EVIL))
    page, honest = Page(source), Page(whole_page(with_names("honest")))
    assert page.tags == honest.tags
    assert [name for name, _ in page.attributes] == [name for name, _ in honest.attributes]
    assert "<script>alert(1)</script>" in page.text  # to be read, not to run
    source.encode("utf-8")
    assert "\x00" not in source


@settings(max_examples=25, deadline=None)
@given(name=st.text(st.characters(), min_size=1, max_size=30).filter(lambda name: name.strip()))
def test_no_name_changes_the_page(name: str) -> None:
    tags = Page(plan_page(with_names(name))).tags
    assert tags.count("script") == 1
    assert set(tags) <= set(Page(whole_page(make_plan())).tags)


def test_it_can_be_read_without_seeing_it() -> None:
    page = Page(whole_page(make_plan()))
    labels = [value or "" for name, value in page.attributes if name == "aria-label"]
    assert any("compute is busy" in label and "to device is busy" in label for label in labels)
    assert "zoom in" in labels
    assert ("lang", "en") in page.attributes
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name, value in page.attributes:
        if name == "aria-labelledby":
            assert value in ids


def test_a_lane_is_busy_for_a_share_of_its_own_step() -> None:
    """Also beside one that took longer, on one scale."""
    plan = make_plan()
    spans = plan.prediction.timeline
    measured = Measurement(step_s=10 * plan.prediction.step_s, spans=spans)
    alone, both = (plan_page(plan, measured=m) for m in (None, measured))
    shares = re.findall(r"(\d+)% busy", alone)
    assert max(map(int, shares)) > 50
    found = re.findall(r"(\d+)% busy", both)
    assert found[: len(shares)] == shares
    tenths = [int(share) / 10 for share in shares]
    assert [int(share) for share in found[len(shares) :]] == pytest.approx(tenths, abs=0.6)


def test_light_and_dark() -> None:
    source = whole_page(make_plan())
    assert "color-scheme: light dark" in source
    assert "prefers-color-scheme: dark" in source


def test_the_colours_of_charts_reach_nothing_on_a_plans_page() -> None:
    """A table of memory has the colours of its bar."""
    source = whole_page(make_plan())
    recoloured = set(re.findall(r"\.([\w-]+) \.k\d", source))
    assert recoloured
    classes = {
        one
        for name, value in Page(source).attributes
        if name == "class"
        for one in (value or "").split()
    }
    assert "swatch" in classes
    assert not recoloured & classes


def test_both_timelines_have_one_scale() -> None:
    totals = re.findall(r'data-total-seconds="([^"]+)"', whole_page(make_plan()))
    assert totals == ["4.3", "4.3"]


def test_a_plan_without_a_timeline_says_so() -> None:
    plan = make_plan(peak_bytes={}, blocks=())
    plan = replace(plan, prediction=replace(plan.prediction, timeline=()))
    text = Page(plan_page(plan)).text
    assert "no timeline was recorded" in text
    assert "names no bytes" in text


def test_over_budget_shows_the_limit() -> None:
    source = plan_page(make_plan(peak_bytes={"device": {"all": 30 * GIB}}))
    assert "125%, over budget" in source
    assert 'class="limit"' in source
    assert 'class="limit"' not in plan_page(make_plan())


def test_many_pieces_are_joined_and_none_is_lost() -> None:
    spans = [
        Span(lane="compute", name=f"forward {i}", start_s=i * 1e-3, end_s=i * 1e-3 + 0.9e-3)
        for i in range(50_000)
    ]
    pieces = pieces_of(spans, 50.0)
    assert len(pieces) <= 1.1 * MOST_PIECES
    assert sum(piece.count for piece in pieces) == len(spans)
    assert (pieces[0].start_s, pieces[-1].end_s) == (0.0, spans[-1].end_s)
    assert "pieces, forward 0 to forward " in timeline("Predicted", spans, 50.0, 50.0)
    assert len(pieces_of(spans[:100], 50.0)) == 100
