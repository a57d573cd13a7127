"""Workers: the same bytes for any number of them, and errors that arrive whole."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cached_rows import ROWS, cache_files
from tokenizers_made_here import (
    CHATML,
    FORGETFUL,
    chat,
    documents,
    make_tokenizer,
    write_jsonl,
)

from outcore.data.encode import EncodedBatch, EncodeOptions, Encoder
from outcore.data.raw_rows import RawBatch
from outcore.data.tokenize import _worthwhile_workers, tokenize
from outcore.data.workers import encode_here
from outcore.errors import BadRow, LaneError, UnsupportedTemplate


@pytest.mark.usefixtures("small_batches")
def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    rows = [{"messages": chat("hi " * (n % 5 + 1), f"number {n}")} for n in range(60)]
    rows[31] = {"messages": []}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    options = EncodeOptions(on_bad_row="skip")
    reports = []
    for num_workers in (1, None, 3):  # of so few rows, None is threads
        cache = tokenize(
            path,
            tokenizer,
            cache_dir=tmp_path / str(num_workers),
            num_workers=num_workers,
            options=options,
        )
        reports.append((cache.report, cache.checksum))
    assert reports[0] == reports[1] == reports[2]
    files = cache_files(tmp_path / "1")
    assert len(files) == 3
    assert all(files.values())
    assert files == cache_files(tmp_path / "None") == cache_files(tmp_path / "3")


@pytest.mark.usefixtures("small_batches")
def test_the_first_bad_row_is_told_whichever_thread_meets_one(
    tmp_path: Path, make_cache: Any
) -> None:
    bad = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:50], {"text": 1}, {"text": 2}, *ROWS])
    with pytest.raises(BadRow, match="text must be text") as caught:
        make_cache(bad, num_workers=None)
    assert caught.value.line == 51


@pytest.mark.usefixtures("small_batches")
def test_the_first_batch_is_encoded_before_threads_share_the_tokenizer(
    source: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It switches off what an earlier call left on, which must not meet another thread's call."""
    threads, encode = [], Encoder.encode

    def watched(self: Encoder, *arguments: Any) -> EncodedBatch:
        threads.append(threading.current_thread())
        return encode(self, *arguments)

    monkeypatch.setattr(Encoder, "encode", watched)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache")
    assert threads[0] is threading.current_thread()
    assert len(threads) > 4
    assert threading.current_thread() not in threads[1:]


@pytest.mark.usefixtures("small_batches")
def test_errors_of_other_processes_arrive_whole(tmp_path: Path, make_cache: Any) -> None:
    bad = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:50], {"text": 1}, {"text": 2}, *ROWS])
    with pytest.raises(BadRow, match="text must be text") as caught:
        make_cache(bad, num_workers=2)
    assert (caught.value.path, caught.value.line) == (str(bad), 51)
    chats = write_jsonl(tmp_path / "b.jsonl", [{"messages": chat("a", "b", "c", "d")}])
    with pytest.raises(UnsupportedTemplate, match="turn 2 of 4"):
        make_cache(chats, using=make_tokenizer(FORGETFUL), num_workers=2)
    assert list((tmp_path / "cache").iterdir()) == []


class Noisy:
    """Writes to the standard output of whatever process it is unpickled in."""

    def __reduce__(self) -> Any:
        return os.write, (1, b"a library says hello\n")


def test_what_a_worker_prints_is_no_answer(tmp_path: Path, source: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.noisy = Noisy()
    cache = tokenize(source, tokenizer, cache_dir=tmp_path / "cache", num_workers=2)
    assert len(documents(cache)) == 100


SERVE = "import outcore.data.workers as w; w.serve()"


@pytest.mark.parametrize("said", ["nothing", "half of a question", "a question, read by nobody"])
def test_a_worker_whose_owner_was_killed_ends_without_a_word(said: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {SERVE}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stderr is not None
    worker.stdout.close()
    if said != "nothing":
        question = pickle.dumps((RawBatch(path="a.txt", rows=(), num_bytes=0), "text"))
        worker.stdin.write(pickle.dumps((make_tokenizer(), "answers")))
        worker.stdin.write(question[: len(question) // (2 if said.startswith("half") else 1)])
    worker.stdin.close()
    assert (worker.wait(timeout=120), worker.stderr.read()) == (0, b"")
    worker.stderr.close()


def test_a_script_without_a_main_guard(tmp_path: Path, source: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from tokenizers_made_here import make_tokenizer\n"
        "from outcore.data.tokenize import tokenize\n"
        f"cache = tokenize({str(source)!r}, make_tokenizer(),"
        f" cache_dir={str(tmp_path / 'cache')!r}, num_workers=2)\n"
        "print(cache.num_examples)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "100\n"), done.stderr


class Deadly:
    """Ends whatever process it is unpickled in."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.usefixtures("small_batches")
def test_a_worker_that_dies(tmp_path: Path, source: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.deadly = Deadly()
    with pytest.raises(LaneError, match="has died"):
        tokenize(source, tokenizer, cache_dir=tmp_path / "cache", num_workers=2)
    assert list((tmp_path / "cache").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if "tokenize" in thread.name]


def test_small_files_are_not_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    sizes = (0, 8 << 20, 17 << 20, 1 << 40)
    assert [_worthwhile_workers(size) for size in sizes] == [1, 1, 2, 4]


def test_no_more_processes_than_cores_can_use(
    tmp_path: Path, source: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for 100,000, it would start them all before the first row."""
    asked = []

    def here(work: Any, tokenizer: Any, loss_on: Any, num_workers: int) -> Any:
        asked.append(num_workers)
        return encode_here(work, tokenizer, loss_on, 1)

    monkeypatch.setattr("outcore.data.tokenize.encode_in_processes", here)
    for cores, num_workers in ((4, 3), (4, 100_000), (96, 64), (96, 100_000)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        cache_dir = tmp_path / f"{cores}-{num_workers}"
        tokenize(source, tokenizer, cache_dir=cache_dir, num_workers=num_workers)
    assert asked == [3, 16, 64, 96]
