"""The safetensors files of a Hugging Face directory: which tensor is where, read part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outcore.errors import StoreError
from outcore.limited_json import no_name_twice, read_limited
from outcore.weights.file_ranges import FileRange, read_ranges
from outcore.weights.safetensors_header import Header, num_elements, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PIECE_BYTES = 1 << 20
_MOST_NAME_BYTES = 255  # file systems take no more
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """A stored tensor, and who takes its values.

    ``put`` gets runs of its elements, flat and of the type that is stored, with the element that
    each begins with; in no order, from several threads at once. A run lasts until ``put`` returns,
    and begins and ends at multiples of ``run_numel``. Where ``memory`` is given, the host's from
    its first value on, values of its own type may be copied there instead.
    """

    name: str
    put: Callable[[Tensor, int], None]
    run_numel: int
    owner: Hashable
    memory: Tensor | None = None


class CheckpointFiles:
    """Maps tensor names to files inside one directory; never opens anything outside it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        single = directory / SINGLE
        if single.is_file():
            self._headers = {single: _header(single)}
            self._file_of = dict.fromkeys(self._headers[single].entries, single)
        else:
            self._file_of = self._read_index()
            self._headers = {path: _header(path) for path in sorted(set(self._file_of.values()))}
        self.num_elements = sum(num_elements(header.entries) for header in self._headers.values())

    def holds_all(self, model: nn.Module) -> bool:
        """Whether every parameter is stored under its own name with its own shape."""
        for name, parameter in model.named_parameters():
            if name not in self._file_of or self._shape(name) != list(parameter.shape):
                return False
        return True

    def holds(self, name: str) -> bool:
        return name in self._file_of

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of every stored tensor, of any type."""
        entries = {
            name: self._headers[path].entries.get(name) for name, path in self._file_of.items()
        }
        return {name: entry["shape"] for name, entry in entries.items() if entry is not None}

    def check_types(self, names: Iterable[str]) -> None:
        """Refuse tensors that are not plain numbers."""
        for name in names:
            self._shape_and_type(name)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two stored tensors have the same type, shape and bytes."""
        if self._shape_and_type(name) != self._shape_and_type(other):
            return False
        try:
            return all(map(bytes.__eq__, self._pieces(name), self._pieces(other)))
        except OSError as error:
            raise StoreError(
                f"{self._directory}: {name} and {other} cannot be read: {error.strerror}",
                path=self._directory,
            ) from error

    def _pieces(self, name: str) -> Iterator[bytes]:
        path = self._file_of[name]
        header = self._headers[path]
        start, end = header.entries[name]["data_offsets"]
        with path.open("rb") as file:
            file.seek(header.data_start + start)
            for position in range(start, end, _PIECE_BYTES):
                yield file.read(min(_PIECE_BYTES, end - position))

    def unlike(self, model: nn.Module) -> str | None:
        """Return which parameter is stored with another shape than the model's, in words."""
        for name, parameter in model.named_parameters():
            path = self._file_of.get(name)
            entry = None if path is None else self._headers[path].entries.get(name)
            if entry is not None and entry["shape"] != list(parameter.shape):
                return (
                    f"{name} has the shape {entry['shape']} in its files and "
                    f"{list(parameter.shape)} by the config"
                )
        return None

    def is_wider_than_bf16(self, name: str) -> bool:
        """Whether bf16 would round away some of what is stored under the name."""
        return self._shape_and_type(name)[1] != "BF16"

    def load_buffers(self, model: nn.Module, stored_as: Mapping[str, str] | None = None) -> None:
        """Read the buffers that are part of a checkpoint, of other names by ``stored_as``.

        Others (rotary frequencies) follow from the config, and old files hold them, rounded.
        """
        for prefix, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                name = f"{prefix}.{leaf}" if prefix else leaf
                is_stored = leaf not in module._non_persistent_buffers_set
                name = (stored_as or {}).get(name, name)
                if buffer is None or not is_stored or name not in self._file_of:
                    continue
                values = self.tensor(name)
                if values.shape != buffer.shape:
                    raise StoreError(
                        f"{self._file_of[name]}: {name} has shape {list(values.shape)}, the "
                        f"model's has {list(buffer.shape)}",
                        path=self._file_of[name],
                    )
                buffer.copy_(values)

    def read(self, wanted: Sequence[Wanted], *, pin: bool) -> Iterator[Hashable]:
        """Read tensors, in the order of the files; yield each owner when it has all of its own.

        pin: whether values go on to a GPU.
        """
        return read_ranges([self._range(one) for one in wanted], pin=pin)

    def _range(self, wanted: Wanted) -> FileRange:
        path = self._file_of[wanted.name]
        shape, stored_as = self._shape_and_type(wanted.name)
        dtype = _DTYPES[stored_as]
        header = self._headers[path]
        start, end = header.entries[wanted.name]["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise StoreError(
                f"{path}: tensor {wanted.name} has {end - start} bytes, not its shape's", path=path
            )

        def put(run: Tensor, first_byte: int) -> None:
            if run.storage_offset() % dtype.itemsize:
                run = run.clone()  # to where the type can be viewed
            wanted.put(run.view(dtype), first_byte // dtype.itemsize)

        memory = wanted.memory
        if memory is not None:
            same = memory.dtype == dtype
            memory = memory[: math.prod(shape)].view(torch.uint8) if same else None
        return FileRange(
            path=path,
            start=header.data_start + start,
            end=header.data_start + end,
            put=put,
            memory=memory,
            granule_bytes=wanted.run_numel * dtype.itemsize,
            owner=wanted.owner,
        )

    def tensor(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path}: cannot read tensor {name}: {error}") from error

    def _shape(self, name: str) -> list[int]:
        return self._shape_and_type(name)[0]

    def _shape_and_type(self, name: str) -> tuple[list[int], str]:
        """Return a tensor's shape and type; refuses types that are not plain numbers."""
        path = self._file_of[name]
        entry: Any = self._headers[path].entries.get(name)
        if entry is None:
            raise StoreError(f"{path}: has no tensor {name}, though {INDEX} says so", path=path)
        if entry["dtype"] not in _DTYPES:
            raise StoreError(
                f"{path}: tensor {name} is {entry['dtype']}, which needs scales to mean anything; "
                f"only {', '.join(_DTYPES)} weights can be loaded. Dequantize the model first."
            )
        return entry["shape"], entry["dtype"]

    def _read_index(self) -> dict[str, Path]:
        index = self._directory / INDEX
        if not index.is_file():
            for path in (self._directory / SINGLE, index):
                if path.is_symlink() or path.exists():
                    raise StoreError(f"{path} {_what_else(path)}", path=path)
            raise StoreError(
                f"{self._directory} has neither {SINGLE} nor {INDEX}; pickled weights (.bin, .pt) "
                "are not read: convert them to safetensors first"
            )
        try:
            data = read_limited(index, pairs_hook=no_name_twice)
        except OSError as error:
            raise StoreError(f"{index} cannot be read: {error.strerror}", path=index) from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{index}: not a safetensors index: {error}", path=index) from error
        weight_map = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise StoreError(
                f"{index}: not a safetensors index: it has no table weight_map, which names the "
                "file of each tensor",
                path=index,
            )
        files = {}
        for name, value in weight_map.items():
            if not isinstance(value, str):
                raise StoreError(f"{index}: {name!r} is in no file that has a name", path=index)
            if value not in files:
                files[value] = self._inside(value)
        return {name: files[value] for name, value in weight_map.items()}

    def _inside(self, file_name: str) -> Path:
        is_name = (
            file_name.isprintable()  # half of a surrogate pair cannot even be encoded
            and Path(file_name).name == file_name
            and len(file_name.encode()) <= _MOST_NAME_BYTES
        )
        if not is_name or not file_name.endswith(".safetensors"):
            short = file_name if len(file_name) <= 200 else f"{file_name[:200]}..."
            raise StoreError(f"{self._directory / INDEX}: refuses the file name {short!r}")
        path = self._directory / file_name
        if not path.is_file():
            raise StoreError(f"{path} is named in {INDEX} but {_what_else(path)}", path=path)
        return path


def _what_else(path: Path) -> str:
    """Return what is there in the place of a file."""
    if path.exists():
        return "is no file"
    if path.is_symlink():
        return f"is a link to {path.readlink()}, which is not there: was the model copied whole?"
    return "is missing"


def _header(path: Path) -> Header:
    """Read a file's header, and have the library check its offsets, sizes and types."""
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: not a safetensors file: {error}", path=path) from error
    if names != set(header.entries):
        raise StoreError(f"{path}: not a safetensors file: its header changed", path=path)
    return header
