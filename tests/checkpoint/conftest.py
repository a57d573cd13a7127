import pytest


@pytest.fixture(autouse=True)
def _tiny_models(one_torch_thread: None, closed_engines: None) -> None:
    pass
