"""The shapes have the parameter counts that their publishers give."""

import json

import pytest

from outcore.bench.flops import count_parameters
from outcore.shapes import config_from_dict, shape_config, shape_dict, shape_names

# Parameters in billions, tied embeddings once, from the model cards.
PUBLISHED = {
    "deepseek-v3": 671.0,
    "gemma-3-12b": 11.77,  # without the vision tower
    "gemma-3-27b": 27.01,
    "gemma-3-4b": 3.88,
    "gemma-3-1b": 1.00,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "llama-3.1-405b": 405.9,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "mistral-7b": 7.25,
    "mistral-nemo-12b": 12.25,
    "mistral-small-24b": 23.57,
    "mixtral-8x22b": 140.6,
    "mixtral-8x7b": 46.7,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-3b": 3.09,
    "qwen2.5-72b": 72.71,
    "qwen2.5-7b": 7.62,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.77,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.53,
    "qwen3-32b": 32.76,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "smollm2-135m": 0.1345,
}


def test_every_shape_is_checked() -> None:
    assert shape_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    counted = count_parameters(shape_config(name)).total / 1e9
    assert counted == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-3b", 3.397), ("qwen2.5-7b", 7.616)])
def test_the_head_can_be_untied(name: str, billions: float) -> None:
    config = shape_config(name, tie_word_embeddings=False)
    assert count_parameters(config).total / 1e9 == pytest.approx(billions, rel=0.001)


def test_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"qwen2\.5-7b"):
        shape_config("qwen-7b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_survives_json(name: str) -> None:
    shape = shape_dict(name)
    again = config_from_dict(json.loads(json.dumps(shape)))
    assert again.to_dict() == shape_config(name).to_dict()


def test_a_config_needs_its_model_type() -> None:
    with pytest.raises(ValueError, match="model_type"):
        config_from_dict({"hidden_size": 64})
