"""The safetensors files of a Hugging Face directory: which tensor is where, read part by part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from outcore.engine.file_stream import FileStream
from outcore.engine.safetensors_header import num_elements, read_header
from outcore.errors import StoreError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}


class CheckpointFiles:
    """Maps tensor names to files inside one directory; never opens anything outside it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of = self._read_index()
        self._headers = {path: read_header(path) for path in sorted(set(self._file_of.values()))}
        self.num_elements = sum(map(num_elements, self._headers.values()))
        self._stream: FileStream | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # of the part that is read

    def holds_all(self, model: nn.Module) -> bool:
        """Whether every parameter is stored under its own name with its own shape."""
        for name, parameter in model.named_parameters():
            if name not in self._file_of or self._shape(name) != list(parameter.shape):
                return False
        return True

    def is_wider_than_bf16(self, name: str) -> bool:
        """Whether bf16 would round away some of what is stored under the name."""
        return self._dtype(name) != "BF16"

    def load_buffers(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name in self._file_of:
                buffer.copy_(self.tensor(name))

    def tensors(self, names: dict[str, str]) -> dict[str, Tensor]:
        """Return the tensors stored under ``names``' values; they last until the next call."""
        entries = {key: self._entry(name) for key, name in names.items()}
        sizes = {key: _aligned(end - start) for key, (_, _, start, end) in entries.items()}
        if sum(sizes.values()) > self._memory.numel():
            self._memory = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        found, place = {}, 0
        for key, (dtype, shape, start, end) in entries.items():
            flat = self._memory[place : place + end - start]
            self._stream_of(self._file_of[names[key]]).read(flat, start)
            found[key] = flat.view(dtype).view(shape)
            place += sizes[key]
        return found

    def close(self) -> None:
        """Give back the file and the memory that parts were read through."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], int, int]:
        """Return a tensor's type and shape, and where its bytes are in its file."""
        shape, dtype = self._header(name)  # by the library, which has checked the header
        path = self._file_of[name]
        start, end = self._headers[path][name]["data_offsets"]
        if end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise StoreError(f"{path}: tensor {name} has {end - start} bytes, not its shape's")
        with path.open("rb") as file:
            first = 8 + int.from_bytes(file.read(8), "little")
        return _DTYPES[dtype], shape, first + start, first + end

    def _stream_of(self, path: Path) -> FileStream:
        if self._stream is None or self._stream.path != path:
            if self._stream is not None:
                self._stream.close()
            self._stream = FileStream(path)
        return self._stream

    def tensor(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path}: cannot read tensor {name}: {error}") from error

    def _shape(self, name: str) -> list[int]:
        return self._header(name)[0]

    def _dtype(self, name: str) -> str:
        return self._header(name)[1]

    def _header(self, name: str) -> tuple[list[int], str]:
        """Return a tensor's shape and type; refuses types that are not plain numbers."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                entry = file.get_slice(name)
                shape, dtype = list(entry.get_shape()), str(entry.get_dtype())
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path}: cannot read tensor {name}: {error}") from error
        if dtype not in _DTYPES:
            raise StoreError(
                f"{path}: tensor {name} is {dtype}, which needs scales to mean anything; only "
                f"{', '.join(_DTYPES)} weights can be loaded. Dequantize the model first."
            )
        return shape, dtype

    def _read_index(self) -> dict[str, Path]:
        single = self._directory / SINGLE
        if single.is_file():
            return dict.fromkeys(self._keys(single), single)
        index = self._directory / INDEX
        if not index.is_file():
            raise StoreError(
                f"{self._directory} has neither {SINGLE} nor {INDEX}; pickled weights (.bin, .pt) "
                "are not read: convert them to safetensors first"
            )
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            names = {str(key): str(value) for key, value in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{index}: not a safetensors index: {error}") from error
        files = {value: self._inside(value) for value in set(names.values())}
        return {key: files[value] for key, value in names.items()}

    def _inside(self, file_name: str) -> Path:
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise StoreError(f"{self._directory / INDEX}: refuses the file name {file_name!r}")
        path = self._directory / file_name
        if not path.is_file():
            raise StoreError(f"{path} is named in {INDEX} but is missing")
        return path

    def _keys(self, path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path}: not a safetensors file: {error}") from error


def _aligned(num_bytes: int) -> int:
    """Where the next tensor may begin: any type can be viewed there."""
    return -(-num_bytes // 64) * 64
