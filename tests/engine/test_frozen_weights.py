"""LoRA over a base in 8 or 4 bit: what is computed, in every placement, and what it takes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

import lora
import transformers as hf

import outcore
from outcore.engine.offload import engine_of
from outcore.engine.packed_parameters import PackedWeight
from outcore.kernels.packed import unpack
from outcore.kernels.packed_format import FORMATS

formats = pytest.mark.parametrize("format", FORMATS)
ADAPTER = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
MIXED: dict[str, Any] = {
    "weights": ["device", "host", "disk"],
    "activations": ["keep", "recompute", "offload"],
}
PLACEMENTS: list[dict[str, Any]] = [
    {"weights": "device"},
    {"weights": "device", "state": "device"},
    {"num_slots": 1},
    {"num_slots": 2, "activations": "keep"},
    {"activations": "offload"},
    {"weights": "disk"},
    {"weights": "disk", "state": "disk", "activations": "keep", "num_slots": 1},
    MIXED,
    {"state": "device", "num_visits": 0},
]


@pytest.mark.parametrize(
    ("format", "activations"), [("int8", "recompute"), ("int4", "recompute"), ("int4", "keep")]
)
def test_it_computes_what_a_plain_model_with_those_values_does(
    format: str, activations: str
) -> None:
    plain = lora.rounded_model(format)
    theirs = plain(**lora.batch())
    theirs.loss.backward()
    model = lora.offloaded(lora.plain_model(), format, activations=activations)
    with torch.no_grad():
        assert torch.equal(model(**lora.batch()).logits, theirs.logits)
    outcore.AdamW(model, lr=0.0)
    loss = model(**lora.batch()).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(theirs.loss.detach()), rel=1e-6)
    found = _gradients(model)
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    assert all("lora_" in name for name in wanted)
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    backend = engine_of(model).backend
    found = {}
    for chunk in backend.chunks:
        get, after = backend.waiting_gradient(chunk)
        for fence in after:
            fence.block()
        flat = get()
        for field in chunk.unit.layout.trainable:
            start, end = max(field.offset, chunk.start), min(field.end, chunk.end)
            if start < end:
                piece = flat[start - chunk.start : end - chunk.start].float()
                whole = found.setdefault(chunk.unit.full_name(field.name), torch.zeros(field.shape))
                whole.view(-1)[start - field.offset : end - field.offset] = piece
    return found


@formats
def test_it_trains_like_a_plain_model_with_those_values(format: str) -> None:
    ours, adapters = lora.trained(lora.offloaded(lora.plain_model(), format))
    theirs, expected = lora.trained(lora.offloaded(lora.rounded_model(format), None))
    assert ours == theirs
    for name, tensor in expected.items():
        assert torch.equal(adapters[name], tensor), name


@pytest.mark.parametrize(
    ("format", "placement"),
    [*(("int4", placement) for placement in PLACEMENTS), ("int8", MIXED)],
    ids=str,
)
def test_every_placement_has_the_same_bits(
    format: str, placement: dict[str, Any], tmp_path: Path
) -> None:
    losses, adapters = _streamed_from_host(format)
    model = lora.offloaded(lora.plain_model(), format, disk=str(tmp_path), **placement)
    other_losses, other_adapters = lora.trained(model)
    assert other_losses == losses
    for name, tensor in adapters.items():
        assert torch.equal(other_adapters[name], tensor), name


@functools.cache
def _streamed_from_host(format: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return lora.trained(lora.offloaded(lora.plain_model(), format))


@pytest.mark.slow
def test_compiled_blocks_keep_their_bits_too() -> None:
    first = lora.trained(lora.offloaded(lora.plain_model(), compile=True), seeds=(0, 1))
    other = lora.offloaded(lora.plain_model(), compile=True, activations="keep", weights="device")
    second = lora.trained(other, seeds=(0, 1))
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_only_adapters_have_gradients_and_state() -> None:
    model = lora.offloaded(lora.plain_model(), "int4")
    optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    engine = engine_of(model)
    trained = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    spans = sum(unit.layout.trainable_numel for unit in engine.units)
    assert trained <= spans < 2 * trained  # aligned, and nothing else
    assert {n for g in optimizer.param_groups for p in g["params"] for n in [id(p)]} == {
        id(p) for n, p in model.named_parameters() if "lora_" in n
    }
    host = engine.host_ledger.peaks()
    assert host["gradients"] == pytest.approx(4 * spans, rel=0.05)
    assert host["optimizer state"] == pytest.approx(8 * spans, rel=0.05)


def test_no_gradient_of_a_frozen_matrix_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora.offloaded(lora.plain_model(), "int4")
    outcore.AdamW(model, lr=1e-2)
    asked: list[torch.Size] = []
    grad = torch.autograd.grad

    def watched(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked.extend(tensor.shape for tensor in inputs)
        return grad(outputs, inputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    products = _weight_gradient_products(lambda: model(**lora.batch()).loss.backward())
    in_blocks = {unit.layout.trainable for unit in engine_of(model).units if unit.part.is_block}
    widths = {field.shape for fields in in_blocks for field in fields}
    assert {shape for shape in asked if len(shape) == 2} <= widths
    frozen = {tuple(p.shape) for n, p in model.named_parameters() if "base_layer.weight" in n}
    assert frozen
    assert not products & {*frozen, *((b, a) for a, b in frozen)}


def _weight_gradient_products(work: Any) -> set[tuple[int, ...]]:
    """Return the shapes of matrix products that sum over all tokens: those of weight gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens = lora.batch()["input_ids"].numel()
    shapes: set[tuple[int, ...]] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                left, right = args[-2:]
                if left.shape[1] == tokens:
                    shapes.add((left.shape[0], right.shape[1]))
            return func(*args, **(kwargs or {}))

    with Watch():
        work()
    assert shapes, "saw no weight gradient, not even an adapter's"
    return shapes


@formats
def test_the_bytes_that_move_and_stay(format: str) -> None:
    full, packed = (lora.offloaded(lora.plain_model(), f) for f in (None, format))
    blocks = [unit for unit in engine_of(packed).units if unit.part.is_block]
    bits = FORMATS[format].bits_per_weight
    for unit in blocks:
        assert unit.packed is not None
        frozen = sum(f.shape.numel() for f in unit.packed.fields)
        # Rows of 176 are filled up to whole blocks; each of 14 pieces is aligned.
        assert unit.packed.num_bytes <= 1.12 * frozen * bits / 8 + 14 * 512
        names = {f.name for f in unit.layout.fields}
        assert {n for n in unit.parameters if "lora_" in n or "norm" in n or "bias" in n} == names
    books = [engine_of(model).host_ledger.peaks()["weights"] for model in (full, packed)]
    assert books[1] < books[0] * (0.45 if format == "int8" else 0.35)
    device = engine_of(packed).device_ledger.peaks()
    assert device["expanded weights"] == max(
        4 * u.packed.expanded.numel for u in blocks if u.packed
    )
    assert device["weight slots"] == 3 * 4 * blocks[0].span_numel


def test_a_device_budget_without_room_to_expand_is_refused_before_anything_moves() -> None:
    model = lora.plain_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(outcore.OutOfBudget, match="expanded weights"):
        lora.offloaded(model, device_memory=270_000)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_nothing_frozen_is_refused() -> None:
    model = hf.AutoModelForCausalLM.from_config(lora.config())
    with pytest.raises(ValueError, match="no block has a frozen matrix of 4,096 elements"):
        lora.offloaded(model)
    with pytest.raises(ValueError, match="int3"):
        lora.offloaded(lora.plain_model(), "int3")


def test_values_that_cannot_be_packed_are_refused_by_name_before_anything_moves() -> None:
    model = lora.plain_model()
    name = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = float("nan")
    with pytest.raises(ValueError, match=f"{name}.*cannot be packed"):
        lora.offloaded(model)
    assert not any(p.is_meta for p in model.parameters())


def test_experts_are_packed_and_their_router_is_not() -> None:
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=64,  # so that the router is large enough, too
    )
    base = hf.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    base.lm_head.weight.requires_grad_(True)
    model = lora.offloaded(base, "int4")
    unit = next(unit for unit in engine_of(model).units if unit.part.is_block)
    assert unit.packed is not None
    packed = {f.name: len(f.shape) for f in unit.packed.fields}
    assert [n for n, dim in packed.items() if dim == 3] == [
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    ]
    assert "mlp.gate.weight" in {f.name for f in unit.layout.fields}
    outcore.AdamW(model, lr=1e-2)
    model(**lora.batch()).loss.backward()


@formats
def test_state_dict_save_and_release_show_the_expanded_values(format: str, tmp_path: Path) -> None:
    expected = lora.rounded_model(format).state_dict()
    model = lora.offloaded(lora.plain_model(), format)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    packed = [name for name, tensor in found.items() if isinstance(tensor, PackedWeight)]
    assert len(packed) == 3 * 7
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor), name
        assert torch.equal(found[name].detach() * 1, tensor), name
    with pytest.raises(RuntimeError, match="cannot be written"):
        found[packed[0]].mul_(2)
    base = model.base_model.model
    base.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    from safetensors.torch import load_file

    files = list((tmp_path / "base").glob("*.safetensors"))
    assert len(files) > 1
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[f"base_model.model.{name}"]), name
    assert {f"base_model.model.{name}" for name in saved} == expected.keys()
    outcore.release(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    model(**lora.batch()).loss.backward()


def test_bf16_is_rounded_once_from_the_code() -> None:
    model = lora.offloaded(lora.plain_model(), "int4", dtype=torch.bfloat16)
    plain, format = lora.plain_model(), FORMATS["int4"]
    name = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"
    weight = plain.get_parameter(name)
    expected = unpack(*format.pack(weight), format, weight.shape, torch.bfloat16)
    found = model.state_dict()[name]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.cpu(), expected)
    engine = engine_of(model)  # its forward needs products that not every CPU has in bf16
    unit = next(u for u in engine.units if name.startswith(f"{u.name}."))
    views = engine.expansion.expand(unit, engine.slots.acquire(unit, "forward"))
    engine.slots.release(unit)
    assert torch.equal(views["mlp.down_proj.base_layer.weight"], expected)


def test_adapters_are_saved_as_usual(tmp_path: Path) -> None:
    import peft

    model = lora.offloaded(lora.plain_model(), "int8")
    lora.trained(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(_base_of(lora.rounded_model("int8")), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**lora.batch()).logits, model(**lora.batch()).logits)


def _base_of(model: Any) -> nn.Module:
    base: nn.Module = model.unload()
    return base


@formats
def test_values_can_be_loaded(format: str, tmp_path: Path) -> None:
    other = lora.plain_model(seed=7)
    placement = {"weights": ["device", "host", "disk"], "disk": str(tmp_path)}
    model = lora.offloaded(lora.plain_model(seed=0), format, **placement)
    model.load_state_dict(other.state_dict())
    wanted = lora.offloaded(lora.plain_model(seed=7), format)
    with torch.no_grad():
        expected = wanted(**lora.batch()).logits
        assert torch.equal(model(**lora.batch()).logits, expected)
        model.get_parameter(ADAPTER).mul_(1)  # a write that is allowed, beside what was loaded
        assert torch.equal(model(**lora.batch()).logits, expected)
    third = lora.offloaded(lora.plain_model(seed=1), format)
    third.load_state_dict(model.state_dict())  # packed values go over as they are
    with torch.no_grad():
        assert torch.equal(third(**lora.batch()).logits, expected)


def test_a_packed_parameter_written_in_place_is_noticed() -> None:
    model = lora.offloaded(lora.plain_model())
    name = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
        with pytest.raises(outcore.OutcoreError, match="written in place"):
            model(**lora.batch())
