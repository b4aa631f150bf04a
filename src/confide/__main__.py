"""`python -m confide` is the command line."""

from __future__ import annotations

import sys

from confide.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
