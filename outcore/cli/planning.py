"""Where `outcore plan` gets a model, a machine and a plan from.

Each is imported when it is first called, so that help and mistakes answer without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from outcore.machine.machine import Machine
from outcore.planning.plan import Job, Plan

if TYPE_CHECKING:
    from outcore.model_spec import ModelSpec

_USUAL_RANK = 256


def model_spec(source: str) -> ModelSpec:
    """Return what a directory, id, config or shape is made of; ValueError, OSError: why not."""
    from outcore import model_spec

    return model_spec.model_spec(source)


def lora_spec(source: str, rank: int) -> ModelSpec:
    """Return the same with LoRA adapters of this rank on every linear layer of the blocks."""
    from outcore import model_spec

    try:
        from peft import LoraConfig
    except ImportError:
        raise ValueError("--lora needs the package peft: pip install peft") from None
    if rank > _USUAL_RANK:
        hidden_size = model_spec.model_spec(source).hidden_size
        if rank > hidden_size:
            raise ValueError(
                f"--lora {rank} is more than the model's hidden size, {hidden_size:,}: such "
                "adapters are larger than what they adapt; 16 is usual"
            )
    adapters = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return model_spec.model_spec(source, adapters=adapters)


def machine_named(name: str, disk: str | None = None) -> Machine:
    """Return a machine of the catalogue, or this one with the disk of a folder for "here"."""
    from outcore import machine

    return machine.machine_named(name, disk=disk)


def with_parts(machine: Machine, device_bytes: int | None) -> Machine:
    """Return a machine whose device is its CPU with as much memory for it, as a run has it."""
    from outcore.planning import device_type

    if device_type.device_type(machine) != "cpu":
        return machine
    return device_type.computing_on_cpu(machine, device_memory=device_bytes)


def default_dtype(machine: Machine, state_format: str) -> Literal["bf16", "fp32"]:
    """Return what a run on this machine computes in, as ``outcore.plan`` has it."""
    from outcore.planning import device_type

    return device_type.default_dtype(machine, state_format)


def make_plan(spec: ModelSpec, machine: Machine, job: Job) -> Plan:
    """Return the best plan; ``DoesNotFit`` says what is missing where nothing fits."""
    from outcore.planning import search

    return search.make_plan(spec, machine, job)
