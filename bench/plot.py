#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the results of side_by_side.py: time of an allreduce against its size, one line per library.

    plot.py results.jsonl --set local2 --out docs/img/local2.svg [--title TEXT]

Both axes are logarithmic. Standard library only; the picture is plain SVG.
"""

import argparse
import collections
import json
import math
import statistics

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 150, 50, 60
COLOURS = [
    "#d62728",
    "#1f77b4",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#8c564b",
    "#17becf",
    "#7f7f7f",
    "#bcbd22",
]
NAMES = {
    "ours": "this library",
    "ours-encrypted": "encrypted",
    "impi": "Intel MPI",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "mpich-mt": "MPICH (threads)",
    "oneccl": "oneCCL",
    "gloo": "Gloo (torch)",
    "hvdnew-gloo": "Horovod 0.28 Gloo",
    "hvdnew-ompi": "Horovod 0.28 MPI",
    "memcpy": "plain memcpy",
}


def medians(path, wanted):
    """peer -> {bytes: median over rounds of the per-round median, in microseconds}"""
    samples = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in open(path):
        row = json.loads(line)
        if (
            row.get("set") == wanted
            and row.get("op") in ("allreduce", "memcpy")
            and row.get("median_us")
            and row.get("dtype") == "float32"
        ):
            samples[row["peer"]][row["bytes"]].append(row["median_us"])
    return {
        peer: {b: statistics.median(v) for b, v in by_size.items()}
        for peer, by_size in samples.items()
    }


def size_text(n):
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= factor:
            return f"{n // factor} {unit}"
    return f"{n} B"


def time_text(us):
    return f"{us:g} µs" if us < 1000 else f"{us / 1000:g} ms" if us < 1e6 else f"{us / 1e6:g} s"


class Scale:
    """logarithmic, from [low, high] to [start, end]"""

    def __init__(self, low, high, start, end):
        self.low, self.span = math.log(low), math.log(high) - math.log(low)
        self.start, self.length = start, end - start

    def __call__(self, value):
        return self.start + self.length * (math.log(value) - self.low) / self.span


def line(x1, y1, x2, y2, colour, width=1, dash=""):
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>'
    )


def text(x, y, words, anchor="start", size=12):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def levels(values):
    """Round numbers around the values: powers of ten, or closer where the values are."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1,) if high - low > 2 else (1, 2, 5)
    marks = [m * 10.0**k for k in range(low, high + 1) for m in steps]
    below = [m for m in marks if m <= min(values)]
    return [m for m in marks if m >= below[-1] and
            m <= min(n for n in marks if n >= max(values) or n == marks[-1])]


def grid(x, y, sizes, marks, label, tick, value):
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    out = []
    for mark in marks:
        out.append(line(LEFT, y(mark), right, y(mark), "#888" if mark == 1 else "#ddd"))
        out.append(text(LEFT - 8, y(mark) + 4, value(mark), "end"))
    for b in sizes:
        out.append(line(x(b), TOP, x(b), bottom, "#eee"))
        out.append(text(x(b), bottom + 16, tick(b), "middle", 10))
    out.append(text((LEFT + right) / 2, HEIGHT - 14, label, "middle"))
    return out


def curve(x, y, peer, points, i):
    colour, width = COLOURS[i % len(COLOURS)], 3 if peer == "ours" else 1.5
    dash = "4 4" if peer == "memcpy" else ""
    ends = list(zip(points, points[1:]))
    out = [line(x(b), y(t), x(c), y(u), colour, width, dash) for (b, t), (c, u) in ends]
    out += [f'<circle cx="{x(b):.1f}" cy="{y(t):.1f}" r="3" fill="{colour}"/>' for b, t in points]
    row, left = TOP + 10 + 20 * i, WIDTH - RIGHT + 12
    out.append(line(left, row, left + 24, row, colour, width, dash))
    out.append(text(left + 30, row + 4, NAMES.get(peer, peer)))
    return out


def draw(lines, title, label="size of the tensor (float32 sum)", tick=size_text, value=time_text):
    sizes = sorted({b for points in lines.values() for b in points})
    marks = levels([v for points in lines.values() for v in points.values()])
    x = Scale(sizes[0], sizes[-1], LEFT, WIDTH - RIGHT)
    y = Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 28, title, size=16),
    ]
    out += grid(x, y, sizes, marks, label, tick, value)
    order = sorted(lines, key=lambda p: (p != "ours", -max(lines[p].values())))
    for i, peer in enumerate(order):
        out += curve(x, y, peer, sorted(lines[peer].items()), i)
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("results")
    ap.add_argument("--set", default="local2")
    ap.add_argument("--out", required=True)
    ap.add_argument("--title", default="allreduce, median time")
    opts = ap.parse_args()
    lines = medians(opts.results, opts.set)
    if not lines:
        raise SystemExit(f"no results of set {opts.set} in {opts.results}")
    with open(opts.out, "w") as f:
        f.write(draw(lines, opts.title))


if __name__ == "__main__":
    main()
