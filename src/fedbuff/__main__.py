"""`python -m fedbuff`: the command line, where `fedbuff` is not on the path."""

import sys

from fedbuff.cli import main

if __name__ == "__main__":
    sys.exit(main())
