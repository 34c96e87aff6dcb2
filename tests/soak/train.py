# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the soak do: train.py FOLDER torch|keras elastic|fixed

Gradients are whole numbers that do not depend on the rank, so the weights after a step are known
exactly, whoever took part in it; every sum over the ranks is checked too. A rank prints each step.
In the folder the soak leaves files: `over` ends the job, `raise.<host>`, `memory.<host>` and
`exit.<host>` are obeyed once by the rank of that host.
"""
import os
import pathlib
import sys
import time

FOLDER = pathlib.Path(sys.argv[1])
FRAMEWORK, KIND = sys.argv[2:]
HOST = os.environ["HOROVOD_HOSTNAME"]
N_SUMMED = 50000


def obey():
    for order in ("raise", "memory", "exit"):
        try:
            (FOLDER / f"{order}.{HOST}").unlink()
        except FileNotFoundError:
            continue
        if order == "raise":
            raise RuntimeError("broken on purpose")
        if order == "memory":
            bytearray(1 << 50)
        os._exit(0)


def gradient_of(step):
    return step * 7 % 11 - 4


def weight_after(n_steps):
    return 100 - sum(map(gradient_of, range(n_steps)))


def check(condition, *facts):
    if not condition:
        print("WRONG", *facts, flush=True)
        os._exit(77)


def did(step, hvd):
    print(f"step {step} rank {hvd.rank()} of {hvd.size()} on {HOST}", flush=True)
    time.sleep(0.02)


def torch_main():
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.full((4,), 100.0, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0),
                                         named_parameters=[("weight", weight)])
    model = torch.nn.ParameterList([weight])
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    def train(state):
        is_over = False
        while not is_over:
            obey()
            is_over = hvd.broadcast_object((FOLDER / "over").exists(), name="over")
            ones = torch.full((N_SUMMED,), hvd.rank() + 1.0)
            total = hvd.allreduce(ones, op=hvd.Sum, name="sum")
            expected = hvd.size() * (hvd.size() + 1) / 2
            check(bool((total == expected).all()), "sum", total[0].item(), expected)
            optimizer.zero_grad()
            (weight * gradient_of(state.step)).sum().backward()
            optimizer.step()
            state.step += 1
            check(bool((weight == weight_after(state.step)).all()), "weights after", state.step,
                  weight.tolist())
            did(state.step, hvd)
            state.commit()

    if KIND == "elastic":
        hvd.elastic.run(train)(state)
    else:
        train(state)
    print("done", state.step, weight.tolist(), flush=True)


def keras_main():
    import numpy as np
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    hvd.init()
    model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.0)), "mse")
    data = np.ones((8, 1), "float32")

    class Watch(tf.keras.callbacks.Callback):
        step = 0

        def on_train_batch_end(self, batch, logs=None):
            obey()
            self.step += 1
            over = hvd.allreduce(float((FOLDER / "over").exists()), name="over", op=hvd.Sum)
            total = hvd.allreduce(hvd.rank() + 1.0, name="sum", op=hvd.Sum)
            check(float(total) == hvd.size() * (hvd.size() + 1) / 2, "sum", float(total))
            check(float(model.weights[0][0, 0]) == 1.0, "weights", model.get_weights())
            did(self.step, hvd)
            self.model.stop_training = float(over) > 0

    while not model.stop_training:
        model.fit(data, data, batch_size=1, epochs=1000, verbose=0, callbacks=[Watch()])
    print("done", flush=True)


if FRAMEWORK == "torch":
    torch_main()
else:
    keras_main()
