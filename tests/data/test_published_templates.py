"""Chat templates that people have, as TRL carries them: each answer is learned, and no question."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers_made_here import make_tokenizer

from outcore.data.chat_tokens import ChatTokenizer
from outcore.data.row_format import Chat, example_of
from outcore.errors import UnsupportedTemplate

SYSTEM = {"role": "system", "content": "You are brief.\nAlways."}
ASKED = ({"role": "user", "content": "the first?"}, {"role": "user", "content": " the other? \n"})
SAID = ({"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two\n\n- three"})
TALK = [SYSTEM, ASKED[0], SAID[0], ASKED[1], SAID[1]]
WHOLE_CHATS = [
    *("cohere2", "deepseek_r1_distill", "deepseekv3", "gemma3", "glm4moe", "llama3_1", "llama3_2"),
    *("nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507"),
    *("qwen3_vl", "smolvlm"),
    *("gptoss_training", "qwen3_training"),
]
CALLS = ["deepseekv3", "glm4moe", "llama3_1", "qwen2_5", "qwen3_training", "gptoss_training"]
THOUGHTS = ["glm4moe", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "nemotron_3_nano"]


def tokenizer_with(name: str) -> Any:
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("needs trl")
    file = Path(trl.origin).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this trl has no {file.name}")
    return make_tokenizer(file.read_text())


def learned(tokenizer: Any, messages: list[dict[str, Any]], **more: Any) -> str:
    example = example_of({"messages": messages, **more}, "messages")
    assert isinstance(example, Chat)
    ids, counts = ChatTokenizer(tokenizer, "answers").tokens(example)
    text: str = tokenizer.decode(ids[counts])
    return text


@pytest.mark.parametrize("name", WHOLE_CHATS)
def test_all_answers_and_no_question(name: str) -> None:
    text = learned(tokenizer_with(name), TALK)
    for answer in SAID:
        assert answer["content"] in text
    for question in (SYSTEM, *ASKED):
        assert question["content"].strip() not in text


@pytest.mark.parametrize("name", CALLS)
def test_arguments_as_text_and_as_object(name: str) -> None:
    tokenizer = tokenizer_with(name)

    def calling(arguments: Any) -> str:
        function = {"name": "weather", "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        found = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sun"}
        tool = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
        return learned(tokenizer, [ASKED[0], turn, found, SAID[0]], tools=[tool])

    text = calling('{"city": "Paris"}')
    assert text == calling({"city": "Paris"})
    assert "weather" in text
    assert "Paris" in text
    assert r"\"" not in text


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_learned(name: str) -> None:
    answer = {"role": "assistant", "content": "<think>\nso and so\n</think>\n\none"}
    text = learned(tokenizer_with(name), [ASKED[0], answer])
    assert text.index("so and so") < text.index("one")


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
def test_thoughts_that_are_cut_off_are_told(name: str) -> None:
    answer = {"role": "assistant", "content": "<think>\nso and so\n</think>\n\none"}
    with pytest.raises(UnsupportedTemplate, match="leaves out what the assistant says in turn 2"):
        learned(tokenizer_with(name), [ASKED[0], answer])
