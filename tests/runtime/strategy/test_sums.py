"""Copies that are cut in unlike ways all get their sum, whatever the cuts: by threads in place of processes."""

from __future__ import annotations

import itertools
import queue
import threading

import pytest
import torch

from rlplace.runtime.strategy import sums

ROWS, COLUMNS = 6, 4
ALL = ((0, COLUMNS),)


def rows(*runs):
    return (tuple(runs), ALL)


WHOLE = rows((0, ROWS))
PACKED = {0: rows((0, 1), (2, 3), (4, 5)), 1: rows((1, 2), (3, 4), (5, 6))}
CUTS = {
    "whole": {0: WHOLE},
    "three copies": dict.fromkeys(range(3), WHOLE),
    "rows": {0: rows((0, 4)), 1: rows((4, 6)), 2: rows()},  # one has none
    "columns": {n: (((0, ROWS),), ((n, n + 1),)) for n in range(COLUMNS)},
    "packed, two copies": {n: PACKED[n % 2] for n in range(4)},
    "packed, both ways": {n: (PACKED[n % 2][0], (((0, 1), (2, 3)), ((1, 2), (3, 4)))[n // 2]) for n in range(4)},
}


def indices(part):
    return torch.meshgrid(
        *(torch.tensor([n for run in runs for n in range(*run)], dtype=torch.long) for runs in part), indexing="ij"
    )


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 40])
@pytest.mark.parametrize(("one", "other"), [(one, other) for one in CUTS for other in CUTS])
def test_any_cut_goes_with_any_other(one, other, bucket_bytes, monkeypatch):
    """Two pipelines, and a stage of the second on the processes of the first that shares the weight."""
    monkeypatch.setattr(sums, "BUCKET_BYTES", bucket_bytes)
    first, width = CUTS[one], len(CUTS[one])
    parts = {(0, 0): first, (1, 0): {width + n: part for n, part in CUTS[other].items()}, (0, 3): first}
    values = {holder: torch.randn(ROWS, COLUMNS, dtype=torch.float64) for holder in parts}
    copies = {"w": sums._Copy("float64", 8, (ROWS, COLUMNS), parts)}
    count = width + len(CUTS[other])
    posts = {pair: queue.Queue() for pair in itertools.product(range(count), repeat=2)}
    me, failed = threading.local(), []

    def traded(held, sent, received, device):
        for peer in {piece.peer for piece in sent}:
            posts[me.rank, peer].put([held[piece.number][piece.key].clone() for piece in sent if piece.peer == peer])
        came = {peer: iter(posts[peer, me.rank].get(timeout=20)) for peer in {piece.peer for piece in received}}
        found = [next(came[piece.peer]) for piece in received]
        assert [value.shape for value in found] == [piece.shape for piece in received]
        assert all(next(left, None) is None for left in came.values())
        return found

    def work(rank):
        me.rank, mine = rank, [holder for holder in parts if rank in parts[holder]]
        held = [values[holder][indices(parts[holder][rank])] for holder in mine]
        numbers = {("w", holder): number for number, holder in enumerate(mine)}
        try:
            for slices in sums._slices(copies):
                sums._sum(sums._bucket(slices, copies, numbers, rank), held, torch.device("cpu"))
            total = values[0, 0] + values[0, 3] + values[1, 0]  # in the order of holders, bit for bit
            assert all(torch.equal(own, total[indices(parts[holder][rank])]) for own, holder in zip(held, mine, strict=True))
        except BaseException as error:
            failed.append(error)

    monkeypatch.setattr(sums, "_traded", traded)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
