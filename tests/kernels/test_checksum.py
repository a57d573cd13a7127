"""The checksum of pages: one value on every instruction set, and what it must notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_by_numpy, checksum_pages
from outcore.kernels.checksum_torch import checksum_on_device

NUM_PAGES = 5


def random_pages(num_pages: int = NUM_PAGES, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_pages * PAGE_BYTES, dtype=np.uint8)


def by_hand(page: bytes, number: int, seed: int) -> int:
    """The definition in outcore_kernels.h for one page, in Python's own integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def scramble(x: int) -> int:
        return (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & mask

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    words = [int.from_bytes(page[i : i + 8], "little") for i in range(0, PAGE_BYTES, 8)]
    lanes = [golden * (lane + 1) & mask for lane in range(32)]
    for row in range(16):
        lanes = [scramble(lanes[lane] ^ words[32 * row + lane]) for lane in range(32)]
    for half in (16, 8, 4, 2, 1):
        lanes = [scramble(lanes[lane]) ^ lanes[lane + half] for lane in range(half)]
    return mix(lanes[0] ^ mix((seed + golden * number) & mask))


@given(first_page=st.integers(0, 2**64 - 1), seed=st.integers(0, 2**64 - 1))
def test_numpy_follows_the_definition(first_page: int, seed: int) -> None:
    page = random_pages(1, seed % 7)
    expected = by_hand(page.tobytes(), first_page, seed)
    assert checksum_by_numpy(page, first_page=first_page, seed=seed) == expected


@pytest.mark.parametrize("num_pages", [0, 1, 2, 300])
def test_every_instruction_set_agrees_with_numpy(isa: str, num_pages: int) -> None:
    data = random_pages(num_pages)
    for first_page, seed in ((0, 0), (7, 2**64 - 1), (2**64 - 2, 12345)):
        expected = checksum_by_numpy(data, first_page=first_page, seed=seed)
        assert checksum_pages(data, first_page=first_page, seed=seed) == expected


@pytest.mark.parametrize("num_pages", [0, 1, 2, 2049])
def test_torch_agrees_with_numpy(num_pages: int) -> None:
    data = random_pages(num_pages)
    for first_page, seed in ((0, 0), (7, 2**64 - 1), (2**64 - 2, 12345), (3, 5 << 40)):
        expected = checksum_by_numpy(data, first_page=first_page, seed=seed)
        on_device = checksum_on_device(torch.from_numpy(data), first_page=first_page, seed=seed)
        assert on_device == expected


def test_parts_add_up() -> None:
    data = random_pages()
    cut = 2 * PAGE_BYTES
    parts = checksum_pages(data[cut:], first_page=2, seed=9) + checksum_pages(data[:cut], seed=9)
    assert parts % 2**64 == checksum_pages(data, seed=9)


@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_every_flipped_bit_of_a_page_is_noticed(fill: str) -> None:
    data = random_pages(2)
    if fill != "random":
        data[:] = 0 if fill == "zeros" else 255
    seen = {checksum_pages(data)}
    for byte in range(PAGE_BYTES):
        for bit in range(8):
            data[PAGE_BYTES + byte] ^= 1 << bit
            seen.add(checksum_pages(data))
            data[PAGE_BYTES + byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * PAGE_BYTES  # no two of them alike, either


def test_pairs_of_flipped_bits_are_noticed() -> None:
    data = random_pages(1)
    seen = {checksum_pages(data)}
    places = [(byte, bit) for byte in (0, 7, 256, 263, 512, 4095) for bit in range(8)]
    for i, (byte_1, bit_1) in enumerate(places):
        for byte_2, bit_2 in places[:i]:
            data[byte_1] ^= 1 << bit_1
            data[byte_2] ^= 1 << bit_2
            seen.add(checksum_pages(data))
            data[byte_1] ^= 1 << bit_1
            data[byte_2] ^= 1 << bit_2
    assert len(seen) == 1 + len(places) * (len(places) - 1) // 2


@pytest.mark.parametrize("distance", [1, 2, 256, 1024])
def test_pages_that_changed_places_are_noticed(distance: int) -> None:
    pages = random_pages(distance + 1).reshape(-1, PAGE_BYTES)
    before = checksum_pages(pages.reshape(-1))
    pages[[0, distance]] = pages[[distance, 0]]
    assert checksum_pages(pages.reshape(-1)) != before


@pytest.mark.parametrize(("first", "second"), [(0, 8), (0, 128), (0, 256), (8, 4088)])
def test_words_that_changed_places_are_noticed(first: int, second: int) -> None:
    data = random_pages(1)
    before = checksum_pages(data)
    data[first : first + 8], data[second : second + 8] = (
        data[second : second + 8].copy(),
        data[first : first + 8].copy(),
    )
    assert checksum_pages(data) != before


def test_zeroed_missing_and_repeated_pages_are_noticed() -> None:
    data = random_pages()
    seen = {checksum_pages(data), checksum_pages(data[:-PAGE_BYTES])}
    for page in range(NUM_PAGES):
        damaged = data.copy().reshape(-1, PAGE_BYTES)
        damaged[page] = 0
        seen.add(checksum_pages(damaged.reshape(-1)))
        damaged[page] = damaged[(page + 1) % NUM_PAGES]
        seen.add(checksum_pages(damaged.reshape(-1)))
    assert len(seen) == 2 + 2 * NUM_PAGES


def test_seed_and_place_matter() -> None:
    data = np.zeros(PAGE_BYTES, dtype=np.uint8)
    sums = {checksum_pages(data, seed=s, first_page=p) for s in range(20) for p in range(20)}
    assert len(sums) == 400


def test_only_whole_pages_of_contiguous_bytes() -> None:
    with pytest.raises(ValueError, match="100 bytes"):
        checksum_pages(np.zeros(100, dtype=np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        checksum_pages(np.zeros(2 * PAGE_BYTES, dtype=np.uint8)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        checksum_pages(np.zeros(512, dtype=np.uint64))  # type: ignore[arg-type]
