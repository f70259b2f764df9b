"""Figures of docs/performance.md, drawn from the result files as SVG.

    python -m bench.plots        # writes docs/figures/*.svg; the same files give the same figures

Every bar is a share of what it is compared with, so that rows of 5 ms and of a second stand side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "docs" / "figures"
LABELS, BARS, VALUES, LINE = 250, 400, 90, 20  # pixels
OURS, PEER, AIM = "#2f6db3", "#c9ced6", "#d1495b"


@dataclass(frozen=True)
class Bar:
    """`share` of what is compared with; `aim`: the share aimed at; `value`: as text, behind the bar."""

    label: str
    share: float
    aim: float | None
    value: str


def chart(title: str, note: str, bars: Sequence[Bar], *, peer: bool) -> str:
    """Horizontal bars up to the largest share. `peer`: what is compared with is drawn behind, as 1."""
    longest = max([bar.share for bar in bars] + [bar.aim or 0.0 for bar in bars] + [1.0])
    scale, height = BARS / longest, 58 + LINE * len(bars)
    width = LABELS + BARS + VALUES
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="8" y="38" fill="#555555">{escape(note)}</text>',
    ]
    for i, bar in enumerate(bars):
        y = 48 + i * LINE
        parts.append(f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(bar.label)}</text>')
        if peer:
            parts.append(_box(LABELS, y + 2, scale, 15, PEER))
        parts.append(_box(LABELS, y + 5, bar.share * scale, 9, OURS))
        if bar.aim is not None:
            parts.append(_box(LABELS + bar.aim * scale - 1, y + 1, 2, 17, AIM))
        parts.append(f'<text x="{LABELS + BARS + 6}" y="{y + 13}">{escape(bar.value)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"/>'


def engine(result: dict[str, Any]) -> str:
    def bar(row: dict[str, Any]) -> Bar:
        ours, peer, aim = row["ours"], row["vllm"], row["bar"]
        if row["unit"].endswith("/s"):  # shares of time, whatever the row counts
            ours, peer, aim = 1 / ours, 1 / peer, 1 / aim
        value = f"{row['ours']:.3g} {row['unit']}"
        return Bar(row["row"], ours / peer, aim / peer, value)

    note = "time as a share of vLLM 0.26.0's (grey); red: the aim; less is better"
    return chart("Engine, Qwen2-7B's shape, one H200", note, [*map(bar, result["rows"])], peer=True)


def http(result: dict[str, Any]) -> str:
    def bar(row: dict[str, Any]) -> Bar:
        peer = row["vllm_p99_ms"]
        label = f"{row['rate']} requests/s, {row['to']}"
        return Bar(label, row["p99_ms"] / peer, row["bar_p99_ms"] / peer, f"{row['p99_ms']:.0f} ms")

    note = "99th percentile as a share of vLLM 0.26.0's (grey); red: the aim; less is better"
    return chart("Answers of 128 tokens over HTTP, one H200", note, [*map(bar, result["rows"])], peer=True)


def kernels(result: dict[str, Any]) -> str:
    bars = [
        Bar(
            f"{row['kernel']} {row['shape'].removeprefix('qwen2-7b ')}",
            row["share"],
            None,
            f"{row['microseconds']:.4g} us",
        )
        for row in result["results"]
    ]
    note = "share of the card's copy rate, or of its rate of matrix products; more is better"
    return chart("Kernels, Qwen2-7B's shapes, one H200", note, bars, peer=False)


DRAWN: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "gpu_engine.svg": ("gpu_engine_h200.json", engine),
    "http_serving.svg": ("http_serving_h200.json", http),
    "kernels.svg": ("kernels_roofline.json", kernels),
}


def figures() -> dict[Path, str]:
    """What every figure's file holds."""
    return {
        FIGURES / name: draw(json.loads((RESULTS / source).read_text()))
        for name, (source, draw) in DRAWN.items()
    }


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for path, text in figures().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
