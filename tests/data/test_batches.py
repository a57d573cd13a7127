"""Batches: every token where it belongs, and the same ones after a stop as without it."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made_here import CHATML, chat, documents, make_tokenizer, write_jsonl
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.masking_utils import find_packed_sequence_indices

from outcore.data.batches import Batch, Batches, BatchOptions
from outcore.data.encode import EncodeOptions
from outcore.data.split import split_held_out
from outcore.data.token_cache import TokenCache
from outcore.data.tokenize import tokenize

NUM_DOCUMENTS = 37


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """Texts of 2 to 38 tokens, no two alike."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": chr(300 + n) + "x" * n} for n in range(NUM_DOCUMENTS)]
    return tokenize(
        write_jsonl(folder / "a.jsonl", rows), make_tokenizer(), cache_dir=folder / "cache"
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"p{n}", "chosen": f"good{n}", "rejected": "b" * n} for n in range(11)]
    return tokenize(
        write_jsonl(folder / "a.jsonl", rows), make_tokenizer(), cache_dir=folder / "cache"
    )


def all_batches(cache: TokenCache, **options: Any) -> list[Batch]:
    options = {"batch_size": 3, "seq_len": 40, "num_epochs": 1, **options}
    with Batches(cache, BatchOptions(**options)) as batches:
        return list(batches)


def same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def pieces_in(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each stretch whose positions go up from 0, with the padding."""
    found = []
    for ids, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        starts = torch.nonzero(positions == 0).flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:end].tolist() == list(range(end - start))
            found.append((ids[start:end].tolist(), labels[start:end].tolist()))
    return found


@settings(deadline=None)
@given(
    batch_size=st.integers(1, 5), seq_len=st.integers(2, 60), seed=st.integers(0, 3), data=st.data()
)
def test_packed_batches_hold_every_token_once(
    cache: TokenCache, batch_size: int, seq_len: int, seed: int, data: st.DataObject
) -> None:
    too_long = data.draw(st.sampled_from(["split", "cut"]))
    batches = all_batches(
        cache, batch_size=batch_size, seq_len=seq_len, seed=seed, too_long=too_long
    )
    found = []
    for batch in batches:
        assert all(tensor.shape == (batch["input_ids"].shape) for tensor in batch.values())
        assert batch["input_ids"].shape[1] == seq_len
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
        for ids, labels in pieces_in(batch):
            if all(label == -100 for label in labels) and set(ids) == {0}:
                continue  # padding
            assert labels == [-100, *ids[1:]]
            found.append(ids)
    expected = [
        ids[start : start + seq_len].tolist()
        for ids in documents(cache)
        for start in range(0, len(ids), seq_len)
        if too_long == "split" or start == 0
    ]
    # Of a token in a piece by itself nothing can be learned.
    assert sorted(found) == sorted(piece for piece in expected if len(piece) > 1)


@settings(deadline=None)
@given(seq_len=st.integers(2, 40), packing=st.booleans())
def test_no_sequence_is_without_labels(cache: TokenCache, seq_len: int, packing: bool) -> None:
    """A step on such sequences alone would have a loss of 0 / 0."""
    for batch in all_batches(cache, batch_size=1, seq_len=seq_len, packing=packing):
        assert int((batch["labels"][:, 1:] != -100).sum()) > 0


def test_padding_is_one_piece_at_the_end(cache: TokenCache) -> None:
    """Kernels for packed sequences take time for each piece, so it must not be one a token."""
    num_padded = 0
    for batch in all_batches(cache, seq_len=64, batch_size=1):
        pieces = [ids for ids, _ in pieces_in(batch)]
        assert sum(set(ids) == {0} for ids in pieces) <= 1
        num_padded += set(pieces[-1]) == {0}
    assert num_padded > 0


@pytest.mark.parametrize("packing", [True, False])
def test_padding_is_not_counted_as_tokens(cache: TokenCache, packing: bool) -> None:
    options = BatchOptions(batch_size=3, seq_len=32, packing=packing, num_epochs=1)
    with Batches(cache, options) as batches:
        counted = [batches.num_tokens(number) for number in range(len(list(batches)))]
        assert sum(counted) == batches.pieces.lengths.sum()
        if not packing:
            masks = [batches.batch(number)["attention_mask"] for number in range(len(counted))]
            assert counted == [int(mask.sum()) for mask in masks]


def test_transformers_sees_the_same_pieces(cache: TokenCache) -> None:
    for batch in all_batches(cache):
        seen = find_packed_sequence_indices(batch["position_ids"])
        expected = (batch["position_ids"] == 0).cumsum(-1) - 1
        assert seen is not None
        assert torch.equal(seen, expected)


def test_without_packing_each_document_has_a_row(cache: TokenCache) -> None:
    rows: list[list[int]] = []
    for batch in all_batches(cache, packing=False, shuffle=False):
        assert set(batch) == {"input_ids", "labels", "attention_mask"}
        assert batch["input_ids"].shape[1] == 40
        for ids, labels, mask in zip(*(batch[name] for name in batch), strict=True):
            length = int(mask.sum())
            assert mask.tolist() == [1] * length + [0] * (40 - length)
            assert labels.tolist() == [-100, *ids[1:length].tolist(), *[-100] * (40 - length)]
            rows.append(ids[:length].tolist())
    assert rows == [ids.tolist() for ids in documents(cache)]


def test_rows_as_wide_as_the_longest(cache: TokenCache) -> None:
    narrow = all_batches(cache, packing=False, shuffle=False, pads_to_seq_len=False)
    lengths = [len(ids) for ids in documents(cache)]
    assert [batch["labels"].shape[1] for batch in narrow] == [
        max(lengths[start : start + 3]) for start in range(0, NUM_DOCUMENTS, 3)
    ]


def test_answers_behind_the_cut_are_left_out(tmp_path: Path, make_cache: Any) -> None:
    rows = [
        {"messages": chat("short", "answer")},
        {"messages": chat("a question " * 20, "that leaves no room")},
        {"messages": chat("short", "but the answer " * 20)},
    ]
    tokenizer = make_tokenizer(CHATML)
    cache = make_cache(write_jsonl(tmp_path / "a.jsonl", rows), using=tokenizer)
    with Batches(cache, BatchOptions(batch_size=1, seq_len=64, num_epochs=1)) as batches:
        assert batches.num_sequences == 2
        assert (batches.pieces.num_dropped, batches.pieces.num_cut) == (1, 1)
        for batch in batches:
            assert (batch["labels"] != -100).any()
    with pytest.raises(ValueError, match="3 of 3 examples have nothing to learn from"):
        Batches(cache, BatchOptions(batch_size=1, seq_len=4))
    with pytest.raises(ValueError, match="only texts can be split"):
        Batches(cache, BatchOptions(batch_size=1, seq_len=64, too_long="split"))


def sequences_of(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in batches for row in batch["input_ids"]]


@pytest.mark.parametrize("packing", [True, False])
def test_each_epoch_has_every_sequence_in_another_order(cache: TokenCache, packing: bool) -> None:
    batches = all_batches(cache, num_epochs=3, packing=packing, batch_size=4)
    assert all(len(batch["input_ids"]) == 4 for batch in batches[:-1])
    rows = sequences_of(batches)
    size = len(rows) // 3
    epochs = [rows[start : start + size] for start in range(0, len(rows), size)]
    assert len(rows) % 3 == 0
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert rows == sequences_of(all_batches(cache, num_epochs=3, packing=packing, batch_size=4))
    other = sequences_of(all_batches(cache, num_epochs=3, packing=packing, seed=1, batch_size=4))
    assert other != rows


def test_the_last_batch(cache: TokenCache) -> None:
    for num_epochs in (1, 2):
        options = BatchOptions(batch_size=5, seq_len=40, num_epochs=num_epochs, packing=False)
        with Batches(cache, options) as batches:
            sizes = [len(batch["input_ids"]) for batch in batches]
            assert batches.num_batches == len(sizes)
        total = num_epochs * NUM_DOCUMENTS
        assert sizes == [5] * (total // 5) + [total % 5]
        dropped = all_batches(
            cache, batch_size=5, num_epochs=num_epochs, packing=False, drop_last=True
        )
        assert [len(batch["input_ids"]) for batch in dropped] == sizes[:-1]


def test_a_part_of_an_epoch(cache: TokenCache) -> None:
    whole = sequences_of(all_batches(cache, packing=False))
    for part in (0.001, 0.5, 1.5):
        found = sequences_of(all_batches(cache, packing=False, num_epochs=part))
        assert len(found) == max(1, round(part * NUM_DOCUMENTS))
        assert found[: len(whole)] == whole[: len(found)]


def test_a_batch_larger_than_an_epoch(pairs: TokenCache) -> None:
    options = BatchOptions(batch_size=30, seq_len=40, seed=4)
    with Batches(pairs, options) as batches:
        rows = sequences_of([next(batches)])[::2]
    assert sorted(rows[:11]) == sorted(rows[11:22])
    assert rows[:11] != rows[11:22]


@settings(deadline=None)
@given(
    stop=st.integers(0, 30),
    other=st.integers(0, 30),
    prefetch=st.integers(0, 4),
    batch_size=st.integers(1, 7),
    packing=st.booleans(),
)
def test_going_on_after_a_stop(
    cache: TokenCache, stop: int, other: int, prefetch: int, batch_size: int, packing: bool
) -> None:
    options = BatchOptions(batch_size=batch_size, seq_len=64, num_epochs=3, packing=packing, seed=5)
    with Batches(cache, options, prefetch=0) as whole:
        expected = list(whole)
    stop, other = min(stop, len(expected)), min(other, len(expected))
    with Batches(cache, options, prefetch=prefetch) as first:
        for _ in range(stop):
            next(first)
        state = first.state_dict()
    with Batches(cache, options, prefetch=prefetch) as second:
        for _ in range(other):  # a state can be loaded at any time
            next(second)
        second.load_state_dict(state)
        assert second.state_dict() == state
        rest = list(second)
    assert len(rest) == len(expected) - stop
    assert all(same(one, wanted) for one, wanted in zip(rest, expected[stop:], strict=True))


def test_a_state_is_a_few_numbers(cache: TokenCache) -> None:
    with Batches(cache, BatchOptions(batch_size=2, seq_len=40)) as batches:
        next(batches)
        next(batches)
        state = batches.state_dict()
        assert batches.epoch == 4 / batches.num_sequences
    assert all(type(value) is int for value in state.values())
    assert state["next_batch"] == 2
    assert len(state) < 12


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"batch_size": 3},
        {"seq_len": 41},
        {"packing": False},
        {"shuffle": False},
        {"too_long": "cut"},
        {"examples": np.arange(30)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_state_of_other_batches_is_refused(cache: TokenCache, change: dict[str, Any]) -> None:
    change = dict(change)
    options = {"batch_size": 2, "seq_len": 20}
    state = Batches(cache, BatchOptions(**options)).state_dict()  # type: ignore[arg-type]
    examples = change.pop("examples", None)
    changed = Batches(cache, BatchOptions(**{**options, **change}), examples=examples)
    with pytest.raises(ValueError, match="this state is of other batches"):
        changed.load_state_dict(state)


def test_a_state_of_other_tokens_is_refused(cache: TokenCache, pairs: TokenCache) -> None:
    options = BatchOptions(batch_size=2, seq_len=40, packing=False)
    state = Batches(cache, options).state_dict()
    with pytest.raises(ValueError, match="tokens_checksum was"):
        Batches(pairs, options).load_state_dict(state)
    with pytest.raises(ValueError, match="next_batch"):
        Batches(cache, options).load_state_dict({**state, "next_batch": -1})


def test_a_state_fits_a_cache_that_was_made_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(20)])
    states = []
    for folder in ("one", "two"):
        made = tokenize(path, make_tokenizer(), cache_dir=tmp_path / folder)
        states.append(Batches(made, BatchOptions(batch_size=2, seq_len=8)).state_dict())
    assert states[0] == states[1]


def test_pairs_stay_together(pairs: TokenCache) -> None:
    tokenizer = make_tokenizer()
    seen = []
    for batch in all_batches(pairs, batch_size=4):
        assert len(batch["input_ids"]) % 2 == 0
        for row in range(0, len(batch["input_ids"]), 2):
            chosen, rejected = (text_of(tokenizer, batch, row + side) for side in (0, 1))
            number = int(chosen[0].split("\n")[0].removeprefix("p"))
            assert chosen == (f"p{number}\ngood{number}<|end|>", f"good{number}<|end|>")
            assert rejected == (f"p{number}\n{'b' * number}<|end|>", f"{'b' * number}<|end|>")
            seen.append(number)
    assert sorted(seen) == list(range(11))
    assert seen != sorted(seen)


def text_of(tokenizer: Any, batch: dict[str, Tensor], row: int) -> tuple[str, str]:
    """All that is attended to, and what counts."""
    ids = batch["input_ids"][row]
    return (
        tokenizer.decode(ids[batch["attention_mask"][row] == 1]),
        tokenizer.decode(ids[batch["labels"][row] != -100]),
    )


def test_pairs_are_not_packed(pairs: TokenCache) -> None:
    with pytest.raises(ValueError, match="pairs cannot be packed"):
        Batches(pairs, BatchOptions(batch_size=1, seq_len=40, packing=True))


def test_a_pair_goes_as_a_whole(tmp_path: Path, make_cache: Any) -> None:
    """One side's answer comes after another long turn, so that it is cut off."""
    late = [{"role": "tool", "content": "wait " * 20}, {"role": "assistant", "content": "bad"}]
    rows = [
        {"prompt": "one", "chosen": "good", "rejected": "bad"},
        {"prompt": "two", "chosen": "good", "rejected": late},
    ]
    made = make_cache(write_jsonl(tmp_path / "a.jsonl", rows))
    with Batches(made, BatchOptions(batch_size=2, seq_len=24, num_epochs=1)) as batches:
        assert batches.pieces.num_dropped == 1
        (batch,) = list(batches)
    assert [text_of(make_tokenizer(), batch, row)[1] for row in (0, 1)] == [
        "good<|end|>",
        "bad<|end|>",
    ]
    assert len(batch["input_ids"]) == 2


def test_a_pair_that_is_cut_twice_is_one_example(tmp_path: Path, make_cache: Any) -> None:
    rows = [
        {"prompt": "a", "chosen": "b" * 20, "rejected": "c" * 20},
        {"prompt": "a", "chosen": "b", "rejected": "c" * 20},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    cache = make_cache(write_jsonl(tmp_path / "a.jsonl", rows))
    with Batches(cache, BatchOptions(batch_size=1, seq_len=8)) as batches:
        assert (batches.pieces.num_cut, batches.num_sequences) == (2, 3)


def test_batches_of_a_split_share_nothing(cache: TokenCache) -> None:
    training, held_out = split_held_out(cache, 0.3)
    rows = []
    for examples in (training, held_out):
        options = BatchOptions(batch_size=2, seq_len=40, num_epochs=1, packing=False)
        with Batches(cache, options, examples=examples) as batches:
            rows.append(set(sequences_of(list(batches))))
    assert len(rows[0]) == len(training)
    assert len(rows[1]) == len(held_out)
    assert not rows[0] & rows[1]


def test_examples_that_are_not_there(cache: TokenCache) -> None:
    for examples in ([-1], [0, NUM_DOCUMENTS]):
        with pytest.raises(ValueError, match=f"from 0 to {NUM_DOCUMENTS - 1}"):
            Batches(cache, BatchOptions(batch_size=1, seq_len=8), examples=np.array(examples))
    with pytest.raises(ValueError, match="no sequences"):
        Batches(cache, BatchOptions(batch_size=1, seq_len=8), examples=np.arange(0))


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"seq_len": 1}, {"num_epochs": 0}, {"too_long": "keep"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BatchOptions(**{"batch_size": 1, "seq_len": 8, **wrong})


def test_no_thread_is_left(cache: TokenCache) -> None:
    batches = Batches(cache, BatchOptions(batch_size=1, seq_len=40))
    next(batches)
    assert num_threads() == 1
    del batches
    gc.collect()
    deadline = time.monotonic() + 5
    while num_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == 0


def num_threads() -> int:
    return sum(thread.name.startswith("outcore-batches") for thread in threading.enumerate())


def test_loss_on_all_counts_questions_too(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("hi", "you")}])
    made = tokenize(
        path,
        make_tokenizer(CHATML),
        cache_dir=tmp_path / "cache",
        options=EncodeOptions(loss_on="all"),
    )
    (batch,) = all_batches(made, packing=False)
    length = int(batch["attention_mask"].sum())
    assert (batch["labels"][0, 1:length] == batch["input_ids"][0, 1:length]).all()


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_in_a_data_loader_of_torch(cache: TokenCache, stop: int) -> None:
    """The same batches, and a state that goes on behind the last of them."""
    expected = all_batches(cache, num_epochs=2)
    options = BatchOptions(batch_size=3, seq_len=40, num_epochs=2)
    with Batches(cache, options) as batches, Batches(cache, options) as others:
        loader: Any = DataLoader(batches, batch_size=None)
        assert len(loader) == len(batches) == len(expected)
        given = iter(loader)
        found = [next(given) for _ in range(stop)]
        others.load_state_dict(batches.state_dict())
        found += list(DataLoader(others, batch_size=None))
        assert len(found) == len(expected)
        assert all(map(same, found, expected))


@pytest.mark.filterwarnings("ignore:Got pickle error")  # which newer torch says beside it
@pytest.mark.parametrize(("start", "error"), [("fork", ValueError), ("spawn", TypeError)])
def test_workers_of_a_data_loader_are_refused(cache: TokenCache, start: str, error: Any) -> None:
    with Batches(cache, BatchOptions(batch_size=3, seq_len=40, num_epochs=1)) as batches:
        loader: Any = DataLoader(
            batches, batch_size=None, num_workers=1, multiprocessing_context=start
        )
        with pytest.raises(error, match="num_workers=0"):
            next(iter(loader))


def test_a_second_loop_is_no_second_epoch(cache: TokenCache) -> None:
    """A loop over nothing would pass for one."""
    with Batches(cache, BatchOptions(batch_size=3, seq_len=40, num_epochs=1)) as batches:
        beginning = batches.state_dict()
        assert same(next(iter(batches)), batches.batch(0))
        assert len(list(batches)) == len(batches) - 1  # a loop that was left is taken up
        end = batches.state_dict()
        with pytest.raises(ValueError, match=r"num_epochs=1 were given out\. .* larger num_epochs"):
            list(batches)
        batches.load_state_dict(end)  # as a run that goes on behind its last step
        assert list(batches) == []
        batches.load_state_dict(beginning)
        assert len(list(batches)) == len(batches)


def test_batches_without_end_have_no_length(cache: TokenCache) -> None:
    with (
        Batches(cache, BatchOptions(batch_size=3, seq_len=40)) as batches,
        pytest.raises(TypeError, match="no end, so no length: give num_epochs"),
    ):
        len(batches)
