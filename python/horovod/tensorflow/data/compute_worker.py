# SPDX-License-Identifier: Apache-2.0
"""The job that computes input for another; see compute_service.

    horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker /shared/compute.json
"""
import argparse
import os
import secrets

from horovod.common import basics
from horovod.common.objects import broadcast_object
from horovod.runner.common.service.compute_service import ComputeService
from horovod.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, compute_worker_fn


def make_parser():
    """What this program and its twin for Spark are asked."""
    parser = argparse.ArgumentParser(
        description="Runs workers of tf.data service on all ranks of this job, for another job "
                    "that trains.")
    parser.add_argument("configfile", help="file to write for the training job")
    parser.add_argument("--dispatchers", type=int, default=1,
                        help="number of dispatchers (1); the ranks are shared out among them")
    parser.add_argument("--dispatcher-side", choices=SIDES, default="compute",
                        help="which job runs the dispatchers (compute)")
    return parser


def parse_args(args=None):
    parser = make_parser()
    parser.add_argument("--timeout", type=int, default=60,
                        help="seconds to wait for dispatchers and workers (60)")
    return parser.parse_args(args)


def serve(configfile, dispatchers=1, dispatcher_side="compute", timeout=60):
    """On every rank: until the training job ends the service, or this job is ended."""
    basics.init()
    if dispatchers < 1 or basics.size() % dispatchers != 0:
        raise ValueError(f"the number of ranks, {basics.size()}, is not a multiple of the number "
                         f"of dispatchers, {dispatchers}")
    service = config = None
    try:
        if basics.rank() == 0:
            key = secrets.token_bytes(32)
            workers = basics.size() // dispatchers
            service = ComputeService(dispatchers, workers, key)
            config = TfDataServiceConfig(dispatchers, workers, dispatcher_side,
                                         service.addresses(), key, timeout)
            config.write(configfile)
        compute_worker_fn(broadcast_object(config, 0))
        broadcast_object(None, 0)  # the service stays until nobody asks any more
    finally:
        if service is not None:
            service.shutdown()
            if config is not None and os.path.exists(configfile):
                os.unlink(configfile)


def main():
    args = parse_args()
    serve(args.configfile, args.dispatchers, args.dispatcher_side, args.timeout)


if __name__ == "__main__":
    main()
