// SPDX-License-Identifier: Apache-2.0
//
// timeline.js - the last operations of one rank, drawn: how long each waited, how long it moved.
//
// It follows the newest operations until somebody zooms or moves it.
"use strict";
const makeTimeline = (colors) => {
    const { byId, setText, inUnits, seconds } = tools;
    const line = { operations: [], from: 0, to: 1, follows: true };
    const lanesOf = (operations) => {
        const ends = [];
        return operations.map((operation) => {
            let lane = ends.findIndex((end) => end <= operation[0]);
            if (lane < 0) {
                lane = ends.length < 6 ? ends.push(0) - 1 : 5;
            }
            ends[lane] = operation[3];
            return lane;
        });
    };
    const AXIS_HEIGHT = 16;
    // Five marks of the time, back from the last operation.
    const drawAxis = (pen, canvas, ratio) => {
        if (!line.operations.length) {
            return;
        }
        const last = Math.max(...line.operations.map((operation) => operation[3]));
        pen.fillStyle = colors.quiet;
        for (let i = 0; i < 5; i++) {
            const at = line.from + ((line.to - line.from) * (i + 0.5)) / 5,
                x = (canvas.width * (i + 0.5)) / 5;
            pen.fillRect(x, canvas.height - AXIS_HEIGHT * ratio, ratio, 3 * ratio);
            pen.textAlign = "center";
            pen.fillText(
                (at <= last ? "−" : "+") + seconds(Math.abs(at - last) / 1e6),
                x,
                canvas.height - 3 * ratio,
            );
        }
        pen.textAlign = "left";
    };
    const draw = () => {
        const canvas = byId("timeline"),
            ratio = window.devicePixelRatio || 1;
        canvas.width = canvas.clientWidth * ratio;
        canvas.height = canvas.clientHeight * ratio;
        const pen = canvas.getContext("2d"),
            lanes = lanesOf(line.operations);
        const scale = canvas.width / (line.to - line.from),
            height = (canvas.height - AXIS_HEIGHT * ratio) / 6.2;
        const x = (time) => (time - line.from) * scale;
        pen.clearRect(0, 0, canvas.width, canvas.height);
        pen.font = 10 * ratio + "px sans-serif";
        line.operations.forEach((operation, i) => {
            const [submitted, , started, finished] = operation,
                y = lanes[i] * height + 4 * ratio,
                tall = height - 3 * ratio;
            if (finished < line.from || submitted > line.to) {
                return;
            }
            const begin = started > 0 ? started : finished;
            pen.fillStyle = colors.waiting;
            pen.fillRect(x(submitted), y, Math.max(x(begin) - x(submitted), 1), tall);
            pen.fillStyle = colors.moving;
            pen.fillRect(x(begin), y, Math.max(x(finished) - x(begin), 1), tall);
            const room = x(finished) - x(submitted);
            if (room > 60 * ratio) {
                pen.save();
                pen.beginPath();
                pen.rect(x(submitted), y, room, tall);
                pen.clip();
                pen.fillStyle = colors.text;
                pen.fillText(operation[6], x(submitted) + 3 * ratio, y + tall / 2 + 3 * ratio);
                pen.restore();
            }
        });
        drawAxis(pen, canvas, ratio);
        setText(
            byId("span"),
            line.operations.length
                ? "(" + seconds((line.to - line.from) / 1e6) + " shown)"
                : "(none that took time)",
        );
    };
    const fit = () => {
        if (line.operations.length) {
            line.from = Math.min(...line.operations.map((operation) => operation[0]));
            line.to = Math.max(...line.operations.map((operation) => operation[3])) + 1;
        }
    };
    const zoom = (factor, at) => {
        const middle = line.from + (line.to - line.from) * at;
        const half = Math.max((line.to - line.from) * factor, 20);
        line.from = middle - half * at;
        line.to = line.from + half;
        line.follows = false;
        draw();
    };
    const move = (part) => {
        const by = (line.to - line.from) * part;
        line.from += by;
        line.to += by;
        line.follows = false;
        draw();
    };
    const tell = (event) => {
        const box = byId("timeline").getBoundingClientRect();
        const time = line.from + ((event.clientX - box.left) / box.width) * (line.to - line.from);
        const lane = Math.floor(((event.clientY - box.top) / (box.height - AXIS_HEIGHT)) * 6.2),
            lanes = lanesOf(line.operations);
        const found = line.operations.find(
            (operation, i) => lanes[i] === lane && operation[0] <= time && time <= operation[3],
        );
        if (found) {
            const [submitted, , started, finished, bytes, kind, name] = found;
            setText(
                byId("tip"),
                kind +
                    " " +
                    name +
                    ": " +
                    inUnits(bytes, "B") +
                    ", waited " +
                    seconds(((started > 0 ? started : finished) - submitted) / 1e6) +
                    ", moved " +
                    seconds(started > 0 ? (finished - started) / 1e6 : 0),
            );
        }
    };
    const show = (operations) => {
        line.operations = operations;
        if (line.follows) {
            fit();
        }
    };
    const follow = () => {
        line.follows = true;
        fit();
    };

    return { show, follow, draw, zoom, move, tell };
};
