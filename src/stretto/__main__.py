"""`python -m stretto`: the command line."""

import sys

from stretto.cli import main

if __name__ == "__main__":
    sys.exit(main())
