"""The simulator's and the guide's arrays of one instance, cut out of banks and of a thread's buffers, compiled."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from rlplace.compiled import inner
from rlplace.envs.guide.pressure import BINS
from rlplace.envs.vector.bank import cut


@inner
def graph_at(b, at, i, devices):
    """`rlplace.simulator.records.Graph` of an instance, as a plain tuple."""
    times, tables = cut(b[0], at, 0, i), cut(b[4], at, 4, i)
    tasks = at[1, i + 1] - at[1, i] - 2
    return (
        times.reshape((tasks, len(times) // tasks)), cut(b[1], at, 1, i), cut(b[2], at, 2, i), cut(b[3], at, 3, i),
        tables.reshape((len(tables) // (devices * devices), devices, devices)), cut(b[5], at, 5, i), cut(b[6], at, 6, i),
        cut(b[7], at, 7, i),
    )  # fmt: skip


@inner
def work_at(b, size, values, at, i, devices):
    """`rlplace.simulator.records.Work`: a thread's buffers `b`, but for the two of the instance, `values`."""
    ready, times = b[5][: size[5, i]], b[8][: size[8, i]]
    return (
        cut(values[0], at, 0, i), b[1][: size[1, i]], b[2][: size[2, i]], b[3][: size[3, i]], b[4][: size[4, i]],
        ready.reshape((devices, len(ready) // devices)), b[6][: size[6, i]], cut(values[1], at, 1, i),
        times.reshape((2, len(times) // 2)), b[9][: size[9, i]],
    )  # fmt: skip


@inner
def facts_at(b, at, i, groups, devices):
    """`rlplace.envs.guide.facts.Facts` of an instance, as a plain tuple."""
    square = (devices, devices)
    return (
        cut(b[0], at, 0, i).reshape((groups, devices)), cut(b[1], at, 1, i), cut(b[2], at, 2, i), cut(b[3], at, 3, i),
        cut(b[4], at, 4, i), cut(b[5], at, 5, i), cut(b[6], at, 6, i), cut(b[7], at, 7, i), cut(b[8], at, 8, i),
        cut(b[9], at, 9, i), cut(b[10], at, 10, i), cut(b[11], at, 11, i), cut(b[12], at, 12, i), cut(b[13], at, 13, i),
        cut(b[14], at, 14, i), cut(b[15], at, 15, i), cut(b[16], at, 16, i), cut(b[17], at, 17, i), cut(b[18], at, 18, i),
        cut(b[19], at, 19, i), cut(b[20], at, 20, i), cut(b[21], at, 21, i), cut(b[22], at, 22, i), cut(b[23], at, 23, i),
        cut(b[24], at, 24, i).reshape(square), cut(b[25], at, 25, i).reshape(square), cut(b[26], at, 26, i),
        cut(b[27], at, 27, i), cut(b[28], at, 28, i), cut(b[29], at, 29, i), cut(b[30], at, 30, i), cut(b[31], at, 31, i),
        cut(b[32], at, 32, i), cut(b[33], at, 33, i), cut(b[34], at, 34, i),
    )  # fmt: skip


@inner
def view_at(b, size, i, groups, devices):
    """`rlplace.envs.guide.view.View` of an instance in a thread's buffers, as a plain tuple."""
    wide = (groups, devices)
    return (
        b[0][: size[0, i]], b[1][: size[1, i]], b[2][: size[2, i]], b[3][: size[3, i]], b[4][: size[4, i]],
        b[5][: size[5, i]], b[6][: size[6, i]], b[7][: size[7, i]], b[8][: size[8, i]], b[9][: size[9, i]],
        b[10][: size[10, i]], b[11][: size[11, i]].reshape(wide), b[12][: size[12, i]].reshape(wide),
        b[13][: size[13, i]].reshape((2, groups, devices)), b[14][: size[14, i]].reshape((2, groups)), b[15][: size[15, i]],
        b[16][: size[16, i]], b[17][: size[17, i]], b[18][: size[18, i]],
        b[19][: size[19, i]].reshape((size[19, i] // devices, devices)), b[20][: size[20, i]], b[21][: size[21, i]],
        b[22][: size[22, i]], b[23][: size[23, i]], b[24][: size[24, i]], b[25][: size[25, i]].reshape((devices, BINS)),
        b[26][: size[26, i]].reshape((2, devices, BINS)),
    )  # fmt: skip
