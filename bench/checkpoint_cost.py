# SPDX-License-Identifier: Apache-2.0
"""What a training step pays while a checkpoint is written.

Rounds of steps without and with a save follow each other; the ratio is that of the medians of all
steps, and of their sums (which has the copy to memory in it). Usage:

    horovodrun -np 2 python bench/checkpoint_cost.py FOLDER [MEGABYTES [ROUNDS [STEPS]]]
"""
import statistics
import sys
import time

import torch

import horovod.torch as hvd

FOLDER = sys.argv[1]
MEGABYTES, ROUNDS, STEPS = (int(word) for word in [*sys.argv[2:], *"1024 5 40".split()[
    len(sys.argv) - 2:]])


def main():
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4),
                                         named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    state = {"model": model, "rest": [torch.ones(1 << 18) for _ in range(MEGABYTES)]}
    x = torch.randn(256, 512)

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    for _ in range(5):
        step()
    plain, saving, copies, writes, during = [], [], [], [], []
    saved = None
    for number in range(ROUNDS):
        if saved is not None:
            saved.wait()
        hvd.barrier()
        plain += [step() for _ in range(STEPS)]
        begin = time.perf_counter()
        saved = hvd.checkpoint.save(FOLDER, state, number, keep=1)
        copies.append(time.perf_counter() - begin)
        while len(during) < STEPS * (number + 1) and not saved.done():
            during.append(step())
        # Ranks end together: whoever has written its share goes on as long as the others.
        while hvd.allreduce(torch.tensor(float(not saved.done())), op=hvd.Max, name="on") > 0 \
                and len(during) < 100 * STEPS * (number + 1):
            during.append(step())
        writes.append(time.perf_counter() - begin)
    if hvd.rank() == 0:
        def more(average):
            return f"{100 * (average(during) / average(plain) - 1):+.1f} %"

        print(f"{hvd.size()} ranks, {MEGABYTES} MB, {ROUNDS} rounds: step "
              f"{1e3 * statistics.median(plain):.1f} ms; during a save {more(statistics.median)} "
              f"(medians), {more(statistics.mean)} (means); copy "
              f"{statistics.median(copies):.2f} s, on the disk after "
              f"{statistics.median(writes):.1f} s", flush=True)


main()
