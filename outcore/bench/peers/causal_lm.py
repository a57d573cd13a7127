"""The model that the peers train: plain Hugging Face and PyTorch, as fast as both allow.

Owns building it with random weights on the device, compiling its blocks, recomputation, and a head
whose logits exist only in chunks, so that no peer is slowed down or stopped by a batch of logits.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outcore.bench.flops import block_list
from outcore.bench.job import BenchJob
from outcore.shapes import config_from_dict

__all__ = ["CausalLMLoss", "bench_device", "build_model", "compile_blocks", "random_batch"]

HEAD_CHUNK_TOKENS = 4096
# One graph for each structure of block and each shape; the default limit of 8 is too few for
# models that alternate several kinds of block.
RECOMPILE_LIMIT = 64

ChunkLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench_device() -> torch.device:
    """The GPU, or the CPU where there is none (to exercise the code, not to measure)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(
    config: PretrainedConfig, *, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """A causal language model with random weights, made on `device`: a CPU takes minutes."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    return cast(PreTrainedModel, model.train())


def recompute_blocks(model: PreTrainedModel) -> None:
    """Gradient checkpointing for each block."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            # No dropout here; saving the generator's state would wait for the device each time.
            "preserve_rng_state": False,
        }
    )


def compile_blocks(model: PreTrainedModel) -> None:
    """Compiles each block in place, for fixed shapes; equal blocks share one graph."""
    dynamo_config: Any = torch._dynamo.config
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, RECOMPILE_LIMIT)
    for block in block_list(model):
        block.compile(dynamic=False)


def random_batch(job: BenchJob, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and their successors, each [sequences, seq_len]; the same for a given seed."""
    generator = torch.Generator().manual_seed(job.seed)
    vocab_size = config_from_dict(job.config).get_text_config().vocab_size
    shape = (job.sequences, job.seq_len + 1)
    ids = torch.randint(vocab_size, shape, generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class CausalLMLoss(nn.Module):
    """Ids and targets in, mean loss out: the model with its head and loss in chunks."""

    def __init__(self, model: PreTrainedModel, *, compiled: bool, recompute: bool) -> None:
        super().__init__()
        refuse_unusual_head(model)
        if recompute:
            recompute_blocks(model)
        if compiled:
            compile_blocks(model)
        self.model = model
        self._chunk_loss: ChunkLoss = (
            torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        head = cast(nn.Linear, self.model.get_output_embeddings())
        apply: Callable[..., Tensor] = _HeadLoss.apply
        total = apply(hidden.flatten(0, 1), head.weight, targets.flatten(), self._chunk_loss)
        return total / targets.numel()


def refuse_unusual_head(model: PreTrainedModel) -> None:
    """A head that does more than a matrix product would be computed wrongly below."""
    text = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(text, name, None) not in (None, 1.0):
            raise ValueError(f"the peers' chunked loss does not know {name}")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError("the peers' chunked loss needs a linear head without a bias")


def chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of one chunk. hidden [n, d], weight [v, d], targets [n]."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


class _HeadLoss(torch.autograd.Function):
    """Head and loss chunk by chunk, each differentiated at once.

    Gradients are computed in the forward: a chunk's logits are freed before the next chunk's are
    made, and nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss_of_chunk: ChunkLoss
    ) -> Tensor:
        hidden_grad = torch.empty_like(hidden)
        # fp32: a sum over chunks in bf16 would round away what the later ones add.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        leaf_weight = weight.detach().requires_grad_()
        for start in range(0, hidden.shape[0], HEAD_CHUNK_TOKENS):
            chunk = slice(start, start + HEAD_CHUNK_TOKENS)
            leaf_hidden = hidden[chunk].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of_chunk(leaf_hidden, leaf_weight, targets[chunk])
            grads = torch.autograd.grad(loss, (leaf_hidden, leaf_weight))
            hidden_grad[chunk] = grads[0]
            weight_grad += grads[1]
            total += loss.detach()
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        # In place: these tensors were made for this backward, which runs once.
        scale = grad_outputs[0]
        return hidden_grad.mul_(scale), weight_grad.mul_(scale), None, None
