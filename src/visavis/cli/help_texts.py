"""Panels and examples in the help of the commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Start": ("demo", "doctor", "catalog"),
    "Data": ("data", "features", "convert"),
    "Train and evaluate": ("train", "evaluate", "mteb", "mine", "compare", "reproduce"),
    "Understand a model": ("diagnose", "probe", "explain", "anatomy"),
    "Graded relevance": ("coherence", "agreement", "relevance"),
    "Search": ("index", "search", "classify", "serve"),
    "Export": ("export",),
}
"""Panels of ``visavis --help`` with their commands and groups of commands."""

EXAMPLES = {
    "demo": ("visavis demo", "visavis demo --out first"),
    "doctor": ("visavis doctor",),
    "catalog": ("visavis catalog objectives", "visavis catalog recipes --paper goal"),
    "data_check": ("visavis data check photos/", "visavis data check photos/ --all"),
    "data_audit": ("visavis data audit photos/", "visavis data audit photos/ --parts duplicates --parts captions"),
    "data_convert": ("visavis data convert features/ --out data/msrvtt", "visavis data convert face=faces.pkl --out data/faces"),
    "data_scenes": ("visavis data scenes --out data/scenes", "visavis data scenes --clips --num-train 500 --out data/clips"),
    "features": (
        "visavis features photos/ --visual openai/clip-vit-base-patch32 --text minilm",
        "visavis features photos/ --visual mobilenet-v2 --granularity regions --out features",
    ),
    "export": (
        "visavis export runs/mine --format onnx --out exported/onnx",
        "visavis export runs/mine --format sentence-transformers --out exported/st --license mit",
    ),
    "convert": (
        "visavis convert epoch_32.pt --config ViT-B-32 --out models/clip",
        "visavis convert openai/clip-vit-base-patch32 --max-length 248 --out models/long-clip",
    ),
    "train": (
        "visavis train --data photos/ --out runs/mine",
        "visavis train heads-flickr8k epochs=4 training.batch_size=64",
        "visavis train --resume runs/mine",
    ),
    "evaluate": (
        "visavis evaluate runs/mine",
        "visavis evaluate runs/mine runs/other --split val",
        "visavis evaluate index --feedback votes.jsonl",
    ),
    "mteb": ("visavis mteb runs/mine --tasks Flickr30kT2IRetrieval --out results",),
    "mine": (
        "visavis mine runs/mine",
        "visavis mine openai/clip-vit-base-patch32 --data photos/ --max-ratio 0.9 --out negatives.safetensors",
    ),
    "compare": (
        'visavis compare --data photos/ --objective "Unified()" --objective "VLC()" --seeds 3 --out comparison',
        "visavis compare --resume comparison --seeds 5",
    ),
    "reproduce": ("visavis reproduce goal/3 --base-recipe heads-flickr8k --seeds 3",),
    "diagnose": (
        "visavis diagnose runs/mine",
        "visavis diagnose runs/mine --objective 'TripletHN(margin=0.2)' --out diagnosis.html",
    ),
    "probe": ("visavis probe runs/mine --num-images 200",),
    "explain": ('visavis explain runs/scan photo.jpg "two dogs on a beach" --out attention.png',),
    "anatomy": ("visavis anatomy 'Unified(gamma=50)' 'VLC()' --out anatomy",),
    "coherence": ("visavis coherence runs/mine runs/other --out coherence",),
    "agreement": ("visavis agreement runs/mine --data flickr8k",),
    "relevance": ('visavis relevance --estimator "CBoW()"',),
    "relevance_thresholds": ('visavis relevance thresholds flickr8k --estimator "CBoW()" --out thresholds.png',),
    "relevance_fit": ("visavis relevance fit --kind cross --out models/cross",),
    "index": ("visavis index photos/", "visavis index runs/mine photos/ --out index"),
    "search": (
        'visavis search "two dogs on a beach" --collection photos/',
        'visavis search index "two dogs on a beach" --top 10',
        "visavis search index --image photo.jpg --after 2024-05-31",
        'visavis search openai/clip-vit-base-patch32 "a red car" --collection photos/',
    ),
    "classify": ("visavis classify runs/mine photo.jpg labels.txt",),
    "serve": ("visavis serve photos/", "visavis serve index --open-browser", "visavis serve index --feedback votes.jsonl --port 8080"),
}
"""Examples of each command, by the name of its API function."""


def panel_of(name: str) -> str | None:
    """Return the panel of a command or group, or None within a group.

    Args:
        name: Name of an API function or group.
    """
    return next((panel for panel, names in PANELS.items() if name in names), None)


def examples_of(name: str) -> str | None:
    """Return the end of the help of a command: its examples, one per line, or None without any.

    Args:
        name: Name of an API function.
    """
    # Click keeps the line breaks of a paragraph that begins with this character.
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in EXAMPLES[name])]) if name in EXAMPLES else None


class CommandGroup(TyperGroup):
    """Group whose help lists the commands by panel, as plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each panel.

        Args:
            ctx: Context of Typer.
            formatter: Receives the text.
        """
        panels = dict[str, list[tuple[str, str]]]()
        width = formatter.width - max(map(len, self.commands)) - 6
        for name, command in self.commands.items():
            panel = str(getattr(command, "rich_help_panel", None) or "Other")
            panels.setdefault(panel, []).append((name, command.get_short_help_str(width)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)
