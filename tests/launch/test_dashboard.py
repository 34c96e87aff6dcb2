#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The job page without a browser: what it tells, who may ask, and what it costs nobody.

Real jobs on this machine. tests/dashboard has the same in a browser.

Usage: test_dashboard.py BUILD-DIRECTORY [unittest arguments]
"""
import contextlib
import http.client
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

from launching import BUILD, HOROVODRUN, Case, Job, clean_environment, eventually, main

PYTHON = BUILD.parent / ".venv/bin/python" if (BUILD.parent / ".venv").exists() else sys.executable
TRAIN = pathlib.Path(__file__).with_name("watched.py")
ENVIRONMENT = {"PYTHONPATH": str(BUILD / "python")}


class Page:
    """A client of the page of a job."""

    def __init__(self, port, token):
        self.port, self.token = port, token

    def get(self, path, host="127.0.0.1", bearer=True, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if bearer:
            named["Authorization"] = "Bearer " + self.token
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": host, **named}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        if "event-stream" not in answer.headers["Content-Type"]:
            answer.text = answer.read().decode()
            connection.close()
        return answer

    def job(self):
        """The picture that the next client gets first."""
        answer = self.get("/events")
        line = answer.fp.readline()
        answer.close()
        return json.loads(line.decode().removeprefix("data: "))


@contextlib.contextmanager
def running(*words, np=2, train=(), **options):
    with tempfile.TemporaryDirectory() as folder:
        errors = pathlib.Path(folder, "errors")
        with errors.open("wb") as file:
            job = Job("-np", np, "--dashboard", *words, PYTHON, TRAIN, *train, stdout=file,
                      stderr=file, env={**ENVIRONMENT, **options})
            job.text = lambda: errors.read_text(errors="replace")
            try:
                assert eventually(lambda: "/?token=" in job.text(), 20), job.text()
                found = re.search(r"http://127.0.0.1:(\d+)/\?token=(\w+)", job.text())
                yield job, Page(int(found[1]), found[2])
            finally:
                job.kill()
                job.process.wait(20)


def until(page, holds, timeout_s=40):
    """The first picture of the job of which this is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        job = page.job()
        if holds(job):
            return job
        assert time.monotonic() < deadline, job
        time.sleep(0.3)


def is_running(job):
    return job["state"] == "running" and job.get("step", 0) >= 20 and job["bytes_s"] > 0


class WhatItTells(Case):
    def test_a_healthy_job(self):
        with running(np=3) as (job, page):
            seen = until(page, is_running)
            self.assertEqual([seen["ranks"], seen["ready"], seen["hosts"]], [3, 3, 1])
            self.assertGreater(seen["samples_s"], 0)
            self.assertGreater(seen["step_s"], 0.01)
            self.assertEqual([row[1] for row in seen["rows"]], [0, 1, 2])
            for row in seen["rows"]:
                self.assertAlmostEqual(row[11] + row[12] + row[13], 1, delta=0.01)
                self.assertGreater(row[14], 5e6)  # a process of Python
            one = json.loads(page.get("/rank?id=1").text)
            self.assertEqual(one["rank"], 1)
            self.assertIn("step 20", one["log"])
            self.assertTrue(any(operation[6] == "grad.<b>0" for operation in one["operations"]))
            for submitted, agreed, started, finished, *_ in one["operations"]:
                self.assertLessEqual(submitted, finished)
                self.assertLess(abs(finished / 1e6 - time.time()), 60)
            text = page.get("/text").text
            self.assertIn("3 of 3 ranks on 1 host", text)
            self.assertEqual(page.get("/rank?id=99").text, "null")

    def test_metrics_in_both_forms(self):
        with running() as (job, page):
            until(page, is_running)
            plain = page.get("/metrics")
            self.assertIn("version=0.0.4", plain.headers["Content-Type"])
            self.assertRegex(plain.text,
                             r'\nhvd_operations_total\{rank="1",host="[^"]+",'
                             r'operation="allreduce"\} [1-9]')
            self.assertRegex(plain.text, r'\nhvd_report_step\{rank="0",host="[^"]+"\} [1-9]')
            grafana = (BUILD.parent / "deploy/grafana/horovod.json")
            asked = set(re.findall(r"hvd_\w+", grafana.read_text()))
            shown = set(re.findall(r"^(hvd_\w+)", plain.text, re.MULTILINE))
            self.assertGreater(len(asked), 10)
            self.assertEqual(asked - shown, set())
            opened = page.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
            self.assertTrue(opened.text.endswith("# EOF\n"))
            self.assertIn("# TYPE hvd_operations counter\n", opened.text)

    def test_a_stall_has_its_stack(self):
        with running(train=["stall", "1"]) as (job, page):
            seen = until(page, lambda job: any(row[5] == "rank 1" for row in job["rows"]))
            waiting = next(row for row in seen["rows"] if row[1] == 0)
            self.assertEqual(waiting[3], "waiting")
            one = {}
            self.assertTrue(eventually(
                lambda: one.update(json.loads(page.get("/rank?id=1").text)) or one["stack"], 20))
            self.assertIn("in load_data", one["stack"])

    def test_a_straggler_is_late(self):
        with running(np=3, train=["slow", "2"], WATCHED_STEP_S="0.1") as (job, page):
            seen = until(page, lambda job: any(row[16] > 0 for row in job["rows"]), 60)
            self.assertEqual([row[1] for row in seen["rows"] if row[16] > 0], [2])

    def test_a_killed_rank_is_told_and_stays_in_the_report(self):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "report.html")
            with running("--report", report, train=["kill", "1"]) as (job, page):
                answer = page.get("/events")
                last = ""
                with contextlib.suppress(OSError, http.client.HTTPException):
                    while line := answer.fp.readline():
                        last = line.decode() if line.startswith(b"data: ") else last
                seen = json.loads(last.removeprefix("data: "))
                self.assertEqual(seen["state"], "over")
                self.assertIn("rank 1", seen["failure"])
                self.assertIn("SIGKILL", seen["failure"])
                self.assertTrue(any("rank 1" in text and kind == "f"
                                    for _, kind, text in seen["events"]))
                job.process.wait(20)
            html = report.read_text()
            self.assertIn("SIGKILL", html)
            self.assertNotIn("grad.<b>", html)
            self.assertEqual(report.stat().st_mode & 0o777, 0o600)


class WhoMayAsk(Case):
    def test_only_who_has_the_token(self):
        with running() as (job, page):
            until(page, is_running)
            for path in "/", "/events", "/rank?id=0", "/metrics", "/text", "/nothing":
                self.assertEqual(page.get(path, bearer=False).status, 401, path)
                wrong = Page(page.port, page.token[:-1])
                self.assertEqual(wrong.get(path).status, 401, path)
                self.assertEqual(page.get(path, bearer=False, Cookie="hvd-1=" + page.token).status,
                                 401)
            cookie = f"hvd-{page.port}={page.token}"
            self.assertEqual(page.get("/", bearer=False, Cookie=cookie).status, 200)
            entry = page.get("/?token=" + page.token, bearer=False)
            self.assertEqual([entry.status, entry.headers["Location"]], [303, "/"])
            self.assertRegex(entry.headers["Set-Cookie"], "HttpOnly; SameSite=Strict")
            self.assertEqual(page.get("/nothing").status, 404)
            self.assertEqual(page.get("/", method="POST").status, 405)
            html = page.get("/")
            self.assertIn("default-src 'none'", html.headers["Content-Security-Policy"])
            self.assertNotIn("Access-Control-Allow-Origin", html.headers)

    def test_names_that_point_here_are_refused(self):
        with running() as (job, page):
            for host in "evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", "":
                self.assertIn(page.get("/", host=host).status, (400, 421), host)
            for host in "localhost:9", "127.0.0.1", f"[::1]:{page.port}":
                self.assertEqual(page.get("/text", host=host).status, 200, host)

    def test_other_sites_are_refused(self):
        with running() as (job, page):
            cookie = f"hvd-{page.port}={page.token}"
            for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"},
                            {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}):
                for path in "/", "/events", "/metrics":
                    answer = page.get(path, bearer=False, Cookie=cookie, **headers)
                    self.assertEqual(answer.status, 403, (path, headers))
            self.assertEqual(page.get("/?token=" + page.token, bearer=False,
                                      Sec_Fetch_Site="cross-site").status, 303)

    def test_beyond_loopback_it_takes_a_certificate(self):
        job = Job("-np", 1, "--dashboard", "--dashboard-address", "0.0.0.0", "true")
        code, _, errors = job.wait()
        self.assertNotEqual(code, 0)
        self.assertIn(b"--dashboard-certificate", errors)

    def test_a_token_that_others_can_read_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            token = pathlib.Path(folder, "token")
            token.write_text("a-token-of-our-own-23\n")
            token.chmod(0o644)
            code, _, errors = Job("-np", 1, "--dashboard", "--dashboard-token-file", token,
                                  "true").wait()
            self.assertNotEqual(code, 0)
            self.assertIn(b"can be read or changed by other users", errors)
            self.assertNotIn(b"a-token", errors)

    def test_under_tls(self):
        with tempfile.TemporaryDirectory() as folder:
            pem, token = pathlib.Path(folder, "page.pem"), pathlib.Path(folder, "token")
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days",
                            "2", "-subj", "/CN=page", "-keyout", pem, "-out", f"{pem}.crt"],
                           check=True, stderr=subprocess.DEVNULL)
            pem.write_text(pem.read_text() + pathlib.Path(f"{pem}.crt").read_text())
            token.write_text("a-token-of-our-own-23\n")
            token.chmod(0o600)
            job = Job("-np", 1, "--dashboard", "--dashboard-address", "0.0.0.0",
                      "--dashboard-certificate", pem, "--dashboard-token-file", token, PYTHON,
                      TRAIN, env=ENVIRONMENT, stderr=subprocess.STDOUT)
            try:
                line = job.process.stdout.readline().decode()
                port = int(re.search(r"https://0.0.0.0:(\d+)/", line)[1])
                self.assertNotIn("a-token", line)
                asked = subprocess.run(
                    ["curl", "-sk", "-H", "Authorization: Bearer a-token-of-our-own-23",
                     f"https://localhost:{port}/text"], capture_output=True, text=True)
                self.assertIn("1 host", asked.stdout)
                asked = subprocess.run(  # as Prometheus calls a pod, and as nobody may
                    ["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code} ",
                     f"https://127.0.0.2:{port}/text", "-o", "/dev/null",
                     f"https://evil.example:{port}/text", "--resolve",
                     f"evil.example:{port}:127.0.0.2"], capture_output=True, text=True)
                self.assertEqual(asked.stdout.split(), ["401", "421"])
            finally:
                job.kill()
                job.process.communicate()


class WhatItCosts(Case):
    def test_two_thousand_slow_readers(self):
        """They push out each other; who has the token still gets its answers, and ranks go on."""
        with running() as (job, page):
            first = until(page, is_running)["step"]
            strangers = []
            try:
                for i in range(2000):
                    one = socket.socket()
                    one.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        one.connect(("127.0.0.1", page.port))
                    strangers.append(one)
                for one in strangers:
                    with contextlib.suppress(OSError):
                        one.send(b"GET / HTTP/1.1\r\n")
                self.assertTrue(eventually(lambda: self.answers(page), 60))
                until(page, lambda job: job["step"] > first)
            finally:
                for one in strangers:
                    one.close()

    @staticmethod
    def answers(page):
        try:
            return page.get("/text").status == 200
        except OSError:
            return False

    def test_who_does_not_read_events_is_cut(self):
        with running() as (job, page):
            until(page, is_running)
            slow = socket.create_connection(("127.0.0.1", page.port))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.sendall(f"GET /events?token={page.token} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                         .encode())
            time.sleep(1)
            self.assertGreater(until(page, is_running)["step"], 0)
            slow.close()


class InATerminal(Case):
    def test_a_line_shows_how_it_gets_on_but_never_in_a_pipe(self):
        text = self.in_a_terminal("--color", "never", "-np", "2", PYTHON, TRAIN, "for", "6")
        self.assertRegex(text, r"\d of 2 ranks ready")
        self.assertRegex(text, r"\r?\x1b\[K.*step \d+, loss [\d.]+, [\d.]+ k?samples/s")
        self.assertIn("[0]<stdout>:step 20", text)
        code, out, errors = Job("-np", 2, PYTHON, TRAIN, "for", "5", env=ENVIRONMENT).wait()
        self.assertEqual(code, 0)
        self.assertNotIn(b"\x1b", out + errors)
        self.assertNotIn(b"samples", out + errors)
        text = self.in_a_terminal("--no-progress", "-np", "2", PYTHON, TRAIN, "for", "3")
        self.assertNotIn("samples", text)

    @staticmethod
    def in_a_terminal(*words):
        ours, theirs = pty.openpty()
        process = subprocess.Popen([str(HOROVODRUN), *map(str, words)], stdin=subprocess.DEVNULL,
                                   stdout=theirs, stderr=theirs, start_new_session=True,
                                   env={**clean_environment(), **ENVIRONMENT, "TERM": "xterm"})
        os.close(theirs)
        text, deadline = b"", time.monotonic() + 60
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                text += os.read(ours, 65536)
            except OSError:
                break
        os.close(ours)
        process.wait(10)
        return text.decode(errors="replace")

    def test_top_looks_at_a_job_that_nobody_watches(self):
        job = Job("-np", 2, PYTHON, TRAIN, env=ENVIRONMENT)
        try:
            text = ""
            deadline = time.monotonic() + 40
            while "step" not in text and time.monotonic() < deadline:
                time.sleep(1)
                text = subprocess.run([HOROVODRUN, "--top", str(job.process.pid)],
                                      capture_output=True, text=True).stdout
            self.assertRegex(text, r"2 of 2 ranks on 1 host.*step \d+")
            self.assertRegex(text, r"\n0 +localhost|\n0 +\S+")
        finally:
            job.process.send_signal(signal.SIGTERM)
            job.wait()
        none = subprocess.run([HOROVODRUN, "--top", str(job.process.pid)], capture_output=True,
                              text=True)
        self.assertEqual(none.returncode, 1)
        self.assertIn("no job of this user", none.stderr)


class Tools(Case):
    def test_each_has_a_manual_page(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([BUILD.parent / "tools/man-pages", HOROVODRUN, folder], check=True)
            for name, part in [("horovodrun", r"\-\-dashboard"), ("hvd-info", r"\-\-live"),
                               ("hvd-bench", r"\-\-simulate")]:
                page = pathlib.Path(folder, name + ".1").read_text()
                self.assertRegex(page, rf'^\.TH {name.upper()} 1 ')
                self.assertIn(part, page)

    def test_one_program_is_all_tools(self):
        for name, words, expected in [("hvd-info", ["--build"], "libhvd"),
                                      ("hvd-bench", ["--help"], "usage: hvd-bench")]:
            done = subprocess.run([name, *words], executable=HOROVODRUN, capture_output=True,
                                  text=True)
            self.assertIn(expected, done.stdout + done.stderr)
        done = subprocess.run([HOROVODRUN, "--bench", "--", "--bytes", "4", "--budget", "0.1"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"allreduce +float32 +4 .*correct")


if __name__ == "__main__":
    main()
