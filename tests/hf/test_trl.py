"""TRL's SFTTrainer and DPOTrainer over offloaded models, beside themselves without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers_made_here import CHATML, make_tokenizer
from trainer_runs import assert_same_bits, assert_same_curve, llama, state, weights

import outcore
from outcore.hf import Trainer

trl = pytest.importorskip("trl", reason="needs trl")
datasets = pytest.importorskip("datasets", reason="needs datasets")

TOKENIZER = make_tokenizer(CHATML)
SFT_CURVE = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "eval_loss")
DPO_CURVE = ("loss", "grad_norm", "learning_rate", "rewards/margins", "logps/chosen", "eval_loss")


class SFT(Trainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """The change that docs/huggingface.md describes."""


class DPO(Trainer, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    """The same for preference pairs."""


def answers() -> Any:
    return datasets.Dataset.from_list(
        [{"prompt": f"the cat {i}", "completion": f" sat on {i * 7 % 13}"} for i in range(24)]
    )


def chats() -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"hello {i}"},
                    {"role": "assistant", "content": f"world {i * 7 % 13}"},
                ]
            }
            for i in range(24)
        ]
    )


def pairs() -> Any:
    return datasets.Dataset.from_list(
        [
            {"prompt": f"the cat {i}", "chosen": f" sat on {i * 7 % 13}", "rejected": f" said {i}"}
            for i in range(24)
        ]
    )


def model(**changes: Any) -> Any:
    return llama(vocabulary=len(TOKENIZER), **changes)


def adapter(**changes: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft")
    values = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    return peft.LoraConfig(**values)


def run(
    trainer_class: Any,
    folder: Path,
    data: Any,
    *,
    start: Any = None,
    resume: Any = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    is_dpo = issubclass(trainer_class, trl.DPOTrainer)
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    config = (trl.DPOConfig if is_dpo else trl.SFTConfig)(**{**values, **changes})
    trainer = trainer_class(
        model=model() if start is None else start,
        args=config,
        train_dataset=data,
        processing_class=TOKENIZER,
        **(more or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


SFT_RUNS: dict[str, dict[str, Any]] = {
    "answers": {},
    "accumulated": {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"},
    "packed": {"packing": True, "max_length": 32},
    "dft": {"loss_type": "dft"},
}


@pytest.mark.parametrize("name", SFT_RUNS)
def test_sft_has_the_same_curve(tmp_path: Path, name: str) -> None:
    expected = run(trl.SFTTrainer, tmp_path / "plain", answers(), **SFT_RUNS[name])
    found = run(SFT, tmp_path / "ours", answers(), **SFT_RUNS[name])
    assert_same_curve(found, expected, SFT_CURVE)


def test_sft_of_chats_with_evaluation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    curves = [
        run(kind, tmp_path / kind.__module__, chats(), more={"eval_dataset": chats()}, **options)
        for kind in (trl.SFTTrainer, SFT)
    ]
    assert_same_curve(curves[1], curves[0], SFT_CURVE)


def test_sft_with_a_tied_head(tmp_path: Path) -> None:
    curves = [
        run(kind, tmp_path / kind.__module__, answers(), start=model(tie_word_embeddings=True))
        for kind in (trl.SFTTrainer, SFT)
    ]
    assert_same_curve(curves[1], curves[0], SFT_CURVE)


def test_sft_with_lora_saves_its_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    curves = [
        run(kind, tmp_path / kind.__module__, answers(), more={"peft_config": adapter()})
        for kind in (trl.SFTTrainer, SFT)
    ]
    assert_same_curve(curves[1], curves[0], SFT_CURVE)
    curves[1].save_model(str(tmp_path / "saved"))
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "saved")
    assert_same_bits(dict(again.state_dict()), weights(curves[1]))


@pytest.mark.parametrize("with_adapter", [False, True])
def test_sft_resumes_to_the_same_bits(tmp_path: Path, with_adapter: bool) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    more = {"peft_config": adapter(lora_dropout=0.1)} if with_adapter else {}
    whole = run(SFT, tmp_path, answers(), more=more, **options)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(SFT, tmp_path, answers(), more=more, resume=True, **options)
    assert_same_bits(state(resumed), state(whole))


def test_sft_of_a_directory(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    found = run(SFT, tmp_path / "ours", answers(), start=str(tmp_path / "model"))
    expected = run(SFT, tmp_path / "ours", answers())
    assert_same_curve(found, expected, SFT_CURVE)


def test_dpo_with_lora_shares_the_streamed_base(tmp_path: Path) -> None:
    curves = [
        run(kind, tmp_path / kind.__module__, pairs(), more={"peft_config": adapter()})
        for kind in (trl.DPOTrainer, DPO)
    ]
    assert_same_curve(curves[1], curves[0], DPO_CURVE)
    assert curves[1].ref_model is None
    frozen = model().state_dict()
    base = curves[1].model.get_base_model().state_dict()
    name = "model.layers.1.mlp.up_proj"
    assert torch.equal(base[f"{name}.base_layer.weight"], frozen[f"{name}.weight"])


def test_dpo_from_an_adapter_that_was_trained_before(tmp_path: Path) -> None:
    """TRL adds a frozen copy of it as the reference."""
    peft = pytest.importorskip("peft", reason="needs peft")

    def trained() -> Any:
        made = peft.get_peft_model(model(), adapter())
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return made

    curves = [
        run(kind, tmp_path / kind.__module__, pairs(), start=trained())
        for kind in (trl.DPOTrainer, DPO)
    ]
    assert_same_curve(curves[1], curves[0], DPO_CURVE)
    ours, before = weights(curves[1]), trained().state_dict()
    name = next(name for name in before if "layers.1" in name and "lora_B" in name)
    assert torch.equal(ours[name.replace(".default", ".ref")], before[name])
    assert not torch.equal(ours[name], before[name])


def test_dpo_offloads_its_reference_model_too(tmp_path: Path) -> None:
    curves = [
        run(kind, tmp_path / kind.__module__, pairs(), more={"ref_model": model(seed=5)})
        for kind in (trl.DPOTrainer, DPO)
    ]
    assert_same_curve(curves[1], curves[0], DPO_CURVE)
    reference = curves[1].ref_model
    assert outcore.engine_of(reference) is not outcore.engine_of(curves[1].model)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert_same_bits(dict(reference.state_dict()), dict(model(seed=5).state_dict()))


def test_dpo_of_a_directory_makes_its_reference(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    curves = [
        run(kind, tmp_path / kind.__module__, pairs(), start=str(tmp_path / "model"))
        for kind in (trl.DPOTrainer, DPO)
    ]
    assert_same_curve(curves[1], curves[0], DPO_CURVE)
    outcore.engine_of(curves[1].ref_model)


def test_dpo_with_log_probabilities_made_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precompute_ref_log_probs": True, "gradient_accumulation_steps": 2}
    curves = [
        run(kind, tmp_path / kind.__module__, pairs(), **options) for kind in (trl.DPOTrainer, DPO)
    ]
    assert_same_curve(curves[1], curves[0], DPO_CURVE)
    assert curves[1].ref_model is None


def test_a_reference_that_follows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sync_ref_model"):
        run(DPO, tmp_path, pairs(), sync_ref_model=True, more={"ref_model": model()})


def test_a_model_that_is_offloaded_before_lora_is_refused(tmp_path: Path) -> None:
    offloaded = outcore.offload(model(), device="cpu")
    with pytest.raises(ValueError, match="before it was wrapped"):
        run(SFT, tmp_path, answers(), start=offloaded, more={"peft_config": adapter()})


@pytest.mark.gpu
def test_sft_with_lora_on_a_gpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_cpu": False, "bf16": True}
    more = {"peft_config": adapter(), "offload": {"weights": "host", "state": "host"}}
    trainer = run(SFT, tmp_path, answers(), more=more, max_steps=20, **options)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    engine = outcore.engine_of(trainer.model)
    assert engine.options.dtype == torch.bfloat16
    assert all(u.weights_home == "host" for u in engine.units if u.part.is_block)
