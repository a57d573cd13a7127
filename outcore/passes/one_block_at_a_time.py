"""One block of a model runs at a time, whichever threads call it.

While a block runs, its module's parameters are those in its slot, and its gradients add up in
buffers that all blocks share: a second thread waits until the block is done. It never waits between
two blocks, and whoever runs a block waits only for lanes and updaters, which never take the lock.
Autograd's own threads take it too, in a backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outcore.passes.block_function import BlockCall, BlockFunction


class LockedBlockFunction(BlockFunction):
    """A block's autograd node whose backward has the model's blocks to itself.

    Its forward is called by whoever holds the lock already.
    """

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: BlockCall = ctx.call
        with call.block.lock:
            grads: tuple[Tensor | None, ...] = BlockFunction.backward(ctx, *output_grads)
            return grads
