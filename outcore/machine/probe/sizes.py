"""How much the probe moves and computes, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ProbeSizes:
    """One set of sizes; FULL is what a plan should rest on, QUICK is for tests."""

    copy_piece_bytes: tuple[int, ...]  # the last one is the large copy that a plan counts with
    host_bytes: int  # read and copied
    update_params: int
    disk_bytes: int  # of the file
    disk_block_bytes: int  # of one request, as of a scratch file
    disk_memory_bytes: int  # that blocks are read into and written from
    disk_s: float  # for writing, and for reading; three times that for both at once, in parts
    device_bytes: int
    matmul_rows: int  # tokens
    matmul_shapes: tuple[tuple[int, int], ...]  # features in, features out
    attention_shape: tuple[int, int, int, int]  # sequences, heads, positions, head size
    seconds: float  # for each single figure


def full_sizes(device_type: str) -> ProbeSizes:
    """Return the sizes for a device: a CPU gets products that it can finish."""
    return FULL if device_type == "cuda" else FULL_ON_CPU


FULL = ProbeSizes(
    copy_piece_bytes=(1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 512 * MIB),
    host_bytes=1024 * MIB,
    update_params=64 * MIB,
    disk_bytes=16 * 1024 * MIB,
    disk_block_bytes=8 * MIB,
    disk_memory_bytes=512 * MIB,
    disk_s=4.0,
    device_bytes=1024 * MIB,
    matmul_rows=8192,  # one block of an 8B model: projections, up and down
    matmul_shapes=((4096, 4096), (4096, 14336), (14336, 4096)),
    attention_shape=(4, 32, 4096, 128),
    seconds=0.6,
)

FULL_ON_CPU = ProbeSizes(
    copy_piece_bytes=(1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    host_bytes=512 * MIB,
    update_params=32 * MIB,
    disk_bytes=16 * 1024 * MIB,
    disk_block_bytes=8 * MIB,
    disk_memory_bytes=512 * MIB,
    disk_s=4.0,
    device_bytes=256 * MIB,
    matmul_rows=512,  # the same of a 1B model, and fewer tokens
    matmul_shapes=((2048, 2048), (2048, 5632), (5632, 2048)),
    attention_shape=(1, 16, 1024, 64),
    seconds=0.6,
)

QUICK = ProbeSizes(
    copy_piece_bytes=(1 * MIB, 4 * MIB, 16 * MIB),
    host_bytes=16 * MIB,
    update_params=1 * MIB,
    disk_bytes=16 * MIB,
    disk_block_bytes=1 * MIB,
    disk_memory_bytes=32 * MIB,
    disk_s=0.2,
    device_bytes=16 * MIB,
    matmul_rows=128,
    matmul_shapes=((256, 256), (256, 704)),
    attention_shape=(1, 4, 128, 64),
    seconds=0.05,
)
