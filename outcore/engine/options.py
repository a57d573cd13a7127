"""What a user may choose in ``offload``, checked and turned into values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outcore.units import parse_bytes

_HOMES = ("device", "host")


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The checked arguments of ``offload``; see there for what each one means."""

    device: torch.device
    device_memory_bytes: int | None
    host_memory_bytes: int | None
    micro_batch: int | None
    weights: str
    state: str
    activations: str
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    num_slots: int
    num_visits: int | None
    is_compiled: bool


def check_options(
    *,
    device: str | torch.device | None,
    device_memory: int | str | None,
    host_memory: int | str | None,
    micro_batch: int | None,
    weights: str,
    state: str,
    activations: str,
    dtype: torch.dtype | None,
    gradient_dtype: torch.dtype | None,
    num_slots: int,
    num_visits: int | None,
    compile: bool | None,
) -> OffloadOptions:
    chosen = _device(device)
    for name, home in (("weights", weights), ("state", state)):
        if home not in _HOMES:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, _HOMES))}, not {home!r}")
    if activations not in ("auto", "keep", "recompute"):
        raise ValueError(f'activations must be "auto", "keep" or "recompute", not {activations!r}')
    if dtype is None:
        dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"dtype must be torch.bfloat16 (with an fp32 master) or torch.float32, not {dtype}"
        )
    gradient_dtype = gradient_dtype or dtype
    if gradient_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"gradient_dtype must be bfloat16 or float32, not {gradient_dtype}")
    for name, value, least in (
        ("micro_batch", micro_batch, 1),
        ("num_slots", num_slots, 1),
        ("num_visits", num_visits, 0),
    ):
        if value is None and name != "num_slots":
            continue
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be {least} or more, not {value!r}")
    return OffloadOptions(
        device=chosen,
        device_memory_bytes=_bytes(device_memory, "device_memory"),
        host_memory_bytes=_bytes(host_memory, "host_memory"),
        micro_batch=micro_batch,
        weights=weights,
        state=state,
        activations=activations,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        num_slots=num_slots,
        num_visits=num_visits,
        is_compiled=chosen.type == "cuda" if compile is None else compile,
    )


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device must be "cuda" or "cpu", not {device!r}') from None
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f'device must be "cuda" or "cpu", not {str(device)!r}')
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError('device="cuda", but torch sees no GPU; use device="cpu"')
        index = chosen.index if chosen.index is not None else torch.cuda.current_device()
        return torch.device("cuda", index)
    return torch.device("cpu")


def _bytes(size: int | str | None, what: str) -> int | None:
    return None if size is None else parse_bytes(size, what=what)
