"""An offloaded model is still a Hugging Face model: losses, outputs, gradients, modes."""

from __future__ import annotations

from collections.abc import Callable
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
from torch.nn import functional as F

import outcore

LLAMA = BY_NAME["llama"]
LossOf = Callable[[Any], Tensor]


def with_optimizer(model: Any, **adamw: Any) -> tuple[Any, outcore.AdamW]:
    return model, outcore.AdamW(model, lr=LR, **adamw)


def assert_same_gradients(
    loss_of: LossOf, family: Family = LLAMA, bound: float = 1e-5, **options: Any
) -> None:
    """``loss_of`` gives the same loss and gradients on the plain and on the offloaded model."""
    plain = family.make()
    theirs = loss_of(plain)
    theirs.backward()
    model, _ = with_optimizer(offloaded(family.make(), **options))
    ours = loss_of(model)
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    found = gradients_of(model)
    largest = max(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert name not in found or not found[name].any(), name
        else:
            limit = bound * float(parameter.grad.norm()) + 1e-7 * largest
            assert float((found[name] - parameter.grad).norm()) <= limit, name


# Losses


def test_custom_loss_on_logits() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return (logits.log_softmax(-1)[..., 5] ** 2).mean() + logits[:, 3].tanh().sum()

    assert_same_gradients(loss_of)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_outside_the_model(reduction: str, label_smoothing: float) -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB),
            batch["labels"][:, 1:].reshape(-1),
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return loss.square().sum() if reduction == "none" else loss

    assert_same_gradients(loss_of)


def test_cross_entropy_with_classes_in_the_middle() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"])

    assert_same_gradients(loss_of)


def test_number_of_items_in_the_batch() -> None:
    batch = batch_of()
    assert_same_gradients(lambda model: model(**batch, num_items_in_batch=17).loss)


def test_loss_times_a_factor() -> None:
    batch = batch_of()
    assert_same_gradients(lambda model: model(**batch).loss * 3.5 + 1)


def test_loss_and_a_penalty_on_its_logits() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(**batch)
        return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()

    assert_same_gradients(loss_of)


def test_custom_loss_on_hidden_states() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(**batch, output_hidden_states=True)
        assert len(output.hidden_states) == 4
        return output.loss + sum(h.square().mean() for h in output.hidden_states)

    assert_same_gradients(loss_of)


def test_custom_loss_through_the_inner_model() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
        return model.lm_head(hidden).square().mean()

    assert_same_gradients(loss_of)


def test_a_loss_that_is_an_autograd_function_of_its_own() -> None:
    batch = batch_of()

    class SquareSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (x * x).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * grad * ctx.saved_tensors[0]

    assert_same_gradients(lambda model: SquareSum.apply(model(input_ids=batch["input_ids"]).logits))


def test_logits_that_were_first_read_without_gradients() -> None:
    """An accuracy is often computed under no_grad before the loss."""
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        with torch.no_grad():
            (logits.argmax(-1) == batch["labels"]).float().mean()
        return F.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1))

    assert_same_gradients(loss_of)


def test_mixed_losses_of_logits_read_without_gradients() -> None:
    """As before, but with a second term that has gradients and so hides the missing ones."""
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(input_ids=batch["input_ids"], output_hidden_states=True)
        with torch.no_grad():
            output.logits.argmax(-1)
        return output.logits.square().mean() + output.hidden_states[1].square().mean()

    assert_same_gradients(loss_of)


def test_logits_are_usable_like_a_tensor() -> None:
    batch = batch_of()
    expected = LLAMA.make()(**batch).logits.detach()
    logits = offloaded(LLAMA.make())(**batch).logits
    assert isinstance(logits, Tensor)
    assert logits.shape == expected.shape
    assert logits.size(-1) == VOCAB
    assert logits.dtype == torch.float32
    assert logits.requires_grad
    assert len(logits) == len(expected)
    for function in (
        lambda x: x.argmax(-1),
        lambda x: x.detach().numpy(),
        lambda x: x[0, 1].tolist(),
        lambda x: torch.stack([x, x])[1, 2],
        lambda x: torch.cat((x, x)).float().cpu(),
        lambda x: x.softmax(-1).topk(3).indices,
        lambda x: next(iter(x)),
        lambda x: x.clone().mul_(2),
        lambda x: x.to(torch.float64).sum(),
        lambda x: (x / 2).tanh() * 2,
        lambda x: x[..., 0],
        lambda x: x[:, -1:, :].contiguous(),
        lambda x: x.reshape(-1),
        lambda x: x.view(-1, VOCAB)[3],
        lambda x: x.gather(-1, batch["input_ids"].unsqueeze(-1)),
    ):
        ours, theirs = function(logits), function(expected)
        torch.testing.assert_close(
            torch.as_tensor(ours).detach(), torch.as_tensor(theirs), rtol=1e-5, atol=1e-5
        )


def test_logits_after_the_loss_and_its_backward() -> None:
    batch = batch_of()
    expected = LLAMA.make()(**batch).logits.detach()
    model, _ = with_optimizer(offloaded(LLAMA.make()))
    output = model(**batch)
    output.loss.backward()
    torch.testing.assert_close(output.logits.detach(), expected, rtol=1e-5, atol=1e-5)


def test_logits_after_the_step_are_not_those_of_the_new_weights() -> None:
    """Either the logits of the forward, or an error: never other values."""
    batch = batch_of()
    expected = LLAMA.make()(**batch).logits.detach()
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    optimizer.synchronize()
    try:
        logits = output.logits.detach()
    except RuntimeError:
        return
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_all_labels_masked() -> None:
    batch = batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    theirs = LLAMA.make()(**batch).loss
    ours = offloaded(LLAMA.make())(**batch).loss
    assert torch.equal(ours.detach().isnan(), theirs.detach().isnan())


def test_mean_of_chunks_is_the_mean_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a chunk holds: chunks of 64 rows out of 5 x 40."""
    monkeypatch.setattr("outcore.engine.chunked_loss.CHUNK_LOGITS", 64 * VOCAB)
    batch = batch_of(seq_len=40)
    assert_same_gradients(lambda model: model(**batch).loss)
    assert_same_gradients(lambda model: model(**batch).loss, BY_NAME["gemma2"])
    assert_same_gradients(lambda model: model(**batch).loss, BY_NAME["bert"])


def test_the_logits_of_a_whole_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == VOCAB:
            rows.append(x.shape[:-1].numel())
        return linear(x, weight, bias)

    monkeypatch.setattr("outcore.engine.chunked_loss.CHUNK_LOGITS", 64 * VOCAB)
    monkeypatch.setattr(F, "linear", watched)
    for family in (LLAMA, BY_NAME["gemma2"], BY_NAME["granite"], BY_NAME["cohere"]):
        rows.clear()
        model, _ = with_optimizer(offloaded(family.make()))
        model(**batch_of(seq_len=40)).loss.backward()
        assert rows, family.name
        assert max(rows) <= 64, family.name


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


def test_peft_lora() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])

    def make() -> Any:
        model = peft.get_peft_model(LLAMA.make(), config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model

    family = Family(name="lora", config=LLAMA.config)
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
