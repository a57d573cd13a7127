"""The aarch64 library, NEON and scalar, gives this machine's bits; it runs under an emulator.

Each call starts from what this machine has computed so far: a difference shows at the step that
makes it, before rounding to few bits can hide it. That this machine's bits are right is for the
other tests to say.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aarch64_script import ROOT, Aarch64, Array, Script
from adamw_states import State, assert_same_bits, hostile_grad, scalars_of
from compact_states import FIRST_ELEMENT, CompactState, grad_of
from torch import Tensor

from outcore.kernels import AdamWScalars, join_master, split_master_
from outcore.kernels.adamw_host import GRAD_DTYPE
from outcore.kernels.checksum import PAGE_BYTES, checksum_pages
from outcore.kernels.compact_format import BLOCK, CompactFormat
from outcore.kernels.library import ABI_VERSION

pytestmark = pytest.mark.usefixtures("needs_library")

# Around the widths of vectors and blocks; the last one is shared out over threads.
LENGTHS = (0, 1, 3, 7, 31, 127, 129, 1_023, 4_097, 40_003)
NUM_STEPS = 6
SEED = 2**64 - 7
NAN, INFINITY = float("nan"), float("inf")
# Of the last two the squares are infinite, and they themselves are not.
NOT_FINITE = torch.tensor([NAN, -NAN, INFINITY, -INFINITY, 3e38, -3e38])

targets = pytest.mark.parametrize("target", ["neon", "scalar"])
grads = pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
splits = pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
formats = pytest.mark.parametrize("format", ["compact", "minimal"])

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Aarch64:
    return Aarch64(tmp_path_factory.mktemp("aarch64"))


class Comparison:
    """Calls that are made here at once, and later by one instruction set of the other library."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._script = Script()
        self._script.call("oc_set_isa", self._script.array(text(target)))
        self._expected: list[tuple[str, dict[str, Array], Tensors]] = []

    @contextlib.contextmanager
    def call(self, name: str, *arguments: int | Tensor) -> Iterator[None]:
        """The body of the `with` does here, to the same tensors, what the call does there."""
        tensors = {f"argument {i}": a for i, a in enumerate(arguments) if isinstance(a, Tensor)}
        arrays = {place: self._script.array(tensor) for place, tensor in tensors.items()}
        words = [arrays.get(f"argument {i}", a) for i, a in enumerate(arguments)]
        self._script.call(name, *words)
        yield
        length = tensors["argument 0"].numel()
        where = f"{self._target}, call {len(self._expected)}, {name} of {length}"
        copies = {place: tensor.clone() for place, tensor in tensors.items()}
        self._expected.append((where, arrays, copies))

    def results(self, aarch64: Aarch64) -> Iterator[tuple[str, Tensors, Tensors]]:
        """For each call: where it is, its tensors there, and its tensors here."""
        answer = self._script.run(aarch64)
        assert set(answer.results) == {0}
        for where, arrays, expected in self._expected:
            yield where, {place: answer.tensor(a) for place, a in arrays.items()}, expected

    def check(self, aarch64: Aarch64) -> None:
        for where, actual, expected in self.results(aarch64):
            assert_same_bits(actual, expected, where)


def text(characters: str) -> Tensor:
    return torch.tensor([*characters.encode(), 0], dtype=torch.uint8)


def tensor_of(scalars: AdamWScalars) -> Tensor:
    return torch.tensor([*vars(scalars).values()])  # fp32, in the order of oc_adamw_scalars


def step_both(comparison: Comparison, state: State, grad: Tensor, step: int) -> None:
    master = [state.weight] if state.remainder is None else [state.weight, state.remainder]
    with comparison.call(
        "oc_adamw_fp32" if state.remainder is None else "oc_adamw_split",
        *master,
        state.exp_avg,
        state.exp_avg_sq,
        grad,
        GRAD_DTYPE[grad.dtype],
        grad.numel(),
        tensor_of(scalars_of(step)),
        step % 3,  # threads
    ):
        state.step(grad, scalars_of(step))


def step_both_compact(comparison: Comparison, state: CompactState, grad: Tensor, step: int) -> None:
    master = [state.weight] if state.remainder is None else [state.weight, state.remainder]
    with comparison.call(
        "oc_adamw_minimal" if state.remainder is None else "oc_adamw_compact",
        *master,
        *state.moments,
        grad,
        GRAD_DTYPE[grad.dtype],
        grad.numel(),
        tensor_of(scalars_of(step)),
        SEED,
        step,
        FIRST_ELEMENT,
        step % 3,  # threads
    ):
        state.step(grad, scalars_of(step), seed=SEED, step=step, first_element=FIRST_ELEMENT)


@targets
@grads
@splits
def test_adamw(aarch64: Aarch64, target: str, grad_dtype: torch.dtype, split: bool) -> None:
    comparison = Comparison(target)
    for n in LENGTHS:
        state = State.make(n, split=split)
        for step in range(1, NUM_STEPS + 1):
            step_both(comparison, state, hostile_grad(n, step, grad_dtype), step)
    comparison.check(aarch64)


@targets
@grads
@formats
def test_compact_adamw(
    aarch64: Aarch64, target: str, grad_dtype: torch.dtype, format: CompactFormat
) -> None:
    comparison = Comparison(target)
    for n in LENGTHS:
        state = CompactState.make(n, format)
        for step in range(1, NUM_STEPS + 1):
            step_both_compact(comparison, state, grad_of(n, step, grad_dtype), step)
    comparison.check(aarch64)


@targets
@grads
@splits
def test_adamw_that_is_not_finite(
    aarch64: Aarch64, target: str, grad_dtype: torch.dtype, split: bool
) -> None:
    """Where a NaN comes out is the same everywhere; its sign and payload are the CPU's choice."""
    n = 1_003
    comparison, state = Comparison(target), State.make(n, split=split)
    state.weight[::53] = NOT_FINITE.repeat(n)[: len(state.weight[::53])]
    if state.remainder is not None:
        state.remainder[::53] = 0  # with another one an infinite master is a NaN
    for step in range(1, NUM_STEPS + 1):
        grad = hostile_grad(n, step, grad_dtype)
        if step in (2, 4):
            grad[step::37] = NOT_FINITE.repeat(n)[: len(grad[step::37])]
        step_both(comparison, state, grad, step)
    for where, actual, expected in comparison.results(aarch64):
        assert_same_bits(with_one_nan(actual, split), with_one_nan(expected, split), where)
    numbers = with_one_nan(expected, split)["argument 0"]
    assert 0 < numbers.isnan().sum() < n / 2
    assert numbers.isinf().any()


def with_one_nan(tensors: Tensors, split: bool) -> Tensors:
    tensors = dict(tensors)
    if split:
        master = join_master(tensors["argument 0"], tensors.pop("argument 1"))
        tensors["argument 0"] = master
    return {place: tensor.masked_fill(tensor.isnan(), NAN) for place, tensor in tensors.items()}


@targets
@grads
@formats
def test_compact_adamw_that_is_not_finite(
    aarch64: Aarch64, target: str, grad_dtype: torch.dtype, format: CompactFormat
) -> None:
    n = 10 * BLOCK + 5
    comparison, state = Comparison(target), CompactState.make(n, format)
    state.weight[3 * BLOCK : 3 * BLOCK + 6] = NOT_FINITE
    for step in range(1, NUM_STEPS + 1):
        grad = grad_of(n, step, grad_dtype)
        if step == 2:  # each in a block of its own, then all in one, then at the very end
            grad[1 : 6 * BLOCK : BLOCK] = NOT_FINITE
            grad[7 * BLOCK + 3 : 7 * BLOCK + 9] = NOT_FINITE
            grad[-1] = NAN
        step_both_compact(comparison, state, grad, step)
    comparison.check(aarch64)


@targets
def test_the_split_master(aarch64: Aarch64, target: str) -> None:
    """All upper halves, with lower ones about each place where rounding or a carry changes."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = torch.arange(-(2**15), 2**15)[:, None] * 2**16 + lower
    masters = patterns.flatten().to(torch.int32).view(torch.float32)
    comparison = Comparison(target)
    for n in (*LENGTHS, len(masters)):
        master = masters[:n].clone()
        weight, remainder = torch.zeros(n).bfloat16(), torch.zeros(n, dtype=torch.int16)
        with comparison.call("oc_split_master", master, weight, remainder, n, n % 3):
            split_master_(master, weight, remainder)
        master.zero_()
        with comparison.call("oc_join_master", weight, remainder, master, n, n % 3):
            master.copy_(join_master(weight, remainder))
    comparison.check(aarch64)


@targets
def test_the_checksum(aarch64: Aarch64, target: str) -> None:
    comparison = Comparison(target)
    for num_pages in (0, 1, 2, 31):
        generator = torch.Generator().manual_seed(num_pages)
        shape = (num_pages * PAGE_BYTES,)
        data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        for page, seed in ((0, 0), (7, 2**64 - 1), (2**64 - 2, 12345)):
            total = torch.ones(1, dtype=torch.int64)
            with comparison.call("oc_checksum_pages", data, num_pages, page, seed, total):
                checksum = checksum_pages(data.numpy(), first_page=page, seed=seed)
                total.view(torch.uint64).fill_(checksum)
    comparison.check(aarch64)


def test_the_library_offers_neon_and_scalar(aarch64: Aarch64) -> None:
    script = Script()
    script.call("oc_abi_version")
    script.call("oc_isa")
    expected = [ABI_VERSION, int.from_bytes(b"neon", "little")]
    for wanted, status, active in (
        ("scalar", 0, b"scalar"),
        ("avx2", -6, b"scalar"),
        ("avx512", -6, b"scalar"),
        ("neon", 0, b"neon"),
    ):
        script.call("oc_set_isa", script.array(text(wanted)))
        script.call("oc_isa")
        expected += [status, int.from_bytes(active, "little")]
    assert script.run(aarch64).results == expected


def test_neon_code_has_vectors_scalar_code_has_none_and_nothing_is_fused(aarch64: Aarch64) -> None:
    """Else the two would be one, compared twice."""
    functions = aarch64.disassembly()
    with_root = {name: code for name, code in functions.items() if "fsqrt" in code}
    assert len(with_root) == 16  # four kernels, two types of gradients, two instruction sets
    for name, code in with_root.items():
        assert ("4neon" in name) != ("6scalar" in name), name
        assert bool(re.search(r"fsqrt\s+v\d+\.4s", code)) == ("4neon" in name), name
    fused = re.compile(r"\tfn?m(la|ls|add|sub)\b")
    assert [name for name, code in functions.items() if fused.search(code)] == []


def test_every_function_of_the_header_that_computes_is_called_here() -> None:
    """Those that move bytes compute nothing but checksums, and take pointers in a struct."""
    header = (ROOT / "kernels" / "outcore_kernels.h").read_text()
    declared = set(re.findall(r"^(?:int|const char\*) (oc_\w+)\(", header, re.MULTILINE))
    computing = {name for name in declared if not name.endswith(("_records", "_copy"))}
    assert computing == set(re.findall(r'"(oc_\w+)"', Path(__file__).read_text()))
    assert len(declared - computing) == 3
