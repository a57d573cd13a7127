"""``outcore.hf.Trainer``: transformers' Trainer over an offloaded model.

The loop, the data, the loss, the schedule and the logs stay the Trainer's own. What differs: the
model is offloaded instead of moved, AdamW clips and updates by itself, and checkpoints hold the
state of a run without pickles. As the first base class it works over trainers made from Trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from outcore.engine.offload import engine_of, offload, release
from outcore.hf import checkpoints
from outcore.hf.accelerator import leave_in_place
from outcore.hf.arguments import (
    adamw_options,
    check_arguments,
    check_evaluation,
    check_optimizer,
    offload_options,
)
from outcore.optim.adamw import AdamW


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` whose model need not fit on the device.

    Takes the same arguments, and two more. ``offload``: options for ``outcore.offload``, such as
    ``{"device_memory": "24GiB"}``; a model that is offloaded already is used as it is. ``adamw``:
    options for ``outcore.AdamW`` that TrainingArguments have no name for (``on_non_finite``,
    ``update_during_backward``).
    """

    model: Any  # as Trainer has them
    optimizer_cls_and_kwargs: Any

    def __init__(
        self,
        *args: Any,
        offload: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._offload_given = dict(offload or {})
        self._adamw_given = dict(adamw or {})
        self._checked_checkpoint: str | None = None
        parent = super().__init__
        given = inspect.signature(parent).bind(*args, **kwargs).arguments
        if isinstance(given.get("model"), str) and given.get("args") is not None:
            _load_on_host(given["args"])  # TRL loads it, and would spread it over the device
        parent(*args, **kwargs)

    # The model: offloaded where others are moved. All of this runs inside Trainer.__init__.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The engine computes in its own type: autocast over it would only add casts.
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return {**arguments, "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # other visible GPUs are left alone
        _load_on_host(self.args)  # a reference model that TRL makes
        leave_in_place(self.accelerator, self._prepared)
        if self.model is not None:
            self._offload(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        if self.model is not None:
            release(self.model)  # train() makes the model anew
            self.model = None
        model: nn.Module = super().call_model_init(trial)
        return self._offload(model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model: its engine has placed it."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model

    def _prepared(self, model: nn.Module) -> nn.Module:
        """Take a model that accelerate is to prepare; one that is not trained is a reference."""
        if model is not self.model and not _is_offloaded(model):
            model.requires_grad_(False)
            return self._offload(model)
        return model

    def _offload(self, model: nn.Module) -> nn.Module:
        if _is_offloaded(model):
            if self._offload_given:
                raise ValueError(
                    "the model is offloaded already, and offload= has options for it: leave one out"
                )
            if engine_of(model).device.type != self.args.device.type:
                raise ValueError(
                    f"the model computes on {engine_of(model).device}, the TrainingArguments on "
                    f"{self.args.device}: offload it there, or pass use_cpu=True"
                )
            check_evaluation(self.args, engine_of(model).options.dtype)
            return model
        if any(hasattr(parameter, "_outcore") for parameter in model.parameters()):
            raise ValueError(
                "the model was offloaded before it was wrapped (in a PEFT model, for example): "
                "give the trainer the model as from_pretrained returns it"
            )
        return offload(model, **offload_options(self.args, model, self._offload_given))

    # The optimizer: Outcore's AdamW over the Trainer's own groups. It clips in its step.

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            if self.optimizer_cls_and_kwargs is not None:
                raise ValueError(
                    "optimizer_cls_and_kwargs does not work with an offloaded model, whose "
                    "optimizer is outcore.AdamW: leave it out, and use TrainingArguments"
                )
            self.optimizer_cls_and_kwargs = AdamW, adamw_options(self.args, self._adamw_given)
            try:
                super().create_optimizer(model)
            finally:
                self.optimizer_cls_and_kwargs = None
        else:
            check_optimizer(self.args, self._adamw)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    @property
    def _adamw(self) -> Any:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Clip nothing here: the gradients have left, and AdamW clips them in its step."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Know no norm yet: AdamW's step finds it."""

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._maybe_log_save_evaluate(tr_loss, self._adamw.grad_norm, *args, **kwargs)

    # Checkpoints: ordinary model files, and beside them the state of the run, bit for bit.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; ``True`` resumes from the newest checkpoint that is whole."""
        if resume_from_checkpoint is True:
            newest = checkpoints.newest_whole(self.args.output_dir)
            if newest is None:  # in transformers' words
                raise ValueError(
                    f"No valid checkpoint found in output directory ({self.args.output_dir})"
                )
            self._checked_checkpoint = resume_from_checkpoint = newest
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.save_state(output_dir, self.model, self._adamw, self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: the generators' states are part of the run's."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not checkpoints.has_state(resume_from_checkpoint):  # save_only_model
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and checkpoints.has_state(checkpoint):
            checkpoints.load_state(
                checkpoint,
                self.model,
                self._adamw,
                self.lr_scheduler,
                is_checked=checkpoint == self._checked_checkpoint,
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and checkpoints.has_state(checkpoint):
            checkpoints.load_random(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not checkpoints.has_state(best):
            super()._load_best_model()
            return
        checkpoints.load_state(best, self.model, self._adamw, None, is_checked=False)


def _is_offloaded(model: nn.Module) -> bool:
    # Not getattr: a PEFT model hands on what it does not have to the model inside.
    return "_outcore_engine" in vars(model)


def _load_on_host(args: Any) -> None:
    """Let TRL load models into host memory, from where they are offloaded."""
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
