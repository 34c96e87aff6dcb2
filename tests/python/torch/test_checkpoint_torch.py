# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch: models and optimizers; what a training step pays while one is written."""
import pytest
import torch
from ranks import run_ranks

import horovod.torch as hvd

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]


def test_every_dtype(tmp_path):
    state = {str(dtype): (torch.arange(12) % 5).reshape(3, 4).to(dtype).t() for dtype in DTYPES}
    state["empty"], state["scalar"] = torch.empty(0, 3), torch.tensor(7, dtype=torch.bfloat16)
    hvd.checkpoint.save(tmp_path, state, 1, wait=True)
    found = hvd.checkpoint.load(tmp_path).state
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_what_it_does_not_take(tmp_path):
    with pytest.raises(TypeError, match="torch.sparse_coo.*plain tensors"):
        hvd.checkpoint.save(tmp_path, {"a": torch.eye(2).to_sparse()}, 1)


def make_training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 700), torch.nn.BatchNorm1d(700),
                                torch.nn.Linear(700, 700), torch.nn.Linear(700, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()


def train_and_save(folder):
    hvd.init()
    model, optimizer, scheduler = make_training(0)
    train(model, optimizer, scheduler, range(3))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 5}
    saved = hvd.checkpoint.save(folder, state, 3)
    train(model, optimizer, scheduler, range(3, 6))  # does not change what is being saved
    saved.wait()
    return [p.detach().tolist() for p in model.parameters()][0]


def load_and_train(folder):
    hvd.init()
    model, optimizer, scheduler = make_training(hvd.rank() + 1)
    found = hvd.checkpoint.load(folder, {"model": model, "optimizer": optimizer,
                                         "scheduler": scheduler})
    assert found.step == 3 and found.state["epoch"] == 5 and found.state["model"] is model
    train(model, optimizer, scheduler, range(3, 6))
    return [p.detach().tolist() for p in model.parameters()][0]


def test_training_goes_on_as_if_nothing_had_been(tmp_path):
    """On other numbers of ranks; with equal data on all the result is the same, bit by bit."""
    [expected, _] = run_ranks(2, "torch/test_checkpoint_torch", "train_and_save", tmp_path)
    for n_ranks in (1, 2, 4):
        for weights in run_ranks(n_ranks, "torch/test_checkpoint_torch", "load_and_train",
                                 tmp_path):
            assert weights == expected


def test_missing_part(tmp_path):
    hvd.checkpoint.save(tmp_path, {"model": torch.nn.Linear(1, 1)}, 1, wait=True)
    with pytest.raises(KeyError, match="has no optimizer; it has model"):
        hvd.checkpoint.load(tmp_path, {"optimizer": torch.optim.SGD([torch.ones(1)], 0.1)})
