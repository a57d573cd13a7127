"""Blocks that hand tensors on through one mapping: keys and values of Gemma 3n and Gemma 4."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from families import VOCAB, Family, batch_of, gradients_of, offloaded
from torch import Tensor, nn
from training import assert_same_gradients

import outcore

ACTIVATIONS = ["recompute", "keep", "offload"]


def _config(config_class: Any, **changes: Any) -> Any:
    return config_class(
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_kv_shared_layers=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


def _gemma3n() -> Any:
    return _config(
        hf.Gemma3nTextConfig,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )


def _gemma4() -> Any:
    return _config(hf.Gemma4TextConfig, global_head_dim=8)


def _shares_by_mapping(config: Callable[[], Any]) -> bool:
    """Earlier transformers had no such model, or shared through the cache."""
    try:
        with torch.device("meta"):
            model = hf.AutoModelForCausalLM.from_config(config())
    except (AttributeError, ValueError):
        return False
    return "shared_kv_states" in inspect.signature(model.model.layers[0].forward).parameters


FAMILIES = [Family(name="gemma3n", config=_gemma3n), Family(name="gemma4", config=_gemma4)]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    if not _shares_by_mapping(request.param.config):
        pytest.skip("this transformers does not share keys and values through a mapping")
    return request.param


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_shared_keys_and_values_have_gradients(family: Family, activations: str) -> None:
    batch = batch_of(family)
    assert_same_gradients(lambda model: model(**batch).loss, family, activations=activations)


def test_generation_with_shared_keys_and_values(family: Family) -> None:
    ids = batch_of(family, sequences=3, seq_len=6)["input_ids"].clamp(min=3)
    plain, model = family.make().eval(), offloaded(family.make()).eval()
    for use_cache in (True, False):
        options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


class _Block(nn.Module):
    """Writes, replaces, reads and deletes, according to its place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        y = self.inner(x).tanh()
        if self.index == 0:
            shared["first"] = [y, {"scaled": y * 2}]
            shared["number"] = 3
        elif self.index == 1:
            shared["first"][1]["scaled"] = y * shared["first"][1]["scaled"]  # inside of a value
        elif self.index == 2:
            y = y * shared["first"][1]["scaled"] + shared["number"] * shared["first"][0]
            del shared["number"]
        return x + y


class _Net(nn.Module):
    def __init__(self, mapping: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(_Block(i) for i in range(4))
        self.mapping = mapping

    def forward(self, ids: Tensor) -> tuple[Tensor, Any]:
        x, shared = self.embedding(ids), self.mapping()
        for layer in self.layers:
            x = layer(x, shared)
        return x.pow(2).mean() + shared["first"][0].mean(), shared


@pytest.mark.parametrize("mapping", [UserDict, dict])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_what_blocks_write_reaches_the_caller(mapping: Any, activations: str) -> None:
    ids = torch.arange(15).view(5, 3)
    plain, model = _Net(mapping), offloaded(_Net(mapping), activations=activations)
    outcore.AdamW(model)
    theirs, their_mapping = plain(ids)
    ours, our_mapping = model(ids)
    theirs.backward()
    ours.backward()
    assert torch.allclose(ours, theirs)
    assert type(our_mapping) is mapping
    assert list(our_mapping) == list(their_mapping) == ["first"]
    torch.testing.assert_close(our_mapping["first"], their_mapping["first"])
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
    with torch.no_grad():
        assert torch.allclose(model(ids)[0], plain(ids)[0])


def test_a_mapping_and_its_graph_are_freed() -> None:
    model = offloaded(_Net(UserDict), activations="keep")
    outcore.AdamW(model)
    loss, mapping = model(torch.arange(15).view(5, 3))
    call = weakref.ref(mapping["first"][0].grad_fn.call)
    assert call() is not None
    del loss, mapping
    gc.collect()
    assert call() is None
