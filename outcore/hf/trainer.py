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

from outcore.engine.offload import engine_of, is_offloaded, offload, release
from outcore.hf import checkpoints
from outcore.hf.accelerator import leave_in_place
from outcore.hf.arguments import (
    adamw_options,
    check_arguments,
    check_optimizer,
    check_types,
    offload_options,
)
from outcore.hf.callbacks import wait_before_readers
from outcore.hf.mixed_precision import compute_as_autocast_does
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
        self._offloaded_here: list[nn.Module] = []
        parent = super().__init__
        given = inspect.signature(parent).bind(*args, **kwargs).arguments
        if isinstance(given.get("model"), str) and given.get("args") is not None:
            _load_on_host(given["args"])  # TRL loads it, and would spread it over the device
        try:
            parent(*args, **kwargs)
        except BaseException:  # the model is as it was for another try
            for model in self._offloaded_here:
                release(model)
            raise
        wait_before_readers(self.callback_handler)

    # The model: offloaded where others are moved. All of this runs inside Trainer.__init__.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Blocks compute in their own type; mixed_precision.py does for the rest what this would.
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
            self._offloaded_here = [m for m in self._offloaded_here if m is not self.model]
            self.model = None
        model: nn.Module = super().call_model_init(trial)
        return self._offload(model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model: its engine has placed it."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model

    def _prepared(self, model: nn.Module) -> nn.Module:
        """Take a model that accelerate is to prepare; one that is not trained is a reference."""
        if model is not self.model and not is_offloaded(model):
            model.requires_grad_(False)
            return self._offload(model)
        return model

    def _offload(self, model: nn.Module) -> nn.Module:
        if is_offloaded(model):
            if not _is_among(model, self._offloaded_here):
                self._check_offloaded(model)
        elif any(hasattr(parameter, "_outcore") for parameter in model.parameters()):
            raise ValueError(
                "the model was offloaded before it was wrapped (in a PEFT model, for example): "
                "give the trainer the model as from_pretrained returns it"
            )
        else:
            model = offload(model, **offload_options(self.args, model, self._offload_given))
            self._offloaded_here.append(model)
        if self.args.bf16 and engine_of(model).options.dtype == torch.bfloat16:
            compute_as_autocast_does(model)
        return model

    def _check_offloaded(self, model: nn.Module) -> None:
        """Refuse a user's offloaded model where the arguments ask for another."""
        engine = engine_of(model)
        if self._offload_given:
            raise ValueError(
                "the model is offloaded already, and offload= has options for it: leave offload= "
                "out, or call outcore.release(model) first"
            )
        if engine.device.type != self.args.device.type:
            raise ValueError(
                f"the model computes on {engine.device}, the TrainingArguments on "
                f"{self.args.device}: offload it there, or pass use_cpu=True"
            )
        check_types(self.args, engine.options.dtype)

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
        if "max_grad_norm" not in self._adamw_given:
            check_optimizer(self.args, self._adamw)  # which others may have made, or changed

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


def _is_among(model: nn.Module, models: list[nn.Module]) -> bool:
    return any(known is model for known in models)


def _load_on_host(args: Any) -> None:
    """Let TRL load models into host memory, from where they are offloaded."""
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
