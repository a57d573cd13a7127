"""The count of a step's operations, against arithmetic done by hand."""

import pytest
from transformers import AutoModelForCausalLM

from outcore.bench.flops import block_list, count_parameters, step_flops
from outcore.shapes import shape_config, shape_dict


def test_qwen2_5_7b_untied() -> None:
    config = shape_config("qwen2.5-7b", tie_word_embeddings=False)
    by_hand = 6 * (6.525e9 + 0.545e9) * 32768 + 6 * 28 * 16 * 2048**2 * 3584
    assert step_flops(config, 16, 2048) == pytest.approx(by_hand, rel=0.01)


def test_a_tied_head_counts_as_much_as_an_untied_one() -> None:
    tied = step_flops(shape_config("qwen2.5-3b", tie_word_embeddings=True), 16, 2048)
    untied = step_flops(shape_config("qwen2.5-3b", tie_word_embeddings=False), 16, 2048)
    assert tied == untied


def test_plain_values_count_like_a_config() -> None:
    assert step_flops(shape_dict("qwen3-0.6b"), 2, 128) == step_flops(
        shape_config("qwen3-0.6b"), 2, 128
    )


def test_attention_grows_with_the_square_of_the_length() -> None:
    config = shape_config("smollm2-135m")
    # The same number of tokens in both, so that only attention differs.
    short, long = step_flops(config, 8, 1024), step_flops(config, 1, 8192)
    assert long - short == 6 * 30 * 576 * (8192**2 - 8 * 1024**2)


@pytest.mark.parametrize(
    ("name", "active_billions"),
    # Published numbers of active parameters, less the embedding table.
    [("mixtral-8x7b", 12.75), ("qwen3-30b-a3b", 3.04), ("gpt-oss-20b", 3.61)],
)
def test_only_visited_experts_count(name: str, active_billions: float) -> None:
    counts = count_parameters(shape_config(name))
    assert (counts.blocks_active + counts.head) / 1e9 == pytest.approx(active_billions, rel=0.01)
    assert counts.blocks > 3 * counts.blocks_active


def test_blocks_are_found_whatever_they_are_called() -> None:
    config = shape_config("smollm2-135m", num_hidden_layers=3)
    assert len(block_list(AutoModelForCausalLM.from_config(config))) == 3
