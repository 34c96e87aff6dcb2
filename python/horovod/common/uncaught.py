# SPDX-License-Identifier: Apache-2.0
"""Which exception ends this process, told to the other ranks and to the launcher.

A rank that raises leaves the job while its interpreter is torn down, and others overtake it: by the
order in which processes end nobody can tell whose fault it was. So the exception is handed to the
core before this rank leaves. Where another rank has left before, it is a consequence, and of an
operation that failed only the sentence is printed: the traceback that matters is the other rank's.

What users see is otherwise what they would have seen: the hooks that were there are called.
"""
import os
import re
import sys
import sysconfig
import threading
import traceback
import types

from horovod import _core
from horovod.common.exceptions import PACKAGE_FOLDER, HorovodInternalError

MESSAGE_CHARACTERS = 200
_NOT_THE_USERS = (PACKAGE_FOLDER, *(sysconfig.get_path(name) + os.sep for name in
                                    ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen ")
# What a node of TensorFlow says of an operation that failed.
_OF_A_GRAPH = re.compile(r"Horovod[A-Z]\w+: .*")
_OF_A_WORKER = re.compile(r"Caught \w+ in ([\w ]+)\.$")
_OF_A_CALL = (HorovodInternalError, ValueError, NotImplementedError)
_of_thread = None  # what a thread raised, in words
_hooks_of = None   # the process that has them


def describe(error):
    """In a line, as "RuntimeError: no data (train.py:17)"."""
    text = _text_of(error)
    if len(text) > MESSAGE_CHARACTERS:
        text = text[:MESSAGE_CHARACTERS - 3] + "..."
    place = _place_of(error.__traceback__)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({place})" if place else "")


def _text_of(error):
    """The first line; of an error that a worker of PyTorch's DataLoader passed on, that one's."""
    lines = str(error).strip().splitlines() or [""]
    passed_on = _OF_A_WORKER.match(lines[0])
    if passed_on is None or len(lines) == 1:
        return lines[0]
    return f"{lines[-1].removeprefix(type(error).__name__ + ': ')}, in {passed_on.group(1)}"


def _place_of(trace):
    """The innermost line of the user's own code, or of any if there is none."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    for frame in (own or frames)[-1:]:
        here = os.path.join(os.getcwd(), "")
        inside = frame.filename.startswith(here)
        return f"{frame.filename[len(here):] if inside else os.path.basename(frame.filename)}" \
               f":{frame.lineno}"
    return ""


def tell(error):
    """This process ends because of the error. False: that is a consequence of another's end."""
    return _tell(describe(error))


def _tell(text):
    is_cause = _core.leave_because(text)
    if is_cause is None:
        is_cause = _tell_launcher(text)
    return is_cause


def _tell_launcher(text):
    """Without a job: before init(), and after shutdown(). What was noted first stays."""
    path, rank = os.environ.get("HOROVOD_BLAME_FILE"), os.environ.get("HOROVOD_RANK")
    if not path or not rank:
        return True
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(f"{rank}\nraised {text}")
    except FileExistsError:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip() == rank
    except OSError:  # the launcher is gone
        pass
    return True


def _ends_badly(error):
    is_end = isinstance(error, SystemExit) and error.code in (None, 0)
    return error is not None and not is_end and not isinstance(error, GeneratorExit)


def tell_before_shutdown():
    """shutdown() may be called on the way out: by finally, or by a handler."""
    error = sys.exc_info()[1]
    if _ends_badly(error):
        tell(error)


def tell_at_exit():
    """The hooks may have been replaced. The interpreter remembers what it has printed."""
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):
        tell(error)
    elif _of_thread is not None:
        _tell(_of_thread)


def print_consequence(error):
    """The sentence without the traceback."""
    lines = traceback.format_exception_only(type(error), error)
    sys.stderr.write("".join(_without_graph(lines) if _is_of_tensorflow(error) else lines))
    sys.stderr.flush()


def _is_failed_operation(error):
    """Also of a TensorFlow graph, which has exceptions of its own."""
    return isinstance(error, HorovodInternalError) or \
        _is_of_tensorflow(error) and _OF_A_GRAPH.search(str(error))


def _is_of_tensorflow(error):
    return type(error).__module__.startswith("tensorflow.")


def _without_graph(lines):
    """TensorFlow adds where the node was made, a line for each call."""
    match = _OF_A_GRAPH.search("".join(lines))
    if match is None:
        return lines
    return [f"{lines[0].partition(':')[0]}: {match.group()}\n"]


def _without_ours(error, trace):
    """The traceback down to the user's call, which is what a failed or refused one is about."""
    links = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    if isinstance(error, _OF_A_CALL) and not _shows_all():
        n_ours = next((i for i, link in enumerate(reversed(links)) if not _is_ours(link)), 0)
        links = links[:len(links) - n_ours]
    for link in reversed(links):
        trace = types.TracebackType(trace, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return error.with_traceback(trace)


def _is_ours(link):
    return link.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER)


def _shows_all():
    return os.environ.get("HOROVOD_LOG_LEVEL", "").lower() in ("trace", "debug")


def install_before_init():
    """A rank may fail before init(). A child of a rank may fail without harm, and is no rank."""
    processes = sys.modules.get("multiprocessing.process")
    is_child = processes is not None and processes.parent_process() is not None
    if os.environ.get("HOROVOD_BLAME_FILE") and not is_child:
        install_hooks()


def install_hooks():
    global _hooks_of
    if _hooks_of == os.getpid():
        return
    inherited, _hooks_of = _hooks_of is not None, os.getpid()
    if inherited:  # by a fork
        return
    before, thread_before = sys.excepthook, threading.excepthook

    def on_exception(kind, error, trace):
        is_cause = True
        if error is not None:
            is_cause = tell(error.with_traceback(trace))
        if error is None or before is not sys.__excepthook__:
            before(kind, error, trace)
        elif not is_cause and _is_failed_operation(error):
            print_consequence(error)
        else:
            error = _without_ours(error, trace)
            before(kind, error, error.__traceback__)

    def on_thread_exception(args):
        global _of_thread
        if _of_thread is None and _ends_badly(args.exc_value):
            name = args.thread.name if args.thread is not None else "?"
            _of_thread = f"{describe(args.exc_value)} in thread {name!r}"
        if args.exc_value is not None and thread_before is threading.__excepthook__:
            error = _without_ours(args.exc_value, args.exc_traceback)
            args = threading.ExceptHookArgs(
                (args.exc_type, error, error.__traceback__, args.thread))
        thread_before(args)

    sys.excepthook, threading.excepthook = on_exception, on_thread_exception
