"""The command ends at once: what a capture leaves is not collected before the prompt is back."""

import gc
import sys

import pytest

from rlplace.cli import main


def test_the_command_ends_without_a_collection(monkeypatch, capsys):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(sys, "argv", ["rlplace", "--version"])
    with pytest.raises(SystemExit):  # argparse prints it and ends
        main.command()
    monkeypatch.setattr(sys, "argv", ["rlplace", "no-such-verb"])
    with pytest.raises(SystemExit):
        main.command()
    monkeypatch.setattr(sys, "argv", ["rlplace", "place", "x", "--planner", "nobody"])
    with pytest.raises(SystemExit) as ended:
        main.command()
    assert ended.value.code == 2 and frozen == [True]
    assert "nobody" in capsys.readouterr().err
