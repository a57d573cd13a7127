"""How fast data becomes tokens: rows a second and tokens a second, by kind of row.

The text is that of Python's standard library (documentation and code), as plain text, as chats and
as prompts with completions. The tokenizer is a byte-level BPE of 32,768 tokens trained on it, or
one that is named. Everything is counted: reading, templates, finding answers, writing the cache
with its checksums.

    python benchmarks/tokens.py --json FILE [--tokenizer DIR] [--num-workers 2]
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outcore.cli.machine import machine_facts
from outcore.data.batches import Batches, BatchOptions
from outcore.data.tokenize import tokenize

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECE_CHARACTERS = 1200  # of one turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--tokenizer", help="a directory")
    parser.add_argument("--num-workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--megabytes", type=int, default=30, help="of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = library_text(arguments.megabytes * 1_000_000)
        tokenizer = (
            AutoTokenizer.from_pretrained(arguments.tokenizer)
            if arguments.tokenizer
            else trained_tokenizer(text[:3_000_000])
        )
        rows = [measure(kind, folder, text, tokenizer, arguments.num_workers) for kind in WRITERS]
    report = {"machine": machine_facts(), "num_workers": arguments.num_workers, "rows": rows}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['kind']:18s} {row['tokens_per_s']:>10,.0f} tokens/s tokenised, "
            f"{row['batch_tokens_per_s']:>12,.0f} tokens/s packed into batches"
        )


def measure(kind: str, folder: Path, text: str, tokenizer: Any, num_workers: int) -> dict[str, Any]:
    path = WRITERS[kind](folder, text)
    start = time.perf_counter()
    cache = tokenize(path, tokenizer, cache_dir=folder / "cache", num_workers=num_workers)
    seconds = time.perf_counter() - start
    options = BatchOptions(batch_size=16, seq_len=2048, num_epochs=1)
    with Batches(cache, options) as batches:
        start = time.perf_counter()
        num_batched = sum(batch["input_ids"].numel() for batch in batches)
        batch_s = time.perf_counter() - start
    return {
        "kind": kind,
        "num_bytes": path.stat().st_size,
        "num_tokens": cache.num_tokens,
        "seconds": seconds,
        "tokens_per_s": cache.num_tokens / seconds,
        "batch_tokens_per_s": num_batched / batch_s,
    }


def library_text(num_characters: int) -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for source in sorted(library.rglob("*.py")):
        parts.append(source.read_text("utf-8", "ignore").replace("\0", ""))
        size += len(parts[-1])
        if size > num_characters:
            break
    return "\n".join(parts)[:num_characters]


def write_plain(folder: Path, text: str) -> Path:
    path = folder / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


def write_chats(folder: Path, text: str) -> Path:
    pieces = _pieces(text)
    rows = (
        {
            "messages": [
                {"role": "user" if i % 2 == 0 else "assistant", "content": piece}
                for i, piece in enumerate(four)
            ]
        }
        for four in zip(pieces[::4], pieces[1::4], pieces[2::4], pieces[3::4], strict=False)
    )
    return _write(folder / "chats.jsonl", rows)


def write_completions(folder: Path, text: str) -> Path:
    pieces = _pieces(text)
    rows = (
        {"prompt": prompt, "completion": completion}
        for prompt, completion in zip(pieces[::2], pieces[1::2], strict=False)
    )
    return _write(folder / "completions.jsonl", rows)


WRITERS = {"text": write_plain, "messages": write_chats, "prompt-completion": write_completions}


def _pieces(text: str) -> list[str]:
    return [text[i : i + PIECE_CHARACTERS] for i in range(0, len(text), PIECE_CHARACTERS)]


def _write(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def trained_tokenizer(text: str) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=32_768,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=special[1:]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    main()
