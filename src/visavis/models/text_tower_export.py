"""Export of text towers: the text side of a model as an ONNX graph with its tokenizer, compared with
the model.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.environment import installed_version
from visavis.core.errors import MissingExtra, RunError, StorageError, VisavisError, requires_extra
from visavis.core.progress import Progress
from visavis.models.base import Matcher, get_vectors, valid_mask
from visavis.models.colpali import ColPali
from visavis.models.embedding_model import EmbeddingModel
from visavis.models.encoders.embedding_inputs import IDS, MASK
from visavis.models.encoders.pretrained_files import VISION_LANGUAGE_TYPES
from visavis.models.layers import GeneralizedPooling
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.text_tower import (
    CONFIG_FILE,
    FORMAT,
    GRAPH_FILE,
    REASON_FILE,
    TOKENIZER_FILE,
    TOWERS_FOLDER,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    TextTower,
    TowerFile,
    first_line,
    read_config,
    session_options,
    tower_folder,
    verify_tower,
)

EXAMPLE_TEXTS = ("a dog", "two dogs on a beach", "a")
"""Texts of different lengths, with which graphs are traced."""
MAX_POOLED_ITEMS = 256
"""Largest number of tokens or regions that an exported pooling operator reads."""
MAX_TOWER_TOKENS = 512
"""Largest number of tokens that the pooling operator of a text tower reads: as many as most
pretrained text encoders.
"""
MIN_COSINE = 1 - 1e-5
"""Smallest cosine of a vector of a text tower with the vector of its model."""
MIN_INT8_COSINE = 1 - 1e-3
"""The same for weights of 8 bits."""
SWITCH = "VISAVIS_TEXT_TOWERS"
"""Environment variable that turns text towers off, if it is 0."""
LONG_TEXT = 40
"""Tokens of a text that is compared alone."""
SAMPLE_TEXTS = (
    "a dog",
    "cat",
    "x",
    "7",
    "?",
    "...",
    "a photo of a cat",
    "two dogs on a beach",
    "A RED CIRCLE",
    "A Red Circle, and a BLUE square!",
    "The quick brown fox jumps over the lazy dog",
    "Two  dogs, one of them brown,\nrun on a beach: it's 7 o'clock & 20 °C!",
    "a man's hat, the men's hats",
    "tab\tand\u00a0no-break\u2009space",
    "  spaces around  ",
    "don't stop -- it's (really) 100% \"free\"",
    "e-mail: someone@example.com, https://example.com/a?b=c#d",
    "<s> [CLS] </s> <pad> [PAD] <|endoftext|>",
    "Größe: 3 m² – ein Café",
    "CRÈME BRÛLÉE À LA CARTE",
    "cafe\u0301 and caf\u00e9",
    "İstanbul'da bir köpek",
    "ein großer Hund läuft über die Straße",
    "un niño juega al fútbol en la playa",
    "een meisje op de fiets",
    "ΑΣ ΣΟΦΟΣ: ο σκύλος στην παραλία",
    "собака бежит по пляжу",
    "כלב על החוף",
    "كلب على الشاطئ",
    "समुद्र तट पर कुत्ता",
    "สุนัขบนชายหาด",
    "日本の猫",
    "两只狗在海滩上",
    "海边的两只狗，一只是棕色的。",
    "해변의 강아지 두 마리",
    "日本の猫 🐈 und ein Hund 🐕",
    "🐈🐈‍⬛👩🏽‍🚒",
    "a🙂b",
    "ﬁne ligature ½ ㎏ Ⅳ",
    "ａ ｆｕｌｌ ｗｉｄｔｈ ｔｅｘｔ",
    "zero\u200bwidth\u00adhyphen\ufeff",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "a" * 120,
    "word " * 20,
    " ".join(f"word{number} dog" for number in range(12)),
    "a red circle left of a blue square. " * 2,
    "一只狗" * 20,
    " ".join(f"a dog {number}," for number in range(150)),
)
"""Texts whose vectors are compared: one to many words, punctuation, accents, capitals, emoji, other
scripts, marks of tokenizers, and more words than a model reads. Two texts of the model's own words
follow.
"""


class TracedTextEncoder(nn.Module):
    """Text side of a model, with the frozen encoder of its processor.

    Args:
        model: The model.
    """

    def __init__(self, model: Retriever):
        super().__init__()
        processor = model.processor
        self.matcher = model.matcher
        self.encoder = (
            nn.Identity() if reads_tokens(processor) else processor.text_encoder.to(model.device)
        )

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Encode token ids [N, L] to unit vectors [N, D], or [N, L, D] with their mask for late
        interaction. ``mask`` None: the padding is read.
        """
        items = Encoded(ids, mask)
        if isinstance(self.matcher, EmbeddingModel):
            assert mask is not None
            items = Encoded({IDS: ids, MASK: mask.long()})
        items = self.matcher.first_stage_items(self.matcher.encode_text(self.encoder(items)))
        if self.matcher.late_interaction is None:
            return get_vectors(items)
        return get_vectors(items), valid_mask(items)


def reads_tokens(processor: Processor) -> bool:
    """Report whether the matcher itself reads token ids, without a frozen text encoder."""
    return processor.vocabulary is not None or processor.pretrained_tokenizer is not None


def example_tokens(model: Retriever) -> tuple[Tensor, ...]:
    """Return token ids of example texts, and their mask if the model has one."""
    processor = model.processor
    tokenizer = processor.vocabulary or processor.pretrained_tokenizer
    if tokenizer is None:
        processor.text_encoder.require_tokenizer()
    items = (
        processor.text_encoder.preprocess(EXAMPLE_TEXTS)
        if tokenizer is None
        else tokenizer.encode(EXAMPLE_TEXTS)
    )
    if isinstance(items.vectors, dict):
        return items.vectors[IDS], items.vectors[MASK].bool()
    return (get_vectors(items),) if items.mask is None else (get_vectors(items), items.mask)  # type: ignore[return-value]


def tokenizer_json(processor: Processor, max_tokens: int | None) -> str:
    """Return the tokenizer with its padding and truncation, in the format of the library
    tokenizers.
    """
    pretrained = processor.pretrained_tokenizer
    tokenizer = pretrained.tokenizer if pretrained else processor.text_encoder.tokenizer
    max_length = pretrained.max_length if pretrained else processor.text_encoder.pooling.max_length
    fixed_length = pretrained.fixed_length if pretrained else processor.text_encoder.fixed_length
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise RunError(
            f"run: expected a model with a fast tokenizer, got {type(tokenizer).__name__}. Use "
            "another text encoder."
        )
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(max_length=min(max_length, max_tokens or max_length))
    length = max_length if fixed_length else None
    backend.enable_padding(
        direction=tokenizer.padding_side,
        pad_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        length=length,
    )
    return str(backend.to_str())


def has_generalized_pooling(matcher: Matcher) -> bool:
    """Report whether a graph of a matcher has tabulated weights, which limit its tokens."""
    return any(isinstance(module, GeneralizedPooling) for module in matcher.modules())


def write_text_tower(model: Retriever, folder: Path, *, int8: bool = False) -> None:
    """Write the text tower of a model in a new folder, and compare it with the model. Raises
    VisavisError if the model has none, or other vectors. ``int8``: its weights have 8 bits.
    """
    check_has_text_side(model)
    with requires_extra("search", "a text tower"):
        import onnx  # noqa: F401 - torch's exporter needs it
        import onnxruntime  # noqa: F401
        import tokenizers  # noqa: F401
    model = _whole_vectors(model)
    with storage.atomic_folder(folder) as part:
        with _refused(model.matcher, "a text side that torch can export", part):
            inputs = _write_graph(model, part)
            vector = model.item_vectors(model.encode_text([model.processor.known_text]))[0]
        if int8:
            with _refused(model.matcher, "weights that ONNX Runtime can convert to 8 bits", part):
                _quantize(part)
        with _refused(model.matcher, "a tokenizer that the library tokenizers can read", part):
            _write_tokens(model, part)
        files = {
            file.name: TowerFile(file.stat().st_size, storage.content_hash(file))
            for file in sorted(part.iterdir())
        }
        config: dict[str, Any] = {
            "format": FORMAT,
            "fingerprint": model.fingerprint,
            "embedding_dim": vector.shape[-1],
            "late_interaction": model.matcher.late_interaction is not None,
            "inputs": list(inputs),
            "max_words": MAX_TOWER_TOKENS if has_generalized_pooling(model.matcher) else None,
            "prompt": getattr(model.processor.pretrained_tokenizer, "prompt", ""),
            "files": {name: vars(file) for name, file in files.items()},
            "versions": _versions(),
        }
        storage.write_json(part / CONFIG_FILE, config)
        min_cosine = MIN_INT8_COSINE if int8 else MIN_COSINE
        expected = "a graph that ONNX Runtime can run"
        try:
            with _refused(model.matcher, expected, folder):
                check_equal_vectors(model, TextTower.open(part), min_cosine)
        except RunError as error:
            raise _refusal(model.matcher, expected, error.__cause__ or error) from None


@contextmanager
def _refused(matcher: Matcher, expected: str, folder: Path) -> Iterator[None]:
    """Within this block, errors of every kind mean that the model has no text tower, except for
    errors of writing the folder.
    """
    try:
        yield
    except (VisavisError, MemoryError):
        raise
    # torch, ONNX Runtime and tokenizers raise errors of every kind for models that they do not
    # support.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            with storage.storage_errors(error.filename or folder):
                raise error from None
        raise _refusal(matcher, expected, error) from None


class _ExportError(VisavisError):
    """A package raised an error, whose cause may be the model or the disk."""


def _refusal(matcher: Matcher, expected: str, error: BaseException) -> VisavisError:
    return _ExportError(
        f"{matcher.name}: expected {expected}, got an error ({first_line(error)}). The model "
        "encodes the texts itself."
    )


def _whole_vectors(model: Retriever) -> Retriever:
    """Return the model with all dimensions."""
    other = copy.copy(model)
    other.embedding_dim = None
    return other


def check_has_text_side(model: Retriever) -> None:
    """Check that a model has a text side of its own, whose vectors an index compares."""
    matcher = model.matcher
    name = matcher.name
    if isinstance(matcher, ColPali | EmbeddingModel) and _reads_all_with_one_model(matcher):
        raise VisavisError(
            f"{name}: expected a text encoder of its own, got {matcher.config.backbone}, whose "
            "language model of gigabytes reads images and texts. It encodes the texts itself."
        )
    has_vectors = matcher.score_is_cosine or matcher.rerank_top_k or matcher.late_interaction
    if not has_vectors:
        raise VisavisError(
            f"{name}: expected one vector per text, or late interaction, got a model that scores "
            "pairs. An index re-ranks with it, and does not search with it."
        )


def _reads_all_with_one_model(matcher: ColPali | EmbeddingModel) -> bool:
    """Report whether one language model reads images and texts."""
    if isinstance(matcher, ColPali):
        return True
    configs = [getattr(part, "config", None) for part in matcher.model.modules()]
    return any(getattr(each, "model_type", "") in VISION_LANGUAGE_TYPES for each in configs)


def _write_graph(model: Retriever, folder: Path) -> tuple[str, ...]:
    """Write the graph, optimized, with its weights in a file of their own. Returns its inputs."""
    import onnxruntime

    tokens = tuple(part.to(model.device) for part in example_tokens(model))
    names = ("ids", "mask")[: len(tokens)]
    # Models with a fixed length pad every text to it.
    axes = {0: "batch"} if len(tokens) == 1 else {0: "batch", 1: "tokens"}
    outputs = ("vectors",) if model.matcher.late_interaction is None else ("vectors", "valid")
    traced = folder / "traced.onnx"
    with _quiet_export(model.matcher):
        # The older exporter of torch takes a fifth of the time of the newer one: 2 instead of
        # 10 s for MiniLM, 4 to 6 instead of 31 s for CLIP ViT-B/32.
        torch.onnx.export(
            TracedTextEncoder(model).eval(),
            tokens,
            str(traced),
            input_names=list(names),
            output_names=list(outputs),
            dynamic_axes=dict.fromkeys(names, axes),
            dynamo=False,
        )
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = _save_optimized(traced, folder, level)
    inputs = tuple(given.name for given in session.get_inputs())
    # A graph of more than 2 GiB has a file for each weight.
    for file in folder.iterdir():
        if file.name not in {GRAPH_FILE, WEIGHTS_FILE}:
            storage.current_disk().unlink(file)
    return inputs


def _save_optimized(source: Path, folder: Path, level: Any) -> Any:
    """Write a graph as ONNX Runtime optimizes it, with its weights in a file of their own."""
    import onnxruntime

    options = session_options()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(folder / GRAPH_FILE)
    prefix = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{prefix}_file_name", WEIGHTS_FILE)
    options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")
    return onnxruntime.InferenceSession(
        str(source), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


def _quantize(folder: Path) -> None:
    """Convert the weights of a written graph to 8 bits per value."""
    import onnxruntime
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantized = folder / "quantized.onnx"
    root = logging.getLogger()
    level = root.level
    # It advises to optimize the graph, which is done.
    root.setLevel(logging.ERROR)
    try:
        # One scale per row: with one scale per matrix, the smallest cosine of MiniLM is 0.975
        # instead of 0.995. The types of fused operators are not inferred.
        quantize_dynamic(
            folder / GRAPH_FILE,
            quantized,
            weight_type=QuantType.QInt8,
            per_channel=True,
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    finally:
        root.setLevel(level)
    for name in (GRAPH_FILE, WEIGHTS_FILE):
        storage.current_disk().unlink(folder / name)
    _save_optimized(quantized, folder, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    storage.current_disk().unlink(quantized)


@contextmanager
def _quiet_export(matcher: Matcher) -> Iterator[None]:
    """Within this block, messages of torch's exporter are hidden, and pooling weights tabulated."""
    # Weights of the image side take seconds, too, and are not read.
    visual = {id(part) for part in matcher.parts().get("visual", ())}
    poolings = [
        part
        for part in matcher.modules()
        if isinstance(part, GeneralizedPooling) and id(part) not in visual
    ]
    for pooling in poolings:
        pooling.tabulate_weights(MAX_TOWER_TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.no_grad():
                yield
        finally:
            for pooling in poolings:
                pooling.weight_table = None


def _write_tokens(model: Retriever, folder: Path) -> None:
    """Write the vocabulary or the tokenizer."""
    processor = model.processor
    if processor.vocabulary is not None:
        storage.write_json(folder / VOCABULARY_FILE, list(processor.vocabulary.words))
        return
    max_tokens = MAX_TOWER_TOKENS if has_generalized_pooling(model.matcher) else None
    storage.write_text(folder / TOKENIZER_FILE, tokenizer_json(processor, max_tokens))


def check_equal_vectors(model: Retriever, tower: TextTower, min_cosine: float = MIN_COSINE) -> None:
    """Compare the vectors of a text tower with the vectors of its model on 50 texts."""
    texts = [*SAMPLE_TEXTS, *_own_texts(model.processor)]
    # Texts of similar length share batches. A long one alone: it would pad the others.
    counts = model.processor.count_tokens(texts)
    order = sorted(range(len(texts)), key=counts.__getitem__)
    texts = [texts[number] for number in order]
    num_short = sum(count < LONG_TEXT for count in counts)
    batches = [texts[i : min(i + 8, num_short)] for i in range(0, num_short, 8)]
    batches += [[text] for text in texts[num_short:]]
    vectors, expected = list[np.ndarray](), list[np.ndarray]()
    with warnings.catch_warnings():
        # Of a vocabulary, most words are unknown.
        warnings.simplefilter("ignore")
        for batch in batches:
            expected += [rows.numpy() for rows in model.item_vectors(model.encode_text(batch))]
            vectors += tower.encode_texts(batch)
    cosines = [
        float((first * second).sum(-1).min()) if first.shape == second.shape else -1.0
        for first, second in zip(vectors, expected, strict=True)
    ]
    worst = int(np.argmin(cosines))
    # A cosine of NaN is not at least the limit either.
    if not cosines[worst] >= min_cosine:
        raise VisavisError(
            f"{model.matcher.name}: expected a text tower with the vectors of the model, got "
            f"{_difference(vectors[worst], expected[worst])} for the text {texts[worst][:60]!r}, "
            f"and cosines of at least {min_cosine:g} are needed. It is not used."
        )


def _difference(vectors: np.ndarray, expected: np.ndarray) -> str:
    """Describe how vectors differ."""
    if vectors.shape != expected.shape:
        return f"the shape {list(vectors.shape)} instead of {list(expected.shape)}"
    return f"a cosine of {float((vectors * expected).sum(-1).min()):.7f}"


def _own_texts(processor: Processor) -> list[str]:
    """Two texts of words of the model, short and long."""
    if processor.vocabulary is not None:
        # The first words are markers.
        words = list(processor.vocabulary.words[4:])
    else:
        from visavis.models.encoders.pretrained_loading import sample_vocabulary

        pretrained = processor.pretrained_tokenizer
        words = sample_vocabulary(
            pretrained.tokenizer if pretrained else processor.text_encoder.tokenizer
        )
    words = words[:: len(words) // 30 + 1] or [processor.known_text]
    return [" ".join(words[:5]), " ".join(words)]


def _versions() -> dict[str, str]:
    """Versions of the packages that write a text tower."""
    names = ("visavis", "torch", "transformers", "tokenizers", "onnx", "onnxruntime")
    return {name: installed_version(name) or "" for name in names}


def text_tower(model: Retriever) -> Path:
    """Return the folder of the text tower of a model in the cache. It is written at the first call.
    A refusal is recorded, and raised again while the versions of packages stay the same.
    """
    folder = tower_folder(storage.cache_folder(), model.fingerprint)
    refusal = folder.with_suffix(".json")
    versions = _versions()
    # One process exports, and others wait for it.
    with storage.folder_lock(folder, wait=True):
        if os.path.isdir(folder):
            try:
                # In full, because damage may be in an index, whose files have the same content.
                verify_tower(folder)
            except RunError:
                storage.remove_folder(folder)
            else:
                return folder
        recorded = storage.read_checksummed_json(refusal, dict[str, Any])
        if recorded is None or recorded.get("versions") != versions:
            recorded = {}
        elif recorded.get("is_certain", True):
            raise VisavisError(str(recorded["reason"]))
        try:
            write_text_tower(model, folder)
        except VisavisError as error:
            # A missing package or a full disk is not a property of the model. ONNX Runtime reports a
            # failing disk as it reports a graph that it cannot run: such an error must be repeated.
            if not isinstance(error, MissingExtra | StorageError):
                reason = str(error)
                is_certain = not isinstance(error, _ExportError) or recorded.get("reason") == reason
                content = {"reason": reason, "versions": versions, "is_certain": is_certain}
                storage.write_checksummed_json(refusal, content)
            raise
    return folder


def add_text_tower(index: Path, model: Retriever, progress: Progress) -> None:
    """Add the text tower of a model to an index, or the reason why the model has none."""
    if os.environ.get(SWITCH) == "0":
        return
    folder = tower_folder(index, model.fingerprint)
    if os.path.isdir(folder):
        # Damaged, of another model, or a reason, which may be another one now.
        with suppress(RunError):
            if read_config(folder).fingerprint == model.fingerprint:
                return
        storage.remove_folder(folder)
    try:
        with progress.activity("exporting the text tower"):
            source = text_tower(model)
    except VisavisError as error:
        with storage.atomic_folder(folder) as part:
            storage.write_json(part / REASON_FILE, str(error))
        progress.message(f"The model itself encodes texts, because it has no text tower: {error}")
        return
    with storage.atomic_folder(folder) as part:
        for file in source.iterdir():
            _link(file, part / file.name)


def quantize_text_tower(index: Path, model: Retriever, progress: Progress) -> None:
    """Replace the text tower of a model in an index by one with weights of 8 bits."""
    folder = tower_folder(index, model.fingerprint)
    quantized = folder.with_suffix(".int8")
    storage.remove_folder(quantized)
    with progress.activity("exporting the text tower"):
        write_text_tower(model, quantized, int8=True)
    # If it is killed in between, the model encodes the texts until the next update.
    storage.replace_folder(quantized, folder)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it to another file system."""
    try:
        storage.current_disk().link(source, target)
    except OSError:
        with open(source, "rb") as read, storage.current_disk().open(target, "wb") as written:
            shutil.copyfileobj(read, written)


def remove_text_towers(index: Path, used: Sequence[str]) -> None:
    """Remove the text towers of models that an index does not use any more."""
    towers = index / TOWERS_FOLDER
    if os.path.isdir(towers):
        for folder in list(towers.iterdir()):
            if folder.name not in used and not folder.name.startswith("."):
                storage.remove_folder(folder)
