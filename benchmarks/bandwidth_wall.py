"""From how many tokens a step does streaming cost nothing? By the simulator, for sizes and links.

    python benchmarks/bandwidth_wall.py [--svg FILE] [--json FILE]

Everything on the host, full recomputation, three slots; the device and host of the H200 machine of
the catalogue, with other links. "Costs nothing" is when the step is within 5% of the same step
with everything resident. Prints a table; --svg draws the share of resident speed over tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
        arguments.svg.write_text(drawing(found), encoding="utf-8")


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


def drawing(found: dict[str, Any]) -> str:
    """Return the shares over tokens for PCIe 5 and PCIe 4, without clipping, as SVG."""
    width, height, left, bottom = 640, 300, 50, 40
    lines = []
    colours = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
    for (size, _), colour in zip(SHAPES.items(), colours, strict=True):
        for link, dash in (("PCIe 5", ""), ("PCIe 4", ' stroke-dasharray="5 4"')):
            points = " ".join(
                f"{left + i * (width - left - 90) / (len(TOKENS) - 1):.1f},"
                f"{(height - bottom) * (1 - value):.1f}"
                for i, value in enumerate(found[f"{size}, {link}, no clipping"])
            )
            lines.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}>'
                f"<title>{size}, {link}</title></polyline>"
            )
        y = 20 + 18 * list(SHAPES).index(size)
        lines.append(f'<text x="{width - 70}" y="{y}" fill="{colour}">{size}</text>')
    for i, tokens in enumerate(TOKENS):
        x = left + i * (width - left - 90) / (len(TOKENS) - 1)
        lines.append(f'<text x="{x - 14:.0f}" y="{height - 20}">{tokens // 1024}K</text>')
    for percent in (25, 50, 75, 100):
        y = (height - bottom) * (1 - percent / 100)
        lines.append(f'<text x="4" y="{y + 12:.0f}">{percent}%</text>')
        lines.append(
            f'<line x1="{left}" x2="{width - 90}" y1="{y:.0f}" y2="{y:.0f}" stroke="#8884"/>'
        )
    caption = "tokens a step; speed as a share of resident; PCIe 5 solid, PCIe 4 dashed"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{caption}" font-family="sans-serif" font-size="12" fill="#777">'
        f'{"".join(lines)}<text x="{left}" y="{height - 4}">{caption}</text></svg>\n'
    )


if __name__ == "__main__":
    main()
