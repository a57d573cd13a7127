"""Tiny tokenizers, and files of rows: what the tests of training data work on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks the answer alone, so that what ends it is not part of it.
CHATML_WITH_MARKS = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen 3: only the last turn shows that there were thoughts.
FORGETFUL = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen 2.5: tools before the chat, calls behind what the turn says.
CHATML_WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}"
    "{% endif %}",
)

_LEARNED_FROM = ["the cat sat on the mat and said hello to the world", "user assistant system\n"]


def make_tokenizer(chat_template: str | dict[str, str] | None = None, vocabulary: int = 300) -> Any:
    """A byte-level BPE of a few hundred tokens, so that every text is possible."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_LEARNED_FROM, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        additional_special_tokens=special[1:],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turns."""
    return [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]


def texts(cache: Any, tokenizer: Any) -> list[str]:
    """Each document of a cache as text, with its special tokens."""
    return [tokenizer.decode(ids) for ids in documents(cache)]


def documents(cache: Any) -> list[Any]:
    return [
        cache.ids(int(start), int(end - start))
        for start, end in zip(cache.starts, cache.ends, strict=True)
    ]


def counted(cache: Any, tokenizer: Any, document: int = 0) -> list[str]:
    """The stretches of a document that count for the loss, as text."""
    start, length = (
        int(cache.starts[document]),
        int(cache.ends[document] - cache.starts[document]),
    )
    stretches: list[list[int]] = [[]]
    for token_id, counts in zip(cache.ids(start, length), cache.counts(start, length), strict=True):
        if counts:
            stretches[-1].append(int(token_id))
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]
