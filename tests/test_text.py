from rlplace.text import bytes_text, gb, ms, percent, seconds_text, table


def test_units_that_fit():
    assert [seconds_text(v) for v in (None, 0.0, 3.2e-10, 1.5e-6, 0.0177, 12.3456, 4321.9)] == [
        "-", "0 s", "0.32 ns", "1.5 µs", "17.7 ms", "12.35 s", "4322 s",
    ]  # fmt: skip
    assert [bytes_text(v) for v in (0, 999, 1e3, 12.34e6, 8.6e10, 744e9, 999.7e9, 1.5e12, -2e6)] == [
        "0 bytes", "999 bytes", "1 kB", "12.3 MB", "86 GB", "744 GB", "1000 GB", "1.5 TB", "-2 MB",
    ]  # fmt: skip


def test_cells():
    assert [ms(None), ms(0.0012345), ms(0.001, sign=True)] == ["-", "1.234", "+1.000"]
    assert [gb(None), gb(2.5e9)] == ["-", "2.500"]
    assert [percent(None), percent(0.5), percent(-0.25, sign=True)] == ["-", "50.0 %", "-25.0 %"]


def test_tables_are_aligned():
    assert table(["name", "<what", "n"], [["a", "long one", "1"], ["bbbbb", "x", "200"]]) == [
        "name   what        n",
        "a      long one    1",
        "bbbbb  x         200",
    ]
    assert table(["only", "header"], []) == ["only  header"]
