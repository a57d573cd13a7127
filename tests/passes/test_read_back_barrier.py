"""The barrier between a loop that stores a buffer and one that loads it back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outcore.passes import read_back_barrier
from outcore.passes.compilation import compiled

inductor = pytest.importorskip("torch._inductor.codegen.triton")


class Lines(list[str]):
    writeline = list.append


def test_one_barrier_before_what_an_earlier_loop_stored() -> None:
    loaded: list[str] = []
    kernel = SimpleNamespace(cse=SimpleNamespace(invalidated_stores={"buf1", "buf2"}), body=Lines())
    load = read_back_barrier._mended(lambda kernel, name, index: loaded.append(name))
    load(kernel, "input", 0)
    assert kernel.body == []
    load(kernel, "buf1", 0)
    load(kernel, "buf1", 0)
    load(kernel, "buf2", 0)
    assert kernel.body == ["tl.debug_barrier()"]  # one is enough for all stores before it
    kernel.cse.invalidated_stores.add("buf3")  # of the loop after it
    load(kernel, "buf3", 0)
    assert kernel.body == ["tl.debug_barrier()"] * 2
    assert loaded == ["input", "buf1", "buf1", "buf2", "buf3"]


def test_installed_once_and_in_the_caches_key(monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(inductor.TritonKernel.load, "__wrapped__", inductor.TritonKernel.load)
    monkeypatch.setattr(inductor.TritonKernel, "load", original)
    # torch's own patch: a setting that monkeypatch takes back is one that torch then does not have.
    with torch.compiler.config.patch(cache_key_tag="mine"):
        with read_back_barrier.installed():
            mended = inductor.TritonKernel.load
            assert torch.compiler.config.cache_key_tag == "mine-outcore-read-back-barrier"
        with read_back_barrier.installed():
            assert inductor.TritonKernel.load is mended
            assert torch.compiler.config.cache_key_tag == "mine-outcore-read-back-barrier"
        assert torch.compiler.config.cache_key_tag == "mine"


@pytest.mark.gpu
def test_a_compiled_norm_before_a_rotation_waits() -> None:
    """Gemma 3's queries: the gradient is stored for the norm's weight and read for the rest."""
    from torch._inductor.utils import run_and_get_code

    def rotated_norm(x: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = (scaled * (1 + weight.float())).to(x.dtype)
        left, right = normed.chunk(2, -1)
        return normed * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(2, 128, 4, 256, **options, requires_grad=True)
    weight = torch.randn(256, **options, requires_grad=True)
    angles, grad = torch.randn(1, 128, 1, 256, **options), torch.randn(2, 128, 4, 256, **options)
    function = compiled(rotated_norm)

    def train() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(x, weight, angles), (x, weight), grad)

    first, codes = run_and_get_code(train)
    kernels = "\n".join(codes).split("@triton.jit")[1:]
    reading_back = [kernel for kernel in kernels if "tl.load(out_ptr" in kernel]
    assert all("tl.debug_barrier()" in kernel for kernel in reading_back)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, train(), strict=True))
    if not reading_back:
        pytest.skip("this torch compiles it to kernels that read nothing back")
