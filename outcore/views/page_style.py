"""The style and the script of the plan's page: constants, with nothing from any plan in them.

Everything is on the page without the script; it only zooms the timelines and names the piece of
work under the pointer.
"""

from __future__ import annotations

NUM_COLOURS = 8

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f4f1; --surface: #fcfcfb; --line: #d9d8d1; --ink: #0b0b0b; --ink2: #52514e;
  --c0: #2a78d6; --c1: #1baf7a; --c2: #eda100; --c3: #8a5cd0; --c4: #e34948; --c5: #e87ba4;
  --c6: #eb6834; --c7: #6b7a8f; --bad: #b3261e; --good: #1a6b2c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111110; --surface: #1a1a19; --line: #3a3a37; --ink: #ffffff; --ink2: #c3c2b7;
    --c0: #3987e5; --c1: #199e70; --c2: #c98500; --c3: #9085e9; --c4: #e66767; --c5: #d55181;
    --c6: #d95926; --c7: #8593a6; --bad: #ff8a80; --good: #7bd88f;
  }
}
.chart text { font-size: 12px; fill: var(--ink2); }
.chart .grid { stroke: var(--line); }
.chart .line { fill: none; stroke-width: 2; }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c6); }
.chart .k1, .series .k1 { fill: var(--c6); }
* { box-sizing: border-box; }
body {
  margin: 0; padding: 24px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 10px; }
h3 { font-size: .95rem; margin: 0; font-weight: 600; }
p { margin: 0 0 6px; }
.quiet { color: var(--ink2); }
section {
  background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px; margin: 16px 0 0;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(122px, 1fr)); gap: 10px;
  margin: 16px 0 0; }
.tile { background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
.tile dt { color: var(--ink2); font-size: .85rem; }
.tile dd { margin: 0; font-size: 1.2rem; line-height: 1.3; font-weight: 600;
  overflow-wrap: anywhere; }
ul.findings { margin: 0; padding: 0 0 0 1.2em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--ink2); font-weight: 600; font-size: .85rem; white-space: nowrap; }
tbody th { color: var(--ink); font-size: 1em; }
td.n, th.n { text-align: right; white-space: nowrap; }
tr.binds td, tr.binds th { font-weight: 700; white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); }
.swatch { display: inline-block; width: 12px; height: 12px; vertical-align: -1px; }
.k0 { fill: var(--c0); } .k1 { fill: var(--c1); } .k2 { fill: var(--c2); } .k3 { fill: var(--c3); }
.k4 { fill: var(--c4); } .k5 { fill: var(--c5); } .k6 { fill: var(--c6); } .k7 { fill: var(--c7); }
.odd { fill-opacity: .72; }
.tools { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin: 0 0 8px; }
.tools[hidden] { display: none; }
button { font: inherit; color: var(--ink); background: var(--page); cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; padding: 2px 10px; min-width: 34px; }
button:focus-visible, .plot:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
.timeline { margin: 0 0 16px; }
.timeline .rows { display: grid; grid-template-columns: 112px 1fr; column-gap: 10px; }
.names div { height: 34px; line-height: 17px; font-size: .85rem; overflow: hidden;
  overflow-wrap: anywhere; }
.names span { color: var(--ink2); }
.plot { position: relative; overflow: hidden; border-left: 1px solid var(--line);
  border-right: 1px solid var(--line); touch-action: pan-y; cursor: grab; }
.plot svg { display: block; width: 100%; height: 100%; }
.plot .rule { fill: var(--line); fill-opacity: .45; }
.mark, .number { position: absolute; font-size: .75rem; line-height: 16px; padding: 0 5px;
  border-radius: 4px; background: var(--surface); color: var(--ink); pointer-events: none;
  white-space: nowrap; transform: translateX(-50%); }
.axis { position: relative; height: 22px; font-size: .8rem; color: var(--ink2); }
.axis span { position: absolute; transform: translateX(-50%); white-space: nowrap; top: 2px; }
.axis span:first-child { transform: none; }
.axis span:last-child { transform: translateX(-100%); }
.readout { min-height: 1.5em; font-size: .9rem; overflow-wrap: anywhere; }
.tier { margin: 0 0 18px; }
.bar { position: relative; height: 36px; margin: 6px 0 8px; border: 1px solid var(--line);
  border-radius: 4px; }
.bar svg { display: block; width: 100%; height: 100%; }
.bar .limit { fill: var(--ink); }
.number { top: 9px; font-weight: 600; }
@media (max-width: 640px) {
  .axis span:nth-child(2), .axis span:nth-child(4), .axis span:nth-child(5) { display: none; }
}
@media print { body { background: none; } .tools, .readout { display: none; } }
""".strip()

SCRIPT = """
"use strict";
(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const readout = document.querySelector(".readout");
  if (!plots.length) return;
  const wide = 10000, total = Number(plots[0].dataset.totalSeconds);
  let from = 0, width = wide;
  const seconds = x => {
    const s = x / wide * total, step = width / wide * total / 5;
    return step < 1e-3 ? (s * 1e3).toFixed(3) + " ms" : step < 1 ? (s * 1e3).toFixed(0) + " ms"
      : s.toFixed(2) + " s";
  };
  const show = (nextFrom, nextWidth) => {
    width = Math.min(wide, Math.max(wide / 2000, nextWidth));
    from = Math.min(wide - width, Math.max(0, nextFrom));
    for (const plot of plots) {
      const svg = plot.querySelector("svg"), box = svg.viewBox.baseVal;
      svg.setAttribute("viewBox", `${from} 0 ${width} ${box.height}`);
      for (const mark of plot.querySelectorAll(".mark")) {
        const a = Math.max(from, Number(mark.dataset.from));
        const b = Math.min(from + width, Number(mark.dataset.to));
        mark.hidden = b - a < width / 16;
        mark.style.left = ((a + b) / 2 - from) / width * 100 + "%";
      }
      const ticks = plot.closest(".timeline").querySelectorAll(".axis span");
      ticks.forEach((tick, i) => {
        tick.textContent = seconds(from + width * i / (ticks.length - 1));
      });
    }
  };
  const zoom = (factor, at) => show(from + width * at * (1 - factor), width * factor);
  const acts = {
    in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), all: () => show(0, wide),
    left: () => show(from - width / 4, width), right: () => show(from + width / 4, width),
  };
  const keys = {
    "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right",
  };
  const tools = document.querySelector(".tools");
  tools.hidden = false;
  tools.addEventListener("click", event => {
    const act = acts[event.target.dataset.act];
    if (act) act();
  });
  for (const plot of plots) {
    let held = null;
    plot.addEventListener("keydown", event => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[keys[event.key]]();
    });
    plot.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = plot.getBoundingClientRect();
      zoom(Math.exp(event.deltaY / 300), (event.clientX - box.left) / box.width);
    }, {passive: false});
    plot.addEventListener("pointerdown", event => {
      held = {x: event.clientX, from};
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", () => { held = null; });
    plot.addEventListener("pointercancel", () => { held = null; });
    plot.addEventListener("pointermove", event => {
      if (held) {
        const box = plot.getBoundingClientRect();
        show(held.from - (event.clientX - held.x) / box.width * width, width);
        return;
      }
      const title = event.target.querySelector && event.target.querySelector(":scope > title");
      if (title && event.target.localName === "rect") readout.textContent = title.textContent;
    });
  }
})();
""".strip()
