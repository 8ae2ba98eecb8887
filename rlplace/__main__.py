"""``python -m rlplace``, which is also how torchrun starts a verb: ``torchrun ... -m rlplace VERB``."""

import sys

from rlplace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
