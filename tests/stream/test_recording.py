"""A recording says what each lane did, when, and nothing while nobody asks."""

from __future__ import annotations

import itertools
import statistics
import threading
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.errors import LaneError
from outcore.optim.gradient_ring import Loan
from outcore.stream.lanes import Lane
from outcore.stream.recording import recorded, recording
from outcore.timeline import LANES

CPU = torch.device("cpu")


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    return LlamaForCausalLM(config).train()


def test_spans_follow_the_order_of_a_lane() -> None:
    lane = Lane("copies", hardware="to device")
    lane.submit(lambda: None, label="before")
    with recording(CPU) as found:
        first = lane.submit(lambda: time.sleep(0.02), label="first")
        lane.submit(lambda: time.sleep(0.01), after=[first]).block()
        lane.submit(lambda: None).block()
    lane.submit(lambda: None, label="after").block()
    lane.close()
    spans = [span for span in found.spans() if span.name != "before"]
    assert [span.name for span in spans] == ["first", "copies", "copies"]
    assert {span.lane for span in spans} == {"to device"}
    assert 0.015 < spans[0].end_s - spans[0].start_s < 1.0
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_waiting_without_a_fence_is_no_work() -> None:
    lane = Lane("copies", hardware="to host")
    with recording(CPU) as found:
        lane.submit(lambda: time.sleep(0.01), first=lambda: time.sleep(0.2)).block()
    lane.close()
    (span,) = found.spans()
    assert span.start_s >= 0.2
    assert 0.01 <= span.end_s - span.start_s < 0.15


def test_a_failure_while_waiting_is_the_works_own() -> None:
    def fail() -> None:
        raise ValueError("nothing came")

    lane, done = Lane("copies"), []
    with pytest.raises(LaneError, match="nothing came"):
        lane.submit(lambda: done.append(1), first=fail).block()
    lane.close()
    assert not done


def test_only_one_recording_at_a_time() -> None:
    with recording(CPU), pytest.raises(RuntimeError, match="already"), recording(CPU):
        pass
    with recording(CPU):
        pass


def test_many_threads_record() -> None:
    def work(index: int) -> None:
        for _ in range(50):
            with recorded("host cores", str(index)):
                pass

    with recording(CPU) as found:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found.spans()) == 200


def test_a_step_shows_its_lanes() -> None:
    model = outcore.offload(small_llama(), device="cpu", activations="offload", num_visits=2)
    optimizer = outcore.AdamW(model, lr=1e-3)
    ids = torch.randint(0, 97, (2, 8))
    with recording(CPU) as found:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        outcore.synchronize(model)
    spans = found.spans()
    assert {span.lane for span in spans} <= set(LANES)
    names = [(span.lane, span.name) for span in spans]
    for block in range(3):
        name = f"model.layers.{block}"
        for phase in ("forward", "backward"):
            assert names.count(("compute", f"{phase} {name}")) == 2
        assert names.count(("to host", f"gradient {name}")) == 2
        assert ("to device", f"weights {name}") in names
        assert any(label == f"update {name}" for _, label in names)
    assert names.count(("compute", "head and loss")) == 2
    outcore.release(model)


def test_gradients_that_wait_for_a_buffer_are_not_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of updates during the backward go through a ring, whose buffers updates give back."""
    take = Loan.take

    def take_late(loan: Loan) -> torch.Tensor | None:
        time.sleep(0.05)
        return take(loan)

    monkeypatch.setattr(Loan, "take", take_late)
    model = outcore.offload(small_llama(), device="cpu", num_visits=0)
    optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=True)
    ids = torch.randint(0, 97, (2, 8))
    with recording(CPU) as found:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        outcore.synchronize(model)
    copies = [span for span in found.spans() if span.lane == "to host"]
    assert len(copies) >= 3
    assert statistics.median(span.end_s - span.start_s for span in copies) < 0.03
