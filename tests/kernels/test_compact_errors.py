"""What a caller passes wrongly to compact AdamW is said before anything changes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from adamw_states import scalars_of

from outcore.kernels import adamw_compact_
from outcore.kernels.library import ScalarsStruct, library

N = 130  # two blocks


def bytes_of(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def arguments(**changed: Any) -> dict[str, Any]:
    return {
        "weight": torch.zeros(N, dtype=torch.bfloat16),
        "remainder": torch.zeros(N, dtype=torch.int8),
        "exp_avg": bytes_of(N),
        "exp_avg_sq": bytes_of(N),
        "exp_avg_scale": bytes_of(2),
        "exp_avg_sq_scale": bytes_of(2),
        "grad": torch.ones(N),
        "scalars": scalars_of(1),
        "seed": 0,
        "step": 1,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(N)}, r"weight is torch\.float32, must be torch\.bfloat16"),
        ({"remainder": torch.zeros(N, dtype=torch.int16)}, r"remainder is torch\.int16"),
        ({"exp_avg": torch.zeros(N)}, r"exp_avg is torch\.float32, must be torch\.uint8"),
        ({"exp_avg_sq": bytes_of(9)}, "exp_avg_sq has 9 elements, weight has 130"),
        ({"exp_avg_scale": bytes_of(1)}, "exp_avg_sq_scale has 2 elements, exp_avg_scale has 1"),
        (
            {"exp_avg_scale": bytes_of(3), "exp_avg_sq_scale": bytes_of(3)},
            "exp_avg_scale has 3 elements, must have 2: one for each 128 of 130",
        ),
        ({"grad": torch.zeros(N).half()}, r"grad is torch\.float16, must be torch\.bfloat16 or"),
        ({"grad": torch.zeros(2 * N)[::2]}, r"grad is not contiguous \(strides \(2,\)\)"),
        ({"grad": torch.zeros(N, device="meta")}, "grad is on meta, weight on cpu"),
        ({"first_element": 64}, "first_element=64: must be a multiple of 128"),
        ({"first_element": -128}, "first_element=-128"),
        ({"threads": -1}, "threads=-1"),
    ],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    values = arguments(**changed)
    with pytest.raises(ValueError, match=message):
        adamw_compact_(**values)
    assert not values["exp_avg_sq"].any()


def test_empty_tensors_are_fine() -> None:
    adamw_compact_(
        **{k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in arguments().items()}
    )


def test_parameters_that_require_grad_are_updated() -> None:
    weight = torch.nn.Parameter(torch.ones(N, dtype=torch.bfloat16))
    for step in range(1, 40):
        adamw_compact_(**arguments(weight=weight, remainder=None, step=step))
    assert (weight <= 1).all()
    assert weight.float().mean() < 0.99


def test_seeds_of_any_size_are_taken() -> None:
    for seed in (0, -1, 1 << 63, 1 << 70):
        adamw_compact_(**arguments(seed=seed))


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize("name", ["oc_adamw_compact", "oc_adamw_minimal"])
@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 0),
        ({"n": 0, "weight": None}, 0),
        ({"weight": None}, -1),
        ({"remainder": None}, -1),
        ({"exp_avg_scale": None}, -1),
        ({"scalars": None}, -1),
        ({"n": -1}, -2),
        ({"grad_dtype": 2}, -3),
        ({"threads": -1}, -4),
        ({"offset": 1}, -5),
        ({"first_element": 64}, -7),
        ({"first_element": -128}, -7),
    ],
)
def test_the_library_checks_for_itself(name: str, changed: dict[str, Any], status: int) -> None:
    loaded = library()
    assert loaded is not None
    values = arguments()
    arrays = ["weight", "remainder", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"]
    if name == "oc_adamw_minimal":
        arrays.remove("remainder")
        if "remainder" in changed:
            status = 0
    struct = ScalarsStruct(**vars(values["scalars"]))
    got = getattr(loaded, name)(
        *(changed.get(array, values[array].data_ptr()) for array in arrays),
        values["grad"].data_ptr() + changed.get("offset", 0),
        changed.get("grad_dtype", 1),
        changed.get("n", 4),
        None if "scalars" in changed else ctypes.byref(struct),
        0,
        1,
        changed.get("first_element", 0),
        changed.get("threads", 0),
    )
    assert got == status
