"""The process that one peer runs in: `python -m outcore.bench.peers NAME --job JSON`.

Standard output is exactly one line of JSON, a result or a failure. Whatever the peer's library
prints goes to standard error instead.
"""

import argparse
import os
import signal
import sys
import threading
import traceback

from outcore.bench.job import BenchFailure, BenchJob, BenchRow
from outcore.bench.peers import load_peer, peer_names

LOG_CHARS = 4000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outcore.bench.peers", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(peer_names())}")
    parser.add_argument("--job", required=True, metavar="JSON", help="a BenchJob as JSON")
    parser.add_argument("--lifeline", type=int, metavar="FD", help="end when this pipe closes")
    arguments = parser.parse_args()
    if arguments.lifeline is not None:
        threading.Thread(target=_end_with_parent, args=(arguments.lifeline,), daemon=True).start()

    answer_fd = os.dup(sys.stdout.fileno())
    # Descriptor 1 itself, not only sys.stdout: compilers and C++ libraries print there too.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    row = run_here(arguments.name, arguments.job)
    os.write(answer_fd, (row.to_json() + "\n").encode())
    sys.stderr.flush()
    # The answer is out. Peers leave threads, process groups and pinned memory behind whose
    # orderly shutdown can hang or crash; the process's end frees all of it anyway.
    os._exit(1 if isinstance(row, BenchFailure) else 0)


def _end_with_parent(lifeline: int) -> None:
    """Wait for the parent's end, then end this process with all that it started."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def run_here(name: str, job_json: str) -> BenchRow:
    """The peer's result, or its exception as a failure."""
    try:
        return load_peer(name)(BenchJob.from_json(job_json))
    except Exception as error:
        log = traceback.format_exc()
        print(log, file=sys.stderr)
        lines = str(error).strip().splitlines() or [""]
        return BenchFailure(
            name=name, failed=f"{type(error).__name__}: {lines[0]}", log=log[-LOG_CHARS:]
        )


if __name__ == "__main__":
    main()
