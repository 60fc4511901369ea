"""``visavis ARGUMENTS``, whose messages go to stdout, so that they count as acknowledged. Errors go
to stderr.
"""

from __future__ import annotations

import io
import sys

from visavis.cli import main


class _Messages(io.TextIOBase):
    """Sends lines to stdout, and errors to stderr."""

    def __init__(self) -> None:
        self.error_output = sys.stderr
        self.line = ""

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            stream = self.error_output if line.startswith("visavis: ") else sys.stdout
            stream.write(f"{line}\n")
        return len(text)


if __name__ == "__main__":
    sys.stderr = _Messages()
    main()
