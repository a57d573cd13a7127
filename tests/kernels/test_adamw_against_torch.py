"""The arithmetic is AdamW: it agrees with torch.optim.AdamW to rounding."""

from __future__ import annotations

import pytest
import torch
from adamw_states import State, scalars_of

from outcore.kernels import AdamWScalars, adamw_torch


@pytest.mark.parametrize("path", ["library", "torch"])
@pytest.mark.parametrize("num_steps", [1, 50])
def test_agrees_with_torch_optim(path: str, num_steps: int, request: pytest.FixtureRequest) -> None:
    if path == "library":
        request.getfixturevalue("needs_library")
    n = 20_011
    torch.manual_seed(0)
    state = State(torch.randn(n), None, torch.zeros(n), torch.zeros(n))
    reference = torch.nn.Parameter(state.weight.clone())
    optimizer = torch.optim.AdamW(
        [reference], lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(1, num_steps + 1):
        grad = torch.randn(n)
        reference.grad = grad.clone()
        optimizer.step()
        if path == "library":
            state.step(grad, scalars_of(step, grad_scale=1.0))
        else:
            adamw_torch.adamw_(**vars(state), grad=grad, scalars=scalars_of(step, grad_scale=1.0))
    moments = optimizer.state[reference]
    # Sums that cancel have no relative accuracy, hence the absolute part: 1e-6 of a typical value.
    torch.testing.assert_close(state.weight, reference.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.exp_avg, moments["exp_avg"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.exp_avg_sq, moments["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def test_grad_scale_scales_the_gradient() -> None:
    n = 1_000
    torch.manual_seed(0)
    grad = torch.randn(n)
    scaled, plain = State.make(n, split=True), State.make(n, split=True)
    scaled.step(grad, scalars_of(1, grad_scale=0.25))
    plain.step(grad * 0.25, scalars_of(1, grad_scale=1.0))  # a power of two: exact
    assert torch.equal(scaled.exp_avg, plain.exp_avg)
    assert torch.equal(scaled.weight, plain.weight)


def test_scalars_are_rounded_once_from_double() -> None:
    scalars = AdamWScalars.of(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)

    def fp32(value: float) -> float:
        return torch.tensor(value, dtype=torch.float64).float().item()

    assert scalars.beta1 == fp32(0.9)
    assert scalars.one_minus_beta2 == fp32(1 - 0.999)
    assert scalars.decay == fp32(1 - 1e-3 * 0.01)
    assert scalars.step_size == fp32(1e-3 / (1 - 0.9**3))
    assert scalars.inv_sqrt_bc2 == fp32(1 / (1 - 0.999**3) ** 0.5)
    assert scalars.grad_scale == 1.0


def test_scalars_that_are_not_fp32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beta1=0\.9 is not an fp32 number"):
        AdamWScalars(
            beta1=0.9,
            one_minus_beta1=0.5,
            beta2=0.5,
            one_minus_beta2=0.5,
            eps=0.0,
            decay=1.0,
            step_size=0.5,
            inv_sqrt_bc2=1.0,
            grad_scale=1.0,
        )


@pytest.mark.parametrize(
    ("changed", "message"), [({"step": 0}, "step=0"), ({"beta2": 1.0}, r"beta2=1\.0")]
)
def test_impossible_hyperparameters_are_refused(changed: dict[str, float], message: str) -> None:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(ValueError, match=message):
        AdamWScalars.of(**{**values, **changed})  # type: ignore[arg-type]
