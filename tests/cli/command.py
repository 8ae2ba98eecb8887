"""The command line, called in this process."""

from rlplace.cli.main import main


def run(capsys, *arguments):
    """Exit code, standard output and standard error."""
    try:
        code = main([*map(str, arguments)])
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
