# SPDX-License-Identifier: Apache-2.0
"""Where jobs that compute input and jobs that train meet, and what strangers can do to it."""
import resource
import socket
import threading
import time

import pytest

from horovod.runner.common.service.compute_service import ComputeClient, ComputeService
from horovod.runner.common.util.timeout import TimeoutException

KEY = b"k" * 32


@pytest.fixture
def service():
    service = ComputeService(2, 2, KEY)
    yield service
    service.shutdown()


def test_who_is_where(service):
    client = ComputeClient(service.addresses(), KEY)
    with pytest.raises(IndexError, match="no dispatcher 2"):
        client.register_dispatcher(2, "grpc://a:1")
    with pytest.raises(TimeoutException, match="dispatcher 1"):
        client.wait_for_dispatcher_registration(1, timeout=0.1)
    client.register_dispatcher(0, "grpc://a:1")
    client.register_dispatcher(0, "grpc://a:1")
    with pytest.raises(ValueError, match="grpc://a:1"):
        client.register_dispatcher(0, "grpc://b:1")
    assert client.wait_for_dispatcher_registration(0, timeout=10) == "grpc://a:1"
    client.register_worker_for_dispatcher(0, 0)
    client.register_worker_for_dispatcher(1, 2)  # is nobody's business of dispatcher 0
    with pytest.raises(TimeoutException, match="workers of dispatcher 0"):
        client.wait_for_dispatcher_worker_registration(0, timeout=0.1)
    client.register_worker_for_dispatcher(0, 1)
    client.wait_for_dispatcher_worker_registration(0, timeout=10)


def test_shutdown_lets_everybody_go(service):
    client = ComputeClient(service.addresses(), KEY)
    waiting = threading.Thread(target=client.wait_for_shutdown)
    waiting.start()
    client.shutdown()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_stranger_learns_nothing(service):
    with pytest.raises(ConnectionError):
        ComputeClient(service.addresses(), b"x" * 32).shutdown()
    with pytest.raises(TimeoutException):
        ComputeClient(service.addresses(), KEY).wait_for_dispatcher_registration(0, timeout=0.1)


def test_a_flood_of_strangers_is_outlived(service):
    """They hold more connections than the service may have descriptors, and send nothing."""
    port = next(iter(service.addresses().values()))[0][1]
    client = ComputeClient(service.addresses(), KEY)
    n_threads = threading.active_count()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = []
    try:
        for _ in range(400):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        strangers[0].sendall(b"G")
        assert threading.active_count() <= n_threads, "none of them has a thread"
        client.register_dispatcher(0, "grpc://a:1")
        # The service runs out of descriptors while more are waiting.
        more = [socket.socket() for _ in range(50)]
        strangers += more
        resource.setrlimit(resource.RLIMIT_NOFILE, (more[-1].fileno() + 1, limits[1]))
        for stranger in more:
            stranger.connect(("127.0.0.1", port))
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.register_dispatcher(0, "grpc://a:1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for stranger in strangers:
            stranger.close()
    assert client.wait_for_dispatcher_registration(0, timeout=30) == "grpc://a:1"
