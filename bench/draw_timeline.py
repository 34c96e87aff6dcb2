#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw a part of a timeline (HOROVOD_TIMELINE) as a picture, one row per tensor.

    draw_timeline.py trace.json --out docs/img/timeline.svg [--from-ms 100] [--to-ms 130]
                     [--rows 12] [--title TEXT]

Without --from-ms and --to-ms it shows two steps in the middle.

Negotiation is pale, with a mark for each rank at the moment it came; then the queue, then the run,
coloured by route. Standard library only; the picture is plain SVG.
"""
import argparse
import html
import json

WIDTH, LEFT, RIGHT, TOP, ROW = 980, 210, 20, 70, 26
NEGOTIATE, QUEUE = "#c9d7e8", "#f2d6a2"
ROUTES = {"STREAM": "#2ca02c", "PLAN": "#1f77b4", "TWO_LEVEL": "#9467bd", "RIDING": "#17becf",
          "BOARD": "#bcbd22", "LOCAL": "#7f7f7f", "AGREED": "#7f7f7f"}
MARK = "#d62728"
TENSORS = 1  # the group of rows, as the "process" of the trace


def read(path):
    """names: row -> tensor; spans: (row, kind, start, end) in us; marks: (row, rank, at)"""
    names, spans, marks = {}, [], []
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    for event in events:
        row, ph, name = event.get("tid"), event.get("ph"), event["name"]
        if event.get("pid") != TENSORS:
            continue
        if name == "thread_name":
            names[row] = event["args"]["name"]
        elif ph == "i" and name.startswith("rank "):
            marks.append((row, name.split()[1], event["ts"]))
        elif ph == "X" and "args" not in event:  # those with arguments only contain others
            kind = name if name == "QUEUE" else \
                "NEGOTIATE" if name.startswith("NEGOTIATE_") else name.rpartition("_")[0]
            spans.append((row, kind, event["ts"], event["ts"] + event["dur"]))
    return names, spans, marks


def middle(spans):
    """Two steps, from one submission of the tensor that comes most often to the next but one."""
    starts = {}
    for row, kind, start, _ in spans:
        if kind == "NEGOTIATE":
            starts.setdefault(row, []).append(start)
    often = sorted(max(starts.values(), key=len))
    at = len(often) // 2
    if len(often) < 4:
        return min(span[2] for span in spans), max(span[3] for span in spans)
    margin = 0.02 * (often[at + 1] - often[at - 1])
    return often[at - 1] - margin, often[at + 1]


def colour(kind):
    return {"NEGOTIATE": NEGOTIATE, "QUEUE": QUEUE}.get(kind) or ROUTES.get(kind, "#444")


def text(x, y, words, size=12, anchor="start", fill="#222"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill}">{html.escape(words)}</text>')


def box(x, y, width, height, fill):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.7):.1f}" height="{height}" '
            f'fill="{fill}"/>')


def legend(kinds):
    x = LEFT
    for kind in kinds:
        yield box(x, 38, 14, 12, colour(kind))
        yield text(x + 19, 48, kind.lower().replace("_", " "), 11)
        x += 40 + 7 * len(kind)
    yield f'<path d="M {x} 38 v 12" stroke="{MARK}" stroke-width="2"/>'
    yield text(x + 6, 48, "a rank came", 11)


def axis(begin, end, bottom):
    step = 10 ** len(str(int((end - begin) / 10))) / 10
    while (end - begin) / step > 12:
        step *= 2 if (end - begin) / step <= 24 else 5
    at = 0.0
    while at <= end - begin:
        x = LEFT + at / (end - begin) * (WIDTH - LEFT - RIGHT)
        yield f'<path d="M {x:.1f} {TOP - 6} V {bottom}" stroke="#ddd"/>'
        yield text(x, bottom + 15, f"{at / 1000:g} ms", 11, "middle", "#666")
        at += step


def draw(names, spans, marks, begin, end, rows, title):
    spans = [span for span in spans if span[3] > begin and span[2] < end]
    first = {}
    for pid, _, start, _ in sorted(spans, key=lambda span: span[2]):
        first.setdefault(pid, start)
    shown = list(first)[:rows]
    place = {pid: TOP + i * ROW for i, pid in enumerate(shown)}
    bottom = TOP + len(shown) * ROW
    kinds = sorted({kind for pid, kind, _, _ in spans if pid in place},
                   key=lambda kind: (kind not in ("NEGOTIATE", "QUEUE"), kind != "NEGOTIATE", kind))

    def x_of(us):
        return LEFT + (min(max(us, begin), end) - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 28}" '
             'font-family="sans-serif">', box(0, 0, WIDTH, bottom + 28, "#fff"),
             text(LEFT, 22, title, 15), *legend(kinds), *axis(begin, end, bottom)]
    for pid, y in place.items():
        parts.append(text(LEFT - 8, y + 15, names.get(pid, "?")[-28:], 11, "end"))
    for pid, kind, start, stop in spans:
        if pid in place:
            parts.append(box(x_of(start), place[pid] + 3, x_of(stop) - x_of(start), ROW - 8,
                             colour(kind)))
    for pid, rank, at in marks:
        if pid in place and begin <= at <= end:
            y = place[pid]
            parts.append(f'<path d="M {x_of(at):.1f} {y + 1} v {ROW - 4}" stroke="{MARK}" '
                         f'stroke-width="1.5"><title>rank {rank}</title></path>')
            parts.append(text(x_of(at) + 2, y + 11, rank, 8, fill=MARK))
    return "\n".join([*parts, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace")
    parser.add_argument("--out", required=True)
    parser.add_argument("--from-ms", type=float)
    parser.add_argument("--to-ms", type=float)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--title", default="timeline")
    options = parser.parse_args()
    names, spans, marks = read(options.trace)
    begin, end = middle(spans)
    if options.from_ms is not None or options.to_ms is not None:
        begin = (options.from_ms or 0) * 1000
        end = options.to_ms * 1000 if options.to_ms else max(span[3] for span in spans)
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(draw(names, spans, marks, begin, end, options.rows, options.title))


if __name__ == "__main__":
    main()
