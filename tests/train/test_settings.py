"""Settings: from names and values, from YAML, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outcore.train.settings import FULL_LR, LORA_LR, read_settings, settings_of, with_seq_len

LEAST = {"model": "m", "data": "d.jsonl", "output": "o"}


def test_one_file_or_several() -> None:
    assert settings_of(LEAST).data == ("d.jsonl",)
    assert settings_of({**LEAST, "data": ["a", "b"]}).data == ("a", "b")


def test_the_learning_rate_is_that_of_the_method() -> None:
    assert settings_of(LEAST).learning_rate == FULL_LR
    assert settings_of({**LEAST, "lora": True}).learning_rate == LORA_LR
    assert settings_of({**LEAST, "lora": True, "lr": 3e-4}).learning_rate == 3e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "missing: model"),
        ({"lerning_rate": 1}, "unknown setting 'lerning_rate'"),
        ({"max_step": 1}, "max_steps\\?"),
        ({"max_steps": 0}, "max_steps must be at least 1, not 0"),
        ({"schedule": "cubic"}, "cosine, linear, constant"),
        ({"held_out": 1.5}, "held_out must be from 0 to below 1"),
        ({"held_out": 0.1, "eval_data": "e"}, "give one"),
        ({"eval_every": 5}, "needs something to evaluate on"),
        ({"seq_len": 512, "tokens_per_step": 256}, "less than one sequence"),
        ({"keep": -1}, "keep must be at least 0"),
        ({"frozen_weights": "int4"}, "add --lora"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of({**LEAST, **changes})


def test_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: [a, b]\noutput: o\nlr: 1e-5\nmax-steps: 7\nlora: true\n")
    settings = settings_of(read_settings(path))
    assert (settings.lr, settings.max_steps, settings.lora) == (1e-5, 7, True)


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
