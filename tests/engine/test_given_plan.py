"""A plan given to offload: from its file, for this model, and for what the optimizer does."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME
from test_bad_input import Untouched
from test_planned import BLOCKS, make_plan

import outcore
from outcore.machine import machine_named
from outcore.planning.plan import Budgets, Job
from outcore.planning.plan_json import plan_to_dict

LLAMA = BY_NAME["llama"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_is_read_from_its_file(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps(plan_to_dict(make_plan())))
    path = kind(tmp_path / "some.json")
    model = outcore.offload(LLAMA.make(), plan=path, device="cpu")
    assert outcore.engine_of(model).plan == make_plan()
    outcore.release(model)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (plan_to_dict(make_plan()), TypeError, r"outcore\.plan returned.*JSON file.*not dict"),
        (3, TypeError, r"outcore\.plan returned.*JSON file.*not int"),
        ("no/such.json", ValueError, r"'no/such\.json' cannot be read: No such file.*--json"),
        (Path(__file__), ValueError, r"test_given_plan\.py is no JSON file"),
        (Path("/"), ValueError, "'/' cannot be read: Is a directory"),
    ],
)
def test_what_is_no_plan_is_refused(plan: Any, error: Any, message: str) -> None:
    model = LLAMA.make()
    untouched = Untouched(model)
    with pytest.raises(error, match=message):
        outcore.offload(model, plan=plan, device="cpu")
    untouched.check()


def real_plan(model: Any, **options: Any) -> Any:
    options = {"device_memory": "256MiB", "dtype": "fp32", **options}
    return outcore.plan(model, tokens=32, seq_len=8, machine=machine_named("h200-pcie5"), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "has 2 blocks, but the model has 3 blocks"),
        ({"intermediate_size": 64}, r"has 9,280 parameters where model\.layers\.0 has 7,744"),
    ],
)
def test_a_plan_for_another_model_is_refused(changes: dict[str, Any], message: str) -> None:
    config = LLAMA.config()
    for name, value in changes.items():
        setattr(config, name, value)
    plan = real_plan(config)
    model = LLAMA.make()
    untouched = Untouched(model)
    with pytest.raises(ValueError, match=message + r".*outcore\.plan\(model"):
        outcore.offload(model, plan=plan, device="cpu")
    untouched.check()


def test_a_plan_for_another_width_is_refused() -> None:
    model = LLAMA.make()
    untouched = Untouched(model)
    plan = replace(real_plan(model), hidden_size=64)
    with pytest.raises(ValueError, match="hidden states of 64, the model of 32"):
        outcore.offload(model, plan=plan, device="cpu")
    untouched.check()


def test_a_plan_for_this_model_is_taken() -> None:
    """Also where parameters were frozen, or the vocabulary grew, after it was made."""
    model = LLAMA.make()
    plan = real_plan(model)
    model.resize_token_embeddings(101)
    model.model.layers[1].requires_grad_(False)
    outcore.release(outcore.offload(model, plan=plan, device="cpu"))


@pytest.mark.parametrize("clips", [True, False])
def test_an_optimizer_that_clips_as_planned_says_nothing(clips: bool) -> None:
    plan = make_plan(job=replace(make_plan().job, clipping="waiting" if clips else "none"))
    model = outcore.offload(LLAMA.make(), plan=plan, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcore.AdamW(model, update_during_backward=not clips)
    outcore.release(model)


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        (True, r"plan was made for gradients that wait.*\d KiB for them.*clipping=False"),
        (False, r"plan was made for updates during.*\d KiB of gradients.*clipping=True"),
    ],
)
def test_an_optimizer_that_clips_otherwise_warns_and_works(clips: bool, message: str) -> None:
    plan = make_plan(job=replace(make_plan().job, clipping="waiting" if clips else "none"))
    model = outcore.offload(LLAMA.make().train(), plan=plan, device="cpu")
    with pytest.warns(UserWarning, match=message) as caught:
        optimizer = outcore.AdamW(model, update_during_backward=clips)
    assert caught[0].filename == __file__
    ids = torch.randint(0, 90, (4, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    outcore.release(model)


def test_gradients_that_no_plan_has_counted_and_do_not_fit() -> None:
    numel = sum(parameter.numel() for parameter in LLAMA.make().model.layers.parameters())
    budgets = Budgets(host_bytes=15 * numel)  # 16 are needed where gradients wait
    job = Job(tokens=32, seq_len=8, clipping="none", dtype="fp32", budgets=budgets)
    blocks = (replace(BLOCKS[1], activations="recompute"),) * 3
    plan = make_plan(blocks, job=job, num_visits=0)
    model = outcore.offload(LLAMA.make().train(), plan=plan, device="cpu")
    said = r"gradients needs.*made for updates during.*update_during_backward"
    for _ in range(2):  # the first leaves nothing behind
        with pytest.raises(outcore.OutOfBudget, match=said):
            outcore.AdamW(model, max_grad_norm=1.0)
    outcore.release(model)
