"""What a row means: its fields become a text, a chat, or a pair of chats to choose from.

The format is named, or found from the fields of a file's first row; every other row of the file
must then have it, and all files formats of one kind. Fields that a format does not have are not
looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from outcore.data.checked_json import checked_values, parse_value, text_of
from outcore.data.raw_rows import RowFault
from outcore.data.turns import MARKS, Message, conversation_of, list_of, messages_of, turn_of

RowFormat = Literal["text", "prompt-completion", "alpaca", "messages", "sharegpt", "preference"]
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)

_KINDS: dict[RowFormat, str] = {"text": "texts", "preference": "preference pairs"}

# Where a row has the fields of several, the first counts: many rows of chats also have a prompt.
_FIELDS: dict[RowFormat, tuple[str, ...]] = {
    # And a prompt, or the question of another format, where they do not begin with it.
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
# With which an answer may be a bad one: the names of TRL and of LLaMA-Factory.
_LABELS = ("label", "kto_tag")
_MORE_FIELDS = {"input", "system", "history", "tools", *_LABELS}  # that some rows have
ALL_FIELDS = frozenset(field for fields in _FIELDS.values() for field in fields) | _MORE_FIELDS


@dataclass(frozen=True)
class Text:
    """A document of which every token counts."""

    text: str


@dataclass(frozen=True)
class Chat:
    """Messages of which the assistant's count, from number ``first_counted`` on."""

    messages: tuple[Message, ...]
    first_counted: int = 0
    not_learned: frozenset[int] = frozenset()  # answers that the row says are context alone
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call, for the template


@dataclass(frozen=True)
class Pair:
    """Two ends of one chat, the better one first."""

    chosen: Chat
    rejected: Chat


Example = Text | Chat | Pair


def find_row_format(row: Mapping[str, Any]) -> RowFormat:
    """Return the format whose fields the row has."""
    for row_format, fields in _FIELDS.items():
        if all(field in row for field in fields):
            return row_format
    known = "; ".join(" + ".join(fields) for fields in _FIELDS.values())
    found = ", ".join(sorted(map(str, row))) or "none"
    raise RowFault(
        f"the fields ({found}) are those of no format. The formats have: {known}. Rename a "
        "question and its answer to prompt and completion, a chat to messages"
    )


def kind_of(row_format: RowFormat) -> str:
    """Return what rows of the format become: kinds are not trained in one run."""
    return _KINDS.get(row_format, "chats")


def example_of(row: Mapping[str, Any], row_format: RowFormat) -> Example:
    """Return what the row means in this format, or raise a RowFault."""
    missing = [field for field in _FIELDS[row_format] if field not in row]
    if missing:
        why = f"has no {' and no '.join(missing)}, which the format {row_format!r} needs"
        with contextlib.suppress(RowFault):  # of no format at all
            why += f" (it is a row of {find_row_format(row)!r}; a file has rows of one format)"
        raise RowFault(why)
    if row_format == "text":
        return Text(text_of(row["text"], "text"))
    tools = _tools(row.get("tools"))
    if row_format == "preference":
        pair = _pair(row)
        return Pair(replace(pair.chosen, tools=tools), replace(pair.rejected, tools=tools))
    _refuse_labels(row)
    return replace(_chat_of(row, row_format), tools=tools)


def _chat_of(row: Mapping[str, Any], row_format: RowFormat) -> Chat:
    system = row.get("system")
    if row_format == "messages":
        return _whole_chat(_with_system(system, messages_of(row["messages"], "messages")))
    if row_format == "sharegpt":
        return _whole_chat(_with_system(system, conversation_of(row["conversations"])))
    if row_format == "prompt-completion":
        return _answered(_prompt(row["prompt"]), row["completion"], "completion", system)
    assert row_format == "alpaca"
    return _answered(_alpaca_prompt(row), text_of(row["output"], "output"), "output", system)


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row, which many have as JSON in a text: tables want one type each."""
    if isinstance(value, str):
        try:
            value = parse_value(text_of(value, "tools").encode()) if value.strip() else None
        except RowFault as fault:
            raise RowFault(
                f"tools {fault}. It is a list of objects, or such a list as JSON; what it is else, "
                "belongs in another field"
            ) from None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault(
            "tools must be a list of objects, or such a list as JSON in a text. What it is else, "
            "belongs in another field"
        )
    checked_values(value, "tools")
    return tuple(map(_as_function, value))


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates look for it; many rows have what is inside alone."""
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    inside = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": inside}


def _refuse_labels(row: Mapping[str, Any]) -> None:
    """Refuse a chat that is said to be good or bad: as a plain chat, bad answers were learned."""
    for name in _LABELS:
        if isinstance(row.get(name), bool):
            raise RowFault(
                f"has a {name} that is true or false, and unpaired preferences (KTO) are not "
                f"trained. Keep the rows where it is true, without the field {name}, or give "
                "pairs of chosen and rejected"
            )


def _pair(row: Mapping[str, Any]) -> Pair:
    """Return a pair; where both are chats, all turns that they share may be the prompt."""
    chosen, rejected = row["chosen"], row["rejected"]
    is_answer = isinstance(chosen, (str, dict)) or isinstance(rejected, (str, dict))
    asked: tuple[Message, ...] = ()
    if row.get("prompt") is not None:
        asked = _prompt(row["prompt"])
    elif is_answer:
        asked = _question(row)
    shared = () if is_answer else _shared_turns(chosen, rejected)
    if shared[len(shared) - len(asked) :] == asked:  # the prompt may name the last turn alone
        asked = shared
    system = row.get("system")
    return Pair(
        _answered(asked, chosen, "chosen", system), _answered(asked, rejected, "rejected", system)
    )


def _question(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return what is asked in the fields of another format, where LLaMA-Factory has it."""
    if row.get("conversations") is not None:
        return conversation_of(row["conversations"])
    if row.get("instruction") is not None:
        return _alpaca_prompt(row)
    raise RowFault("has no prompt: without one, chosen and rejected must be lists of messages")


def _shared_turns(chosen: object, rejected: object) -> tuple[Message, ...]:
    chats = messages_of(chosen, "chosen"), messages_of(rejected, "rejected")
    # Of two chats that are alike, the last turn is still an answer.
    most = min(map(len, chats)) - 1
    shared = next((i for i in range(most) if chats[0][i] != chats[1][i]), most)
    return chats[0][:shared]


def _whole_chat(messages: tuple[Message, ...]) -> Chat:
    if not any(map(_is_learned, messages)):
        raise RowFault(f"has no turn of the assistant{_of_those(messages)}, so nothing to learn")
    return _chat(messages)


def _chat(messages: tuple[Message, ...], first_counted: int = 0) -> Chat:
    """Return a chat; what its turns say about being learned is no part of them."""
    return Chat(
        tuple({k: v for k, v in message.items() if k not in MARKS} for message in messages),
        first_counted,
        frozenset(
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and not _is_learned(message)
        ),
    )


def _is_learned(message: Message) -> bool:
    is_left_out = message.get("weight", 1) == 0 or message.get("train") is False
    return message["role"] == "assistant" and not is_left_out


def _of_those(messages: tuple[Message, ...]) -> str:
    """Return why none of the answers is learned, where there are some."""
    has_answers = any(message["role"] == "assistant" for message in messages)
    return " that is learned (weight 0, or train false)" if has_answers else ""


def _answered(prompt: tuple[Message, ...], value: object, field: str, system: object) -> Chat:
    """Return the prompt with its answer: a text, a message, or those after or with the prompt.

    system: what a field of the row tells the system, if anything.
    """
    if isinstance(value, str):
        value = {"role": "assistant", "content": text_of(value, field)}
    if isinstance(value, dict):
        answer: tuple[Message, ...] = (turn_of(value, field),)
    else:
        answer = messages_of(value, field)
        if answer[: len(prompt)] == prompt:
            answer = answer[len(prompt) :]
    if not any(map(_is_learned, answer)):
        raise RowFault(f"{field} has no turn of the assistant{_of_those(answer)} after the prompt")
    if prompt and _asks_again(prompt[-1], answer[0]):
        raise RowFault(
            f"{field} starts with a turn of the {answer[0]['role']} and does not repeat the "
            "prompt as it is: which turns are the prompt cannot be told"
        )
    asked = _with_system(system, prompt)
    return _chat((*asked, *answer), len(asked))


def _asks_again(last: Message, first: Message) -> bool:
    """Whether two turns that meet are no prompt and its answer; a lone system turn may be one."""
    asking = ("system", "developer", "user") if last["role"] == "user" else ("system", "developer")
    return first["role"] in asking


def _prompt(value: object) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": text_of(value, "prompt")},)
    return messages_of(value, "prompt")


def _alpaca_prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    text = text_of(row["instruction"], "instruction")
    more = row.get("input")
    if more is not None and text_of(more, "input"):
        text = f"{text}\n\n{more}"
    asked: Message = {"role": "user", "content": text}
    return (*_alpaca_history(row.get("history")), asked)


def _alpaca_history(value: object) -> Iterator[Message]:
    """Return the turns before the instruction, of a list of questions with their answers."""
    for index, pair in enumerate(list_of(value, "history") if value else ()):
        field = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowFault(f"{field} must be a list of two texts, a question and its answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            yield {"role": role, "content": text_of(text, field)}


def _with_system(value: object, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the turns behind what a field of the row tells the system, if anything."""
    if value is None or not text_of(value, "system"):
        return turns
    told: Message = {"role": "system", "content": value}
    if turns[:1] == (told,):
        return turns
    if turns and turns[0]["role"] == "system":
        raise RowFault("has a system text and another one as its first turn: which one counts?")
    return (told, *turns)
