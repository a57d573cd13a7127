"""Peers: other ways to train the same model, measured beside Outcore on the same machine.

Owns the registry, in which Outcore itself stands first. Each system is one module with
`run(job) -> BenchResult`; it imports its library only inside `run`, so that the registry can be
read where no peer is installed, and a peer uses nothing of Outcore's engine. `runner` starts a
system in a process of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from outcore.bench.job import BenchJob, BenchResult

__all__ = ["PEERS", "Peer", "load_peer", "peer_names"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a peer's code is, and what the peer is, in a line."""

    module: str
    summary: str


PEERS: dict[str, Peer] = {
    "outcore": Peer(
        module="outcore.bench.outcore_run",
        summary="Outcore, with the homes and budgets that the job gives",
    ),
    "native": Peer(
        module="outcore.bench.peers.native",
        summary="PyTorch in device memory, fp32 parameters, autocast, compiled blocks",
    ),
    "torchao": Peer(
        module="outcore.bench.peers.torchao_offload",
        summary="torchao CPUOffloadOptimizer, bf16 parameters, compiled blocks",
    ),
    "roundpipe": Peer(
        module="outcore.bench.peers.roundpipe_peer",
        summary="RoundPipe, everything in host memory, asynchronous update",
    ),
    "deepspeed": Peer(
        module="outcore.bench.peers.deepspeed_zero2",
        summary="DeepSpeed ZeRO-2 with the optimizer on the host, compiled blocks",
    ),
}


def peer_names() -> list[str]:
    """The registered names, in the order of the table."""
    return list(PEERS)


def load_peer(name: str) -> Callable[[BenchJob], BenchResult]:
    """The `run` function of a peer; its library is imported only when it is called."""
    if name not in PEERS:
        raise ValueError(f"no peer named {name!r}; known: {', '.join(PEERS)}")
    run: Callable[[BenchJob], BenchResult] = import_module(PEERS[name].module).run
    return run
