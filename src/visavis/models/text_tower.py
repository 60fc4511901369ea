"""Text tower: the text side of a model as a folder that ONNX Runtime and the library tokenizers
read. It encodes queries without torch, whose import takes longer than a search.

``visavis.models.text_tower_export`` writes these folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, RunError, VisavisError, requires_extra
from visavis.data.parallel import cpu_cores
from visavis.data.vocabulary import END, PAD, START, UNKNOWN, Vocabulary, pad_rows
from visavis.models.text_inputs import check_texts, unknown_words, warn_of_unknown_texts

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from tokenizers import Tokenizer

FORMAT = 1
"""Version of the folders."""
TOWERS_FOLDER = "text-towers"
"""Folder of the text towers in an index and in the cache."""
CONFIG_FILE = "tower.json"
GRAPH_FILE = "text_encoder.onnx"
WEIGHTS_FILE = "text_encoder.bin"
"""Weights of the graph in a file of their own, which is mapped into memory, not read."""
TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocabulary.json"
REASON_FILE = "reason.json"
"""File in place of a text tower: the reason why a model has none."""
PACKAGES = ("onnxruntime", "tokenizers")
"""Packages that encode texts."""
BATCH_SIZE = 32
"""Texts of similar length in one run of the graph."""


@dataclass(frozen=True)
class TowerFile:
    """A file of a text tower.

    Attributes:
        size: Number of bytes.
        sha256: Hash of its content.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class TowerConfig:
    """Content of ``tower.json``.

    Attributes:
        format: Version of the folder.
        fingerprint: Fingerprint of the model.
        embedding_dim: Number of dimensions of a vector.
        late_interaction: Whether a text has one vector per token.
        inputs: Names of the inputs of the graph.
        max_words: Largest number of tokens of a text that the graph of a vocabulary reads. None: any.
        prompt: Text in front of each text.
        files: Files of the folder by name.
        versions: Versions of the packages that wrote the folder.
    """

    format: int
    fingerprint: str = ""
    embedding_dim: int = 0
    late_interaction: bool = False
    inputs: tuple[str, ...] = ()
    max_words: int | None = None
    prompt: str = ""
    files: dict[str, TowerFile] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class TextTower:
    """Encodes texts as the model whose text side it is, up to the last digits.

    Args:
        folder: Its folder.
        config: Settings of the text tower.
        session: The graph: token ids and their mask to vectors.
        tokens: Vocabulary, or tokenizer with the truncation and padding of the model.
        embedding_dim: Number of dimensions of returned vectors.
    """

    def __init__(
        self,
        folder: Path,
        config: TowerConfig,
        session: InferenceSession,
        tokens: Vocabulary | Tokenizer,
        embedding_dim: int,
    ):
        self.fingerprint = config.fingerprint
        self.embedding_dim = embedding_dim
        self._folder = folder
        self._config = config
        self._session = session
        self._vocabulary = tokens if isinstance(tokens, Vocabulary) else None
        self._tokenizer: Any = None if isinstance(tokens, Vocabulary) else tokens

    @classmethod
    def open(cls, folder: Path, embedding_dim: int | None = None) -> Self:
        """Open the text tower of a folder. ``embedding_dim``: its vectors are the first dimensions."""
        config = read_config(folder)
        embedding_dim = embedding_dim or config.embedding_dim
        if embedding_dim > config.embedding_dim:
            raise RunError(
                f"{folder}: expected vectors of {embedding_dim} dimensions, got "
                f"{config.embedding_dim}. {_rewrite(folder)}"
            )
        # Damage of weights or of the vocabulary would give other results of each search.
        storage.verify_once(
            "tower",
            (folder / name for name in config.files),
            " ".join(file.sha256 for file in config.files.values()),
            sum(file.size for file in config.files.values()),
            partial(verify_tower, folder),
        )
        with requires_extra("search", "a text tower"):
            import onnxruntime
            from tokenizers import Tokenizer
        try:
            tokens: Vocabulary | Tokenizer
            if VOCABULARY_FILE in config.files:
                words = storage.read_json(folder / VOCABULARY_FILE, list[str])
                _check_markers(words)
                tokens = Vocabulary(tuple(words))
            else:
                tokens = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            # The fallback, which is the same here, prints to stdout, as if it were a result.
            session = onnxruntime.InferenceSession(
                str(folder / GRAPH_FILE),
                session_options(),
                providers=["CPUExecutionProvider"],
                enable_fallback=0,
            )
        except MemoryError:
            raise
        # Both libraries raise errors of many kinds on damaged files.
        except Exception as error:
            raise damaged_tower(folder, first_line(error)) from error
        return cls(folder, config, session, tokens, embedding_dim)

    def encode_texts(
        self, texts: Sequence[str], on_progress: Callable[[int, int], None] | None = None
    ) -> list[np.ndarray]:
        """Encode texts as unit vectors, ``[D]`` each, or ``[n, D]`` for late interaction. Errors and
        warnings are as of ``Retriever.encode_texts``.
        """
        count = check_texts(texts)
        warn_of_unknown_texts(texts, self._vocabulary)
        vectors: list[np.ndarray] = [np.empty(0)] * count
        # Batches of texts of similar length have little padding.
        by_length = sorted(range(count), key=lambda number: len(texts[number]))
        for start in range(0, count, BATCH_SIZE):
            batch = by_length[start : start + BATCH_SIZE]
            encoded = self._encode([texts[number] for number in batch])
            for number, rows in zip(batch, encoded, strict=True):
                vectors[number] = rows
            if on_progress is not None:
                on_progress(start + len(batch), count)
        return vectors

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens that the model reads of each text, see ``Processor.count_tokens``."""
        check_texts(texts)
        if self._vocabulary is not None:
            return [len(self._vocabulary.token_ids(text)) for text in texts]
        return [sum(each.attention_mask) for each in self._tokenizer.encode_batch(list(texts))]

    def unknown_words(self, text: str) -> list[str]:
        """Find the words of a text that the model does not know, see ``Processor.unknown_words``."""
        return unknown_words(text, self._vocabulary)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """Encode a batch of texts."""
        if self._vocabulary is not None:
            rows = [self._vocabulary.token_ids(text) for text in texts]
            longest = max(map(len, rows))
            if self._config.max_words is not None and longest > self._config.max_words:
                raise DataError(
                    f"texts: expected at most {self._config.max_words - 2} words, got "
                    f"{longest - 2}. Shorten the text."
                )
            ids, mask = pad_rows(rows)
        else:
            prompt = self._config.prompt
            encodings = self._tokenizer.encode_batch([prompt + text for text in texts])
            ids = np.array([each.ids for each in encodings], np.int64)
            mask = np.array([each.attention_mask for each in encodings], bool)
        inputs = {"ids": ids, "mask": mask}
        try:
            outputs = self._session.run(None, {name: inputs[name] for name in self._config.inputs})
        except MemoryError:
            raise
        # ONNX Runtime raises errors of many kinds on damaged graphs.
        except Exception as error:
            raise damaged_tower(self._folder, first_line(error)) from error
        late_interaction = self._config.late_interaction
        vectors: np.ndarray = outputs[0]
        dimensions = vectors.shape[-1] if vectors.ndim == 2 + late_interaction else None
        if dimensions != self._config.embedding_dim or len(vectors) != len(texts):
            raise damaged_tower(
                self._folder,
                f"{len(texts)} texts have vectors of the shape {list(vectors.shape)}, and "
                f"{self._config.embedding_dim} dimensions are expected",
            )
        if not np.isfinite(vectors).all():
            raise damaged_tower(self._folder, "its vectors are NaN or infinity")
        if self.embedding_dim < vectors.shape[-1]:
            vectors = _unit_rows(vectors[..., : self.embedding_dim])
        if not late_interaction:
            return list(vectors)
        return [rows[valid] for rows, valid in zip(vectors, outputs[1], strict=True)]


def _check_markers(words: Sequence[str]) -> None:
    """Check that a vocabulary has the words that mark padding, both ends and unknown words."""
    missing = [marker for marker in (PAD, START, END, UNKNOWN) if marker not in words]
    if missing:
        raise DataError(f"{VOCABULARY_FILE}: no word {missing[0]}")


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    """Divide rows by their length. A row of zeros stays as it is."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(norms == 0, np.float32(1), norms)


def session_options() -> Any:
    """Options of ONNX Runtime for few texts after a quick start."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # The graph is optimized when it is written.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Of a CLIP ViT-B/32, repacked weights take 0.2 s of processor time at the start, and save 0.02 s
    # of each text.
    options.add_session_config_entry("session.disable_prepacking", "1")
    # Waiting threads would take as much processor time as the work.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads = cpu_cores()
    options.inter_op_num_threads = 1
    # Errors are raised, and need not be printed as well.
    options.log_severity_level = 4
    return options


def tower_folder(index: Path, fingerprint: str) -> Path:
    """Return the folder of the text tower of a model in an index, or in the cache."""
    return index / TOWERS_FOLDER / fingerprint


def missing_reason(index: Path, fingerprint: str) -> str:
    """Describe why the model encodes the texts of an index, and not its text tower. Empty: the
    text tower encodes them.
    """
    folder = tower_folder(index, fingerprint)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        return f"{missing[0]} is not installed: run pip install 'visavis[search]'"
    if os.path.isfile(folder / CONFIG_FILE):
        return ""
    if os.path.isfile(folder / REASON_FILE):
        return storage.read_json(folder / REASON_FILE, str, error=RunError)
    return "it was not written yet. The next visavis index writes it"


def read_config(folder: Path) -> TowerConfig:
    """Read the settings of a text tower, and check that its files have their sizes."""
    try:
        config = storage.read_json(folder / CONFIG_FILE, TowerConfig)
    except VisavisError as error:
        raise damaged_tower(folder, str(error)) from None
    if config.format != FORMAT:
        raise damaged_tower(folder, f"format {config.format}, this version reads {FORMAT}")
    for name, expected in config.files.items():
        file = folder / name
        size = os.path.getsize(file) if os.path.isfile(file) else None
        if size != expected.size:
            found = "no such file" if size is None else f"{size:,} bytes"
            raise damaged_tower(folder, f"{name}: expected {expected.size:,} bytes, got {found}")
    if GRAPH_FILE not in config.files or not {TOKENIZER_FILE, VOCABULARY_FILE} & set(config.files):
        raise damaged_tower(folder, f"no graph or no tokenizer in {CONFIG_FILE}")
    return config


def verify_tower(folder: Path) -> None:
    """Compare all files of a text tower with their checksums. Raises RunError."""
    for name, expected in read_config(folder).files.items():
        if storage.content_hash(folder / name) != expected.sha256:
            raise damaged_tower(folder, f"checksum mismatch of {name}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error without a full stop, or the name of its class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def damaged_tower(folder: Path, reason: str) -> RunError:
    """Make the error of a text tower that cannot be used."""
    return RunError(
        f"{folder}: expected a complete text tower, got a damaged or foreign one "
        f"({reason.rstrip('.')}). {_rewrite(folder)}"
    )


def _rewrite(folder: Path) -> str:
    return f"Remove {folder}. The next visavis index writes it again."
