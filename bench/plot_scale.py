#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What operations cost on 16 to 100,000 ranks, by hvd-bench --simulate: a table and a picture.

    plot_scale.py build/hvd-bench --out docs/img/scale.svg

The table, in Markdown, goes to standard output. docs/scale.md shows both.
"""

import argparse
import json
import subprocess

import plot

RANKS = (16, 64, 256, 1024, 4096, 16384, 100000)
SIZES = {4: "4 B", 1 << 16: "64 KiB", 1 << 20: "1 MiB", 1 << 26: "64 MiB"}


def prices(bench, ranks):
    """bytes -> what hvd-bench says of an allreduce of so many"""
    command = [bench, "--simulate", str(ranks), "--bytes", ",".join(map(str, SIZES)), "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {row["bytes"]: row for row in map(json.loads, out.splitlines())}


def time(us):
    return plot.time_text(float(f"{us:.3g}"))


def table(rows):
    lines = ["| ranks | hosts | agreement | " + " | ".join(SIZES.values()) + " |", "|---" * 7 + "|"]
    for ranks, of_size in rows.items():
        cells = [f"{ranks:,}", f"{of_size[4]['hosts']:,}",
                 time(of_size[1 << 20]["agreement_us"])]
        cells += [time(of_size[b]["total_us"]) for b in SIZES]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("bench")
    ap.add_argument("--out", required=True)
    opts = ap.parse_args()
    rows = {ranks: prices(opts.bench, ranks) for ranks in RANKS}
    lines = {text: {r: rows[r][b]["total_us"] for r in RANKS} for b, text in SIZES.items()}
    lines["agreement only"] = {r: rows[r][1 << 20]["agreement_us"] for r in RANKS}
    with open(opts.out, "w") as f:
        f.write(plot.draw(lines, "allreduce on many ranks, simulated (8 ranks a host, 100 Gbit/s)",
                          "ranks", lambda n: f"{n:,}"))
    print(table(rows))


if __name__ == "__main__":
    main()
