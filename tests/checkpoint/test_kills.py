"""A run that is killed at any moment goes on, in any placement, to the bits of an undisturbed one.

Every loss that any attempt computed is compared, not only what the last one ends with.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from killed_runs import SAVE_EVERY, STEPS, Answer, Order, make_cache
from small_run import ALL_PLACEMENTS

from outcore.checkpoint.folder import CheckpointFolder


class Server:
    """The process that forks runs (killed_runs.py), and what an undisturbed run gave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_cache(folder / "cache")
        program = Path(__file__).with_name("killed_runs.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        walls = [self.run(self.work(f"whole-{i}"), Order(placement=i)).wall_s for i in (0, 3)]
        self.longest_s = max(walls)
        self.final = (self.work("whole-0") / "final").read_text()
        self.losses = losses_of(self.work("whole-0"))
        assert (self.work("whole-3") / "final").read_text() == self.final

    def work(self, name: str) -> Path:
        return self.folder / name

    def run(self, work: Path, order: Order) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"work": str(work), **asdict(order)}), file=self._process.stdin, flush=True
        )
        answer = Answer(**json.loads(self._process.stdout.readline()))
        assert not answer.error, answer.error
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=20)


def losses_of(work: Path) -> dict[int, str]:
    """Return the loss of each step; each attempt that came to a step had the same."""
    found: dict[int, str] = {}
    for line in (work / "losses").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(int(step), loss) == loss, f"{work.name}: step {step}"
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("kills"))
    yield server
    server.close()


def finish(server: Server, work: Path, placement: int) -> None:
    """Let the run go on undisturbed, and compare all that it ever was."""
    answer = server.run(work, Order(placement=placement))
    assert not answer.killed
    assert (work / "final").read_text() == server.final
    assert losses_of(work) == server.losses
    folder = CheckpointFolder(work / "checkpoints")
    assert folder.steps() == [STEPS - SAVE_EVERY, STEPS]


def kill_at_random(server: Server, name: str, num_kills: int, seed: int) -> int:
    """Kill run after run at random times until there were so many; return how many."""
    draw = random.Random(seed)
    num_killed = story = 0
    while num_killed < num_kills:
        work = server.work(f"{name}-{story}")
        story += 1
        for _ in range(6):
            order = Order(
                placement=draw.randrange(len(ALL_PLACEMENTS)),
                kill_after_s=draw.uniform(0, server.longest_s),
            )
            if not server.run(work, order).killed:
                break
            num_killed += 1
        finish(server, work, draw.randrange(len(ALL_PLACEMENTS)))
    return num_killed


def test_kills_at_random_moments(server: Server) -> None:
    assert kill_at_random(server, "random", 32, seed=1) >= 32


POINTS = [
    Order(placement=0, point="make_directory", moment="after", count=1),
    Order(placement=1, point="create", moment="after", count=3),
    Order(placement=2, point="write_at", moment="during", count=7),
    Order(placement=3, point="write_at", moment="during", count=150),
    Order(placement=4, point="write_at", moment="after", count=200),
    Order(placement=0, point="sync", moment="before", count=4),
    Order(placement=1, point="sync", moment="after", count=14),
    Order(placement=2, point="sync_directory", moment="before", count=1),
    Order(placement=3, point="sync_directory", moment="after", count=3),
    Order(placement=4, point="rename", moment="before", count=0),
    Order(placement=0, point="rename", moment="after", count=0),
    Order(placement=1, point="rename", moment="before", count=1),
    Order(placement=2, point="rename", moment="after", count=3),  # that of the oldest
    Order(placement=3, point="remove_tree", moment="during", count=0),
    Order(placement=4, point="copy", moment="before", count=20),
    Order(placement=0, point="copy", moment="after", count=31),
    Order(placement=5, point="update", moment="during", count=30),
    Order(placement=3, point="update", moment="during", count=22),
    Order(placement=4, point="update", moment="after", count=41),
    Order(placement=7, point="update", moment="before", count=60),
]


@pytest.mark.parametrize("order", POINTS, ids=lambda o: f"{o.moment}-{o.point}-{o.count}")
def test_kills_at_named_points(server: Server, order: Order) -> None:
    work = server.work(f"named-{POINTS.index(order)}")
    assert server.run(work, order).killed, "it never came to that point"
    finish(server, work, (order.placement + 3) % len(ALL_PLACEMENTS))


def test_a_program_that_ends_has_its_last_checkpoint(server: Server) -> None:
    """Nobody waits for it: the interpreter does."""
    work = server.work("unwaited")
    assert not server.run(work, Order(placement=0, waits=False)).killed
    assert CheckpointFolder(work / "checkpoints").steps() == [STEPS - SAVE_EVERY, STEPS]
    finish(server, work, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_kills(server: Server) -> None:
    assert kill_at_random(server, "many", 500, seed=2) >= 500
