"""Shared by all tests: GPU tests are skipped without a GPU, and no test leaves a thread behind."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disk_by_piece import leave_all_to_python
from hypothesis import settings

# The same examples each time, so that a change is what turns a test red. To look for new ones:
# pytest --hypothesis-profile=default
settings.register_profile("same_examples", derandomize=True)
settings.load_profile("same_examples")

# Shells start what runs in the background with Ctrl-C ignored; so would be what tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a GPU needs for the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory for scratch files, in which none is left."""
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == [], "scratch files are left behind"


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """Tests that are run under nohup inherit that SIGHUP is ignored, and so do their processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records on disk move through ``disk_calls.read_at`` and ``write_at``, one piece a call."""
    leave_all_to_python(monkeypatch)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Tiny models lose more to the waiting of idle OpenMP threads than they gain from them."""
    yield from _with_one_torch_thread()


@pytest.fixture(scope="module")
def one_torch_thread_in_module() -> Iterator[None]:
    """The same for what a whole module shares: other threads add up in another order."""
    yield from _with_one_torch_thread()


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """offload collects garbage; going through all that was imported would take most of its time.

    What is alive here stays out of every later collection, of this module and of those after it.
    """
    gc.collect()
    gc.freeze()


def _with_one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def closed_engines() -> Iterator[None]:
    """Close every engine that the test opened, and see that its threads end."""
    before = set(threading.enumerate())
    yield
    from outcore.engine.offloaded import _open_engines

    for engine in list(_open_engines):
        engine.close()
    deadline = time.monotonic() + 5
    while (left := _outcore_threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads left behind: {sorted(thread.name for thread in left)}"


def _outcore_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("outcore-")}
