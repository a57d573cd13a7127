"""What the fields of a row mean, and what is wrong with those that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_made_here import (
    CHATML,
    CHATML_WITH_TOOLS,
    chat,
    counted,
    make_tokenizer,
    texts,
    write_jsonl,
)

from outcore.data.row_format import Chat, Pair, Text, example_of, find_row_format
from outcore.errors import BadRow, UnknownFormat

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
EXPECTED = Chat((USER, ANSWER), first_counted=1)

ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"text": "hi"}, Text("hi")),
    "prompt-completion": ({"prompt": "hi", "completion": "hello"}, EXPECTED),
    "alpaca": (
        {"instruction": "hi", "input": "you", "output": "hello"},
        Chat(({"role": "user", "content": "hi\n\nyou"}, ANSWER), first_counted=1),
    ),
    "messages": ({"messages": [USER, ANSWER]}, Chat((USER, ANSWER))),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        Chat((USER, ANSWER)),
    ),
    "preference": (
        {"prompt": "hi", "chosen": "hello", "rejected": "go away"},
        Pair(EXPECTED, Chat((USER, {"role": "assistant", "content": "go away"}), first_counted=1)),
    ),
}


@pytest.mark.parametrize("row_format", ROWS)
def test_each_format_is_found_and_understood(row_format: Any) -> None:
    row, expected = ROWS[row_format]
    assert find_row_format({**row, "id": 7}) == row_format
    assert example_of(row, row_format) == expected


@pytest.mark.parametrize("row_format", ROWS)
def test_each_field_is_needed(row_format: Any) -> None:
    row, _ = ROWS[row_format]
    for field in row:
        less = {name: value for name, value in row.items() if name != field}
        if field == "input":
            assert example_of(less, row_format) == EXPECTED
        else:
            with pytest.raises(ValueError, match=f"has no {field}"):
                example_of(less, row_format)


def test_chats_count_more_than_other_fields() -> None:
    row = {"text": "t", "prompt": "p", "completion": "c", "messages": [USER, ANSWER]}
    assert find_row_format(row) == "messages"
    assert find_row_format({**row, "chosen": "a", "rejected": "b"}) == "preference"


@pytest.mark.parametrize("row_format", ROWS)
@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_answers_labelled_good_or_bad_are_not_learned_as_they_are(
    row_format: Any, label: bool, name: str
) -> None:
    row, expected = ROWS[row_format]
    labelled = {**row, name: label}
    if row_format in ("text", "preference"):
        assert example_of(labelled, row_format) == expected
    else:
        with pytest.raises(ValueError, match=rf"{name} .*unpaired preferences \(KTO\) are not"):
            example_of(labelled, row_format)
        assert example_of({**row, name: 1}, row_format) == expected  # of what kind it is, perhaps


def test_a_table_of_labelled_answers(tmp_path: Path, make_cache: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": ["a"], "completion": ["b"], "label": [False]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadRow, match="unpaired preferences"):
        make_cache(tmp_path / "a.parquet")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_turn_that_is_not_to_be_learned(mark: Any) -> None:
    expected = Chat((USER, ANSWER, USER, ANSWER), not_learned=frozenset({1}))
    learned = {"weight": 1} if "weight" in mark else {"train": True}
    turns = [USER, {**ANSWER, **mark}, {**USER, **mark}, {**ANSWER, **learned}]
    assert example_of({"messages": turns}, "messages") == expected
    assert example_of({"conversations": turns}, "sharegpt") == expected
    spoken = [
        {**turn, **more} for turn, more in zip(TURNS * 2, [{}, mark, {}, learned], strict=True)
    ]
    assert example_of({"conversations": spoken}, "sharegpt") == expected
    row = {"prompt": "hi", "completion": turns[1:]}
    assert example_of(row, "prompt-completion") == Chat(
        (USER, ANSWER, USER, ANSWER), first_counted=1, not_learned=frozenset({1})
    )


def test_an_alpaca_row_without_input() -> None:
    for nothing in ("", None):
        row = {"instruction": "hi", "input": nothing, "output": "hello"}
        assert example_of(row, "alpaca") == EXPECTED


SYSTEM = {"role": "system", "content": "be good"}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


@pytest.mark.parametrize("told", ["be good", "", None])
@pytest.mark.parametrize("row_format", [name for name in ROWS if name != "text"])
def test_a_system_text_beside_the_turns(row_format: Any, told: str | None) -> None:
    row, without = ROWS[row_format]
    before = (SYSTEM,) if told else ()

    def with_system(chat: Chat) -> Chat:
        first = chat.first_counted and chat.first_counted + len(before)
        return Chat((*before, *chat.messages), first)

    expected = (
        Pair(with_system(without.chosen), with_system(without.rejected))
        if isinstance(without, Pair)
        else with_system(without)
    )
    assert example_of({**row, "system": told}, row_format) == expected


def test_a_system_text_that_is_the_first_turn_as_well_counts_once() -> None:
    turns = [{"from": "system", "value": "be good"}, *TURNS]
    row: dict[str, Any] = {"conversations": turns, "system": "be good"}
    assert example_of(row, "sharegpt") == Chat((SYSTEM, USER, ANSWER))
    row = {"messages": [SYSTEM, USER, ANSWER], "system": "be good"}
    assert example_of(row, "messages") == Chat((SYSTEM, USER, ANSWER))
    whole = [SYSTEM, USER, ANSWER]
    row = {"prompt": [SYSTEM, USER], "chosen": whole, "rejected": whole, "system": "be good"}
    pair = Pair(Chat((SYSTEM, USER, ANSWER), 2), Chat((SYSTEM, USER, ANSWER), 2))
    assert example_of(row, "preference") == pair
    for name in ("prompt", "system"):
        assert example_of({**row, name: None}, "preference") == pair
    row = {
        "prompt": "hi",
        "chosen": [USER, ANSWER],
        "rejected": [USER, ANSWER],
        "system": "be good",
    }
    assert example_of(row, "preference") == pair


@pytest.mark.parametrize("nothing", [[], None])
def test_an_alpaca_row_with_turns_before_it(nothing: Any) -> None:
    row = {"instruction": "hi", "output": "hello", "history": [["hi", "hello"], ["hi", "hello"]]}
    asked = (USER, ANSWER, USER, ANSWER, USER)
    assert example_of(row, "alpaca") == Chat((*asked, ANSWER), first_counted=5)
    assert example_of({**row, "history": nothing}, "alpaca") == EXPECTED


def test_conversations_of_roles_and_contents() -> None:
    nulls = {"from": None, "value": None}
    row = {"conversations": [{**USER}, {**ANSWER, **nulls}]}
    assert example_of(row, "sharegpt") == Chat((USER, ANSWER))


def test_a_cache_has_the_system_text_of_a_file(tmp_path: Path, make_cache: Any) -> None:
    row = {"conversations": TURNS, "system": "be good"}
    tokenizer = make_tokenizer(CHATML)
    cache = make_cache(write_jsonl(tmp_path / "a.jsonl", [row]), using=tokenizer)
    assert "be good" in texts(cache, tokenizer)[0]


@pytest.mark.parametrize("prompt", ["hi", [USER]])
@pytest.mark.parametrize("answer", ["hello", [ANSWER], [USER, ANSWER]])
def test_pairs_as_text_or_as_messages(prompt: Any, answer: Any) -> None:
    row = {"prompt": prompt, "chosen": answer, "rejected": answer}
    assert example_of(row, "preference") == Pair(EXPECTED, EXPECTED)


OTHER = {"role": "assistant", "content": "go away"}


@pytest.mark.parametrize("before", [(), (USER,), (SYSTEM, USER), (USER, ANSWER, USER)])
@pytest.mark.parametrize("prompt", [None, "hi", "all of it"])
def test_pairs_of_whole_chats(before: Any, prompt: Any) -> None:
    row: dict[str, Any] = {"chosen": [*before, ANSWER], "rejected": [*before, OTHER]}
    if prompt == "all of it" and before:
        row["prompt"] = list(before)
    elif prompt == "hi" and before:
        row["prompt"] = prompt  # the last turn of the prompt alone
    assert find_row_format(row) == "preference"
    first = len(before)
    assert example_of(row, "preference") == Pair(
        Chat((*before, ANSWER), first_counted=first), Chat((*before, OTHER), first_counted=first)
    )


def test_pairs_as_llama_factory_has_them() -> None:
    """The question is in the fields of another format, an answer one message."""
    chosen, rejected = {"from": "gpt", "value": "hello"}, OTHER
    pair = Pair(Chat((SYSTEM, USER, ANSWER), 2), Chat((SYSTEM, USER, OTHER), 2))
    asked = {"conversations": TURNS[:1], "system": "be good"}
    row: dict[str, Any] = {**asked, "chosen": chosen, "rejected": rejected}
    assert find_row_format(row) == "preference"
    assert example_of(row, "preference") == pair
    row = {"instruction": "hi", "input": "", "system": "be good", "chosen": "hello"}
    assert example_of({**row, "rejected": "go away"}, "preference") == pair
    row = {"prompt": [SYSTEM, USER], "instruction": "?", "chosen": chosen, "rejected": rejected}
    assert example_of(row, "preference") == pair
    whole = {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, OTHER]}
    assert example_of({**whole, "instruction": "?"}, "preference") == pair


def test_nulls_that_a_table_puts_into_messages() -> None:
    row = {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "name": None}]}
    assert example_of(row, "messages") == Chat((USER, ANSWER))


def test_contents_in_parts() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo", "image_url": None}]
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    assert example_of(row, "messages") == Chat((USER, ANSWER))
    image = {"type": "image_url", "image_url": {"url": "x"}, "text": None}
    for other, why in ((image, "is no text"), ("hi", "is no text"), ({"text": 3}, "must be text")):
        row = {"messages": [USER, {"role": "assistant", "content": [parts[0], other]}]}
        with pytest.raises(ValueError, match=rf"messages\[1\]\.content\[1\].* {why}"):
            example_of(row, "messages")


def test_an_empty_list_of_calls_is_no_call() -> None:
    row = {"messages": [USER, {**ANSWER, "tool_calls": []}]}
    assert example_of(row, "messages") == Chat((USER, ANSWER))
    with pytest.raises(ValueError, match="content must be text"):
        example_of({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "messages")


def test_a_call_of_a_tool_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    example = example_of({"messages": [USER, call]}, "messages")
    assert example == Chat((USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}))


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("row_format", ROWS)
def test_the_tools_of_a_row(row_format: Any) -> None:
    row, expected = ROWS[row_format]
    for nothing in (None, [], "", " ", "[]"):
        assert example_of({**row, "tools": nothing}, row_format) == expected
    flat = TOOL["function"]
    for tools in ([TOOL], json.dumps([TOOL]), [flat], [{"type": "function", **flat}]):
        example = example_of({**row, "tools": tools}, row_format)
        if isinstance(example, Text):
            assert example == expected
        else:
            chats = (example.chosen, example.rejected) if isinstance(example, Pair) else [example]
            assert [chat.tools for chat in chats] == [(TOOL,)] * len(chats)


BAD = {
    "tools that are names": ({"messages": [USER, ANSWER], "tools": ["add"]}, "a list of objects"),
    "tools that are no JSON": ({"messages": [USER, ANSWER], "tools": "add"}, "tools is not JSON"),
    "deep tools": (
        {"messages": [USER, ANSWER], "tools": "[" * 100 + "]" * 100},
        "tools is nested more than 64 deep",
    ),
    "surrogate in a tool": ({"messages": [USER, ANSWER], "tools": [{"a": "\ud800"}]}, "surrogate"),
    "messages is no list": ({"messages": "hi"}, "messages must be a list"),
    "no messages": ({"messages": []}, "messages is empty"),
    "a message is no object": ({"messages": [USER, "hello"]}, r"messages\[1\] must be an object"),
    "no role": ({"messages": [{"content": "hi"}]}, r"messages\[0\]\.role must be text"),
    "unknown role": ({"messages": [{"role": "robot", "content": ""}]}, "role is 'robot'"),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\]\.content"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "is no text, and other",
    ),
    "no answer": ({"messages": [USER]}, "no turn of the assistant"),
    "no answer that is learned": (
        {"messages": [USER, {**ANSWER, "weight": 0}]},
        r"no turn of the assistant that is learned \(weight 0",
    ),
    "no answer to a prompt that is learned": (
        {"prompt": "hi", "completion": [{**ANSWER, "train": False}]},
        r"no turn of the assistant that is learned .* after the prompt",
    ),
    "half a weight": (
        {"messages": [USER, {**ANSWER, "weight": 0.5}]},
        r"messages\[1\]\.weight is 0\.5: .* nothing between",
    ),
    "train is text": (
        {"conversations": [{"from": "gpt", "value": "hello", "train": "no"}]},
        r"conversations\[0\]\.train must be true or false, not text",
    ),
    "a question that is to be learned": (
        {"conversations": [{"from": "human", "value": "hi", "train": True}, TURNS[1]]},
        "train is true, of a turn of the user",
    ),
    "surrogate in a message": (
        {"messages": [USER, {**ANSWER, "reasoning": ["\ud800"]}]},
        "surrogate",
    ),
    "unknown speaker": ({"conversations": [{"from": "dog", "value": "wau"}]}, "from is 'dog'"),
    "two system texts": (
        {"conversations": [{"from": "system", "value": "a"}, *TURNS], "system": "b"},
        "another one as its first turn",
    ),
    "a system that is no text": ({"conversations": TURNS, "system": 7}, "system must be text"),
    "a history of texts": (
        {"instruction": "hi", "output": "hello", "history": ["hi"]},
        r"history\[0\] must be a list of two",
    ),
    "a history that is no list": (
        {"instruction": "hi", "output": "hello", "history": "hi"},
        "history must be a list",
    ),
    "an unknown role in conversations": (
        {"conversations": [{"role": "dog", "content": "wau"}]},
        "role is 'dog'",
    ),
    "no value": ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\]\.value"),
    "chosen without an answer": (
        {"prompt": "hi", "chosen": [USER], "rejected": "a"},
        "chosen has no turn of the assistant after the prompt",
    ),
    "chosen is a question": (
        {"conversations": TURNS[:1], "chosen": TURNS[0], "rejected": TURNS[1]},
        "chosen has no turn of the assistant",
    ),
    "pairs of text without a prompt": ({"chosen": "a", "rejected": "b"}, "has no prompt"),
    "an answer that asks something else": (
        {"prompt": "hi", "completion": [{**USER, "content": "hi "}, ANSWER]},
        "starts with a turn of the user",
    ),
    "an answer that begins with another system": (
        {"prompt": "hi", "chosen": [{"role": "system", "content": ""}, ANSWER], "rejected": "b"},
        "starts with a turn of the system",
    ),
    "a prompt that is null": (
        {"prompt": None, "completion": "a"},
        "prompt must be text or a list of messages, not null",
    ),
    "rejected is a number": ({"prompt": "hi", "chosen": "a", "rejected": 1}, "rejected must be"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_row_that_means_nothing(tmp_path: Path, make_cache: Any, what: str) -> None:
    row, why = BAD[what]
    with pytest.raises(BadRow, match=why):
        make_cache(write_jsonl(tmp_path / "a.jsonl", [row]))


def test_the_first_row_decides(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": [USER, ANSWER]}])
    with pytest.raises(BadRow, match=r"has no text, .* row of 'messages'; a file has") as caught:
        make_cache(path)
    assert caught.value.line == 2
    path.write_text("nonsense\n" + json.dumps({"messages": [USER, ANSWER]}))
    cache = make_cache(path, on_bad_row="skip")
    assert cache.row_format == "messages"
    assert texts(cache, tokenizer) == ["hi\nhello<|end|>"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_file_has_a_format_of_its_own(
    tmp_path: Path, make_cache: Any, tokenizer: Any, num_workers: int
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}])
    write_jsonl(tmp_path / "b.jsonl", [{"instruction": "sum", "output": "3"}] * 2)
    (tmp_path / "c.jsonl").write_text("")
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "to", "completion": "gether"}])
    cache = make_cache(tmp_path, num_workers=num_workers)
    assert cache.row_format == "messages"
    expected = ["hi\nhello<|end|>", "sum\n3<|end|>", "sum\n3<|end|>", "to\ngether<|end|>"]
    assert texts(cache, tokenizer) == expected


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "texts"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pairs"),
    ],
)
def test_kinds_are_not_mixed(tmp_path: Path, make_cache: Any, row: Any, kind: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}])
    write_jsonl(tmp_path / "b.jsonl", [row])
    for on_bad_row in ("raise", "skip"):
        with pytest.raises(UnknownFormat, match=rf"has {kind}, and the files .* chats") as caught:
            make_cache(tmp_path, on_bad_row=on_bad_row)
        assert caught.value.path == str(tmp_path / "b.jsonl")


def test_a_first_row_of_no_format_in_a_later_file(
    tmp_path: Path, make_cache: Any, tokenizer: Any
) -> None:
    """One bad row, as any other: its file has the format of those before it."""
    write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}])
    write_jsonl(tmp_path / "b.jsonl", [{"nothing": 1}, {"messages": [USER, ANSWER]}])
    with pytest.raises(BadRow, match="has no messages") as caught:
        make_cache(tmp_path)
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "b.jsonl"), 1)
    cache = make_cache(tmp_path, on_bad_row="skip")
    assert texts(cache, tokenizer) == ["hi\nhello<|end|>"] * 2
    assert cache.report.num_bad_rows == 1


def test_a_named_format(tmp_path: Path, make_cache: Any, tokenizer: Any) -> None:
    row = {"text": "a text", "messages": [USER, ANSWER]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert texts(make_cache(path, row_format="text"), tokenizer) == ["a text<|end|>"]
    with pytest.raises(BadRow, match="has no prompt and no completion"):
        make_cache(path, row_format="prompt-completion")
    with pytest.raises(ValueError, match="row_format must be one of"):
        make_cache(path, row_format="csv")


def test_fields_of_no_format(tmp_path: Path, make_cache: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    for on_bad_row in ("raise", "skip"):
        with pytest.raises(BadRow, match=r"the fields \(answer, question\) are those of no format"):
            make_cache(path, on_bad_row=on_bad_row)


def test_columns_of_no_format(tmp_path: Path, make_cache: Any) -> None:
    """Most of them are not read, and told all the same."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for row in ({"question": "a", "answer": "b"}, {"prompt": "a", "response": "b", "tools": "[]"}):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        told = rf"the fields \({', '.join(sorted(row))}\) .* Rename .* to prompt and completion"
        with pytest.raises(BadRow, match=told):
            make_cache(tmp_path / "a.parquet")


def test_a_parquet_file_of_chats(tmp_path: Path, make_cache: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [1], "messages": [chat("hi", "hello", "and", "bye")]})
    parquet.write_table(table, tmp_path / "a.parquet")
    tokenizer = make_tokenizer(CHATML)
    cache = make_cache(tmp_path / "a.parquet", using=tokenizer)
    assert counted(cache, tokenizer) == ["hello<|im_end|>\n", "bye<|im_end|>\n"]


def test_a_table_of_calls_says_what_lines_of_json_say(tmp_path: Path, make_cache: Any) -> None:
    """Each tool has arguments of its own, and a table has a column for all of them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [USER, {**ANSWER, "tool_calls": [{"arguments": {name: "x"}}]}]}
        for name in ("city", "query")
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    calls = "{{ message['tool_calls'] | tojson if message['tool_calls'] else '' }}"
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", f"{calls}<|im_end|>"))
    table = make_cache(tmp_path / "a.parquet", using=tokenizer)
    lines = make_cache(write_jsonl(tmp_path / "a.jsonl", rows), using=tokenizer)
    assert texts(table, tokenizer) == texts(lines, tokenizer)
    assert '{"city": "x"}' in texts(table, tokenizer)[0]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tools_reach_the_template_or_are_told(
    tmp_path: Path, make_cache: Any, num_workers: int
) -> None:
    pair = {"prompt": "hi", "chosen": "hello", "rejected": "no", "tools": [TOOL]}
    chats = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "tools": [TOOL]}]
    tokenizer = make_tokenizer(CHATML_WITH_TOOLS)
    without = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    chat_file = write_jsonl(tmp_path / "a.jsonl", chats)
    cache = make_cache(chat_file, using=tokenizer, num_workers=num_workers)
    assert texts(cache, tokenizer) == [without, f"{json.dumps([TOOL])}\n{without}"]
    assert counted(cache, tokenizer, 1) == ["hello<|im_end|>\n"]
    assert cache.report.num_rows_without_tools == 0
    pair_file = write_jsonl(tmp_path / "b.jsonl", [pair])
    for template in (None, CHATML):
        tokenizer = make_tokenizer(template)
        for file in (chat_file, pair_file):
            cache = make_cache(file, using=tokenizer, num_workers=num_workers)
            assert cache.report.num_rows_without_tools == 1
