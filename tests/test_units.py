"""Byte sizes in and out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.units import format_bytes, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("800MB", 800_000_000),
        ("1KB", 1000),
        ("7", 7),
        ("7b", 7),
        ("0.5TB", 5 * 10**11),
        (12345, 12345),
    ],
)
def test_sizes(text: "int | str", num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "24 GiBs", "-1GB", "1e9", "0", "0GB", 0, -5, 1.5, True, None, "1..5GB", "२GB"],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="device_memory"):
        parse_bytes(text, what="device_memory")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "meant"),
    [(24, "24GiB"), ("24", "24GiB"), (" 24 ", "24GiB"), (1, "1GiB"), (24_576, "24576MiB")],
)
def test_a_budget_that_lost_its_unit(size: "int | str", meant: str) -> None:
    with pytest.raises(ValueError, match=rf"device_memory is .* bytes; did you mean {meant}\?"):
        parse_budget(size, what="device_memory")


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("10KB", 10_000), ("24B", 24), (2**16, 2**16), (str(2**16), 2**16), ("0.5MiB", 2**19)],
)
def test_a_budget_that_is_meant(size: "int | str", num_bytes: int) -> None:
    assert parse_budget(size) == num_bytes


@given(st.integers(min_value=1, max_value=2**62))
def test_whole_bytes_come_back_exactly(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == num_bytes
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(min_value=1, max_value=2**50))
def test_formatted_sizes_parse_to_nearly_the_same(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert parse_bytes(text) == pytest.approx(num_bytes, rel=0.05)
    assert len(text.split()[0]) <= 6
