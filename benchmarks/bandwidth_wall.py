"""From how many tokens a step does streaming cost nothing? By the simulator, for sizes and links.

    python benchmarks/bandwidth_wall.py [--svg FILE [--measured FILE]] [--json FILE]

Everything on the host, full recomputation, three slots; the device and host of the H200 machine of
the catalogue, with other links. "Costs nothing" is when the step is within 5% of the same step
with everything resident. Prints a table; --svg draws the share of resident speed over tokens, with
what was measured on such a machine as dots.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from charts import Axis, Line, Panel, drawing

from outcore.machine import machine_named
from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec, model_spec
from outcore.planning.choices import Choice
from outcore.planning.plan import Job
from outcore.planning.search import plan_of

SEQ_LEN = 1024
SHAPES = {
    "1B": "gemma-3-1b",
    "3B": "qwen2.5-3b",
    "7B": "qwen2.5-7b",
    "14B": "qwen2.5-14b",
    "32B": "qwen2.5-32b",
    "70B": "llama-3.1-70b",
}
LINKS = {"PCIe 3": 12e9, "PCIe 4": 24e9, "PCIe 5": 55e9, "900 GB/s": 380e9}
TOKENS = [1024 * 2**i for i in range(9)]
CLOSE = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, help="where the drawing goes")
    parser.add_argument("--measured", type=Path, help="what bandwidth_wall_measured.py wrote")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    base = machine_named("h200-pcie5")
    found: dict[str, Any] = {}
    for clips in (False, True):
        print(f"\n{'clipping' if clips else 'no clipping'}: tokens a step from which it is free")
        print("| model | " + " | ".join(LINKS) + " |")
        print("|---|" + "---|" * len(LINKS))
        for size, shape in SHAPES.items():
            spec = model_spec(shape)
            cells = []
            for link, bytes_s in LINKS.items():
                shares = [share(spec, linked(base, bytes_s), n, clips) for n in TOKENS]
                found[f"{size}, {link}, {'clipping' if clips else 'no clipping'}"] = shares
                cells.append(first_free(spec, linked(base, bytes_s), shares, clips))
            print(f"| {size} | " + " | ".join(cells) + " |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"tokens": TOKENS, "shares": found}, indent=1))
    if arguments.svg is not None:
        arguments.svg.write_text(picture(found, arguments.measured), encoding="utf-8")


def linked(machine: Machine, bytes_s: float) -> Machine:
    """Return the machine with another link."""
    return replace(
        machine,
        to_device_bytes_s=bytes_s,
        to_host_bytes_s=bytes_s,
        both_ways_bytes_s=bytes_s * 0.9,
    )


def share(spec: ModelSpec, machine: Machine, tokens: int, clips: bool) -> float:
    """Return the speed of the streamed step as a share of the resident one's."""
    n, job = (
        len(spec.blocks),
        Job(tokens=tokens, seq_len=SEQ_LEN, clipping="waiting" if clips else "none"),
    )
    resident = Choice(first_device_weights=n, first_device_state=n, edge_state=0)
    steps = [
        plan_of(spec, machine, job, choice.placement(n, min(8, job.sequences))).prediction.step_s
        for choice in (resident, Choice(num_visits=3))
    ]
    return steps[0] / steps[1]


def first_free(spec: ModelSpec, machine: Machine, shares: list[float], clips: bool) -> str:
    """Return the fewest tokens, in whole sequences, from which streaming is free."""
    high = next((n for n, s in zip(TOKENS, shares, strict=True) if s >= 1 / CLOSE), None)
    if high is None:
        return f"more than {TOKENS[-1]:,}"
    low = high // 2
    while high - low > SEQ_LEN:
        middle = (low + high) // 2 // SEQ_LEN * SEQ_LEN
        is_free = share(spec, machine, middle, clips) >= 1 / CLOSE
        low, high = (low, middle) if is_free else (middle, high)
    return f"{high:,}"


def picture(found: dict[str, Any], measured: Path | None) -> str:
    """Return a panel for each link; what was measured is of a machine with PCIe 5."""
    rows = json.loads(measured.read_text())["rows"] if measured is not None else []
    panels = [panel(link, found, rows if link == "PCIe 5" else []) for link in LINKS]
    return drawing("Speed of a streamed step as a share of the resident one's", panels)


def panel(link: str, found: dict[str, Any], measured: list[dict[str, Any]]) -> Panel:
    """Return the shares over tokens for one link, without clipping."""
    dots = {
        size: [
            (
                row["streamed"]["tokens"],
                row["resident"]["measured_s"] / row["streamed"]["measured_s"],
            )
            for row in measured
            if row["shape"] == shape and not row["clips"]
        ]
        for size, shape in SHAPES.items()
    }
    lines = [
        Line(
            name=size,
            points=list(zip(TOKENS, found[f"{size}, {link}, no clipping"], strict=True)),
            dots=dots[size],
        )
        for size in SHAPES
    ]
    return Panel(
        title=link,
        x=Axis(
            title="tokens a step",
            ticks=[(tokens, f"{tokens // 1024}K") for tokens in TOKENS],
            is_log=True,
        ),
        y=Axis(
            title="of resident speed",
            ticks=[(percent / 100, f"{percent}%") for percent in (0, 25, 50, 75, 100)],
        ),
        lines=lines,
        marks=[1 / CLOSE],
    )


if __name__ == "__main__":
    main()
