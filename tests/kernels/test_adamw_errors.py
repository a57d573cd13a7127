"""What a caller passes wrongly is said with names and numbers, before anything changes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from adamw_states import scalars_of

from outcore.kernels import adamw_
from outcore.kernels.library import ScalarsStruct, library, set_host_isa


def arguments(**changed: Any) -> dict[str, Any]:
    return {
        "weight": torch.zeros(8, dtype=torch.bfloat16),
        "remainder": torch.zeros(8, dtype=torch.int16),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.ones(8),
        "scalars": scalars_of(1),
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(8)}, r"weight is torch\.float32, must be torch\.bfloat16"),
        ({"remainder": None}, r"weight is torch\.bfloat16, must be torch\.float32"),
        ({"remainder": torch.zeros(8, dtype=torch.int32)}, r"remainder is torch\.int32"),
        ({"exp_avg": torch.zeros(8).bfloat16()}, r"exp_avg is torch\.bfloat16"),
        ({"exp_avg_sq": torch.zeros(9)}, "exp_avg_sq has 9 elements, weight has 8"),
        ({"grad": torch.zeros(8).half()}, r"grad is torch\.float16, must be torch\.bfloat16 or"),
        ({"grad": torch.zeros(16)[::2]}, r"grad is not contiguous \(strides \(2,\)\)"),
        ({"grad": torch.zeros(8, device="meta")}, "grad is on meta, weight on cpu"),
        ({"threads": -1}, "threads=-1"),
    ],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    values = arguments(**changed)
    with pytest.raises(ValueError, match=message):
        adamw_(**values)
    assert not values["exp_avg_sq"].any()


def test_empty_tensors_are_fine() -> None:
    adamw_(**{k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in arguments().items()})


def test_parameters_that_require_grad_are_updated() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    adamw_(**arguments(weight=weight, remainder=None))
    assert (weight < 1).all()


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="'sse9' is not available"):
        set_host_isa("sse9")


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 0),
        ({"n": 0, "weight": None}, 0),
        ({"weight": None}, -1),
        ({"scalars": None}, -1),
        ({"n": -1}, -2),
        ({"grad_dtype": 2}, -3),
        ({"threads": -1}, -4),
        ({"offset": 1}, -5),
    ],
)
def test_the_library_checks_for_itself(changed: dict[str, Any], status: int) -> None:
    loaded = library()
    assert loaded is not None
    tensors = arguments()
    struct = ScalarsStruct(**vars(tensors["scalars"]))
    got = loaded.oc_adamw_split(
        changed.get("weight", tensors["weight"].data_ptr()),
        tensors["remainder"].data_ptr(),
        tensors["exp_avg"].data_ptr() + changed.get("offset", 0),
        tensors["exp_avg_sq"].data_ptr(),
        tensors["grad"].data_ptr(),
        changed.get("grad_dtype", 1),
        changed.get("n", 4),
        None if "scalars" in changed else ctypes.byref(struct),
        changed.get("threads", 0),
    )
    assert got == status
