# SPDX-License-Identifier: Apache-2.0
"""A script in the place of a function: a file that every rank runs as Python would.

The file is read and compiled by the caller, and its text travels to the ranks, whose hosts may not
have it. There it is __main__, with sys.argv and sys.path[0] as after `python FILE ARGS`. Whatever
it imports must be on the hosts already.
"""
import importlib.util
import linecache
import os
import sys
import types
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

Function = Union[Callable[..., Any], str, "os.PathLike[str]"]


class Script:
    """What a file has in it, to be called with its arguments; the result is None."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self.given = os.fspath(path)
        self.path = os.path.abspath(self.given)
        self.folder = os.path.dirname(os.path.realpath(self.path))
        with open(self.path, "rb") as file:
            self.source = file.read()
        self._compiled()  # what is wrong with it is known before anything is started

    def _compiled(self) -> types.CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def __call__(self, *args: str) -> None:
        text = importlib.util.decode_source(self.source)
        # Tracebacks show its lines, wherever the file is.
        linecache.cache[self.path] = (len(text), None, text.splitlines(True), self.path)
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=self.path, __builtins__=__builtins__)
        sys.modules["__main__"] = main
        sys.argv = [self.given, *args]
        sys.path.insert(0, self.folder)
        try:
            exec(self._compiled(), main.__dict__)
        except SystemExit as end:  # sys.exit() and sys.exit(0) are how many scripts end well
            if end.code not in (None, 0):
                raise


def call_of(fn: Function, args: Any, kwargs: Optional[Mapping[str, Any]]
            ) -> Tuple[Callable[..., Any], Tuple[Any, ...], Dict[str, Any]]:
    """What is to be called: fn itself, or the script in the file it names."""
    if not isinstance(fn, (str, os.PathLike)):
        return fn, tuple(args), dict(kwargs or {})
    if kwargs:
        raise TypeError(f"{os.fspath(fn)} is a script: it takes args, not kwargs")
    if isinstance(args, str):
        raise TypeError(f"args is {args!r}: give the arguments of {os.fspath(fn)} one by one, as "
                        "in args=['--epochs', '3']")
    return Script(fn), tuple(map(str, args)), {}
