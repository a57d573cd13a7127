"""The LoRA benchmark runs through on a CPU, with a tiny model in the place of the 72B one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import script
from transformers import Qwen2Config

pytest.importorskip("peft")


@pytest.mark.parametrize("frozen_weights", ["int4", "int8"])
def test_a_tiny_model_runs_through(frozen_weights: str, tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    file = tmp_path / "lora.json"
    words = ["--json", str(file), "--model", str(tmp_path / "config.json")]
    words += ["--frozen-weights", frozen_weights, "--machine", "h200-pcie5", "--rank", "4"]
    words += ["--device-memory", "512MiB", "--host-memory", "512MiB"]
    words += ["--sequences", "4", "--seq-len", "32", "--steps", "2", "--warmup-steps", "1"]
    script("lora_72b").main(words)
    report = json.loads(file.read_text())
    block = 128 * 128 * 2 + 2 * 128 * 64 + 128 + 2 * 64 + 3 * 128 * 352 + 2 * 128
    parameters = 3 * block + 512 * 128
    counted = 4 * parameters * 128 + 4 * 3 * 128 * 32 * 128
    assert report["tflops"] * report["step_s"] * 1e12 == pytest.approx(counted)
    assert report["tokens_per_s"] == pytest.approx(128 / report["step_s"])
    assert "4/6" in report["counted"]
    assert report["device_purposes_bytes"]["expanded weights"] > 0
    assert 0 < report["device_peak_bytes"] <= 512 << 20
    assert report["host_rss_bytes"] >= report["host_rss_peak_when_built_bytes"] > 0
    assert report["losses"][-1] < report["losses"][0]
    assert report["plan"]["plan"]["job"]["frozen_weights"] == frozen_weights
