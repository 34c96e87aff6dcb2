# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks against training on one, on every rank.

Each check builds the same small model everywhere, gives each rank its share of a batch, and
compares with a plain optimizer on the whole batch.
"""
import copy
import gc
import os
import pickle
import random
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.torch.elastic import ElasticSampler, TorchState

ROWS = 6  # per rank


def make_model(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step):
    """The whole batch, the same on every rank, and this rank's share of it."""
    generator = torch.Generator().manual_seed(100 + step)
    data = torch.randn(ROWS * hvd.size(), 4, generator=generator)
    target = torch.randn(ROWS * hvd.size(), 3, generator=generator)
    own = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
    return data, target, data[own], target[own]


def loss_of(model, data, target):
    return nn.functional.mse_loss(model(data), target)


def agree(model, tolerance=1e-6):
    """All ranks have the same weights, bit for bit."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    for other in hvd.allgather(weights.unsqueeze(0)):
        assert torch.equal(other, weights)
    return weights


def train_both(optimizer_of, steps=5, passes=1, adjust=None, model_of=make_model, **kwargs):
    """Weights after training on all ranks, and after training alone on the whole batch."""
    alone, ours = model_of(), model_of()
    plain = optimizer_of(alone.parameters())
    distributed = hvd.DistributedOptimizer(optimizer_of(ours.parameters()),
                                           named_parameters=ours.named_parameters(),
                                           backward_passes_per_step=passes, **kwargs)
    for step in range(steps):
        plain.zero_grad()
        distributed.zero_grad()
        for part in range(passes):
            data, target, own_data, own_target = batch(step * passes + part)
            loss_of(alone, data, target).backward()
            loss_of(ours, own_data, own_target).backward()
        if adjust is not None:
            adjust(alone, ours, plain, distributed)
        else:
            plain.step()
            distributed.step()
    return agree(ours), torch.cat([p.detach().flatten() for p in alone.parameters()])


def close(both, tolerance=1e-5):
    ours, alone = both
    assert torch.allclose(ours, alone, rtol=tolerance, atol=tolerance), (ours - alone).abs().max()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


# --- Checks ---------------------------------------------------------------------------------------


def check_like_one_process():
    close(train_both(sgd))
    close(train_both(lambda p: torch.optim.Adam(p, lr=0.01)))


def check_arguments_that_change_nothing():
    close(train_both(sgd, passes=3, steps=2))
    close(train_both(sgd, gradient_predivide_factor=float(hvd.size())))
    close(train_both(sgd, groups=2))
    close(train_both(sgd, groups=2, gradient_predivide_factor=2.0))
    close(train_both(sgd, compression=hvd.Compression.fp16), 1e-2)
    close(train_both(sgd, compression=hvd.Compression.bf16, groups=3), 5e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        close(train_both(sgd, num_groups=1))
    model = make_model()
    distributed = hvd.DistributedOptimizer(sgd(model.parameters()),
                                           groups=[list(model[0].parameters())])
    loss_of(model, *batch(0)[2:]).backward()
    distributed.step()
    agree(model)


def check_sum_is_average_times_size():
    def step(op, lr):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), op=op)
        loss_of(model, *batch(0)[2:]).backward()
        optimizer.step()
        return agree(model)

    assert torch.allclose(step(hvd.Sum, 0.1 / hvd.size()), step(hvd.Average, 0.1), atol=1e-6)


def check_clipping_between_synchronize_and_step():
    def adjust(alone, ours, plain, distributed):
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        plain.step()
        distributed.synchronize()
        nn.utils.clip_grad_norm_(ours.parameters(), 0.05)
        with distributed.skip_synchronize():
            distributed.step()

    close(train_both(sgd, adjust=adjust))


def check_process_set():
    """Members train on the batches of all members, the others alone."""
    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, hvd.size() - 1])
    ranks = members.ranks if members.included() else [hvd.rank()]
    rows = torch.cat([torch.arange(rank * ROWS, (rank + 1) * ROWS) for rank in ranks])
    for kwargs in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
        alone, ours = make_model(), make_model()
        plain = sgd(alone.parameters())
        distributed = hvd.DistributedOptimizer(sgd(ours.parameters()), ours.named_parameters(),
                                               process_set=members, **kwargs)
        for step in range(3):
            data, target, own_data, own_target = batch(step)
            plain.zero_grad()
            distributed.zero_grad()
            loss_of(alone, data[rows], target[rows]).backward()
            loss_of(ours, own_data, own_target).backward()
            plain.step()
            distributed.step()
        for mine, expected in zip(ours.parameters(), alone.parameters()):
            assert torch.allclose(mine, expected, atol=1e-6)
    hvd.remove_process_set(members)


def check_closures():
    """What a closure computes is reduced, however often it is called."""
    alone, ours = make_model(), make_model()
    plain = sgd(alone.parameters())
    distributed = hvd.DistributedOptimizer(sgd(ours.parameters()), ours.named_parameters())
    for step in range(3):
        data, target, own_data, own_target = batch(step)

        def evaluate(model, optimizer, inputs, wanted):
            optimizer.zero_grad()
            loss = loss_of(model, inputs, wanted)
            loss.backward()
            return loss

        plain.step(lambda: evaluate(alone, plain, data, target))
        loss = distributed.step(lambda: evaluate(ours, distributed, own_data, own_target))
        assert loss.item() > 0
    close((agree(ours), torch.cat([p.detach().flatten() for p in alone.parameters()])))


def check_an_optimizer_that_replaces_another():
    model = make_model()
    for _ in range(3):  # of the same parameters, under the same names
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        optimizer.zero_grad()
        loss_of(model, *batch(0)[2:]).backward()
        optimizer.step()
    agree(model)


def check_an_optimizer_that_is_let_go():
    """It goes, takes its hooks along, and does not keep the parameters."""
    for kwargs in ({}, {"groups": 1}, {"compression": hvd.Compression.fp16}):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(),
                                             **kwargs)
        loss_of(model, *batch(0)[2:]).backward()
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
        for _ in range(2):  # no hook counts them
            model.zero_grad()
            loss_of(model, *batch(0)[2:]).backward()
        gone = weakref.ref(model[0].weight)
        del model
        gc.collect()
        assert gone() is None
    model = make_model()
    hvd.DistributedOptimizer(sgd(model.parameters()), [(f"nobodys.{name}", p) for name, p
                                                       in model.named_parameters()])
    gc.collect()
    loss_of(model, *batch(0)[2:]).backward()
    if hvd.size() > 1:  # a script that steps with the one it has wrapped does not train alone
        with pytest.raises(AssertionError, match="before call to step"):
            loss_of(model, *batch(0)[2:]).backward()


def check_loading_a_state_while_gradients_are_on_their_way():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    saved = optimizer.state_dict()
    for step in range(10):
        loss_of(model, *batch(step)[2:]).backward()
        if hvd.rank() == 0:
            time.sleep(0.01)
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
    loss_of(model, *batch(0)[2:]).backward()
    optimizer.step()
    agree(model)
    expected = make_model()
    plain = sgd(expected.parameters())
    loss_of(expected, *batch(0)[:2]).backward()
    plain.step()
    assert torch.allclose(model[0].weight, expected[0].weight, atol=1e-6)


def check_two_optimizers_in_one_backward_pass():
    models = [make_model(), make_model(6)]

    def wrap(model, prefix, **kwargs):
        named = [(prefix + name, p) for name, p in model.named_parameters()]
        return hvd.DistributedOptimizer(sgd(model.parameters()), named, **kwargs)

    def compute():
        sum(loss_of(model, *batch(0)[2:]) for model in models).backward()

    for kwargs in ({}, {"groups": 1}):
        optimizers = [wrap(models[0], "a.", **kwargs), wrap(models[1], "b.", **kwargs)]
        compute()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model in models:
            agree(model)
    optimizers = [wrap(model, "same.") for model in models]
    if hvd.rank() == 0 and hvd.size() > 1:  # alone, so that nothing arrives meanwhile
        with pytest.raises(ValueError, match="same name as another tensor") as caught:
            compute()
        assert "need different names" in caught.value.__notes__[0]
    hvd.barrier()


def check_two_optimizers_in_another_order_on_each_rank():
    """Nothing is waited for that the backward pass has not submitted."""
    models = [make_model(), make_model(6)]
    optimizers = [hvd.DistributedOptimizer(sgd(model.parameters()),
                                           [(f"{i}.{name}", p) for name, p
                                            in model.named_parameters()], **kwargs)
                  for i, (model, kwargs) in enumerate(zip(models, ({}, {"groups": 2})))]
    for step in range(3):
        sum(loss_of(model, *batch(step)[2:]) for model in models).backward()
        for optimizer in optimizers if hvd.rank() % 2 else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        agree(model)


def check_the_line_of_a_gradient():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, *batch(0)[2:]).backward()
    if hvd.size() > 1:
        places = {hook.handle.where for hook in optimizer._hooks.values()}
        assert len(places) == 1 and "training_suite.py:" in places.pop()
    optimizer.step()


def check_scaler():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    scaler = torch.amp.GradScaler("cpu") if hasattr(torch.amp, "GradScaler") else None
    if scaler is None:
        return
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, *batch(step)[2:])
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    agree(model)


def check_mistakes():
    model = make_model()
    named = list(model.named_parameters())

    def make(**kwargs):
        return hvd.DistributedOptimizer(sgd(model.parameters()), **kwargs)

    with pytest.raises(ValueError, match="must be unique"):
        make(named_parameters=named + named[:1])
    with pytest.raises(ValueError, match="were not named"):
        make(named_parameters=named[1:])
    with pytest.raises(ValueError, match="sequence of tuples"):
        make(named_parameters=model.parameters())
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        make(backward_passes_per_step=0)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        make(op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="has not been registered"):
        make(process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="torch.Tensor"):
        make(groups=[["weight"]])
    with pytest.raises(ValueError, match="once in groups"):
        make(groups=[[named[0][1]], [named[0][1]]])
    optimizer = make(named_parameters=named)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert sorted(optimizer._parameter_names.values()) == sorted(name for name, _ in named)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled.*state_dict"):
            copier(optimizer)
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)
    data, target = batch(0)[2:]
    loss_of(model, data, target).backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss_of(model, data, target).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    for hook in optimizer._hooks.values():
        hook.handle = None
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(model, data, target).backward()
    optimizer.step()


class Forked(nn.Module):
    """Uses only one of its branches, another one on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, data):
        return self.branches[hvd.rank() % 3](data)


def check_unused_frozen_and_added_parameters():
    model = Forked()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch(step)[2:]).backward()
        optimizer.step()
    agree(model)
    model = make_model()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, *batch(0)[2:]).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    optimizer.zero_grad()
    model[0].weight.requires_grad_(True)
    loss_of(model, *batch(1)[2:]).backward()
    optimizer.step()
    agree(model)
    assert not torch.equal(model[0].weight, frozen)
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    optimizer.zero_grad()
    (loss_of(model, *batch(2)[2:]) + (extra * hvd.rank()).sum()).backward()
    optimizer.step()
    assert torch.equal(hvd.broadcast(extra.detach(), 0), extra)


def check_a_parameter_added_before_the_first_step():
    """Also where one rank does not use all of the others."""
    model, extra = make_model(), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    optimizer.add_param_group({"params": [extra]})
    loss = extra.sum() * hvd.rank()
    if hvd.rank() == 0:
        loss = loss + loss_of(model, *batch(0)[2:])
    loss.backward()
    optimizer.step()
    agree(model)
    assert torch.equal(hvd.broadcast(extra.detach(), 0), extra)


def check_groups_with_members_frozen_and_unfrozen():
    def freeze(model, frozen):
        for p in model[0].parameters():
            p.requires_grad_(not frozen)

    alone, ours = make_model(), make_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    distributed = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1),
                                           ours.named_parameters(), groups=1)
    for step in range(6):
        data, target, own_data, own_target = batch(step)
        for model, optimizer, inputs, wanted in ((alone, plain, data, target),
                                                 (ours, distributed, own_data, own_target)):
            optimizer.zero_grad()
            freeze(model, step in (1, 2, 3))
            loss_of(model, inputs, wanted).backward()
            if step == 3:  # frozen already when the step began, and so not waited for
                assert all(not group.ready for group in getattr(optimizer, "_groups", {}).values())
            optimizer.step()
    close((agree(ours), torch.cat([p.detach().flatten() for p in alone.parameters()])))
    if hvd.size() > 1:
        distributed.zero_grad()
        freeze(ours, hvd.rank() == 0)
        loss_of(ours, *batch(0)[2:]).backward()
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            distributed.step()


def check_a_group_that_was_not_submitted():
    """Gradients of one rank are never taken for those of all."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), groups=1)
    if hvd.size() > 1:
        optimizer._submit_group = lambda group: None
        loss_of(model, *batch(0)[2:]).backward()
        with pytest.raises(RuntimeError, match="never submitted"):
            optimizer.step()


def check_sparse_gradients():
    for sparse_as_dense in (False, True):
        torch.manual_seed(2)
        model = nn.Embedding(10, 3, sparse=True)
        dense = copy.deepcopy(model)
        dense.sparse = False
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                             sparse_as_dense=sparse_as_dense)
        plain = hvd.DistributedOptimizer(torch.optim.SGD(dense.parameters(), lr=0.1))
        for step in range(3):
            rows = torch.tensor([hvd.rank(), (step + 3) % 10, 5])
            for each, network in ((optimizer, model), (plain, dense)):
                each.zero_grad()
                if step != 1 or hvd.rank() == 0:  # the others do not use it this time
                    network(rows).pow(2).sum().backward()
                each.step()
        assert torch.allclose(agree(model), agree(dense), atol=1e-6)


class Lookup(nn.Module):
    """Looks rows up in a table, or does without it."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(10, 4, sparse=sparse)
        self.layer = nn.Linear(4, 3)

    def forward(self, rows):
        return self.layer(torch.ones(2, 4) if rows is None else self.table(rows))


def train_lookups(users_by_step, sparse_tables, **kwargs):
    """Weights after steps in which only some ranks use the table; on them it may be sparse."""
    model = Lookup(hvd.rank() in sparse_tables)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         model.named_parameters(), **kwargs)
    for step, users in enumerate(users_by_step):
        optimizer.zero_grad()
        rows = torch.tensor([hvd.rank(), step + 3]) if hvd.rank() in users else None
        model(rows).pow(2).sum().backward()
        optimizer.step()
    return agree(model)


def check_sparse_gradients_that_some_ranks_do_not_have():
    everyone, last = range(hvd.size()), hvd.size() - 1
    for users_by_step in ([[0], [last], [], everyone],  # known to be sparse on rank 0 only
                          [[], [last], everyone],  # on none
                          [everyone, [0]]):
        dense = train_lookups(users_by_step, [])
        for kwargs in ({}, {"sparse_as_dense": True}, {"groups": 1}, {"groups": 2},
                       {"groups": 1, "sparse_as_dense": True}):
            ours = train_lookups(users_by_step, everyone, **kwargs)
            assert torch.allclose(ours, dense, atol=1e-6), (users_by_step, kwargs)
        if users_by_step[0] == [0]:  # dense later and elsewhere does not matter then
            ours = train_lookups(users_by_step, [0])
            assert torch.allclose(ours, dense, atol=1e-6)


def check_sparse_and_dense_gradients_of_one_parameter():
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="sparse on some ranks and dense on"):
            train_lookups([range(hvd.size())], [0])


def check_sparse_gradients_after_join():
    """Ranks that had joined do not know what the others have agreed on meanwhile."""
    model = Lookup(sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         model.named_parameters())
    for joins, steps in ((True, 2 if hvd.rank() == 0 else 0), (False, 2)):
        for step in range(steps):
            optimizer.zero_grad()
            model(None if joins else torch.tensor([hvd.rank(), 3])).pow(2).sum().backward()
            optimizer.step()
        if joins:
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    agree(model)


def check_sparse_gradients_with_a_rank_that_is_new():
    """As in an elastic job: the others have agreed and left their groups before it came."""
    def wrap(model):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                        model.named_parameters(),
                                        groups=[list(model.parameters())])

    model = Lookup(sparse=True)
    optimizer = wrap(model)
    model(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    if hvd.rank() == hvd.size() - 1:
        model = Lookup(sparse=True)
        optimizer = wrap(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for rows in (None, torch.tensor([hvd.rank()])):
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
    agree(model)


def check_groups_on_a_rank_that_is_new():
    """The others do not make theirs again."""
    model = make_model()
    with mock.patch.dict(os.environ, HOROVOD_ELASTIC="1"):
        if hvd.rank() == 0:
            hvd.DistributedOptimizer(sgd(model.parameters()), groups=2)
    hvd.barrier()


def check_adasum():
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.DistributedOptimizer(sgd(make_model().parameters()), op=hvd.Adasum)
        return
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
    before = loss_of(model, *batch(0)[:2]).item()
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model, *batch(0)[2:]).backward()
        optimizer.step()
    agree(model)
    assert loss_of(model, *batch(0)[:2]).item() < before
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    (extra * hvd.rank()).sum().backward()
    optimizer.step()
    assert torch.equal(hvd.broadcast(extra.detach(), 0), extra)
    if hvd.size() > 1:
        with pytest.raises(AssertionError):
            with optimizer.skip_synchronize():
                pass


def check_scheduler_of_the_original():
    model = make_model()
    original = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(original, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
    loss_of(model, *batch(0)[2:]).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    agree(model)


def check_same_start():
    model = make_model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert torch.equal(agree(model),
                       torch.cat([p.detach().flatten() for p in make_model(0).parameters()]))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(3, root_rank=0)
    for make in (sgd, lambda p: torch.optim.Adam(p, lr=0.01 * (hvd.rank() + 1))):
        optimizer = make(model.parameters())
        if hvd.rank() == 0:  # only the root has made steps
            for step in range(2):
                loss_of(model, *batch(step)[2:]).backward()
                optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = hvd.allgather_object(repr(optimizer.state_dict()))
        assert len(set(states)) == 1 and "tensor" in states[0]
        agree(model)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)


def check_sync_batch_norm():
    for shape in ((ROWS, 3), (ROWS, 3, 4), (ROWS, 3, 2, 2)):
        generator = torch.Generator().manual_seed(9)
        whole = torch.randn(shape[0] * hvd.size(), *shape[1:], generator=generator) * 3 + 1
        weights = torch.randn(whole.shape, generator=generator)
        ours = hvd.SyncBatchNorm(3)
        plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3)
        own = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
        mine = whole[own].clone().requires_grad_()
        both = whole.clone().requires_grad_()
        out, expected = ours(mine), plain(both)
        assert torch.allclose(out, expected[own], atol=1e-5)
        (out * weights[own]).sum().backward()
        (expected * weights).sum().backward()
        assert torch.allclose(mine.grad, both.grad[own], atol=1e-5)
        total = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
        assert torch.allclose(total, plain.weight.grad, atol=1e-4)
        assert torch.allclose(ours.running_mean, plain.running_mean, atol=1e-6)
        assert torch.allclose(ours.running_var, plain.running_var, atol=1e-5)
        ours.eval(), plain.eval()
        assert torch.allclose(ours(whole), plain(whole), atol=1e-5)
    with pytest.raises(ValueError, match="at least 2D"):
        ours(torch.ones(3))
    cumulative, plain = hvd.SyncBatchNorm(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    for training in (False, True, True, False):  # before it has seen a batch, too
        cumulative.train(training), plain.train(training)
        assert torch.allclose(cumulative(whole[own]), plain(whole)[own], atol=1e-5)
    assert torch.allclose(cumulative.running_mean, plain.running_mean, atol=1e-6)


def check_elastic_state():
    sampler = ElasticSampler(list(range(20)), shuffle=False)
    model = make_model(seed=hvd.rank())
    state = TorchState(model=model, optimizer=sgd(model.parameters()), sampler=sampler,
                       epoch=hvd.rank())
    state.sync()
    assert state.epoch == 0
    start = agree(model)
    sampler.record_batch(0, 2)
    state.epoch = 7
    state.commit()
    with torch.no_grad():
        model[0].weight.add_(1)
    state.epoch = 8
    state.restore()
    assert state.epoch == 7 and torch.equal(agree(model), start)
    assert state.sampler.processed_num == 2 * hvd.size()
    state.on_reset()
    left = [i for part in hvd.allgather_object(list(sampler)) for i in part]
    assert set(left) == set(range(2 * hvd.size(), 20))
    assert len(set(map(len, hvd.allgather_object(list(sampler))))) == 1
    ran = []

    @hvd.elastic.run
    def train(the_state):
        ran.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        if len(ran) == 1:
            raise hvd.HorovodInternalError("as if a rank was lost")
        return "done"

    assert train(state) == "done" and ran == [hvd.size()] * 2
    without = TorchState(batch=hvd.rank())
    without.sync()
    assert without.model is None and without.optimizer is None and without.batch == 0


def check_join():
    hvd.barrier()
    for _ in range(hvd.rank()):
        hvd.allreduce(torch.ones(2), name="uneven")
    last = hvd.join()
    assert 0 <= last < hvd.size()
    assert len(set(hvd.allgather_object(last))) == 1


def check_what_join_refuses():
    if hvd.rank() == hvd.size() - 1 and hvd.size() > 1:
        rows = torch.ones(hvd.size())
        for kind, collective in (("Allgather", hvd.allgather), ("Alltoall", hvd.alltoall),
                                 ("Broadcast", lambda t, name: hvd.broadcast(t, 0, name)),
                                 ("Reducescatter", hvd.reducescatter)):
            with pytest.raises(hvd.HorovodInternalError,
                               match=f"{kind} is not supported with Join"):
                collective(rows, name="refused")
        out = hvd.grouped_allreduce([rows, rows], name="accepted", op=hvd.Sum)
        assert torch.equal(out[1], rows)
    hvd.join()
    assert hvd.allreduce(torch.ones(1), name="afterwards", op=hvd.Sum).item() == hvd.size()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((4,), float(i)), torch.full((3,), float(i))


def check_workers_that_fork():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    sampler = torch.utils.data.distributed.DistributedSampler(Numbers(), hvd.size(), hvd.rank())
    loader = torch.utils.data.DataLoader(Numbers(), 2, sampler=sampler, num_workers=2,
                                         multiprocessing_context="fork")
    for data, target in loader:
        optimizer.zero_grad()
        loss_of(model, data, target).backward()
        optimizer.step()
    agree(model)


def check_random_delays(n_steps=100):
    """Whoever is late, the weights are the same."""
    def train(delay):
        chance = random.Random(hvd.rank() if delay else 0)
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for step in range(n_steps):
            optimizer.zero_grad()
            loss_of(model, *batch(step % 10)[2:]).backward()
            if delay and chance.random() < 0.2:
                time.sleep(chance.random() * 0.01)
            optimizer.step()
        return agree(model)

    assert torch.allclose(train(True), train(False), atol=1e-6)


def check_memory_stays(n_steps=400):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())

    def steps(n):
        for step in range(n):
            optimizer.zero_grad()
            loss_of(model, *batch(0)[2:]).backward()
            optimizer.step()
            hvd.allgather(torch.ones(1000))
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = steps(100)
    assert steps(n_steps) - before < 8 << 20


def check_compiled_step():
    if not hasattr(torch.library, "custom_op"):
        return

    def step(tensor):
        doubled = hvd.allreduce(tensor * 2, op=hvd.Sum)
        everyone = hvd.allgather(doubled)
        return (everyone * everyone).sum()

    def groups(tensor):
        reduced = hvd.grouped_allreduce([tensor, tensor * 2], op=hvd.Sum)
        scattered = hvd.grouped_reducescatter([reduced[0] * reduced[1], tensor], op=hvd.Sum)
        gathered = hvd.grouped_allgather(scattered)
        return sum((part * part).sum() for part in gathered)

    def exchange(tensor):
        hvd.barrier()
        swapped = hvd.alltoall(tensor * (hvd_rank + 1))
        back, received = hvd.alltoall(swapped * swapped, splits=[2] * n_ranks)
        mine = hvd.broadcast(back * received.sum(), 0)
        return (mine * mine).sum() + hvd.reducescatter(tensor).sum()

    def in_place(tensor):
        copy_ = tensor.detach() * 3
        hvd.allreduce_(copy_, op=hvd.Sum)
        hvd.grouped_allreduce_([copy_], op=hvd.Sum)
        hvd.broadcast_(copy_, 0)
        return (tensor * copy_).sum()

    hvd_rank, n_ranks = hvd.rank(), hvd.size()
    from torch import _dynamo
    _dynamo.config.capture_dynamic_output_shape_ops = True  # older versions ask for it
    for step in (step, groups, exchange, in_place):
        results = []
        for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            tensor = torch.arange(2. * n_ranks) + hvd_rank
            tensor.requires_grad_()
            value = function(tensor)
            value.backward()
            results.append((value.detach(), tensor.grad))
        assert torch.allclose(results[0][0], results[1][0]), (step, results)
        assert torch.allclose(results[0][1], results[1][1]), (step, results)


def run():
    hvd.init(process_sets="dynamic")
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            started = time.monotonic()
            check()
            print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
            hvd.barrier()
    hvd.shutdown()
    return True


def run_long():
    """What takes minutes: many steps, with ranks that are late at random and with none."""
    hvd.init()
    check_random_delays(500)
    check_memory_stays(10_000)
    hvd.shutdown()
    return True
