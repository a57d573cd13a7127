"""Limits of host memory, from made-up /proc and cgroup files."""

from pathlib import Path

import pytest

from outcore.store import memory_limits
from outcore.store.memory_limits import _cgroup_headroom, _mem_available, anonymous_bytes

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def headroom(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "membership").write_text(membership)
    return _cgroup_headroom(tmp_path / "cgroup", tmp_path / "membership")


def test_mem_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable:  42 kB\n")
    assert _mem_available(tmp_path / "meminfo") == 42 * 1024
    assert _mem_available(tmp_path / "absent") is None


def test_cgroup_v2(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/a/b", memory__max=8 * GIB, memory__current=3 * GIB)
    assert headroom(tmp_path, "0::/a/b\n") == 5 * GIB


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/a/b", memory__max="max", memory__current=GIB)
    write(tmp_path / "cgroup/a", memory__max=4 * GIB, memory__current=3 * GIB)
    write(tmp_path / "cgroup", memory__max=100 * GIB, memory__current=50 * GIB)
    assert headroom(tmp_path, "0::/a/b\n") == GIB


def test_page_cache_can_be_reclaimed(tmp_path: Path) -> None:
    write(
        tmp_path / "cgroup/a",
        memory__max=4 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"anon 5\nfile {2 * GIB}\ninactive_file {GIB}",
    )
    assert headroom(tmp_path, "0::/a\n") == 2 * GIB


def test_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/a", memory__max="max", memory__current=GIB)
    assert headroom(tmp_path, "0::/a\n") is None
    assert headroom(tmp_path, "0::/elsewhere\n") is None
    assert headroom(tmp_path, "") is None


def test_cgroup_v1(tmp_path: Path) -> None:
    write(
        tmp_path / "cgroup/memory/job",
        memory__limit_in_bytes=6 * GIB,
        memory__usage_in_bytes=GIB,
    )
    write(
        tmp_path / "cgroup/memory",
        memory__limit_in_bytes=2**63 - 4096,
        memory__usage_in_bytes=50 * GIB,
    )
    membership = "12:cpu,cpuacct:/job\n5:memory:/job\n1:name=systemd:/job\n"
    assert headroom(tmp_path, membership) == 5 * GIB


def test_over_the_limit_is_nothing_left(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/a", memory__max=GIB, memory__current=2 * GIB)
    assert headroom(tmp_path, "0::/a\n") == 0


def test_a_container_sees_its_own_limit_at_the_root(tmp_path: Path) -> None:
    """In a container with a cgroup namespace the path is "/", and the files are at the root."""
    write(tmp_path / "cgroup", memory__max=2 * GIB, memory__current=GIB)
    assert headroom(tmp_path, "0::/\n") == GIB


@pytest.mark.parametrize("membership", ["", "0::\n", "3:cpu:/x\n", "0::/gone (deleted)\n"])
def test_odd_membership_files_are_no_error(tmp_path: Path, membership: str) -> None:
    write(tmp_path / "cgroup", memory__max=2 * GIB, memory__current=GIB)
    assert headroom(tmp_path, membership) in (None, GIB)


def test_paths_outside_of_what_is_mounted(tmp_path: Path) -> None:
    """A cgroup namespace can show "/../other": the root that is mounted here still counts."""
    write(tmp_path / "cgroup", memory__max=2 * GIB, memory__current=GIB)
    assert headroom(tmp_path, "0::/../other\n") == GIB


def test_the_smaller_of_machine_and_cgroup_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_mem_available", lambda: 7)
    monkeypatch.setattr(memory_limits, "_cgroup_headroom", lambda: 5)
    assert memory_limits.available_host_bytes() == 5
    monkeypatch.setattr(memory_limits, "_cgroup_headroom", lambda: None)
    assert memory_limits.available_host_bytes() == 7
    monkeypatch.setattr(memory_limits, "_mem_available", lambda: None)
    assert memory_limits.available_host_bytes() is None


def test_this_process_is_resident() -> None:
    assert anonymous_bytes() > 2**20
