"""Whom the watch blames, on a made-up job in which time passes when the test says so."""

import pytest

from rlplace.runtime.distributed.execution.activity import Activity
from rlplace.runtime.distributed.job import watch
from rlplace.runtime.distributed.job.board import Member
from rlplace.runtime.distributed.job.watch import Watch

COLLECTIVE = Activity("all_gather together", None, True, 20.0)


class Board:
    """Beats of other ranks; a rank beats every second unless it is silent."""

    def __init__(self, world):
        self.rank, self.world, self.found, self.silent = 0, world, {}, set()

    def put(self, key, data):
        self.found[key] = data

    def look(self, key):
        return self.found.get(key)

    def member(self, rank):
        return Member(rank, "h", "", -1, "")

    def does(self, rank, activity):
        self.found[f"beat/{rank}"] = {"n": 1, **activity.to_dict()}


@pytest.fixture
def job(monkeypatch):
    """The watch of rank 0 of three, which waits in a collective, and its board; `after` lets seconds pass."""
    now_s = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(watch, "listen", lambda: (None, lambda wake: False))  # the tests keep their own handling of SIGTERM
    board = Board(3)
    found = Watch(board, "", 10.0, lambda code: None)

    def after(seconds, waiting=COLLECTIVE):
        said = None
        for _ in range(seconds):
            now_s[0] += 1.0
            for key, beat in board.found.items():
                if key.startswith("beat/") and int(key[5:]) not in board.silent:
                    beat["n"] += 1
            said = found.standstill(waiting)
        return said

    return board, after


def test_ranks_that_wait_for_each_other(job):
    board, after = job
    for rank in (1, 2):
        board.does(rank, COLLECTIVE)
    assert after(1) is None  # a beat that was found is as old as anything
    assert "the ranks wait for each other" in after(3)


LAST = [COLLECTIVE, Activity("'x' from rank 0", 0, False, 1.0), Activity("the model", None, False, 1.0)]


@pytest.mark.parametrize("last", LAST)
def test_a_stopped_rank_is_blamed_whatever_it_did_last(job, last):
    board, after = job
    board.does(1, COLLECTIVE)
    board.does(2, last)
    assert "no sign of life" not in (after(2) or "")
    board.silent = {2}
    assert after(8) is None
    assert "rank 2 (host h) gives no sign of life" in after(4)


def test_a_rank_that_is_busy_for_too_long_hangs(job):
    board, after = job
    board.does(1, COLLECTIVE)
    board.does(2, Activity("the training script", None, False, 9.0))
    assert after(4) is None
    board.does(2, Activity("the training script", None, False, 11.0))
    assert "rank 2 (host h) hangs: for 11 s it has been in the training script" in after(2)


def test_the_chain_of_waits_is_followed(job):
    board, after = job
    board.does(1, Activity("'y' from rank 2", 2, False, 15.0))
    board.does(2, Activity("the backward", None, False, 30.0))
    said = after(4, Activity("'x' from rank 1", 1, False, 20.0))
    assert "rank 2 (host h) hangs: for 30 s it has been in the backward, while rank 1 (host h) waits for 'y' from" in said


def test_who_has_ended_or_never_came(job):
    board, after = job
    board.does(1, COLLECTIVE)
    assert after(4) is None  # rank 2 may still be starting
    assert "rank 2 (host h) has not called rlplace.distribute" in after(1, Activity("all_gather together", None, True, 130.0))
    board.does(2, COLLECTIVE)
    board.silent = {2}
    board.put("ended/2", {"why": "done"})
    assert "rank 2 (host h) has ended its script" in after(5)
    board.put("ended/2", {"why": watch.TERMINATED})
    assert after(1) is None
