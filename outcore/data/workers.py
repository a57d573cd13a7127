"""Encoding by several threads or processes, with results in the order of the rows.

Threads start at once, and a fast tokenizer lets go of the interpreter while it works; all else that
is done to a row waits for it. Processes take seconds to start, and wait for nothing.

Not by multiprocessing: a forked process inherits locks that threads of torch or of tokenizers held,
and a spawned one runs the caller's script again. These are programs of their own that read work
from a pipe, and end when the pipe does. What goes through the pipe is pickled, by this process and
its own children alone: no file and nobody else can bring a pickle here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import IO, Any, NoReturn, Protocol

from outcore.data.chat_tokens import LossOn
from outcore.data.encode import EncodedBatch, Encoder
from outcore.data.raw_rows import RawBatch
from outcore.data.row_format import RowFormat
from outcore.errors import LaneError

Work = tuple[RawBatch, RowFormat | None]


def encode_here(
    work: Iterable[Work], tokenizer: Any, loss_on: LossOn, num_threads: int
) -> Generator[EncodedBatch, None, None]:
    """Encode each batch in this process."""
    encoder, work = Encoder(tokenizer, loss_on), iter(work)
    # The first one alone: it switches off what an earlier call has left switched on in the
    # tokenizer, which cannot be done while another thread uses it.
    alone = islice(work, 1) if num_threads > 1 else work
    for batch, row_format in alone:
        yield encoder.encode(batch, row_format)
    if (second := next(work, None)) is not None:
        with ThreadPoolExecutor(num_threads, "outcore-tokenize") as pool:
            yield from _in_order(pool, [encoder] * num_threads, chain([second], work))


def encode_in_processes(
    work: Iterable[Work], tokenizer: Any, loss_on: LossOn, num_workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encode each batch in one of ``num_workers`` new processes."""
    first_words = pickle.dumps((tokenizer, loss_on))
    workers: list[_Worker] = []
    # A thread for each process: it waits while the process works.
    pool = ThreadPoolExecutor(num_workers, "outcore-tokenize")
    try:
        workers += [_Worker(first_words) for _ in range(num_workers)]
        yield from _in_order(pool, workers, work)
    finally:
        for worker in workers:
            worker.end()
        pool.shutdown(wait=True, cancel_futures=True)


class _Encodes(Protocol):
    def encode(self, batch: RawBatch, row_format: RowFormat | None) -> EncodedBatch: ...


def _in_order(
    pool: ThreadPoolExecutor, workers: Sequence[_Encodes], work: Iterable[Work]
) -> Generator[EncodedBatch, None, None]:
    idle: queue.SimpleQueue[_Encodes] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def encode(batch: RawBatch, row_format: RowFormat | None) -> EncodedBatch:
        worker = idle.get()
        try:
            return worker.encode(batch, row_format)
        finally:
            idle.put(worker)

    waiting: deque[Future[EncodedBatch]] = deque()
    for batch, row_format in work:
        waiting.append(pool.submit(encode, batch, row_format))
        if len(waiting) == 2 * len(workers) + 2:  # so that no more than these are in memory
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class _Worker:
    """Another process, used by one thread at a time."""

    def __init__(self, first_words: bytes) -> None:
        self._unsaid = first_words  # said with the first work, when the process is likely up
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import outcore.data.workers as w; w.serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The processes are the parallelism.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )

    def encode(self, batch: RawBatch, row_format: RowFormat | None) -> EncodedBatch:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(self._unsaid)
            self._unsaid = b""
            pickle.dump((batch, row_format), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            raise LaneError(
                "a process that tokenises has died. If memory ran out, use fewer workers; if the "
                "tokenizer's class is defined in the script itself, use one"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, EncodedBatch)
        return answer

    def end(self) -> None:
        """End the process at once: it holds nothing that could be lost."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written has nobody to read it
                pipe.close()


def serve() -> None:
    """Encode what comes in until nothing more does: the whole life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started us ends us
    # Who started us may be killed instead, with a question half asked or an answer half read: that
    # is no fault of ours, and nobody's terminal needs to see where we were.
    gone = contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError)
    with gone, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
        _answer(sys.stdin.buffer, answers)


def _answer(questions: IO[bytes], answers: IO[bytes]) -> NoReturn:
    """Answer each question; EOFError when there are no more."""
    encoder = Encoder(*pickle.load(questions))
    while True:
        batch, row_format = pickle.load(questions)
        try:
            answer: EncodedBatch | Exception = encoder.encode(batch, row_format)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
