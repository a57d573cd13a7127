"""Flat tensors whose home is a scratch file, moved in pieces through staging buffers.

Training reads and writes whole pieces past the page cache, with checksums; where the disk can, it
reads weights straight into device memory (GPUDirect Storage). Everybody else (saving,
``state_dict``) sees the same bytes through ``mapped``, a view of the file that costs memory only
for what is looked at; it is true when nothing is in flight, which ``check`` verifies, and after
writing to it ``rewrite`` makes the pieces true again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outcore.kernels.checksum import PAGE_BYTES
from outcore.kernels.checksum_torch import checksum_on_device
from outcore.store.ledger import Ledger
from outcore.store.record_layout import page_aligned_bytes
from outcore.store.scratch_file import Arrived, ScratchFile, ScratchOptions
from outcore.stream.disk_lanes import NUM_LANES, DiskLanes, wait_over
from outcore.stream.lanes import Fence
from outcore.stream.staging import Guest, StagingPool

NUM_AHEAD = NUM_LANES + 1  # pieces of weights that are read ahead of their copy to the device
PIECE_ALIGN = 1 << 19  # elements: whole pages also for one byte to each 128 of them


def piece_numel(numel: int, max_numel: int) -> int:
    """Return how many of ``numel`` elements travel together, in about equal pieces."""
    size = -(-numel // max(1, -(-numel // max_numel)))
    return -(-size // PIECE_ALIGN) * PIECE_ALIGN


@dataclass(frozen=True, kw_only=True)
class DiskShape:
    """A tensor to make room for: ``piece_numel`` elements travel together."""

    numel: int
    dtype: torch.dtype
    piece_numel: int

    @property
    def num_pieces(self) -> int:
        return -(-self.numel // self.piece_numel)

    @property
    def piece_bytes(self) -> int:
        """What a piece takes in staging, at most."""
        return page_aligned_bytes(min(self.numel, self.piece_numel) * self.dtype.itemsize)

    def bounds(self, piece: int) -> tuple[int, int]:
        start = piece * self.piece_numel
        return start, min(start + self.piece_numel, self.numel)


class Arrival:
    """A piece on its way from disk to the device memory ``target``."""

    def __init__(
        self, scratch: ScratchFile, target: Tensor, fence: Fence, arrived: list[Arrived]
    ) -> None:
        self._scratch = scratch
        self._target = target.view(torch.uint8)
        self._arrived = arrived
        self.fence = fence

    def complete(self) -> None:
        """Wait for it, and verify it on the calling thread's stream."""
        self.fence.block()
        for arrived in self._arrived:
            there = self._target[: arrived.num_bytes]
            self._scratch.verify(arrived, checksum_on_device(there, seed=arrived.seed))
            if arrived.rest is not None:
                self._target[arrived.num_bytes :].copy_(arrived.rest)


class DiskTensor:
    """One flat tensor in a file."""

    def __init__(self, file: DiskTensors, shape: DiskShape, first: int, mapped: Tensor) -> None:
        self.shape = shape
        self.mapped = mapped
        self._file = file
        self._first = first

    def fetch(self, piece: int) -> tuple[Tensor, Fence]:
        """Start to read a piece; return where it will be, and after what."""
        return fetch_together([self], piece)[0]

    @property
    def reads_to_device(self) -> bool:
        return self._file.reads_to_device

    def fetch_to_device(self, piece: int, target: Tensor) -> Arrival:
        """Start to read a piece into device memory that nothing uses."""
        return self._file.fetch_to_device(self._first + piece, target)

    def release(self, values: Tensor, after: Sequence[Fence]) -> None:
        """Give back what ``fetch`` returned, without writing it."""
        self._file.release(values, after)

    def write(self, values: Tensor) -> None:
        """Replace the whole tensor; blocks. ``values`` may be anywhere on the host."""
        stores = []
        for piece in range(self.shape.num_pieces):
            start, end = self.shape.bounds(piece)
            buffer, free = self._file.blank(self._first + piece)
            try:
                free.block()
                self._typed(buffer, piece).copy_(values[start:end])
            except BaseException:  # Ctrl-C, say: the buffer goes back
                self._file.release(buffer, [])
                raise
            stores.append(self._file.store([(self._first + piece, buffer)], []))
        for fence in stores:
            fence.block()

    def rewrite(self) -> None:
        """Take over what was written to ``mapped``; blocks."""
        self._file.check_uncut()
        self.write(self.mapped)

    def check(self) -> None:
        """Raise StoreError unless ``mapped`` shows what was last written; reads all of it."""
        self._file.check(range(self._first, self._first + self.shape.num_pieces))

    def _typed(self, buffer: Tensor, piece: int) -> Tensor:
        start, end = self.shape.bounds(piece)
        return buffer.view(self.shape.dtype)[: end - start]


class DiskTensors:
    """The tensors of one scratch file, with its lanes and staging buffers."""

    def __init__(
        self,
        directory: Path,
        name: str,
        shapes: Sequence[DiskShape],
        *,
        num_buffers: int,
        buffer_bytes: int | None = None,
        disk_ledger: Ledger,
        host_ledger: Ledger,
        pin: bool,
        to_device: bool = False,
    ) -> None:
        """Make a file of zeros.

        ``buffer_bytes``: of the pieces that travel together, at most; None if each travels alone.
        ``to_device``: whether the disk reads straight into device memory where it can.
        """
        for shape in shapes:
            piece_bytes = shape.piece_numel * shape.dtype.itemsize
            assert shape.num_pieces == 1 or piece_bytes % PAGE_BYTES == 0, shape
        sizes = [
            (shape.bounds(piece)[1] - shape.bounds(piece)[0]) * shape.dtype.itemsize
            for shape in shapes
            for piece in range(shape.num_pieces)
        ]
        self._scratch = ScratchFile(
            directory,
            name,
            sizes,
            ledger=disk_ledger,
            options=ScratchOptions(to_device=to_device),
        )
        layout = self._scratch.layout
        try:
            staging = StagingPool(
                num_buffers, buffer_bytes or layout.largest_bytes, ledger=host_ledger, pin=pin
            )
            bytes_ = torch.frombuffer(self._scratch.map(), dtype=torch.uint8)
        except BaseException:
            self._scratch.close()
            raise
        self._lanes = DiskLanes(self._scratch, staging)
        self.is_closed = False
        self._never_written = set(range(len(layout.records)))
        self._staged: dict[int, Tensor] = {}  # whole buffers that are lent, by address
        self.tensors = []
        first = 0
        for shape in shapes:
            start = layout.records[first].offset
            mapped = bytes_[start : start + shape.numel * shape.dtype.itemsize].view(shape.dtype)
            self.tensors.append(DiskTensor(self, shape, first, mapped))
            first += shape.num_pieces

    def fetch(self, records: Sequence[int]) -> list[tuple[Tensor, Fence]]:
        # The file system gives zeros for what it allocated.
        zeros = self._never_written.intersection(records)
        buffers, fence = self._lanes.fetch_all(records, zeros)
        self._staged.update((buffer.data_ptr(), buffer) for buffer in buffers)
        return [(buffer, fence) for buffer in buffers]

    def set_aside(self, values: Sequence[tuple[int, Tensor]], guest: Guest) -> list[Tensor]:
        """Copy fetched values to memory that is lent, and give their buffers back."""
        buffers = self._lanes.borrow([record for record, _ in values], guest)
        self._staged.update((buffer.data_ptr(), buffer) for buffer in buffers)
        for (_, value), buffer in zip(values, buffers, strict=True):
            source = self._staged.pop(value.data_ptr())
            buffer.copy_(source)
            self._lanes.release(source, [])
        return buffers

    @property
    def reads_to_device(self) -> bool:
        return self._scratch.reads_to_device

    def fetch_to_device(self, record: int, target: Tensor) -> Arrival:
        if record in self._never_written:
            target.zero_()
            done = Fence()
            done.mark_issued()
            return Arrival(self._scratch, target, done, [])
        return Arrival(self._scratch, target, *self._lanes.fetch_to_device(record, target))

    def blank(self, record: int) -> tuple[Tensor, Fence]:
        buffer, fence = self._lanes.blank(record)
        self._staged[buffer.data_ptr()] = buffer
        return buffer, fence

    def store(
        self,
        values: Sequence[tuple[int, Tensor]],
        after: Sequence[Fence],
        fence: Fence | None = None,
    ) -> Fence:
        self._never_written.difference_update(record for record, _ in values)
        sources = [(record, self._staged.pop(value.data_ptr())) for record, value in values]
        return self._lanes.store_all(sources, after, fence)

    def release(self, values: Tensor, after: Sequence[Fence]) -> None:
        self._lanes.release(self._staged.pop(values.data_ptr()), after)

    def check(self, records: Sequence[int]) -> None:
        written = [record for record in records if record not in self._never_written]
        if written and not self.is_closed:
            self._scratch.check(written)

    def check_uncut(self) -> None:
        """Raise StoreError if the file was cut; costs next to nothing."""
        if not self.is_closed:
            self._scratch.check_uncut()

    def close(self) -> None:
        """End the lanes and delete the file; ``mapped`` stays readable."""
        self.is_closed = True
        self._lanes.close()
        self._scratch.close()
        self.tensors.clear()  # they refer to this, and so to the staging buffers


def files_of(tensors: Sequence[DiskTensor]) -> list[list[DiskTensor]]:
    """Return the tensors of each file."""
    files: dict[DiskTensors, list[DiskTensor]] = {}
    for tensor in tensors:
        files.setdefault(tensor._file, []).append(tensor)
    return list(files.values())


def staged_bytes(tensors: Sequence[DiskTensor]) -> int:
    """Return what a piece of each of one file's tensors takes on its way, at most."""
    return sum(tensor.shape.piece_bytes for tensor in tensors)


def fetch_together(tensors: Sequence[DiskTensor], piece: int) -> list[tuple[Tensor, Fence]]:
    """``fetch`` a piece of each of one file's tensors, as one piece of work."""
    file = _file_of(tensors)
    fetched = file.fetch([tensor._first + piece for tensor in tensors])
    return [
        (tensor._typed(buffer, piece), fence)
        for tensor, (buffer, fence) in zip(tensors, fetched, strict=True)
    ]


def set_aside(
    sources: Sequence[tuple[DiskTensor, Tensor]], piece: int, guest: Guest
) -> list[Tensor]:
    """Copy what was fetched of one file's tensors to ``guest``, to be stored from there later.

    Return where they are now; what they were in is given back.
    """
    file = _file_of([tensor for tensor, _ in sources])
    values = [(tensor._first + piece, value) for tensor, value in sources]
    buffers = file.set_aside(values, guest)
    return [
        tensor._typed(buffer, piece) for (tensor, _), buffer in zip(sources, buffers, strict=True)
    ]


def store_together(
    sources: Sequence[tuple[DiskTensor, Tensor]],
    piece: int,
    after: Sequence[Fence],
    fence: Fence | None = None,
) -> Fence:
    """Write back what was fetched of one file's tensors, after the fences, as one piece of work.

    ``fence``: one that waits for it already.
    """
    file = _file_of([tensor for tensor, _ in sources])
    return file.store([(tensor._first + piece, values) for tensor, values in sources], after, fence)


def _file_of(tensors: Sequence[DiskTensor]) -> DiskTensors:
    file = tensors[0]._file
    assert all(tensor._file is file for tensor in tensors)
    return file


def copy_from_disk(source: DiskTensor, target: Tensor, device: torch.device) -> None:
    """Copy a whole tensor from disk to ``target``, on the calling thread's stream there."""
    if source.reads_to_device:
        _copy_past_host(source, target, device)
    else:
        _copy_through_host(source, target, device)


def _copy_past_host(source: DiskTensor, target: Tensor, device: torch.device) -> None:
    # The disk knows nothing of streams: whoever used the memory last must be done with it.
    Fence.after_compute(device).block()
    arrivals = [
        source.fetch_to_device(piece, target[slice(*source.shape.bounds(piece))])
        for piece in range(source.shape.num_pieces)
    ]
    try:
        for arrival in arrivals:
            arrival.complete()
    finally:
        wait_over([arrival.fence for arrival in arrivals])  # or the next owner's bytes change


def _copy_through_host(source: DiskTensor, target: Tensor, device: torch.device) -> None:
    """Reads run ahead as far as there are buffers."""
    pieces = range(source.shape.num_pieces)
    ahead: deque[tuple[int, Tensor, Fence]] = deque()
    upcoming = iter(pieces)
    try:
        for piece in pieces:
            while len(ahead) < NUM_AHEAD and (following := next(upcoming, None)) is not None:
                ahead.append((following, *source.fetch(following)))
            _, values, here = ahead[0]
            here.block()
            start, end = source.shape.bounds(piece)
            target[start:end].copy_(values, non_blocking=True)
            ahead.popleft()
            source.release(values, [Fence.after_compute(device)])
    finally:
        for _, values, _ in ahead:
            source.release(values, [])
