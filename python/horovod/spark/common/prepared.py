# SPDX-License-Identifier: Apache-2.0
"""Which prepared data in a store belongs to which DataFrame, as far as this process knows.

fit() may run for several DataFrames at once and for one of them with several parameters, as in a
CrossValidator. Each DataFrame gets a number under the store's path, which is free again when the
DataFrame is. The first has none: fit_on_parquet() reads that by default. A fit that wants what
another has written, or is just writing, waits and uses it.
"""
import threading
import weakref
from typing import Any, Dict, List, Optional, Tuple

_guard = threading.Lock()
_places: Dict[str, List["Place"]] = {}  # by the path without a number


class Place:
    def __init__(self, df: Any, form: Tuple) -> None:
        self.df = weakref.ref(df)
        self.form = form  # what else decides about the files
        self.writing = threading.Lock()
        self.is_written = False


def place_for(df: Any, path: str, form: Tuple) -> Tuple[Place, Optional[int]]:
    """The place of a DataFrame prepared in this form, and its number. Keep df until it is used."""
    with _guard:
        places = _places.setdefault(path, [])
        known = [i for i, place in enumerate(places) if place.df() is df and place.form == form]
        free = [i for i, place in enumerate(places) if place.df() is None]
        number = (known + free + [len(places)])[0]
        if not known:
            places[number:number + 1] = [Place(df, form)]
        return places[number], number or None


def forget_places() -> None:
    """Whatever is in the stores counts as not written."""
    with _guard:
        for places in _places.values():
            for place in places:
                place.is_written = False
