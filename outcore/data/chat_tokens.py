"""Chats as tokens, with the tokens of the answers marked exactly.

Where a template marks its answers ({% generation %}), those marks count. Elsewhere the chat is
rendered up to the start and up to the end of each answer: what was added between is the answer,
provided that each text is the start of the next. A template that rewrites earlier turns when later
ones follow fails that check, and is refused rather than guessed at.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from outcore.data.raw_rows import RowFault
from outcore.data.row_format import Chat, Message
from outcore.errors import UnsupportedTemplate

LossOn = Literal["answers", "last-answer", "all"]
Tokens = tuple[NDArray[np.uint32], NDArray[np.bool_]]  # ids, and which of them count for the loss

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASKS_FOR_NONE = re.compile(r"\bcontent\b['\"\]]*\s+is\s+(not\s+)?none\b")
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError)  # of a template, about messages
_ANY_WORD = "hello"
_CALLS = ("tool_calls", "function_call")
_REMEDY = (
    "Give the tokenizer a template with {% generation %} around the answers, or count only the "
    "last answer (loss_on='last-answer') or every token (loss_on='all')"
)


def token_ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenise a text of any length: what is too long for the model is cut later, so no warning."""
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])


class ChatTokenizer:
    """Turns chats into tokens with a tokenizer's template, or without where it has none."""

    def __init__(self, tokenizer: Any, loss_on: LossOn) -> None:
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._has_template = bool(tokenizer.chat_template)

    def tokens(self, chat: Chat, *, answers_only: bool = False) -> Tokens:
        """Return the chat's tokens; ``answers_only`` whatever the loss is on."""
        counts_all = self._loss_on == "all" and not answers_only
        if counts_all and chat.not_learned:
            raise RowFault(
                f"turn {min(chat.not_learned) + 1} is not to be learned (weight 0, or train "
                "false), and loss_on='all' learns every token: take loss_on='answers'"
            )
        counted = _counted_turns(chat, last_only=self._loss_on == "last-answer")
        self._check_calls(chat)
        if not self._has_template:
            return self._plain(chat.messages, counted, counts_all)
        if counts_all:
            text, _ = self._render(chat)
            ids = self._ids(text)
            return ids, np.ones(len(ids), dtype=np.bool_)
        text, spans = self._answers(chat, counted)
        if not self._tokenizer.is_fast:
            return self._between_prefixes(text, spans)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], dtype=np.uint32)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return ids, _inside(offsets, spans)

    def leaves_tools_out(self, chat: Chat) -> bool:
        """Whether the chat has tools of which its tokens say nothing."""
        if not chat.tools or not self._has_template:
            return bool(chat.tools)
        return self._render(chat) == self._render(replace(chat, tools=()))

    def _check_calls(self, chat: Chat) -> None:
        """Refuse a call of a tool that is not written out: its turn would be an empty answer."""
        for turn, message in enumerate(chat.messages):
            if any(message.get(name) for name in _CALLS) and self._leaves_calls_out(chat, turn):
                who = "the chat template" if self._has_template else "what stands in for a template"
                raise UnsupportedTemplate(
                    f"{who} leaves out calls of tools, here that of turn {turn + 1}, so that what "
                    "is left of the turn would be the answer. Give the tokenizer a template that "
                    "writes them, or write them into the content"
                )

    def _leaves_calls_out(self, chat: Chat, turn: int) -> bool:
        if not self._has_template:
            return True
        whole = self._render(chat)
        messages = list(chat.messages)
        messages[turn] = {k: v for k, v in messages[turn].items() if k not in _CALLS}
        try:
            return self._render(replace(chat, messages=tuple(messages))) == whole
        except RowFault:  # then it looks for them
            return False

    @functools.cached_property
    def _template(self) -> str:
        """Found when a chat comes: for texts, any tokenizer will do."""
        named = self._tokenizer.chat_template
        if isinstance(named, dict) and "default" not in named:
            raise UnsupportedTemplate(
                f"the tokenizer has several chat templates ({', '.join(sorted(named))}), and none "
                "that is the default. Copy the one to train with to chat_template.jinja in its "
                "directory"
            )
        template: str = self._tokenizer.get_chat_template()
        if self._leaves_text_out(template):
            raise UnsupportedTemplate(
                "the chat template leaves out what messages say where that is a text: it is made "
                "for lists of parts, such as images. Give the tokenizer one for texts"
            )
        return template

    def _leaves_text_out(self, template: str) -> bool:
        """Whether it goes through a text as if that were a list, and finds nothing there."""
        try:
            texts, _ = render_jinja_template(
                conversations=[[{"role": "user", "content": _ANY_WORD}]],
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
        return _ANY_WORD not in texts[0]

    @functools.cached_property
    def _marks_answers(self) -> bool:
        return bool(_GENERATION.search(self._template))

    def _plain(
        self, messages: Sequence[Message], counted: Sequence[int], counts_all: bool
    ) -> Tokens:
        """Without a template: each other turn with a newline, each answer with the end token."""
        end = self._tokenizer.eos_token_id
        ids: list[int] = []
        counts: list[bool] = []
        for index, message in enumerate(messages):
            is_answer = message["role"] == "assistant"
            content = message.get("content", "")
            # By themselves: that is how a prompt is tokenised when a model is to answer it.
            part = token_ids(
                self._tokenizer,
                content if is_answer else f"{content}\n",
                add_special_tokens=index == 0,
            )
            if index == 0 and end is not None and part and part[-1] == end:
                part = part[:-1]  # some add it to every text; here the text goes on
            if is_answer and end is not None:
                part = [*part, end]
            ids += part
            counts += [counts_all or index in counted] * len(part)
        return np.array(ids, dtype=np.uint32), np.array(counts, dtype=np.bool_)

    def _answers(self, chat: Chat, counted: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """Return the whole text, and from which to which character each counted answer goes."""
        messages = chat.messages
        if self._marks_answers:
            text, marked = self._render(chat)
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if len(marked) > len(turns) and list(counted) == turns:
                return text, marked  # of which turn each is, matters only where some do not count
            if len(marked) != len(turns):
                raise UnsupportedTemplate(
                    f"the chat template marks {len(marked)} answers of {len(turns)} with "
                    "{% generation %}. Give it one mark for each turn of the assistant"
                )
            return text, [span for turn, span in zip(turns, marked, strict=True) if turn in counted]
        text, _ = self._render(chat)
        spans = []
        for turn in counted:
            asked, answered = (replace(chat, messages=messages[:n]) for n in (turn, turn + 1))
            before = self._prefix(asked, add_generation_prompt=True)
            is_last = turn == len(messages) - 1
            after = text if is_last else self._prefix(answered)
            if turn == 0 or not after.startswith(before):
                before = self._before_content(answered, after)
            if not text.startswith(after) or not after.startswith(before):
                raise UnsupportedTemplate(
                    "the chat template changes earlier turns when later ones follow, so that the "
                    f"answer in turn {turn + 1} of {len(messages)} cannot be told from the rest. "
                    f"{_REMEDY}"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _before_content(self, chat: Chat, after: str) -> str:
        """Return what stands before the last turn's content, where no prompt ends that way.

        There is no chat before the first turn, and some templates begin thoughts in a prompt that
        they leave out of an answer. It is what stays the same when the turn says something else.
        """
        *earlier, last = chat.messages
        said = str(last.get("content", ""))
        # Without thoughts and calls, which are part of the answer too.
        other = {"role": last["role"], "content": "b" if said.lstrip().startswith("a") else "a"}
        changed = self._prefix(replace(chat, messages=(*earlier, other)))
        pairs = enumerate(zip(after, changed, strict=False))
        return after[: next((place for place, (one, two) in pairs if one != two), len(after))]

    def _prefix(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._render(chat, add_generation_prompt=add_generation_prompt)[0]
        except RowFault as error:  # the whole chat was fine
            raise UnsupportedTemplate(
                f"the chat template takes no chat that is cut after turn {len(chat.messages)}: "
                f"{error}. {_REMEDY}"
            ) from None

    def _render(
        self, chat: Chat, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the chat as text, with the answers that the template marks.

        Not ``apply_chat_template``: of an answer that ends in a character of several tokens, its
        mask misses all but the first.
        """
        if not chat.messages:
            return "", []
        try:
            return self._rendered(chat, add_generation_prompt)
        except RowFault:
            # A call of a tool without words: most templates take it best without any content, but
            # some (DeepSeek's) only with none.
            full = tuple({"content": None, **message} for message in chat.messages)
            if full == chat.messages or not _ASKS_FOR_NONE.search(self._template):
                raise
        return self._rendered(replace(chat, messages=full), add_generation_prompt)

    def _rendered(
        self, chat: Chat, add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        template = self._template  # not below: what is wrong with it is no fault of a row
        try:
            texts, marked = render_jinja_template(
                conversations=[list(chat.messages)],
                tools=list(chat.tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=self._marks_answers,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except _REFUSALS as error:
            raise RowFault(f"the chat template refuses it: {error}") from None
        return texts[0], marked[0] if marked else []

    def _ids(self, text: str) -> NDArray[np.uint32]:
        ids = token_ids(self._tokenizer, text, add_special_tokens=False)
        return np.array(ids, dtype=np.uint32)

    def _between_prefixes(self, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
        """For tokenizers that do not say where a token lies: tokenise up to each boundary."""
        ids = self._ids(text)
        counts = np.zeros(len(ids), dtype=np.bool_)
        for span in spans:
            first, end = (self._ids(text[:place]) for place in span)
            if not (_starts_with(ids, first) and _starts_with(ids, end)):
                raise UnsupportedTemplate(
                    "the tokenizer joins the start or the end of an answer with what is beside it. "
                    "Use its fast version"
                )
            counts[len(first) : len(end)] = True
        return ids, counts


def _counted_turns(chat: Chat, *, last_only: bool) -> list[int]:
    turns = [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.first_counted
    ]
    # Where the last one is not to be learned, none is: another would not be the last.
    return [turn for turn in (turns[-1:] if last_only else turns) if turn not in chat.not_learned]


def _inside(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Mark the tokens that lie in a span in full.

    Some tokenizers cut whitespace off: a token of nothing else is then empty, and lies at its end.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for first, end in spans:
        inside |= (starts >= first) & (ends > first) & (ends <= end)
    return inside


def _starts_with(ids: NDArray[np.uint32], prefix: NDArray[np.uint32]) -> bool:
    return bool(np.array_equal(ids[: len(prefix)], prefix))
