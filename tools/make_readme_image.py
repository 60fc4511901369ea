"""Create the image of the README from a finished demo: results of its best run for captions sampled
at random.

visavis demo --out runs/demo-readme
python tools/make_readme_image.py runs/demo-readme        # writes docs/images/retrieval.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from visavis.core import storage
from visavis.research.demo_run import SceneSearch, plot_retrievals

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "retrieval.png"
ROWS = 3


def main(demo: Path) -> None:
    best = demo / storage.read_json(demo / "demo.json")["best_run"]
    content = plot_retrievals(SceneSearch(best, demo / "scenes").captions(ROWS))
    storage.write_bytes(FIGURE, content)
    print(f"{FIGURE}: {len(content) / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
