// SPDX-License-Identifier: Apache-2.0
//
// tools.js - what the other scripts of the page use: elements by name, and numbers as people read
// them.
//
// The build puts the scripts of the page behind each other, this one first.
"use strict";
const tools = (() => {
    const byId = (id) => document.getElementById(id);
    const make = (tag, name, text) => {
        const element = document.createElement(tag);
        if (name) {
            element.className = name;
        }
        if (text !== undefined) {
            element.textContent = text;
        }
        return element;
    };
    const setText = (element, text) => {
        if (element.textContent !== text) {
            element.textContent = text;
        }
    };

    // --- Numbers as people read them -------------------------------------------------------------

    const inUnits = (value, unit) => {
        if (!(value > 0)) {
            return "0 " + unit;
        }
        let power = 0;
        while (value >= 999.5 && power < 5) {
            value /= 1000;
            power++;
        }
        return (
            value.toPrecision(3).replace(/\.0+$|(\.\d*?)0+$/, "$1") +
            " " +
            ["", "k", "M", "G", "T", "P"][power] +
            unit
        );
    };
    const seconds = (value) =>
        value >= 100
            ? Math.round(value) + " s"
            : value >= 1
              ? value.toFixed(1) + " s"
              : value >= 1e-3
                ? (value * 1e3).toPrecision(3) + " ms"
                : value > 0
                  ? (value * 1e6).toPrecision(3) + " µs"
                  : "–";
    const duration = (ms) => {
        const s = Math.max(0, Math.round(ms / 1000)),
            h = Math.floor(s / 3600),
            m = Math.floor(s / 60) % 60;
        return (h ? h + " h " : "") + (h || m ? m + " min " : "") + (h ? "" : (s % 60) + " s");
    };
    const percent = (value) => Math.round(value * 100) + " %";
    const plural = (n, word) => n + " " + word + (n === 1 ? "" : "s");

    return { byId, make, setText, inUnits, seconds, duration, percent, plural };
})();
