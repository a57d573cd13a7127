"""Builds the host kernels beside the Python package; everything else is in pyproject.toml.

The library has a plain C interface and knows neither Python's nor torch's ABI, so it is not an
extension module: one compiler call makes it, and one wheel serves every Python version. Without a
compiler, or when compiling fails, the package is built without it and runs on torch operations,
with the same results.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SOURCES = [
    "kernels/isa.cpp",
    "kernels/adamw.cpp",
    "kernels/adamw_compact.cpp",
    "kernels/checksum.cpp",
    "kernels/disk_pieces.cpp",
    "kernels/file_copy.cpp",
]
HEADERS = ["kernels/outcore_kernels.h", "kernels/host_kernel.h"]
LIBRARY = "outcore/kernels/_outcore_kernels.so"

# Never -ffast-math (other bits) and never -march=native (the kernels choose their instruction set
# at run time). What each flag is for is said in kernels/host_kernel.h.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]


def find_compiler() -> list[str] | None:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def build_commands(compiler: list[str], library: Path) -> list[list[list[str]]]:
    """The ways to build, best first; each is a list of commands that must all succeed."""
    sources = [str(ROOT / source) for source in SOURCES]
    one_call = [*compiler, *FLAGS, "-shared", *sources, "-o", str(library)]
    linked, serial = [[*one_call, "-fopenmp"]], [one_call]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    if sys.platform != "linux" or "clang" in version:
        # clang's OpenMP calls are not those of libgomp, so it must bring its own runtime.
        return [linked, serial]
    # Compiled for OpenMP but not linked with libgomp: its symbols stay open, and at run time
    # outcore/kernels/library.py gives them the libgomp that torch has loaded. Had the library named
    # libgomp.so.1 itself, then with torch wheels that carry it under another name (libgomp-<hash>)
    # the process would hold two of them, with two thread pools fighting for the cores.
    objects = [str(library.with_name(f"{Path(source).stem}.o")) for source in SOURCES]
    shared = [
        [*compiler, *FLAGS, "-fopenmp", "-c", source, "-o", object_]
        for source, object_ in zip(sources, objects, strict=True)
    ]
    shared.append([*compiler, "-shared", *objects, "-o", str(library)])
    return [shared, serial]


def build_library(library: Path) -> None:
    """Compile to `library`; on failure say why and leave none behind."""
    compiler = find_compiler()
    errors = ["no C++ compiler found (tried $CXX, c++, g++, clang++)"]
    library.parent.mkdir(parents=True, exist_ok=True)
    library.unlink(missing_ok=True)
    if compiler is not None:
        errors = []
        try:
            for commands in build_commands(compiler, library):
                runs = [subprocess.run(c, capture_output=True, text=True) for c in commands]
                if all(run.returncode == 0 for run in runs):
                    if errors:
                        warn("building the host kernels for one thread, without OpenMP", errors)
                    return
                errors += [run.stderr for run in runs]
        except OSError as error:
            errors.append(str(error))
        finally:
            for object_ in library.parent.glob("*.o"):
                object_.unlink()
    library.unlink(missing_ok=True)
    warn("building without the host kernels", errors)


def warn(what: str, reasons: list[str]) -> None:
    print(f"warning: {what}:", *reasons, sep="\n", file=sys.stderr)


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        # An editable install runs from the source tree, so the library must lie there.
        build_library(self.kernels_path())

    def kernels_path(self) -> Path:
        return (ROOT if self.editable_mode else Path(self.build_lib)) / LIBRARY

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        library = str(self.kernels_path())
        return outputs if library in outputs else [*outputs, library]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *SOURCES, *HEADERS]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
