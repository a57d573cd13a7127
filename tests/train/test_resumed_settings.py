"""Settings that change between a run and its continuation: honoured, or refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from train_files import Files

from outcore.errors import StoreError
from outcore.train import loop as loop_module
from outcore.train.changed_settings import changed_settings
from outcore.train.display import Display
from outcore.train.run import train
from outcore.train.settings import to_dict


def quiet() -> Display:
    return Display(Console(quiet=True))


def test_other_values_of_the_optimizer_are_honoured(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(files.settings(max_steps=2), quiet())
    take = loop_module.Run._take_step
    used: list[Any] = []

    def take_step(self: Any) -> Any:
        taken = take(self)
        used.append(
            [(g["weight_decay"], g["betas"], g["eps"]) for g in self.optimizer.param_groups]
        )
        return taken

    monkeypatch.setattr(loop_module.Run, "_take_step", take_step)
    settings = files.settings(
        max_steps=3, resume=True, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6
    )
    train(settings, quiet())
    assert used == [[(0.3, (0.8, 0.9), 1e-6), (0.0, (0.8, 0.9), 1e-6)]]


def test_weight_decay_that_is_new_changes_the_weights(files: Files) -> None:
    outputs = []
    for name, decay in (("without", 0.0), ("with", 0.5)):
        settings = files.settings(name, max_steps=2)
        train(settings, quiet())
        train(replace(settings, max_steps=4, resume=True, weight_decay=decay), quiet())
        outputs.append(load_file(Path(settings.output) / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(outputs[0][name], outputs[1][name])


def test_fewer_steps_than_are_done_are_refused(files: Files) -> None:
    settings = files.settings(max_steps=4)
    train(settings, quiet())
    (Path(settings.output) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="step 4, and only 2 steps are asked for: --max-steps 4"):
        train(replace(settings, max_steps=2, resume=True), quiet())
    train(replace(settings, resume=True), quiet())
    assert (Path(settings.output) / "model.safetensors").exists()


def test_the_setting_that_makes_it_another_model_is_named(files: Files) -> None:
    pytest.importorskip("peft")
    train(files.settings(lora=True, lora_rank=4), quiet())
    other = files.settings(lora=True, lora_rank=8, max_steps=8, resume=True)
    expected = r"is of another model.*here \(\d+ differ\)\. Other settings.*lora_rank was 4, is 8"
    with pytest.raises(StoreError, match=expected):
        train(other, quiet())


def test_what_is_as_before_is_not_told(files: Files) -> None:
    """A checkpoint has lists where settings have tuples."""
    settings = files.settings(max_steps=2)
    before = json.loads(json.dumps(to_dict(settings)))
    assert changed_settings(before, to_dict(settings)) == []
    changed = changed_settings(before, to_dict(replace(settings, data=("b.jsonl",))))
    assert changed == [f"data was {before['data']!r}, is ['b.jsonl']"]
