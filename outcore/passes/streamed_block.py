"""A block as the engine sees it: where its weights are, how it runs, where its gradient goes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import OutcoreError
from outcore.optim.backend import OptimizerBackend
from outcore.optim.gradients import Accumulator
from outcore.passes import activations
from outcore.passes.activations import ActivationPolicy, SavedBytes
from outcore.passes.block_body import BlockBody, compiled_body, run_body
from outcore.passes.block_buffers import BlockBuffers
from outcore.passes.block_structure import BlockStructure
from outcore.passes.host_inputs import HostInputs
from outcore.passes.micro_batch import MicroBatches
from outcore.passes.weights_on_ctx import function_with_weights
from outcore.saved_activations import saves_little
from outcore.store.heap import Heap
from outcore.store.ledger import Hold, Ledger
from outcore.stream.expansion import Expansion
from outcore.stream.recording import compute_stream, recorded
from outcore.stream.slots import Slots
from outcore.stream.unit import Unit


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockServices:
    """What all blocks of a model share."""

    device: torch.device
    slots: Slots
    expansion: Expansion
    backend: OptimizerBackend
    policy: ActivationPolicy
    host_inputs: HostInputs
    device_ledger: Ledger
    heap: Heap
    micro_batch: int | None
    is_compiled: bool
    lock: contextlib.AbstractContextManager[Any]


class StreamedBlock:
    """One block. ``position`` counts blocks from the input; edges that run as blocks have None."""

    def __init__(
        self, unit: Unit, module: nn.Module, services: BlockServices, position: int | None
    ) -> None:
        self.unit = unit
        self.device = services.device
        self.lock = services.lock
        self.micro_batch = services.micro_batch
        self.cannot_split = False
        self.has_run_with_gradients = False
        self.trainable_names = [f"block.{f.name}" for f in unit.layout.trainable]
        self._services = services
        self._position = position
        self._body = BlockBody(module)
        self.buffers = BlockBuffers(module)
        self.structure = BlockStructure(module)
        self._cannot_keep: bool | None = None  # None: not known yet
        self._flat: Tensor | None = None  # the weights on the device, while they are acquired
        self._first_bytes = 0  # what the first micro-batch saved, while the size is learnt

    @property
    def body(self) -> BlockBody:
        return self._body

    @property
    def described(self) -> str:
        """The block's name and class, for messages."""
        return f"{self.unit.name} ({type(self._body.block).__name__})"

    @contextlib.contextmanager
    def weights(self, phase: str) -> Iterator[dict[str, Tensor]]:
        """Hold the block's weights on the device; fetches the next block's meanwhile."""
        flat = self._services.slots.acquire(self.unit, phase)
        self._flat = flat
        try:
            # No views to autograd: models may write into tensors made from frozen weights.
            trainable = {f.name for f in self.unit.layout.trainable}
            with recorded("compute", f"{phase} {self.unit.name}", compute_stream(self.device)):
                expanded = self._services.expansion.expand(self.unit, flat)
                views = {**self.unit.layout.over(flat), **expanded}
                yield {
                    f"block.{name}": view.requires_grad_(name in trainable)
                    for name, view in views.items()
                }
        finally:
            self._flat = None
            self.structure.restore_parameters()
            self._services.slots.release(self.unit)
            self._services.heap.settle()

    def weights_seen(self) -> tuple[int, int]:
        """Return what is another value after every update of the weights, and every write."""
        return self.unit.version, sum(p._version for p in self.unit.parameters.values())

    def refuse_other_weights(self, seen: tuple[int, int]) -> None:
        """In a backward: raise unless the weights are those that the forward has ``seen``.

        Autograd itself does so for plain weights, but the engine's writes are not counted by it.
        """
        if seen == self.weights_seen():
            return
        self._services.backend.refuse_second_update(self.unit)
        raise RuntimeError(
            f"the weights of {self.described} were changed after this forward, by "
            "optimizer.step() or by a write to them, and its gradient would mix old and new: call "
            "backward() before step(), and run the forward anew after it"
        )

    def run(
        self,
        weights: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        hidden_bytes: int,
    ) -> Any:
        """Run the block's forward; ``hidden_bytes``: of the hidden states that it is given."""
        function: Callable[..., Any] = run_body
        if self._services.is_compiled and self._position is not None:
            function = compiled_body(saves_little=saves_little(hidden_bytes))
        return function(self._body, weights, args, kwargs)

    def run_eagerly(
        self, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return run_body(self._body, weights, args, kwargs)

    def decides_to_keep(self, tensors: Sequence[Tensor], batches: MicroBatches) -> bool:
        if self._position is None or self._cannot_keep:
            return False
        return self._services.policy.keeps(self._position, _signature(tensors, batches))

    def can_be_kept(self, outputs: Sequence[Any]) -> bool:
        """After a run that is to be kept: whether all that it saved of the weights is known.

        It is looked at once; what cannot be kept is computed again from then on.
        """
        if self._cannot_keep is None:
            assert self._flat is not None
            function = function_with_weights(outputs, self._flat)
            self._cannot_keep = function is not None
            if function is not None:
                warnings.warn(  # of each block the same, which Python shows once
                    f"{function} in {type(self._body.block).__name__} keeps weights on its ctx, "
                    "past ctx.save_for_backward: activations of such blocks are recomputed instead "
                    "of kept",
                    stacklevel=2,
                )
        return not self._cannot_keep

    def host_inputs(self, *, keep: bool) -> HostInputs | None:
        """Return where the block's input waits for the backward; None if on the device."""
        if keep or self._position is None or not self._services.policy.offloads(self._position):
            return None
        return self._services.host_inputs

    def hold_bytes(self, tensors: Sequence[Tensor], batches: MicroBatches, *, keep: bool) -> Hold:
        """Enter the call's inputs, and activations if kept, in the device's books."""
        purpose, num_bytes = "block inputs", _input_bytes(tensors, batches)
        if self.host_inputs(keep=keep) is not None:
            num_bytes = 0
        if keep:
            purpose = "kept activations"
            num_bytes += self._services.policy.bytes_of(_signature(tensors, batches))
        return self._services.device_ledger.hold(
            purpose,
            num_bytes,
            remedy="Use fewer or shorter sequences a step, or a larger device_memory.",
        )

    @contextlib.contextmanager
    def saving(
        self,
        inputs: Sequence[Tensor],
        batches: MicroBatches,
        bounds: tuple[int, int],
        tensors: Sequence[Tensor],
        *,
        keep: bool,
    ) -> Iterator[None]:
        """Watch what the block saves: to keep it without its weights, or to learn its size once.

        The size is that of the first micro-batch for each, but for a last one that is smaller. The
        first block after a frozen embedding is not like the others: its input needs no gradient.
        """
        policy, signature = self._services.policy, _signature(tensors, batches)
        is_usual = self._position is not None and any(tensor.requires_grad for tensor in inputs)
        measure = is_usual and not policy.is_measured(signature)
        assert self._flat is not None
        if not (keep or measure):
            with (
                _unseen_by_outer_hooks() if self._services.is_compiled else self._not_left_behind()
            ):
                yield
            return
        # Saved views of expanded weights take no memory of their own, and need not be found anew:
        # the backward expands the block's weights to where they were.
        ignored = [self._flat, self._services.expansion.memory, *inputs]
        count = SavedBytes(ignored) if measure else None
        with activations.saving(
            slot=self._flat,
            slot_now=self._weights_now,
            rebind=keep,
            count=count,
            is_compiled=self._services.is_compiled,
        ):
            yield
        if count is not None:
            if bounds == batches.bounds[0]:
                self._first_bytes = count.num_bytes
            if batches.is_even:
                policy.measured(signature, self._first_bytes * len(batches.bounds))
            elif bounds == batches.bounds[-1]:
                before = self._first_bytes * (len(batches.bounds) - 1)
                policy.measured(signature, before + count.num_bytes)

    def accumulator(self) -> Accumulator | None:
        """Return where the block's weight gradients add up; None if it has no trainable ones."""
        if not self.trainable_names:
            return None
        gradients = self._services.backend.gradients
        if gradients is None:
            raise OutcoreError(
                "backward() found no optimizer: create outcore.AdamW(model) first, so that "
                "gradients have a place to go"
            )
        return gradients.accumulator(self.unit)

    def passed_by(self) -> None:
        """Note a backward that goes through the block and leaves its weights out."""
        if self.trainable_names and self._services.backend.gradients is not None:
            self._services.backend.gradients.passed_by(self.unit)

    def finish(self, accumulator: Accumulator) -> None:
        assert self._services.backend.gradients is not None
        self._services.backend.gradients.finish(accumulator)

    @contextlib.contextmanager
    def _not_left_behind(self) -> Iterator[None]:
        """Let the inner graph, which is dropped after the run, give no gradients later on."""

        def unpack(tensor: Tensor) -> Tensor:
            self._weights_now()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack):
            yield

    def _weights_now(self) -> Tensor:
        """Return the weights in their slot, for a graph of this block that is differentiated."""
        if self._flat is None:
            raise OutcoreError(
                f"the loss is made of a tensor from inside {self.described}, kept by a forward "
                "hook perhaps: a block is one node of the model's graph, and would get no gradient "
                "of it. Put the hook on the block itself, have the block return the tensor, or ask "
                "the model for it (output_attentions=True); to look at it only, detach it."
            )
        return self._flat


@contextlib.contextmanager
def _unseen_by_outer_hooks() -> Iterator[None]:
    """Let no checkpoint around the block see what the block's inner graph saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
        yield


def _signature(tensors: Sequence[Tensor], batches: MicroBatches) -> activations.Signature:
    return (*(tuple(t.shape) for t in tensors), tuple(batches.bounds))


def _input_bytes(tensors: Sequence[Tensor], batches: MicroBatches) -> int:
    """Count what this call alone keeps alive: hidden states, not the tables that all share.

    Tables of positions have the batch's shape too where each sequence has its own positions.
    """
    states = [
        t for t in tensors if t.is_floating_point() and t.dim() == 3 and t.shape[0] == batches.batch
    ]
    return sum(t.nbytes for t in states if t.shape[2] == states[0].shape[2])
