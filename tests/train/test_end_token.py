"""A model that was trained stops where its data ended, whatever its base stopped at."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers_made_here import CHATML, chat, make_tokenizer, write_jsonl
from train_files import Files, write_model
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from outcore.data.encode import EncodeOptions
from outcore.data.tokenize import tokenize
from outcore.train.display import Display
from outcore.train.end_token import learned_end
from outcore.train.run import train

SAID = "the data ends in <|im_end|>"


def trained(files: Files, **changes: object) -> tuple[Path, str]:
    console = Console(file=io.StringIO(), width=200)
    settings = files.settings(max_steps=1, **changes)
    train(settings, Display(console))
    return Path(settings.output), console.file.getvalue()  # type: ignore[attr-defined]


def ends(directory: Path) -> tuple[Any, Any]:
    """Those of config.json and of generation_config.json."""
    config = AutoConfig.from_pretrained(directory)
    return config.eos_token_id, GenerationConfig.from_pretrained(directory).eos_token_id


@pytest.fixture
def im_end(files: Files) -> int:
    number: int = AutoTokenizer.from_pretrained(files.model).convert_tokens_to_ids("<|im_end|>")
    return number


def test_chats_that_end_in_another_token_than_texts_did(files: Files, im_end: int) -> None:
    (before, _) = ends(files.model)
    assert before != im_end
    output, said = trained(files)
    assert ends(output) == (im_end, [im_end, before])
    assert f"{SAID}, at which the model did not stop: it is saved as its end" in said


def test_ends_that_are_known_stay_as_they_are(files: Files, im_end: int) -> None:
    known = [ends(files.model)[0], im_end]
    model = write_model(files.folder / "model")
    GenerationConfig(eos_token_id=known).save_pretrained(model)
    output, said = trained(files, model=str(model))
    assert ends(output) == (known[0], known)
    assert SAID not in said


@pytest.mark.parametrize(
    "contradicting", [{"temperature": 0.9, "top_p": 0.6}, {"length_penalty": 1.2}]
)
@pytest.mark.parametrize("is_known", [False, True], ids=["another end", "the same end"])
def test_settings_that_transformers_refuses_to_save(
    files: Files, im_end: int, contradicting: dict[str, float], is_known: bool
) -> None:
    """Published models have such; the run ended in an error, with all that was trained."""
    first = ends(files.model)[0]
    known = [first, im_end] if is_known else [first]
    model = write_model(files.folder / "model")
    settings = {"eos_token_id": known, **contradicting}
    (model / "generation_config.json").write_text(json.dumps(settings))
    output, _ = trained(files, model=str(model), keep=0)
    assert ends(output)[1] == (known if is_known else [im_end, first])
    saved = GenerationConfig.from_pretrained(output)
    assert {name: getattr(saved, name) for name in contradicting} == contradicting
    assert (output / "model.safetensors").is_file()


def test_adapters_have_no_configuration_of_the_model(files: Files, im_end: int) -> None:
    pytest.importorskip("peft")
    _, said = trained(files, lora=True, lora_rank=4)
    assert f"generate with eos_token_id={im_end}" in said


@pytest.mark.parametrize(
    ("rows", "template", "expected"),
    [
        ([{"text": "the cat"}, {"text": "sat"}], CHATML, "<|end|>"),
        ([{"prompt": "the", "completion": "cat"}], None, "<|end|>"),
        ([{"messages": chat("the", "cat")}], CHATML, "<|im_end|>"),
        ([{"messages": [*chat("the", "cat"), *chat("sat")]}], CHATML, "<|im_end|>"),
        ([{"messages": chat("the", "cat")}], CHATML.replace("<|im_end|>", "."), None),
        ([{"messages": chat("the", "cat<|im_start|>" + 9 * " a")}], "{{ messages }}", None),
    ],
)
def test_what_is_learned_last(
    rows: list[Any], template: str | None, expected: str | None, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(template)
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = EncodeOptions(loss_on="all" if template == "{{ messages }}" else "answers")
    cache = tokenize(
        [str(data)], tokenizer, cache_dir=tmp_path / "tokens", options=options, num_workers=1
    )
    end = learned_end(cache, tokenizer)
    assert (None if end is None else tokenizer.convert_ids_to_tokens(end)) == expected


def test_the_end_of_most_documents_counts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", ""))
    few = [{"messages": chat("the", "cat<|im_end|>")}]
    many = 2 * [{"messages": chat("the", "cat")}]
    data = write_jsonl(tmp_path / "rows.jsonl", [*few, *many])
    cache = tokenize([str(data)], tokenizer, cache_dir=tmp_path / "tokens", num_workers=1)
    assert learned_end(cache, tokenizer) is None
