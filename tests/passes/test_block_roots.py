"""A kept block holds its graph, not its output."""

from __future__ import annotations

import weakref

import torch

from outcore.passes.block_function import _roots


def test_a_graph_is_differentiated_without_its_output() -> None:
    x = torch.arange(4.0, requires_grad=True)
    output = x * x + 1
    alive = weakref.ref(output)
    roots = _roots([output])
    del output
    assert alive() is None
    (grad,) = torch.autograd.grad(roots, [x], [torch.ones(4)])
    assert torch.equal(grad, 2 * x.detach())


def test_an_input_that_is_handed_through_is_its_own_beginning() -> None:
    x = torch.ones(3, requires_grad=True)
    assert _roots([x])[0] is x
    (grad,) = torch.autograd.grad(_roots([x]), [x], [torch.full((3,), 2.0)])
    assert torch.equal(grad, torch.full((3,), 2.0))


def test_what_has_no_graph_has_no_beginning() -> None:
    assert _roots([torch.ones(2), None, 3, "text"]) == [None] * 4
