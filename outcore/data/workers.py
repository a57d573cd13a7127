"""Encoding by several processes, with results in the order of the rows whoever made them."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from outcore.data.chat_tokens import LossOn
from outcore.data.encode import EncodedBatch, Encoder
from outcore.data.raw_rows import RawBatch
from outcore.data.row_format import RowFormat
from outcore.errors import LaneError

Work = tuple[RawBatch, RowFormat | None]

_encoder: Encoder | None = None  # of a worker process


def encode_in_order(
    work: Iterable[Work], tokenizer: Any, loss_on: LossOn, num_workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encode each batch; one worker is this process itself."""
    if num_workers == 1:
        encoder = Encoder(tokenizer, loss_on)
        for batch, row_format in work:
            yield encoder.encode(batch, row_format)
        return
    # Spawned, since the threads of torch and of tokenizers do not survive a fork.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer, loss_on),
    )
    try:
        yield from _in_order(pool, work, max_waiting=2 * num_workers + 2)
    except BrokenProcessPool as error:
        raise LaneError(
            "a process that tokenises has died. Either memory ran out (use fewer workers), or the "
            'script that was started has no `if __name__ == "__main__":` around what it does'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, work: Iterable[Work], max_waiting: int
) -> Iterator[EncodedBatch]:
    waiting: deque[Future[EncodedBatch]] = deque()
    for batch, row_format in work:
        waiting.append(pool.submit(_encode, batch, row_format))
        if len(waiting) == max_waiting:  # so that no more than these are in memory
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start(tokenizer: Any, loss_on: LossOn) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = Encoder(tokenizer, loss_on)


def _encode(batch: RawBatch, row_format: RowFormat | None) -> EncodedBatch:
    assert _encoder is not None
    return _encoder.encode(batch, row_format)
