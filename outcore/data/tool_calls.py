"""Calls of tools in a chat, in the form that its template writes.

Rows have the arguments of a call as an object, or as JSON in a text (OpenAI's way). Most templates
write objects, and texts with a second pair of quotes around them; some take texts alone. And a call
without words is for some a turn without content, for others one with none, or an empty one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outcore.data.chat_template import ChatTemplate
from outcore.data.checked_json import checked_values, parse_value
from outcore.data.raw_rows import RowFault
from outcore.data.row_format import Chat
from outcore.data.turns import Message
from outcore.errors import UnsupportedTemplate

Call = dict[str, Any]


def form_for(template: ChatTemplate, chat: Chat) -> Chat:
    """Return the chat with its calls as the template can write them.

    Raises UnsupportedTemplate where it leaves one out: its turn would be learned as an empty
    answer. All of a chat has one form, so that its parts are the start of the whole.
    """
    turns = [turn for turn, message in enumerate(chat.messages) if any(_calls_of(message))]
    if not turns:
        return chat
    if not template.exists:
        raise _left_out(turns[0], template.name)
    fault: RowFault | None = None
    refusal: UnsupportedTemplate | None = None
    as_python: Chat | None = None
    for form in _forms(chat, turns, with_none=template.asks_for_no_content):
        marked, turn_of = _marked(form, turns)
        try:
            text, _ = template.render(marked)
        except RowFault as error:
            fault = fault or error
            continue
        missing = [turn for mark, turn in turn_of.items() if mark not in text]
        if missing:
            refusal = refusal or _left_out(missing[0], template.name)
        elif _is_written_as_python(marked, turns, text):
            as_python = as_python or form
        else:
            return form
    if as_python is not None:
        return as_python
    reason = refusal or fault
    assert reason is not None
    raise reason


def _left_out(turn: int, who: str) -> UnsupportedTemplate:
    return UnsupportedTemplate(
        f"{who} leaves out calls of tools, here that of turn {turn + 1}, so that what is left of "
        "the turn would be the answer. Give the tokenizer a template that writes them, or write "
        "them into the content"
    )


def _calls_of(message: Message) -> Iterator[Call]:
    """Yield what the turn calls, each where its name and arguments are."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function")
            yield function if isinstance(function, dict) else call
    if isinstance(message.get("function_call"), dict):  # OpenAI's older name
        yield message["function_call"]


def _with_calls(message: Message, change: Callable[[Call], Call]) -> Message:
    changed = dict(message)
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [_changed(call, change) for call in message["tool_calls"]]
    if isinstance(message.get("function_call"), dict):
        changed["function_call"] = change(message["function_call"])
    return changed


def _changed(call: Any, change: Callable[[Call], Call]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": change(call["function"])}
    return change(call)


def _forms(chat: Chat, turns: list[int], *, with_none: bool) -> Iterator[Chat]:
    """Yield the chat in each form; those that templates take most often come first."""
    contents: list[Callable[[Message], Message]] = [lambda message: message]
    if with_none:
        contents.append(lambda m: m if m.get("content") else {**m, "content": None})
    contents.append(lambda m: {"content": "", **m})
    seen: list[tuple[Message, ...]] = []
    for arguments in (_as_object, _as_text):
        for content in contents:
            messages = list(chat.messages)
            for turn in turns:
                messages[turn] = content(_with_calls(messages[turn], arguments))
            if tuple(messages) not in seen:
                seen.append(tuple(messages))
                yield replace(chat, messages=seen[-1])


def _as_object(call: Call) -> Call:
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(RowFault):
            value = parse_value(arguments.encode())
            checked_values(value, "arguments")
            if isinstance(value, dict):
                return {**call, "arguments": value}
    return call


def _as_text(call: Call) -> Call:
    if isinstance(call.get("arguments"), dict):
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return call


def _marked(chat: Chat, turns: list[int]) -> tuple[Chat, dict[str, int]]:
    """Return the chat with a mark for the name of each call, and the turn of each mark.

    What the template writes of it shows at once which calls it leaves out.
    """
    turn_of: dict[str, int] = {}
    messages = list(chat.messages)
    for turn in turns:

        def mark(call: Call, turn: int = turn) -> Call:
            name = f"outcore_call_{len(turn_of)}_of_all"
            turn_of[name] = turn
            return {**call, "name": name}

        messages[turn] = _with_calls(messages[turn], mark)
    return replace(chat, messages=tuple(messages)), turn_of


def _is_written_as_python(chat: Chat, turns: list[int], text: str) -> bool:
    """Whether an object stands in the text as Python shows it, which is no JSON."""
    for turn in turns:
        for call in _calls_of(chat.messages[turn]):
            arguments = call.get("arguments")
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return True
    return False
