"""Tiny models: one thread, in tests and in what a module's tests share."""

import pytest


@pytest.fixture(autouse=True)
def _tiny_models(one_torch_thread: None, closed_engines: None) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _in_modules(one_torch_thread_in_module: None) -> None:
    pass
