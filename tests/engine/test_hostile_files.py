"""A model directory from outside is hostile until checked: refused, and nothing of it runs."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.errors import OutcoreError, StoreError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_GROWTH_BYTES = 200 << 20
CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=31,
    tie_word_embeddings=False,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    return path


# --- headers of safetensors files ---------------------------------------------------------------


def parts(directory: Path) -> tuple[dict[str, Any], bytes]:
    data = (directory / FILE).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put(
    directory: Path, header: bytes | dict[str, Any], body: bytes, length: int | None = None
) -> None:
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    size = struct.pack("<Q", len(header) if length is None else length)
    (directory / FILE).write_bytes(size + header + body)


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        header, body = parts(directory)
        changed = change(header)
        put(directory, header if changed is None else changed, body)

    return harm


def first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header["lm_head.weight"]
    return entry


def set_first(**values: Any) -> Callable[[Path], None]:
    return with_header(lambda header: first(header).update(values))


def drop_first(key: str) -> Callable[[Path], None]:
    return with_header(lambda header: first(header).pop(key) and None)


def overlap(header: dict[str, Any]) -> None:
    names = sorted(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )
    start, end = header[names[1]]["data_offsets"]
    header[names[1]]["data_offsets"] = [start - 4, end - 4]


def hole(directory: Path) -> None:
    header, body = parts(directory)
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    put(directory, header, bytes(8) + body)


def duplicate_keys(directory: Path) -> None:
    header, body = parts(directory)
    text = json.dumps(header)
    name = json.dumps({"lm_head.weight": first(header)})[1:-1]
    put(directory, (text[:-1] + ", " + name + "}").encode(), body)


def header_length(length: int) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        header, body = parts(directory)
        put(directory, header, body, length)

    return harm


def raw_header(text: bytes) -> Callable[[Path], None]:
    return lambda directory: put(directory, text, parts(directory)[1])


WIDE = 60_000_000  # bytes: of values, not of text, in memory some gigabytes


def wide(start: bytes, unit: bytes, end: bytes, num_bytes: int = WIDE) -> bytes:
    return start + unit * (num_bytes // len(unit)) + end


def many_names(directory: Path) -> None:
    names = [b'"%d":0' % number for number in range(400_000)]
    put(directory, b"{" + b",".join([*names, names[-1]]) + b"}", parts(directory)[1])


def cut(directory: Path) -> None:
    data = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(data[:-7])


def longer(directory: Path) -> None:
    with (directory / FILE).open("ab") as file:
        file.write(bytes(64))


HEADERS: dict[str, Callable[[Path], None]] = {
    "length 2^64-1": header_length(2**64 - 1),
    "length 2^63": header_length(2**63),
    "length beyond the file": header_length(10**9),
    "length 0": header_length(0),
    "length 1": header_length(1),
    "no JSON": raw_header(b"not json at all   "),
    "JSON cut": raw_header(b'{"a": {"dtype": "F32"'),
    "a list": raw_header(b"[]" + b" " * 30),
    "a number": raw_header(b"12345678"),
    "not UTF-8": raw_header(b'{"\xff\xfe": 1}     '),
    "deep": raw_header(b"[" * 200_000 + b"]" * 200_000),
    "deep in metadata": raw_header(
        b'{"__metadata__": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001
    ),
    "wide": lambda directory: put(directory, wide(b'{"a": [', b"[],", b"[]]}"), b""),
    "wide, but half as long": lambda directory: put(
        directory, wide(b'{"a": [', b"{},", b"[]]}", WIDE // 2), b""
    ),
    "a long text": lambda directory: put(
        directory, wide('{"__metadata__": {"a": "\U0001f600'.encode(), b"x", b'"}}'), b""
    ),
    "duplicate keys": duplicate_keys,
    "duplicate among many": many_names,
    "overlap": with_header(overlap),
    "hole": hole,
    "beyond the file": set_first(data_offsets=[0, 2**40]),
    "end before begin": set_first(data_offsets=[100, 0]),
    "negative offsets": set_first(data_offsets=[-8, 0]),
    "three offsets": set_first(data_offsets=[0, 4, 8]),
    "offsets of text": set_first(data_offsets=["0", "4"]),
    "shape of another size": set_first(shape=[31, 17]),
    "shape that overflows": set_first(shape=[2**32, 2**32, 2**32]),
    "negative shape": set_first(shape=[-31, -16]),
    "fractional shape": set_first(shape=[31.5, 16]),
    "unknown type": set_first(dtype="F7"),
    "type is a number": set_first(dtype=7),
    "no type": drop_first("dtype"),
    "no shape": drop_first("shape"),
    "no offsets": drop_first("data_offsets"),
    "entry is a list": with_header(lambda header: header.update({"lm_head.weight": []})),
    "metadata of numbers": with_header(lambda header: header.update(__metadata__={"a": {"b": 1}})),
    "file cut": cut,
    "file longer": longer,
    "file empty": lambda directory: (directory / FILE).write_bytes(b"") and None,
    "tensor missing": with_header(lambda header: header.pop("lm_head.weight") and None),
}


# --- indexes ------------------------------------------------------------------------------------


def with_index(text: str) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        outside = directory.parent / "outside.safetensors"
        (directory / FILE).rename(outside)
        (directory / INDEX).write_text(text.replace("@", str(directory.parent)))

    return harm


def weight_map(file_name: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": file_name}})


def dangling(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / INDEX).write_text(weight_map("a.safetensors"))
    (directory / "a.safetensors").symlink_to("../../blobs/0")


INDEXES: dict[str, Callable[[Path], None]] = {
    "index: parent folder": with_index(weight_map("../outside.safetensors")),
    "index: absolute": with_index(weight_map("@/outside.safetensors")),
    "index: sub folder and back": with_index(weight_map("a/../../outside.safetensors")),
    "index: sub folder": with_index(weight_map("a/b.safetensors")),
    "index: backslashes": with_index(weight_map("..\\outside.safetensors")),
    "index: NUL": with_index(weight_map("model\x00.safetensors")),
    "index: half a surrogate pair": with_index(weight_map("model\ud800.safetensors")),
    "index: a line break": with_index(weight_map("model\n.safetensors")),
    "index: empty name": with_index(weight_map("")),
    "index: a number": with_index(weight_map(5)),
    "index: a pickle": with_index(weight_map("pytorch_model.bin")),
    "index: missing file": with_index(weight_map("model-00001-of-00002.safetensors")),
    "index: no JSON": with_index("{"),
    "index: a list": with_index("[]"),
    "index: no map": with_index("{}"),
    "index: map is a list": with_index('{"weight_map": ["a"]}'),
    "index: deep": with_index("[" * 100_000),
    "index: wide": with_index(wide(b'{"weight_map": {"a": [', b"[],", b"[]]}}").decode()),
    "index: a long name": with_index(weight_map("a" * 5_000 + ".safetensors")),
    "index: duplicate keys": with_index(
        '{"weight_map": {"lm_head.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}'
    ),
    "index: a link to nothing": dangling,
}


# --- pickles, configs and code ------------------------------------------------------------------


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def pickled(name: str) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        (directory / FILE).unlink()
        canary = Canary(directory.parent / "canary")
        (directory / name).write_bytes(pickle.dumps({"lm_head.weight": canary}))
        if name.endswith("-00001-of-00001.bin"):
            index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
            (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    return harm


def with_config(**values: Any) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **values}))

    return harm


def remote_code(directory: Path) -> None:
    canary = directory.parent / "canary"
    code = f"from pathlib import Path\nPath({str(canary)!r}).touch()\n"
    (directory / "configuration_evil.py").write_text(code)
    (directory / "modeling_evil.py").write_text(code)
    with_config(
        model_type="evil",
        auto_map={
            "AutoConfig": "configuration_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilModel",
        },
    )(directory)


def text_config(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.json").write_text(text) and None


def generation_config(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "generation_config.json").write_text(text) and None


OTHERS: dict[str, Callable[[Path], None]] = {
    "pickle: .bin": pickled("pytorch_model.bin"),
    "pickle: .pt": pickled("model.pt"),
    "pickle: shards": pickled("pytorch_model-00001-of-00001.bin"),
    "pickle named safetensors": lambda directory: (
        (directory / FILE).write_bytes(pickle.dumps(Canary(directory.parent / "canary"))) and None
    ),
    "config: remote code": remote_code,
    "config: no JSON": text_config("{"),
    "config: a list": text_config("[]"),
    "config: deep": text_config('{"a":' * 50_000),
    "config: unknown model": with_config(model_type="nothing-like-it"),
    "config: wider than its weights": with_config(hidden_size=64),
    "config: a vocabulary of 10^12": with_config(vocab_size=10**12),
    "config: 10^9 layers": with_config(num_hidden_layers=10**9),
    "config: 10^8 layers of a family with a list of them": with_config(
        model_type="qwen2", num_hidden_layers=10**8
    ),
    "config: 10^8 layers of a part": with_config(
        model_type="gemma3", vision_config={"num_hidden_layers": 10**8}
    ),
    "config: 10^8 types of attention": with_config(
        model_type="gpt_neo", attention_types=[[["global"], 10**8]]
    ),
    "config: 10^8 labels": with_config(num_labels=10**8),
    "config: layers as text": with_config(num_hidden_layers="two"),
    "config: negative layers": with_config(num_hidden_layers=-1),
    "config: a negative vocabulary": with_config(vocab_size=-5),
    "config: widths that overflow": with_config(hidden_size=2**62),
    "config: an activation that is none": with_config(hidden_act="nothing-like-it"),
    "config: wide": text_config(wide(b'{"a": [', b"[],", b"[]]}").decode()),
    "config: a kernel of the Hub": with_config(_attn_implementation="somebody/code"),
    "config: a kernel for a part": with_config(attn_implementation={"": "somebody/code"}),
    "config: another file of weights": with_config(transformers_weights="../outside.safetensors"),
    "adapters beside the weights": lambda directory: (
        (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "../outside"}')
        and None
    ),
    "generation: no JSON": generation_config("{"),
    "generation: a list": generation_config("[]"),
    "generation: deep": generation_config('{"a":' * 50_000),
    "generation: wide": generation_config(wide(b'{"a": [', b"[],", b"[]]}").decode()),
}
CASES = {**HEADERS, **INDEXES, **OTHERS}


_opened: list[str] | None = None  # what is opened while somebody looks


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(args[0]))


@pytest.fixture(scope="module")
def audit_hook() -> None:
    sys.addaudithook(_watch)  # stays until the process ends


@pytest.fixture
def opened(audit_hook: None) -> Iterator[list[str]]:
    """Collect the names of files that Python opens; each header is read there first."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_and_nothing_of_it_runs(
    name: str, directory: Path, opened: list[str]
) -> None:
    CASES[name](directory)
    opened.clear()
    before = forget_peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OutcoreError) as refusal:
            outcore.load(directory, device="cpu")
    assert str(refusal.value)
    assert not (directory.parent / "canary").exists(), "its code ran"
    assert not [path for path in opened if "outside" in path], "a file outside was opened"
    assert peak_bytes() - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "its header would have 0 bytes, the file has 0"),
        (b"abc", "its header would have .* the file has 3"),
        (struct.pack("<Q", 500) + b"{}", "its header would have 500 bytes, the file has 10"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
    ids=["empty", "3 bytes", "cut", "git-lfs"],
)
def test_what_is_wrong_with_a_file_is_told(directory: Path, content: bytes, told: str) -> None:
    (directory / FILE).write_bytes(content)
    with pytest.raises(StoreError, match=told):
        outcore.load(directory, device="cpu")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("index: no map", "it has no table weight_map"),
        ("index: a line break", r"refuses the file name 'model\\n\.safetensors'"),
        ("index: duplicate keys", "'lm_head.weight' stands in it twice"),
        ("index: a link to nothing", r"a\.safetensors .* is a link to \.\./\.\./blobs/0, which is"),
        ("generation: no JSON", r"generation_config\.json: is no JSON of settings"),
        ("config: 10^8 labels", "num_labels is 100,000,000, but models have 100,000 at most"),
        ("config: a kernel of the Hub", "_attn_implementation asks for code from elsewhere"),
        (
            "config: wider than its weights",
            r"model\.embed_tokens\.weight has the shape \[31, 16\] in its files and \[31, 64\] by",
        ),
    ],
)
def test_the_reason_is_told(directory: Path, harm: str, told: str) -> None:
    CASES[harm](directory)
    with pytest.raises(OutcoreError, match=told):
        outcore.load(directory, device="cpu")


@pytest.mark.parametrize("is_converted", [False, True])
def test_code_beside_a_model_that_transformers_knows_is_left_alone(
    directory: Path, is_converted: bool
) -> None:
    """Also where transformers itself reads the weights."""
    remote_code(directory)
    with_config(model_type=CONFIG.model_type)(directory)
    if is_converted:
        (directory / FILE).rename(directory / "a.safetensors")
        (directory / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "a.safetensors"}}')
    model = outcore.load(directory, device="cpu")
    assert type(model.get_submodule("model")).__module__.startswith("transformers.")
    assert not (directory.parent / "canary").exists(), "its code ran"


def test_an_open_outside_would_be_seen(directory: Path, opened: list[str]) -> None:
    (directory.parent / "outside.safetensors").write_bytes(b"")
    assert [path for path in opened if "outside" in path]


def test_the_canaries_would_sing(directory: Path) -> None:
    canary = directory.parent / "canary"
    pickled("model.pt")(directory)
    pickle.loads((directory / "model.pt").read_bytes())
    assert canary.exists()
    canary.unlink()
    remote_code(directory)
    exec((directory / "modeling_evil.py").read_text(), {})
    assert canary.exists()


def test_a_large_allocation_would_be_seen() -> None:
    before = forget_peak()
    block = b"x" * MOST_GROWTH_BYTES
    assert peak_bytes() - before > MOST_GROWTH_BYTES // 2, len(block)


def test_the_directory_itself_is_fine(directory: Path) -> None:
    model = outcore.load(directory, device="cpu")
    assert torch.equal(
        model.state_dict()["lm_head.weight"].float(),
        LlamaForCausalLM.from_pretrained(directory).state_dict()["lm_head.weight"].float(),
    )


def forget_peak() -> int:
    """Start the process's peak anew: an earlier one would hide what comes. Return it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs /proc")
    return peak_bytes()


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
