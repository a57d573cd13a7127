"""Every family, offloaded, against plain Hugging Face and torch.optim.AdamW in fp32."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    BETAS,
    FAMILIES,
    LR,
    Family,
    PlainRun,
    batch_of,
    gradients_of,
    groups_of,
    offloaded,
    relative_difference,
    train_plain,
)

import outcore

STEPS = 4


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def test_training_equals_plain_torch(family: Family) -> None:
    """Loss, gradients, gradient norm and weights over several steps; the micro-batch is uneven."""
    batches = [batch_of(family, seed=step) for step in range(STEPS)]
    plain = train_plain(family.make(), batches, foreach=True)
    model = offloaded(family.make())
    optimizer = outcore.AdamW(groups_of(model), lr=LR, betas=BETAS, max_grad_norm=1.0)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if step == 0:
            _assert_gradients_equal(gradients_of(model), plain.first_gradients)
        optimizer.step()
        assert float(loss.detach()) == pytest.approx(plain.losses[step], rel=1e-5)
        assert optimizer.grad_norm == pytest.approx(plain.grad_norms[step], rel=1e-5)
    outcore.synchronize(model)
    ours = dict(model.named_parameters())
    far = {
        name: difference
        for name, theirs in plain.parameters.items()
        if (difference := relative_difference(ours[name], theirs)) > 1e-5
    }
    noise = _noise_of_torch(family, batches, plain, list(far)) if far else {}
    for name, difference in far.items():
        assert noise[name] > 1e-6, f"{name} is {difference:.2g} off"
        assert difference <= 1e-5 + 5 * noise[name], name


def _noise_of_torch(
    family: Family, batches: list[dict[str, Any]], plain: PlainRun, names: list[str]
) -> dict[str, float]:
    """How far torch is from itself at most, where only sums round differently.

    Where gradients are rounding noise (key biases, or one element that happens to be as small as
    Adam's epsilon), Adam makes noise of size lr out of them. Whether one other order of the
    sequences shows it is luck, so many are tried.
    """
    noise = dict.fromkeys(names, 0.0)
    orders = list(permutations(range(len(batches[0]["input_ids"]))))
    for order in orders[1::5]:
        fused = train_plain(family.make(), [_reordered(b, order) for b in batches], fused=True)
        for name in names:
            difference = relative_difference(fused.parameters[name], plain.parameters[name])
            noise[name] = max(noise[name], difference)
    return noise


def _reordered(batch: dict[str, Any], order: tuple[int, ...]) -> dict[str, Any]:
    """The same batch with its sequences in another order."""
    return {k: v[list(order)] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def _assert_gradients_equal(
    ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor | None]
) -> None:
    largest = max(float(grad.norm()) for grad in plain.values() if grad is not None)
    for name, grad in plain.items():
        if grad is None:
            assert name not in ours or not ours[name].any(), f"{name} has a gradient in ours only"
            continue
        assert name in ours, f"{name} has no gradient in ours"
        # The absolute part is for gradients that are zero but for rounding.
        bound = 1e-5 * float(grad.norm()) + 1e-7 * largest
        assert float((ours[name] - grad).norm()) <= bound, name


def test_forward_without_gradients(family: Family) -> None:
    batch = batch_of(family)
    plain, model = family.make().eval(), offloaded(family.make()).eval()
    with torch.no_grad():
        theirs, ours = plain(**batch), model(**batch)
    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=1e-5)
    torch.testing.assert_close(ours.logits + 0, theirs.logits, rtol=1e-5, atol=1e-5)


def test_names_and_save_round_trip(family: Family, tmp_path: Path) -> None:
    plain, model = family.make(), offloaded(family.make())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    optimizer = outcore.AdamW(model, lr=LR)
    model(**batch_of(family)).loss.backward()
    optimizer.step()  # the updates are still under way when the model is saved
    model.save_pretrained(tmp_path)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = family.auto.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    loaded = outcore.load(
        tmp_path, auto_class=family.auto, device="cpu", dtype=torch.float32
    ).state_dict()
    assert again.keys() == expected.keys() == loaded.keys()
    for name, tensor in expected.items():
        assert torch.equal(again[name], tensor), name
        assert torch.equal(loaded[name], tensor), name
    changed = [n for n, p in plain.named_parameters() if not torch.equal(p, expected[n])]
    assert len(changed) > len(expected) / 2, "the step did not reach the saved weights"


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.generates], ids=lambda family: family.name
)
def test_generate(family: Family) -> None:
    batch = batch_of(family, sequences=3, seq_len=6)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    plain, model = family.make().eval(), offloaded(family.make()).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))


def test_from_config_is_born_offloaded(family: Family) -> None:
    """A model made on meta has finite weights of its own, tied where it should be, and trains."""
    torch.manual_seed(0)
    model = outcore.from_config(
        family.config(), auto_class=family.auto, device="cpu", dtype=torch.float32
    )
    reference = family.make()
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in reference.named_parameters()
    }
    for name, tensor in model.state_dict().items():
        assert not tensor.is_meta, name
        assert bool(tensor.isfinite().all()), name
    # Weights of the same spread as the family's own initialisation gives, which starts near log V.
    torch.manual_seed(0)
    own = family.auto.from_config(family.config(), attn_implementation="eager")
    for (name, ours), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        if ours.numel() >= 256:
            spread = float(theirs.detach().std())
            assert float(ours.detach().std()) == pytest.approx(spread, rel=0.35, abs=1e-6), name
        elif ours.dim() == 1 and len(theirs.detach().unique()) == 1:
            assert torch.equal(ours.detach(), theirs.detach()), name
    optimizer = outcore.AdamW(model, lr=LR)
    loss = model(**batch_of(family)).loss
    loss.backward()
    optimizer.step()
    assert float(own(**batch_of(family)).loss.detach()) == pytest.approx(
        float(loss.detach()), rel=0.1
    )
