"""Loading: one OpenMP runtime in the process, and one warning when there is no library.

Each test runs in its own process, since a library is loaded once and never unloaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import outcore.kernels

# Found by the child processes first: the package under test and this folder's adamw_states.
PATHS = [str(Path(outcore.kernels.__file__).parents[2]), str(Path(__file__).parent)]


def run_python(code: str) -> str:
    prelude = f"import sys; sys.path[:0] = {PATHS}\n"
    result = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.usefixtures("needs_library")
def test_only_one_openmp_runtime_is_mapped() -> None:
    code = """
import torch
from outcore.kernels import has_library, split_master
from outcore.kernels.library import openmp_runtimes
before = openmp_runtimes()
torch.ones(1 << 20).add_(1)
assert has_library()
split_master(torch.zeros(1 << 20))
print(len(before), len(openmp_runtimes()))
"""
    before, after = map(int, run_python(code).split())
    assert after == max(before, 1)


MISSING = """
import hashlib, warnings
from pathlib import Path
import torch
from outcore.kernels import library
HIDE
from adamw_states import State, hostile_grad, scalars_of
from outcore.kernels import has_library, host_isa, join_master
digest = hashlib.sha256()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = State.make(5_003, split=True)
    for step in range(1, 4):
        state.step(hostile_grad(5_003, step, torch.bfloat16), scalars_of(step))
        digest.update(join_master(state.weight, state.remainder).numpy().tobytes())
print(has_library(), host_isa(), len(caught), *{w.category.__name__ for w in caught})
print(digest.hexdigest())
"""


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize(
    "hide",
    [
        'library.LIBRARY_PATH = Path("/nowhere/_outcore_kernels.so")',
        "library.LIBRARY_PATH = Path(library.__file__)",  # a file, but no library
        "library.ABI_VERSION = -7",
    ],
    ids=["missing", "broken", "other-abi"],
)
def test_without_a_library_one_warning_and_the_same_bits(hide: str) -> None:
    summary, digest = run_python(MISSING.replace("HIDE", hide)).splitlines()
    assert summary == "False torch 1 RuntimeWarning"
    summary, expected = run_python(MISSING.replace("HIDE", "")).splitlines()
    assert summary.startswith("True ")
    assert summary.endswith(" 0")
    assert digest == expected
