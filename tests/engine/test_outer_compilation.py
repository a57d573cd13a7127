"""Users' own torch.compile, of an offloaded model and of what calls it, passes the engine by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import batch_of, offloaded
from torch import nn
from training import LLAMA, assert_equal, weights_of, with_optimizer

import outcore

STEPS = 3


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Counts what torch's compiler is asked to compile, and runs it as it is."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        forward: Callable[..., Any] = graph.forward
        return forward


def step(model: Any, called: Any, optimizer: Any, batch: Any) -> None:
    called(**batch).loss.backward()
    optimizer.step()
    model.zero_grad()
    optimizer.zero_grad()


def train(model: Any, step_with: Callable[[Any], None]) -> dict[str, torch.Tensor]:
    for seed in range(STEPS):
        step_with(batch_of(seed=seed))
    return weights_of(model)


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()), max_grad_norm=1.0)
    return train(model, lambda batch: step(model, model, optimizer, batch))


def whole_model(model: Any, optimizer: Any, backend: Backend) -> Callable[[Any], None]:
    called = torch.compile(model, backend=backend)
    return lambda batch: step(model, called, optimizer, batch)


def loss(model: Any, optimizer: Any, backend: Backend) -> Callable[[Any], None]:
    called = torch.compile(lambda **batch: model(**batch), backend=backend)
    return lambda batch: step(model, called, optimizer, batch)


def whole_step(model: Any, optimizer: Any, backend: Backend) -> Callable[[Any], None]:
    return torch.compile(lambda batch: step(model, model, optimizer, batch), backend=backend)


@pytest.mark.parametrize("what", [whole_model, loss, whole_step])
def test_the_engine_runs_as_it_is(what: Any, expected: dict[str, torch.Tensor]) -> None:
    """Compiled with the model's, its work had other bits, and each block was a graph anew."""
    backend = Backend()
    model, optimizer = with_optimizer(offloaded(LLAMA.make()), max_grad_norm=1.0)
    assert_equal(train(model, what(model, optimizer, backend)), expected)
    assert backend.num_graphs == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_was_compiled_before(wrapped: bool, expected: dict[str, torch.Tensor]) -> None:
    backend = Backend()
    plain: nn.Module = LLAMA.make()
    if wrapped:
        plain = torch.compile(plain, backend=backend)  # type: ignore[assignment]
    else:
        plain.compile(backend=backend)
    model, optimizer = with_optimizer(offloaded(plain), max_grad_norm=1.0)
    weights = train(model, lambda batch: step(model, model, optimizer, batch))
    assert_equal({name.removeprefix("_orig_mod."): w for name, w in weights.items()}, expected)
    assert backend.num_graphs == 0
    outcore.release(model)
    model(**batch_of())
    assert backend.num_graphs > 0  # as the user had it


def test_compile_tells_that_it_changes_nothing(expected: dict[str, torch.Tensor]) -> None:
    backend = Backend()
    model, optimizer = with_optimizer(offloaded(LLAMA.make()), max_grad_norm=1.0)
    for module in (model, model.model.layers[0]):
        with pytest.warns(UserWarning, match=r"compile\(\) changes nothing.*offload\(compile=True"):
            module.compile(backend=backend)
    weights = train(model, lambda batch: step(model, model, optimizer, batch))
    assert_equal(weights, expected)
    assert backend.num_graphs == 0


def test_a_graph_of_the_whole_model_is_refused_with_the_reason() -> None:
    model = offloaded(LLAMA.make())
    called = torch.compile(lambda **batch: model(**batch), backend=Backend(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"outcore\.offload\(compile=True\)"):
        called(**batch_of())


def test_edges_in_a_compiled_function_learn() -> None:
    """What is no block may be compiled; that it waits for its updates is left to Python."""

    def trained(compile: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        model, optimizer = with_optimizer(offloaded(LLAMA.make()))
        embedded = compile(lambda ids: model.get_input_embeddings()(ids).pow(2).sum())
        for seed in range(STEPS):
            embedded(batch_of(seed=seed)["input_ids"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    plain = trained(lambda function: function)
    compiled = trained(lambda function: torch.compile(function, backend=Backend()))
    assert_equal(compiled, plain)


def test_the_engines_own_compilation_goes_on_inside(expected: dict[str, torch.Tensor]) -> None:
    """Blocks that the engine compiles are compiled once, whoever compiles around them."""
    ours = Backend()
    theirs = Backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "outcore.passes.compilation._Inductor.__call__",
            lambda _, graph, inputs: ours(graph, inputs),
        )
        model, optimizer = with_optimizer(offloaded(LLAMA.make(), compile=True), max_grad_norm=1.0)
        weights = train(model, whole_step(model, optimizer, theirs))
    assert theirs.num_graphs == 0
    assert ours.num_graphs > 0
    assert_equal(weights, expected)
