# SPDX-License-Identifier: Apache-2.0
"""Programs of the original: names they import, settings they set, and what becomes of both."""
import importlib
import os
import subprocess
import sys
import time

import pytest

import horovod
from horovod.common import basics, util
from horovod.runner.common.util import env, hosts, secret, settings, timeout
from horovod.runner.elastic import discovery
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.launch import find_launcher


def launched(code, *flags, **settings):
    """stdout and stderr of a Python program on two ranks."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("HOROVOD", "NCCL", "CCL"))}
    done = subprocess.run([find_launcher(), "-np", "2", *flags, sys.executable, "-c", code],
                          env={**environment, **settings}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


JOB = """
from horovod.common import basics
basics.init()
print("size", basics.size())
"""


def test_settings_that_do_nothing_are_told_once():
    out, err = launched(JOB, "--autotune", HOROVOD_NUM_NCCL_STREAMS="2",
                        CCL_LOG_LEVEL="info", NCCL_DEBUG="INFO")
    assert out.count("size 2") == 2
    [line] = [line for line in err.splitlines() if "these settings have no effect" in line]
    assert line.startswith("[0]")
    for name in ("HOROVOD_AUTOTUNE", "HOROVOD_NUM_NCCL_STREAMS", "CCL_LOG_LEVEL",
                 "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TRANSPORTS"):
        assert name in line
    assert "NCCL_DEBUG" not in line


def test_what_the_launcher_sets_itself_is_no_reason_to_warn():
    _, err = launched(JOB, "--network-interfaces", "lo", "--no-autotune")
    assert "no effect" not in err


# --- Names ----------------------------------------------------------------------------------------


def test_questions_about_the_installation():
    assert util.mpi_built() is True and util.gloo_built(verbose=True) is True
    assert not (util.nccl_built() or util.ddl_built() or util.ccl_built())
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match="Extension horovod.mxnet has not been built"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    assert not util.extension_available("mxnet") and not util.gpu_available("mxnet")
    assert util.extension_available("torch", verbose=True)
    assert util.gpu_available("torch") is False
    assert util.get_extension_full_path("/a/b.py", "c", "d") == "/a/c/d" + util.get_ext_suffix()


@pytest.mark.parametrize("name, instead", [("ray", "Ray Train"), ("ray.elastic", "Ray Train"),
                                           ("mxnet", "horovod.torch")])
def test_what_is_not_there_says_what_is(name, instead):
    with pytest.raises(ModuleNotFoundError, match=instead):
        importlib.import_module(f"horovod.{name}")


def test_small_helpers(monkeypatch):
    monkeypatch.setenv("COLOUR", "red")
    with util.env(COLOUR=None, SHAPE="round"):
        assert "COLOUR" not in os.environ and os.environ["SHAPE"] == "round"
    assert os.environ["COLOUR"] == "red" and "SHAPE" not in os.environ
    assert util.is_iterable([1]) and not util.is_iterable(1)
    assert util.num_rank_is_power_2(4) and util.split_list([1, 2, 3], 2) == [[1, 2], [3]]
    assert util.is_version_greater_equal_than("2.11.0", "2.11")
    assert not util.is_version_greater_equal_than("2.9", "2.11")
    keras = type("keras", (), {"__version__": "3.15.1"})
    assert util.support_non_legacy_keras_optimizers(keras)
    choose = util.get_average_backwards_compatibility_fun(None)
    assert choose(None, None) == basics.Average


def test_basics_as_an_object():
    made = basics.HorovodBasics(__file__, "mpi_lib")
    assert made.Sum == basics.Sum and made.nccl_built() == 0 and made.is_initialized() is False
    with pytest.raises(ValueError, match="has not been initialized"):
        made.rank()
    with pytest.raises(AttributeError, match="no library for ctypes"):
        made.MPI_LIB_CTYPES


def test_leftovers_of_mpi_ops():
    mpi_ops = pytest.importorskip("horovod.torch.mpi_ops")
    assert mpi_ops._basics.size is basics.size and mpi_ops._handle_map == {}
    for name in ("ProcessSet", "add_process_set", "remove_process_set", "num_rank_is_power_2",
                 "gpu_available", "check_installed_version"):
        assert callable(getattr(mpi_ops, name)), name


def test_data_loaders_by_their_old_address():
    import horovod.data
    from horovod.data import data_loader_base

    assert horovod.data.BaseDataLoader is data_loader_base.BaseDataLoader
    assert horovod.data.AsyncDataLoaderMixin is data_loader_base.AsyncDataLoaderMixin


def test_hosts(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n\nb slots=1  # the old one\n")
    assert hosts.parse_host_files(tmp_path / "hosts") == "a:2,b:1"
    assert hosts.parse_hosts_and_slots("a:2,b:1") == (["a", "b"], {"a": 2, "b": 1})
    with pytest.raises(ValueError, match="Invalid host input 'a'"):
        hosts.parse_hosts("a")
    slots = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1,c:4"), 3, 4)
    assert [slot.to_response_string() for slot in slots] == [
        "0,4,0,2,0,3", "1,4,1,2,0,1", "2,4,0,1,1,3", "3,4,0,1,2,3"]
    assert [slot.hostname for slot in slots] == ["a", "a", "b", "c"]
    assert hosts.SlotInfo.from_response_string("1,4,1,2,0,1").local_size == 2
    assert hosts.INVALID_SLOT_INFO.rank == -1
    with pytest.raises(ValueError, match=r"Requested more processes \(4\).*slots \(3\)"):
        hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 4)


def test_secrets_and_settings():
    key = secret.make_secret_key()
    assert len(key) == secret.SECRET_LENGTH
    digest = secret.compute_digest(key, b"text")
    assert secret.check_digest(key, b"text", digest)
    assert not secret.check_digest(key, b"test", digest)
    made = settings.Settings(hosts="a:1", num_proc=2, key=key)
    assert (made.hosts, made.num_proc, made.verbose, made.elastic) == ("a:1", 2, 0, False)
    assert key.hex() not in repr(made) and "key" not in repr(made)
    with pytest.raises(TypeError, match="BaseSettings has no setting hosts"):
        settings.BaseSettings(hosts="a:1")


def wait_for(script, expected):
    """Until it prints that."""
    end = time.monotonic() + 60
    said = None
    while said != expected:
        assert time.monotonic() < end, said
        said = subprocess.run([script], capture_output=True, text=True, check=True).stdout
        time.sleep(0.05)


def test_discovery_from_a_class_of_the_program(caplog):
    fixed = discovery.FixedHosts({"a": 2, "b": 0})
    made = ElasticSettings(discovery=fixed, min_num_proc=1, max_num_proc=4, num_proc=2)
    assert made.discovery is fixed and made.elastic is True and made.reset_limit is None
    with discovery.script_of(made.discovery) as script:
        wait_for(script, "a:2\n")
        fixed.set({"a": 2, "c": 1})
        wait_for(script, "a:2\nc:1\n")
        fixed.set(None)  # the launcher keeps what it knew
        end = time.monotonic() + 60
        while "FixedHosts does not say which hosts there are" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.05)
        wait_for(script, "a:2\nc:1\n")
    assert not os.path.exists(script)
    with discovery.script_of("./hosts.sh") as script:
        assert script == "./hosts.sh"
    with pytest.raises(NotImplementedError, match="HostDiscovery must say which hosts"):
        with discovery.script_of(discovery.HostDiscovery()):
            pass


def test_discovery_script():
    found = discovery.HostDiscoveryScript("printf 'a:4\\nb\\n'", 3)
    assert found.find_available_hosts_and_slots() == {"a": 4, "b": 3}
    with pytest.raises(RuntimeError, match="ended with exit code 7: broken"):
        discovery.HostDiscoveryScript("echo broken >&2; exit 7",
                                      1).find_available_hosts_and_slots()


def test_a_job_on_the_hosts_of_such_a_class():
    def task():
        basics.init()
        return basics.rank(), basics.size()

    assert horovod.run(task, num_proc=2, min_num_proc=2, max_num_proc=2,
                       host_discovery_script=discovery.FixedHosts({"localhost": 2})) == [
                           (0, 2), (1, 2)]


@pytest.mark.parametrize("module, name", [("driver", "ElasticDriver"),
                                          ("rendezvous", "create_rendezvous_handler"),
                                          ("registration", "WorkerStateRegistry")])
def test_the_elastic_driver_is_the_launcher(module, name):
    made = getattr(importlib.import_module(f"horovod.runner.elastic.{module}"), name)
    with pytest.raises(NotImplementedError, match=f"^{name}: .* host_discovery_script"):
        made(None)


def test_the_launchers_inside():
    from horovod.runner import gloo_run

    assert gloo_run.__name__ and not hasattr(gloo_run, "__wrapped__")
    with pytest.raises(ImportError, match="no create_slot_env_vars: .*RendezvousServer"):
        from horovod.runner.gloo_run import create_slot_env_vars  # noqa: F401


def test_timeouts():
    made = timeout.Timeout(600, "Timed out waiting for {activity}. Wait longer.")
    assert 599 < made.remaining() <= 600 and not made.timed_out()
    made.check_time_out_for("tea")
    with pytest.raises(timeout.TimeoutException,
                       match="^Timed out waiting for tea. Wait longer. Timeout after 0 seconds.$"):
        timeout.Timeout(0, "Timed out waiting for {activity}. Wait longer.").check_time_out_for(
            "tea")


def test_rank_and_size_from_the_environment(monkeypatch):
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                 "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(RuntimeError, match="only one of PMI_RANK and PMI_SIZE"):
        env.get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "3")
    assert env.get_env_rank_and_size() == (1, 3)
    assert env.is_exportable("PATH") and not env.is_exportable("OLDPWD")
    assert not env.is_exportable("BASH_FUNC_which%%")


def test_a_launcher_of_ones_own():
    """Ranks that somebody starts by hand, with the rendezvous server of the old name."""
    server = RendezvousServer()
    port = server.start()
    slots = hosts.get_host_assignments(hosts.parse_hosts("localhost:2"), 2)
    assert server.init(slots) == port > 0
    code = ("from horovod.common import basics as b, objects; b.init(); "
            "print(objects.allgather_object(b.rank()))")
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, **server.environment("127.0.0.1", slot)})
             for slot in slots]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["[0, 1]\n"] * 2
    kept = server.secret_file
    server.stop()
    assert not os.path.exists(kept)
    with pytest.raises(NotImplementedError, match="--host-discovery-script"):
        server.start(object)


def test_the_launcher_as_a_module():
    done = subprocess.run([sys.executable, "-m", "horovod.runner.launch", "-np", "2", "echo", "up"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.count("up") == 2, done.stderr


def test_mpirun_is_named(monkeypatch, tmp_path):
    """A stand-in for mpirun, which fails."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Open MPI 4.1' "
                                     "&& exit 0\nexit 3\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="^mpirun failed with exit code 3"):
        horovod.run(print, use_mpi=True, num_proc=2)
