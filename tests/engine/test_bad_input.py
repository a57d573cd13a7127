"""Bad input gets a clear error with the number and the remedy, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME, LR, VOCAB, batch_of, gradients_of, offloaded, relative_difference
from torch import nn
from training import outcore_threads

import outcore
from outcore.engine import offload
from outcore.passes.token_ranges import TokenRanges

LLAMA = BY_NAME["llama"]


class Untouched:
    """Checks that a model still has its parameters: the same objects, values, homes and outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = {
            name: (parameter, parameter.data_ptr(), parameter.detach().clone())
            for name, parameter in model.named_parameters()
        }
        self._modules = {
            name: vars(module).get("forward") for name, module in model.named_modules()
        }
        with torch.no_grad():
            self._loss = model(**batch_of()).loss

    def check(self) -> None:
        assert not hasattr(self._model, "_outcore_engine")
        now = dict(self._model.named_parameters())
        assert now.keys() == self._parameters.keys()
        for name, (parameter, address, values) in self._parameters.items():
            assert now[name] is parameter, name
            assert parameter.data_ptr() == address, name
            assert torch.equal(parameter, values), name
            assert not hasattr(parameter, "_outcore"), name
        for name, module in self._model.named_modules():
            assert vars(module).get("forward") is self._modules[name], name
        loss = self._model(**batch_of()).loss
        loss.backward()
        assert torch.equal(loss.detach(), self._loss)
        assert all(p.grad is not None for p in self._model.parameters())


# Budgets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_memory": "10KB"}, r"device memory.*KiB.*budget of 9\.8 KiB.*num_slots"),
        ({"device_memory": "40KB", "num_slots": 1}, r"device memory: resident weights.*weights"),
        ({"weights": "device", "device_memory": "100KB"}, r'resident weights.*weights="host"'),
        ({"host_memory": "50KB"}, r"host memory: weights.*budget of 48\.8 KiB.*host_memory"),
    ],
    ids=["slots", "edges", "resident", "host"],
)
def test_a_budget_that_is_too_small(options: dict[str, Any], message: str) -> None:
    model = LLAMA.make()
    untouched = Untouched(model)
    with pytest.raises(outcore.OutOfBudget, match=message):
        offloaded(model, **options)
    untouched.check()
    assert outcore_threads() == []
    offloaded(model)  # and it can be offloaded with a better one


def test_a_host_budget_that_the_machine_does_not_have() -> None:
    model = LLAMA.make()
    untouched = Untouched(model)
    with pytest.raises(ValueError, match=r"host_memory is 999\.0 TiB.*available"):
        offloaded(model, host_memory="999TiB")
    untouched.check()


def test_a_memory_that_has_room_for_device_or_host_but_not_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU as the device has a part of the same memory."""
    roomy = outcore.engine_of(offloaded(LLAMA.make()))
    needed = [ledger.taken_bytes for ledger in (roomy.host_ledger, roomy.device_ledger)]
    # A few percent of what is available are left alone.
    monkeypatch.setattr(offload, "available_host_bytes", lambda: sum(needed))
    model = LLAMA.make()
    untouched = Untouched(model)
    with pytest.raises(outcore.OutOfBudget, match="machine memory: "):
        offloaded(model)
    untouched.check()
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 2 * sum(needed))
    offloaded(model)


def test_a_batch_that_does_not_fit_the_device_budget() -> None:
    """Refused with the number and the remedy; a smaller one then has the right gradients."""
    model = offloaded(LLAMA.make(), device_memory="250KB", num_slots=1, activations="recompute")
    optimizer = outcore.AdamW(model, lr=LR)
    with pytest.raises(outcore.OutOfBudget, match=r"device memory.*fewer or shorter sequences"):
        model(**batch_of(sequences=20, seq_len=60)).loss.backward()
    batch = batch_of()
    optimizer.zero_grad()
    model(**batch).loss.backward()
    found = gradients_of(model)
    plain = LLAMA.make()
    plain(**batch).loss.backward()
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name
    assert outcore.engine_of(model).device_ledger.peak_bytes <= 250_000


def test_kept_activations_that_do_not_fit_are_recomputed_with_auto() -> None:
    """Between nothing and everything: some blocks keep, and the budget is never passed."""
    kept = {}
    for budget in ("400KB", "1200KB", "20MB"):
        model = offloaded(LLAMA.make(), device_memory=budget, num_slots=1)
        optimizer = outcore.AdamW(model, lr=LR)
        for step in range(3):
            optimizer.zero_grad()
            model(**batch_of(seed=step, sequences=8, seq_len=24)).loss.backward()
            optimizer.step()
        engine = outcore.engine_of(model)
        kept[budget] = engine.policy.num_kept
        assert engine.device_ledger.peak_bytes <= engine.device_ledger.budget_bytes
    assert kept["400KB"] == 0
    assert 0 < kept["1200KB"] < 3
    assert kept["20MB"] == 3


def test_activations_are_recomputed_with_auto_where_the_host_has_the_memory_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part for the device that is larger than what the host leaves is no promise."""
    kept = {}
    for available in (10**9, 2_000_000, 1_200_000):
        monkeypatch.setattr(offload, "available_host_bytes", lambda size=available: size)
        model = offloaded(LLAMA.make(), device_memory="20MB", num_slots=1)
        optimizer = outcore.AdamW(model, lr=LR)
        for step in range(3):
            optimizer.zero_grad()
            model(**batch_of(seed=step, sequences=8, seq_len=24)).loss.backward()
            optimizer.step()
        kept[available] = outcore.engine_of(model).policy.num_kept
    assert kept == {10**9: 3, 2_000_000: 1, 1_200_000: 0}


def test_reports_say_where_everything_is() -> None:
    model = offloaded(LLAMA.make(), device_memory="5MB")
    outcore.AdamW(model)
    device, host = outcore.engine_of(model).report()
    numel = sum(p.numel() for p in model.parameters())
    assert device.budget_bytes == 5_000_000
    assert 0 < device.peak_bytes <= 5_000_000
    assert sum(host.purposes.values()) >= 12 * numel
    assert host.purposes["optimizer state"] >= 8 * numel
    assert "weights" in host.purposes
    assert "weight slots" in device.purposes


# Models that cannot be offloaded


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = LLAMA.config()
        import transformers as hf

        model = hf.AutoModelForCausalLM.from_config(model)
    with pytest.raises(ValueError, match=r"embed_tokens.*meta.*outcore\.load"):
        offloaded(model)


def test_a_second_offload() -> None:
    model = offloaded(LLAMA.make())
    with pytest.raises(outcore.OutcoreError, match="offloaded already"):
        offloaded(model)
    with torch.no_grad():
        expected = float(LLAMA.make()(**batch_of()).loss)
        assert float(model(**batch_of()).loss) == pytest.approx(expected, rel=1e-5)


def test_a_second_offload_of_a_part() -> None:
    model = offloaded(LLAMA.make())
    with pytest.raises(outcore.OutcoreError, match="offloaded already"):
        offloaded(model.model)


def test_error_messages_name_only_what_exists() -> None:
    model = offloaded(LLAMA.make())
    with pytest.raises(outcore.OutcoreError) as caught:
        offloaded(model)
    for word in str(caught.value).replace("(", " ").split():
        if word.startswith("outcore."):
            assert hasattr(outcore, word.removeprefix("outcore.").rstrip(".,;")), word


def test_a_parameter_shared_between_blocks() -> None:
    model = LLAMA.make()
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    untouched = Untouched(model)
    with pytest.raises(
        outcore.UnsupportedModel, match=r"layers\.2\.mlp\.up_proj.*layers\.0\.mlp\.up_proj.*Untie"
    ):
        offloaded(model)
    untouched.check()


@pytest.mark.parametrize("edge_first", [False, True])
def test_a_parameter_shared_between_a_block_and_an_edge(edge_first: bool) -> None:
    """Refused, or trained with the gradients of both uses."""

    def make() -> Any:
        model = LLAMA.make()
        if edge_first:
            model.model.norm, layers = nn.Identity(), model.model.layers
            del model.model.layers
            model.model.norm = LLAMA.make().model.norm
            model.model.layers = layers
        model.model.norm.weight = model.model.layers[0].input_layernorm.weight
        return model

    try:
        model = offloaded(make())
    except outcore.UnsupportedModel:
        return
    outcore.AdamW(model)
    model(**batch_of()).loss.backward()
    found = gradients_of(model)
    plain = make()
    plain(**batch_of()).loss.backward()
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_an_unsupported_dtype(dtype: torch.dtype) -> None:
    model = LLAMA.make()
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(
        weight.detach().to(dtype), requires_grad=False
    )
    before = list(model.parameters())
    with pytest.raises(
        outcore.UnsupportedModel, match=rf"layers\.1\.mlp\.up_proj\.weight is {dtype}.*unquantized"
    ):
        offloaded(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes_are_converted(dtype: torch.dtype) -> None:
    model = offloaded(LLAMA.make().to(dtype))
    expected = LLAMA.make().to(dtype).float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert float(model(**batch_of()).loss) == pytest.approx(
            float(expected(**batch_of()).loss), rel=1e-5
        )


@pytest.mark.parametrize("kind", ["no list", "one block", "albert"])
def test_no_repeated_blocks(kind: str) -> None:
    import transformers as hf

    if kind == "no list":
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    elif kind == "one block":
        model = LLAMA.make()
        model.model.layers = model.model.layers[:1]
    else:  # one layer's weights used many times
        model = hf.AutoModelForMaskedLM.from_config(
            hf.AlbertConfig(
                vocab_size=VOCAB,
                embedding_size=16,
                hidden_size=32,
                num_attention_heads=4,
                intermediate_size=48,
            )
        )
    with pytest.raises(
        outcore.UnsupportedModel, match=r"no repeated blocks.*looked for.*ModuleList"
    ):
        offloaded(model)
    assert outcore_threads() == []


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "disc"}, r"weights must be one of 'device', 'host', 'disk', not 'disc'"),
        ({"state": "gpu"}, "state must be one of"),
        ({"activations": "drop"}, "activations"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype"),
        ({"device": "mps"}, "device"),
        ({"device_memory": "many"}, "24GiB"),
        ({"device_memory": 0}, "device_memory"),
        ({"device_memory": 24}, r"device_memory is 24 bytes; did you mean 24GiB\?"),
        ({"device_memory": "24"}, r"device_memory is 24 bytes; did you mean 24GiB\?"),
        ({"host_memory": 100}, r"host_memory is 100 bytes; did you mean 100GiB\?"),
        (
            {"state": "disk", "disk": "/tmp:500"},
            r"disk size is 500 bytes; did you mean 500GiB\?",
        ),
        ({"device_memory": True}, "device_memory"),
        ({"host_memory": "-3GB"}, "host_memory"),
        ({"micro_batch": 0}, "micro_batch must be 1 or more, not 0"),
        ({"micro_batch": 2.5}, "micro_batch"),
        ({"micro_batch": "x"}, "micro_batch"),
        ({"num_slots": 0}, "num_slots must be 1 or more"),
        ({"num_slots": "3"}, "num_slots"),
        ({"num_slots": None}, "num_slots"),
        ({"weights": ["host", "tape", "host"]}, "weights must be one of .*not 'tape'"),
        ({"state": ["host", "host"]}, "state has 2 entries, but the model has 3 blocks"),
        ({"activations": ["keep", "auto", "keep"]}, "activations must be one of .*not 'auto'"),
        ({"num_visits": -1}, "num_visits must be 0 or more"),
        ({"activations": ["keep"]}, "activations has 1 entries, but the model has 3 blocks"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    model = LLAMA.make()
    untouched = Untouched(model)
    with pytest.raises(ValueError, match=message):
        offloaded(model, **options)
    untouched.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_no_gpu() -> None:
    with pytest.raises(ValueError, match=r'no GPU.*device="cpu"'):
        offloaded(LLAMA.make(), device="cuda")


def test_unknown_options_of_load_and_from_config(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="microbatch"):
        outcore.from_config(LLAMA.config(), microbatch=2)
    with pytest.raises(ValueError, match=r"config\.json"):
        outcore.load(tmp_path, device="cpu")


# Inputs


@pytest.mark.parametrize("label", [VOCAB, -1, 10**6])
def test_a_label_out_of_range(label: int) -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR)
    batch = batch_of()
    good = batch["labels"].clone()
    batch["labels"][2, 7] = label
    with pytest.raises(ValueError, match=rf"label {label} .*0 to {VOCAB - 1}.*-100"):
        model(**batch)
    batch["labels"] = good
    model(**batch).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("is_positional", [False, True])
@pytest.mark.parametrize("token", [VOCAB, -1, 10**6])
def test_an_input_id_out_of_range(token: int, is_positional: bool) -> None:
    model = offloaded(LLAMA.make())
    batch = batch_of()
    ids = batch.pop("input_ids")
    bad = ids.clone()
    bad[2, 7] = token
    with pytest.raises(IndexError, match=rf"id {token} .* {VOCAB} entries, 0 to {VOCAB - 1}\."):
        model(bad, **batch) if is_positional else model(input_ids=bad, **batch)
    assert model(input_ids=ids, **batch).loss.isfinite()


def test_ids_and_labels_out_of_range() -> None:
    model = offloaded(LLAMA.make())
    batch = batch_of()
    batch["input_ids"][0, 0] = batch["labels"][0, 0] = VOCAB
    with pytest.raises(ValueError, match=f"label {VOCAB} is out of range"):
        model(**batch)


def test_ids_that_the_model_replaces_itself() -> None:
    """As multimodal models do with image tokens: what reaches the embedding counts."""

    class Replacing(type(LLAMA.make())):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids.clamp(max=VOCAB - 1), **kwargs)

    model = LLAMA.make()
    model.__class__ = Replacing
    batch = batch_of()
    batch["input_ids"][0, 0] = VOCAB + 5
    assert offloaded(model)(**batch).loss.isfinite()


@pytest.mark.parametrize("has_labels", [False, True])
def test_good_tokens_are_looked_at_once(has_labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each look waits for the device."""
    ids = torch.tensor([[1, 2, 3]])
    reads = []
    to_bool = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: reads.append(t) or to_bool(t))
    ranges = TokenRanges(embedding=4, head=4)
    assert not ranges.check([ids], ids if has_labels else None, -100)
    assert len(reads) == 1


def test_shapes_that_do_not_match() -> None:
    model = offloaded(LLAMA.make())
    outcore.AdamW(model)
    batch = batch_of()
    with pytest.raises((ValueError, RuntimeError), match=r"\d"):
        model(input_ids=batch["input_ids"], labels=batch["labels"][:3])
    with pytest.raises((ValueError, RuntimeError, IndexError), match=r"\d|index"):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"][:, :5])
    with pytest.raises((ValueError, RuntimeError, IndexError), match="range"):
        model(input_ids=batch["input_ids"] + VOCAB)
    model(**batch).loss.backward()
    assert len(gradients_of(model)) == len(list(model.parameters()))


def test_an_input_on_another_device() -> None:
    model = offloaded(LLAMA.make())
    with pytest.raises(ValueError, match=r'on meta.*computes on cpu.*\.to\("cpu"\)'):
        model(input_ids=batch_of()["input_ids"].to("meta"))


def test_a_checkpoint_of_another_shape() -> None:
    model = offloaded(LLAMA.make())
    state = LLAMA.make().state_dict()
    state["lm_head.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight.*\[3, 3\]"):
        model.load_state_dict(state)


@pytest.mark.parametrize("method", ["half", "double", "bfloat16"])
def test_casting_is_refused(method: str) -> None:
    model = offloaded(LLAMA.make())
    home = model.model.layers[0].mlp.up_proj.weight.data_ptr()
    with pytest.raises(outcore.OutcoreError, match="offload"):
        getattr(model, method)()
    with pytest.raises(outcore.OutcoreError, match="offload"):
        getattr(model.model, method)()
    with pytest.raises(outcore.OutcoreError, match="offload"):
        getattr(model.model.layers[0], method)()
    with pytest.raises(outcore.OutcoreError, match="offload"):
        model.to(torch.float16)
    assert model.model.layers[0].mlp.up_proj.weight.data_ptr() == home
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


def test_loading_other_parameter_objects_is_refused() -> None:
    model = offloaded(LLAMA.make())
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    before = float(model(**batch_of()).loss)
    with pytest.raises(outcore.OutcoreError, match="assign"):
        model.load_state_dict(state, assign=True)
    assert float(model(**batch_of()).loss) == before
    model.load_state_dict(state)
    assert float(model(**batch_of()).loss) != before


def test_moving_to_where_it_is_already() -> None:
    model = offloaded(LLAMA.make())
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    with pytest.raises(outcore.OutcoreError, match="offload"):
        model.to("meta")
