import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imports_are_no_garbage() -> Iterator[None]:
    """offload collects garbage, and going through all that was imported takes most of its time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _tiny_models(one_torch_thread: None, closed_engines: None) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _as_in_the_tests(one_torch_thread_in_module: None) -> None:
    pass
