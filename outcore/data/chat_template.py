"""A tokenizer's chat template, and a chat as the text that it makes of it."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from outcore.data.raw_rows import RowFault
from outcore.data.row_format import Chat
from outcore.data.turns import Message
from outcore.errors import UnsupportedTemplate

Spans = list[tuple[int, int]]  # from which to which character

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASKS_FOR_NONE = re.compile(r"\bcontent\b['\"\]]*\s+is\s+(not\s+)?none\b")
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError)  # of a template, about messages
_ANY_WORD = "hello"


class ChatTemplate:
    """Renders chats, where the tokenizer has a template to do it with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.exists = bool(tokenizer.chat_template)
        self.name = "the chat template" if self.exists else "what stands in for a template"

    @functools.cached_property
    def _text(self) -> str:
        """Found when a chat comes: for texts, any tokenizer will do."""
        named = self._tokenizer.chat_template
        if isinstance(named, dict) and "default" not in named:
            raise UnsupportedTemplate(
                f"the tokenizer has several chat templates ({', '.join(sorted(named))}), and none "
                "that is the default. Copy the one to train with to chat_template.jinja in its "
                "directory"
            )
        template: str = self._tokenizer.get_chat_template()
        return template

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether contents have to be lists of parts: templates of models that see images.

        They go through a text as if it were a list, and find nothing there.
        """
        template = self._text
        said = [_ANY_WORD, [{"type": "text", "text": _ANY_WORD}]]
        for wants_parts, content in enumerate(said):
            try:
                texts, _ = render_jinja_template(
                    conversations=[[{"role": "user", "content": content}]],
                    chat_template=template,
                    **self._tokenizer.special_tokens_map,
                )
            except TemplateSyntaxError as error:  # of every row
                raise UnsupportedTemplate(
                    f"the chat template has a mistake in its line {error.lineno}: {error.message}. "
                    "Correct it in the tokenizer's directory (chat_template.jinja, or "
                    "tokenizer_config.json)"
                ) from None
            except _REFUSALS:  # rows will tell
                return False
            if _ANY_WORD in texts[0]:
                return bool(wants_parts)
        raise UnsupportedTemplate(
            "the chat template leaves out what messages say where that is a text. Give the "
            "tokenizer another one"
        )

    @functools.cached_property
    def marks_answers(self) -> bool:
        return bool(_GENERATION.search(self._text))

    @functools.cached_property
    def asks_for_no_content(self) -> bool:
        """Whether it looks for turns of which the content is none."""
        return bool(_ASKS_FOR_NONE.search(self._text))

    def render(self, chat: Chat, *, add_generation_prompt: bool = False) -> tuple[str, Spans]:
        """Return the chat as text, with the answers that the template marks.

        Not ``apply_chat_template``: of an answer that ends in a character of several tokens, its
        mask misses all but the first.
        """
        if not chat.messages:
            return "", []
        if self._wants_parts:  # not below: what is wrong with the template is no fault of a row
            chat = replace(chat, messages=tuple(map(_in_parts, chat.messages)))
        try:
            return self._rendered(chat, add_generation_prompt)
        except _REFUSALS as error:
            raise RowFault(f"the chat template refuses it: {error}{self._remedy(chat)}") from None

    def _rendered(self, chat: Chat, add_generation_prompt: bool) -> tuple[str, Spans]:
        texts, marked = render_jinja_template(
            conversations=[list(chat.messages)],
            tools=list(chat.tools) or None,
            chat_template=self._text,
            return_assistant_tokens_mask=self.marks_answers,
            add_generation_prompt=add_generation_prompt,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], marked[0] if marked else []

    def _remedy(self, chat: Chat) -> str:
        """Return what helps where it takes all of the chat but what the system says."""
        first, *others = chat.messages
        if first["role"] != "system" or not others:
            return ""
        try:
            self._rendered(replace(chat, messages=tuple(others)), False)
        except _REFUSALS:
            return ""
        return ". What the system says can stand in the first question"


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
