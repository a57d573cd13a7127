"""A plain PyTorch loop: an offloaded model, a DataLoader, loss.backward(), optimizer.step().

python examples/plain_loop.py                                     # a tiny model, in seconds
python examples/plain_loop.py --model DIR --device-memory 24GiB   # one of your own
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig

import outcore

TINY = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LENGTH = 24


def sums(model: str | None) -> list[dict[str, Tensor]]:
    """Sentences such as "3 plus 4 is 7." as tokens; the padding does not count for the loss."""
    texts = [f"{a} plus {b} is {a + b}." for a in range(10) for b in range(10)]
    if model is None:
        rows = [list(text.encode()) for text in texts]
    else:
        rows = AutoTokenizer.from_pretrained(model)(texts)["input_ids"]
    padded = [(row + [0] * LENGTH)[:LENGTH] for row in rows]
    return [
        {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor((row + [-100] * LENGTH)[:LENGTH]),
            "attention_mask": torch.arange(LENGTH).lt(len(row)).long(),
        }
        for ids, row in zip(padded, rows, strict=True)
    ]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory or Hub id; a tiny Llama without")
    parser.add_argument("--device-memory", help="a budget such as 24GiB; what is free without")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", help="where to save the model")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    placement = {"device": device, "device_memory": options.device_memory}
    if options.model is None:
        model = outcore.from_config(TINY, **placement)
    else:
        model = outcore.load(options.model, **placement)
    model.train()
    optimizer = outcore.AdamW(model, lr=3e-3 if options.model is None else 1e-5, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    loader = DataLoader(sums(options.model), batch_size=20, shuffle=True)  # type: ignore[arg-type]

    losses: list[float] = []
    while len(losses) < options.steps:
        for batch in loader:
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f}, norm {optimizer.grad_norm:.2f}")
            if len(losses) == options.steps:
                break
    if options.output:
        model.save_pretrained(options.output)
    return losses


if __name__ == "__main__":
    main()
