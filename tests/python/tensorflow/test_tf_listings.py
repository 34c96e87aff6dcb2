# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/tensorflow.md train on two ranks."""
from listings import before_and_after, losses, run_script, whole_scripts


def test_the_tape_script_on_two_ranks(tmp_path):
    script, = whole_scripts("docs/tensorflow.md")
    found = losses(run_script(script, tmp_path))
    assert len(found) == 6 and found[-1] < found[0] / 2, found
    assert list(tmp_path.glob("checkpoint*.index"))


def test_the_script_of_the_keras_door_on_two_ranks(tmp_path):
    """Before, as one process, and after."""
    for ranks, script in zip((0, 2), before_and_after("docs/tensorflow.md")):
        found = losses(run_script(script, tmp_path, ranks=ranks))
        assert len(found) == 3 and found[-1] < found[0] / 2, found
        (tmp_path / "model.keras").unlink()
