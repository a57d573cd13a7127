"""Block inputs that wait on the host: the same results, in bounded memory, at odd uses too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME
from torch import Tensor, nn

import outcore
from outcore.stream.lanes import injected_delays


def make(activations: str, **options: Any) -> Any:
    model = BY_NAME["llama"].make().train()
    return outcore.offload(model, device="cpu", activations=activations, **options)


def loss_of(model: Any, seed: int = 0, length: int = 8) -> Tensor:
    ids = torch.randint(0, 90, (4, length), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def input_bytes(model: Any) -> tuple[int, int]:
    """Return the peak bytes of block inputs on the device and on the host."""
    device, host = outcore.engine_of(model).report()
    return device.purposes.get("block inputs", 0), host.purposes.get("block inputs", 0)


def test_inputs_are_on_the_host_and_their_memory_is_used_again() -> None:
    model = make("offload")
    optimizer = outcore.AdamW(model, lr=1e-3)
    hidden = 4 * 8 * model.config.hidden_size * 4
    for step in range(4):
        loss = loss_of(model, step)  # the last one's graph is still referred to here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        device, host = input_bytes(model)
        assert host == model.config.num_hidden_layers * hidden
        assert device <= 2 * hidden  # the final norm's
    loss_of(model, 9)  # no backward
    loss_of(model, 10).backward()
    assert input_bytes(model)[1] <= 2 * host
    outcore.release(model)


def test_batches_of_many_lengths_share_their_memory() -> None:
    def run(activations: str) -> list[float]:
        model = make(activations)
        optimizer = outcore.AdamW(model, lr=1e-2)
        found = []
        with injected_delays(0.002, seed=5):
            for step, length in enumerate((9, 12, 7, 11, 16, 8, 15, 10)):
                loss = loss_of(model, step, length=length)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        if activations == "offload":
            hidden = 4 * 16 * model.config.hidden_size * 4
            assert input_bytes(model)[1] <= model.config.num_hidden_layers * hidden
        outcore.release(model)
        return found

    assert run("offload") == run("recompute")


def test_gradients_do_not_depend_on_the_order_of_backwards() -> None:
    def run(activations: str) -> list[float]:
        model = make(activations)
        optimizer = outcore.AdamW(model, lr=1e-2)
        found = []
        with injected_delays(0.002, seed=3):
            for step in range(3):
                first, second = loss_of(model, step), loss_of(model, step + 50, length=6)
                first.backward()
                second.backward(retain_graph=True)
                second.backward()
                optimizer.step()
                optimizer.zero_grad()
                found += [first.item(), second.item()]
        outcore.release(model)
        return found

    assert run("offload") == run("recompute")


def test_a_second_backward_is_refused_as_torch_does() -> None:
    model = make("offload")
    outcore.AdamW(model, lr=1e-2)
    loss = loss_of(model)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    outcore.release(model)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_an_input_that_is_written_after_its_block_is_noticed(activations: str) -> None:
    """Its copy to the host may come before or after."""
    model = make(activations)
    outcore.AdamW(model, lr=1e-2)

    def write(module: Any, args: tuple[Tensor, ...], output: Any) -> None:
        with torch.no_grad():
            args[0].mul_(0)

    model.model.layers[1].register_forward_hook(write)
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    outcore.release(model)


def test_a_host_budget_that_is_too_small_is_refused() -> None:
    model = make("offload", host_memory="1MB")
    outcore.AdamW(model, lr=1e-2)
    with pytest.raises(outcore.OutOfBudget, match="host memory: block inputs"):
        loss_of(model, length=512)
    loss_of(model).backward()
    outcore.release(model)


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Patches(nn.Module):
    """Its features come as channels do, in another order in memory than hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 64)
        self.layers = nn.ModuleList(_Normalised() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids).transpose(1, 2).contiguous().transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_an_input_comes_back_in_its_order_in_memory(micro_batch: int) -> None:
    """What sums over features adds in that order."""

    def run(activations: str) -> dict[str, Tensor]:
        options: Any = {"activations": activations, "micro_batch": micro_batch}
        model = outcore.offload(_Patches().train(), device="cpu", **options)
        optimizer = outcore.AdamW(model, lr=1e-2)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model(torch.randint(0, 20, (4, 33), generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcore.release(model)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    offloaded, recomputed = run("offload"), run("recompute")
    assert all(torch.equal(offloaded[name], recomputed[name]) for name in recomputed)
