"""The cache: made once, whole or rebuilt, never wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_rows import ROWS, cache_files
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_made_here import (
    CHATML,
    chat,
    documents,
    make_tokenizer,
    texts,
    write_jsonl,
)
from transformers import PreTrainedTokenizerFast

from outcore.data import durable_files
from outcore.data.cache_format import DOCUMENT
from outcore.data.tokenize import Progress, tokenize
from outcore.errors import StoreError


class Counter:
    """A callback that knows how often something was built."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)

    @property
    def num_built(self) -> int:
        return sum(one.num_bytes == one.total_bytes for one in self.seen)


def file_of(cache_dir: Path, kind: str) -> Path:
    (path,) = cache_dir.glob(f"*/{kind}*")
    return path


def test_it_is_made_once(source: Path, tmp_path: Path, tokenizer: Any) -> None:
    counter = Counter()
    first = tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    before = file_of(tmp_path / "cache", "ids")
    second = tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    assert counter.num_built == 1
    assert file_of(tmp_path / "cache", "ids") == before
    assert texts(first, tokenizer) == texts(second, tokenizer)
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["tokens"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "parquet"])
@pytest.mark.usefixtures("small_batches")
def test_progress(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "txt":
        path.write_text("the cat\n" * 300_000)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS * 10), path)
    counter = Counter()
    tokenize(path, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    seen = counter.seen
    assert len(seen) > 2
    assert {one.total_bytes for one in seen} == {path.stat().st_size}
    steps = [one.num_bytes for one in seen]
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1]
    assert seen[-1].total_bytes - steps[-1] <= 2  # the brackets of an array belong to no row
    assert seen[-1].num_rows == {"txt": 1, "parquet": 1000}.get(kind, 100)


def test_a_changed_source_is_read_again(
    source: Path, make_cache: Any, tmp_path: Path, tokenizer: Any
) -> None:
    make_cache(source)
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"cat", b"dog"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # only a hash can tell
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )
    assert texts(make_cache(source), tokenizer)[0] == "the dog 0 <|end|>"
    write_jsonl(source, ROWS[:-1])
    assert make_cache(source).num_examples == 99
    assert len(list((tmp_path / "cache").iterdir())) == 1  # in the place of the old one


def test_the_same_bytes_at_another_time_are_read_again(
    source: Path, tmp_path: Path, tokenizer: Any
) -> None:
    counter = Counter()
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    os.utime(source, ns=(0, 1))
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    assert counter.num_built == 2


def test_a_change_in_the_middle_that_keeps_the_time_is_noticed(
    tmp_path: Path, make_cache: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"the cat {n:06}"} for n in range(10_000)])
    before = make_cache(path).checksum
    status = path.stat()
    data = path.read_bytes()
    assert len(data) > 3 * (64 << 10)
    path.write_bytes(data.replace(b"005000", b"005001"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert make_cache(path).checksum != before


def test_another_tokenizer_or_option_has_its_own_cache(tmp_path: Path, make_cache: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("hi", "you")}])
    make_cache(path)
    make_cache(path, loss_on="all")
    make_cache(path, using=make_tokenizer(vocabulary=280))
    make_cache(path, using=make_tokenizer(CHATML))
    assert len(list((tmp_path / "cache").iterdir())) == 4
    make_cache(path, using=make_tokenizer(CHATML))  # made anew, and the same
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_special_tokens_that_are_split_are_other_tokens(tmp_path: Path, make_cache: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "cat<|im_end|>cat"}])
    tokenizer = make_tokenizer()
    whole = make_cache(path, using=tokenizer)
    tokenizer.split_special_tokens = True
    assert make_cache(path, using=tokenizer).num_tokens > whole.num_tokens


def test_padding_and_truncation_of_earlier_calls_change_nothing(
    source: Path, tmp_path: Path, make_cache: Any
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "<|end|>"
    first = make_cache(source, using=tokenizer)
    tokenizer(["a", "the cat sat"], padding=True, truncation=True, max_length=2)
    again = make_cache(source, using=tokenizer)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert first.checksum == again.checksum


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def made_longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def one_bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["ids", "counts", "documents", "manifest"])
@pytest.mark.parametrize(
    "damage",
    [cut_short, emptied, made_longer, one_bit_flipped, Path.unlink],
    ids=lambda f: f.__name__,
)
def test_a_torn_cache_is_made_again(
    source: Path, tmp_path: Path, tokenizer: Any, kind: str, damage: Callable[[Path], None]
) -> None:
    counter = Counter()
    first = tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    expected = texts(first, tokenizer)
    del first
    path = file_of(tmp_path / "cache", kind)
    if kind == "manifest" and damage is one_bit_flipped:
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"num_tokens": ', b'"num_tokens": 1'))
    elif kind == "manifest" and damage is made_longer:
        path.write_bytes(path.read_bytes() + b"}")
    else:
        damage(path)
    again = tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    assert counter.num_built == 2
    assert texts(again, tokenizer) == expected
    (directory,) = (tmp_path / "cache").iterdir()
    assert len(list(directory.iterdir())) == 4  # nothing of the torn one is left


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("made_from", {"format_version": 0}),
        ("made_from", None),
        ("name", "../../../etc/passwd"),
        ("id_bytes", 8),
        ("num_documents", -1),
        ("num_documents", "100"),
        ("files", {}),
        ("files", {"ids": {"num_bytes": "5", "crc32": 0}}),
        ("report", []),
        ("unknown", 1),
    ],
)
def test_a_manifest_that_says_something_else(
    source: Path, tmp_path: Path, tokenizer: Any, field: str, value: object
) -> None:
    counter = Counter()
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    path = file_of(tmp_path / "cache", "manifest")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    again = tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    assert counter.num_built == 2
    assert len(documents(again)) == 100


def test_files_that_do_not_agree(source: Path, tmp_path: Path, tokenizer: Any) -> None:
    """Whole by their checksums, and still wrong: a document would end behind the last token."""
    counter = Counter()
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    path = file_of(tmp_path / "cache", "documents")
    records = np.fromfile(path, dtype=DOCUMENT)
    records["end"][-1] += 1
    records.tofile(path)
    manifest = file_of(tmp_path / "cache", "manifest")
    fields = json.loads(manifest.read_text())
    fields["files"]["documents"]["crc32"] = zlib.crc32(records.tobytes())
    manifest.write_text(json.dumps(fields))
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=counter)
    assert counter.num_built == 2


def test_a_lock_whose_name_is_gone_is_no_lock(tmp_path: Path) -> None:
    """Whoever waited for a file that was deleted since must wait for the new one of its name."""
    path = tmp_path / "lock"
    inside: list[str] = []
    may_leave = threading.Event()
    num_at_once: list[int] = []

    def enter(name: str) -> None:
        with durable_files.locked(path):
            inside.append(name)
            num_at_once.append(len(inside))
            may_leave.wait(10)
            inside.remove(name)

    waiting = threading.Thread(target=enter, args=("waited",))
    with durable_files.locked(path):
        waiting.start()
        time.sleep(0.3)  # until it waits for the file that is there now
    while not inside:
        time.sleep(0.01)
    late = threading.Thread(target=enter, args=("late",))
    late.start()
    time.sleep(0.3)
    assert inside == ["waited"]
    may_leave.set()
    for thread in (waiting, late):
        thread.join(10)
    assert num_at_once == [1, 1]
    assert not path.exists()


def test_what_others_put_there_stays(source: Path, tmp_path: Path, make_cache: Any) -> None:
    make_cache(source)
    (directory,) = (tmp_path / "cache").iterdir()
    (directory / "notes.txt").write_text("mine")
    (directory / "ids-0123456789abcdef.bin").write_text("of a process that was killed")
    os.utime(source)
    make_cache(source)
    names = sorted(path.name.split("-")[0] for path in directory.iterdir())
    assert names == ["counts", "documents", "ids", "manifest.json", "notes.txt"]


def test_two_at_once_build_one(source: Path, tmp_path: Path, tokenizer: Any) -> None:
    counter = Counter()
    found: list[list[str]] = []
    barrier = threading.Barrier(4)

    def build() -> None:
        own = make_tokenizer()
        barrier.wait()
        cache = tokenize(source, own, cache_dir=tmp_path / "cache", progress=counter)
        found.append(texts(cache, own))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counter.num_built == 1
    assert found == [[row["text"] + "<|end|>" for row in ROWS]] * 4
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["tokens"]


def test_a_build_that_was_killed(source: Path, tmp_path: Path, tokenizer: Any) -> None:
    code = (
        f"import os, signal, sys; sys.path[:0] = {sys.path!r}\n"
        "from tokenizers_made_here import make_tokenizer\n"
        "from outcore.data.tokenize import tokenize\n"
        f"tokenize({str(source)!r}, make_tokenizer(), cache_dir={str(tmp_path / 'cache')!r},"
        " progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cache").iterdir())) == 2  # files of no cache, and a free lock
    cache = tokenize(source, tokenizer, cache_dir=tmp_path / "cache")
    assert len(documents(cache)) == 100
    (directory,) = (tmp_path / "cache").iterdir()
    assert len(list(directory.iterdir())) == 4


class FailingCalls:
    """Lets some calls through, then fails."""

    def __init__(self, call: Callable[..., Any], code: int, num_good: int) -> None:
        self._call, self._code = call, code
        self.num_calls, self._num_good = 0, num_good

    def __call__(self, *arguments: Any) -> Any:
        self.num_calls += 1
        if self.num_calls > self._num_good:
            raise OSError(self._code, os.strerror(self._code))
        return self._call(*arguments)


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("write", errno.ENOSPC, "the disk is full .*another directory"),
        ("write", errno.EIO, "cannot be written"),
        ("sync", errno.EIO, "cannot be written"),
        ("sync", errno.ENOSPC, "the disk is full"),
    ],
)
def test_a_disk_that_fails_leaves_nothing_behind(
    source: Path,
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    says: str,
) -> None:
    monkeypatch.setattr(durable_files, "_BUFFER_BYTES", 64)
    call = getattr(durable_files, name)
    all_calls = FailingCalls(call, code, 10**9)
    monkeypatch.setattr(durable_files, name, all_calls)
    tokenize(source, tokenizer, cache_dir=tmp_path / "good")
    assert all_calls.num_calls > 4
    for num_good in {*range(0, all_calls.num_calls, 10), *range(all_calls.num_calls)[-6:]}:
        monkeypatch.setattr(durable_files, name, FailingCalls(call, code, num_good))
        with pytest.raises(StoreError, match=says) as caught:
            tokenize(source, tokenizer, cache_dir=tmp_path / "cache")
        assert str(caught.value.path) in str(caught.value)
        assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(durable_files, name, call)
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache")
    assert cache_files(tmp_path / "cache") == cache_files(tmp_path / "good")


def test_writes_that_stop_early_go_on(
    source: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(source, tokenizer, cache_dir=tmp_path / "good")
    monkeypatch.setattr(durable_files, "write", lambda fd, data: os.write(fd, data[:3]))
    tokenize(source, tokenizer, cache_dir=tmp_path / "cache")
    assert cache_files(tmp_path / "cache") == cache_files(tmp_path / "good")


def test_a_callback_that_raises_leaves_nothing_behind(
    source: Path, tmp_path: Path, tokenizer: Any
) -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(source, tokenizer, cache_dir=tmp_path / "cache", progress=interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_that_changes_while_it_is_read(
    source: Path, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(StoreError, match="changed while they were read"):
        tokenize(
            source, tokenizer, cache_dir=tmp_path / "cache", progress=lambda _: os.utime(source)
        )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_directory_that_cannot_be(source: Path, tokenizer: Any) -> None:
    with pytest.raises(StoreError, match="cannot be made"):
        tokenize(source, tokenizer, cache_dir=source)
    with pytest.raises(ValueError, match="num_workers"):
        tokenize(source, tokenizer, cache_dir=source, num_workers=0)


@pytest.mark.parametrize(("num_words", "id_bytes"), [(65_536, 2), (65_537, 4)])
def test_ids_are_as_wide_as_the_vocabulary_needs(
    tmp_path: Path, make_cache: Any, num_words: int, id_bytes: int
) -> None:
    core = Tokenizer(models.WordLevel({f"w{number}": number for number in range(num_words)}, "w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0")
    last = num_words - 1
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"w5 w{last}"}])
    cache = make_cache(path, using=tokenizer)
    assert [ids.tolist() for ids in documents(cache)] == [[5, last]]
    assert file_of(tmp_path / "cache", "ids").stat().st_size == 2 * id_bytes
    assert cache.pad_token_id == 0
