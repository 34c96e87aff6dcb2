# SPDX-License-Identifier: Apache-2.0
"""Which number of a store a DataFrame gets."""
from horovod.spark.common.prepared import place_for


class Rows:
    """In the place of a DataFrame."""


def test_every_dataframe_has_a_place_of_its_own():
    one, other = Rows(), Rows()
    place, number = place_for(one, "path", ("y",))
    assert number is None and place_for(one, "path", ("y",)) == (place, None)
    assert [place_for(one, "path", ("x",))[1], place_for(other, "path", ("y",))[1]] == [1, 2]
    assert place_for(other, "another", ("y",))[1] is None
    del one
    last = Rows()
    assert place_for(last, "path", ("z",))[1] is None
    assert place_for(other, "path", ("y",))[1] == 2
