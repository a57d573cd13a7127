"""One process's part of a run: resume, step by step, and out.

Everything that a resumed run needs is in its checkpoint; the rest follows from the settings and the
step.
"""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outcore
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.contents import checkpoint_bytes
from outcore.checkpoint.folder import CheckpointFolder
from outcore.engine.offload import engine_of
from outcore.engine.run_record import RunRecord
from outcore.errors import NonFiniteGradient, OutcoreError, StoreError
from outcore.planning.plan import WORKING_MEMORY, Plan
from outcore.train import subject
from outcore.train.before_step import BeforeStep
from outcore.train.best_checkpoint import BestCheckpoint
from outcore.train.corpus import Corpus
from outcore.train.display import Display
from outcore.train.evaluation import Evaluated, evaluate
from outcore.train.figures import StepFigures, TrainResult
from outcore.train.finite_weights import told_if_not_finite
from outcore.train.held_room import HeldRoom
from outcore.train.lagged_values import LaggedValues
from outcore.train.metrics import FILE_NAME as METRICS
from outcore.train.metrics import Metrics
from outcore.train.objective import Objective, objective_for
from outcore.train.output_directory import copy_processor, refuse_model, writing
from outcore.train.report_page import FILE_NAME as REPORT
from outcore.train.report_page import write_report
from outcore.train.resuming import resume
from outcore.train.room import (
    BESIDE_CHECKPOINT_BYTES,
    BESIDE_MODEL_BYTES,
    are_on_one_disk,
    check_room_for_model,
    model_bytes,
)
from outcore.train.run_values import RunValues
from outcore.train.saved_model import save_model
from outcore.train.schedule import LearningRate, warmup_steps
from outcore.train.settings import TrainSettings, to_dict
from outcore.train.steady_checkpoints import SteadyCheckpoints
from outcore.train.stopping import StopRequest
from outcore.train.telling import StepTeller
from outcore.views.side_by_side import Measurement

_UNRECORDED_STEPS = 3  # of this process: the first ones compile and fill caches
_RECORDED_STEPS = 3


class Run:
    """A model that is trained, from where its checkpoint has it to its last step."""

    def __init__(
        self,
        settings: TrainSettings,
        display: Display,
        plan: Plan,
        corpus: Corpus,
        tokenizer: Any,
        model: Any,
        folder: CheckpointFolder,
    ) -> None:
        self.settings = settings
        self.display = display
        self.plan = plan
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.model = model
        self.folder = folder
        self.optimizer = subject.make_optimizer(model, settings)
        self.output = Path(settings.output)
        self.lr = LearningRate(
            peak=settings.learning_rate,
            schedule=settings.schedule,
            num_steps=corpus.num_steps,
            num_warmup_steps=warmup_steps(settings.warmup, corpus.num_steps),
            least=settings.min_lr,
        )
        self.flops = plan.prediction.tflops * 1e12 * plan.prediction.step_s
        self.objective: Objective
        self.checkpoints: SteadyCheckpoints | None = None
        self.room_for_checkpoint: HeldRoom
        self.room_for_model: HeldRoom
        self.step = 0
        self.step_tokens = 0  # of the last step, without padding
        self.resumed_step: int | None = None
        self.before_step: BeforeStep
        self.best = BestCheckpoint(folder.path, model, self.optimizer, display.message)
        self.measurement: Measurement | None = None
        self.loss: float | None = None

    def train(self) -> TrainResult:
        """Resume, take the steps that are left, and write the model."""
        self.folder.prepare()  # also where it gets no checkpoint: two runs would mix their files
        try:
            refuse_model(self.settings, self.folder)  # another run may just have written one
            return self._prepared_and_trained()
        finally:
            if not self.settings.keep:
                self.folder.close_and_remove_if_empty()

    def _prepared_and_trained(self) -> TrainResult:
        start_s = time.perf_counter()
        with self.display.preparing(), StopRequest(self.display.stopping) as stop:
            objective = objective_for(
                self.settings,
                self.corpus,
                self.model,
                self.display.reference,
                stops=lambda: stop.is_set,
            )
        if objective is None or stop.is_set:  # also where there was nothing left to compute
            self.step = max(self.folder.steps(), default=0)
            return self._result(stop, start_s, is_prepared=False)
        self.objective = objective
        if self.settings.resume:
            self._resume()
        at_end = model_bytes(self.model, only_adapters=self.settings.lora)
        if not self.settings.keep:
            check_room_for_model(self.output, at_end)
            return self._holding_room(at_end + BESIDE_MODEL_BYTES, 0)
        every, left = self.settings.save_every, self.corpus.num_steps - self.step
        beside = self._bytes_of_best(left)
        if are_on_one_disk(self.output, self.folder.path):
            beside += at_end
        else:  # the checkpoints' folder is a link
            check_room_for_model(self.output, at_end)
        checkpoints = AsyncCheckpoints(
            self.folder,
            self.model,
            self.optimizer,
            while_training=every is not None,
            num_saves=1 + (left // every if every is not None else 0),
            beside_bytes=beside,
        )
        self.checkpoints = SteadyCheckpoints(
            checkpoints,
            saved_step=self.resumed_step,
            tell=self.display.message,
        )
        # With --save-every there is an earlier one, should the last one fail.
        only = 0
        if every is None:
            only = checkpoint_bytes(self.model, self.optimizer) + BESIDE_CHECKPOINT_BYTES
        with contextlib.closing(self.checkpoints):
            return self._holding_room(at_end + BESIDE_MODEL_BYTES, only)

    def _holding_room(self, for_model_bytes: int, for_checkpoint_bytes: int) -> TrainResult:
        """Train, while the room for the model and the only checkpoint is held on their disks."""
        with contextlib.ExitStack() as held:
            self.room_for_model = HeldRoom(self.output, for_model_bytes)
            held.callback(self.room_for_model.give_back)
            self.room_for_checkpoint = HeldRoom(self.folder.path, for_checkpoint_bytes)
            held.callback(self.room_for_checkpoint.give_back)
            return self._train()

    def _train(self) -> TrainResult:
        start_s = time.perf_counter()
        evaluated: Evaluated | None = None
        # To the very end: a model that is half written would be the loss of a run without
        # checkpoints.
        with (
            StopRequest(self.display.stopping) as stop,
            contextlib.closing(self._metrics()) as metrics,
        ):
            first, updates_before = self.step, self.optimizer.num_steps
            self._steps(metrics, stop)
            if first < self.step and self.optimizer.num_steps == updates_before:
                self._check_skipped_steps()
            try:
                self._save_last()
            finally:  # a disk without room for a checkpoint may have it for the model
                if self._is_done or self.checkpoints is None:  # of which else nothing would be left
                    self._write_model()
            if self._is_done:  # what goes wrong in here costs nothing that was trained
                evaluated = self._evaluate(metrics, stop)
            return self._result(stop, start_s, evaluated)

    def _result(
        self,
        stop: StopRequest,
        start_s: float,
        evaluated: Evaluated | None = None,
        *,
        is_prepared: bool = True,
    ) -> TrainResult:
        """Return how this process ended, with the report written."""
        has_evaluated = evaluated is not None or self.corpus.evaluation is None
        is_whole = is_prepared and self._is_done and has_evaluated
        result = TrainResult(
            output=self.output,
            step=self.step,
            num_steps=self.corpus.num_steps,
            stopped_by=stop.signal.name if stop.signal and not is_whole else None,
            is_resumable=self.checkpoints is not None or not is_prepared,
            loss=self.loss,
            eval_loss=evaluated.loss if evaluated else None,
            seconds=time.perf_counter() - start_s,
            tiers=tuple(engine_of(self.model).report()),
            unmeasured_bytes=self._unmeasured_bytes,
            measurement=self.measurement,
            is_prepared=is_prepared,
        )
        again = "Make room there; --resume writes it again."
        with writing(
            self.output / REPORT, again if result.is_resumable else "The model is written."
        ):
            write_report(self.output, self.settings, self.plan, result)
        return result

    @property
    def _unmeasured_bytes(self) -> int:
        if engine_of(self.model).device.type == "cuda":
            return 0
        return self.plan.peak_bytes["device"].get(WORKING_MEMORY, 0)

    def _metrics(self) -> Metrics:
        with writing(self.output / METRICS, "Make room there."):
            return Metrics(
                self.output,
                first_step=self.step + 1,
                evaluates_again=self._is_done and self.corpus.evaluation is not None,
                tensorboard=self.settings.tensorboard,
                tell=self.display.message,
            )

    def _save_last(self) -> None:
        if self.checkpoints is None or self.step == self.resumed_step:  # it is there
            return
        self.room_for_checkpoint.give_back()
        with self.display.saving(self.folder.directory(self.optimizer.num_steps)):
            self.checkpoints.write(self.step, self._values)

    def _write_model(self) -> None:
        steps = self.folder.steps()
        goes_on = f"; --resume goes on from step {steps[-1]}" if steps else ""
        self.room_for_model.give_back()
        with self.display.saving(self.output), writing(self.output, f"Make room there{goes_on}."):
            save_model(self.model, self.output, only_adapters=self.settings.lora)
            self.tokenizer.save_pretrained(self.output)
            copy_processor(Path(self.settings.model), self.output)

    @property
    def _is_done(self) -> bool:
        return self.step == self.corpus.num_steps

    @property
    def _evaluates_here(self) -> bool:
        """Whether this step is followed by an evaluation, other than the one at the end."""
        every = self.settings.eval_every
        return bool(every and self.step and self.step % every == 0 and not self._is_done)

    def _steps(self, metrics: Metrics, stop: StopRequest) -> None:
        """Take steps until all are done or a stop is asked for."""
        settings, first = self.settings, self.step
        recorded_from = first + _UNRECORDED_STEPS
        lagged = LaggedValues()
        told = StepTeller(self.display, metrics, self.objective.figures)
        with self.display.steps(self.step, self.corpus.num_steps), contextlib.ExitStack() as stack:
            record: RunRecord | None = None
            if self._evaluates_here and not metrics.is_evaluated(self.step):
                self._evaluate(metrics, stop)  # the run was asked to stop in the middle of it
                told.flush(lagged)
            while self.step < self.corpus.num_steps and not stop.is_set:
                if self.step == recorded_from:
                    record = stack.enter_context(outcore.record(self.model))
                if record is not None and self.step - recorded_from == _RECORDED_STEPS:
                    stack.close()
                    self._measured(record, num_steps=self.step - recorded_from)
                    record = None
                try:
                    waited_s, values = self._take_step()
                except NonFiniteGradient as error:
                    told.flush(lagged)
                    raise self._with_what_is_kept(error) from error
                told.step(lagged.put(values), partial(self._figures, waited_s))
                if self.step - first == 1:
                    told.flush(lagged)  # it took long, and someone may be waiting for it
                if self._evaluates_here:
                    told.flush(lagged)
                    if record is not None:  # in it, an evaluation would be a part of a step
                        stack.close()
                        self._measured(record, num_steps=self.step - recorded_from)
                        record = None
                        if self.measurement is None:
                            recorded_from = self.step  # behind the evaluation, from the start
                    self._evaluate_on_the_way(metrics, stop)
                    told.flush(lagged)
                if settings.save_every and self.step % settings.save_every == 0:
                    assert self.checkpoints is not None
                    self.checkpoints.begin(self.step, self._values)
            told.flush(lagged)
            self.loss = told.loss
            if record is not None:
                self._measured(record, num_steps=self.step - recorded_from)

    def _measured(self, record: RunRecord, *, num_steps: int) -> None:
        """Keep what was measured, unless a step was skipped: the next would look longer for it."""
        if 2 <= num_steps == record.num_steps:
            self.measurement = record.measurement()
            self.display.lanes(self.measurement)

    def _take_step(self) -> tuple[float, Tensor]:
        """Return how long the batch took to come, and the objective's values, the loss first."""
        before_s = time.perf_counter()
        self.before_step = BeforeStep(self.model, self.optimizer, self.corpus.training)
        batch = next(self.corpus.training)
        waited_s = time.perf_counter() - before_s
        self.step_tokens = self.corpus.training.num_tokens(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr.at(self.step)
        device = engine_of(self.model).device
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

        def forward_and_backward() -> Tensor:
            values = self.objective.values(self.model, on_device, self.step)
            values[0].backward()  # type: ignore[no-untyped-call, unused-ignore]
            return torch.stack([value.detach().float() for value in values])

        values = self.optimizer.step(forward_and_backward)
        self.optimizer.zero_grad()
        self.step += 1
        return waited_s, values

    def _figures(self, waited_s: float, step_s: float) -> StepFigures:
        """Return those of the step just taken; its loss is not known yet."""
        options = self.corpus.training.options
        whole = options.batch_size * options.seq_len * self.corpus.cache.documents_per_example
        return StepFigures(
            step=self.step,
            num_steps=self.corpus.num_steps,
            loss=math.nan,
            grad_norm=self.optimizer.grad_norm,
            lr=self.lr.at(self.step - 1),
            step_s=step_s,
            tokens_per_s=self.step_tokens / step_s,
            tflops=self.flops * self.step_tokens / whole / step_s / 1e12,
            data_wait_s=waited_s,
            epoch=self.corpus.training.epoch,
        )

    def _evaluate(self, metrics: Metrics, stop: StopRequest) -> Evaluated | None:
        """Return the held-out loss; None without such data, or if a stop is asked for meanwhile."""
        if self.corpus.evaluation is None:
            return None
        with self.display.evaluating():
            batches = self.corpus.evaluation()
            found = evaluate(
                self.model,
                batches,
                self.objective,
                stops=lambda: stop.is_set,
                progress=self.display.evaluation_batch,
            )
        if found is None:
            self.display.not_evaluated(self.step, is_resumable=self.checkpoints is not None)
            return None
        if self.settings.keep and self.settings.eval_every:
            # First: what is in the metrics is not evaluated again.
            self.best.keep_if_better(found.loss, self._values)
        figures = {"loss": found.loss, "perplexity": found.perplexity, **found.more}
        known = {name: value for name, value in figures.items() if value is not None}
        metrics.add("eval", self.step, self.corpus.held_out_checksum, **known)
        self.display.evaluated(self.step, found)
        return found

    def _evaluate_on_the_way(self, metrics: Metrics, stop: StopRequest) -> None:
        """Evaluate; what goes wrong in it ends the run, and costs nothing that was trained."""
        try:
            self._evaluate(metrics, stop)
        except Exception:
            if self.checkpoints is not None:
                with contextlib.suppress(OutcoreError):  # the first error is the one to tell
                    self._save_last()
            raise

    def _bytes_of_best(self, num_steps: int) -> int:
        every = self.settings.eval_every
        return 0 if every is None else self.best.num_bytes(-(-num_steps // every))

    def _with_what_is_kept(self, error: NonFiniteGradient) -> NonFiniteGradient:
        """Save what the steps before this one made, if it is still there; return what to raise."""
        if not self.step or not self.before_step.restore():
            return error
        try:
            if self.checkpoints is None:
                if harmed := self._harmed_weights():
                    return NonFiniteGradient(f"{error} {harmed}")
                self._write_model()
                return NonFiniteGradient(f"{error} The model of step {self.step} is written.")
            self.checkpoints.keep_one_more()  # for those who mistrust the steps that led there
            self._save_last()
        except StoreError as failed:
            return NonFiniteGradient(
                f"{error} What was trained before could not be saved: {failed}"
            )
        goes_on = "--resume --on-non-finite skip goes on from there."
        kept = f"Step {self.step} is in a checkpoint: {goes_on}"
        return NonFiniteGradient(f"{error} {self._harmed_weights() or kept}")

    def _check_skipped_steps(self) -> None:
        """Raise where all steps were skipped and none that follows would be better."""
        harmed = self._harmed_weights()
        if harmed is None and (self.optimizer.num_steps or not self._is_done):
            return  # the gradients of these batches alone were not finite
        unchanged = "The model is as it was before; nothing is written. Look at the data."
        raise NonFiniteGradient(
            f"every step was skipped, for no gradient was finite. {harmed or unchanged}"
        )

    def _harmed_weights(self) -> str | None:
        """Return what to say of weights that are not finite; None where all are."""
        return told_if_not_finite(
            self.model, self.settings.model, self.step, self.optimizer.num_steps, self.folder
        )

    def _values(self) -> dict[str, Any]:
        return RunValues(
            step=self.step,
            batches=self.corpus.training.state_dict(),
            best=self.best.loss,
            held_out=self.corpus.held_out,
            settings=to_dict(self.settings),
        ).to_dict()

    def _resume(self) -> None:
        step = resume(
            self.settings,
            self.folder,
            self.model,
            self.optimizer,
            self.corpus,
            self.display.message,
        )
        if step is not None:
            self.step = self.resumed_step = step
        self.best.resume(self.step, self.corpus.held_out, to_dict(self.settings))
