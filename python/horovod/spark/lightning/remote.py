# SPDX-License-Identifier: Apache-2.0
"""What every rank of a Lightning TorchEstimator does: Trainer.fit() over its share of the rows.

Lightning's DDP strategy runs on the process group of horovod.torch.c10d, so gradients are reduced
by Horovod. To Lightning each rank is a node of its own with one device. All ranks make the same
number of steps. Rank 0 keeps a checkpoint in the store after each epoch, and returns (history,
state of the module); the history is what the module has logged.
"""
import os
import tempfile
from typing import Any, Dict, Iterator, List, Optional, Tuple

from horovod.spark.torch.remote import as_tensor, features, open_reader, save_state


NEEDED = "horovod.spark.lightning needs pytorch_lightning 2.0 or later"


def import_lightning() -> Any:
    try:
        import pytorch_lightning as lightning
    except ImportError as error:
        raise RuntimeError(NEEDED) from error
    if int(lightning.__version__.split(".")[0]) < 2:
        raise RuntimeError(f"{NEEDED}; this is {lightning.__version__}")
    return lightning


class Batches:
    """What Lightning takes for a data loader: an epoch for each time it is gone through."""

    def __init__(self, task: Dict[str, Any], path: str, batch_size: int, shuffle: bool,
                 n_steps: Optional[int], first_epoch: int) -> None:
        self._reader = open_reader(task, path, batch_size, shuffle)
        self._features = task["feature_cols"]
        self._inputs = task["input_shapes"]
        self._labels = dict(zip(task["label_cols"], task["label_shapes"] or []))
        self._n_steps = min(n_steps or self._reader.steps_per_epoch, self._reader.steps_per_epoch)
        self._epoch = first_epoch

    def __len__(self) -> int:
        return self._n_steps

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        batches = self._reader.epoch(self._epoch)
        self._epoch += 1
        for _, batch in zip(range(self._n_steps), batches):
            tensors = {name: as_tensor(values) for name, values in batch.items()
                       if name not in self._features}
            for name, shape in self._labels.items():
                tensors[name] = tensors[name].reshape(tuple(shape))
            inputs = features([batch[name] for name in self._features], self._inputs)
            yield {**tensors, **dict(zip(self._features, inputs))}


def make_strategy(hvd: Any) -> Any:
    from lightning_fabric.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    class Place(LightningEnvironment):
        """Where this rank is: somebody else has started it."""

        creates_processes_externally = True

        def node_rank(self) -> int:
            return hvd.rank()

        def local_rank(self) -> int:
            return 0

    return DDPStrategy(cluster_environment=Place(), process_group_backend="hvd")


def make_keeper(lightning: Any, task: Dict[str, Any], folder: str) -> Any:
    """A callback: after each epoch the history, and a checkpoint in the store."""

    class Keeper(lightning.Callback):
        def __init__(self) -> None:
            self.history: List[Dict[str, Any]] = []

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.history.append({"epoch": trainer.current_epoch, **seen})
            if task["checkpoint_path"] is None:
                return
            path = os.path.join(folder, "epoch.ckpt")
            trainer.save_checkpoint(path)  # on all ranks, though only the first writes
            if trainer.is_global_zero:
                with open(path, "rb") as file:
                    task["store"].write(task["checkpoint_path"], file.read())

    return Keeper()


def checkpoint(task: Dict[str, Any], hvd: Any, folder: str) -> Tuple[Optional[str], int]:
    """The checkpoint of an earlier run of this name, as a file here, and its epochs."""
    import torch

    store, path = task["store"], task["checkpoint_path"]
    data = None
    if hvd.rank() == 0 and path is not None and store.exists(path):
        data = store.read(path)
    data = hvd.broadcast_object(data, root_rank=0)
    if data is None:
        return None, 0
    local = os.path.join(folder, "start.ckpt")
    with open(local, "wb") as file:
        file.write(data)
    return local, torch.load(local, map_location="cpu", weights_only=False)["epoch"] + 1


def device_options(task: Dict[str, Any], hvd: Any) -> Dict[str, Any]:
    import torch

    from horovod.spark.common.estimator import check_device

    has_gpu = task["use_gpu"] and torch.cuda.is_available()
    check_device("cuda" if has_gpu else "cpu", hvd.allgather_object)
    if has_gpu:
        return {"accelerator": "gpu", "devices": [hvd.local_rank() % torch.cuda.device_count()]}
    return {"accelerator": "cpu", "devices": 1}


def train(packed: bytes) -> Optional[Tuple[List[Dict[str, Any]], bytes]]:
    import cloudpickle
    import torch.distributed

    import horovod.torch as hvd
    import horovod.torch.c10d  # the backend "hvd"  # noqa: F401

    lightning = import_lightning()
    hvd.init()
    torch.distributed.init_process_group("hvd")
    module, task = cloudpickle.loads(packed)
    if task["random_seed"] is not None:
        lightning.seed_everything(task["random_seed"] + hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        start, first_epoch = checkpoint(task, hvd, folder)
        training = Batches(task, task["train_path"], task["batch_size"], task["shuffle"],
                           task["train_steps_per_epoch"], first_epoch)
        validation = None
        if task["val_path"]:
            validation = Batches(task, task["val_path"],
                                 task["val_batch_size"] or task["batch_size"], False,
                                 task["validation_steps_per_epoch"], 0)
        keeper = make_keeper(lightning, task, folder)
        options = dict(
            device_options(task, hvd), num_nodes=hvd.size(), strategy=make_strategy(hvd),
            max_epochs=task["epochs"], callbacks=[*task["callbacks"], keeper],
            logger=task["logger"] or False, log_every_n_steps=task["log_every_n_steps"],
            profiler=task["profiler"], detect_anomaly=task["terminate_on_nan"],
            accumulate_grad_batches=task["backward_passes_per_step"], default_root_dir=folder,
            enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
            enable_model_summary=bool(task["verbose"]), use_distributed_sampler=False)
        trainer = lightning.Trainer(**{**options, **(task["trainer_args"] or {})})
        trainer.fit(module, training, validation, ckpt_path=start)
        state = save_state({name: value.cpu() for name, value in module.state_dict().items()})
    result = (keeper.history, state) if hvd.rank() == 0 else None
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return result
