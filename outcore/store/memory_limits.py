"""How much host memory this process may still take: the machine's, and its cgroup's."""

from __future__ import annotations

from pathlib import Path


def available_host_bytes() -> int | None:
    """Return the bytes that can be taken without swapping or a kill; None where unknown."""
    limits = [limit for limit in (_mem_available(), _cgroup_headroom()) if limit is not None]
    return min(limits) if limits else None


def anonymous_bytes() -> int:
    """Return the resident memory of this process that is of no file (0 where /proc is absent).

    Pages of files the system can drop by itself.
    """
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _mem_available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_headroom(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the smallest (limit - use) over this process's cgroup and its ancestors."""
    headroom: list[int] = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # cgroup v2
            base, limit_name, use_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # cgroup v1
            base = root / "memory"
            limit_name, use_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, use = _number(group / limit_name), _number(group / use_name)
            # v1 writes "no limit" as a number near 2^63
            if limit is not None and use is not None and limit < 2**60:
                headroom.append(max(0, limit - use + _reclaimable(group)))
            if group == base:
                break
    return min(headroom) if headroom else None


def _reclaimable(group: Path) -> int:
    """Return the page cache that the kernel drops before it kills."""
    for line in _read(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
