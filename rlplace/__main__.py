"""``python -m rlplace``, which is also how torchrun starts a verb: ``torchrun ... -m rlplace VERB``."""

from rlplace.cli.main import command

if __name__ == "__main__":
    command()
