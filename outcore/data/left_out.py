"""Words of a chat that its template leaves out: a model would learn to, or never see them.

Mistral's leaves out what the system says as soon as the question is answered, DeepSeek R1's the
thoughts before an answer, and many do not know ``reasoning_content``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from outcore.data.turns import Message
from outcore.errors import UnsupportedTemplate

_ASKING = ("system", "developer", "user")
_THOUGHTS = ("reasoning_content", "thinking")  # of an answer: the names of Qwen, and of GPT-OSS
_SWITCHES = re.compile(r"/(no_)?think\b")  # that some templates take out of what they obey
_SHOWN = 60  # characters


def check_questions(who: str, messages: tuple[Message, ...], text: str) -> None:
    """Raise UnsupportedTemplate where a user, or the system, says what is not in ``text``.

    What tools say is written in many ways, and not looked for; nor are answers that are context
    alone, of which templates may leave the thoughts out.
    """
    for turn, message in enumerate(messages):
        if message["role"] in _ASKING and not _has(text, message.get("content")):
            elsewhere = "" if message["role"] == "user" else ", or write it into the first question"
            raise UnsupportedTemplate(
                f"{who} leaves out {_what(message, turn)}. Give the tokenizer a template that "
                f"writes it{elsewhere}"
            )


def check_answers(who: str, messages: tuple[Message, ...], learned: Mapping[int, str]) -> None:
    """Raise UnsupportedTemplate where a turn says more than what is learned of it."""
    for turn, text in learned.items():
        for name in _left_out(messages[turn], text):
            raise UnsupportedTemplate(
                f"{who} leaves out {_what(messages[turn], turn, name)}, and what is left would "
                "be learned as the answer. Give the tokenizer a template that writes all of "
                "it, learn only the last answer (loss_on='last-answer') where that is written, "
                "or take it out of the rows"
            )


def says_all(message: Message, text: str) -> bool:
    """Whether all that the turn says is in the text."""
    return not list(_left_out(message, text))


def _left_out(message: Message, text: str) -> Iterator[str]:
    """Yield the fields of an answer that are not in the text."""
    return (name for name in ("content", *_THOUGHTS) if not _has(text, message.get(name)))


def _what(message: Message, turn: int, name: str = "content") -> str:
    words = message[name].strip()
    shown = repr(words[:_SHOWN]) + ("…" if len(words) > _SHOWN else "")
    field = "" if name == "content" else f" ({name})"
    return f"what the {message['role']} says in turn {turn + 1}{field}, or some of it: {shown}"


def _has(text: str, words: object) -> bool:
    """Whether the words are in the text, however it breaks lines and trims."""
    if not isinstance(words, str) or words.strip() in text:
        return True
    return _squeezed(words) in _squeezed(text)


def _squeezed(text: str) -> str:
    return "".join(_SWITCHES.sub("", text).split())
