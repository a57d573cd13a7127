"""outcore.hf.Trainer beside transformers.Trainer: the same curves, logs, metrics and files."""

from __future__ import annotations

import importlib.util
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from trainer_runs import (
    assert_same_bits,
    assert_same_curve,
    gpt2,
    llama,
    logged,
    lora,
    rows,
    run,
    weights,
)
from transformers import LlamaForCausalLM

import outcore
from outcore.hf import Trainer

RUNS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "clipped at every step": {"max_grad_norm": 0.1},
    "never clipped": {"max_grad_norm": 0.0},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2},
    "accumulated and clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.2},
    "other betas": {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "constant after a warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    "polynomial": {"lr_scheduler_type": "polynomial"},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1, "mode": "max"},
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "checkpointed as well": {"gradient_checkpointing": True},
    "tokens counted": {"include_num_input_tokens_seen": "all"},
}


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, llama) for name in RUNS]
    + [(name, gpt2) for name in ("as it comes", "accumulated and clipped", "evaluated")],
)
def test_same_curve_as_transformers(tmp_path: Path, name: str, make: Any) -> None:
    expected = run(transformers.Trainer, tmp_path / "plain", model=make(), **RUNS[name])
    found = run(Trainer, tmp_path / "ours", model=make(), **RUNS[name])
    assert_same_curve(found, expected)
    # An element whose gradient is near zero moves by its rounding alone, as far as any other.
    start, theirs = make().state_dict(), weights(expected)
    for key, tensor in weights(found).items():
        moved = (theirs[key] - start[key]).norm()
        assert (tensor - theirs[key]).norm() <= 1e-3 * moved, key


def test_the_loss_falls(tmp_path: Path) -> None:
    losses = [v for _, name, v in logged(run(Trainer, tmp_path, max_steps=30)) if name == "loss"]
    assert losses[-1] < 0.6 * losses[0]


def test_weight_decay_is_in_the_trainers_groups(tmp_path: Path) -> None:
    expected = run(transformers.Trainer, tmp_path / "plain", model=gpt2(), max_steps=1)
    found = run(Trainer, tmp_path / "ours", model=gpt2(), max_steps=1)
    groups = [
        [(group["weight_decay"], len(group["params"])) for group in trainer.optimizer.param_groups]
        for trainer in (found, expected)
    ]
    assert groups[0] == groups[1]
    assert {decay for decay, _ in groups[0]} == {0.0, 0.1}


def test_placements_change_no_bit(tmp_path: Path) -> None:
    placements: list[dict[str, Any]] = [
        {"weights": "host", "state": "host"},
        {"weights": "device", "state": "device"},
        {"weights": "disk", "state": "disk", "disk": str(tmp_path)},
        {"device_memory": "400KiB", "activations": "recompute", "micro_batch": 2, "num_slots": 2},
    ]
    found = [
        weights(run(Trainer, tmp_path / "out", model=gpt2(), more={"offload": placement}))
        for placement in placements[:3]
    ]
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    trainer = run(Trainer, tmp_path / "out", more={"offload": placements[3]})
    device = outcore.engine_of(trainer.model).report()[0]
    assert device.budget_bytes == 400 << 10
    assert 0 < device.peak_bytes <= 400 << 10


def test_budgets_are_enforced(tmp_path: Path) -> None:
    with pytest.raises(outcore.OutOfBudget):
        run(Trainer, tmp_path, more={"offload": {"device_memory": "20KiB", "weights": "host"}})


def test_metrics_see_the_logits(tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (9, 12, 64)
        return {
            "mean": float(np.mean(prediction.predictions)),
            "best": float(np.max(prediction.predictions)),
        }

    values = [
        run(
            kind, tmp_path / kind.__module__, max_steps=2, more={"compute_metrics": metrics}
        ).evaluate()
        for kind in (transformers.Trainer, Trainer)
    ]
    for name in ("eval_loss", "eval_mean", "eval_best"):
        assert values[1][name] == pytest.approx(values[0][name], rel=1e-4, abs=1e-6)
    trainer = Trainer(
        model=llama(),
        args=transformers.TrainingArguments(
            str(tmp_path / "eval"), use_cpu=True, report_to=[], disable_tqdm=True
        ),
    )
    alone = trainer.predict(rows(9))  # without a train() before
    assert alone.predictions.shape == (9, 12, 64)


def test_saved_as_an_ordinary_directory(tmp_path: Path) -> None:
    trainer = run(Trainer, tmp_path / "out")
    trainer.save_model(str(tmp_path / "saved"))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_bits(dict(again.state_dict()), weights(trainer))
    offloaded = outcore.load(tmp_path / "saved", device="cpu")
    assert_same_bits(dict(offloaded.state_dict()), weights(trainer))


def test_data_loader_workers(tmp_path: Path) -> None:
    curves = [
        logged(
            run(
                Trainer,
                tmp_path / str(num_workers),
                max_steps=3,
                dataloader_num_workers=num_workers,
                eval_strategy="steps",
                eval_steps=2,
            )
        )
        for num_workers in (0, 2)
    ]
    assert curves[0] == curves[1]


def test_a_plain_loop_over_a_data_loader_with_workers() -> None:
    def losses(num_workers: int) -> list[float]:
        model = outcore.offload(llama(), device="cpu")
        optimizer = outcore.AdamW(model, lr=1e-2)
        loader = DataLoader(rows(), batch_size=8, num_workers=num_workers)  # type: ignore[arg-type]
        found = []
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    assert losses(0) == losses(2)


class _Generates(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.made: list[Any] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        prompt = torch.tensor([[3, 6, 9]])
        made = kwargs["model"].generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
        )
        self.made.append(made.tolist())


def test_generating_during_evaluation(tmp_path: Path) -> None:
    made = []
    for kind in (transformers.Trainer, Trainer):
        callback = _Generates()
        trainer = run(
            kind,
            tmp_path / kind.__module__,
            eval_strategy="steps",
            eval_steps=2,
            more={"callbacks": [callback]},
        )
        made.append((callback.made, len(logged(trainer, ("loss",)))))
    assert made[0] == made[1]
    assert len(made[0][0]) == 3


def test_accelerate_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerate_logging = pytest.importorskip("accelerate.logging")
    tracking = pytest.importorskip("accelerate.tracking")
    trainer = run(Trainer, tmp_path, max_steps=2)
    with caplog.at_level(logging.INFO):
        accelerate_logging.get_logger("a test").info(
            "from the main process", main_process_only=True
        )
    assert "from the main process" in caplog.text

    class Tracker(tracking.GeneralTracker):  # type: ignore[misc, name-defined]
        name = "kept"
        requires_logging_directory = False
        tracker = None
        values: list[Any] = []  # noqa: RUF012

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.values.append((step, values))

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("run")
    model = outcore.offload(llama(), device="cpu")
    optimizer = outcore.AdamW(model, lr=1e-2)
    loader = accelerator.prepare(DataLoader(rows(8), batch_size=4))  # type: ignore[arg-type]
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": float(loss.detach())}, step=step)
    accelerator.end_training()
    assert [step for step, _ in Tracker.values] == [0, 1]
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_accelerate_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("state was moved")

    monkeypatch.setattr(outcore.AdamW, "load_state_dict", refuse)
    trainer = run(Trainer, tmp_path, max_steps=2)
    assert trainer.model is trainer.model_wrapped
    assert type(trainer.model) is LlamaForCausalLM
    assert type(trainer._adamw) is outcore.AdamW


def test_a_model_that_is_offloaded_already(tmp_path: Path) -> None:
    model = outcore.offload(llama(), device="cpu", weights="host", state="host")
    optimizer = outcore.AdamW(model, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    found = run(Trainer, tmp_path / "a", model=model, more={"optimizers": (optimizer, None)})
    assert found._adamw is optimizer
    again = outcore.offload(llama(), device="cpu", weights="host", state="host")
    with pytest.raises(ValueError, match=r"leave offload= out, or call outcore\.release"):
        run(Trainer, tmp_path / "b", model=again, more={"offload": {"weights": "host"}})
    optimizer = outcore.AdamW(again, lr=1e-2)
    with pytest.raises(ValueError, match=r"max_grad_norm=0\.5.*has None"):
        run(
            Trainer,
            tmp_path / "c",
            model=again,
            max_grad_norm=0.5,
            more={"optimizers": (optimizer, None)},
        )


def test_clipping_is_not_lost_with_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = outcore.AdamW(self.model.parameters(), lr=1e-2)
            return self.optimizer

    with pytest.raises(ValueError, match=r"max_grad_norm=0\.5, the AdamW has None"):
        run(Own, tmp_path / "a", max_grad_norm=0.5)
    run(Own, tmp_path / "b", max_grad_norm=0)
    options = {"adamw": {"max_grad_norm": 0.1}}
    assert run(Trainer, tmp_path / "c", more=options)._adamw.max_grad_norm == 0.1


def test_accelerate_does_not_clip_in_silence(tmp_path: Path) -> None:
    trainer = run(Trainer, tmp_path)
    with pytest.raises(outcore.OutcoreError, match="max_grad_norm in the arguments"):
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)


def test_a_trainer_that_failed_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        def on_init_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("not today")

    model = llama()
    options = {"offload": {"weights": "host", "state": "host"}}
    with pytest.raises(RuntimeError, match="not today"):
        run(Trainer, tmp_path / "a", model=model, more={**options, "callbacks": [Fails]})
    found = run(Trainer, tmp_path / "b", model=model, more=options)
    assert logged(found) == logged(run(Trainer, tmp_path / "c", more=options))


def test_two_trainers_one_after_the_other(tmp_path: Path) -> None:
    model = llama()
    run(Trainer, tmp_path / "a", model=model)
    with pytest.raises(outcore.OutcoreError, match=r"outcore\.release\(model\)"):
        run(Trainer, tmp_path / "b", model=model)
    outcore.release(model)
    first = run(Trainer, tmp_path / "c", model=model)
    plain = llama()
    for name in ("d", "e"):
        trainer = run(transformers.Trainer, tmp_path / name, model=plain)
    assert [x[2] for x in logged(first)] == pytest.approx([x[2] for x in logged(trainer)], rel=1e-3)


def test_an_accelerator_made_anew_finds_the_model_offloaded(tmp_path: Path) -> None:
    """As each trial of a search for hyperparameters makes one."""
    more = {"model_init": lambda: llama(), "offload": {"weights": "host"}}
    trainer = run(Trainer, tmp_path, more=more)
    trainer.model = trainer.call_model_init()
    trainer.create_accelerator_and_postprocess()


def test_an_optimizer_of_torch_is_refused(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD would see no gradients"):
        run(Trainer, tmp_path, model=model, more={"optimizers": (optimizer, None)})
    kinds = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ValueError, match="leave it out"):
        run(Trainer, tmp_path, more={"optimizer_cls_and_kwargs": kinds})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optim": "adafactor"}, "adamw_torch"),
        ({"optim": "adamw_torch_8bit"}, "compact"),
        ({"auto_find_batch_size": True}, "outcore.plan"),
        ({"use_liger_kernel": True}, "chunked loss"),
        ({"bf16_full_eval": True}, "bf16=True"),
        ({"torch_compile_mode": "max-autotune"}, "the default one"),
        ({"torch_compile_backend": "eager"}, '"inductor"'),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run(Trainer, tmp_path, **arguments)


def test_weight_decay_is_the_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the TrainingArguments"):
        run(Trainer, tmp_path, more={"adamw": {"weight_decay": 0.5}})


def test_without_accelerate_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcore.hf.Trainer is Trainer
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'outcore\[hf\]'"):
        importlib.reload(outcore.hf)


def test_another_device_than_the_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_cpu=True"):
        run(Trainer, tmp_path, more={"offload": {"device": "cuda"}})


def test_steps_with_a_bad_gradient(tmp_path: Path) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 2 else loss

    with pytest.raises(outcore.NonFiniteGradient):
        run(Broken, tmp_path / "a")
    trainer = run(Broken, tmp_path / "b", more={"adamw": {"on_non_finite": "skip"}})
    assert trainer._adamw.num_skipped_steps == 1
    assert trainer._adamw.num_steps == 5
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(trainer).values())


def test_a_model_made_by_the_trainer(tmp_path: Path) -> None:
    more = {"model_init": lambda: llama(seed=4)}
    expected = run(transformers.Trainer, tmp_path / "plain", more=more)
    found = run(Trainer, tmp_path / "ours", more=more)
    assert_same_curve(found, expected)
    first = found.model
    found.train()  # another time from the beginning
    assert found.model is not first
    assert not hasattr(first, "_outcore_engine")
    assert_same_curve(found, expected)


def test_updates_during_the_backward(tmp_path: Path) -> None:
    expected = run(transformers.Trainer, tmp_path / "plain", max_grad_norm=0.0)
    found = run(
        Trainer,
        tmp_path / "ours",
        max_grad_norm=0.0,
        more={"adamw": {"update_during_backward": True}},
    )
    assert_same_curve(found, expected)


def test_two_passes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two passes"):
        run(Trainer, tmp_path, max_grad_norm=1.0, more={"adamw": {"update_during_backward": True}})
    model = outcore.offload(llama(), device="cpu", dtype=torch.float32)
    optimizer = outcore.AdamW(model, max_grad_norm=1.0, update_during_backward=True)
    with pytest.raises(ValueError, match="two passes"):
        run(
            Trainer,
            tmp_path,
            model=model,
            max_grad_norm=1.0,
            more={"optimizers": (optimizer, None)},
        )


def test_lora_through_the_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    expected = run(transformers.Trainer, tmp_path / "plain", model=lora(), max_grad_norm=0.3)
    found = run(Trainer, tmp_path / "ours", model=lora(), max_grad_norm=0.3)
    assert_same_curve(found, expected)
    found.save_model(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    assert_same_bits(dict(again.state_dict()), weights(found))


def test_a_wrapped_offloaded_model_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = outcore.offload(llama(), device="cpu")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="before it was wrapped"):
        run(Trainer, tmp_path, model=wrapped)


@pytest.mark.gpu
def test_on_a_gpu_state_stays_on_the_host(tmp_path: Path) -> None:
    offload = {"weights": "host", "state": "host", "num_visits": 0, "compile": False}
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    plain = run(transformers.Trainer, tmp_path / "plain", model=llama(**shape), use_cpu=False)
    found = run(
        Trainer,
        tmp_path / "ours",
        model=llama(**shape),
        use_cpu=False,
        more={"offload": offload},
    )
    assert_same_curve(found, plain)
    block = found.model.model.layers[2].mlp.up_proj.weight
    assert block.device.type == "cpu"
    assert found.optimizer.state[block]["exp_avg"].device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ShiraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "sparse"),
        ("PrefixTuningConfig", {"num_virtual_tokens": 4}, "prefix tuning"),
    ],
)
def test_methods_of_peft_that_cannot_stream_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = llama(num_key_value_heads=4)
    adapted = peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **options))
    with pytest.raises((ValueError, outcore.OutcoreError), match=words):
        run(Trainer, tmp_path, model=adapted)
