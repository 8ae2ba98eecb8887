"""The list of faults fits the sources that it changes, and its table says what its rows say."""

from pathlib import Path

import pytest

from benchmarks import faults

ROOT = Path(__file__).resolve().parents[2]
LISTED = faults.read_faults()


@pytest.mark.parametrize("fault", LISTED, ids=[fault.what for fault in LISTED])
def test_a_fault_has_its_place(fault):
    """Its right text stands there once, what takes its place is Python, and its tests exist."""
    text = faults.with_fault((ROOT / fault.file).read_text(), fault)
    if fault.file.endswith(".py"):
        compile(text, fault.file, "exec")
    assert all((ROOT / test).is_file() for test in fault.tests)


def test_every_room_has_faults_and_words_of_its_own():
    assert len({fault.what for fault in LISTED}) == len(LISTED) >= 40
    rooms = {"simulator", "cluster", "cost", "strategy", "placement", "plan", "runtime", "cli", "measure", "explanation"}
    assert {fault.room for fault in LISTED} >= rooms | {"envs", "agents"}


def test_a_text_that_is_gone_or_stands_twice_is_no_place():
    fault = faults.Fault("what", "a.py", "x = 1", "x = 2", ())
    assert faults.with_fault("y = 0\nx = 1\n", fault) == "y = 0\nx = 2\n"
    for text in ("y = 0\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="not once"):
            faults.with_fault(text, fault)
