// SPDX-License-Identifier: Apache-2.0
//
// page.js - draws the job that the launcher describes (src/web/model_json.c), once a second.
//
// Everything that comes from outside is set as text. Only what has changed is touched, and only
// sparklines that can be seen are drawn, so a thousand ranks stay light. In a report the data is
// inside the page, and nothing is asked for.
"use strict";
(() => {
    const { byId, make, setText, inUnits, seconds, duration, percent, plural } = tools;
    const frozenText = byId("frozen").textContent.trim();
    const frozen = frozenText ? JSON.parse(frozenText) : null;

    // --- Ranks -----------------------------------------------------------------------------------

    const HISTORY = 60;
    const ranks = new Map(); // by id
    const hosts = new Map(); // by name
    let open = null; // id of the rank in the panel
    let isCrowded = false;
    const colors = {};
    const readColors = () => {
        const style = getComputedStyle(document.documentElement);
        for (const name of ["compute", "waiting", "moving", "line", "text", "quiet", "trouble"]) {
            colors[name] = style.getPropertyValue("--" + name).trim();
        }
    };

    const readRow = (row) => ({
        id: row[0],
        rank: row[1],
        host: row[2],
        state: row[3],
        doing: row[4],
        waitsFor: row[5],
        since: row[6],
        operations: row[7],
        bytes: row[8],
        samples: row[9],
        step: row[10],
        compute: row[11],
        waiting: row[12],
        moving: row[13],
        memory: row[14],
        cpu: row[15],
        late: row[16],
        code: row[17],
        history: row[18],
    });
    const STUCK_S = 10;
    const isStuck = (r) => r.state === "waiting" && r.since > STUCK_S;
    const culpritOf = (r) => {
        const rank = /\d+/.exec(r.waitsFor);
        return rank ? [...ranks.values()].find((other) => other.rank === Number(rank[0])) : null;
    };
    const troubleOf = (r) => {
        if (["failed", "no answer", "ended"].includes(r.state)) {
            return "bad";
        }
        return isStuck(r) ? "bad" : r.late > 0 ? "late" : "";
    };
    const stateOf = (r) =>
        r.state === "failed"
            ? "failed (" + r.code + ")"
            : r.late > 0
              ? "late " + percent(r.late)
              : r.state;
    const doingOf = (r) =>
        (r.doing ? r.doing + (r.since >= 1 ? ", " + seconds(r.since) : "") : "") +
        (r.waitsFor ? " · waits for " + r.waitsFor : "");

    const drawSpark = (view) => {
        const canvas = view.canvas,
            ratio = window.devicePixelRatio || 1;
        const width = canvas.clientWidth * ratio,
            height = canvas.clientHeight * ratio;
        if (!width) {
            return;
        }
        if (canvas.width !== width) {
            canvas.width = width;
            canvas.height = height;
        }
        const pen = canvas.getContext("2d"),
            step = width / HISTORY;
        const from = HISTORY - view.history.length;
        pen.clearRect(0, 0, width, height);
        pen.fillStyle = colors.compute;
        pen.fillRect(from * step, 0, width, height);
        view.history.forEach(([waiting, moving], i) => {
            const x = (from + i) * step;
            pen.fillStyle = colors.moving;
            pen.fillRect(x, height * (1 - moving), step + 0.5, height * moving);
            pen.fillStyle = colors.waiting;
            pen.fillRect(x, height * (1 - moving - waiting), step + 0.5, height * waiting);
        });
    };
    const seen = new IntersectionObserver((entries) => {
        for (const entry of entries) {
            const view = ranks.get(Number(entry.target.dataset.id));
            if (view) {
                view.isSeen = entry.isIntersecting;
                if (view.isSeen && view.canvas) {
                    drawSpark(view);
                }
            }
        }
    });

    const makeRow = (view) => {
        const row = make("tr"),
            cells = {};
        row.tabIndex = -1;
        row.dataset.id = view.id;
        for (const [name, style] of [
            ["rank", ""],
            ["state", "c-state"],
            ["spark", "c-spark"],
            ["doing", "c-doing"],
            ["bytes", "c-num"],
            ["step", "c-num c-more"],
            ["memory", "c-num c-more"],
            ["cpu", "c-num c-more"],
        ]) {
            cells[name] = make("td", style);
            row.append(cells[name]);
        }
        view.canvas = make("canvas");
        view.canvas.setAttribute("role", "img");
        view.canvas.dataset.id = view.id;
        cells.spark.append(view.canvas);
        view.row = row;
        view.cells = cells;
        view.host.body.append(row);
        seen.observe(view.canvas);
    };

    const makeHost = (name) => {
        const box = make("div", "host"),
            button = make("button"),
            sum = make("span", "sum"),
            title = make("b", "", name);
        const table = make("table"),
            head = make("tr"),
            body = make("tbody"),
            tiles = make("div", "tiles");
        for (const [text, style] of [
            ["rank", ""],
            ["state", "c-state"],
            ["last minute", "c-spark"],
            ["doing", "c-doing"],
            ["bytes", "c-num"],
            ["step", "c-num c-more"],
            ["memory", "c-num c-more"],
            ["CPU", "c-num c-more"],
        ]) {
            head.append(make("th", style, text));
        }
        button.type = "button";
        button.append(title, sum);
        const top = make("thead");
        top.append(head);
        table.append(top, body);
        box.append(button, tiles, table);
        const host = { name, box, button, sum, body, table, tiles, views: [], isOpen: !isCrowded };
        button.addEventListener("click", () => {
            host.isOpen = !host.isOpen;
            showHost(host);
        });
        hosts.set(name, host);
        byId("hosts").append(box);
        return host;
    };
    const showHost = (host) => {
        host.button.setAttribute("aria-expanded", String(host.isOpen));
        host.box.classList.toggle("open", host.isOpen);
        host.table.hidden = !host.isOpen;
        host.tiles.hidden = host.isOpen;
        host.views.forEach(showRank);
    };

    const showTile = (view, trouble) => {
        if (!view.tile) {
            view.tile = make("button", "", String(view.rank));
            view.tile.type = "button";
            view.tile.addEventListener("click", () => {
                choose(view.id);
            });
            view.host.tiles.append(view.tile);
        }
        setText(view.tile, String(view.rank));
        view.tile.className = trouble;
        view.tile.title = "rank " + view.rank + ": " + stateOf(view) + " " + doingOf(view);
    };
    const showRank = (view) => {
        const trouble = troubleOf(view);
        if (!view.host.isOpen) {
            showTile(view, trouble);
            return;
        }
        if (!view.row) {
            makeRow(view);
        }
        const c = view.cells,
            doing = doingOf(view);
        setText(c.rank, String(view.rank));
        setText(c.state, stateOf(view));
        setText(c.doing, doing);
        if (c.doing.title !== doing) {
            c.doing.title = doing;
        }
        setText(c.bytes, view.bytes > 0 ? inUnits(view.bytes, "B/s") : "");
        setText(c.step, view.step > 0 ? seconds(view.step) : "");
        setText(c.memory, view.memory > 0 ? inUnits(view.memory, "B") : "");
        setText(c.cpu, view.cpu > 0 ? percent(view.cpu) : "");
        view.row.className = trouble + (open === view.id ? " open" : "");
        view.row.hidden = byId("only").checked && !trouble;
        view.canvas.setAttribute(
            "aria-label",
            percent(view.compute) +
                " computing, " +
                percent(view.waiting) +
                " waiting, " +
                percent(view.moving) +
                " moving",
        );
        if (view.isSeen) {
            drawSpark(view);
        }
    };

    const unpackHistory = (text) => {
        const list = [];
        for (let i = 0; i + 1 < text.length; i += 2) {
            list.push([(text.charCodeAt(i) - 65) / 20, (text.charCodeAt(i + 1) - 65) / 20]);
        }
        return list;
    };
    const takeRow = (raw) => {
        const row = readRow(raw);
        let view = ranks.get(row.id);
        if (view && view.host.name !== row.host) {
            forget(view);
            view = null;
        }
        if (!view) {
            view = { id: row.id, history: [], host: hosts.get(row.host) || makeHost(row.host) };
            view.host.views.push(view);
            ranks.set(row.id, view);
        }
        const { host, history, ...rest } = row;
        Object.assign(view, rest);
        if (history !== undefined) {
            view.history = unpackHistory(history);
        } else {
            view.history.push([view.waiting, view.moving]);
            view.history.splice(0, view.history.length - HISTORY);
        }
        return view;
    };
    const forget = (view) => {
        if (view.row) {
            seen.unobserve(view.canvas);
            view.row.remove();
        }
        if (view.tile) {
            view.tile.remove();
        }
        view.host.views.splice(view.host.views.indexOf(view), 1);
        ranks.delete(view.id);
        if (!view.host.views.length) {
            view.host.box.remove();
            hosts.delete(view.host.name);
        }
    };

    const showRanks = (rows) => {
        isCrowded = rows.length > 64;
        byId("hosts").classList.toggle("crowded", isCrowded);
        const there = new Set();
        for (const raw of rows) {
            there.add(raw[0]);
            takeRow(raw);
        }
        for (const view of [...ranks.values()]) {
            if (!there.has(view.id)) {
                forget(view);
            }
        }
        let nTrouble = 0;
        for (const host of hosts.values()) {
            const bad = host.views.filter(troubleOf).length;
            nTrouble += bad;
            setText(
                host.sum,
                plural(host.views.length, "rank") +
                    (bad ? ", " + bad + " in trouble" : "") +
                    " · " +
                    inUnits(
                        host.views.reduce((sum, view) => sum + view.memory, 0),
                        "B",
                    ),
            );
            host.box.hidden = byId("only").checked && !bad;
            showHost(host);
        }
        byId("none").hidden = !(byId("only").checked && nTrouble === 0);
        const first = byId("hosts").querySelector("tbody tr");
        if (first && !byId("hosts").querySelector('tr[tabindex="0"]')) {
            first.tabIndex = 0;
        }
    };

    // --- The job ---------------------------------------------------------------------------------

    const NUMBERS = ["step", "loss", "samples", "step time", "operations", "bytes", "memory"];
    const numbers = new Map(
        NUMBERS.map((name) => {
            const box = make("div"),
                dd = make("dd");
            box.hidden = true;
            box.append(make("dt", "", name), dd);
            byId("numbers").append(box);
            return [name, dd];
        }),
    );
    const showNumber = (name, text) => {
        numbers.get(name).parentElement.hidden = false;
        setText(numbers.get(name), text);
    };
    // Who keeps others waiting for so long that it is no pause, with those who do.
    const showStall = (isOver) => {
        const stuck = isOver ? [] : [...ranks.values()].filter(isStuck);
        const oldest = stuck.reduce((a, b) => (a && a.since >= b.since ? a : b), null);
        const culprit = oldest && culpritOf(oldest);
        byId("stall").hidden = !oldest;
        if (!oldest) {
            return;
        }
        setText(
            byId("stall-text"),
            (oldest.waitsFor || "some ranks").replace(/^./, (c) => c.toUpperCase()) +
                (/^ranks/.test(oldest.waitsFor) ? " have" : " has") +
                " not submitted " +
                oldest.doing +
                ", for which " +
                plural(stuck.length, "rank") +
                (stuck.length === 1 ? " has" : " have") +
                " waited " +
                seconds(oldest.since) +
                ". " +
                (culprit
                    ? "What to try: open it to see where its program is (now: " +
                      culprit.state +
                      ")."
                    : ""),
        );
        byId("stall-open").hidden = !culprit;
        if (culprit) {
            setText(byId("stall-open"), "Open rank " + culprit.rank);
            byId("stall-open").dataset.id = culprit.id;
        }
    };
    let nEvents = "";
    const showEvents = (events) => {
        const key = events.length + ":" + (events.length ? events[events.length - 1][0] : "");
        if (key === nEvents) {
            return;
        }
        nEvents = key;
        byId("events").replaceChildren(
            ...[...events].reverse().map(([time, kind, text]) => {
                const item = make("li", kind === "f" ? "bad" : "");
                const when = make("time", "", new Date(time).toLocaleTimeString());
                when.dateTime = new Date(time).toISOString();
                item.append(when, document.createTextNode(text));
                return item;
            }),
        );
    };
    let job = null;
    const show = (data) => {
        job = data;
        const isOver = data.state === "over",
            isBad = data.failure !== "" || (isOver && data.code !== 0);
        setText(
            byId("state"),
            isOver
                ? data.code === 0
                    ? "done"
                    : "failed"
                : data.failure !== ""
                  ? "failing"
                  : data.state,
        );
        byId("state").className = isBad ? "chip bad" : "chip";
        setText(byId("command"), data.command);
        document.title =
            (isBad ? "✕ " : "") +
            (data.step !== undefined ? "step " + data.step + " · " : "") +
            data.command;
        setText(
            byId("about"),
            plural(data.ranks, "rank") +
                " on " +
                plural(data.hosts, "host") +
                ", started from " +
                data.host +
                (data.generation > 0 ? ", generation " + data.generation : "") +
                " · " +
                duration(data.now - data.begun) +
                (data.missing ? " · waiting for host " + data.missing : "") +
                (data.ready < data.ranks && !isOver
                    ? " · " + data.ready + " of " + data.ranks + " ready"
                    : ""),
        );
        byId("trouble").hidden = data.failure === "";
        setText(byId("failure"), data.failure);
        if (data.step !== undefined) {
            showNumber("step", String(data.step));
        }
        if (data.loss !== undefined && data.loss !== null) {
            showNumber("loss", data.loss.toPrecision(4));
        }
        if (data.samples_s > 0 || !numbers.get("samples").parentElement.hidden) {
            showNumber("samples", inUnits(data.samples_s, "/s"));
        }
        showNumber("step time", data.step_s > 0 ? seconds(data.step_s) : "–");
        showNumber("operations", inUnits(data.operations_s, "/s"));
        showNumber("bytes", inUnits(data.bytes_s, "B/s"));
        showNumber("memory", inUnits(data.memory, "B"));
        showEvents(data.events);
        showRanks(data.rows);
        showStall(isOver || data.failure !== "");
        setText(
            byId("version"),
            "Horovod " +
                data.version +
                (frozen ? ", written " + new Date(data.now).toLocaleString() : ""),
        );
        document.body.classList.remove("lost");
    };

    // --- One rank --------------------------------------------------------------------------------

    const timeline = makeTimeline(colors);

    const showPanel = (data) => {
        if (!data || open !== data.id) {
            return;
        }
        setText(byId("panel-title"), "Rank " + data.rank + " on " + data.host);
        setText(
            byId("panel-about"),
            "process " +
                data.pid +
                ", " +
                data.state +
                (data.code > 0 ? ", exit code " + data.code : "") +
                (data.doing ? ", " + data.doing + " for " + seconds(data.since) : "") +
                (data.last
                    ? ", last finished " + data.last + " " + seconds(data.last_s) + " ago"
                    : "") +
                (data.ended ? ", " + data.ended : ""),
        );
        timeline.show(data.operations);
        byId("stack-part").hidden = data.stack === "";
        setText(byId("stack"), data.stack);
        const log = byId("log"),
            isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
        setText(log, data.log === "" ? "(nothing)" : data.log);
        if (isAtEnd) {
            log.scrollTop = log.scrollHeight;
        }
        byId("panel").hidden = false;
        timeline.draw();
    };
    const ask = () => {
        if (open === null) {
            return;
        }
        if (frozen) {
            showPanel(frozen.ranks[open]);
            return;
        }
        fetch("/rank?id=" + open, { credentials: "same-origin" })
            .then((answer) => (answer.ok ? answer.json() : null))
            .then(showPanel)
            .catch(() => {});
    };
    const choose = (id) => {
        const before = ranks.get(open);
        open = id;
        timeline.follow();
        if (before) {
            showRank(before);
        }
        const view = ranks.get(id);
        if (view) {
            showRank(view);
        }
        byId("panel").hidden = id === null;
        if (view) {
            setText(byId("panel-title"), "Rank " + view.rank + " on " + view.host.name);
        }
        ask();
        if (id !== null) {
            byId("panel").focus({ preventScroll: true });
            byId("panel").scrollIntoView({ block: "nearest" });
        } else if (before && before.row) {
            before.row.focus();
        }
    };

    // --- What people do --------------------------------------------------------------------------

    const focusRow = (row) => {
        byId("hosts")
            .querySelectorAll('tr[tabindex="0"]')
            .forEach((other) => {
                other.tabIndex = -1;
            });
        row.tabIndex = 0;
        row.focus();
    };
    byId("hosts").addEventListener("click", (event) => {
        const row = event.target.closest("tbody tr");
        if (row) {
            focusRow(row);
            choose(Number(row.dataset.id));
        }
    });
    byId("hosts").addEventListener("keydown", (event) => {
        const row = event.target.closest("tbody tr");
        if (!row) {
            return;
        }
        if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            choose(Number(row.dataset.id));
        } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
            const all = [...byId("hosts").querySelectorAll("tbody tr")].filter(
                (one) => one.offsetParent !== null,
            );
            const next = all[all.indexOf(row) + (event.key === "ArrowDown" ? 1 : -1)];
            event.preventDefault();
            if (next) {
                focusRow(next);
            }
        }
    });
    document.addEventListener("keydown", (event) => {
        if (event.key === "Escape" && open !== null) {
            choose(null);
        }
    });
    byId("close").addEventListener("click", () => choose(null));
    byId("stall-open").addEventListener("click", () => {
        choose(Number(byId("stall-open").dataset.id));
    });
    byId("only").addEventListener("change", () => {
        if (job) {
            showRanks(job.rows.map((row) => row.slice(0, 18)));
        }
    });
    const canvas = byId("timeline");
    canvas.addEventListener(
        "wheel",
        (event) => {
            event.preventDefault();
            const box = canvas.getBoundingClientRect();
            timeline.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
        },
        { passive: false },
    );
    canvas.addEventListener("pointermove", (event) => {
        if (event.buttons === 1) {
            timeline.move(-event.movementX / canvas.clientWidth);
        } else {
            timeline.tell(event);
        }
    });
    canvas.addEventListener("keydown", (event) => {
        const act = {
            "+": () => timeline.zoom(0.7, 0.5),
            "=": () => timeline.zoom(0.7, 0.5),
            "-": () => timeline.zoom(1.4, 0.5),
            ArrowLeft: () => timeline.move(-0.2),
            ArrowRight: () => timeline.move(0.2),
            Home: () => {
                timeline.follow();
                timeline.draw();
            },
        }[event.key];
        if (act) {
            event.preventDefault();
            act();
        }
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
        readColors();
        ranks.forEach((view) => {
            if (view.isSeen) {
                drawSpark(view);
            }
        });
        if (open !== null) {
            timeline.draw();
        }
    });
    window.addEventListener("resize", () => {
        if (open !== null) {
            timeline.draw();
        }
    });

    // --- Where it comes from ---------------------------------------------------------------------

    readColors();
    if (frozen) {
        show(frozen.job);
        return;
    }
    const source = new EventSource("/events");
    source.onmessage = (event) => {
        const data = JSON.parse(event.data);
        show(data);
        if (data.state === "over") {
            source.close();
        }
        ask();
    };
    source.onerror = () => {
        if (!job || job.state !== "over") {
            setText(byId("state"), "connection lost");
            document.body.classList.add("lost");
        }
        // The launcher is gone, with its job: asking on would only fill the console.
        source.close();
        if (job && job.state !== "over") {
            setTimeout(() => location.reload(), 60000);
        }
    };
})();
