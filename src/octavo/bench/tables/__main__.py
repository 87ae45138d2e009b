"""`python -m octavo.bench.tables`."""

import sys

from octavo.bench.tables.pages import main

if __name__ == "__main__":
    sys.exit(main())
