# SPDX-License-Identifier: Apache-2.0
"""Elastic training: state that survives a change of the ranks, and the loop around the user's code.

A State keeps a committed copy in memory. run_fn() calls the user's function; when a collective
fails it restores that copy, when hosts change it keeps the state, and either way the job is joined
anew and the state of rank 0 is given to all. That hosts changed is told by horovodrun, in a file
that is looked at when the state is committed, or by who calls
notification_manager.handle_hosts_updated().
"""
import copy
import functools
import queue

from horovod import _core
from horovod.common import membership
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, JobEndsInterrupt
from horovod.common.objects import allgather_object


class HostUpdateResult:
    """What happened to the hosts; values combine by or."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
    ending = 4  # the job is about to end


class WorkerNotificationManager:
    """Passes news about hosts to the states that listen."""

    def __init__(self):
        self._listeners = []
        self._last_news = 0

    def init(self, **_):
        """Called before each run; a launcher's service may replace it."""

    def poll(self):
        """Looks whether horovodrun has left news about hosts."""
        number, what = membership.news()
        if number > self._last_news:
            self._last_news = number
            self.handle_hosts_updated(number, what)

    def register_listener(self, listener):
        if listener not in self._listeners:
            self._listeners.append(listener)

    def remove_listener(self, listener):
        if listener in self._listeners:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp, update_res):
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()

_KEEP = 3  # checkpoints
_N_WRITTEN = "horovod.n_written"  # in checkpoints: how many commits have written one


class State:
    """What must be the same on all ranks and survive a failure."""

    def __init__(self, bcast_object, get_rank):
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks = []
        self._n_written = 0
        self._is_written, self._last_write = False, None

    def on_reset(self):
        """After the job was joined anew: forgets old news, then reset() and the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def finish_steps(self, rejoin):
        """From now on the ranks that are left after a failure finish their step, if that can be."""

    def on_hosts_updated(self, timestamp, update_res):
        """News from the launcher, from any thread."""
        self._host_messages.put((timestamp, update_res))

    def register_reset_callbacks(self, callbacks):
        """Functions to call when the number of ranks may have changed."""
        self._reset_callbacks.extend(callbacks)

    def commit(self, path=None, keep=_KEEP):
        """Saves the state and raises HostsUpdatedInterrupt if hosts have changed.

        path: a checkpoint is written there too, as hvd.checkpoint.save() does, and `keep` of them
        stay.
        """
        if _core.is_initialized():
            _core.settle()  # what a GPU holds after a rank was lost is not to be kept
        self.save()
        if path is not None:
            self._n_written += 1
            self._last_write = self.write(path, self._n_written, keep)
        self._is_written = path is not None
        self.check_host_updates()
        self._is_written = False

    def hand_over(self, path):
        """The job is about to end, all ranks are at the same step: what was done is written."""
        if not self._is_written:
            self.save()
            self._n_written += 1
            self._last_write = self.write(path, self._n_written, _KEEP)
        if self._last_write is not None:
            self._last_write.wait()

    def write(self, path, step, keep):
        """Begins to write what is saved as a checkpoint, of all ranks; what it is waited for by."""
        raise NotImplementedError(f"{type(self).__name__} does not write checkpoints")

    def resume(self, path):
        """In a job that has just begun: the state of the newest checkpoint at the path, if any."""
        raise NotImplementedError(f"{type(self).__name__} does not read checkpoints")

    def recover(self):
        """After a failure: back to the last step that is whole, at worst to the last commit."""
        self.restore()

    def check_host_updates(self):
        """Raises HostsUpdatedInterrupt on all ranks alike if any news has come to rank 0.

        Or JobEndsInterrupt, which run() takes care of, if they are that the job is about to end.
        """
        notification_manager.poll()
        newest, all_updates = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > newest:
                newest = timestamp
                all_updates |= update
        before = self._last_updated_timestamp
        before, self._last_updated_timestamp, all_updates = self._bcast_object(
            (before, newest, all_updates))
        if all_updates & HostUpdateResult.ending:
            raise JobEndsInterrupt
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(all_updates == HostUpdateResult.removed)

    def save(self):
        raise NotImplementedError

    def restore(self):
        raise NotImplementedError

    def sync(self):
        raise NotImplementedError

    def reset(self):
        """Called after the job was joined anew, before the callbacks."""


class ObjectState(State):
    """Plain Python values, given by keyword, kept as attributes."""

    def __init__(self, bcast_object, get_rank, **kwargs):
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self):
        self._saved_state = {name: copy.deepcopy(getattr(self, name))
                             for name in self._saved_state}

    def restore(self):
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def contents(self):
        """What a checkpoint has of this state, by name."""
        return dict(self._saved_state)

    def checkpoints(self):
        """The save() and load() that know the tensors of the state."""
        from horovod import checkpoint

        return checkpoint

    def write(self, path, step, keep):
        return self.checkpoints().save(path, {**self.contents(), _N_WRITTEN: step}, step, keep)

    def resume(self, path):
        found = self.checkpoints().load(path, self.contents())
        if found is not None:
            self._n_written = found.state[_N_WRITTEN]
            for name in self._saved_state:
                setattr(self, name, found.state[name])
            self.save()

    def sync(self):
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self.restore()


class StepIsLost(HorovodInternalError):
    """The ranks that are left cannot finish their step, but are in the next generation already."""


def meet(in_step=False, n_done=0):
    """The first that ranks do in a generation, where they may finish a step: are all in the same?

    n_done: steps since the state was the same on all.
    """
    mine = (in_step, n_done)
    everybody = allgather_object(mine, name="elastic.meet")
    return in_step and all(one == mine for one in everybody)


ON_FAILURE = ("restart", "shrink")


def run_fn(func, reset, checkpoint=None, on_failure="restart"):
    """The elastic loop: func(state, ...) until it returns; reset() joins the job anew.

    checkpoint: where state.commit(path=...) writes; a job that begins goes on from there.
    on_failure: "shrink": the ranks that are left do not wait for those that are started again, and
    finish their step without the lost ones, where the state can.
    """
    if on_failure not in ON_FAILURE:
        raise ValueError(f"on_failure is {on_failure!r}: one of {', '.join(map(repr, ON_FAILURE))}")
    shrinks = on_failure == "shrink" and membership.is_elastic()
    wants = (membership.WANTS_WARNING * (checkpoint is not None) +
             membership.WANTS_SHRINK * shrinks)

    @functools.wraps(func)
    def wrapper(state, *args, **kwargs):
        notification_manager.init()
        notification_manager.register_listener(state)
        if wants:
            membership.say_wants(wants)
        if checkpoint is not None and not membership.is_later_generation():
            state.resume(checkpoint)
        if shrinks:
            state.finish_steps(reset)
        must_meet = shrinks and membership.is_later_generation()
        skip_sync = False
        try:
            while True:
                has_joined = False
                try:
                    if must_meet:
                        meet()
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    state.recover()
                    skip_sync = False
                    has_joined = isinstance(error, StepIsLost)
                except HostsUpdatedInterrupt as interrupt:
                    # Where ranks may leave for different reasons, or new ones come meanwhile, all
                    # must do the same.
                    skip_sync = interrupt.skip_sync and not membership.is_elastic()
                if not has_joined:
                    reset()
                must_meet = shrinks and not has_joined
                state.on_reset()
        except JobEndsInterrupt:
            if checkpoint is not None:
                state.hand_over(checkpoint)
            raise SystemExit(0) from None
        finally:
            notification_manager.remove_listener(state)

    return wrapper
