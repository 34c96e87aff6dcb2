#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The job page in a real Chromium: what it shows of real jobs, and of many simulated ranks.

`make test-dashboard` installs what it takes and runs it. For every case: no message in the console,
no request to anybody else, nothing of a name becomes HTML, texts that can be read in light and
dark, a picture in the folder.

Usage: test_browser.py BUILD-DIRECTORY FOLDER [unittest arguments]
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

from playwright.sync_api import sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]).resolve()
FOLDER = pathlib.Path(sys.argv[2]).resolve()
PYTHON = ROOT / ".venv/bin/python"
TRAIN = ROOT / "tests/launch/watched.py"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")

# Every text that can be seen, with its contrast to what is behind it.
CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => (c /= 255) <= 0.03928 ? c / 12.92
      : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] > 0) { return color; }
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.getClientRects().length || element.tagName === "SCRIPT") { continue; }
    const a = light(parse(getComputedStyle(element).color)), b = light(behind(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) { found.push([element.className || element.tagName, ratio]); }
  }
  return found;
}"""


class Browser(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        FOLDER.mkdir(parents=True, exist_ok=True)
        cls.playwright = sync_playwright().start()
        cls.browser = cls.playwright.chromium.launch(executable_path=CHROMIUM,
                                                     args=["--no-sandbox", "--disable-gpu"])

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()

    def open(self, url, **options):
        context = self.browser.new_context(viewport={"width": 1200, "height": 820}, **options)
        self.addCleanup(context.close)
        page = context.new_page()
        self.said, self.asked, self.host = [], [], url.split("/?")[0]
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append("dialog " + dialog.message))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)
        return page

    def start(self, *words, train=(), command=None):
        process = subprocess.Popen(
            command or [BUILD / "horovodrun", "--dashboard", *map(str, words), PYTHON, TRAIN,
                        *train],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "WATCHED_STEP_S": "0.1" if "slow" in train else "0.03",
                 "PYTHONPATH": str(BUILD / "python")})
        self.addCleanup(self.stop, process)
        for line in process.stdout:
            found = re.search(r"http://\S+", line)
            if found:
                return process, found[0]
        raise AssertionError("no address")

    @staticmethod
    def stop(process):
        process.terminate()
        process.communicate(timeout=30)

    def check(self, page, name, lost=False):
        said = [text for text in self.said if not (lost and "ERR_" in text)]
        self.assertEqual(said, [])
        foreign = [url for url in self.asked if not url.startswith((self.host, "data:"))]
        self.assertEqual(foreign, [])
        self.assertEqual(page.locator("main script, main img, main b:has(b), main i:has(i)")
                         .count(), 0)
        for scheme in "light", "dark":
            page.emulate_media(color_scheme=scheme)
            self.assertEqual(page.evaluate(CONTRASTS), [], scheme)
            page.screenshot(path=FOLDER / f"{name}-{scheme}.png", full_page=name != "many")
        page.emulate_media(color_scheme="light")

    @staticmethod
    def wait(page, script, seconds=40):
        # Not page.wait_for_function: the page's policy forbids it to evaluate.
        deadline = time.monotonic() + seconds
        while not page.evaluate(script):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {script}")
            page.wait_for_timeout(200)

    # --- Cases ------------------------------------------------------------------------------------

    def test_healthy(self):
        _, url = self.start("-np", 4)
        page = self.open(url)
        self.wait(page, "document.querySelectorAll('tbody tr').length === 4")
        self.wait(page, "/samples/.test(document.getElementById('numbers').textContent)")
        self.assertNotIn("token", page.url)
        page.wait_for_timeout(8000)
        page.keyboard.press("Tab")
        page.locator("tbody tr").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        self.wait(page, "!document.getElementById('panel').hidden")
        self.assertIn("Rank 1 on", page.locator("#panel-title").text_content())
        self.wait(page, "/step 20/.test(document.getElementById('log').textContent)")
        page.locator("#timeline").focus()
        before = page.locator("#span").text_content()
        page.keyboard.press("+")
        self.assertNotEqual(page.locator("#span").text_content(), before)
        self.check(page, "healthy")
        page.keyboard.press("Escape")
        self.assertTrue(page.locator("#panel").is_hidden())
        self.assertEqual(page.evaluate("document.activeElement.tagName"), "TR")
        page.locator("#only").check()  # on a busy machine one may really be late
        self.wait(page, "document.getElementById('none').hidden === "
                        "[...document.querySelectorAll('tbody tr')].some((row) => !row.hidden)")

    def test_straggler(self):
        _, url = self.start("-np", 4, train=["slow", "2"])
        page = self.open(url)
        self.wait(page, "[...document.querySelectorAll('tr.late')].map((row) => "
                        "row.cells[0].textContent).join() === '2'", 60)
        self.check(page, "straggler")

    def test_stall(self):
        _, url = self.start("-np", 3, train=["stall", "1"])
        page = self.open(url)
        self.wait(page, "/waits for rank 1/.test(document.getElementById('hosts').textContent)", 60)
        page.locator("tbody tr").nth(1).click()
        self.wait(page, "/in load_data/.test(document.getElementById('stack').textContent)")
        self.wait(page, "document.querySelectorAll('tr.bad').length === 2", 60)
        self.assertIn("Rank 1 has not submitted allreduce",
                      page.locator("#stall-text").text_content())
        page.keyboard.press("Escape")
        page.locator("#stall-open").click()
        self.assertIn("Rank 1 on", page.locator("#panel-title").text_content())
        self.check(page, "stall")

    def test_killed(self):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "report.html")
            process, url = self.start("-np", 3, "--report", report, train=["kill", "1"])
            page = self.open(url)
            self.wait(page, "/SIGKILL/.test(document.getElementById('failure').textContent)", 60)
            self.wait(page, "document.getElementById('state').textContent === 'failed'")
            self.check(page, "killed", lost=True)
            process.wait(30)
            page = self.open(report.as_uri())
            self.assertIn("SIGKILL", page.locator("#failure").text_content())
            page.locator("tbody tr").nth(2).click()
            self.assertIn("step 20", page.locator("#log").text_content())
            self.host = "file://"
            self.check(page, "report")

    def test_elastic(self):
        with tempfile.TemporaryDirectory() as folder:
            hosts, script = pathlib.Path(folder, "hosts"), pathlib.Path(folder, "discover.sh")
            script.write_text(f"#!/bin/sh\ncat {hosts}\n")
            script.chmod(0o755)
            hosts.write_text("localhost:2\n")
            train = ROOT / "tests/dashboard/elastic.py"
            _, url = self.start(command=[
                BUILD / "horovodrun", "--dashboard", "-np", "2", "--min-np", "1", "--max-np", "3",
                "--host-discovery-script", script, PYTHON, train])
            page = self.open(url)
            rows = "document.querySelectorAll('tbody tr').length"
            self.wait(page, f"{rows} === 2 && /generation 1/.test(document.body.textContent)")
            hosts.write_text("localhost:3\n")
            self.wait(page, f"{rows} === 3 && /generation 2/.test(document.body.textContent)", 60)
            hosts.write_text("localhost:1\n")
            self.wait(page, f"{rows} === 1 && /generation 3/.test(document.body.textContent)", 60)
            page.wait_for_timeout(2500)
            self.assertIn("1 rank on 1 host,", page.locator("#about").text_content())
            self.check(page, "elastic")

    def many(self, n, name):
        _, url = self.start(command=[BUILD / "tests/dashboard_simulate", str(n)])
        page = self.open(url)
        self.wait(page, f"document.querySelectorAll('.tiles button').length === {n}")
        self.wait(page, "document.querySelectorAll('.tiles button.bad').length >= 2")
        self.wait(page, "document.querySelectorAll('.tiles button.late').length === 1", 60)
        spent = page.evaluate("""() => new Promise((done) => {
          let worst = 0, last = performance.now();
          const tick = (now) => { worst = Math.max(worst, now - last); last = now;
            if (now > start + 6000) { done(worst); } else { requestAnimationFrame(tick); } };
          const start = last; requestAnimationFrame(tick); })""")
        page.locator(".host > button").first.click()
        page.locator("tbody tr").nth(5).click()
        self.wait(page, "/Rank 5 on/.test(document.getElementById('panel-title').textContent)")
        self.assertIn("<b>node</b>-0", page.locator(".host b").first.text_content())
        self.check(page, name)
        return spent

    def test_many(self):
        self.assertLess(self.many(256, "many"), 500)

    def test_a_thousand(self):
        self.assertLess(self.many(1000, "thousand"), 1000)

    def test_phone(self):
        _, url = self.start(command=[BUILD / "tests/dashboard_simulate", "12"])
        context = self.browser.new_context(**self.playwright.devices["Pixel 5"])
        self.addCleanup(context.close)
        page = context.new_page()
        page.goto(url)
        self.wait(page, "document.querySelectorAll('tbody tr').length === 12")
        page.wait_for_timeout(3000)
        width = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        self.assertLessEqual(width, 0)
        page.screenshot(path=FOLDER / "phone.png")

    def test_another_site_gets_nothing(self):
        _, url = self.start("-np", 1)
        page = self.open(url)
        page.goto("about:blank")
        self.said.clear()
        outcome = page.evaluate("""(url) => Promise.all(["", "events", "metrics"].map((path) =>
          fetch(url + path, { credentials: "include" }).then(() => "read", () => "no")))
          """, url.split("?")[0])
        self.assertEqual(set(outcome), {"no"})


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
