"""numba's cache must notice changes of every file that the compiled simulator is made of."""

from __future__ import annotations

import zlib
from pathlib import Path

from numba.core.dispatcher import Dispatcher

from rlplace.simulator import checkpoints, fast, gates, loop, queues, records


def test_entry_points_enclose_a_stamp_of_all_other_files() -> None:
    files = [Path(module.__file__).read_bytes() for module in (records, queues, gates, loop)]
    stamp = zlib.crc32(b"".join(files))
    enclosed = {
        fast.simulate_plans: stamp,
        checkpoints.run_from: zlib.crc32(Path(fast.__file__).read_bytes(), stamp),
    }
    for function, expected in enclosed.items():
        assert [cell.cell_contents for cell in function.py_func.__closure__ or ()] == [expected]


def test_no_other_file_is_compiled_into_them() -> None:
    """A compiled function of another module would have to be part of the stamp."""
    known = {module.__name__ for module in (fast, checkpoints, gates, loop, queues)}
    for module in (fast, checkpoints, gates, loop, queues):
        for value in vars(module).values():
            if isinstance(value, Dispatcher):
                assert value.py_func.__module__ in known
