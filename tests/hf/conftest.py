"""Trainers of the real libraries on tiny models; nothing is asked of the network."""

import gc
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
os.environ["TQDM_DISABLE"] = "1"

import pytest


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> Iterator[None]:
    """Each offload and each train() collects garbage, among all that was imported: 0.5 s."""
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
