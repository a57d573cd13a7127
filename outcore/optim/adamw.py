"""AdamW over the parameters of an offloaded model, as a ``torch.optim.Optimizer``.

``step()`` knows the global gradient norm, decides on clipping and non-finite values before any
state changes, queues the updates in the order in which the next forward needs them, and returns:
the forward waits, unit by unit, only for what it uses.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from outcore.errors import NonFiniteGradient, OutcoreError, OutOfBudget
from outcore.kernels import AdamWScalars, has_library
from outcore.left_to_python import left_to_python
from outcore.optim.global_norm import GlobalNorm
from outcore.optim.hyperparameters import check_values_of_groups, put_values, values_of
from outcore.optim.late_changes import LateChanges, check_trainable
from outcore.optim.param_groups import (
    ParamsArg,
    as_groups,
    backend_of,
    check_finite,
    check_options_of_torch,
    check_values,
    tell_what_is_left_out,
)
from outcore.optim.planned_clipping import other_than_planned
from outcore.optim.saved_state import HYPERPARAMETERS, check_saved_state
from outcore.optim.segments import Segments
from outcore.optim.shown_state import StateWrites, show_state
from outcore.optim.state_format import Rounding
from outcore.optim.step_counts import StepCounts
from outcore.optim.updates import Arrival, Chunk, ChunkUpdate, Segment
from outcore.random_state import RandomState
from outcore.stream.lanes import Fence
from outcore.stream.recording import step_ended

Pass = Literal["measure", "update"]
ScalarsOf = Callable[[int, int], AdamWScalars]
"""Gives the scalars of (param group, step)."""


class _Values(NamedTuple):
    """What the update of a chunk computes with, beside its tensors."""

    step: int
    segments: list[Segment]
    scalars: list[AdamWScalars]  # by segment


class AdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) whose state lives where ``offload`` placed it.

    ``params``: the offloaded model, some of its parameters, or param groups as torch takes them.
    ``max_grad_norm``: clip the global gradient norm to this, exactly; None for no clipping.
    ``on_non_finite``: "raise" NonFiniteGradient, or "skip" the step; either way nothing changes.
    ``update_during_backward``: start updates while the backward still runs, so that no gradient
    waits. It excludes more than one ``backward()`` a step, and a non-finite gradient is found only
    after earlier blocks were updated. With ``max_grad_norm`` it takes two passes over the batch:
    ``step(closure)`` calls the closure once for the norm, and again for the updates.
    ``rounding_seed``: for the stochastic rounding of compact and minimal state.
    ``of_torch``: other arguments of torch's AdamW. ``foreach``, ``fused`` and ``capturable`` say
    how torch computes, and change nothing here; what would be another algorithm is refused.
    """

    def __init__(
        self,
        params: ParamsArg,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        on_non_finite: str = "raise",
        update_during_backward: bool = False,
        rounding_seed: int = 0,
        **of_torch: Any,
    ) -> None:
        check_options_of_torch(of_torch)
        check_values(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be more than 0, or None, not {max_grad_norm}")
        if on_non_finite not in ("raise", "skip"):
            raise ValueError(f'on_non_finite must be "raise" or "skip", not {on_non_finite!r}')
        self.max_grad_norm = max_grad_norm
        self.on_non_finite = on_non_finite
        self.update_during_backward = update_during_backward
        self.rounding_seed = rounding_seed
        self.grad_norm: float | None = None  # of the last step, before clipping
        self.num_skipped_steps = 0
        self._step = 0
        # The first elements of chunks updated since the last step(), or measured.
        self._updated: dict[Arrival, set[int]] = {}
        self._clip = 1.0  # for updates during the backward
        self._pass: Pass | None = None  # of the two of a step
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(as_groups(params), defaults)
        backend = backend_of(self.param_groups)
        self._backend = backend
        has_library()  # warns here, once, if the kernels are missing: not in a background thread
        check_trainable(backend.all_units)
        self._late_changes = LateChanges(backend.all_units)
        self._counts = StepCounts(backend.units)
        self._segments = Segments(self.param_groups, self._counts)
        said = other_than_planned(
            plans_waiting=backend.plans_waiting,
            updates_during_backward=update_during_backward,
            gradient_bytes=backend.gradient_bytes,
        )
        # Not in a @contextmanager: from Python 3.12 on, an error that it replaces is part of a
        # cycle, and holds what was built so far until garbage is collected.
        try:
            backend.start(
                passing=self._update_now if update_during_backward else None,
                check=self._check_first,
            )
        except OutOfBudget as error:
            if said is None:
                raise
            raise OutOfBudget(f"{error} {said}") from error
        if said is not None:
            warnings.warn(said, stacklevel=2)
        tell_what_is_left_out(self.param_groups, backend)
        show_state(backend, self.param_groups, self.state)
        self._state_writes = StateWrites(backend, self.state)

    @left_to_python
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Decide on this step's gradients, queue the updates, and return without waiting.

        ``closure``: forward and backward of the step's batch; returns the loss.
        """
        if self._takes_two_passes:
            return self._step_in_two_passes(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._backend.check_alive()
        if self.update_during_backward:
            self._end_passing_step()
            step_ended()
            return loss
        self._late_changes.refuse()
        self._segments.refuse_other_groups(self.param_groups)
        self._backend.tell_passed_by()
        self.take_over_writes()
        chunks = [chunk for chunk in self._backend.chunks if self._backend.has_gradient(chunk)]
        if not chunks:
            return loss
        clip = self._clip_factor()
        if clip is None:
            return loss
        scalars_of = self._scalars_of(clip)
        arrivals = {chunk.arrival: chunk for chunk in chunks}  # one for all that arrived with it
        values = {key: self._values(chunk, scalars_of) for key, chunk in arrivals.items()}
        self._backend.settle_once()
        self._step += 1  # what could be refused was
        self._counts.advance(arrivals, self._backend.resting)
        now = self._backend.compute_fence()  # whatever still reads the weights goes first
        updates = []
        for chunk in chunks:
            gradient, arrived = self._backend.waiting_gradient(chunk)
            updates.append(self._update(chunk, values[chunk.arrival], gradient, [*arrived, now]))
        self._backend.queue(updates)
        step_ended()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler, which would look for gradients in ``.grad``."""
        raise OutcoreError(
            "outcore.AdamW takes no scaled gradients: call loss.backward() and optimizer.step() "
            "without GradScaler, or with GradScaler(enabled=False). bf16 and fp32, which Outcore "
            "computes in, need none."
        )

    @left_to_python
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; the next ``backward()`` starts from zero."""
        super().zero_grad(set_to_none)
        self._backend.clear_gradients()

    def synchronize(self) -> None:
        """Wait until every queued update is done."""
        self._backend.synchronize()

    def take_over_writes(self) -> None:
        """Before a step or a checkpoint: see what users have written to parameters and state.

        A forward sees parameters by itself. Until then it is in no master and no record.
        """
        self._backend.notice_writes()
        self._state_writes.follow(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's AdamW does; tensors are views of the homes, not copies.

        ``remainder`` holds the 16 bits of the fp32 master that the bf16 weight rounds away (of
        compact state 8). State on disk is compared with its checksums first.
        """
        self.synchronize()
        if self._backend.is_alive:  # what is released has no other copy of what is written to
            self._backend.notice_writes()
            self._state_writes.follow_in_place()
        self._backend.check_rest_on_disk()
        steps = self._counts.by_name()
        for name, parameter in self._names():
            self.state[parameter]["step"] = torch.tensor(float(steps[name]))
        saved = super().state_dict()
        # torch hands out the entries themselves: what is put there would hide the homes.
        saved["state"] = {key: dict(entry) for key, entry in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or the state of a ``torch.optim.AdamW``.

        Each parameter goes on from its own step; ``num_steps`` is the largest of them.
        """
        self.synchronize()
        state_dict = copy.copy(state_dict)  # hooks may write into it
        for prepare in self._optimizer_load_state_dict_pre_hooks.values():
            prepared = prepare(self, state_dict)
            state_dict = state_dict if prepared is None else prepared
        saved = check_saved_state(state_dict, self.param_groups, self.state)
        for index, group in enumerate(saved.groups):
            try:
                check_values(**{name: group[name] for name in HYPERPARAMETERS})
            except (TypeError, ValueError) as error:
                raise ValueError(f"param_groups[{index}] of the state: {error}") from None
        if self._backend.is_alive:  # written before: these masters are of them
            self._backend.notice_writes()
        for target, value in saved.copies:  # nothing has changed before all of it was found to fit
            target.copy_(value)
        for group, values in zip(self.param_groups, saved.groups, strict=True):
            group.update(values)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        steps = dict(zip(parameters, saved.steps, strict=True))
        self._step = max(saved.steps, default=0)
        self._count_on({name: steps[p] for name, p in self._names()})
        has_remainder = any("remainder" in entry for entry in state_dict["state"].values())
        self._backend.state_replaced(self._backend.units, with_remainder=has_remainder)
        self._state_writes.seen()
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    @property
    def num_steps(self) -> int:
        """Steps that this state has seen; parameters without a gradient saw fewer."""
        return self._step

    def step_counts(self) -> dict[str, int]:
        """Return the steps that each parameter has seen, by its name."""
        return self._counts.by_name()

    def check_step_counts(self, counts: Any, num_steps: int) -> None:
        """Raise ValueError for what ``resume`` could not take."""
        self._counts.check(counts, num_steps)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return each group's values, without its parameters."""
        return values_of(self.param_groups)

    def check_hyperparameters(self, hyperparameters: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError or TypeError for what ``resume`` could not take."""
        check_values_of_groups(hyperparameters, self.param_groups)

    def resume(
        self,
        num_steps: int,
        hyperparameters: Sequence[dict[str, Any]],
        step_counts: dict[str, int] | None = None,
    ) -> None:
        """Go on from state that was written into ``self.state``, after ``num_steps`` steps.

        ``step_counts``: those that each parameter has seen, None if all have seen all.
        """
        self.check_hyperparameters(hyperparameters)
        if step_counts is None:
            step_counts = dict.fromkeys(self._counts.by_name(), num_steps)
        self.check_step_counts(step_counts, num_steps)
        put_values(hyperparameters, self.param_groups)
        self._step = num_steps
        self._count_on(step_counts)
        self._backend.state_replaced(self._backend.units, with_remainder=False)
        self._state_writes.seen()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_backend"):
            raise ValueError("give all parameters to AdamW at once: its state is laid out up front")
        super().add_param_group(param_group)

    def __getstate__(self) -> Any:  # what torch's would give is copied without the homes
        raise TypeError(
            "an outcore.AdamW cannot be copied or pickled, nor can a scheduler that holds it: its "
            "state lives where offload placed it. Use state_dict()"
        )

    def _clip_factor(self) -> float | None:
        """Return the factor for all gradients; None to skip the step."""
        norm = self._global_norm()
        if norm.is_finite:
            return norm.clip_factor(self.max_grad_norm)
        if self.on_non_finite != "skip":
            raise NonFiniteGradient(
                f"the gradient is not finite in {norm.not_finite_in} (step {self._step + 1}); no "
                "state was changed. Look at the loss of this batch, lower lr, or pass "
                'on_non_finite="skip".'
            )
        self.num_skipped_steps += 1
        warnings.warn(  # the count makes each text another: Python shows one only once
            f"step {self._step + 1} was skipped, the gradient is not finite in "
            f"{norm.not_finite_in}; no state was changed ({self.num_skipped_steps} skipped)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None

    def _global_norm(self) -> GlobalNorm:
        norm = GlobalNorm.of(self._backend.squared_norms(), self._backend.name_of)
        self.grad_norm = norm.value
        return norm

    def _scalars_of(self, grad_scale: float) -> ScalarsOf:
        @functools.cache
        def scalars(group: int, step: int) -> AdamWScalars:
            values = self.param_groups[group]
            check_finite(group, values)
            return AdamWScalars.of(
                lr=float(values["lr"]),
                beta1=values["betas"][0],
                beta2=values["betas"][1],
                eps=values["eps"],
                weight_decay=values["weight_decay"],
                step=step,
                grad_scale=grad_scale,
            )

        return scalars

    def _values(self, chunk: Chunk, scalars_of: ScalarsOf) -> _Values:
        """Return what a chunk's update of this step computes with."""
        is_counted = chunk.arrival in self._updated
        step = self._counts.of(chunk.arrival) + (not is_counted)
        segments = self._segments.of(chunk.unit, self._backend.resting(chunk.unit.index))
        scalars = [scalars_of(segment.group, step - segment.missed) for segment in segments]
        return _Values(step=step, segments=segments, scalars=scalars)

    def _update(
        self,
        chunk: Chunk,
        values: _Values,
        gradient: Callable[[], Tensor],
        after: list[Fence],
        on_read: Callable[[Fence | None], None] | None = None,
    ) -> ChunkUpdate:
        return ChunkUpdate(
            chunk=chunk,
            state=self._backend.states[chunk.unit.index],
            segments=values.segments,
            scalars=values.scalars,
            rounding=Rounding(seed=self.rounding_seed, step=values.step),
            gradient=gradient,
            after=after,
            on_read=on_read,
        )

    def _update_now(
        self,
        chunk: Chunk,
        gradient: Callable[[], Tensor],
        after: list[Fence],
        on_read: Callable[[Fence | None], None] | None,
    ) -> None:
        """Queue an update while the backward still runs."""
        values = self._values(chunk, self._scalars_of(self._clip))
        if not self._updated:
            self._step += 1
        if chunk.arrival not in self._updated:
            self._counts.advance([chunk.arrival], self._backend.resting)
        self._updated.setdefault(chunk.arrival, set()).add(chunk.start)
        self._backend.queue([self._update(chunk, values, gradient, after, on_read)])

    @property
    def _takes_two_passes(self) -> bool:
        return self.update_during_backward and self.max_grad_norm is not None

    def _step_in_two_passes(self, closure: Callable[[], Any] | None) -> Any:
        """Find the norm in a first pass, whose gradients are dropped; update in a second one.

        The second draws the same random numbers. Nothing has changed before it begins.
        """
        if closure is None:
            raise ValueError(
                "max_grad_norm with update_during_backward takes two passes over the batch: put "
                "the forward and the backward into a function that returns the loss, and call "
                "step(function); or leave update_during_backward off, and gradients wait"
            )
        self._backend.check_alive()
        random = RandomState(self._backend.device)
        try:
            loss = self._run_pass("measure", closure)
            if not self._updated:
                return loss
            clip = self._clip_factor()
            if clip is None:
                return loss
            norm, self._clip = self.grad_norm, clip
            random.restore()
            loss = self._run_pass("update", closure)
            self._end_passing_step()
            self.grad_norm = norm
        finally:
            self._backend.drop_gradients(False)
            self._backend.clear_gradients()
            self._updated.clear()
            self._pass, self._clip = None, 1.0
        step_ended()
        return loss

    def _run_pass(self, which: Pass, closure: Callable[[], Any]) -> Any:
        self._pass = which
        self._updated.clear()
        self._backend.clear_gradients()
        self._backend.drop_gradients(which == "measure")
        with torch.enable_grad():
            return closure()

    def _check_first(self, chunk: Chunk) -> None:
        if self._takes_two_passes and self._pass is None:
            raise RuntimeError(
                "backward() outside of step(closure): max_grad_norm with update_during_backward "
                "takes two passes over the batch, and step() runs both of them"
            )
        if not self._updated:
            self._late_changes.refuse()
            self._segments.refuse_other_groups(self.param_groups)
            self.take_over_writes()
        if chunk.start in self._updated.get(chunk.arrival, ()):
            raise RuntimeError(
                f"{chunk.unit.name} got a second gradient before step(), but its update has "
                "already begun: update_during_backward allows one backward() for each step(), "
                "and each block once in a forward. Leave the option off to add gradients up. If "
                "the backward before this one was interrupted or failed, its step is half done, "
                "and zero_grad() takes no update back: load the last checkpoint; or call step(), "
                "which ends it with the updates that it got, and go on from there."
            )
        if self._pass == "measure":
            self._updated.setdefault(chunk.arrival, set()).add(chunk.start)

    def _end_passing_step(self) -> None:
        self._updated.clear()
        self._backend.tell_passed_by()
        self._backend.begin_forward()
        norm = self._global_norm()
        self._backend.clear_gradients()
        if not norm.is_finite:
            raise NonFiniteGradient(
                f"the gradient is not finite in {norm.not_finite_in} (step {self._step}), and "
                "update_during_backward has already applied it: load the last checkpoint."
            )
        self._late_changes.refuse()  # gradients that no block gave come at any time

    def _names(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full name of each parameter that has a state here."""
        for unit in self._backend.units:
            for field in unit.layout.trainable:
                if unit.parameters[field.name] in self.state:
                    yield unit.full_name(field.name), unit.parameters[field.name]

    def _count_on(self, counts: dict[str, int]) -> None:
        self._counts.replace(counts)
        self._segments.forget()
