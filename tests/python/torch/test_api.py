# SPDX-License-Identifier: Apache-2.0
"""Every public name of horovod.torch and its signature, against the list users' scripts rely on."""
import ast
import importlib
import inspect
import pathlib

import pytest

import horovod
import horovod.torch as hvd
from horovod import _core
from horovod.common import basics

NAMES = """
    elastic Compression allgather_object broadcast_object broadcast_optimizer_state
    broadcast_parameters allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
    grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
    allgather allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_async
    broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
    grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown
    is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
    cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built
    ddl_built ccl_built cuda_built rocm_built ProcessSet global_process_set add_process_set
    remove_process_set Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer
    SyncBatchNorm _check_has_gpu
""".split()

SET = "process_set=GLOBAL"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
REDUCE_ASYNC = f"average=None, name=None, op=None, {SCALES}, {SET}"
REDUCE = f"average=None, name=None, compression=NONE, op=None, {SCALES}, {SET}"
SCATTER_ASYNC = f"name=None, op=AVERAGE, {SET}, {SCALES}"
SCATTER = f"name=None, compression=NONE, op=AVERAGE, {SET}, {SCALES}"
MOVE = f"name=None, {SET}"

SIGNATURES = {  # positional order and defaults
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": f"tensor, {REDUCE}",
    "allreduce_async": f"tensor, {REDUCE_ASYNC}",
    "allreduce_": f"tensor, {REDUCE_ASYNC}",
    "allreduce_async_": f"tensor, {REDUCE_ASYNC}",
    "grouped_allreduce": f"tensors, {REDUCE}",
    "grouped_allreduce_async": f"tensors, {REDUCE_ASYNC}",
    "grouped_allreduce_": f"tensors, {REDUCE_ASYNC}",
    "grouped_allreduce_async_": f"tensors, {REDUCE_ASYNC}",
    "sparse_allreduce_async": f"tensor, name, op, {SET}",
    "allgather": f"tensor, {MOVE}",
    "allgather_async": f"tensor, {MOVE}",
    "grouped_allgather": f"tensors, {MOVE}",
    "grouped_allgather_async": f"tensors, {MOVE}",
    "broadcast": f"tensor, root_rank, {MOVE}",
    "broadcast_async": f"tensor, root_rank, {MOVE}",
    "broadcast_": f"tensor, root_rank, {MOVE}",
    "broadcast_async_": f"tensor, root_rank, {MOVE}",
    "alltoall": f"tensor, splits=None, {MOVE}",
    "alltoall_async": f"tensor, splits=None, {MOVE}",
    "reducescatter": f"tensor, {SCATTER}",
    "reducescatter_async": f"tensor, {SCATTER_ASYNC}",
    "grouped_reducescatter": f"tensors, {SCATTER}",
    "grouped_reducescatter_async": f"tensors, {SCATTER_ASYNC}",
    "join": "device=-1",
    "barrier": SET,
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {SET}",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=NONE, "
                            "backward_passes_per_step=1, op=AVERAGE, "
                            "gradient_predivide_factor=1.0, num_groups=0, groups=None, "
                            f"sparse_as_dense=False, {SET}",
}

MODULES = {  # modules people import, and what they look for there
    "mpi_ops": "is_homogeneous allreduce_async_ synchronize poll HorovodAllreduce "
               "HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast "
               "HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter",
    "functions": "broadcast_object allgather_object broadcast_parameters broadcast_optimizer_state",
    "optimizer": "DistributedOptimizer",
    "compression": "Compression",
    "sync_batch_norm": "SyncBatchNorm",
    "elastic": "run TorchState ElasticSampler",
    "elastic.state": "TorchState",
    "elastic.sampler": "ElasticSampler",
}

OPS = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}


def arguments_of(text):
    """[(name, default)]; a name without default has inspect's empty."""
    meaning = {"GLOBAL": hvd.global_process_set, "NONE": hvd.Compression.none,
               "AVERAGE": hvd.Average}
    arguments = []
    for part in filter(None, text.split(", ")):
        name, equals, value = part.partition("=")
        default = inspect.Parameter.empty
        if equals:
            default = meaning[value] if value in meaning else eval(value)
        arguments.append((name, default))
    return arguments


def test_every_name_is_there():
    assert [name for name in NAMES if not hasattr(hvd, name)] == []
    assert set(NAMES) <= set(hvd.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    expected = arguments_of(SIGNATURES[name])
    parameters = list(inspect.signature(getattr(hvd, name)).parameters.values())
    found = [(parameter.name, parameter.default) for parameter in parameters]
    assert found[:len(expected)] == expected
    # More may follow if nobody needs to give it.
    assert all(default is not inspect.Parameter.empty for _, default in found[len(expected):])
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
               for parameter in parameters[:len(expected)])


def test_the_types_tell_the_same():
    stub = ast.parse(pathlib.Path(hvd.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    functions = {node.name: node.args for node in stub.body if isinstance(node, ast.FunctionDef)}
    for name, arguments in functions.items():
        try:
            parameters = inspect.signature(getattr(hvd, name)).parameters.values()
        except ValueError:  # of C functions without arguments
            parameters = []
        assert [argument.arg for argument in arguments.args] == [p.name for p in parameters], name
        defaults = [p for p in parameters if p.default is not inspect.Parameter.empty]
        assert len(arguments.defaults) == len(defaults), name
    imported = {alias.asname for node in imports for alias in node.names}
    for module in [node.module for node in imports if node.names[0].name == "*"]:
        imported.update(importlib.import_module(module).__all__)
    classes = {node.name for node in stub.body if isinstance(node, ast.ClassDef)}
    values = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert set(NAMES) <= set(functions) | imported | classes | values


def test_basics_have_types():
    for name in basics.__all__:
        function = getattr(basics, name)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters
            assert set(inspect.get_annotations(function)) == {*parameters, "return"}, name


def test_the_types_name_all_of_the_extension():
    stub = ast.parse(pathlib.Path(horovod.__file__).with_name("_core.pyi").read_text())
    named = {getattr(node, "name", None) or node.target.id for node in stub.body
             if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign))}
    assert named == {name for name in dir(_core) if not name.startswith("__")}


@pytest.mark.parametrize("module", MODULES)
def test_modules(module):
    found = importlib.import_module(f"horovod.torch.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


def test_numbers_of_the_reductions():
    assert {name: getattr(hvd, name) for name in OPS} == OPS


def test_compression_has_its_two_methods():
    for name in ("none", "fp16", "bf16"):
        assert inspect.signature(getattr(hvd.Compression, name).compress).parameters
        assert len(inspect.signature(getattr(hvd.Compression, name).decompress).parameters) == 2


def test_questions_before_init():
    for question in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        with pytest.raises(ValueError, match="Horovod has not been initialized; use hvd.init()."):
            getattr(hvd, question)()
    assert not hvd.is_initialized() and hvd.nccl_built() < 2700
