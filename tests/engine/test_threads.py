"""One offloaded model used by several threads: each gets its own result, and the model stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import batch_of, gradients_of, offloaded
from training import LLAMA, assert_equal, with_optimizer

import outcore


def _in_threads(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("num_slots", [1, 3])
def test_outputs_in_several_threads(num_slots: int) -> None:
    model = offloaded(LLAMA.make(), num_slots=num_slots).eval()
    plain = LLAMA.make().eval()
    before = dict(model.named_parameters())
    wrong = []

    def evaluate(rows: int) -> None:
        for seed in range(15):
            ids = batch_of(seed=seed, sequences=rows)["input_ids"]
            with torch.no_grad():
                ours, theirs = model(ids).logits, plain(ids).logits
            if not torch.allclose(ours, theirs, atol=1e-4):
                wrong.append((rows, seed))

    _in_threads(*(lambda rows=rows: evaluate(rows) for rows in range(2, 6)))
    assert wrong == []
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert_equal(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("options", [{}, {"num_slots": 1}, {"activations": "keep"}])
def test_gradients_of_several_threads_add_up(options: dict[str, Any]) -> None:
    plain = LLAMA.make()
    model, optimizer = with_optimizer(offloaded(LLAMA.make(), **options))
    for seed in range(4):
        plain(**batch_of(seed=seed)).loss.backward()
    for _ in range(3):
        optimizer.zero_grad()
        _in_threads(
            *(lambda s=seed: model(**batch_of(seed=s)).loss.backward() for seed in range(4))
        )
        found = gradients_of(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_gradients_of_an_edge_that_come_at_once_add_up(name: str) -> None:
    """autograd lets go of a parameter before it calls the hooks that come after its addition."""
    num_threads = 4
    plain = LLAMA.make()
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    for seed in range(num_threads):
        plain(**batch_of(seed=seed)).loss.backward()
    together = threading.Barrier(num_threads)

    def meet(gradient: torch.Tensor) -> None:
        together.wait(timeout=60)

    model.get_parameter(name).register_hook(meet)
    for _ in range(20):
        optimizer.zero_grad()
        _in_threads(
            *(
                lambda s=seed: model(**batch_of(seed=s)).loss.backward()
                for seed in range(num_threads)
            )
        )
        found = gradients_of(model)[name]
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_evaluation_beside_training_changes_nothing() -> None:
    """With labels or without: what one thread asks of the head is not what the other one gets."""
    weights = []
    for is_watched in (False, True):
        model, optimizer = with_optimizer(offloaded(LLAMA.make()))
        done = threading.Event()

        def watch(model: Any = model, done: threading.Event = done) -> None:
            while not done.is_set():
                with torch.no_grad():
                    assert type(model(batch_of()["input_ids"]).logits) is torch.Tensor

        def train(model: Any = model, optimizer: Any = optimizer, done: Any = done) -> None:
            try:
                for seed in range(5):
                    optimizer.zero_grad()
                    output = model(**batch_of(seed=seed))
                    assert type(output.logits) is not torch.Tensor
                    output.loss.backward()
                    optimizer.step()
            finally:
                done.set()

        _in_threads(*([train, watch] if is_watched else [train]))
        outcore.synchronize(model)
        weights.append(model.state_dict())
    assert_equal(weights[1], weights[0])
