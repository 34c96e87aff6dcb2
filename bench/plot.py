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
COLOURS = ["#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22"]
NAMES = {"ours": "this library", "impi": "Intel MPI", "openmpi": "Open MPI", "mpich": "MPICH", "mpich-mt": "MPICH (threads)",
         "oneccl": "oneCCL", "gloo": "Gloo (torch)", "hvdnew-gloo": "Horovod 0.28 Gloo", "hvdnew-ompi": "Horovod 0.28 MPI",
         "memcpy": "plain memcpy"}


def medians(path, wanted):
    """peer -> {bytes: median over rounds of the per-round median, in microseconds}"""
    samples = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in open(path):
        row = json.loads(line)
        if row.get("set") == wanted and row.get("op") in ("allreduce", "memcpy") and row.get("median_us") \
                and row.get("dtype") == "float32":
            samples[row["peer"]][row["bytes"]].append(row["median_us"])
    return {peer: {b: statistics.median(v) for b, v in by_size.items()} for peer, by_size in samples.items()}


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


def draw(lines, title):
    sizes = sorted({b for points in lines.values() for b in points})
    times = [t for points in lines.values() for t in points.values()]
    x = Scale(sizes[0], sizes[-1], LEFT, WIDTH - RIGHT)
    y = Scale(10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times))), HEIGHT - BOTTOM, TOP)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="28" font-size="16">{title}</text>']
    power = 10 ** math.floor(math.log10(min(times)))
    while power <= 10 ** math.ceil(math.log10(max(times))) * 1.001:
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(power):.1f}" y2="{y(power):.1f}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 8}" y="{y(power) + 4:.1f}" text-anchor="end">{time_text(power)}</text>')
        power *= 10
    for b in sizes:
        out.append(f'<line x1="{x(b):.1f}" x2="{x(b):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
                   f'<text x="{x(b):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size_text(b)}</text>')
    order = sorted(lines, key=lambda p: (p != "ours", -max(lines[p].values())))
    for i, peer in enumerate(order):
        colour, width = COLOURS[i % len(COLOURS)], 3 if peer == "ours" else 1.5
        points = sorted(lines[peer].items())
        dash = ' stroke-dasharray="4 4"' if peer == "memcpy" else ""
        path = " ".join(f"{x(b):.1f},{y(t):.1f}" for b, t in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')
        out += [f'<circle cx="{x(b):.1f}" cy="{y(t):.1f}" r="{width}" fill="{colour}"/>' for b, t in points]
        row = TOP + 10 + 20 * i
        out.append(f'<line x1="{WIDTH - RIGHT + 12}" x2="{WIDTH - RIGHT + 36}" y1="{row}" y2="{row}" stroke="{colour}" '
                   f'stroke-width="{width}"{dash}/><text x="{WIDTH - RIGHT + 42}" y="{row + 4}">{NAMES.get(peer, peer)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">size of the tensor (float32 sum)</text></svg>')
    return "\n".join(out) + "\n"


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
