"""`python -m videogen`: the command line without an installed entry point."""

import sys

from videogen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
