"""One block as one autograd function: fetch, run over micro-batches, keep only what is needed.

Forward and recompute run the same function with gradients enabled: a graph without gradients
fuses differently and gives other bits. A block either keeps its graph until the backward, or only
its inputs and computes the graph again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from outcore.errors import UnsupportedModel
from outcore.optim.gradients import Accumulator
from outcore.passes import recorded_outputs
from outcore.passes.block_buffers import copies
from outcore.passes.call_arguments import CallArguments
from outcore.passes.first_order import first_order_only
from outcore.passes.lost_gradients import hidden_gradients, refusal, warn_of_attributes
from outcore.passes.micro_batch import MicroBatches
from outcore.passes.saved_inputs import SavedInputs, hidden_position
from outcore.passes.streamed_block import StreamedBlock
from outcore.random_state import AutocastState, RandomState, preserved


class BlockCall:
    """The arguments of one call of a block, flattened, with tensors apart from the rest."""

    def __init__(self, block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self.arguments = CallArguments(args, kwargs)
        self.leaves = self.arguments.leaves
        self.positions = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.batches = MicroBatches(self.leaves, block.micro_batch)
        self.needs_grad = [self.leaves[i].requires_grad for i in self.positions]
        self.record_keys = recorded_outputs.keys()
        self.autocast = AutocastState(block.device)
        self.random_states: list[RandomState] = []
        self.output_spec: pytree.TreeSpec | None = None
        self.outputs: list[Any] = []  # per output leaf: a tensor position, or a plain value
        if block.cannot_split or block.buffers.need_whole_batch:
            self.batches.whole()

    def take_tensors(self) -> list[Tensor]:
        """Return the tensor arguments and forget them: autograd decides how long they live."""
        tensors = [self.leaves[i] for i in self.positions]
        for position in self.positions:
            self.leaves[position] = None
        return tensors

    def run(self, weights: dict[str, Tensor], tensors: Sequence[Tensor]) -> list[Any]:
        """Run the block's own forward on ``tensors``; return its flattened outputs."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        given = self.arguments.build(leaves)
        output: Any
        recording: recorded_outputs.Recording = {}
        with self.autocast.context():
            if self.record_keys:
                output, recording = recorded_outputs.call_recording(
                    self.block.run_eagerly, weights, given.args, given.kwargs, keys=self.record_keys
                )
            else:
                hidden = hidden_position(tensors)
                hidden_bytes = 0 if hidden is None else tensors[hidden].nbytes
                output = self.block.run(
                    weights, given.args, given.kwargs, hidden_bytes=hidden_bytes
                )
        flat, self.output_spec = pytree.tree_flatten((output, recording, given.changes()))
        return flat

    def refuse_lost_gradients(self, outputs: Sequence[Any]) -> None:
        """After a run with gradients: refuse tensors that went where no gradient comes from."""
        if (leaf := hidden_gradients(self.leaves)) is not None:
            argument = self.arguments.name_of(leaf)
            raise refusal(self.block.described, f"takes as argument {argument}", leaf)
        if (leaf := hidden_gradients(outputs)) is not None:
            raise refusal(self.block.described, "returns", leaf)
        if not self.block.has_run_with_gradients:
            self.block.has_run_with_gradients = True
            warn_of_attributes(self.block.body.block, self.block.described)

    def slices(self, tensors: Sequence[Tensor], bounds: tuple[int, int]) -> list[Tensor]:
        """Return one micro-batch's inputs as leaves of a graph of their own."""
        return [
            self.batches.cut(tensor, bounds).detach().requires_grad_(needs)
            for tensor, needs in zip(tensors, self.needs_grad, strict=True)
        ]

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        """Put the function's tensors back into the block's output; hand over what else it wrote."""
        assert self.output_spec is not None
        flat = [results[x.index] if isinstance(x, _Position) else x for x in self.outputs]
        output, recording, changes = pytree.tree_unflatten(flat, self.output_spec)
        if recording:
            recorded_outputs.hand_over(recording)
        self.arguments.hand_over(changes)
        return output


class _Position:
    """Marks an output leaf that is the ``index``-th tensor, with ``rows`` for each sequence."""

    def __init__(self, index: int, rows: int | None) -> None:
        self.index = index
        self.rows = rows


class BlockFunction(torch.autograd.Function):
    """The autograd node of one block call."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        block = call.block
        keep = block.decides_to_keep(tensors, call.batches)
        ctx.call = call
        ctx.anchor = torch.autograd.graph.get_gradient_edge(anchor).node
        ctx.kept = [] if keep else None
        ctx.held = block.hold_bytes(tensors, call.batches, keep=keep)
        ctx.set_materialize_grads(False)
        ctx.inputs = SavedInputs(block.host_inputs(keep=keep), tensors)
        ctx.save_for_backward(*ctx.inputs.on_device(tensors))
        ctx.buffers = block.buffers.found()
        ctx.weights_seen = block.weights_seen()
        collector = _OutputCollector(call)
        with block.weights("forward") as weights:
            for bounds in call.batches.bounds:
                call.random_states.append(RandomState(block.device))
                inputs = call.slices(tensors, bounds)
                with (
                    torch.enable_grad(),
                    block.saving(inputs, call.batches, bounds, tensors, keep=keep),
                    _explaining_writes(block),
                ):
                    outputs = call.run(weights, inputs)
                call.refuse_lost_gradients(outputs)
                changes_buffers = block.buffers.learn(ctx.buffers)
                can_be_kept = not keep or block.can_be_kept(outputs)
                if not can_be_kept:
                    break  # once more, to be recomputed
                if not collector.add(outputs, bounds) or (
                    changes_buffers and call.batches.is_split
                ):
                    break  # cannot be put together, or is to happen once: once more, unsplit
                if ctx.kept is not None:
                    ctx.kept.append((inputs, _roots(outputs), weights))
                del inputs, outputs
            else:
                ctx.inputs.leave(tensors)
                results = collector.results()
                ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
                return results
        call.random_states[0].restore()
        call.random_states.clear()
        block.buffers.restore(ctx.buffers)
        if can_be_kept:
            call.batches.whole()
            block.cannot_split = True
        return BlockFunction.forward(ctx, call, anchor, *tensors)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: BlockCall = ctx.call
        block = call.block
        block.refuse_other_weights(ctx.weights_seen)
        tensors = ctx.inputs.all(ctx.saved_tensors)
        kept, ctx.kept = ctx.kept, None  # a second backward through a kept graph recomputes
        grads = _InputGrads(call, tensors)
        # torch.autograd.grad for other inputs runs this node, but wants no gradient of weights.
        accumulator = None
        if torch._C._will_engine_execute_node(ctx.anchor):
            accumulator = block.accumulator()
        else:
            block.passed_by()
        with block.weights("backward") as weights, preserved(block.device):
            for i, bounds in enumerate(call.batches.bounds):
                if kept is not None:
                    inputs, roots, own_weights = kept[i]
                    kept[i] = None
                else:
                    call.random_states[i].restore()
                    inputs, own_weights = call.slices(tensors, bounds), weights
                    with torch.enable_grad():
                        roots = _roots(call.run({**weights, **copies(ctx.buffers)}, inputs))
                _differentiate(
                    call, bounds, inputs, roots, own_weights, output_grads, grads, accumulator
                )
                del inputs, roots, own_weights
        if accumulator is not None:
            block.finish(accumulator)
        ctx.held.give_back()
        return (None, None, *grads.results())


@contextlib.contextmanager
def _explaining_writes(block: StreamedBlock) -> Iterator[None]:
    """Say what torch's refusal to write to an input of the block's inner graph means."""
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise UnsupportedModel(
            f"{block.described} changes one of its inputs or weights in place, but needs them "
            "unchanged for its backward: in its forward, write x = x + y instead of x += y, or "
            "start with x = x.clone()"
        ) from error


class _OutputCollector:
    """Puts the micro-batches' outputs together as they come."""

    def __init__(self, call: BlockCall) -> None:
        self._call = call
        self._tensors: list[Tensor] = []

    def add(self, outputs: list[Any], bounds: tuple[int, int]) -> bool:
        """Take one micro-batch's outputs; False if they cannot be put together."""
        call, batches = self._call, self._call.batches
        first = bounds[0] == 0
        if first:
            call.outputs = []
        position = 0
        for i, part in enumerate(outputs):
            if not isinstance(part, Tensor):
                if first:
                    call.outputs.append(part)
                continue
            rows = batches.rows(part, bounds)
            if not batches.can_put_together(part, rows):
                return False
            if first:
                call.outputs.append(_Position(position, rows))
                self._tensors.append(self._start(part.detach(), rows))
            elif rows is not None:
                if call.outputs[i].rows != rows:
                    return False
                whole = self._tensors[position]
                whole[bounds[0] * rows : bounds[1] * rows].copy_(part.detach())
            position += 1
        return True

    def results(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors)

    def _start(self, part: Tensor, rows: int | None) -> Tensor:
        batches = self._call.batches
        if not batches.is_split or rows is None:
            return part
        whole = part.new_empty((batches.batch * rows, *part.shape[1:]))
        whole[: part.shape[0]].copy_(part)
        return whole


class _InputGrads:
    """The gradients of a block's tensor inputs, filled in micro-batch by micro-batch."""

    def __init__(self, call: BlockCall, tensors: Sequence[Tensor]) -> None:
        self._call = call
        self._tensors = tensors
        self._grads: list[Tensor | None] = [None] * len(tensors)

    def add(self, index: int, grad: Tensor | None, bounds: tuple[int, int]) -> None:
        if grad is None:
            return  # stays zero
        batches = self._call.batches
        total = self._grads[index]
        if not batches.is_split or not batches.carries_batch(self._tensors[index]):
            self._grads[index] = grad if total is None else total + grad
            return
        if total is None:
            total = self._grads[index] = torch.zeros_like(self._tensors[index])
        total[bounds[0] : bounds[1]].copy_(grad)

    def results(self) -> Iterator[Tensor | None]:
        return iter(self._grads)


def _roots(outputs: Sequence[Any]) -> list[Any]:
    """Return where the graph of each output begins, None for those without one.

    That is an edge, not the tensor: a kept graph then lives without its output, which has been
    copied into the whole batch's. An input that is handed through is its own beginning.
    """
    return [
        None
        if not isinstance(output, Tensor) or not output.requires_grad
        else output
        if output.is_leaf
        else torch.autograd.graph.get_gradient_edge(output)
        for output in outputs
    ]


def _differentiate(
    call: BlockCall,
    bounds: tuple[int, int],
    inputs: Sequence[Tensor],
    roots: Sequence[Any],
    weights: dict[str, Tensor],
    output_grads: Sequence[Tensor | None],
    grads: _InputGrads,
    accumulator: Accumulator | None,
) -> None:
    """Differentiate one micro-batch and add its gradients up."""
    beginnings, beginning_grads = [], []
    for position, root in zip(call.outputs, roots, strict=True):
        if not isinstance(position, _Position) or root is None:
            continue
        grad = output_grads[position.index]
        if grad is None:
            continue
        if call.batches.is_split:
            if position.rows is not None:
                grad = grad[bounds[0] * position.rows : bounds[1] * position.rows]
            elif bounds[0]:
                continue  # an output without a batch is the first micro-batch's
        beginnings.append(root)
        beginning_grads.append(grad)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    trainable = [weights[name] for name in call.block.trainable_names] if accumulator else []
    if not beginnings or not (wanted or trainable):
        return
    found = torch.autograd.grad(
        beginnings, [*wanted, *trainable], beginning_grads, allow_unused=True
    )
    input_grads = iter(found[: len(wanted)])
    for index, tensor in enumerate(inputs):
        if tensor.requires_grad:
            grads.add(index, next(input_grads), bounds)
    if accumulator is not None:
        accumulator.add(found[len(wanted) :])


def run_without_graph(call: BlockCall, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a block where no gradient is wanted: evaluation, generation, frozen first blocks."""
    collector = _OutputCollector(call)
    with torch.no_grad(), call.block.weights("inference") as weights:
        for bounds in call.batches.bounds:
            outputs = call.run(weights, [call.batches.cut(t, bounds) for t in tensors])
            if not collector.add(outputs, bounds):
                break
        else:
            return collector.results()
    call.batches.whole()
    call.block.cannot_split = True
    return run_without_graph(call, tensors)
