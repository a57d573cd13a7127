"""Changes of a job with which a plan fits, each found by trying it.

Single changes first. Where none of them fits this machine, the first pair that does; where no pair
does, the first three, and so on. Where nothing does, what the machine would have to have, with the
changes that make this less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.machine.machine import Machine
from outcore.planning.change_words import is_beyond, round_up
from outcore.planning.choices import TIERS
from outcore.planning.device_type import device_type, is_parted
from outcore.planning.larger_machine import PRICES, is_far, simplest, worth_naming
from outcore.planning.memory import HOST_SHARE, PROCESS_BYTES, budgets_of, largest_budgets
from outcore.planning.plan import Budgets, FrozenWeights, Job, StateFormat, Tier
from outcore.store.allocator_slack import SHARE, budget_to_fill

Needs = Callable[[Job], NDArray[np.int64]]
"""Says what each choice takes in each tier, for a changed job: one row a choice, by TIERS."""

_ANY_DISK_BYTES = 1 << 60  # more than there is
_FORMATS: tuple[StateFormat, ...] = ("compact", "minimal")
_FROZEN_FORMATS: tuple[FrozenWeights, ...] = ("int8", "int4")


class Changes:
    """The changes of one job on one machine. What was tried once is remembered."""

    def __init__(
        self, job: Job, machine: Machine, needs: Needs, *, has_frozen_matrices: bool = False
    ) -> None:
        self._job = job
        self._machine = machine
        self._has_frozen_matrices = has_frozen_matrices
        self._needs = needs
        self._rows: dict[Job, NDArray[np.int64]] = {}

    def fitting(self) -> list[Job]:
        """Return changed jobs that fit: on this machine, nearest first, then on a larger one."""
        asked = [job for job in map(self._larger_budget, TIERS) if job is not None]
        grown = list(filter(self._fits, asked))
        grown.sort(key=self._growth)
        beyond = [job for job in grown if is_beyond(job, self._job, self._machine)]
        here = [*self._single(), *(job for job in grown if job not in beyond)]
        here.sort(key=self._rank)
        if not here:
            here = [job for job in [self._together()] if job is not None]
        if here:
            return [*here, *(job for job in beyond if not is_far(job, self._machine))]
        return self._larger_machines(beyond)

    def _rank(self, changed: Job) -> int:
        """The disk and budgets first, then what changes the step, then what changes numbers."""
        job = self._job
        if (changed.state_format, changed.frozen_weights) != (job.state_format, job.frozen_weights):
            return 2
        return int(changed.budgets == job.budgets)

    # --- single changes -------------------------------------------------------------------------

    def _single(self) -> Iterator[Job]:
        """Yield the changes that fit, one of each kind."""
        kinds = set()
        for kind, changed in self._moves(self._job):
            if kind not in kinds and self._fits(changed):
                kinds.add(kind)
                yield self._nearest(changed)

    def _moves(self, job: Job) -> Iterator[tuple[str, Job]]:
        """Yield the changes that there are, each as far as it goes, by kind."""
        if job.budgets.disk_bytes == 0 and self._machine.disk_bytes:
            yield "disk", replace(job, budgets=replace(job.budgets, disk_bytes=None))
        if job.gradients_wait:
            yield "clipping", replace(job, clipping="two-pass")
        if job.sequences > 1 and job.micro_batch != 1:
            yield "micro-batch", replace(job, micro_batch=1)
        if job.sequences > 1:
            yield "tokens", replace(job, tokens=job.seq_len)
        if self._has_frozen_matrices and job.frozen_weights is None:
            for frozen_weights in _FROZEN_FORMATS:
                yield "frozen", replace(job, frozen_weights=frozen_weights)
        if job.state_format == "fp32":
            for state_format in _FORMATS:
                yield "state", replace(job, state_format=state_format, dtype="bf16")

    def _nearest(self, changed: Job) -> Job:
        """Return the same change with as many tokens and as little disk as fit."""
        changed = self._with_most_tokens(changed)
        if changed.budgets.disk_bytes is None and self._job.budgets.disk_bytes == 0:
            size = min(round_up(self._least_disk(changed)), self._machine.disk_bytes)
            changed = replace(changed, budgets=replace(changed.budgets, disk_bytes=size))
        return changed

    def _least_disk(self, job: Job) -> int:
        rows = self._needed(job)
        fits = (rows <= self._limits(job)).all(axis=1)
        return int(rows[fits, TIERS.index("disk")].min())

    def _with_most_tokens(self, changed: Job) -> Job:
        if changed.tokens != self._job.tokens:
            low, high = 1, self._job.sequences - 1
            while low < high:
                middle = (low + high + 1) // 2
                more = replace(changed, tokens=middle * changed.seq_len)
                low, high = (middle, high) if self._fits(more) else (low, middle - 1)
            changed = replace(changed, tokens=low * changed.seq_len)
            if changed.micro_batch is not None:  # no more at a time than there are
                changed = replace(changed, micro_batch=min(changed.micro_batch, low))
        return changed

    def _larger_budget(self, tier: Tier, job: Job | None = None) -> Job | None:
        """Return the job with the least growth of one tier's budget with which it may fit."""
        job = job or self._job
        index, rows = TIERS.index(tier), self._needed(job)
        fits = rows <= self._limits(job)
        fits[:, index] = True
        alone = rows[fits.all(axis=1), index]
        if not len(alone):
            return None
        return replace(job, budgets=self._budgets(job, {tier: int(alone.min())}))

    # --- several at once ------------------------------------------------------------------------

    def _together(self) -> Job | None:
        """Return the fewest changes that fit this machine together, as near as they fit."""
        for changed in self._several():
            if self._fits(changed):
                return self._nearest(changed)
        return None

    def _several(self) -> Iterator[Job]:
        """Yield pairs, then changes with larger budgets, then three changes and more."""
        several = self._worth_trying(self._fits)
        for pair in several:
            if len(pair) == 2:
                yield from self._combined(pair)
        yield from self._here(self._with_larger_budgets())
        for more in several:
            if len(more) > 2:
                yield from self._combined(more)
        if not several:
            for together in self._worth_trying(self._is_held):
                for job in filter(self._is_held, self._combined(together)):
                    yield from self._here([self._all_larger(job)])

    def _worth_trying(self, holds: Callable[[Job], bool]) -> list[tuple[str, ...]]:
        """Return kinds to change together for whose changes this may hold, the fewest first.

        With and without frozen weights in fewer bits apart: to expand them takes device memory.
        """
        kinds = list(dict.fromkeys(kind for kind, _ in self._moves(self._job)))
        several = list(self._of_kinds([kind for kind in kinds if kind != "frozen"], holds))
        if "frozen" in kinds:
            several += [them for them in self._of_kinds(kinds, holds) if "frozen" in them]
        return sorted(several, key=len)

    def _of_kinds(
        self, kinds: Sequence[str], holds: Callable[[Job], bool]
    ) -> Iterator[tuple[str, ...]]:
        """Yield kinds to change together, the fewest first, for whose changes this may hold.

        More changes need no more bytes: what does not hold for all changes but one does not hold
        without that one.
        """

        def may_hold(changed: Sequence[str]) -> bool:
            return any(map(holds, self._combined(changed)))

        if not may_hold(kinds):
            return
        must = {kind for kind in kinds if not may_hold([k for k in kinds if k != kind])}
        for count in range(2, len(kinds) + 1):
            yield from (them for them in combinations(kinds, count) if must <= set(them))

    def _here(self, jobs: Iterable[Job | None]) -> Iterator[Job]:
        """Yield those that ask for no more than the machine has."""
        for job in jobs:
            if job is not None and not is_beyond(job, self._job, self._machine):
                yield job

    def _with_larger_budgets(self) -> Iterator[Job | None]:
        """Yield changes with one larger budget, and then with all that are short."""
        moves = [changed for _, changed in self._moves(self._job)]
        for changed in moves:
            yield from (self._larger_budget(tier, changed) for tier in TIERS)
        for changed in (self._job, *moves):
            yield self._all_larger(changed)

    def _combined(self, kinds: Sequence[str], job: Job | None = None) -> list[Job]:
        """Return the job with a change of each kind."""
        jobs = [job or self._job]
        for kind in kinds:
            jobs = [new for job in jobs for of, new in self._moves(job) if of == kind]
        return jobs

    def _all_larger(self, job: Job) -> Job:
        """Return the job with larger budgets of every tier that is short.

        Within what the machine has, where some choice is; else what costs least.
        """
        rows, limits = self._needed(job), self._limits(job)
        held = self._held(job, rows)
        rows = rows[held] if held.any() else rows
        nearest = rows[int(np.argmin(np.maximum(0, rows - limits) @ PRICES))]
        short: dict[Tier, int] = {
            tier: int(need)
            for tier, need, limit in zip(TIERS, nearest, limits, strict=True)
            if need > limit
        }
        if is_parted(self._machine) and "device" in short:  # what it takes, the host has no longer
            short["host"] = int(nearest[TIERS.index("host")])
        return replace(job, budgets=self._budgets(job, short))

    def _is_held(self, job: Job) -> bool:
        return bool(self._held(job, self._needed(job)).any())

    def _held(self, job: Job, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which choices the machine would hold, were all of its memory asked for."""
        whole = budgets_of(self._machine, Budgets(disk_bytes=job.budgets.disk_bytes))
        fits = rows <= np.array([whole[tier] for tier in TIERS])
        if is_parted(self._machine):
            device, host, _ = rows.T
            memory = self._machine.host_memory_bytes * HOST_SHARE - PROCESS_BYTES
            parts = device / (1 - SHARE) + host <= memory
            fits[:, TIERS.index("device")] = fits[:, TIERS.index("host")] = parts
        held: NDArray[np.bool_] = np.logical_and.reduce(fits, axis=1)
        return held

    # --- a larger machine -----------------------------------------------------------------------

    def _larger_machines(self, single: Sequence[Job]) -> list[Job]:
        """Return what the machine would have to have, with the changes that make it less.

        single: larger budgets of one tier, of the job as it is.
        """
        named = worth_naming(
            [*single, *(larger for job in self._step_changes() for larger in self._larger(job))],
            self._machine,
        )
        others = []
        for kind, moved in self._moves(self._job):
            if kind in ("tokens", "frozen", "state"):
                ways = [way for job in self._step_changes(moved) for way in self._larger(job)]
                if (other := simplest(ways, self._machine)) is not None:
                    others.append(other)
        named = worth_naming([*reversed(named), *others], self._machine)
        named.sort(key=others.__contains__)  # what changes the numbers comes last
        return list(filter(self._fits, map(self._with_most_tokens, named)))

    def _step_changes(self, moved: Job | None = None) -> Iterator[Job]:
        """Yield the job, then with changes that cost only time; each without and with a disk.

        ``moved``: the job as it is changed already; then only with a disk.
        """
        kinds = [kind for kind, _ in self._moves(moved or self._job)]
        step = [kind for kind in ("clipping", "micro-batch") if kind in kinds]
        for count in range(len(step) + 1):
            for some in combinations(step, count):
                for job in self._combined(some, moved):
                    if moved is None:
                        yield job
                    any_disk = replace(job.budgets, disk_bytes=_ANY_DISK_BYTES)
                    yield replace(job, budgets=any_disk)

    def _larger(self, job: Job) -> list[Job]:
        """Return the job with the larger budgets that cost least and as little disk as fits."""
        larger = self._all_larger(job)
        if not self._fits(larger):
            return []
        if larger.budgets.disk_bytes == _ANY_DISK_BYTES:
            size, asked = self._least_disk(larger), self._job.budgets
            is_more = size > self._limits(self._job)[TIERS.index("disk")]
            disk_bytes = round_up(size) if is_more else asked.disk_bytes
            larger = replace(larger, budgets=replace(larger.budgets, disk_bytes=disk_bytes))
        return [larger]

    # --- what fits ------------------------------------------------------------------------------

    def _fits(self, job: Job) -> bool:
        return bool((self._needed(job) <= self._limits(job)).all(axis=1).any())

    def _needed(self, job: Job) -> NDArray[np.int64]:
        if job not in self._rows:
            self._rows[job] = self._needs(job)
        return self._rows[job]

    def _limits(self, job: Job) -> list[int]:
        limits = budgets_of(self._machine, job.budgets)
        return [limits[tier] for tier in TIERS]

    def _budgets(self, job: Job, num_bytes: dict[Tier, int]) -> Budgets:
        """Return budgets of which ``num_bytes`` can be filled, as they are printed."""
        sizes = {tier: self._size(tier, self._budget_for(tier, n)) for tier, n in num_bytes.items()}
        if self._machine.is_unified and "device" in sizes and job.budgets.host_bytes is not None:
            sizes["host"] = max(sizes["device"], job.budgets.host_bytes)  # of the same bytes
            # A budget of the device that was not asked for would part a CPU's memory.
            has_it = sizes["host"] <= largest_budgets(self._machine)["host"]
            if job.budgets.device_bytes is None and has_it:
                del sizes["device"]
        if is_parted(self._machine) and "host" in sizes:
            device = sizes.get("device") or job.budgets.device_bytes or 0
            whole = int((sizes["host"] + device + PROCESS_BYTES) / HOST_SHARE) + 1
            if whole > self._machine.host_memory_bytes:  # of which the device has its part
                sizes["host"] = round_up(whole)
            elif sizes["host"] <= (job.budgets.host_bytes or whole):  # the device leaves enough
                del sizes["host"]
        changed: dict[str, Any] = {f"{tier}_bytes": size for tier, size in sizes.items()}
        return replace(job.budgets, **changed)

    def _size(self, tier: Tier, num_bytes: int) -> int:
        """Return a budget of so much, as it is printed; all that there is where that is enough."""
        size, most = round_up(num_bytes), largest_budgets(self._machine)[tier] >> 20 << 20
        return most if num_bytes <= most < size else size

    def _budget_for(self, tier: Tier, num_bytes: int) -> int:
        """Return the budget of which ``num_bytes`` can be filled: of the device's, not all can."""
        if tier != "device":
            return num_bytes
        return budget_to_fill(num_bytes, is_gpu=device_type(self._machine) == "cuda") + 1024

    def _growth(self, job: Job) -> float:
        limits = zip(TIERS, self._limits(self._job), strict=True)
        asked = [(getattr(job.budgets, f"{tier}_bytes"), limit) for tier, limit in limits]
        return float(sum(size / max(1, limit) for size, limit in asked if size is not None))
