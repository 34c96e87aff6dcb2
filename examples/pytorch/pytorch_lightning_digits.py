#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A module of Lightning, trained by Lightning's own Trainer on the ranks of horovodrun.

    pip install pytorch_lightning
    horovodrun -np 2 python examples/pytorch/pytorch_lightning_digits.py

Lightning trains with DistributedDataParallel; its gradients travel by the backend `hvd`. horovodrun
has started the ranks, which `Place` says: Lightning starts none.
"""
import argparse
import pathlib
import sys

import pytorch_lightning
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

import horovod.torch as hvd
import horovod.torch.c10d  # noqa: F401 - the backend

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from digits import load_digits  # noqa: E402


class Place(LightningEnvironment):
    """Where this rank is. Each counts as a node, so that Lightning takes one device for it."""

    creates_processes_externally = True

    def node_rank(self):
        return hvd.rank()

    def local_rank(self):
        return 0


class Digits(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 5, stride=2), torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 5, stride=2), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(512, 10))

    def training_step(self, batch, number):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, number):
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # of all ranks

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    hvd.init()
    torch.distributed.init_process_group("hvd")  # before Lightning looks for a port of its own
    pytorch_lightning.seed_everything(1)
    parts = [torch.utils.data.TensorDataset(torch.from_numpy(images).unsqueeze(1),
                                            torch.from_numpy(labels))
             for images, labels in load_digits()]
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=hvd.size(), max_epochs=options.epochs,
        strategy=DDPStrategy(cluster_environment=Place(), process_group_backend="hvd"),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False)
    # Lightning gives each rank its share of both.
    train, test = (torch.utils.data.DataLoader(part, batch_size=64, shuffle=part is parts[0])
                   for part in parts)
    trainer.fit(Digits(), train, test)
    if hvd.rank() == 0:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.3f} on {hvd.size()} ranks",
              flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
