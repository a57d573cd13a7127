"""Fixtures of the kernel tests: the library, and each instruction set that this CPU has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from outcore.kernels import has_library
from outcore.kernels.library import set_host_isa

ISAS = ("avx512", "avx2", "neon", "scalar")


@pytest.fixture
def needs_library() -> None:
    if not has_library():
        compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
        # Where it could have been built, its absence is a failure and no reason to skip.
        assert not compiler, "the host kernels were not built: pip install -e ."
        pytest.skip("no C++ compiler, no host kernels")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, needs_library: None) -> Iterator[str]:
    """Runs a test once per instruction set that this CPU has."""
    name: str = request.param
    try:
        set_host_isa(name)
    except ValueError:
        pytest.skip(f"this CPU has no {name}")
    yield name
    set_host_isa("auto")
