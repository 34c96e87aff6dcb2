#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules about threads that clang sees at compile time (src/base/guard.h, -Wthread-safety).

Each case is a function of a few lines in two versions: one that has what it needs, which must
compile, and the same without, which must not. test_guard.c has what only shows as it runs.

Usage: test_guard.py [unittest arguments]
"""
import pathlib
import shutil
import subprocess
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
HEADERS = '#include "engine/engine.h"\n#include "engine/run.h"\n#include "observe/internal.h"\n' \
    '#include "web/web.h"\n'

# What is missing, and a function in which only the lines marked with ! supply it.
CASES = {
    "the lock, to make a request": """
        request_t *f(hvd_ctx_t *ctx) {
        !   lock_take(&ctx->lock);
            request_t *request = request_new(ctx);
        !   lock_release(&ctx->lock);
            return request; }""",
    "the lock, said by the caller": """
        hvd_status_t f(hvd_ctx_t *ctx, err_t *err)
        !   REQUIRES(ctx->lock)
            ;
        hvd_status_t f(hvd_ctx_t *ctx, err_t *err) { return check_running(ctx, err); }""",
    "the baton, to run": """
        bool f(hvd_ctx_t *ctx)
        !   REQUIRES(ctx->baton)
            ;
        bool f(hvd_ctx_t *ctx) { return run_progress(ctx); }""",
    "the baton, where a pointer was called": """
        void f(hvd_ctx_t *ctx, const err_t *err) {
        !   HELD(ctx);
            engine_fail(ctx, err, -1); }""",
    "the baton, to start a way": """
        hvd_status_t f(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err) {
        !   HELD(ctx);
            return way_nccl_start(ctx, r, task, err); }""",
    "the lock of the job page's model": """
        int f(model_t *model) {
        !   lock_take(&model->lock);
            int n = model_sums(model).n_there;
        !   lock_release(&model->lock);
            return n; }""",
    "the job's lock, to count": """
        void f(observe_t *o) {
        !   JOB_LOCKED(o);
            counters_catch_up(o); }""",
    "to let go of the lock before what takes it": """
        void f(hvd_ctx_t *ctx, request_t *request) {
            lock_take(&ctx->lock);
        !   lock_release(&ctx->lock);
            request_complete(ctx, request, HVD_OK, NULL);
        !   lock_take(&ctx->lock);
            lock_release(&ctx->lock); }""",
    "to let go of the lock at all": """
        void f(hvd_ctx_t *ctx) {
            lock_take(&ctx->lock);
        !   lock_release(&ctx->lock);
        }""",
}


def lines_of(code, is_whole):
    for line in code.splitlines():
        marked = line.lstrip().startswith("!")
        if is_whole or not marked:
            yield line.replace("!", " ", 1) if marked else line


def complaints(code):
    """What clang says of it."""
    command = ["clang", "-fsyntax-only", "-std=gnu11", f"-I{SOURCE}/include", f"-I{SOURCE}/src",
               "-Wthread-safety", "-Werror", "-x", "c", "-"]
    return subprocess.run(command, input=HEADERS + code + "\n", stderr=subprocess.PIPE, text=True,
                          timeout=60, check=False).stderr


@unittest.skipUnless(shutil.which("clang"), "there is no clang here")
class Rules(unittest.TestCase):
    def test_what_is_missing_does_not_compile(self):
        for missing, code in CASES.items():
            with self.subTest(missing):
                self.assertEqual(complaints("\n".join(lines_of(code, True))), "")
                self.assertIn("-Wthread-safety", complaints("\n".join(lines_of(code, False))))


if __name__ == "__main__":
    unittest.main()
