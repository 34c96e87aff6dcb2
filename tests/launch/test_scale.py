#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many ranks on few cores: they start, reduce and end, and nobody takes a friend for a stranger.

Usage: test_scale.py BUILD-DIRECTORY [unittest arguments]
"""
import resource
import time

from launching import BUILD, SLACK, Case, Job, main

RANK = BUILD / "examples/allreduce"


def few_open_files():
    """What a shell usually allows; more may be had for the asking."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 20000))


class Many(Case):
    def start(self, n, seconds, **options):
        begun = time.monotonic()
        job = Job("-np", n, "-H", f"localhost:{n}", RANK, **options)
        code, out, err = job.wait(seconds * SLACK)
        elapsed = time.monotonic() - begun
        self.assertEqual(code, 0, err.decode()[-4000:])
        self.assertEqual(out.count(f" of {n}: ".encode()), n, out[-2000:])
        self.assertNotIn(b"warning", err)
        self.finish(job, 5)
        print(f"{elapsed:.1f} s", end=" ", flush=True)

    def test_64(self):
        self.start(64, 5)

    def test_256(self):
        self.start(256, 60)

    def test_128_with_few_open_files(self):
        self.start(128, 60, preexec_fn=few_open_files)


if __name__ == "__main__":
    main()
