"""Trainers of the real libraries on tiny models; nothing is asked of the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
os.environ["TQDM_DISABLE"] = "1"

import pytest


@pytest.fixture(autouse=True)
def _tiny_models(one_torch_thread: None, closed_engines: None) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _in_modules(one_torch_thread_in_module: None) -> None:
    pass
