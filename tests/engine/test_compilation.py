"""What the compiler is told, by the names that this torch knows."""

from __future__ import annotations

from typing import Any

import lora
import pytest
import torch
import torch._inductor.async_compile as async_compile
import torch._inductor.config as inductor_config

import outcore
import outcore.engine.offload as offload_module
from outcore.engine.compilation import compiled


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that torch.compile is called with, which it then checks itself."""
    options: dict[str, Any] = {}
    compile_for_real = torch.compile

    def watched(function: Any, **arguments: Any) -> Any:
        options.update(arguments["options"])
        return compile_for_real(function, **arguments)

    monkeypatch.setattr(torch, "compile", watched)
    return options


def test_no_kernel_is_chosen_by_the_clock(given: dict[str, Any]) -> None:
    compiled(torch.relu)
    assert given["triton.autotune_pointwise"] is False
    assert given.get("deterministic", False) is hasattr(inductor_config, "deterministic")


def test_a_torch_that_does_not_know_the_option(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.engine.compilation._has_deterministic_option", lambda: False)
    compiled(torch.relu)
    assert "deterministic" not in given


def test_processes_that_compile_start_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: happened.append("started"))
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
