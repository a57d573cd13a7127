"""``bf16=True`` means what it means in transformers: blocks in bf16, losses and outputs in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from trainer_runs import llama, logged, rows, run
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import outcore
from outcore.hf import Trainer

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
EVALUATED: dict[str, Any] = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1}


def masked() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SMALL))


def classifier() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SMALL, num_labels=3))


class WithFeature(nn.Module):
    """Joins a feature, which comes in fp32, to what a model finds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = llama().model
        self.score = nn.Linear(33, 3)

    def forward(self, input_ids: Tensor, feature: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(input_ids).last_hidden_state[:, -1]
        logits = self.score(torch.cat([hidden, feature[:, None]], -1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_feature() -> Any:
    torch.manual_seed(0)
    return WithFeature()


def classified(*, feature: bool = False) -> dict[str, Any]:
    made = []
    for i, row in enumerate(rows()):
        made.append({"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)})
        if feature:
            made[-1]["feature"] = torch.tensor(i / 10)
    return {"train_dataset": made, "eval_dataset": made[:9]}


def weighted(trainer: Any) -> Any:
    """With a loss of one's own, as many scripts have it."""

    class Weighted(trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.linspace(1, 2, outputs.logits.shape[-1])
            loss = nn.functional.cross_entropy(
                outputs.logits.flatten(0, -2), labels.flatten(), weight=weight
            )
            return (loss, outputs) if return_outputs else loss

    return Weighted


@pytest.mark.parametrize(
    ("make", "more", "of"),
    [
        (masked, {}, None),
        (classifier, classified(), None),
        (classifier, classified(), weighted),
        (llama, {}, None),
        (llama, {}, weighted),
        (with_feature, classified(feature=True), None),
    ],
    ids=["masked", "classifier", "weighted", "causal", "causal, weighted", "feature in fp32"],
)
def test_losses_follow_transformers(tmp_path: Path, make: Any, more: Any, of: Any) -> None:
    curves = []
    for kind in (transformers.Trainer, Trainer):
        trainer = run(
            kind if of is None else of(kind),
            tmp_path / kind.__module__.split(".")[0],
            model=make(),
            more=more,
            learning_rate=1e-4,
            **EVALUATED,
        )
        curves.append([value for _, _, value in logged(trainer, ("loss", "eval_loss"))])
    assert len(curves[0]) == 12
    assert curves[1] == pytest.approx(curves[0], rel=3e-3)
    rounded = [torch.tensor(value).bfloat16().item() for value in curves[1]]
    assert rounded != pytest.approx(curves[1], rel=1e-6)


def test_smoothed_labels(tmp_path: Path) -> None:
    curves = []
    for kind in (transformers.Trainer, Trainer):
        folder = tmp_path / kind.__module__.split(".")[0]
        trainer = run(kind, folder, label_smoothing_factor=0.1, learning_rate=1e-4, **EVALUATED)
        curves.append([value for _, _, value in logged(trainer, ("loss", "eval_loss"))])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_blocks_of_causal_models_are_as_without_a_trainer(tmp_path: Path) -> None:
    """No autocast reaches them: the loss is that of a plain loop, to the bit."""
    alone = outcore.offload(llama().train(), device="cpu", dtype="bf16")
    batch = {name: torch.stack([row[name] for row in rows(4)]) for name in rows(1)[0]}
    expected = alone(**batch)
    trainer = run(Trainer, tmp_path, bf16=True, max_steps=1, learning_rate=0.0, weight_decay=0.0)
    seen: list[bool] = []
    inner = trainer.model.model.layers[0].mlp
    inner.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    found = trainer.model.train()(**batch)
    assert seen == [False]
    assert torch.equal(found.loss, expected.loss)
    assert (found.logits.dtype, expected.logits.dtype) == (torch.float32, torch.bfloat16)


def test_a_released_model_is_as_it_was(tmp_path: Path) -> None:
    trainer = run(Trainer, tmp_path, model=masked(), bf16=True)
    assert "forward" in vars(trainer.model)
    outcore.release(trainer.model)
    assert "forward" not in vars(trainer.model)


def test_a_model_that_computes_in_fp32_is_not_trained_in_bf16(tmp_path: Path) -> None:
    model = outcore.offload(llama(), device="cpu")
    with pytest.raises(ValueError, match='dtype="bf16", or pass bf16=False'):
        run(Trainer, tmp_path, model=model, bf16=True)
