"""Examples for other libraries: they learn, save what those load, and take a directory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outcore

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _needs_accelerate() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")


@pytest.fixture(autouse=True)
def _tiny_models(
    one_torch_thread: None, closed_engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # TRL then counts no visit


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def losses(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_model(found: Any, expected: Any) -> None:
    tensors = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors[name].cpu(), tensor.cpu()), name


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What stands for a real model: one in a directory, with its tokenizer."""
    pytest.importorskip("trl", reason="needs trl")
    path = str(tmp_path_factory.mktemp("model"))
    model, tokenizer = example("trl_sft").start(None)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_plain_loop(tmp_path: Path) -> None:
    found = example("plain_loop").main(["--steps", "30", "--output", str(tmp_path)])
    assert len(found) == 30
    assert found[-1] < 0.4 * found[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 256


def test_plain_loop_of_a_directory(directory: str, tmp_path: Path) -> None:
    arguments = ["--model", directory, "--steps", "2", "--device-memory", "8MiB"]
    assert len(example("plain_loop").main(arguments)) == 2


def test_hf_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    module = example("hf_trainer")
    trainer = module.main(["--steps", "20", "--output", str(tmp_path)])
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]
    assert losses(trainer, "eval_loss")[-1] < 4
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), trainer.model)
    longer = module.main(["--steps", "30", "--output", str(tmp_path), "--resume"])
    assert longer.state.global_step == 30
    assert losses(longer)[:2] == losses(trainer)  # its history came along
    assert losses(longer)[-1] < losses(trainer)[-1]


def test_hf_trainer_of_a_directory(directory: str, tmp_path: Path) -> None:
    trainer = example("hf_trainer").main(
        ["--model", directory, "--steps", "2", "--device-memory", "8MiB", "--output", str(tmp_path)]
    )
    assert outcore.engine_of(trainer.model).report()[0].budget_bytes == 8 << 20


def test_trl_sft(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl")
    trainer = example("trl_sft").main(["--steps", "20", "--output", str(tmp_path)])
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]
    outcore.engine_of(trainer.model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_model(again, trainer.model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("2 plus 3 is")["input_ids"]) == "2 plus 3 is"


def test_trl_dpo_of_a_directory(directory: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    pytest.importorskip("trl", reason="needs trl")
    module = example("trl_dpo")
    module.main(["--model", directory, "--steps", "2", "--output", str(tmp_path / "real")])
    trainer = module.main(["--steps", "20", "--output", str(tmp_path / "tiny")])
    assert trainer.ref_model is None
    assert losses(trainer)[-1] < losses(trainer)[0] < 0.7
    model, _ = module.start(None)
    assert_same_model(peft.PeftModel.from_pretrained(model, tmp_path / "tiny"), trainer.model)


def test_lora(directory: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    module = example("lora")
    module.main(["--model", directory, "--steps", "2", "--output", str(tmp_path / "real")])
    found, model = module.main(["--steps", "12", "--output", str(tmp_path / "tiny")])
    assert found[-1] < 0.9 * found[0]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(module.TINY)
    assert_same_model(peft.PeftModel.from_pretrained(base, tmp_path / "tiny"), model)
    names = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
