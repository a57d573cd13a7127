"""What the compiler is told, by the names that this torch knows."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import lora
import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile

import outcore
import outcore.engine.offload as offload_module
from outcore.passes.compilation import compiled


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that torch's compiler is called with, which it then checks itself."""
    options: dict[str, Any] = {}
    compile_for_real = compile_fx.compile_fx

    def watched(*arguments: Any, **given: Any) -> Any:
        options.update(given.get("config_patches") or {})
        return compile_for_real(*arguments, **given)

    monkeypatch.setattr(compile_fx, "compile_fx", watched)
    return options


def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_no_kernel_is_chosen_by_the_clock(given: dict[str, Any]) -> None:
    compiled(_twice)(torch.ones(2))
    assert given["triton.autotune_pointwise"] is False
    assert given.get("deterministic", False) is hasattr(inductor_config, "deterministic")


def test_a_torch_that_does_not_know_the_option(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.passes.compilation._has_deterministic_option", lambda: False)
    compiled(_twice)(torch.ones(2))
    assert "deterministic" not in given


def test_the_process_that_compiles_starts_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not its children: a program that ends while they start may hang."""
    happened: list[str] = []
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: True)
    monkeypatch.setenv("TORCH_WARM_POOL", "1")
    for name, what in (("warm_pool", "started"), ("wakeup", "children started")):
        monkeypatch.setattr(AsyncCompile, name, functools.partial(happened.append, what))
    place = offload_module.place_units

    def watched(*arguments: Any, **options: Any) -> Any:
        happened.append("placed")
        return place(*arguments, **options)

    monkeypatch.setattr(offload_module, "place_units", watched)
    for is_compiled, expected in ((True, ["started", "placed"]), (False, ["placed"])):
        happened.clear()
        model = outcore.offload(lora.plain_model(), device="cpu", compile=is_compiled)
        outcore.release(model)
        assert happened == expected


def test_threads_compile_as_often_as_each_other() -> None:
    """torch's settings are a thread's own, and by those of a new one few shapes are compiled."""

    def is_compiled(x: torch.Tensor) -> torch.Tensor:
        return x + int(torch.compiler.is_compiling())

    function, shapes = compiled(is_compiled), range(2, 14)
    sums: list[float] = []
    _in_a_thread(lambda: sums.extend(float(function(torch.zeros(n)).sum()) for n in shapes))
    assert sums == [*shapes]


def test_kernels_of_a_backward_in_another_thread_are_told_from_others_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward is compiled when it first runs; on a GPU that is in a thread of autograd's."""
    tags: list[tuple[bool, str]] = []
    compile_for_real = compile_fx.compile_fx_inner

    def watched(*arguments: Any, **given: Any) -> Any:
        tags.append((given.get("is_backward", False), torch.compiler.config.cache_key_tag))
        return compile_for_real(*arguments, **given)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    number = random.random()  # no cache has it
    output = compiled(lambda x: (number * x).sin())(torch.ones(8, requires_grad=True))
    _in_a_thread(lambda: output.sum().backward())
    assert tags == [(False, "outcore-read-back-barrier"), (True, "outcore-read-back-barrier")]
    assert torch.compiler.config.cache_key_tag == ""


def _in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def test_what_single_elements_give_is_not_saved() -> None:
    """A gated product is made again from its two factors, with the same bits."""
    torch.manual_seed(0)
    shapes = (64, 96), (96, 256), (96, 256), (256, 96)
    tensors = [torch.randn(shape).requires_grad_() for shape in shapes]
    found = {}
    for saves_little in (False, True):
        saved: dict[int, int] = {}

        def see(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            output = compiled(_gated, saves_little=saves_little)(*tensors)
        grads = torch.autograd.grad(output.square().sum(), tensors)
        found[saves_little] = [*saved.values()].count(64 * 256), output, grads
    assert (found[False][0], found[True][0]) == (3, 2)
    assert torch.equal(found[False][1], found[True][1])
    assert all(map(torch.equal, found[False][2], found[True][2]))
