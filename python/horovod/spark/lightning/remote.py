# SPDX-License-Identifier: Apache-2.0
"""What every rank of a Lightning TorchEstimator does: Trainer.fit() over its batches.

Lightning's DDP strategy runs on the process group of horovod.torch.c10d, so gradients are reduced
by Horovod. To Lightning each rank is a node of its own with one device. All ranks make the same
number of steps. Rank 0 keeps a checkpoint in the store after each epoch, and returns (history,
state of the module); the history is what the module has logged.
"""
import contextlib
import itertools
import operator
import os
import tempfile
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from horovod.spark.common.datamodule import make_data_module, steps_per_epoch
from horovod.spark.lightning.datamodule import ParquetDataModule
from horovod.spark.torch.remote import as_tensor, features, save_state

NEEDED = "horovod.spark.lightning needs pytorch_lightning 2.0 or later"


def import_lightning() -> Any:
    try:
        import pytorch_lightning as lightning
    except ImportError as error:
        raise RuntimeError(NEEDED) from error
    if int(lightning.__version__.split(".")[0]) < 2:
        raise RuntimeError(f"{NEEDED}; this is {lightning.__version__}")
    return lightning


class Shaped:
    """A loader for Lightning: batches of columns in the shapes asked for, others as they are."""

    def __init__(self, loader: Iterable[Any], n_steps: int, task: Dict[str, Any]) -> None:
        self._loader = loader
        self._n_steps = n_steps
        self._features = task["feature_cols"]
        self._inputs = task["input_shapes"]
        self._labels = dict(zip(task["label_cols"], task["label_shapes"] or []))

    def __len__(self) -> int:
        return min(self._n_steps, operator.length_hint(self._loader, self._n_steps))

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(self._loader, self._n_steps):
            yield self._shape(batch) if isinstance(batch, dict) else batch

    def _shape(self, batch: Dict[str, Any]) -> Dict[str, Any]:
        tensors = {name: as_tensor(values) for name, values in batch.items()
                   if name not in self._features}
        for name, shape in self._labels.items():
            tensors[name] = tensors[name].reshape(tuple(shape))
        inputs = features([batch[name] for name in self._features], self._inputs)
        return {**tensors, **dict(zip(self._features, inputs))}


def open_data(lightning: Any, task: Dict[str, Any], hvd: Any, first_epoch: int,
              stack: contextlib.ExitStack) -> Dict[str, Any]:
    """What Trainer.fit() is to be given for data; the stack closes it."""
    train_steps, val_steps = steps = steps_per_epoch(task, hvd.size())
    options = {name: task[name] for name in ("debug_data_loader",
                                             "train_async_data_loader_queue_size",
                                             "val_async_data_loader_queue_size")}
    module = make_data_module(task["data_module"] or ParquetDataModule, task, hvd.rank(),
                              hvd.size(), steps, first_epoch=first_epoch, **options)
    if isinstance(module, lightning.LightningDataModule):
        return {"datamodule": module}
    stack.enter_context(module)
    loaders = {"train_dataloaders": Shaped(module.train_data(), train_steps, task)}
    if task["val_path"]:
        loaders["val_dataloaders"] = Shaped(module.val_data(), val_steps, task)
    return loaders


def compression_hook(compression: Any) -> Any:
    """What DDP, which reduces the gradients itself, has for one of horovod.torch.Compression."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from horovod.torch import Compression

    hooks = {None: None, Compression.none: None, Compression.fp16: default_hooks.fp16_compress_hook,
             Compression.bf16: default_hooks.bf16_compress_hook}
    if compression not in hooks:
        raise ValueError(f"gradient_compression is {compression!r}: with Lightning it must be "
                         "none, fp16 or bf16 of horovod.torch.Compression")
    return hooks[compression]


def make_strategy(hvd: Any, hook: Any) -> Any:
    from lightning_fabric.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    class Place(LightningEnvironment):
        """Where this rank is: somebody else has started it."""

        creates_processes_externally = True

        def node_rank(self) -> int:
            return hvd.rank()

        def local_rank(self) -> int:
            return 0

    class Strategy(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            if hook is not None:  # Lightning's own argument for it counts with GPUs only
                self.model.register_comm_hook(None, hook)

    return Strategy(cluster_environment=Place(), process_group_backend="hvd")


def make_recorder(lightning: Any, task: Dict[str, Any], folder: str) -> Any:
    """A callback: after each epoch the history, and a checkpoint in the store."""

    class Recorder(lightning.Callback):
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

    return Recorder()


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
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        start, first_epoch = checkpoint(task, hvd, folder)
        data = open_data(lightning, task, hvd, first_epoch, stack)
        recorder = make_recorder(lightning, task, folder)
        options = dict(
            device_options(task, hvd), num_nodes=hvd.size(),
            strategy=make_strategy(hvd, task["compression_hook"]),
            max_epochs=task["epochs"], callbacks=[*task["callbacks"], recorder],
            logger=task["logger"] or False, log_every_n_steps=task["log_every_n_steps"],
            profiler=task["profiler"], detect_anomaly=task["terminate_on_nan"],
            accumulate_grad_batches=task["backward_passes_per_step"], default_root_dir=folder,
            enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
            enable_model_summary=bool(task["verbose"]), use_distributed_sampler=False)
        trainer = lightning.Trainer(**{**options, **(task["trainer_args"] or {})})
        trainer.fit(module, ckpt_path=start, **data)
        state = save_state({name: value.cpu() for name, value in module.state_dict().items()})
    result = (recorder.history, state) if hvd.rank() == 0 else None
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return result
