"""What is trained: the plan for it, the offloaded model, its tokenizer and its optimizer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import outcore
from outcore.adapters import adapted, with_adapters_on_meta
from outcore.machine import here
from outcore.model_config import first_line, read_config
from outcore.model_directory import is_hub_id, model_directory
from outcore.model_spec import auto_class, model_without_values
from outcore.named_device import named_device
from outcore.planning.device_type import computing_on_cpu
from outcore.planning.plan import Plan
from outcore.shapes import shape_config, shape_names
from outcore.store.disk_budget import parse_disk
from outcore.train.settings import TrainSettings
from outcore.train.tokenizer_files import check_tokenizer_files

_NORM_OR_BIAS = re.compile(r"bias$|(layer|rms|_|\.)norm\.weight$")
# With a tower for what is heard, a causal model is one of "sequences to sequences" too.
_PREDICT_NEXT = {"AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"}
_UNUSED_POSITIONS = 2  # in front of the first one (OPT's, BART's)
_VOCABULARIES = {"tokenizer.json", "tokenizer.model", "tekken.json"}  # whatever a class names


def check_disk(settings: TrainSettings) -> None:
    """Refuse a mistyped directory at once, also where this plan would put nothing there."""
    if settings.disk is None:
        return
    path = parse_disk(settings.disk).path
    if not path.is_dir():
        raise ValueError(f"disk {path} is no directory; make it, or name another")


def resolved(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the directory of a model that was named by its id on the Hub."""
    if settings.model in shape_names():
        return settings
    return replace(settings, model=str(model_directory(settings.model)))


def config_of(settings: TrainSettings) -> Any:
    """Return the model's configuration; ValueError says what is neither directory nor shape."""
    directory = Path(settings.model)
    if (directory / "config.json").is_file():
        return read_config(directory / "config.json")
    if settings.model in shape_names():
        return shape_config(settings.model)
    if (directory / "adapter_config.json").is_file():
        raise ValueError(
            f"{settings.model} holds adapters without the model that they are of: merge them into "
            "it (PEFT's merge_and_unload), and name what that saves; or go on with their run "
            "(--resume)"
        )
    close = difflib.get_close_matches(settings.model, shape_names(), n=1)
    raise ValueError(
        f"{settings.model!r} is neither a Hugging Face directory (with a config.json), nor an id "
        "of the Hub (org/name), nor a shape" + (f": {close[0]}?" if close else "")
    )


def check_next_token(settings: TrainSettings, config: Any) -> None:
    """Refuse what does not predict the next token: with these labels it would learn to copy."""
    kind = auto_class(config).__name__
    if kind not in _PREDICT_NEXT or getattr(config, "is_encoder_decoder", False):
        what = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise ValueError(
            f"{settings.model} is a {what}, which is no causal language model; for others there "
            "are outcore.hf.Trainer and outcore.offload"
        )


def check_positions(settings: TrainSettings, config: Any, longest: int | None) -> None:
    """Refuse sequences that are longer than a model's table of positions, where it has one.

    A GPU ends the process at a position behind its end, at the first long document: maybe late.
    """
    if settings.seq_len is None or longest is None or settings.seq_len <= longest:
        return
    model = model_without_values(config, settings.model)
    tokens = model.get_input_embeddings()
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    is_learned = any(0 <= m.num_embeddings - longest <= _UNUSED_POSITIONS for m in others)
    is_computed = any(b.dim() == 2 and b.shape[0] == longest for b in model.buffers())  # GPT-J's
    if is_learned or is_computed:
        raise ValueError(
            f"seq_len={settings.seq_len}, and the model has {longest} positions: --seq-len "
            f"{longest} is the most"
        )


def check_rank(settings: TrainSettings, config: Any) -> None:
    """Refuse adapters that are larger than what they adapt: no budget would hold them."""
    hidden_size = getattr(config.get_text_config(), "hidden_size", None)
    if settings.lora and isinstance(hidden_size, int) and settings.lora_rank > hidden_size:
        raise ValueError(
            f"lora_rank={settings.lora_rank} is more than the model's hidden size, "
            f"{hidden_size:,}: such adapters are larger than what they adapt; 16 is usual"
        )


def check_targets(settings: TrainSettings, config: Any) -> None:
    """Refuse a target that no layer has: PEFT leaves it out where another one is found."""
    adapters = adapters_of(settings)
    if adapters is None or not settings.lora_targets:
        return
    base = model_without_values(config, settings.model)
    modules = [(n, m) for n, m in base.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    linear = {name.rpartition(".")[2] for name, _ in modules}
    known = f"the model's linear layers are {', '.join(sorted(linear))}"
    try:
        model: Any = adapted(base, adapters, low_cpu_mem_usage=True)  # without values
    except ValueError as error:  # it finds none at all, or one that takes no adapter
        raise ValueError(f"lora_targets: {first_line(error)} ({known})") from error
    found = model.base_model.targeted_module_names
    # PEFT's own list: of experts that are one tensor it has taken out what it knows as parameters.
    for target in sorted(model.peft_config["default"].target_modules):
        if not any(name == target or name.endswith(f".{target}") for name in found):
            raise ValueError(f"lora_targets has {target!r}, and no layer is called that: {known}")


def check_dropout(settings: TrainSettings, config: Any) -> None:
    """Refuse dropout before adapters of experts that are one tensor: PEFT has no place for it."""
    adapters = adapters_of(replace(settings, lora_dropout=0.0))
    if adapters is None or not settings.lora_dropout:
        return
    model: Any = with_adapters_on_meta(model_without_values(config, settings.model), adapters)
    found = model.peft_config["default"]
    if found.target_parameters:
        raise ValueError(
            f"lora_dropout={settings.lora_dropout:g}, and experts that are one tensor "
            f"({', '.join(sorted(found.target_parameters))}) take none: leave --lora-dropout out, "
            f"or name other --lora-targets ({', '.join(sorted(found.target_modules))})"
        )


def load_tokenizer(settings: TrainSettings) -> Any:
    """Return the tokenizer, without running code that lies beside it."""
    from transformers import AutoTokenizer

    directory = Path(settings.tokenizer or settings.model).expanduser()
    if not directory.is_dir():
        if settings.tokenizer is not None:
            raise ValueError(f"{directory} is no directory: --tokenizer names that of a tokenizer")
        raise ValueError(f"{settings.model} is a shape: name a tokenizer's directory (--tokenizer)")
    try:
        check_tokenizer_files(directory)
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        _check_vocabulary(tokenizer, directory)
    except Exception as error:  # whatever its classes and their library raise about its files
        raise ValueError(
            f"{directory} has no tokenizer that can be read: --tokenizer names another directory "
            f"({first_line(error)})"
        ) from error
    return tokenizer


def _check_vocabulary(tokenizer: Any, directory: Path) -> None:
    """Refuse a tokenizer that was made of nothing, which older versions of transformers do."""
    names = set(tokenizer.vocab_files_names.values())
    if names and not any((directory / name).is_file() for name in names | _VOCABULARIES):
        raise ValueError(f"none of {', '.join(sorted(names))} is there")


def plan_for(
    settings: TrainSettings,
    sequences: int,
    config: Any,
    *,
    probing: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Return the plan of this run on this machine; DoesNotFit with what would."""
    assert settings.seq_len is not None
    disk = None if settings.disk is None else parse_disk(settings.disk).path
    machine = here(disk=disk, progress=probing)
    device = named_device(settings.device)
    if device.type == "cpu":
        machine = computing_on_cpu(machine, device_memory=settings.device_memory)
    return outcore.plan(
        config,
        tokens=sequences * settings.seq_len,
        seq_len=settings.seq_len,
        machine=machine,
        device_memory=settings.device_memory,
        host_memory=settings.host_memory,
        disk=settings.disk,
        clipping="two-pass" if settings.clip_in_two_passes else settings.clips,
        dtype=_dtype(settings, device),
        state_format=settings.state_format,
        adapters=adapters_of(settings),
        frozen_weights=settings.frozen_weights,
        micro_batch=settings.micro_batch and min(settings.micro_batch, sequences),
        masked=True,  # a sequence is several documents, or ends in padding
        checkpoints=settings.save_every is not None,
    )


def make_model(settings: TrainSettings, plan: Plan, named: str) -> Any:
    """Return the model in the homes of the plan, filled unit by unit.

    named: what the user calls it; adapters name their base so where that is an id of the Hub, which
    means the same on other machines.
    """
    torch.manual_seed(settings.seed)
    options: dict[str, Any] = {
        "plan": plan,
        "device": named_device(settings.device),
        "adapters": adapters_of(settings),
    }
    if Path(settings.model).is_dir():
        model = outcore.load(settings.model, **options)
    else:
        model = outcore.from_config(config_of(settings), **options)
    if settings.lora and is_hub_id(named):
        model.peft_config["default"].base_model_name_or_path = named
    model.train()
    return model


def adapters_of(settings: TrainSettings) -> Any:
    """Return PEFT's configuration of the adapters; None where all parameters are trained."""
    if not settings.lora:
        return None
    try:
        peft: Any = import_module("peft")
    except ImportError:
        raise ValueError("LoRA needs PEFT: pip install peft") from None
    targets = settings.lora_targets
    return peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        lora_dropout=settings.lora_dropout,
        target_modules=list(targets) if targets else "all-linear",
        task_type="CAUSAL_LM",
    )


def make_optimizer(model: nn.Module, settings: TrainSettings) -> outcore.AdamW:
    """Return AdamW over what is trainable; norms and biases are not decayed."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trainable if _is_decayed(name, p)]
    others = [p for name, p in trainable if not _is_decayed(name, p)]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return outcore.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        max_grad_norm=settings.max_grad_norm if settings.clips else None,
        on_non_finite=settings.on_non_finite,
        update_during_backward=not settings.gradients_wait,
        rounding_seed=settings.seed,
    )


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a matrix: biases of stacked experts (gpt-oss) and norms of heads (Cohere) have
    two axes too, and are told by their names.
    """
    return parameter.dim() >= 2 and not _NORM_OR_BIAS.search(name)


def _dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    if settings.dtype is None:
        is_fp32 = device.type == "cpu" and settings.state_format == "fp32"
        return torch.float32 if is_fp32 else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[settings.dtype]
