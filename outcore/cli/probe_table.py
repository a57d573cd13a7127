"""The tables of `outcore probe`: what was measured here, and the machines of the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from outcore.fitting_table import FittingTable
from outcore.units import format_bytes

if TYPE_CHECKING:
    from outcore.machine import Machine
    from outcore.machine.probe import ProbeReport
    from outcore.machine.probe.report import DiskFigures

_SHARING = {
    "separate": "memories of their own",
    "coherent": "two memories, coherent: copies still pay",
    "unified": "one memory: nothing needs to be copied",
}


def report_table(report: ProbeReport) -> RenderableType:
    """Return all figures of a report, and the notes beneath them."""
    table = FittingTable(show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("figure", justify="right")
    table.add_column("how", style="dim")
    facts, link, host, device = report.facts, report.link, report.host, report.device
    on_cpu = facts.device_type == "cpu"

    table.add_row("device", escape(facts.device_name), _SHARING[facts.sharing])
    table.add_row("host", escape(facts.cpu_name), f"{facts.num_cores} cores")
    table.add_row("free on device", format_bytes(report.free.device_bytes), "now")
    table.add_row("free on host", format_bytes(report.free.host_bytes), "now, within the cgroup")
    table.add_section()
    kind = "host copy" if on_cpu else "pinned" if link.is_pinned else "pageable"
    for piece in link.pieces:
        rates = _pair(piece.to_device_bytes_s, piece.to_host_bytes_s)
        size = format_bytes(piece.piece_bytes).replace(".0 ", " ")
        table.add_row("to device / to host", f"{rates} GB/s", f"{kind}, pieces of {size}")
    table.add_row("both at once", f"{_gb_s(link.both_ways_bytes_s)} GB/s", "each direction")
    rates = _pair(link.pageable_to_device_bytes_s, link.pageable_to_host_bytes_s)
    table.add_row("pageable", f"{rates} GB/s", "to device / to host, large")
    table.add_section()
    threads = f"{host.num_threads} threads"
    table.add_row("host read", f"{_gb_s(host.read_bytes_s)} GB/s", threads)
    table.add_row("host copy", f"{_gb_s(host.copy_bytes_s)} GB/s", "read and write counted")
    update = f"{_gb_s(host.update_bytes_s)} GB/s"
    table.add_row("host AdamW", update, f"{host.update_kernel} kernel, 26 bytes a parameter")
    table.add_section()
    _add_disk(table, report.disk)
    table.add_row("GPUDirect Storage", "", escape(report.gpu_direct_storage))
    table.add_section()
    shape = f"{device.dtype}, shapes of a transformer block"
    table.add_row("products", _flops_s(device.matmul_flops_s), shape)
    fp8 = device.fp8_matmul_flops_s
    table.add_row("products in fp8", "–" if fp8 is None else _flops_s(fp8), "the same shapes")
    forward = _flops_s(device.attention_forward_flops_s)
    table.add_row("attention forward", forward, "causal, counted at half")
    table.add_row("attention backward", _flops_s(device.attention_backward_flops_s), "the same")
    memory = f"{_gb_s(device.memory_bytes_s)} GB/s"
    table.add_row("device memory", memory, "copy, read and write counted")

    notes = [f"[yellow]{escape(note)}[/]" for note in report.notes]
    kept = f"measured {report.when} in {report.seconds:.0f} s; --refresh measures again"
    return Group("", table, "", *notes, f"[dim]{kept}[/]")


def catalogue_table(machines: list[Machine]) -> RenderableType:
    """Return a row for each machine."""
    table = FittingTable(goes_first=("fp8 TFLOPS", "disk GB/s", "AdamW GB/s", "$/h"))
    table.add_column("name", no_wrap=True)
    for header in ("device GiB", "host GiB", "link GB/s", "AdamW GB/s", "disk GB/s"):
        table.add_column(header, justify="right")
    for header in ("bf16 TFLOPS", "fp8 TFLOPS", "$/h"):
        table.add_column(header, justify="right")
    for machine in machines:
        fp8 = machine.fp8_matmul_flops_s
        price = machine.price_per_hour
        table.add_row(
            machine.name,
            f"{machine.device_memory_bytes / 2**30:.0f}",
            f"{machine.host_memory_bytes / 2**30:.0f}",
            "shared" if machine.is_unified else _gb_s(machine.to_device_bytes_s),
            _gb_s(machine.host_update_bytes_s),
            _pair(machine.disk_read_bytes_s, machine.disk_write_bytes_s).replace(" ", ""),
            _tera(machine.matmul_flops_s),
            "–" if fp8 is None else _tera(fp8),
            "–" if price is None else f"{price:.2f}",
        )
    legend = (
        "[dim]What a program gets, sustained; disk: read / write; shared: one memory, no copies. "
        "Figures of h200-pcie5 are measured, most others estimated from data sheets: --json has "
        "the source of each.[/]"
    )
    return Group("", table, "", legend)


def _add_disk(table: Table, disk: DiskFigures | None) -> None:
    if disk is None:
        table.add_row("disk", "–", "not measured")
        return
    how = "O_DIRECT" if disk.is_direct else "memory" if disk.is_memory else "buffered"
    table.add_row("disk read", f"{_gb_s(disk.read_bytes_s)} GB/s", f"{how}, {disk.file_system}")
    table.add_row("disk write", f"{_gb_s(disk.write_bytes_s)} GB/s", escape(disk.path))
    table.add_row(
        "disk, both at once",
        f"{_gb_s(disk.both_ways_bytes_s)} GB/s",
        "each way, while as much is read as written",
    )
    table.add_row("free on disk", format_bytes(disk.free_bytes), "now")


def _gb_s(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:,.1f}"


def _pair(first_bytes_s: float, second_bytes_s: float) -> str:
    return f"{_gb_s(first_bytes_s)} / {_gb_s(second_bytes_s)}"


def _tera(flops_s: float) -> str:
    return f"{flops_s / 1e12:,.0f}" if flops_s >= 1e13 else f"{flops_s / 1e12:,.2f}"


def _flops_s(flops_s: float) -> str:
    return f"{_tera(flops_s)} TFLOPS"
