"""Peers run in processes of their own; one that cannot run becomes a row with the reason."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F

from outcore.bench.job import BenchFailure, BenchJob, BenchResult
from outcore.bench.outcore_run import use_of_lanes
from outcore.bench.peers import PEERS, causal_lm, load_peer, peer_names, runner
from outcore.bench.peers.roundpipe_peer import supported_config, with_current_names
from outcore.bench.peers.runner import run_peer, run_peers
from outcore.shapes import config_from_dict, shape_config, shape_dict
from outcore.timeline import Span

T = TypeVar("T")

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def tiny_job(**changes: object) -> BenchJob:
    fields = {
        "config": shape_dict("qwen2.5-3b", tie_word_embeddings=False, **TINY),
        "sequences": 4,
        "seq_len": 16,
        "warmup_steps": 1,
        "steps": 3,
        "micro_batch": 2,
        "lr": 1e-2,
        **changes,
    }
    return BenchJob(**fields)


def stand_in_peer(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> str:
    """Lets the runner start `body` instead of a peer."""
    (folder / "stand_in_for_a_peer.py").write_text(body)
    monkeypatch.setattr(runner, "_PROCESS_MODULE", "stand_in_for_a_peer")
    monkeypatch.setattr(runner, "_PACKAGE_ROOT", folder)
    return "stand-in"


def test_registry_names_modules_that_import_without_their_libraries() -> None:
    assert peer_names() == ["outcore", "native", "torchao", "roundpipe", "deepspeed"]
    for peer in PEERS.values():
        assert callable(import_module(peer.module).run)


def test_unknown_peer_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="native, torchao"):
        load_peer("natvie")


@pytest.mark.skipif(torch.cuda.is_available(), reason="would compile on the device")
def test_native_runs_in_its_process_and_learns() -> None:
    row = run_peer("native", tiny_job())
    assert isinstance(row, BenchResult), row
    assert len(row.all_step_s) == 3
    assert row.tokens_per_s == pytest.approx(64 / row.step_s)
    assert row.host_rss_bytes > 50 * 2**20
    # ln(300) = 5.70 is what knowing nothing costs.
    assert row.loss < 5.6
    assert row.notes["fp32_master"] is True
    assert row.notes["micro_batch"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="would compile on the device")
def test_outcore_leaves_no_scratch_file_behind_and_notes_what_its_lanes_did(tmp_path: Path) -> None:
    options = {"state": "disk", "disk": str(tmp_path)}
    row = run_peer("outcore", tiny_job(outcore_options=options, records=True))
    assert isinstance(row, BenchResult), row
    assert row.notes["elements_updated"]["disk"] > 0
    for lane in ("disk read", "disk write", "host cores"):
        assert 0 < row.notes["lanes"][lane]["busy_s"] < row.notes["mean_drained_step_s"] * 3
    assert list(tmp_path.iterdir()) == []


def test_use_of_lanes_counts_what_overlaps_and_what_rests() -> None:
    spans = [(0.5, 1.0), (0.75, 1.25), (4.25, 5.0), (5.0, 6.0), (6.5, 7.0)]
    lanes = use_of_lanes(
        [Span(lane="disk read", name="state", start_s=start, end_s=end) for start, end in spans]
    )
    assert lanes == {
        "disk read": {
            "busy_s": 3.0,
            "at_a_time": pytest.approx(3.25 / 3),
            "rests_s": [(0.0, 0.5), (1.25, 3.0), (6.0, 0.5)],
        }
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="would compile on the device")
def test_recomputing_does_not_change_the_loss() -> None:
    kept = load_peer("native")(tiny_job(recompute=False))
    recomputed = load_peer("native")(tiny_job(recompute=True))
    assert recomputed.loss == pytest.approx(kept.loss, rel=1e-5)


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is not None, reason="torchao is installed here"
)
def test_a_missing_library_is_a_row_with_the_reason() -> None:
    row = run_peer("torchao", tiny_job())
    assert isinstance(row, BenchFailure)
    assert "No module named 'torchao'" in row.failed


def test_one_failing_peer_does_not_end_the_table() -> None:
    rows = list(run_peers(["no-such-peer", "nor-this"], tiny_job()))
    assert [row.name for row in rows] == ["no-such-peer", "nor-this"]
    assert all(isinstance(row, BenchFailure) for row in rows)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory"),
        ("import sys; sys.exit('no licence')", "status 1: no licence"),
        ("print('hello')", "no row"),
    ],
)
def test_a_crash_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, reason: str
) -> None:
    row = run_peer(stand_in_peer(monkeypatch, tmp_path, body), tiny_job())
    assert isinstance(row, BenchFailure)
    assert reason in row.failed


def test_a_peer_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = stand_in_peer(monkeypatch, tmp_path, "import time; time.sleep(600)")
    row = run_peer(name, tiny_job(), limit_s=1.0)
    assert isinstance(row, BenchFailure)
    assert "within 1 s" in row.failed


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_peer_ends_with_its_parent() -> None:
    job = tiny_job(steps=10**6).to_json()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from outcore.bench.job import BenchJob; "
            "from outcore.bench.peers.runner import run_peer; "
            "run_peer('native', BenchJob.from_json(sys.argv[1]))",
            job,
        ]
    )
    try:
        child = wait_for(lambda: children_of(parent.pid))
        parent.kill()
        parent.wait()
        assert wait_for(lambda: not is_running(child[0])), "the peer outlives its parent"
    finally:
        parent.kill()


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], T], timeout_s: float = 60) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_chunked_head_gives_the_gradients_of_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(causal_lm, "HEAD_CHUNK_TOKENS", 24)  # does not divide 64: a short last one
    job, cpu = tiny_job(), torch.device("cpu")
    config = config_from_dict(job.config)
    model = causal_lm.build_model(config, device=cpu, dtype=torch.float32, seed=0)
    ids, targets = causal_lm.random_batch(job, cpu)

    plain = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())
    parameters = list(model.parameters())
    expected = torch.autograd.grad(plain, parameters)

    chunked = causal_lm.CausalLMLoss(model, compiled=False, recompute=True)(ids, targets)
    torch.autograd.backward(chunked)
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close([p.grad for p in parameters], list(expected))


def test_a_head_that_caps_its_logits_is_refused() -> None:
    config = config_from_dict({"model_type": "gemma2", **TINY, "head_dim": 16})
    model = causal_lm.build_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        causal_lm.CausalLMLoss(model, compiled=False, recompute=False)


def test_roundpipe_gets_a_llama_of_the_same_shape() -> None:
    qwen = shape_config("qwen2.5-3b", tie_word_embeddings=False)
    llama = supported_config(qwen)
    assert llama.model_type == "llama"
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        assert getattr(llama, name) == getattr(qwen, name)
    assert llama.tie_word_embeddings is False
    qwen3 = shape_config("qwen3-8b")
    assert supported_config(qwen3) is qwen3
    with pytest.raises(ValueError, match="gemma3_text"):
        supported_config(shape_config("gemma-3-1b"))


def test_renamed_mask_argument_is_passed_on_and_removed_ones_are_dropped() -> None:
    def create_mask(*, inputs_embeds: str, attention_mask: None) -> tuple[str, None]:
        return inputs_embeds, attention_mask

    adapted = with_current_names(create_mask)
    assert adapted(input_embeds="x", attention_mask=None, cache_position=3) == ("x", None)
