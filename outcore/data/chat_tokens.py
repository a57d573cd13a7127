"""Chats as tokens, with the tokens of the answers marked exactly.

Where a template marks its answers ({% generation %}), those marks count. Elsewhere the chat is
rendered up to the start and up to the end of each answer: what was added between is the answer,
provided that each text is the start of the next. A template that rewrites earlier turns when later
ones follow fails that check, and is refused rather than guessed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outcore.data.chat_template import ChatTemplate, Spans
from outcore.data.left_out import check_answers, check_questions, says_all
from outcore.data.raw_rows import RowFault
from outcore.data.row_format import Chat
from outcore.data.tool_calls import form_for
from outcore.data.turns import Message
from outcore.errors import UnsupportedTemplate

LossOn = Literal["answers", "last-answer", "all"]
Tokens = tuple[NDArray[np.uint32], NDArray[np.bool_]]  # ids, and which of them count for the loss

_REMEDY = (
    "Give the tokenizer a template with {% generation %} around the answers (TRL has those of many "
    "models: trl.chat_template_utils.get_training_chat_template), or count only the last answer "
    "(loss_on='last-answer') or every token (loss_on='all')"
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
        self._template = ChatTemplate(tokenizer)

    def tokens(self, chat: Chat, *, answers_only: bool = False) -> Tokens:
        """Return the chat's tokens; ``answers_only`` whatever the loss is on."""
        counts_all = self._loss_on == "all" and not answers_only
        if counts_all and chat.not_learned:
            raise RowFault(
                f"turn {min(chat.not_learned) + 1} is not to be learned (weight 0, or train "
                "false), and loss_on='all' learns every token: take loss_on='answers'"
            )
        counted = _counted_turns(chat, last_only=self._loss_on == "last-answer")
        chat = form_for(self._template, chat)
        if not self._template.exists:
            said = {turn: chat.messages[turn].get("content", "") for turn in counted}
            check_answers(self._template.name, chat.messages, said)
            return self._plain(chat.messages, counted, counts_all)
        if counts_all:
            text, _ = self._template.render(chat)
            check_questions(self._template.name, chat.messages, text)
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
        if not chat.tools or not self._template.exists:
            return bool(chat.tools)
        chat = form_for(self._template, chat)
        return self._template.render(chat) == self._template.render(replace(chat, tools=()))

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

    def _answers(self, chat: Chat, counted: Sequence[int]) -> tuple[str, Spans]:
        """Return the whole text, and from which to which character each counted answer goes."""
        text, marked = self._template.render(chat)
        check_questions(self._template.name, chat.messages, text)
        if self._template.marks_answers:
            spans, learned = self._by_marks(chat, counted, text, marked)
            check_answers(
                self._template.name, chat.messages, dict(zip(counted, learned, strict=True))
            )
        else:
            spans = [self._span_of(chat, turn, text) for turn in counted]
        return text, spans

    def _by_marks(
        self, chat: Chat, counted: Sequence[int], text: str, marked: Spans
    ) -> tuple[Spans, list[str]]:
        """Return the spans that count, and what is learned of each counted turn."""
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(marked) > len(turns) and list(counted) == turns:
            # Of which turn each is, matters only where some do not count.
            return marked, ["".join(text[start:end] for start, end in marked)] * len(turns)
        if len(marked) != len(turns):
            raise UnsupportedTemplate(
                f"the chat template marks {len(marked)} answers of {len(turns)} with "
                "{% generation %}. Give it one mark for each turn of the assistant"
            )
        spans = [span for turn, span in zip(turns, marked, strict=True) if turn in counted]
        return spans, [text[start:end] for start, end in spans]

    def _span_of(self, chat: Chat, turn: int, text: str) -> tuple[int, int]:
        """Return where an answer is, by what the chat is before and behind it."""
        messages = chat.messages
        asked, answered = (replace(chat, messages=messages[:n]) for n in (turn, turn + 1))
        before = self._prefix(asked, add_generation_prompt=True)
        is_last = turn == len(messages) - 1
        after = text if is_last else self._prefix(answered)
        end = self._tokenizer.eos_token
        if end and not text.startswith(after):
            after = after.removesuffix(end)  # some write it behind the whole chat alone
        if turn == 0 or not after.startswith(before):
            before = self._before_content(answered, after)
        if not text.startswith(after) or not after.startswith(before):
            raise UnsupportedTemplate(
                "the chat template changes earlier turns when later ones follow, so that the "
                f"answer in turn {turn + 1} of {len(messages)} cannot be told from the rest. "
                f"{_REMEDY}"
            )
        said = after[len(before) :]
        if not says_all(messages[turn], said):
            # With what a prompt ends in: many begin the thoughts, which the answer goes on with.
            said = after[len(self._prefix(asked)) :]
            check_answers(self._template.name, messages, {turn: said})
        return len(before), len(after)

    def _before_content(self, chat: Chat, after: str) -> str:
        """Return what stands before the last turn's content, where no prompt ends that way.

        There is no chat before the first turn, and some templates begin thoughts in a prompt that
        they leave out of an answer. It is what stays the same when the turn says something else:
        two other things, because one of them may begin as what it says.
        """
        *earlier, last = chat.messages
        # Without thoughts and calls, which are part of the answer too.
        others = [{"role": last["role"], "content": other} for other in ("a", "b")]
        changed = [self._prefix(replace(chat, messages=(*earlier, other))) for other in others]
        alike = zip(after, *changed, strict=False)
        places = (place for place, letters in enumerate(alike) if len(set(letters)) > 1)
        return after[: next(places, min(map(len, (after, *changed))))]

    def _prefix(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(chat, add_generation_prompt=add_generation_prompt)[0]
        except RowFault as error:  # the whole chat was fine
            raise UnsupportedTemplate(
                f"the chat template takes no chat that is cut after turn {len(chat.messages)}: "
                f"{error}. {_REMEDY}"
            ) from None

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
