"""Settings: from names and values, from YAML, and what is refused."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outcore.train.settings import (
    FULL_LR,
    LORA_LR,
    TrainSettings,
    read_settings,
    settings_of,
    with_seq_len,
)
from outcore.train.usual_names import USUAL_NAMES

LEAST = {"model": "m", "data": "d.jsonl", "output": "o"}


def test_one_file_or_several() -> None:
    assert settings_of(LEAST).data == ("d.jsonl",)
    assert settings_of({**LEAST, "data": ["a", "b"]}).data == ("a", "b")


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1, -(2**63), str(2**53 + 1)])
def test_a_large_seed_is_used_as_it_is(seed: int | str) -> None:
    assert settings_of({**LEAST, "seed": seed}).seed == int(seed)


def test_a_budget_in_bytes_needs_no_quotes_in_yaml() -> None:
    assert settings_of({**LEAST, "host_memory": 24_000_000_000}).host_memory == "24000000000"
    with pytest.raises(ValueError, match="output must be text, not 7"):  # 007, perhaps
        settings_of({**LEAST, "output": 7})


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a YAML file, or behind `--output=`, no shell has replaced it."""
    monkeypatch.setenv("HOME", "/home/ada")
    paths = {"data": ["~/a.jsonl", "b.jsonl"], "output": "~/tuned", "cache_dir": None}
    settings = settings_of({**LEAST, **paths, "eval_data": "~/e.jsonl"})
    assert settings.data == ("/home/ada/a.jsonl", "b.jsonl")
    assert settings.eval_data == ("/home/ada/e.jsonl",)
    assert (settings.output, settings.cache_dir) == ("/home/ada/tuned", None)


def test_the_learning_rate_is_that_of_the_method() -> None:
    assert settings_of(LEAST).learning_rate == FULL_LR
    assert settings_of({**LEAST, "lora": True}).learning_rate == LORA_LR
    assert settings_of({**LEAST, "lora": True, "lr": 3e-4}).learning_rate == 3e-4


def test_usual_names_lead_to_settings() -> None:
    names = {field.name for field in fields(TrainSettings)}
    for usual, here in USUAL_NAMES.items():
        assert usual not in names
        assert re.split(r"\W", here)[0] in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "missing: model"),
        ({"lerning_rate": 1}, "unknown setting 'lerning_rate'"),
        ({"max_step": 1}, "max_steps\\?"),
        ({"learning_rate": 1e-5}, "unknown setting 'learning_rate': here it is lr$"),
        ({"max_steps": 0}, "max_steps must be at least 1, not 0"),
        ({"schedule": "cubic"}, "cosine, linear, constant"),
        ({"held_out": 1.5}, "held_out must be from 0 to below 1"),
        ({"held_out": 0.1, "eval_data": "e"}, "give one"),
        ({"eval_every": 5}, "needs something to evaluate on"),
        ({"seq_len": 512, "tokens_per_step": 256}, "less than one sequence"),
        ({"tokens_per_step": 1}, "tokens_per_step must be at least 2"),
        ({"keep": -1}, "keep must be at least 0"),
        ({"frozen_weights": "int4"}, "add --lora"),
        ({"lora_rank": 8}, "lora_rank is for LoRA: add --lora"),
        ({"epochs": 0}, "epochs must be more than 0, not 0"),
        ({"eps": 0.0}, r"eps must be more than 0, not 0\.0"),
        ({"lora": True, "lora_alpha": 0}, "lora_alpha must be more than 0, not 0"),
        ({"seed": 2**63}, "seed must be a number of 64 bits"),
        ({"max_steps": 10**400}, "max_steps must be a number of 64 bits"),
        ({"lr": 10**400}, "lr must be a number, not 1000"),
        ({"output": ""}, "output names no directory"),
        ({"model": " "}, "model names no directory"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of({**LEAST, **changes})


def test_a_type_that_does_not_train_is_refused_in_python_too() -> None:
    with pytest.raises(ValueError, match="dtype must be one of bf16, fp32, not 'fp16'"):
        TrainSettings(model="m", data=("d",), output="o", dtype="fp16")  # type: ignore[arg-type]


def test_a_rank_may_stay_in_a_file_that_says_no_lora() -> None:
    assert not settings_of({**LEAST, "lora": False, "lora_rank": 8}).lora


def test_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: [a, b]\noutput: o\nlr: 1e-5\nmax-steps: 7\nlora: true\n")
    settings = settings_of(read_settings(path))
    assert (settings.lr, settings.max_steps, settings.lora) == (1e-5, 7, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1e-5\nmax-steps: 7\nlr: 1e-4\n", "has lr twice, in line 1 and in line 3"),
        ("max-steps: 7\nmax_steps: 8\n", "has max_steps twice, in line 1 and in line 2"),
        ("lr: 1e-5\nseed: [1\n", ", line 3: expected ',' or ']'"),
        ("lr: !!python/name:os.system\n", ", line 1: could not determine a constructor"),
        ("\0", ": unacceptable character"),
        ("seed: 1\nlr: [[1]]\n", ", line 2: a setting is one value, or a list of texts"),
        ("lr: &a\n  b: *a\n", ", line 1: a setting is one value, or a list of texts"),
        ("lr: " + "[" * 5000 + "]" * 5000, " cannot be read: RecursionError"),
        ("lora: !!bool maybe\n", " cannot be read: KeyError"),
        ("lr: !!timestamp x\n", " cannot be read: AttributeError"),
        ("seed: !!int ''\n", " cannot be read: IndexError"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml") as error:
        read_settings(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_lists_that_name_each_other_are_not_written_out(tmp_path: Path) -> None:
    """Ten of ten of ten: a message that showed the value would take 10^10 words."""
    lists = ["&a0 [x]"]
    lists += [f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 11)]
    path = tmp_path / "run.yaml"
    path.write_text(f"lr: [{', '.join(lists)}]\n")
    with pytest.raises(ValueError, match=r"a setting is one value, or a list of texts$"):
        settings_of({**LEAST, **read_settings(path)})


def test_a_yaml_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory$"):
        read_settings(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ValueError, match=r"is not UTF-8$"):
        read_settings(tmp_path / "latin.yaml")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "!!python/object/apply:os.system [x]"])
def test_a_yaml_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml"):
        read_settings(path)


def test_the_model_bounds_the_sequence_length() -> None:
    settings = settings_of(LEAST)
    assert with_seq_len(settings, 131_072).seq_len == 2048
    assert with_seq_len(settings, 512).seq_len == 512
    assert with_seq_len(settings_of({**LEAST, "seq_len": 4096}), 512).seq_len == 4096


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lora", "no", "lora must be true or false, not 'no'"),
        ("lora", 1, "lora must be true or false, not 1"),
        ("output", 2024, "output must be text, not 2024"),
        ("output", ["a"], r"output must be text, not \['a'\]"),
        ("lr", "fast", "lr must be a number, not 'fast'"),
        ("lr", True, "lr must be a number, not True"),
        ("lr", float("nan"), "lr must be a number, not nan"),
        ("data", 5, "data must be a list of texts, not 5"),
        ("data", ["a", 5], "data must be a list of texts"),
        ("max_steps", "5.5", "max_steps must be a whole number, not '5.5'"),
        ("max_steps", [1], r"max_steps must be a whole number, not \[1\]"),
        ("schedule", "slow", "schedule must be one of cosine, linear, constant, not 'slow'"),
        ("device_memory", "-3GiB", "device_memory '-3GiB' is not a size"),
        ("host_memory", "64", "host_memory is 64 bytes; did you mean 64GiB"),
        ("disk", "/scratch:lots", "disk size 'lots' is not a size"),
        ("frozen_weights", "int2", "frozen_weights must be one of int8, int4, not 'int2'"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        settings_of({"model": "m", "data": "d", "output": "o", name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", "1e-5", 1e-5),
        ("lr", 1, 1.0),
        ("max_steps", "5", 5),
        ("max_steps", 1e3, 1000),
        ("output", "2024", "2024"),
        ("data", "one.jsonl", ("one.jsonl",)),
        ("data", ["a", "b"], ("a", "b")),
        ("lora", True, True),
        ("seq_len", None, None),
    ],
)
def test_values_become_what_a_setting_is(name: str, value: Any, expected: Any) -> None:
    found = getattr(
        settings_of({"model": "m", "data": "d", "output": "o", "lora": True, name: value}), name
    )
    assert found == expected
    assert type(found) is type(expected)
