#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the pictures and tables of docs/benchmarks.md from what was measured.

    publish.py --results build/bench/results.jsonl --training build/bench/training.json

Pictures go to docs/img; the tables replace what stands in the page between its two marks. What was
not measured is left out, and so is its picture. Standard library only.
"""
import argparse
import json
import os
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import plot  # noqa: E402
from grid import BEST, KI, OPS, SETS, SIZES, Test, limit_for  # noqa: E402
from side_by_side import Results, show_size, show_time  # noqa: E402

PAGE = HERE.parent / "docs" / "benchmarks.md"
IMAGES = PAGE.parent / "img"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TITLES = {
    "local2": "One host, 2 ranks",
    "local3": "One host, 3 ranks",
    "local4": "One host, 4 ranks",
    "types": "Types",
    "many": "Many tensors, one host",
    "veth": "Two hosts, a rank each",
    "veth-2x2": "Two hosts, 2 ranks each",
    "veth10g": "Two hosts, 10 Gbit/s",
    "veth1g": "Two hosts, 1 Gbit/s",
    "veth-many": "Many tensors, two hosts",
}

# ---- pictures ---------------------------------------------------------------------------------


def times(res, name, op, smallest=0, largest=1 << 40, more=()):
    """contender -> {bytes: microseconds}"""
    lines = {}
    for who in ["ours", *more, *res.peers(name)]:
        points = {}
        for s in [t.bytes for t in SETS[name].tests if t.op == op and t.dtype == "float32"]:
            median = res.median(name, who, Test(op, s))
            if median and smallest <= s <= largest:
                points[s] = median
        if points:
            lines[who] = points
    return lines


def ratios(res, name, op):
    points = {}
    for test in SETS[name].tests:
        best = res.best(name, test)
        ratio = res.ratio(name, "ours", best, test) if test.op == op and best else None
        if ratio:
            points[test.bytes] = ratio.median
    return points


def bandwidth(lines):
    """Bytes that each of two ranks gets from the other in an allreduce, in GB/s"""
    return {who: {s: s / us / 1e3 for s, us in points.items()} for who, points in lines.items()}


def pictures(res):
    """(file, lines, title, words of plot.draw) of everything there are figures for"""
    op = "allreduce"
    whole = times(res, "local2", op, more=["memcpy"])
    if SIZES[-1] in whole.get("ours", {}):  # the front page speaks of all sizes
        yield "local2.svg", whole, "allreduce, 2 ranks on one host", {}
    yield ("bench-latency.svg", times(res, "local2", op, largest=64 * KI),
           "latency: allreduce of small tensors, 2 ranks on one host", {})
    yield ("bench-bandwidth.svg",
           bandwidth(times(res, "local2", op, smallest=64 * KI, more=["memcpy"])),
           "bandwidth: allreduce, 2 ranks on one host", {"value": lambda v: f"{v:g} GB/s"})
    by_op = {o: ratios(res, "local2", o) for o in OPS}
    yield ("bench-operations.svg", {o: p for o, p in by_op.items() if p},
           "our time / the best peer's, 2 ranks on one host", {"value": lambda v: f"{v:g}"})
    yield ("bench-network.svg", times(res, "veth", op, more=["ours-encrypted"]),
           "network: allreduce between two hosts", {})
    nets = {TITLES[n]: ratios(res, n, op) for n in ("veth", "veth10g", "veth1g", "veth-2x2")}
    yield ("bench-networks.svg", {n: p for n, p in nets.items() if p},
           "our time / the best peer's, allreduce between two hosts", {"value": lambda v: f"{v:g}"})


def draw_all(res, training):
    drawn = []
    for file, lines, title, words in pictures(res):
        if lines and any(len(points) > 1 for points in lines.values()):
            (IMAGES / file).write_text(plot.draw(lines, title, **words))
            drawn.append(file)
    if training:
        (IMAGES / "bench-training.svg").write_text(bars(training))
        drawn.append("bench-training.svg")
    return drawn


def bars(training):
    """Groups of bars: what each contender reaches of two ranks that do not talk."""
    groups = {}
    for row in training["rows"]:
        groups.setdefault((row["figure"], row["net"]), {})[row["contender"]] = row["median"]
    kinds = sorted({c for group in groups.values() for c in group if c not in ("apart", "single")},
                   key=lambda c: (c != "hvd", c))
    high, left, step, top, bottom = 300, 70, 130, 50, 380
    width = left + step * len(groups) + 190
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 430" '
           'font-family="sans-serif">', f'<rect width="{width}" height="430" fill="white"/>',
           plot.text(left, 28, "training: share of what two ranks reach that do not talk", size=16)]
    for percent in (0, 25, 50, 75, 100):
        y = bottom - high * percent / 110
        out += [plot.line(left, y, left + step * len(groups), y, "#ddd"),
                plot.text(left - 8, y + 4, f"{percent} %", "end")]
    for g, ((figure, net), group) in enumerate(groups.items()):
        base = group.get("apart") or training_base(groups, figure)
        for k, kind in enumerate(kinds):
            if kind in group and base:
                share = group[kind] / base
                x, h = left + 12 + step * g + 30 * k, high * share / 1.1
                out += [f'<rect x="{x}" y="{bottom - h:.1f}" width="26" height="{h:.1f}" '
                        f'fill="{plot.COLOURS[k]}"/>',
                        plot.text(x + 13, bottom - h - 4, f"{100 * share:.0f}", "middle", 11)]
        out += [plot.text(left + step * g + 55, bottom + 18, figure.split()[0], "middle"),
                plot.text(left + step * g + 55, bottom + 34, net, "middle", 11)]
    for k, kind in enumerate(kinds):
        x, y = left + step * len(groups) + 16, top + 10 + 20 * k
        out += [f'<rect x="{x}" y="{y - 8}" width="14" height="12" fill="{plot.COLOURS[k]}"/>',
                plot.text(x + 20, y + 3, WHO.get(kind, kind))]
    return "\n".join(out + ["</svg>"]) + "\n"


def training_base(groups, figure):
    """Two that do not talk need no network: they are measured once."""
    for (other, _), group in groups.items():
        if other == figure and "apart" in group:
            return group["apart"]
    return None


WHO = {"hvd": "DistributedOptimizer", "ddp-gloo": "DDP on Gloo", "ddp-hvd": "DDP on our backend",
       "apart": "two that do not talk", "single": "one process"}

# ---- tables -----------------------------------------------------------------------------------


def cells(rows):
    head, *rest = rows
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(row) + " |" for row in rest]


def set_table(res, name):
    bench = SETS[name]
    extra = [o for o in bench.ours if o != "ours"]
    extra += ["memcpy"] if bench.floor else []
    rows = [["operation", "size", "ours", *extra, "best peer", "its time", "ours / best",
             "lowest to highest round", "target"]]
    for test in bench.tests:
        ours, best = res.median(name, "ours", test), res.best(name, test)
        if ours is None:
            continue
        ratio = res.ratio(name, "ours", best, test) if best else None
        limit = limit_for(name, "ours", BEST, test)
        what = test.op if test.dtype == "float32" else f"{test.op} {test.dtype}"
        rows.append([
            what, test.many or show_size(test.bytes), show_time(ours),
            *[show_time(res.median(name, e, test)) for e in extra], best or "-",
            show_time(res.median(name, best, test)) if best else "-",
            mark(ratio.median, limit) if ratio else "-",
            f"{ratio.lowest:.2f} to {ratio.highest:.2f}" if ratio else "-",
            f"{limit:g}" if limit else "-"])
    return cells(rows) if len(rows) > 1 else []


def mark(ratio, limit):
    """What misses its target stands out."""
    return f"**{ratio:.2f}**" if limit and ratio > limit else f"{ratio:.2f}"


def training_table(training):
    rows = [["what", "network", "contender", "median", "lowest to highest round"]]
    for row in training["rows"]:
        rows.append([row["figure"], row["net"], WHO.get(row["contender"], row["contender"]),
                     f"{row['median']:.1f}", f"{row['lowest']:.1f} to {row['highest']:.1f}"])
    return cells(rows)


def machine():
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    cores = len(re.findall(r"^processor", Path("/proc/cpuinfo").read_text(), flags=re.M))
    family = re.search(r"cpu family\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    kernel = Path("/proc/sys/kernel/osrelease").read_text().split("-")[0].strip()
    return "%d cores of %s (family %s), Linux %s" % (
        cores, model[1] if model else "an unnamed processor", family[1] if family else "?", kernel)


def measured(res, training):
    lines = ["*Measured on %s.*" % machine(), ""]
    loads = [load for of_set in res.loads.values() for load in of_set.values()]
    if statistics.median(loads) > 2 * os.cpu_count():
        lines += ["*Other work was running, as the load averages say: ratios of single rounds",
                  "may be far off. `make bench-docs` on a quiet machine tells more.*", ""]
    for name in [n for n in SETS if n in res.loads]:
        table, loads = set_table(res, name), sorted(res.loads[name].values())
        if not table:
            continue
        load = (len(loads), loads[0], loads[-1], statistics.median(loads))
        lines += [f"### {TITLES[name]}", "",
                  "%d round(s); load average %.1f to %.1f, median %.1f." % load, "", *table, ""]
        wrong = [note for note in res.notes[name] if "WRONG" in note or "crossed" in note]
        lines += ["- " + note for note in wrong] + ([""] if wrong else [])
    if training:
        lines += ["### Training", "", "%d round(s) at most; load average %.1f to %.1f." % (
            training["rounds"], min(training["loads"]), max(training["loads"])), ""]
        lines += ["![share of what two ranks reach that do not talk, by model, network and library]"
                  "(img/bench-training.svg)", "", *training_table(training), ""]
    return "\n".join(lines)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--results", type=Path, required=True)
    ap.add_argument("--training", type=Path)
    opts = ap.parse_args()
    res = Results([json.loads(line) for line in opts.results.read_text().splitlines()])
    has_training = opts.training and opts.training.exists()
    training = json.loads(opts.training.read_text()) if has_training else None
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} lacks its marks")
    drawn = draw_all(res, training)
    PAGE.write_text(before + BEGIN + "\n\n" + measured(res, training) + "\n" + END + after)
    print("docs/benchmarks.md:", ", ".join(drawn))


if __name__ == "__main__":
    main()
