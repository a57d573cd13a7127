"""The turns of a chat as rows have them: messages of role and content, or ShareGPT's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outcore.data.checked_json import checked_values, name_of, text_of
from outcore.data.raw_rows import RowFault

Message = dict[str, Any]

MARKS = ("weight", "train")  # of a turn: is it learned? OpenAI's name, and Axolotl's
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_TEXT_OR_MESSAGES = {"prompt", "completion", "chosen", "rejected"}


def messages_of(value: object, field: str) -> tuple[Message, ...]:
    return tuple(
        _plain_turn(message, f"{field}[{index}]")
        for index, message in enumerate(list_of(value, field))
    )


def _plain_turn(value: object, field: str) -> Message:
    if not isinstance(value, dict):
        raise RowFault(f"{field} must be an object with role and content")
    # Tables fill what a message does not have with nulls; a template must not see those.
    message = {key: inner for key, inner in value.items() if inner is not None}
    if message.get("tool_calls") == []:  # for some templates any list is a call
        del message["tool_calls"]
    role = text_of(message.get("role"), f"{field}.role")
    if role not in _ROLES:
        raise RowFault(f"{field}.role is {role[:40]!r}, and none of {', '.join(sorted(_ROLES))}")
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_parts(message["content"], f"{field}.content")
    if "content" in message or not message.get("tool_calls"):
        text_of(message.get("content"), f"{field}.content")
    checked_values(message, field)
    _check_marks(message, field)
    return message


def _text_of_parts(parts: list[object], field: str) -> str:
    """Return the text of a content in parts, as APIs have it, where all of them are texts."""
    texts = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type", "text") != "text" or "text" not in part:
            raise RowFault(f"{field}[{index}] is no text, and other parts are not trained")
        texts.append(text_of(part["text"], f"{field}[{index}].text"))
    return "".join(texts)


def _check_marks(message: Message, field: str) -> None:
    weight, train = message.get("weight", 1), message.get("train", False)
    if weight not in (0, 1):
        told = f"{field}.weight is {str(weight)[:40]}"
        raise RowFault(f"{told}: an answer is learned (1) or not (0), and nothing between")
    if not isinstance(train, bool):
        raise RowFault(f"{field}.train must be true or false, not {name_of(train)}")
    if train and message["role"] != "assistant":
        raise RowFault(
            f"{field}.train is true, of a turn of the {message['role']}: only those of the "
            "assistant are learned. Take it out"
        )


def conversation_of(value: object) -> tuple[Message, ...]:
    return tuple(
        turn_of(turn, f"conversations[{index}]")
        for index, turn in enumerate(list_of(value, "conversations"))
    )


def turn_of(turn: object, field: str) -> Message:
    if not isinstance(turn, dict):
        raise RowFault(f"{field} must be an object with from and value")
    if turn.get("from") is None and turn.get("role") is not None:  # of the other name's form
        return _plain_turn(turn, field)
    speaker = text_of(turn.get("from"), f"{field}.from")
    if speaker not in _SHAREGPT_ROLES:
        known = ", ".join(_SHAREGPT_ROLES)
        raise RowFault(f"{field}.from is {speaker[:40]!r}, and none of {known}")
    content = text_of(turn.get("value"), f"{field}.value")
    message: Message = {"role": _SHAREGPT_ROLES[speaker], "content": content}
    message |= {mark: turn[mark] for mark in MARKS if turn.get(mark) is not None}
    _check_marks(message, field)
    return message


def list_of(value: object, field: str) -> Sequence[object]:
    if not isinstance(value, list):
        text_or = "text or " if field in _TEXT_OR_MESSAGES else ""
        raise RowFault(f"{field} must be {text_or}a list of messages, not {name_of(value)}")
    if not value:
        raise RowFault(f"{field} is empty")
    return value
