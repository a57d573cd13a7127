"""Each kind of file gives the same documents; what cannot be read is said with its place."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made_here import documents, texts, write_jsonl

from outcore.data import json_rows, raw_rows, text_rows
from outcore.data.json_rows import read_array, read_lines
from outcore.data.raw_rows import Unreadable
from outcore.data.sources import find_sources
from outcore.data.text_rows import read_text
from outcore.data.tokenize import tokenize
from outcore.errors import BadRow, MissingLibrary, StoreError

ROWS = [{"text": "the cat", "n": 1}, {"text": "naïve 🎉\nmat"}, {"text": "hello \u2028 world"}]
DOCUMENTS = [row["text"] + "<|end|>" for row in ROWS]  # type: ignore[operator]


def test_jsonl(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    cache = make_cache(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert texts(cache, tokenizer) == DOCUMENTS
    assert cache.report.num_rows == 3


def test_jsonl_as_windows_writes_it(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    assert texts(make_cache(path), tokenizer) == DOCUMENTS


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array(tmp_path: Path, make_cache: Any, tokenizer: Any, indent: int | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=indent))
    assert texts(make_cache(path), tokenizer) == DOCUMENTS


def test_json_that_is_lines(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    assert texts(make_cache(write_jsonl(tmp_path / "a.json", ROWS)), tokenizer) == DOCUMENTS


def test_parquet(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    many = ROWS * 200  # several groups of rows, and several batches
    columns = {"text": [row["text"] for row in many], "other": [b"\xff"] * len(many)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=90)
    cache = make_cache(tmp_path / "a.parquet")
    assert texts(cache, tokenizer) == DOCUMENTS * 200


def test_saved_dataset(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    datasets = pytest.importorskip("datasets")
    chosen = datasets.Dataset.from_list([{"text": row["text"]} for row in ROWS * 200])
    # Indices that differ from the order in the files must be followed.
    chosen.select(range(3, 600)).save_to_disk(str(tmp_path / "saved"))
    cache = make_cache(tmp_path / "saved")
    assert texts(cache, tokenizer) == DOCUMENTS * 199


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ('{"_data_files": [{"filename": "../outside/data-00000-of-00001.arrow"}]}', "no file in"),
        ('{"_data_files": [{"filename": "@/outside/data-00000-of-00001.arrow"}]}', "no file in"),
        ('{"_data_files": [{"filename": "pipe.arrow"}]}', "no file in"),
        ('{"_data_files": ["data-00000-of-00001.arrow"]}', "no file in"),
        ('{"_data_files": []}', "names no files"),
        ("[]", "names no files"),
        ('{"a":' * 100_000, "nested too deep"),
    ],
)
def test_a_saved_dataset_is_read_from_its_own_directory(
    tmp_path: Path, state: str, told: str
) -> None:
    """No file elsewhere is opened, and no pipe, which would wait for ever."""
    datasets = pytest.importorskip("datasets")
    for name in ("saved", "outside"):
        datasets.Dataset.from_list([{"text": name}]).save_to_disk(str(tmp_path / name))
    os.mkfifo(tmp_path / "saved" / "pipe.arrow")
    (tmp_path / "saved" / "state.json").write_text(state.replace("@", str(tmp_path)))
    (source,) = find_sources(tmp_path / "saved")
    (row,) = (row for batch in source.read(frozenset({"text"})) for row in batch.rows)
    assert isinstance(row.value, Unreadable)
    assert told in row.value.why


def test_saved_splits_are_named_one_by_one(tmp_path: Path, make_cache: Any) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"name one: .*/saved/test, .*/saved/train"):
        make_cache(tmp_path / "saved")
    assert make_cache(tmp_path / "saved" / "train").num_examples == 1


def test_text_files_of_a_directory(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"two\n\nparts\r\n")
    (folder / "a.txt").write_text("one")
    (folder / "more" / "c.txt").write_text("three")
    (folder / "more" / "empty.txt").write_text("")
    (folder / "notes.pdf").write_text("not read")
    cache = make_cache(folder)
    assert texts(cache, tokenizer) == ["one<|end|>", "two\n\nparts\r\n<|end|>", "three<|end|>"]
    assert cache.report.num_empty_rows == 1


def test_a_long_text_file_is_one_document(
    tmp_path: Path, make_cache: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_PART_BYTES", 16)
    monkeypatch.setattr(text_rows, "_MAX_PART_CHARACTERS", 40)
    text = "the cat sat\n" * 20 + "é" * 200 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    parts = [row.value for row, _ in read_text(tmp_path / "a.txt")]
    assert len(parts) > 10
    assert "".join(parts) == text  # type: ignore[arg-type]
    assert sum(size for _, size in read_text(tmp_path / "a.txt")) == len(text.encode())
    cache = make_cache(tmp_path / "a.txt")
    assert texts(cache, tokenizer) == [text + "<|end|>"]
    assert cache.first_counted.tolist() == [1]


def test_hidden_files_of_a_directory_are_not_read(
    tmp_path: Path, make_cache: Any, tokenizer: Any
) -> None:
    folder = tmp_path / "rows"
    for name in ("a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "b/._a.jsonl", "b/c.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [{"text": name}])
    assert texts(make_cache(folder), tokenizer) == ["a.jsonl<|end|>", "b/c.jsonl<|end|>"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.parquet"])
def test_a_file_that_the_disk_cannot_read_is_named(
    tmp_path: Path, make_cache: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_jsonl(tmp_path / name, [{"text": "hi"}])
    opened = Path.open

    def fails(self: Path, *args: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *args)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(StoreError, match=f"{name} cannot be read: Permission denied"):
        make_cache(path)


def test_several_files_in_the_order_given(tmp_path: Path, tokenizer: Any) -> None:
    second = write_jsonl(tmp_path / "a.jsonl", [{"text": "second"}])
    first = write_jsonl(tmp_path / "b.jsonl", [{"text": "first"}])
    cache = tokenize([first, second], tokenizer, cache_dir=tmp_path / "cache")
    assert texts(cache, tokenizer) == ["first<|end|>", "second<|end|>"]


def test_what_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").touch()
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"a\.pkl is none of the files"):
        find_sources(tmp_path / "a.pkl")
    with pytest.raises(ValueError, match="does not exist"):
        find_sources(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="no files of training data"):
        find_sources(tmp_path / "none")
    with pytest.raises(ValueError, match="no files of training data"):
        find_sources([])


@pytest.mark.parametrize("pattern", ["*.jsonl", "b?.jsonl", "[ab].jsonl", "**/*.jsonl"])
def test_a_pattern_is_told_from_a_name(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match=f"not filled in: name the directory {tmp_path}, or"):
        find_sources(tmp_path / pattern)
    (tmp_path / pattern).parent.mkdir(exist_ok=True)
    write_jsonl(tmp_path / pattern, ROWS)  # which is a name as well
    assert [source.path for source in find_sources(tmp_path / pattern)] == [tmp_path / pattern]


def test_a_compressed_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").touch()
    with pytest.raises(ValueError, match=r"decompress it first \(gzip -d .*/a\.jsonl\.gz\)"):
        find_sources(tmp_path / "a.jsonl.gz")
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is compressed"):  # not: b alone
        find_sources(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ROWS)  # where both are, it is no part of the data
    (tmp_path / "code.tar.gz").touch()
    assert [source.path.name for source in find_sources(tmp_path)] == ["a.jsonl", "b.jsonl"]


def test_an_id_of_the_hub_is_told_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"load_dataset\('HuggingFaceH4/ultrachat_200k'"):
        find_sources("HuggingFaceH4/ultrachat_200k")
    (tmp_path / "data").mkdir()
    for name in ("data/chats", "chats", "data/a.jsonl", "other/a.jsonl", "some/where/chats"):
        with pytest.raises(ValueError, match=r"does not exist$"):
            find_sources(name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (gzip.compress(b'{"text": "a"}'), "is compressed, whatever its name says: gzip -dc"),
        ('{"text": "a"}'.encode("utf-16"), "is UTF-16, .* iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff" + '{"text": "a"}'.encode("utf-16-be"), "is UTF-16, .* iconv"),
    ],
    # Named here: pytest would name them by their bytes, and gzip's have the time in them, which is
    # another one in each process that the tests run in.
    ids=["gzip", "UTF-16", "UTF-16, big-endian"],
)
def test_a_file_that_is_not_what_its_name_says(
    tmp_path: Path, make_cache: Any, name: str, data: bytes, why: str
) -> None:
    """Its first row is no bad one: --skip-bad-rows would not help."""
    (tmp_path / name).write_bytes(data)
    for on_bad_row in ("raise", "skip"):
        with pytest.raises(ValueError, match=rf"{name} {why}"):
            make_cache(tmp_path / name, on_bad_row=on_bad_row)


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_missing_library_is_named(
    tmp_path: Path, make_cache: Any, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibrary, match=f"pip install {library}"):
        make_cache(saved)


def test_an_old_pyarrow_is_refused(
    tmp_path: Path, make_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(pyarrow, "__version__", "14.0.0")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(MissingLibrary, match=r"pyarrow>=14\.0\.1"):
        make_cache(tmp_path / "a.parquet")


BAD_LINES = {
    "not JSON": (b'{"text": "a"', "is not JSON"),
    "two objects": (b'{"text": "a"} {}', "is not JSON"),
    "NaN": (b'{"text": "a", "n": NaN}', "is not JSON"),
    "a list": (b'["text"]', "must be an object, not a list"),
    "null": (b"null", "must be an object, not null"),
    "an object over lines": (b"{", "over several lines: a row is one line"),
    "no field": (b'{"body": "a"}', "has no text"),
    "a number": (b'{"text": 5}', "text must be text, not a number"),
    "null text": (b'{"text": null}', "text must be text, not null"),
    "latin-1": (b'{"text": "na\xefve"}', "is not UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "is not UTF-8"),
    "a NUL": (b'{"text": "a\\u0000b"}', "NUL"),
    "a raw NUL": (b'{"text": "a\x00b"}', "is not JSON"),
    "a lone surrogate": (b'{"text": "a\\ud800b"}', "surrogate"),
    "deep lists": (b'{"text": "a", "n": ' + b"[" * 100 + b"]" * 100 + b"}", "64 deep"),
    "wide lists": (b'{"text": "a", "n": [' + b"[]," * 7_000_000 + b"[]]}", "1.0 GiB of memory"),
    "very deep lists": (b'{"text": "a", "n": ' + b"[" * 200_000, "64 deep"),
    "many digits": (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "is not JSON"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, make_cache: Any, what: str, tokenizer: Any) -> None:
    line, why = BAD_LINES[what]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(BadRow, match=why) as caught:
        make_cache(path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert f"{path}, line 3: " in str(caught.value)
    cache = make_cache(path, on_bad_row="skip")
    assert texts(cache, tokenizer) == ["one<|end|>", "two<|end|>"]
    assert cache.report.num_bad_rows == 1
    ((bad_path, bad_line, bad_why),) = cache.report.first_bad_rows
    assert (bad_path, bad_line) == (str(path), 3)
    assert why in bad_why


@pytest.mark.parametrize("depth", [64, 65])
def test_the_depth_of_a_row(tmp_path: Path, make_cache: Any, depth: int) -> None:
    """The object itself is one of them."""
    nested: Any = 1
    for number in range(depth - 1):
        nested = [nested] if number % 2 else {"inner": nested}
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "n": nested}])
    if depth == 64:
        assert make_cache(path).num_examples == 1
    else:
        with pytest.raises(BadRow, match="nested more than 64 deep"):
            make_cache(path)


def test_brackets_in_a_string_are_not_deep(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    text = '[{"\\' * 100
    cache = make_cache(write_jsonl(tmp_path / "a.jsonl", [{"text": text, "n": [[[]]] * 50}]))
    assert texts(cache, tokenizer) == [text + "<|end|>"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_row_that_is_too_long(
    tmp_path: Path, make_cache: Any, monkeypatch: pytest.MonkeyPatch, name: str, tokenizer: Any
) -> None:
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(json_rows, "_CHUNK_BYTES", 50)
    rows = [{"text": "one"}, {"text": "x" * 300}, {"text": "two"}]
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / name
    path.write_text("\n".join(lines) if name == "a.jsonl" else "[" + ",\n".join(lines) + "]")
    with pytest.raises(BadRow, match="is longer than 64 B") as caught:
        make_cache(path)
    assert caught.value.line == 2
    cache = make_cache(path, on_bad_row="skip")
    assert texts(cache, tokenizer) == ["one<|end|>", "two<|end|>"]


def test_a_row_of_exactly_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 20)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 20 + b"\n" + b"y" * 20 + b"\n" + b"z" * 20)
    values = [row.value for row, _ in read_lines(tmp_path / "a.jsonl")]
    assert values == [b"x" * 20, b"y" * 20, b"z" * 20]


BAD_ARRAYS = {
    '[{"text": "a"},\n{"text": "b"}': (2, "ends before its array"),
    '[{"text": "a"},\n{"text": "b}]': (2, "ends before its array"),
    '[{"text": "a"},\n\n]': (3, "nothing stands between"),
    '[{"text": "a"},\n,{"text": "b"}]': (2, "nothing stands between"),
    '[{"text": "a"},\n{"text": 1}, 5]': (2, "text must be text"),
    '[{"text": "a"},\n 5]': (2, "must be an object"),
    '[{"text": "a"},\n {"text": "b"] ]': (2, "is not JSON"),
    '[{"text": "a"}]\n, {"text": "b"}': (2, "more follows"),
    '[{"text": "a"}]\n[{"text": "b"}]': (2, "more follows"),
}


@pytest.mark.parametrize("text", BAD_ARRAYS)
def test_a_bad_array(tmp_path: Path, make_cache: Any, text: str) -> None:
    line, why = BAD_ARRAYS[text]
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BadRow, match=why) as caught:
        make_cache(path)
    assert caught.value.line == line


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.text('\\"[,a', max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    rows=st.lists(json_values, max_size=6),
    indent=st.sampled_from([None, 1]),
    chunk_bytes=st.integers(1, 40),
)
def test_arrays_are_cut_as_json_says(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None, chunk_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK_BYTES", chunk_bytes)
        found = [row.value for row, _ in read_array(path)]
    assert not any(isinstance(value, Unreadable) for value in found)
    assert [json.loads(value) for value in found] == rows  # type: ignore[arg-type]


BAD_TEXTS = {
    "latin-1": (b"one\ntwo\nna\xefve", 3, "is not UTF-8"),
    "cut": ("one\nnaïve 🎉".encode()[:-1], 2, "is not UTF-8"),
    "binary": (b"one\ntw\0o", 2, "NUL"),
}


@pytest.mark.parametrize("what", BAD_TEXTS)
@pytest.mark.parametrize("part_bytes", [4, 1000])
def test_a_bad_text_file_is_left_out_in_full(
    tmp_path: Path,
    make_cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    part_bytes: int,
    tokenizer: Any,
) -> None:
    monkeypatch.setattr(text_rows, "_PART_BYTES", part_bytes)
    data, line, why = BAD_TEXTS[what]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_bytes(data)
    (folder / "b.txt").write_text("good")
    with pytest.raises(BadRow, match=why) as caught:
        make_cache(folder)
    assert caught.value.line == line
    cache = make_cache(folder, on_bad_row="skip")
    assert texts(cache, tokenizer) == ["good<|end|>"]


def test_a_damaged_parquet_file(tmp_path: Path, make_cache: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["the cat"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadRow, match="cannot be read"):
        make_cache(path)


def test_a_parquet_file_with_two_columns_of_one_name(tmp_path: Path, make_cache: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [pyarrow.array(["the cat"]), pyarrow.array(["the mat"])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadRow, match=r'line 1: cannot be read: .*"text" exists 2 times'):
        make_cache(tmp_path / "a.parquet")


def test_rows_behind_the_damage_of_a_parquet_file_are_told(tmp_path: Path, make_cache: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"the cat {n}" for n in range(1000)]})
    parquet.write_table(table, path, row_group_size=500, compression="snappy", use_dictionary=False)
    data = bytearray(path.read_bytes())
    start = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    data[start : start + 64] = b"\xff" * 64
    path.write_bytes(data)
    cache = make_cache(path, on_bad_row="skip")
    (_, line, why), *_ = cache.report.first_bad_rows
    assert line == cache.num_examples + 1
    assert f"nor can the {1000 - line} rows after it" in why


def test_bad_rows_of_a_table(tmp_path: Path, make_cache: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = ["a"] * 299 + [None] + ["b"]
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(BadRow, match="text must be text, not null") as caught:
        make_cache(tmp_path / "a.parquet")
    assert caught.value.line == 300


def test_lines_are_counted_across_batches(
    tmp_path: Path, make_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_rows, "_BATCH_ROWS", 7)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 50 + [{"text": 1}])
    with pytest.raises(BadRow) as caught:
        make_cache(path)
    assert caught.value.line == 51
    assert len(documents(make_cache(path, on_bad_row="skip"))) == 50


def test_no_row_that_can_be_used(tmp_path: Path, make_cache: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('nonsense\n{"text": ""\n')
    why = r"no row of 2 can be used \(2 bad, 0 empty\); .*a\.jsonl, line 1: is not JSON"
    with pytest.raises(ValueError, match=why):
        make_cache(path, on_bad_row="skip")
    path.write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"no row of 1 can be used \(0 bad, 1 empty\)$"):
        make_cache(path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_pipe_is_no_file_of_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl is no ordinary file"):
        find_sources(tmp_path / "a.jsonl")
