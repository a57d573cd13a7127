"""Copies between host and device: by size, pinned and pageable, one way and both at once.

Without a GPU the link is a copy inside host memory, which is what the engine's CPU device does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger

from .report import LinkFigures, PieceCopy
from .sizes import ProbeSizes
from .timing import seconds_per_call


def measure_link(device: torch.device, sizes: ProbeSizes) -> LinkFigures:
    large_bytes = sizes.copy_piece_bytes[-1]
    on_cuda = device.type == "cuda"
    # Two buffers on each side: with one, both directions at once would wait for each other's bytes.
    arena = HostArena(2 * large_bytes, purpose="probe", ledger=Ledger("host", None), pin=on_cuda)
    host = [arena.span(large_bytes, torch.uint8) for _ in range(2)]
    there = [torch.zeros(large_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pieces = tuple(
        PieceCopy(
            piece_bytes=piece_bytes,
            to_device_bytes_s=_bytes_s(there[0], host[0], piece_bytes, device, sizes.seconds),
            to_host_bytes_s=_bytes_s(host[1], there[1], piece_bytes, device, sizes.seconds),
        )
        for piece_bytes in sizes.copy_piece_bytes
    )
    both_ways = _both_ways_on_cuda if on_cuda else _both_ways_on_cpu
    both_ways_bytes_s = both_ways(host, there, sizes.seconds)
    is_pinned = arena.is_pinned
    pageable = torch.zeros(large_bytes, dtype=torch.uint8)
    return LinkFigures(
        pieces=pieces,
        both_ways_bytes_s=both_ways_bytes_s,
        pageable_to_device_bytes_s=_bytes_s(there[0], pageable, large_bytes, device, sizes.seconds),
        pageable_to_host_bytes_s=_bytes_s(pageable, there[1], large_bytes, device, sizes.seconds),
        is_pinned=is_pinned,
    )


def _bytes_s(
    target: Tensor, source: Tensor, piece_bytes: int, device: torch.device, seconds: float
) -> float:
    """Copy piece after piece through the whole buffers, so that no cache holds a piece."""
    num_pieces = target.numel() // piece_bytes
    pairs = list(
        zip(
            target[: num_pieces * piece_bytes].split(piece_bytes),
            source[: num_pieces * piece_bytes].split(piece_bytes),
            strict=True,
        )
    )
    next_pair = 0

    def copy() -> None:
        nonlocal next_pair
        to, from_ = pairs[next_pair]
        next_pair = (next_pair + 1) % num_pieces
        to.copy_(from_, non_blocking=True)

    return piece_bytes / seconds_per_call(copy, device=device, seconds=seconds)


def _both_ways_on_cuda(host: list[Tensor], there: list[Tensor], seconds: float) -> float:
    """Two streams, one a direction; the slower of the two counts."""
    streams = [torch.cuda.Stream(there[0].device) for _ in range(2)]

    def run(num_copies: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_copies):
            with torch.cuda.stream(streams[0]):
                there[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(there[1], non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return _rate(run, host[0].numel(), seconds)


def _both_ways_on_cpu(host: list[Tensor], there: list[Tensor], seconds: float) -> float:
    """Two threads, one a direction."""

    def run(num_copies: int) -> float:
        def copy_back() -> None:
            for _ in range(num_copies):
                host[1].copy_(there[1])

        other = threading.Thread(target=copy_back, name="outcore-probe")
        start = time.perf_counter()
        other.start()
        for _ in range(num_copies):
            there[0].copy_(host[0])
        other.join()
        return time.perf_counter() - start

    return _rate(run, host[0].numel(), seconds)


def _rate(run: Callable[[int], float], num_bytes: int, seconds: float) -> float:
    num_copies = max(3, round(seconds / max(run(2) / 2, 1e-6)))
    return num_copies * num_bytes / run(num_copies)
