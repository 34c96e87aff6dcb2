#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of the job page in docs/img from real runs; `make pictures` runs it.

A training on four ranks that goes well, one with a rank that is late, and one with a rank that
hangs, as a Chromium shows them.

Usage: pictures.py BUILD-DIRECTORY FOLDER
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from playwright.sync_api import sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD, FOLDER = (pathlib.Path(path).resolve() for path in sys.argv[1:])
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
TRAIN = """
import sys
import time

import torch

import horovod.torch as hvd

WHAT = sys.argv[1] if len(sys.argv) > 1 else ""


def read_batch(step):
    if WHAT == "hang" and step == 60 and hvd.rank() == 2:
        time.sleep(1000)  # a file server that does not answer
    if WHAT == "late" and hvd.rank() == 2:
        time.sleep(0.1)
    return torch.randn(64, 256)


hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                     named_parameters=model.named_parameters())
for step in range(1, 100000):
    batch = read_batch(step)
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    hvd.report(step=step, loss=loss.item(), samples=len(batch))
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
"""
# What must be seen before the picture is taken, and the row that is opened.
CASES = [
    ("job-page", "", "/k?\\/s/.test(document.getElementById('numbers').textContent)", 1, 40),
    ("job-late", "late", "document.querySelector('tr.late')", None, 15),
    ("job-stall", "hang", "!document.getElementById('stall').hidden", 2, 1),
]


def wait(page, script, seconds=180):
    deadline = time.monotonic() + seconds
    while not page.evaluate(f"Boolean({script})"):
        if time.monotonic() > deadline:
            raise SystemExit(f"pictures: not within {seconds} s: {script}")
        page.wait_for_timeout(500)


def draw(browser, folder, name, what, seen, row, settle_s):
    command = [BUILD / "horovodrun", "-np", "4", "--dashboard", "--title", "python train.py",
               ROOT / ".venv/bin/python", "train.py", what]
    job = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           stdin=subprocess.DEVNULL, text=True,
                           env={**os.environ, "PYTHONPATH": str(BUILD / "python")})
    try:
        url = next(found[0] for line in job.stdout if (found := re.search(r"http://\S+", line)))
        page = browser.new_page(viewport={"width": 1100, "height": 700})
        page.goto(url)
        wait(page, seen)
        page.wait_for_timeout(settle_s * 1000)
        if row is not None:
            page.locator("tbody tr").nth(row).click()
            wait(page, "document.getElementById('log').textContent")
        page.wait_for_timeout(1500)
        page.mouse.move(0, 0)
        page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
        page.close()
    finally:
        job.terminate()
        job.communicate(timeout=60)


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="job-") as folder, sync_playwright() as playwright:
        pathlib.Path(folder, "train.py").write_text(TRAIN)
        browser = playwright.chromium.launch(executable_path=CHROMIUM,
                                             args=["--no-sandbox", "--disable-gpu"])
        for case in CASES:
            draw(browser, folder, *case)
        browser.close()


main()
