"""Make the picture of the README anew from a finished demo: what its best run finds for captions drawn by lot.

visavis demo --out runs/demo-readme
python tools/make_readme_picture.py runs/demo-readme        # writes docs/images/retrieval.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from visavis import storage
from visavis.demonstration.figures import retrieval_picture
from visavis.demonstration.retrievals import Gallery

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "retrieval.png"
ROWS = 3


def main(demo: Path) -> None:
    best = demo / storage.read_json(demo / "demo.json")["best_run"]
    content = retrieval_picture(Gallery(best, demo / "scenes").captions(ROWS))
    storage.write_bytes(PICTURE, content)
    print(f"{PICTURE}: {len(content) / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
