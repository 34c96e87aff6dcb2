# SPDX-License-Identifier: Apache-2.0
"""tf.data on processes of their own: one job computes the input, another trains with it.

The compute job (python -m horovod.tensorflow.data.compute_worker, under horovodrun) runs workers of
tf.data service, the dispatchers they belong to unless those are on the training side, and a
ComputeService, whose address and key it writes into a file. The training job reads that file, and
sends its dataset there:

    config = TfDataServiceConfig.read("/shared/compute.json", wait_for_file_creation=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size())

With several dispatchers, rank r uses dispatcher r % dispatchers. Whoever holds the file may use the
service and end it: keep it where only the user can read it.
"""
import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, Optional

import tensorflow as tf

from horovod.common import basics
from horovod.runner.common.service.compute_service import ComputeClient, own_addresses

SIDES = ("compute", "training")


@dataclass(frozen=True)
class TfDataServiceConfig:
    """How many there are of what, and where the ComputeService is."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Dict[str, Any]
    key: bytes
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ValueError(f"dispatcher_side is {self.dispatcher_side!r}, not one of {SIDES}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        return ComputeClient(self.addresses, self.key, verbose)

    def to_dict(self) -> Dict[str, Any]:
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Dict[str, Any]) -> "TfDataServiceConfig":
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str) -> None:
        """Appears as a whole or not at all, readable by this user only."""
        folder = os.path.dirname(os.path.abspath(filename))
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=os.path.basename(filename))
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file)
            os.replace(temporary, filename)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> "TfDataServiceConfig":
        """From a file; if wanted, waits until there is one."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(1)
        with open(filename, encoding="utf-8") as file:
            return TfDataServiceConfig.from_dict(json.load(file))


def _own_address() -> str:
    return next(iter(own_addresses(0).values()))[0][0]


def _start_dispatcher() -> Any:
    """A dispatcher, and the address others reach it at."""
    server = tf.data.experimental.service.DispatchServer()
    protocol, _, place = server.target.partition("://")
    return server, f"{protocol}://{_own_address()}:{place.rpartition(':')[2]}"


def _start_worker(dispatcher_address: str) -> Any:
    service = tf.data.experimental.service
    return service.WorkerServer(service.WorkerConfig(
        dispatcher_address=dispatcher_address.partition("://")[2],
        worker_address=f"{_own_address()}:%port%"))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of this rank's dispatcher, once its workers are there.

    With dispatchers on the training side, ranks below their number run one inside this context.
    """
    client = compute_config.compute_client()
    dispatcher_id = rank % compute_config.dispatchers
    server = None
    if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
        server, address = _start_dispatcher()
        client.register_dispatcher(rank, address)
    try:
        address = client.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(dispatcher_id, compute_config.timeout)
        yield address
    finally:
        if server is not None:
            server._stop()  # there is no public way to end one before the process


def send_to_data_service(dataset: tf.data.Dataset, compute_config: TfDataServiceConfig, rank: int,
                         size: Optional[int] = None, processing_mode: str = "distributed_epoch",
                         reuse_dataset: bool = False, round_robin: bool = False
                         ) -> tf.data.Dataset:
    """The dataset, computed by the service.

    reuse_dataset: all ranks of a dispatcher share one pass over the data; otherwise each has its
    own. round_robin: then they take elements in turns, which needs size.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError("with dispatchers on the training side use `with tf_data_service(...) "
                           "as address` and tf.data.experimental.service.distribute()")
    if round_robin and (size is None or not reuse_dataset):
        raise ValueError("round_robin needs size, and reuse_dataset=True")
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(tf.data.experimental.service.distribute(
            processing_mode=processing_mode, service=address,
            job_name="job" if reuse_dataset else None,
            consumer_index=rank if round_robin else None,
            num_consumers=size if round_robin else None))


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """What each rank of the compute job does: serves until somebody ends the service."""
    dispatcher_id, place = divmod(basics.rank(), compute_config.workers_per_dispatcher)
    client = compute_config.compute_client()
    dispatcher = None
    if compute_config.dispatcher_side == "compute" and place == 0:
        dispatcher, address = _start_dispatcher()
        client.register_dispatcher(dispatcher_id, address)
    address = client.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
    worker = _start_worker(address)
    client.register_worker_for_dispatcher(dispatcher_id, basics.rank())
    client.wait_for_shutdown()
    worker._stop()
    if dispatcher is not None:
        dispatcher._stop()
