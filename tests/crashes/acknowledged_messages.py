"""``visavis ARGUMENTS``, whose messages go to stdout, so that they count as acknowledged."""

from __future__ import annotations

import os

from visavis.cli import main

if __name__ == "__main__":
    os.dup2(1, 2)
    main()
