"""Which blocks keep their activations, and how many bytes that takes.

"auto" recomputes every block in the first step, sees what one block's activations come to and how
much of the device budget the step left, and from then on keeps as many blocks as fit. A plan says
which blocks keep; where their activations turn out larger than it counted with (its figures are of
compiled blocks), they are recomputed instead. Kept and recomputed blocks give the same bits, so
the choice never shows.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outcore.errors import OutcoreError
from outcore.left_to_python import left_to_python
from outcore.units import format_bytes

Signature = tuple[Any, ...]
SLACK = 1.1  # what a plan counts is exact for few families


class ActivationPolicy:
    """Decides per block; knows a batch by its signature (shapes and micro-batches)."""

    def __init__(
        self,
        choices: Sequence[str] | None,
        *,
        num_blocks: int,
        spare_bytes: Callable[[], int],
        planned_bytes: int | None = None,
    ) -> None:
        """``choices``: "keep", "recompute" or "offload" for each block; None: keep what fits.

        ``planned_bytes``: what a plan counted for a block that keeps, at most.
        """
        self._choices = choices
        self._planned_bytes = planned_bytes
        self._has_warned = False
        self.num_kept = 0 if choices is None else choices.count("keep")
        self._num_blocks = num_blocks
        self._spare_bytes = spare_bytes
        self._bytes_per_block: dict[Signature, int] = {}
        self._planned: Signature | None = None

    def keeps(self, block: int, signature: Signature) -> bool:
        """Whether the ``block``-th block keeps its activations; the last ones do first."""
        if self._choices is not None:
            return self._choices[block] == "keep" and self._is_as_planned(signature)
        if signature != self._planned:
            return False
        return block >= self._num_blocks - self.num_kept

    def _is_as_planned(self, signature: Signature) -> bool:
        num_bytes = self.bytes_of(signature)
        if self._planned_bytes is None or num_bytes <= SLACK * self._planned_bytes:
            return True
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a block's activations take {format_bytes(num_bytes)}, the plan counted with "
                f"{format_bytes(self._planned_bytes)}: they are recomputed instead of kept",
                stacklevel=2,
            )
        return False

    def offloads(self, block: int) -> bool:
        """Whether the ``block``-th block's input waits for the backward on the host."""
        return self._choices is not None and self._choices[block] == "offload"

    def is_measured(self, signature: Signature) -> bool:
        return signature in self._bytes_per_block

    def bytes_of(self, signature: Signature) -> int:
        return self._bytes_per_block.get(signature, 0)

    def largest_bytes(self) -> int:
        return max(self._bytes_per_block.values(), default=0)

    def wanted_bytes(self) -> int:
        """Return what keeping every block would take, beyond what is kept now."""
        if self._choices is not None:
            return 0
        return (self._num_blocks - self.num_kept) * self.largest_bytes()

    def measured(self, signature: Signature, num_bytes: int) -> None:
        """Note what the activations of one block take for a whole batch."""
        largest = max(num_bytes, self._bytes_per_block.get(signature, 0))
        self._bytes_per_block[signature] = largest

    def plan(self) -> None:
        """Before a forward: choose how many blocks keep, for the batch last measured."""
        if self._choices is not None or not self._bytes_per_block:
            return
        signature, num_bytes = next(reversed(self._bytes_per_block.items()))
        if signature == self._planned or num_bytes == 0:
            return
        self._planned = signature
        self.num_kept = max(0, min(self._num_blocks, self._spare_bytes() // num_bytes))


class SavedBytes:
    """Counts what autograd saves for a backward, without weights and inputs."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        self._ignored = {t.untyped_storage().data_ptr() for t in ignored}
        self._seen: list[weakref.ref[Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Of what is still saved: not of a graph that led nowhere, as that of a detached norm.

        Its memory may have become another tensor's.
        """
        saved = [tensor for reference in self._seen if (tensor := reference()) is not None]
        storages = [tensor.untyped_storage() for tensor in saved]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for start, size in sizes.items() if start not in self._ignored)

    def see(self, saved: Tensor) -> None:
        """Note what autograd holds on to."""
        if saved.layout is not torch.strided:
            raise OutcoreError(
                "a block saves a sparse tensor for its backward, which streaming does not know: "
                "of PEFT's methods, use one whose weights are dense, such as LoRA"
            )
        self._seen.append(weakref.ref(saved))


@contextlib.contextmanager
def saving(
    *,
    slot: Tensor,
    slot_now: Callable[[], Tensor],
    rebind: bool,
    count: SavedBytes | None,
    is_compiled: bool,
) -> Iterator[None]:
    """Watch what autograd saves.

    With ``rebind``, saved views of the weights in ``slot`` are kept as offsets only, and are found
    again in ``slot_now()`` when the backward asks: a kept block holds no second copy of its
    weights, and its slot is free for other blocks in between. It raises for others than the block,
    which hold a tensor of its graph: they would get gradients that the block does not.
    """
    watch = _Watch(slot, slot_now, rebind, count)
    pack, unpack = watch.pack, watch.unpack
    if is_compiled:
        # Between two graphs of a block the compiler would take each call for a part of the block.
        pack = functools.partial(_once(_Watch.pack), watch)
        unpack = functools.partial(_once(_Watch.unpack), watch)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Watch:
    """What ``saving`` does with each tensor that autograd saves, and asks for again."""

    def __init__(
        self,
        slot: Tensor,
        slot_now: Callable[[], Tensor],
        rebind: bool,
        count: SavedBytes | None,
    ) -> None:
        self._base = slot.untyped_storage().data_ptr()
        self._start = slot.storage_offset()
        self._slot_now = slot_now
        self._rebind = rebind
        self._count = count

    def pack(self, tensor: Tensor) -> Any:
        if self._rebind and tensor.untyped_storage().data_ptr() == self._base:
            return tensor.storage_offset() - self._start, tensor.shape, tensor.stride()
        # Detached: an operation that saves its own output would otherwise hold itself for ever.
        saved = tensor.detach()
        if self._count is not None:
            self._count.see(saved)
        return saved

    def unpack(self, saved: Any) -> Tensor:
        now = self._slot_now()
        if isinstance(saved, Tensor):
            return saved
        offset, shape, stride = saved
        return now.as_strided(shape, stride, now.storage_offset() + offset)


_once = functools.cache(left_to_python)  # it takes a fifth of a ms
