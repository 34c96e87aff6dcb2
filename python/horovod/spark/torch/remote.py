# SPDX-License-Identifier: Apache-2.0
"""What every rank of a TorchEstimator does: the epochs, over the batches of its DataModule.

All ranks make the same number of steps. Losses and metrics are averages over all ranks. Rank 0
writes the checkpoint after each epoch and returns (history, state of the model).
"""
import io
import itertools
from typing import Any, Dict, Iterable, List, Optional, Tuple

import numpy as np


def features(columns: List[Any], shapes: Optional[List[Any]]) -> List[Any]:
    """The columns as the model takes them."""
    tensors = []
    for i, values in enumerate(columns):
        tensor = as_tensor(values)
        if shapes is not None:
            tensor = tensor.reshape(tuple(shapes[i]))
        elif tensor.dim() == 1:
            tensor = tensor.unsqueeze(1)
        tensors.append(tensor)
    return tensors


def as_tensor(values: Any) -> Any:
    """An array or a tensor as float32 or int64: what layers and losses take."""
    import torch

    if isinstance(values, torch.Tensor):
        is_real = values.is_floating_point() or values.dtype == torch.bool
        return values.to(torch.float32 if is_real else torch.int64)
    kind = np.float32 if values.dtype.kind in "fb" else np.int64
    return torch.from_numpy(np.array(values, dtype=kind))


def save_state(state: Any) -> bytes:
    import torch

    data = io.BytesIO()
    torch.save(state, data)
    return data.getvalue()


def load_state(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class Trainer:
    def __init__(self, model: Any, optimizer: Any, task: Dict[str, Any]) -> None:
        import horovod.torch as hvd
        import torch
        from horovod.spark.common.estimator import check_device

        self.hvd = hvd
        self.task = task
        self.device = torch.device("cpu")
        if task["use_gpu"] and torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
            self.device = torch.device("cuda")
        check_device(self.device.type, hvd.allgather_object)
        self.model = model.to(self.device)
        self.first_epoch = self._resume(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for group in optimizer.param_groups:  # as many more rows go into each update
            group["lr"] *= hvd.size()
        options = {"backward_passes_per_step": task["backward_passes_per_step"]}
        if task["gradient_compression"] is not None:
            options["compression"] = task["gradient_compression"]
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **options)
        self.losses = task["losses"] or [make() for make in as_list(task["loss_constructors"])]
        n_labels = len(task["label_cols"])
        if len(self.losses) == 1:
            self.losses = self.losses * n_labels
        self.shares = task["loss_weights"] or [1.0] * n_labels
        self.metrics = by_name(task["metrics"])
        self.own_way = task["train_minibatch_fn"]

    def _resume(self, model: Any, optimizer: Any) -> int:
        """Loads the checkpoint of this run, if there is one; rank 0 knows for all."""
        store, path = self.task["store"], self.task["checkpoint_path"]
        epoch = 0
        if self.hvd.rank() == 0 and path is not None and store.exists(path):
            state = load_state(store.read(path))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            epoch = state["epoch"]
        return self.hvd.broadcast_object(epoch, root_rank=0)

    def checkpoint(self, epoch: int) -> None:
        path = self.task["checkpoint_path"]
        if self.hvd.rank() != 0 or path is None:
            return
        optimizer = self.optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["lr"] /= self.hvd.size()
        self.task["store"].write(path, save_state(
            {"model": self.model.state_dict(), "optimizer": optimizer, "epoch": epoch}))

    # --- One batch -----------------------------------------------------------------------------

    def tensors(self, batch: Dict[str, Any]) -> Tuple[List[Any], List[Any], Any]:
        """Features, labels and weights of the rows, on the device of the model."""
        inputs = features([batch[name] for name in self.task["feature_cols"]],
                          self.task["input_shapes"])
        labels = [as_tensor(batch[name]) for name in self.task["label_cols"]]
        column = self.task["sample_weight_col"]
        weights = as_tensor(batch[column]).float().to(self.device) if column else None
        return ([tensor.to(self.device) for tensor in inputs],
                [tensor.to(self.device) for tensor in labels], weights)

    def fit_shapes(self, outputs: Any, labels: List[Any]) -> Tuple[List[Any], List[Any]]:
        """Labels in the shape the losses want: as asked, or as the output if that fits."""
        outputs = as_list(outputs)
        shaped = []
        for i, (output, label) in enumerate(zip(outputs, labels)):
            if self.task["label_shapes"]:
                label = label.reshape(tuple(self.task["label_shapes"][i]))
            elif label.numel() == output.numel():
                label = label.reshape(output.shape)
            shaped.append(label)
        return outputs, shaped

    def loss(self, outputs: List[Any], labels: List[Any], weights: Any = None) -> Any:
        more = [] if weights is None else [weights]
        return sum(share * loss(output, label, *more) for loss, share, output, label
                   in zip(self.losses, self.shares, outputs, labels))

    def look(self, batch: Dict[str, Any]) -> Tuple[Any, List[Any], List[Any]]:
        """The loss, the outputs and the labels they should have been."""
        inputs, labels, weights = self.tensors(batch)
        outputs, labels = self.fit_shapes(self.model(*inputs), labels)
        return self.loss(outputs, labels, weights), outputs, labels

    def descend(self, batch: Dict[str, Any], number: int) -> Tuple[Any, List[Any], List[Any]]:
        """The same, with a step of the optimizer; the user may have a way of its own to do it."""
        if self.own_way is not None:
            inputs, labels, weights = self.tensors(batch)
            outputs, loss = self.own_way(self.model, self.optimizer, self.fit_shapes, self.loss,
                                         inputs, labels, weights)
            return loss, *self.fit_shapes(outputs, labels)
        n_passes = self.task["backward_passes_per_step"]
        if (number - 1) % n_passes == 0:
            self.optimizer.zero_grad()
        seen = self.look(batch)
        seen[0].backward()
        if number % n_passes == 0:
            self.optimizer.step()
        return seen

    # --- One epoch -----------------------------------------------------------------------------

    def epoch(self, batches: Iterable[Dict[str, Any]], train: bool) -> Dict[str, float]:
        import torch

        self.model.train(train)
        sums: Dict[str, float] = {"loss": 0.0}
        n = 0
        with torch.set_grad_enabled(train):
            for n, batch in enumerate(batches, 1):
                loss, outputs, labels = self.descend(batch, n) if train else self.look(batch)
                sums["loss"] += float(loss.detach())
                for name, metric in self.metrics.items():
                    for output, label in zip(outputs, labels):
                        sums[name] = sums.get(name, 0.0) + float(metric(output.detach(), label))
        if n == 0:
            raise ValueError("the data module gave no batches: train_data() and val_data() must "
                             "return what can be iterated in every epoch, as a list can; a "
                             "generator must be endless")
        if train and n % self.task["backward_passes_per_step"] and not self.own_way:
            self.optimizer.step()  # what is left of the epoch; the next begins a step of its own
        means = torch.tensor([value / n for value in sums.values()], dtype=torch.float64)
        means = self.hvd.allreduce(means, name=f"estimator.{'train' if train else 'validation'}")
        return dict(zip(sums, means.tolist()))


def as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def by_name(metrics: List[Any]) -> Dict[str, Any]:
    """Objects that can be called have the name of their class, and a number if it is taken."""
    named: Dict[str, Any] = {}
    for i, metric in enumerate(metrics):
        name = getattr(metric, "__name__", type(metric).__name__)
        named[f"{name}_{i}" if name in named else name] = metric
    return named


def train(packed: bytes) -> Optional[Tuple[List[Dict[str, Any]], bytes]]:
    import cloudpickle
    import horovod.torch as hvd
    import torch
    from horovod.spark.common.datamodule import make_data_module, steps_per_epoch

    hvd.init()
    model, optimizer, task = cloudpickle.loads(packed)
    if task["random_seed"] is not None:
        torch.manual_seed(task["random_seed"] + hvd.rank())
    trainer = Trainer(model, optimizer, task)
    train_steps, val_steps = steps = steps_per_epoch(task, hvd.size(), whole_only=True)
    history = []
    with make_data_module(task["data_module"], task, hvd.rank(), hvd.size(), steps,
                          first_epoch=trainer.first_epoch) as data:
        training = data.train_data()
        validation = data.val_data() if task["val_path"] else None
        for epoch in range(trainer.first_epoch, task["epochs"]):
            seen = {"epoch": epoch,
                    "train": trainer.epoch(itertools.islice(training, train_steps), True)}
            if validation is not None:
                seen["validation"] = trainer.epoch(itertools.islice(validation, val_steps), False)
            history.append(seen)
            trainer.checkpoint(epoch + 1)
            if task["verbose"] and hvd.rank() == 0:
                print(seen, flush=True)
    state = save_state({name: value.cpu() for name, value in model.state_dict().items()})
    result = (history, state) if hvd.rank() == 0 else None
    hvd.shutdown()
    return result
