"""Runs peers one after the other, each in a process of its own.

Owns the parent's side: start, time limit, and what a process that died without an answer means. The
child lives no longer than its parent, however that ends: it holds a pipe from it. A fresh process
gives each peer the whole memory of the machine, and a peer that is missing, runs out of memory or
crashes becomes a row with the reason.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from outcore.bench.job import BenchFailure, BenchJob, BenchRow, row_from_json

__all__ = ["DEFAULT_LIMIT_S", "run_peer", "run_peers"]

DEFAULT_LIMIT_S = 900.0
_LOG_BYTES = 4000
_PROCESS_MODULE = "outcore.bench.peers"
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


def run_peers(
    names: Iterable[str], job: BenchJob, *, limit_s: float = DEFAULT_LIMIT_S
) -> Iterator[BenchRow]:
    """The rows of `names`, each yielded as soon as it is there."""
    for name in names:
        yield run_peer(name, job, limit_s=limit_s)


def run_peer(name: str, job: BenchJob, *, limit_s: float = DEFAULT_LIMIT_S) -> BenchRow:
    """Runs one peer in a subprocess and waits for it, at most `limit_s` seconds."""
    lifeline, held = os.pipe()  # the kernel closes ``held`` when this process ends
    command = [sys.executable, "-m", _PROCESS_MODULE, name, "--job", job.to_json()]
    command += ["--lifeline", str(lifeline)]
    # The child must find this very package, also when it is not installed.
    path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            # A group of its own: compile workers that outlive the peer can be ended with it.
            start_new_session=True,
            pass_fds=[lifeline],
        )
        os.close(lifeline)
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return BenchFailure(
                name=name, failed=f"did not finish within {limit_s:.0f} s", log=_tail(log)
            )
        finally:
            _end_group(child)
            os.close(held)
        return _read_row(name, output.decode(errors="replace"), child.returncode, _tail(log))


def _read_row(name: str, output: str, status: int, log: str) -> BenchRow:
    lines = output.strip().splitlines()
    if lines:
        try:
            return row_from_json(lines[-1])
        except (ValueError, TypeError) as error:
            return BenchFailure(name=name, failed=f"answered what is no row: {error}", log=log)
    return BenchFailure(name=name, failed=_explain_death(status, log), log=log)


def _explain_death(status: int, log: str) -> str:
    if status == -signal.SIGKILL:
        return "was killed, most likely because the host ran out of memory"
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    last_words = log.strip().splitlines()[-1:] or ["it wrote nothing"]
    return f"exited with status {status}: {last_words[0]}"


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOG_BYTES))
    return log.read().decode(errors="replace")
