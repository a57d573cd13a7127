"""The probe itself: one measurement after the other, or the report that was kept."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from outcore.errors import OutOfBudget, StoreError
from outcore.units import format_bytes

from .arithmetic import measure_device
from .cache import load_report, save_report
from .disk import (
    DiskMeasurement,
    default_scratch,
    free_disk_bytes,
    measure_disk,
    measuring_disk,
)
from .facts import find_facts, fingerprint_of, free_memory, probe_device
from .gpu_direct_storage import WORKS, try_gpu_direct_storage
from .host import measure_host
from .link import measure_link
from .report import DiskFigures, Facts, FreeMemory, ProbeReport
from .sizes import ProbeSizes, full_sizes

# The disk first: what is wrong with a folder that was asked for is said at once.
STEPS = ("disk", "link", "host memory", "device", "GPUDirect Storage")
_NOT_MEASURED = "the disk was not measured"
_STEADY = 1.25  # of what a disk gives: the most over the least
Progress = Callable[[str, int, int], None]  # name of the step that begins, its number, of how many


def probe(
    *,
    disk: str | Path | None = None,
    refresh: bool = False,
    refresh_disk: bool = False,
    sizes: ProbeSizes | None = None,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> ProbeReport:
    """Return what this machine can do: the report that was kept, or a new one (under a minute).

    ``disk`` is the folder whose disk is measured; without it, a kept report serves with whatever
    disk it has. Free memory is looked up anew each time. ``refresh`` measures everything again,
    ``refresh_disk`` the folder's disk alone.
    """
    if refresh_disk and disk is None:
        raise ValueError("refresh_disk measures the disk of a folder: name it with disk=")
    device = probe_device()
    sizes = sizes or full_sizes(device.type)
    folder = _folder(disk)
    facts = find_facts(device)
    fingerprint = fingerprint_of(facts, sizes)
    kept = None if refresh else load_report(fingerprint, cache_folder)
    if kept is None:
        report = _measure(device, sizes, facts, fingerprint, folder, progress or _silent)
        save_report(report, cache_folder)
        return report
    if folder is not None:
        is_other = kept.disk is None or kept.disk.path != str(folder.resolve())
        if is_other or refresh_disk:
            (progress or _silent)("disk", 1, 1)
            sizes = _that_fit(sizes, free_memory(device))
            kept = _with_disk(kept, measure_disk(folder, sizes, pin=device.type == "cuda"))
        if is_other:
            kept = replace(kept, gpu_direct_storage=try_gpu_direct_storage(device, folder))
        if is_other or refresh_disk:
            save_report(kept, cache_folder)
    return replace(kept, free=free_memory(device), disk=_with_free_bytes_now(kept.disk))


def found_gpu_direct_storage(
    device: torch.device, folder: Path, *, cache_folder: Path | None = None
) -> bool:
    """Whether the report that is kept says that the disk of ``folder`` reads into device memory."""
    if device.type != "cuda":
        return False
    fingerprint = fingerprint_of(find_facts(device), full_sizes(device.type))
    kept = load_report(fingerprint, cache_folder)
    if kept is None or kept.disk is None or kept.gpu_direct_storage != WORKS:
        return False
    try:
        return os.stat(kept.disk.path).st_dev == os.stat(folder).st_dev
    except OSError:
        return False


def _measure(
    device: torch.device,
    sizes: ProbeSizes,
    facts: Facts,
    fingerprint: str,
    folder: Path | None,
    progress: Progress,
) -> ProbeReport:
    start = time.perf_counter()
    notes: list[str] = []
    begin = iter(STEPS)

    def step() -> None:
        name = next(begin)
        progress(name, STEPS.index(name) + 1, len(STEPS))

    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context's own memory is taken before free is read
    free = free_memory(device)
    sizes = _that_fit(sizes, free)
    load = os.getloadavg()[0]  # before the probe's own
    if load > facts.num_cores / 2:
        notes.append(
            f"the machine was busy (load {load:.1f} on {facts.num_cores} cores): figures of the "
            "host are too low; --refresh when it is quiet"
        )
    if device.type != "cuda":
        notes.append(
            "no GPU: the CPU is the device, products are in fp32, the link is a copy in host memory"
        )
    step()
    try:
        with _DiskBetween(folder, sizes, notes, pin=device.type == "cuda") as disk:
            step()
            link = measure_link(device, sizes)
            disk.look()
            step()
            host = measure_host(sizes)
            disk.look()
            step()
            device_figures = measure_device(device, sizes, note=notes.append)
            disk.look()
    except torch.OutOfMemoryError as error:
        raise OutOfBudget(
            f"the probe ran out of device memory ({format_bytes(free.device_bytes)} were free); "
            "stop other programs on the device and run it again"
        ) from error
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if device.type == "cuda" and not link.is_pinned:
        notes.append("host memory could not be pinned (ulimit -l): all copies are pageable")
    step()
    gpu_direct_storage = try_gpu_direct_storage(device, folder or default_scratch())
    return ProbeReport(
        fingerprint=fingerprint,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - start, 3),
        facts=facts,
        free=free,
        link=link,
        host=host,
        disk=disk.figures,
        device=device_figures,
        gpu_direct_storage=gpu_direct_storage,
        notes=tuple(notes),
    )


class _DiskBetween:
    """The disk, looked at between other measurements: the folder that was asked for, or a default
    one, whose failure is only noted."""

    def __init__(
        self, folder: Path | None, sizes: ProbeSizes, notes: list[str], *, pin: bool
    ) -> None:
        self.figures: DiskFigures | None = None
        self._is_asked_for = folder is not None
        self._disk: DiskMeasurement | None = None
        self._notes = notes
        self._open = contextlib.ExitStack()
        with self._noted():
            self._disk = self._open.enter_context(
                measuring_disk(folder or default_scratch(), sizes, pin=pin)
            )

    def __enter__(self) -> _DiskBetween:
        return self

    def look(self) -> None:
        with self._noted():
            if self._disk is not None:
                self._disk.look()

    def __exit__(self, *raised: object) -> None:
        self._open.close()
        if self._disk is not None:
            self.figures = self._disk.figures()
            self._notes += notes_on(self.figures)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if self._is_asked_for:
                raise
            self._disk = None
            self._notes.append(f"{_NOT_MEASURED}: {error}")


def _with_disk(report: ProbeReport, disk: DiskFigures) -> ProbeReport:
    """Return the report with another disk, or the same as it is now; notes on the old one go."""
    old = () if report.disk is None else notes_on(report.disk)
    others = [n for n in report.notes if n not in old and not n.startswith(_NOT_MEASURED)]
    return replace(report, disk=disk, notes=(*others, *notes_on(disk)))


def notes_on(disk: DiskFigures) -> list[str]:
    """Return what to say of a disk beside its figures."""
    if disk.is_memory:
        return [f"{disk.path} is {disk.file_system}: memory, not a disk"]
    notes = []
    if not disk.is_direct:
        notes.append(f"{disk.path} ({disk.file_system}) has no O_DIRECT: buffered, and synced")
    least, most = min(disk.both_ways_seen_bytes_s), max(disk.both_ways_seen_bytes_s)
    if most > _STEADY * least:
        notes.append(
            f"the disk was not equally fast: {least / 1e9:.2f} to {most / 1e9:.2f} GB/s each way "
            "within a minute; steps with state on it will differ as much"
        )
    return notes


def _folder(disk: str | Path | None) -> Path | None:
    if disk is None:
        return None
    if not str(disk).strip():  # a path of nothing would be the current directory
        raise ValueError("an empty name is no directory; name one on the disk, such as '/mnt/nvme'")
    folder = Path(disk).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder} is no directory; name one on the disk that is to be measured")
    return folder


def _that_fit(sizes: ProbeSizes, free: FreeMemory) -> ProbeSizes:
    """Take at most about a fourth of what is free, so that a small machine is probed too."""
    host_part, device_part = free.host_bytes // 8, free.device_bytes // 8
    pieces = [size for size in sizes.copy_piece_bytes if size <= min(host_part, device_part)]
    return replace(
        sizes,
        copy_piece_bytes=tuple(pieces) or sizes.copy_piece_bytes[:1],
        host_bytes=min(sizes.host_bytes, host_part),
        update_params=min(sizes.update_params, host_part // 14),
        disk_memory_bytes=min(sizes.disk_memory_bytes, host_part),
        device_bytes=min(sizes.device_bytes, device_part),
    )


def _with_free_bytes_now(disk: DiskFigures | None) -> DiskFigures | None:
    if disk is None:
        return None
    try:
        return replace(disk, free_bytes=free_disk_bytes(Path(disk.path)))
    except OSError:  # the folder is gone
        return None


def _silent(name: str, number: int, total: int) -> None:
    pass
