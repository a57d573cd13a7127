"""The probe on a GPU."""

from pathlib import Path

import pytest

from outcore.machine.probe import QUICK, probe
from outcore.machine.probe.gpu_direct_storage import WORKS

pytestmark = pytest.mark.gpu


def test_a_quick_probe(tmp_path: Path) -> None:
    report = probe(sizes=QUICK, disk=tmp_path, cache_folder=tmp_path / "cache")
    assert report.facts.device_type == "cuda"
    assert report.facts.driver
    assert report.link.is_pinned
    assert report.machine.device_memory_bytes <= report.facts.device_total_bytes
    assert report.gpu_direct_storage
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.slow
def test_a_full_probe_takes_less_than_a_minute_and_knows_the_order_of_things(
    tmp_path: Path,
) -> None:
    report = probe(disk=tmp_path, cache_folder=tmp_path / "cache")
    assert report.seconds < 60
    machine = report.machine
    assert machine.has_gpu_direct_storage == (report.gpu_direct_storage == WORKS)
    assert machine.pageable_bytes_s < machine.to_device_bytes_s < machine.device_memory_bytes_s
    assert machine.both_ways_bytes_s <= 1.1 * machine.to_device_bytes_s
    assert machine.attention_backward_flops_s < machine.matmul_flops_s
    if machine.fp8_matmul_flops_s is not None:
        assert machine.fp8_matmul_flops_s > machine.matmul_flops_s
