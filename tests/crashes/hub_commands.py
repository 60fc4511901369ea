"""Downloads of a data set or a model of the hub: ``python -m tests.crashes.hub_commands NAME
VARIABLE=VALUE ...``.

Prints the hash of each file. The hub's library reads its settings from the environment when it is
imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from tests.hub import retry_at_once

from visavis.core.errors import VisavisError


def main() -> None:
    """Download the data set or the model that the first argument names."""
    name, *variables = sys.argv[1:]
    os.environ.update(text.split("=", 1) for text in variables)
    from visavis.data.hub_files import download_dataset
    from visavis.models.encoders.pretrained_files import download_hub_model

    retry_at_once()
    try:
        folder = download_dataset(name) if name.startswith("hf:") else download_hub_model(name)
    except VisavisError as error:
        sys.stderr.write(f"visavis: {error}\n")
        sys.exit(1)
    sys.stdout.write(f"{describe(folder)}\n")


def describe(folder: Path) -> str:
    """Hash of each file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return json.dumps(
        {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }
    )


if __name__ == "__main__":
    main()
