"""The tokens that count are those of the answers: no fewer, and none of the questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from tokenizers_made_here import (
    CHATML,
    CHATML_WITH_MARKS,
    CHATML_WITH_TOOLS,
    FORGETFUL,
    chat,
    counted,
    make_tokenizer,
    texts,
    write_jsonl,
)

from outcore.data.chat_template import ChatTemplate
from outcore.data.chat_tokens import ChatTokenizer
from outcore.data.row_format import Chat
from outcore.errors import BadRow, UnsupportedTemplate

PLAIN = make_tokenizer()
PREFIXES = make_tokenizer(CHATML)
MARKS = make_tokenizer(CHATML_WITH_MARKS)
TALK = tuple(chat("hi the cat", "hello", "and on", "the mat 🎉"))


class Slow:
    """A tokenizer that does not say where its tokens lie."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        return self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=verbose)


def split_up(tokenizer: Any, chat: Chat, loss_on: Any = "answers") -> tuple[str, list[str]]:
    """The whole text, and the stretches of it that count."""
    ids, counts = ChatTokenizer(tokenizer, loss_on).tokens(chat)
    stretches, stretch = [], []
    for token_id, is_counted in zip([*ids, 0], [*counts, False], strict=True):
        if is_counted:
            stretch.append(int(token_id))
        elif stretch:
            stretches.append(tokenizer.decode(stretch))
            stretch = []
    return tokenizer.decode(ids), stretches


def test_by_marks_of_the_template() -> None:
    text, answers = split_up(MARKS, Chat(TALK))
    assert answers == ["hello", "the mat 🎉"]
    assert text == MARKS.apply_chat_template(list(TALK), tokenize=False)


@pytest.mark.parametrize("tokenizer", [PREFIXES, Slow(PREFIXES)], ids=["fast", "slow"])
def test_by_prefixes(tokenizer: Any) -> None:
    text, answers = split_up(tokenizer, Chat(TALK))
    assert answers == ["hello<|im_end|>\n", "the mat 🎉<|im_end|>\n"]
    assert text == PREFIXES.apply_chat_template(list(TALK), tokenize=False)


@pytest.mark.parametrize("said", ["hello", "a b", "b", "  a", ""])
def test_an_answer_before_any_question(said: str) -> None:
    """The template's own system turn, and what announces the answer, are no part of it."""
    system = "<|im_start|>system\nbe good<|im_end|>\n"
    greeting = ({"role": "assistant", "content": said}, *TALK)
    for start in ("", system):
        text, answers = split_up(make_tokenizer(start + CHATML), Chat(greeting))
        assert text.startswith(f"{start}<|im_start|>assistant\n{said}<|im_end|>")
        assert answers[0] == f"{said}<|im_end|>\n"
        assert len(answers) == 3


def test_a_prompt_that_begins_thoughts_which_answers_leave_out() -> None:
    """As with DeepSeek R1: the prompt is no part of the finished chat."""
    starts_thinking = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    text, answers = split_up(make_tokenizer(starts_thinking), Chat(TALK))
    assert "think" not in text
    assert answers == ["hello<|im_end|>\n", "the mat 🎉<|im_end|>\n"]
    thoughts = "{{ '[' + message['thoughts'] + ']' if message['thoughts'] else '' }}"
    shown = starts_thinking.replace(
        "{{ message['content'] }}", thoughts + "{{ message['content'] }}"
    )
    thoughtful = (*TALK[:3], {**TALK[3], "thoughts": "on what"})
    assert split_up(make_tokenizer(shown), Chat(thoughtful))[1][-1].startswith("[on what]the mat")


def test_without_a_template() -> None:
    text, answers = split_up(PLAIN, Chat(TALK))
    assert text == "hi the cat\nhello<|end|>and on\nthe mat 🎉<|end|>"
    assert answers == ["hello<|end|>", "the mat 🎉<|end|>"]


@pytest.mark.parametrize("tokenizer", [PLAIN, PREFIXES, MARKS], ids=["plain", "prefixes", "marks"])
def test_which_answers_count(tokenizer: Any) -> None:
    end = {PLAIN: "<|end|>", PREFIXES: "<|im_end|>\n", MARKS: ""}[tokenizer]
    first, last = f"hello{end}", f"the mat 🎉{end}"
    assert split_up(tokenizer, Chat(TALK))[1] == [first, last]
    assert split_up(tokenizer, Chat(TALK), "last-answer")[1] == [last]
    assert split_up(tokenizer, Chat(TALK, first_counted=3))[1] == [last]
    text, answers = split_up(tokenizer, Chat(TALK), "all")
    assert answers == [text]


@pytest.mark.parametrize("tokenizer", [PLAIN, PREFIXES, MARKS], ids=["plain", "prefixes", "marks"])
def test_an_answer_that_is_context_alone(tokenizer: Any) -> None:
    end = {PLAIN: "<|end|>", PREFIXES: "<|im_end|>\n", MARKS: ""}[tokenizer]
    for number, learned in ((1, f"the mat 🎉{end}"), (3, f"hello{end}")):
        talk = Chat(TALK, not_learned=frozenset({number}))
        text, answers = split_up(tokenizer, talk)
        assert text == split_up(tokenizer, Chat(TALK))[0]
        assert answers == [learned]
        last = [learned] if number == 1 else []
        assert split_up(tokenizer, talk, "last-answer")[1] == last
        with pytest.raises(ValueError, match=f"turn {number + 1} is not to be learned"):
            split_up(tokenizer, talk, "all")


content = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
).filter(lambda text: "<|" not in text)


@settings(deadline=None)
@given(contents=st.lists(content, min_size=2, max_size=6).filter(lambda all_: len(all_) % 2 == 0))
def test_any_answer_counts_in_full(contents: list[str]) -> None:
    talk = Chat(tuple(chat(*contents)))
    for tokenizer, end in ((PREFIXES, "<|im_end|>\n"), (PLAIN, "<|end|>")):
        ids, counts = ChatTokenizer(tokenizer, "answers").tokens(talk)
        found = tokenizer.decode(ids[counts])
        # A line break that an answer starts with may be in one token with the one before it.
        expected = "".join(answer + end for answer in contents[1::2])
        if not any(answer[0].isspace() for answer in contents[1::2]):
            assert found == expected
    ids, counts = ChatTokenizer(MARKS, "answers").tokens(talk)
    if not any(answer[0].isspace() for answer in contents[1::2]):
        assert MARKS.decode(ids[counts]) == "".join(contents[1::2])


def test_a_token_across_the_start_of_an_answer_does_not_count() -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    talk = Chat(tuple(chat("say th", "e cat")))
    assert any(token.endswith("the") for token in tokenizer.tokenize("say the cat"))
    assert split_up(tokenizer, talk) == ("say the cat", [" cat"])
    with pytest.raises(UnsupportedTemplate, match="joins the start or the end of an answer"):
        split_up(Slow(tokenizer), talk)


def test_tokens_whose_spaces_were_cut_off() -> None:
    """Some tokenizers leave spaces out of a token's place; a token of one space is then nowhere."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert (11, 11) in tokenizer("assistant:  x", return_offsets_mapping=True)["offset_mapping"]
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    talk = Chat(tuple(chat("hi", " x  y", "a", " z")))
    assert split_up(tokenizer, talk)[1] == [" x  y;", " z;"]


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path, make_cache: Any) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": list(TALK)}])
    message = r"a\.jsonl, line 1: .*turn 2 of 4 .*generation.*'last-answer'"
    for on_bad_row in ("raise", "skip"):  # a matter of the template, not of a row
        with pytest.raises(UnsupportedTemplate, match=message):
            make_cache(path, using=tokenizer, on_bad_row=on_bad_row)
    cache = make_cache(path, using=tokenizer, loss_on="last-answer")
    assert counted(cache, tokenizer) == ["<think></think>the mat 🎉<|im_end|>\n"]
    single = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "hi", "completion": "you"}])
    cache = make_cache(single, using=tokenizer)
    assert counted(cache, tokenizer) == ["<think></think>you<|im_end|>\n"]


def test_several_templates_without_a_default(tmp_path: Path, make_cache: Any) -> None:
    tokenizer = make_tokenizer({"rag": CHATML, "tool_use": CHATML})
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat("hi", "hello")}])
    with pytest.raises(UnsupportedTemplate, match=r"\(rag, tool_use\), and none that is"):
        make_cache(chats, using=tokenizer)
    some = write_jsonl(tmp_path / "texts.jsonl", [{"text": "the cat"}])  # which need no template
    assert texts(make_cache(some, using=tokenizer), tokenizer) == ["the cat<|end|>"]


PARTS = (  # SmolVLM's, which finds no part in a text
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_a_template_for_lists_of_parts(loss_on: Any) -> None:
    tokenizer = make_tokenizer(CHATML.replace("{{ message['content'] }}", PARTS))
    assert split_up(tokenizer, Chat(TALK), loss_on) == split_up(PREFIXES, Chat(TALK), loss_on)
    images = make_tokenizer(CHATML.replace("{{ message['content'] }}", "<image>"))
    with pytest.raises(UnsupportedTemplate, match="leaves out what messages say"):
        ChatTokenizer(images, loss_on).tokens(Chat(tuple(chat("a", "b"))))


def test_an_end_behind_the_whole_chat_alone() -> None:
    """Phi-3's: the last answer ends with it, those before with the end of a turn."""
    tokenizer = make_tokenizer(
        CHATML.replace(
            "{% if add_generation",
            "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add_generation",
        )
    )
    assert split_up(tokenizer, Chat(TALK))[1] == [
        "hello<|im_end|>\n",
        "the mat 🎉<|im_end|>\n<|end|>",
    ]


@pytest.mark.parametrize("open_thoughts", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_thoughts_that_the_prompt_begins(open_thoughts: str) -> None:
    """Qwen 3.5's, with and without thinking: the answer goes on behind them."""
    begun = CHATML.replace("assistant\n{% endif %}", f"assistant\n{open_thoughts}{{% endif %}}")
    thoughtful = {"role": "assistant", "content": "<think>\nso\n</think>\n\nthe cat"}
    if "</think>" in open_thoughts:  # an answer without thoughts has empty ones
        begun = begun.replace(
            "{{ message['content'] }}",
            "{% if message['role'] == 'assistant' and '<think>' not in message['content'] %}"
            "<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
        )
    learned = split_up(make_tokenizer(begun), Chat((TALK[0], thoughtful)))[1]
    assert learned == ["so\n</think>\n\nthe cat<|im_end|>\n"]


def test_an_answer_with_several_marks() -> None:
    """As TRL's template for Phi-3 has it: the very last end is marked by itself."""
    tokenizer = make_tokenizer(
        CHATML_WITH_MARKS + "{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    messages = tuple(chat("hi", "hello", "and", "bye"))
    ids, counts = ChatTokenizer(tokenizer, "answers").tokens(Chat(messages))
    assert tokenizer.decode(ids[counts]) == "hellobye<|end|>"
    with pytest.raises(UnsupportedTemplate, match="marks 3 answers of 2"):
        ChatTokenizer(tokenizer, "last-answer").tokens(Chat(messages))


def test_a_call_without_words_for_a_template_that_wants_none() -> None:
    """As DeepSeek's do: content that is missing is an error there, as None is elsewhere."""
    tokenizer = make_tokenizer(
        "{% for message in messages %}{{ message['role'] }}\n"
        "{% if message['content'] is none %}call {{ message['tool_calls'][0]['name'] }}"
        "{% else %}{{ '' + message['content'] }}{% endif %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    messages = ({"role": "user", "content": "hi"}, call)
    ids, counts = ChatTokenizer(tokenizer, "answers").tokens(Chat(messages))
    assert tokenizer.decode(ids[counts]) == "call add<|im_end|>"


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
CALLING = (*TALK[:1], CALL, {"role": "tool", "content": "3"}, *TALK[1:])


@pytest.mark.parametrize("tokenizer", [PLAIN, PREFIXES, MARKS], ids=["plain", "prefixes", "marks"])
@pytest.mark.parametrize("loss_on", ["answers", "last-answer", "all"])
def test_calls_that_the_template_leaves_out(tokenizer: Any, loss_on: Any) -> None:
    """An empty answer would be learned in the place of each."""
    wordless = {name: value for name, value in CALL.items() if name != "content"}
    old = {"role": "assistant", "content": "", "function_call": {"name": "add"}}
    for call in (CALL, {**CALL, "content": "I add"}, wordless, old):
        with pytest.raises(UnsupportedTemplate, match=r"leaves out calls .* that of turn 2"):
            split_up(tokenizer, Chat((CALLING[0], call, *CALLING[2:])), loss_on)


def test_calls_that_the_template_writes() -> None:
    _, answers = split_up(make_tokenizer(CHATML_WITH_TOOLS), Chat(CALLING))
    assert answers[0] == '[{"function": {"name": "add"}}]<|im_end|>\n'


def test_a_call_beside_words_that_the_template_leaves_out() -> None:
    """As DeepSeek's: it writes calls of turns without content alone."""
    either = "{{ message['content'] or (message['tool_calls'] | tojson) }}"
    tokenizer = make_tokenizer(CHATML.replace("{{ message['content'] }}", either))
    assert "add" in split_up(tokenizer, Chat(CALLING))[0]
    with pytest.raises(UnsupportedTemplate, match="that of turn 7"):
        split_up(tokenizer, Chat((*CALLING, {**CALL, "content": "I add"})))


def calling(arguments: Any) -> Chat:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    return Chat((TALK[0], turn, {"role": "tool", "content": "sun"}, *TALK[3:]))


ARGUMENTS = {"city": "Zürich", "days": 3}
FIRST_CALL = "message['tool_calls'][0]['function']"


@pytest.mark.parametrize(
    "written",
    [
        f"{{{{ {FIRST_CALL} | tojson }}}}",  # Qwen 2.5
        f"{{{{ {FIRST_CALL}.name }}}}{{% for name, value in {FIRST_CALL}.arguments | items %}}"
        "{{ name ~ value }}{% endfor %}",  # Qwen 3 Coder
        f"{{{{ {FIRST_CALL}.name + {FIRST_CALL}.arguments }}}}",  # DeepSeek R1
        f"{{{{ {FIRST_CALL}.name }}}}{{{{ {FIRST_CALL}.arguments }}}}",
    ],
    ids=["as JSON", "one by one", "joined", "shown"],
)
def test_arguments_of_a_call_as_text_and_as_object(written: str) -> None:
    """OpenAI's are text: most templates put quotes around it, some refuse it, others want it."""
    content = "{{ message['content'] }}{% if message['tool_calls'] %}" + written + "{% endif %}"
    tokenizer = make_tokenizer(CHATML.replace("{{ message['content'] }}", content))
    of_text, of_object = (
        split_up(tokenizer, calling(arguments))
        for arguments in ('{"city": "Zürich", "days": 3}', ARGUMENTS)
    )
    assert of_text == of_object
    shown = "weathercityZürichdays3" if "items" in written else '{"city": "Zürich", "days": 3}'
    assert shown in of_text[1][0]
    assert len(of_text[1]) == 2


@pytest.mark.parametrize(
    "arguments", ["not JSON", "[1]", '"text"', '"\\u0000"', '{"a": "\\ud800"}']
)
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    text, _ = split_up(make_tokenizer(CHATML_WITH_TOOLS), calling(arguments))
    assert json.dumps(arguments)[1:-1] in text


def test_a_call_with_empty_words_for_a_template_that_wants_none() -> None:
    """As DeepSeek's, which writes a turn with any content without its calls."""
    either = "{% if message['content'] is none %}{{ message['tool_calls'] | tojson }}{% else %}"
    either += "{{ message['content'] }}{% endif %}"
    tokenizer = make_tokenizer(CHATML.replace("{{ message['content'] }}", either))
    assert '"name": "weather"' in split_up(tokenizer, calling(ARGUMENTS))[1][0]


def test_calls_are_looked_for_in_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = (TALK[0], CALL, {"role": "tool", "content": "3"}, TALK[1])
    rendered: list[int] = []
    render = ChatTemplate.render

    def counting(self: Any, chat: Chat, **more: Any) -> Any:
        rendered.append(len(chat.messages))
        return render(self, chat, **more)

    monkeypatch.setattr(ChatTemplate, "render", counting)
    split_up(make_tokenizer(CHATML_WITH_TOOLS), Chat(20 * rounds))
    assert rendered.count(80) == 2  # with the calls marked, and as it is


SYSTEM = {"role": "system", "content": "be good"}
WHILE_ASKED = CHATML.replace(  # Mistral's: the system's text stands in the question that is open
    "{{ message['content'] }}",
    "{% if message['role'] == 'user' and loop.last and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}\n{% endif %}"
    "{% if message['role'] != 'system' %}{{ message['content'] }}{% endif %}",
)


@pytest.mark.parametrize("loss_on", ["answers", "last-answer", "all"])
def test_what_the_system_says_is_left_out(loss_on: Any) -> None:
    tokenizer = make_tokenizer(WHILE_ASKED)
    told = r"what the system says in turn 1, or some of it: 'be good'\. .*into the first question"
    with pytest.raises(UnsupportedTemplate, match=told):
        split_up(tokenizer, Chat((SYSTEM, *TALK)), loss_on)
    split_up(tokenizer, Chat(TALK), loss_on)


def test_switches_of_thinking_are_no_words() -> None:
    """As Nemotron's and SmolLM3's templates, which obey them and leave them out."""
    obeyed = "{{ message['content'] | replace('/no_think', '') | trim }}"
    tokenizer = make_tokenizer(CHATML.replace("{{ message['content'] }}", obeyed))
    switch = {"role": "system", "content": "/no_think"}
    asked = {"role": "user", "content": "hi /no_think  the cat"}
    assert "no_think" not in split_up(tokenizer, Chat((switch, asked, TALK[1])))[0]


@pytest.mark.parametrize("tokenizer", [PLAIN, PREFIXES, MARKS], ids=["plain", "prefixes", "marks"])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_thoughts_that_the_template_leaves_out(tokenizer: Any, name: str) -> None:
    thoughtful = {**TALK[1], name: "a greeting"}
    with pytest.raises(UnsupportedTemplate, match=rf"turn 2 \({name}\), .*'a greeting'"):
        split_up(tokenizer, Chat((TALK[0], thoughtful, *TALK[2:])))
    context = Chat((TALK[0], thoughtful, *TALK[2:]), not_learned=frozenset({1}))
    assert len(split_up(tokenizer, context)[1]) == 1


@pytest.mark.parametrize("marks", [False, True])
def test_thoughts_in_an_answer_that_the_template_leaves_out(marks: bool) -> None:
    """As DeepSeek R1's: the model would learn not to think."""
    content = "{{ message['content'].split('</think>')[-1] }}"
    template = CHATML_WITH_MARKS if marks else CHATML
    tokenizer = make_tokenizer(template.replace("{{ message['content'] }}", content))
    thoughtful = {"role": "assistant", "content": "<think>so</think>\n\nthe cat"}
    with pytest.raises(UnsupportedTemplate, match=r"the assistant says in turn 2.*be learned as"):
        split_up(tokenizer, Chat((TALK[0], thoughtful)))
    later = {"role": "assistant", "content": "the mat"}
    answers = split_up(tokenizer, Chat((TALK[0], thoughtful, TALK[2], later)), "last-answer")[1]
    assert answers == ["the mat" if marks else "the mat<|im_end|>\n"]


def test_lines_that_the_template_breaks_otherwise() -> None:
    trimmed = CHATML.replace("{{ message['content'] }}", "{{ message['content'] | trim }}")
    padded = chat("\n hi ", " the\n\ncat \n")
    assert split_up(make_tokenizer(trimmed), Chat(tuple(padded)))[1] == ["the\n\ncat<|im_end|>\n"]


def test_a_template_with_too_few_marks() -> None:
    once = "{% for m in messages %}{% if loop.last %}{% generation %}{{ m['content'] }}"
    once += "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(UnsupportedTemplate, match="marks 1 answers of 2"):
        split_up(make_tokenizer(once), Chat(TALK))


def test_a_template_that_takes_no_cut_chat() -> None:
    picky = "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}" + CHATML
    with pytest.raises(UnsupportedTemplate, match=r"cut after turn 1: .*too short"):
        split_up(make_tokenizer(picky), Chat(TALK))


def test_a_chat_that_the_template_refuses_is_a_bad_row(tmp_path: Path, make_cache: Any) -> None:
    picky = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + CHATML
    )
    system = {"role": "system", "content": "be good"}
    rows = [{"messages": list(TALK)}, {"messages": [system, *TALK]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = make_tokenizer(picky)
    remedy = "What the system says can stand in the first question"
    told = f"the chat template refuses it: no system. {remedy}"
    with pytest.raises(BadRow, match=told) as caught:
        make_cache(path, using=tokenizer)
    assert caught.value.line == 2
    rows = [{"messages": [system, *TALK]}]  # where more is wrong, that would not help
    other = make_tokenizer("{{ raise_exception('never') }}" + CHATML)
    with pytest.raises(BadRow) as caught:
        make_cache(write_jsonl(tmp_path / "b.jsonl", rows), using=other)
    assert remedy not in str(caught.value)
    assert make_cache(path, using=tokenizer, on_bad_row="skip").num_examples == 1


def test_a_mistake_in_the_template_is_no_fault_of_a_row(tmp_path: Path, make_cache: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": list(TALK)}])
    tokenizer = make_tokenizer("{% for message in messages %}\n{{ message.content }{% endfor %}")
    for on_bad_row in ("raise", "skip"):
        with pytest.raises(UnsupportedTemplate, match="has a mistake in its line 2: unexpected"):
            make_cache(path, using=tokenizer, on_bad_row=on_bad_row)


def test_of_pairs_only_the_answers_count(tmp_path: Path, make_cache: Any) -> None:
    row = {
        "prompt": list(TALK[:3]),
        "chosen": "good",
        "rejected": [*TALK[:3], *chat("", "bad")[1:]],
    }
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    for loss_on in ("answers", "all"):
        cache = make_cache(path, using=PREFIXES, loss_on=loss_on)
        assert cache.num_examples == 1
        assert [counted(cache, PREFIXES, document) for document in (0, 1)] == [
            ["good<|im_end|>\n"],
            ["bad<|im_end|>\n"],
        ]


def test_of_a_text_every_token_counts(tmp_path: Path, make_cache: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat<|end|>"}])
    cache = make_cache(path, using=PREFIXES)
    assert texts(cache, PREFIXES) == counted(cache, PREFIXES) == ["the cat<|end|>"]
