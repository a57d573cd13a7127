"""An offloaded model is still a Hugging Face model: outputs, gradients, modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import (
    BY_NAME,
    LR,
    VOCAB,
    Family,
    batch_of,
    gradients_of,
    offloaded,
    relative_difference,
)
from torch import Tensor
from training import LLAMA, assert_same_gradients, with_optimizer
from transformers import DynamicCache

import outcore
from outcore.passes.micro_batch import MicroBatches

# Outputs and inputs


def test_router_logits_and_their_loss() -> None:
    family, batch = BY_NAME["mixtral-router"], batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(**batch, output_router_logits=True)
        assert len(output.router_logits) == 3
        assert output.router_logits[0].shape == (5 * 12, 4)
        return output.loss + sum(r.square().mean() for r in output.router_logits)

    assert_same_gradients(loss_of, family)
    assert_same_gradients(loss_of, family, activations="keep")


def test_attention_weights() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(**batch, output_attentions=True)
        assert [tuple(a.shape) for a in output.attentions] == [(5, 4, 12, 12)] * 3
        return output.loss + sum(a.square().sum() for a in output.attentions)

    assert_same_gradients(loss_of)


def test_gradient_of_input_embeddings() -> None:
    batch, grads = batch_of(), []
    for model in (LLAMA.make(), with_optimizer(offloaded(LLAMA.make()))[0]):
        embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        model(
            inputs_embeds=embeddings,
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
        ).loss.backward()
        grads.append(embeddings.grad)
    assert relative_difference(grads[1], grads[0]) <= 1e-5


def test_gradient_of_encoder_states() -> None:
    family = BY_NAME["t5"]
    batch, grads = batch_of(family), []
    for model in (family.make(), with_optimizer(offloaded(family.make()))[0]):
        torch.manual_seed(5)
        states = torch.randn(5, 12, 32).requires_grad_()
        model(
            encoder_outputs=(states,),
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
        ).loss.backward()
        grads.append(states.grad)
    assert relative_difference(grads[1], grads[0]) <= 1e-5


def test_autograd_grad_leaves_no_gradient_behind() -> None:
    """torch.autograd.grad gives what was asked for and adds nothing to parameters."""
    model, _ = with_optimizer(offloaded(LLAMA.make()))
    batch = batch_of()
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=batch["labels"]).loss
    (grad,) = torch.autograd.grad(loss, embeddings)
    assert grad.abs().sum() > 0
    assert gradients_of(model) == {}


@pytest.mark.parametrize("sequences", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("micro_batch", [1, 2, 7, None])
def test_batches_that_micro_batches_do_not_divide(sequences: int, micro_batch: int | None) -> None:
    """12 sequences of 12 tokens: batch and length cannot be told apart by size."""
    batch = batch_of(sequences=sequences)
    for family in (LLAMA, BY_NAME["t5"], BY_NAME["gpt2"]):
        batch = batch_of(family, sequences=sequences)
        assert_same_gradients(
            lambda model, batch=batch: model(**batch).loss, family, micro_batch=micro_batch
        )


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("sequences", [4, 6])
def test_tables_as_long_as_the_batch(micro_batch: int, sequences: int) -> None:
    """MPT's position bias is (heads, 1, length): with 4 heads and 4 sequences it is no batch."""
    import transformers as hf

    family = Family(
        name="mpt",
        config=lambda: hf.MptConfig(
            vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=3, max_seq_len=64
        ),
    )
    batch = batch_of(sequences=sequences)
    assert_same_gradients(lambda model: model(**batch).loss, family, micro_batch=micro_batch)


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("sequences", [3, 4])
def test_multimodal_rotary_tables(micro_batch: int, sequences: int) -> None:
    """Qwen2-VL's rotary tables are (3, batch, length, dim): the batch is not their first axis."""
    import transformers as hf

    def config() -> Any:
        text = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            },
            "pad_token_id": 0,
        }
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
        return hf.Qwen2VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=90,
            video_token_id=91,
            vision_start_token_id=92,
            vision_end_token_id=93,
        )

    family = Family(name="qwen2-vl", config=config, auto=hf.AutoModelForImageTextToText)
    batch = batch_of(sequences=sequences)
    batch["input_ids"] = batch["input_ids"].clamp(max=80)
    assert_same_gradients(lambda model: model(**batch).loss, family, micro_batch=micro_batch)


def test_an_axis_of_the_batchs_size_is_not_taken_for_it() -> None:
    """The same without a model: newer transformers give Qwen2-VL's blocks another table."""
    hidden, table = torch.zeros(3, 12, 32), torch.zeros(3, 3, 12, 8)
    assert not MicroBatches([hidden, table], 1).is_split
    for mask in (torch.zeros(3, 1, 12, 12), torch.zeros(3, 4, 12, 12), torch.zeros(1, 3, 12, 12)):
        assert MicroBatches([hidden, mask], 1).bounds == [(0, 1), (1, 2), (2, 3)]


def test_other_heads_and_modalities() -> None:
    import transformers as hf

    classifier = Family(
        name="classifier",
        config=lambda: _with_labels(BY_NAME["llama"].config(), 5),
        auto=hf.AutoModelForSequenceClassification,
    )
    batch = batch_of()
    batch["labels"] = torch.tensor([0, 1, 2, 3, 4])
    assert_same_gradients(lambda model: model(**batch).loss, classifier)
    vit = Family(
        name="vit",
        config=lambda: hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            num_labels=5,
        ),
        auto=hf.AutoModelForImageClassification,
    )
    torch.manual_seed(0)
    images = torch.randn(5, 3, 16, 16)
    assert_same_gradients(
        lambda model: model(pixel_values=images, labels=batch["labels"]).loss, vit
    )


def _with_labels(config: Any, num_labels: int) -> Any:
    config.num_labels = num_labels
    return config


# Modes


def _with_dropout() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64, pad_token_id=0
    )
    return hf.AutoModelForCausalLM.from_config(config)


def test_train_and_eval() -> None:
    batch = batch_of()
    model = offloaded(_with_dropout())
    model.train()
    assert float(model(**batch).loss.detach()) != float(model(**batch).loss.detach())
    model.eval()
    assert not model.transformer.h[0].training
    first, second = (float(model(**batch).loss.detach()) for _ in range(2))
    assert first == second
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("micro_batch", [2, 5])
def test_dropout_in_the_recompute(micro_batch: int) -> None:
    """Recomputed and kept blocks give the same bits, and leave the generator as it was."""
    found = []
    for activations in ("keep", "recompute"):
        model, _ = with_optimizer(
            offloaded(_with_dropout().train(), activations=activations, micro_batch=micro_batch)
        )
        torch.manual_seed(3)
        loss = model(**batch_of()).loss
        after_forward = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), after_forward)
        found.append((loss.detach(), gradients_of(model)))
    assert torch.equal(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        assert torch.equal(grad, found[1][1][name]), name


def test_dropout_draws_for_every_sequence() -> None:
    """Two micro-batches of the same sequence must not drop the same elements."""
    model = offloaded(_with_dropout().train(), micro_batch=1)
    batch = batch_of(sequences=2)
    for name in ("input_ids", "attention_mask"):
        batch[name] = batch[name][1:].expand(2, -1).contiguous()
    logits = model(**batch).logits.detach()
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_flags(when: str, use_reentrant: bool) -> None:
    batch = batch_of()
    options = {"use_reentrant": use_reentrant}
    plain = LLAMA.make().train()
    plain(**batch).loss.backward()
    model = LLAMA.make().train()
    if when == "before":
        model.gradient_checkpointing_enable(options)
    model, _ = with_optimizer(offloaded(model))
    if when == "after":
        model.gradient_checkpointing_enable(options)
    # Blocks keep or recompute by themselves, and would do so twice.
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    model(**batch).loss.backward()
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name


def test_tied_embeddings_stay_tied() -> None:
    model, optimizer = with_optimizer(offloaded(BY_NAME["llama-tied"].make()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model.lm_head.weight.detach().clone()
    model(**batch_of()).loss.backward()
    optimizer.step()
    outcore.synchronize(model)
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("by_position", [False, True])
def test_a_cache_is_refused_in_training(by_position: bool) -> None:
    """Also of the inner model, whose fourth argument it is."""
    model, cache = offloaded(LLAMA.make()), DynamicCache()
    ids = batch_of()["input_ids"]

    def call() -> None:
        if by_position:
            model.model(ids, None, None, cache)
        else:
            model.model(ids, past_key_values=cache)

    with pytest.raises(ValueError, match="past_key_values"):
        call()
    with torch.no_grad():
        call()
    assert cache.get_seq_length() == ids.shape[1]


def test_use_cache_is_ignored_in_training() -> None:
    batch = batch_of()
    model, _ = with_optimizer(offloaded(LLAMA.make()))
    with pytest.warns(UserWarning, match="use_cache"):
        model(**batch, use_cache=True).loss.backward()
    plain = LLAMA.make()
    plain(**batch, use_cache=False).loss.backward()
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name


def test_generate_between_steps() -> None:
    """Generation uses the new weights, and does not disturb the training around it."""
    family, batch = LLAMA, batch_of(sequences=4)
    prompt = batch["input_ids"][1:3, :4]
    weights = []
    for generates in (False, True):
        model, optimizer = with_optimizer(offloaded(family.make()))
        for step in range(3):
            model(**batch_of(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if generates:
                ours = model.generate(prompt, max_new_tokens=4, do_sample=False)
                plain = family.make()
                plain.load_state_dict(model.state_dict())
                assert torch.equal(ours, plain.generate(prompt, max_new_tokens=4, do_sample=False))
        weights.append({n: t.clone() for n, t in model.state_dict().items()})
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def test_load_state_dict_of_the_model() -> None:
    """Values that are loaded later count, also for blocks that are in slots, and in later steps."""
    family, batch = LLAMA, batch_of()
    for options in (
        {},
        {"weights": "device"},
        {"num_slots": 4},
        {"weights": "device", "num_visits": 2},
    ):
        model, optimizer = with_optimizer(offloaded(family.make(), **options))
        model(**batch).loss.backward()
        optimizer.step()
        other = family.make(seed=7)
        model.load_state_dict(other.state_dict())
        with torch.no_grad():
            assert float(model(**batch).loss) == pytest.approx(float(other(**batch).loss), rel=1e-5)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        outcore.synchronize(model)
        for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            assert float((ours - theirs).detach().abs().max()) <= 3 * LR, name


def test_parameters_written_in_place_count() -> None:
    """Whoever writes a parameter directly must not train on an older copy in a slot."""
    batch = batch_of()
    for options in ({"num_slots": 4}, {"weights": "device"}):
        model, optimizer = with_optimizer(offloaded(LLAMA.make(), **options))
        plain = LLAMA.make()
        with torch.no_grad():
            model(**batch)
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(1.5)
            assert float(model(**batch).loss) == pytest.approx(float(plain(**batch).loss), rel=1e-5)
        model(**batch).loss.backward()
        optimizer.step()
        outcore.synchronize(model)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert float((ours - theirs).detach().abs().max()) <= 3 * LR, name


def test_two_models_side_by_side() -> None:
    batches = [batch_of(seed=step) for step in range(3)]
    alone = []
    for seed in (0, 7):
        model, optimizer = with_optimizer(offloaded(LLAMA.make(seed)))
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        alone.append({n: t.clone() for n, t in model.state_dict().items()})
    pairs = [with_optimizer(offloaded(LLAMA.make(seed))) for seed in (0, 7)]
    for batch in batches:
        losses = [model(**batch).loss for model, _ in pairs]
        sum(losses).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    for expected, (model, _) in zip(alone, pairs, strict=True):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ["q_proj", "v_proj", "down_proj"]), ("mixtral", "all-linear")],  # fused experts
)
def test_peft_lora(name: str, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    plain = BY_NAME[name]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")

    def make() -> Any:
        model = peft.get_peft_model(plain.make(), config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model

    family = Family(name="lora", config=plain.config)
    object.__setattr__(family, "make", make)
    batch = batch_of()
    assert_same_gradients(lambda model: model(**batch).loss, family)
    assert_same_gradients(lambda model: model(**batch).loss, family, activations="keep")


def test_peft_lora_trains_and_saves(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model, optimizer = with_optimizer(offloaded(peft.get_peft_model(LLAMA.make(), config)))
    frozen = model.base_model.model.lm_head.weight.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        model(**batch_of(seed=step)).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(LLAMA.make(), tmp_path)
    assert torch.equal(model.base_model.model.lm_head.weight, frozen)
    with torch.no_grad():
        assert float(again(**batch_of()).loss) == pytest.approx(
            float(model(**batch_of()).loss), rel=1e-5
        )
