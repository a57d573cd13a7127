"""AdamW over the parameters of an offloaded model, as a ``torch.optim.Optimizer``.

``step()`` knows the global gradient norm, decides on clipping and non-finite values before any
state changes, queues the updates in the order in which the next forward needs them, and returns:
the forward waits, unit by unit, only for what it uses.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from outcore.errors import NonFiniteGradient, OutOfBudget
from outcore.kernels import AdamWScalars, has_library
from outcore.optim.param_groups import ParamsArg, as_groups, backend_of, check_values
from outcore.optim.planned_clipping import other_than_planned
from outcore.optim.saved_state import HYPERPARAMETERS, check_saved_state
from outcore.optim.state_format import Rounding
from outcore.optim.updates import Chunk, ChunkUpdate, Segment
from outcore.random_state import RandomState
from outcore.store.spans import separate
from outcore.stream.lanes import Fence
from outcore.stream.recording import step_ended

Pass = Literal["measure", "update"]


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
    ) -> None:
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
        self._updated_chunks: set[tuple[int, int]] = set()  # since the last step(), or measured
        self._clip = 1.0  # for updates during the backward
        self._pass: Pass | None = None  # of the two of a step
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(as_groups(params), defaults)
        backend = backend_of(self.param_groups)
        self._backend = backend
        has_library()  # warns here, once, if the kernels are missing: not in a background thread
        self._check_trainable()
        self._segments = self._find_segments()
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
        self._show_state()

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
        chunks = [chunk for chunk in self._backend.chunks if self._backend.has_gradient(chunk)]
        if not chunks:
            return loss
        clip = self._clip_factor()
        if clip is None:
            self.num_skipped_steps += 1
            return loss
        scalars = self._scalars(self._step + 1, clip)
        self._backend.settle_once()
        self._step += 1  # what could be refused was
        now = self._backend.compute_fence()  # whatever still reads the weights goes first
        updates = []
        for chunk in chunks:
            gradient, arrived = self._backend.waiting_gradient(chunk)
            updates.append(self._update(chunk, scalars, gradient, [*arrived, now]))
        self._backend.queue(updates)
        step_ended()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; the next ``backward()`` starts from zero."""
        super().zero_grad(set_to_none)
        self._backend.clear_gradients()

    def synchronize(self) -> None:
        """Wait until every queued update is done."""
        self._backend.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's AdamW does; tensors are views of the homes, not copies.

        ``remainder`` holds the 16 bits of the fp32 master that the bf16 weight rounds away.
        """
        self.synchronize()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    self.state[parameter]["step"] = torch.tensor(float(self._step))
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or the state of a ``torch.optim.AdamW``."""
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
        for target, value in saved.copies:  # nothing has changed before all of it was found to fit
            target.copy_(value)
        for group, values in zip(self.param_groups, saved.groups, strict=True):
            group.update(values)
        self._step = saved.step
        self._backend.state_replaced(self._backend.units)
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    @property
    def num_steps(self) -> int:
        """Steps that this state has seen."""
        return self._step

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return each group's values, without its parameters."""
        return [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]

    def check_hyperparameters(self, hyperparameters: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError or TypeError for what ``resume`` could not take."""
        if len(hyperparameters) != len(self.param_groups):
            raise ValueError(
                f"it has {len(hyperparameters)} param groups, and {len(self.param_groups)} are here"
            )
        for index, values in enumerate(hyperparameters):
            if not isinstance(values, dict) or not set(HYPERPARAMETERS) <= values.keys():
                raise ValueError(f"param group {index} lacks some of {', '.join(HYPERPARAMETERS)}")
            check_values(**{name: values[name] for name in HYPERPARAMETERS})

    def resume(self, num_steps: int, hyperparameters: Sequence[dict[str, Any]]) -> None:
        """Go on from state that was written into ``self.state``, after ``num_steps`` steps."""
        self.check_hyperparameters(hyperparameters)
        for group, values in zip(self.param_groups, hyperparameters, strict=True):
            values = {k: v for k, v in values.items() if k != "params"}
            group.update({k: _as_before(group.get(k), v) for k, v in values.items()})
        self._step = num_steps
        self._backend.state_replaced(self._backend.units)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_backend"):
            raise ValueError("give all parameters to AdamW at once: its state is laid out up front")
        super().add_param_group(param_group)

    def _clip_factor(self) -> float | None:
        """Return the factor for all gradients; None to skip the step."""
        squares = self._backend.squared_norms()
        total = math.fsum(squares.values()) if all(map(math.isfinite, squares.values())) else None
        if total is None:
            self.grad_norm = math.nan
            bad = sorted({self._backend.name_of(key) for key in squares if not _ok(squares[key])})
            if self.on_non_finite == "skip":
                return None
            raise NonFiniteGradient(
                f"the gradient is not finite in {', '.join(bad)} (step {self._step + 1}); no "
                "state was changed. Look at the loss of this batch, lower lr, or pass "
                'on_non_finite="skip".'
            )
        self.grad_norm = math.sqrt(total)
        if self.max_grad_norm is None:
            return 1.0
        return min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))

    def _scalars(self, step: int, grad_scale: float) -> list[AdamWScalars]:
        return [
            AdamWScalars.of(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                grad_scale=grad_scale,
            )
            for group in self.param_groups
        ]

    def _update(
        self,
        chunk: Chunk,
        scalars: list[AdamWScalars],
        gradient: Callable[[], Tensor],
        after: list[Fence],
        on_read: Callable[[Fence | None], None] | None = None,
    ) -> ChunkUpdate:
        return ChunkUpdate(
            chunk=chunk,
            state=self._backend.states[chunk.unit.index],
            segments=self._segments[chunk.unit.index],
            scalars=scalars,
            rounding=Rounding(seed=self.rounding_seed, step=self._step),
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
        step = self._step if self._updated_chunks else self._step + 1
        scalars = self._scalars(step, self._clip)
        self._step = step
        self._updated_chunks.add(chunk.key)
        self._backend.queue([self._update(chunk, scalars, gradient, after, on_read)])

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
            if not self._updated_chunks:
                return loss
            clip = self._clip_factor()
            if clip is None:
                self.num_skipped_steps += 1
                return loss
            norm, self._clip = self.grad_norm, clip
            random.restore()
            loss = self._run_pass("update", closure)
            self._end_passing_step()
            self.grad_norm = norm
        finally:
            self._backend.drop_gradients(False)
            self._backend.clear_gradients()
            self._updated_chunks.clear()
            self._pass, self._clip = None, 1.0
        step_ended()
        return loss

    def _run_pass(self, which: Pass, closure: Callable[[], Any]) -> Any:
        self._pass = which
        self._updated_chunks.clear()
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
        if chunk.key in self._updated_chunks:
            raise RuntimeError(
                f"{chunk.unit.name} got a second gradient before step(), but its update has "
                "already begun: update_during_backward allows one backward() for each step(), "
                "and each block once in a forward. Leave the option off to add gradients up."
            )
        if self._pass == "measure":
            self._updated_chunks.add(chunk.key)

    def _end_passing_step(self) -> None:
        self._updated_chunks.clear()
        self._backend.begin_forward()
        squares = self._backend.squared_norms()
        bad = sorted({self._backend.name_of(key) for key in squares if not _ok(squares[key])})
        self.grad_norm = math.sqrt(math.fsum(squares.values())) if not bad else math.nan
        self._backend.clear_gradients()
        if bad:
            raise NonFiniteGradient(
                f"the gradient is not finite in {', '.join(bad)} (step {self._step}), and "
                "update_during_backward has already applied it: load the last checkpoint."
            )

    def _check_trainable(self) -> None:
        """Refuse what was frozen or unfrozen too late: spans and gradients are laid out already."""
        for unit in self._backend.all_units:
            for field in unit.layout.fields:
                if field.trainable != unit.parameters[field.name].requires_grad:
                    raise ValueError(
                        f"{unit.full_name(field.name)} was "
                        f"{'trainable' if field.trainable else 'frozen'} when the model was "
                        "offloaded: set requires_grad before outcore.offload"
                    )

    def _find_segments(self) -> dict[int, list[Segment]]:
        """Return each unit's runs of elements that belong to one param group."""
        group_of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        segments: dict[int, list[Segment]] = {}
        for unit in self._backend.units:
            runs: list[Segment] = []
            for field in unit.layout.trainable:
                group = group_of.get(id(unit.parameters[field.name]))
                if group is None:
                    continue
                if runs and runs[-1].group == group and field.offset - runs[-1].end < 128:
                    runs[-1] = Segment(start=runs[-1].start, end=field.end, group=group)
                else:
                    runs.append(Segment(start=field.offset, end=field.end, group=group))
            segments[unit.index] = runs
        return segments

    def _show_state(self) -> None:
        """Fill ``self.state`` with views, as users of torch's optimizers expect to find it.

        Each has a storage of its own: torch.save writes whole storages, and refuses one that holds
        several types.
        """
        in_groups = {id(p) for group in self.param_groups for p in group["params"]}
        for unit in self._backend.units:
            state = self._backend.states[unit.index]
            for field in unit.layout.trainable:
                parameter = unit.parameters[field.name]
                if id(parameter) not in in_groups:
                    continue
                entry: dict[str, Any] = {"step": torch.tensor(0.0)}
                for kind, tensor in state.named():
                    cut = tensor[field.offset // kind.per : -(-field.end // kind.per)]
                    shape = field.shape if kind.per == 1 else cut.shape
                    entry[kind.name] = separate(cut, shape)
                self.state[parameter] = entry


def _as_before(before: Any, value: Any) -> Any:
    """Return a plain value in the type that a group has: schedulers compute in that of lr."""
    if isinstance(before, Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(value, list) else value


def _ok(square: float) -> bool:
    return math.isfinite(square)
