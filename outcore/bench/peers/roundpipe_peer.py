"""RoundPipe: weights, activations and fp32 optimizer state on the host, layer-major micro-batches.

Called as its authors' own benchmark calls it: the sequential preset, chunked loss without logits,
its CPU Adam, and the asynchronous update, which trains on weights that are one step old. It has no
preset for Qwen2 or Mistral; those run as the Llama of the same dimensions.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig

from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers.causal_lm import build_model, random_batch
from outcore.bench.peers.measure import forget_building, make_result, synchronize, time_steps
from outcore.shapes import config_from_dict

MICRO_BATCH = 4
LLAMA_LIKE = ("qwen2", "mistral")
PRESETS = {
    "llama": "roundpipe.models.llama",
    "qwen3": "roundpipe.models.qwen3",
    "qwen3_moe": "roundpipe.models.qwen3_moe",
}


def run(job: BenchJob) -> BenchResult:
    if not torch.cuda.is_available():
        raise RuntimeError("RoundPipe needs a CUDA device")
    from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
    from roundpipe.optim import Adam
    from roundpipe.optim_stream import synchronize_optim

    config = supported_config(config_from_dict(job.config))
    adapt_preset(config.model_type)
    # Made on the device because that is fast, trained from the host.
    made = build_model(config, device=torch.device("cuda"), dtype=torch.bfloat16, seed=job.seed)
    num_micro_batches = job.sequences // job.micro_batch_or(MICRO_BATCH)
    model = wrap_model_to_roundpipe(
        made.to("cpu"),
        use_sequential_preset=True,
        name="peer",
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=num_micro_batches),
    )
    optimizer = Adam(
        model.optim_parameters(), lr=job.lr, weight_decay=0.01, decoupled_weight_decay=True
    )
    ids, _ = random_batch(job, torch.device("cpu"))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "return_logits": False,
    }
    losses: list[float] = []

    def mean_loss(outputs: Any, _: Any) -> torch.Tensor:
        # RoundPipe adds up the losses of the micro-batches.
        loss: torch.Tensor = outputs.loss / num_micro_batches
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        loss = model.forward_backward(input_kwargs=inputs, loss_fn=mean_loss)
        # Waits for the update before this one, then returns while this one runs.
        model.step(update)
        losses.append(float(loss.detach()))

    def drain() -> None:
        synchronize_optim()
        synchronize()

    forget_building()
    # No synchronisation between steps: it would cost RoundPipe the overlap that it is made for.
    times = time_steps(job, step, drain=drain)
    notes = {
        "version": importlib.metadata.version("roundpipe"),
        "optimizer_state": "host, fp32",
        "fp32_master": True,
        "clipping": False,
        "recompute": True,
        "update": "asynchronous, weights one step old",
        "model_type": config.model_type,
        "micro_batch": job.sequences // num_micro_batches,
        "compiled_blocks": False,
    }
    return make_result("roundpipe", job, times, losses[-1], notes)


def supported_config(config: PretrainedConfig) -> PretrainedConfig:
    """`config` itself where RoundPipe has a preset for it, else the Llama of the same shape."""
    if config.model_type in PRESETS:
        return config
    if config.model_type not in LLAMA_LIKE:
        raise ValueError(f"RoundPipe has no preset for {config.model_type!r}")
    same = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
    )
    return LlamaConfig(**{name: getattr(config, name) for name in same})


def adapt_preset(model_type: str) -> None:
    """Lets RoundPipe 0.1.1's preset call the mask function of transformers 5.

    The preset passes `input_embeds`, since renamed to `inputs_embeds`, and `cache_position`, since
    removed. Its module keeps its own name for the function, so that only RoundPipe sees the change.
    """
    preset: Any = importlib.import_module(PRESETS[model_type])
    preset.create_causal_mask = with_current_names(preset.create_causal_mask)


def with_current_names(create_mask: Callable[..., Any]) -> Callable[..., Any]:
    """`create_mask`, callable with the arguments of transformers 4 by keyword."""
    accepted = inspect.signature(create_mask).parameters

    def create(**arguments: Any) -> Any:
        if "inputs_embeds" in accepted and "input_embeds" in arguments:
            arguments["inputs_embeds"] = arguments.pop("input_embeds")
        return create_mask(**{name: value for name, value in arguments.items() if name in accepted})

    return create
