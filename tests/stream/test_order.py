"""The learned order: right after one round, and a guess at worst."""

from hypothesis import given
from hypothesis import strategies as st

from outcore.stream.order import LearnedOrder, Use

uses = st.builds(Use, st.sampled_from(["forward", "backward"]), st.integers(0, 5))


@given(st.lists(uses, min_size=1, max_size=8, unique=True), st.integers(0, 7), st.integers(1, 10))
def test_a_round_that_repeats_is_foreseen(round_: list[Use], stop: int, limit: int) -> None:
    order = LearnedOrder()
    for use in round_ * 2:
        order.observe(use)
    stop = stop % len(round_)
    for use in round_[: stop + 1]:
        order.observe(use)
    expected = (round_ * 3)[stop + 1 :][: min(limit, len(round_))]
    assert order.upcoming(limit) == expected


@given(st.lists(uses, max_size=40), st.integers(0, 10))
def test_guesses_are_few_distinct_and_have_been_seen(seen: list[Use], limit: int) -> None:
    order = LearnedOrder()
    for use in seen:
        order.observe(use)
    guesses = order.upcoming(limit)
    assert len(guesses) <= limit
    assert len(set(guesses)) == len(guesses)
    assert set(guesses) <= set(seen)


def test_nothing_is_known_at_first() -> None:
    assert LearnedOrder().upcoming(3) == []
