"""`python -m sanctuary_trainer`: the same as the command `sanctuary`."""

import sys

from sanctuary_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(program="python -m sanctuary_trainer"))
