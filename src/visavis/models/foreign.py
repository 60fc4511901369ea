"""Folders of ``transformers``, which others made: opened here alone, checked as they enter; code that they bring is never run."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis import storage
from visavis.errors import DataError, VisavisError
from visavis.models.pretrained import OLDER_WEIGHTS, import_transformers, quiet_transformers

_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_WHOLE = "it is of another kind or incomplete"
_REFUSED = "such code is never run: name a model of a kind that transformers has"
_SAMPLE = 100
"""Words of its own vocabulary by which a tokenizer is tried."""


@dataclass(frozen=True)
class _Config:
    """What must stand in a ``config.json``, whatever the model."""

    model_type: str


@dataclass(frozen=True)
class _Tokenizer:
    """What of a ``tokenizer_config.json`` says where its code is."""

    tokenizer_class: str | None = None
    auto_map: dict[str, Any] | list[Any] | None = None


def open_config(folder: Path) -> Any:
    """The config of a folder. Raises DataError."""
    with _opening(folder, "holds no config that transformers can read") as transformers:
        return transformers.AutoConfig.from_pretrained(folder, **_LOCAL)


def open_model(folder: Path, kind: str = "AutoModel", *, new_output: bool = False, expected: str = _WHOLE, **options: Any) -> Any:
    """The model of a folder, in evaluation mode, all of whose weights are the folder's and finite.

    Of safetensors; where there are none, of ``.bin`` files, as tensors alone. kind: of the classes of ``transformers`` that choose a
    model. A pooler that the folder has no weights for is removed, never left at random; new_output: the output may be new, to be
    trained. expected: ends the sentence about weights that are not there. options: for ``from_pretrained``, such as a dtype. Raises DataError.
    """
    safe = None if any(folder.glob(OLDER_WEIGHTS)) and not any(folder.glob("*.safetensors")) else True
    options |= {"use_safetensors": safe, "weights_only": True, "output_loading_info": True}
    with _opening(folder, "holds no model that transformers can read") as transformers:
        model, loading = getattr(transformers, kind).from_pretrained(folder, **_LOCAL, **options)
    _check_names(folder, model, loading, new_output, expected)
    broken = next((name for name, weight in model.named_parameters() if not _finite(weight)), None)
    if broken is not None:
        raise DataError(f"{folder} is damaged: its weights {broken} hold values that are not finite.")
    return model.eval()


def lay_out_model(folder: Path, names: Sequence[str] = ()) -> Any:
    """A model by the config of a folder, without its weights: they are loaded over it. names: theirs; a pooler that is not among them is
    taken away. Raises DataError.
    """
    with _opening(folder, "holds no config that transformers can read") as transformers:
        model = transformers.AutoModel.from_config(open_config(folder), dtype=torch.float32, trust_remote_code=False).eval()
    pooler = getattr(model, "pooler", None)
    if pooler is not None and list(pooler.parameters()) and not any(name.startswith("pooler.") for name in names):
        model.pooler = None
    return model


def open_tokenizer(folder: Path) -> tuple[Any, int]:
    """The tokenizer of a folder, and the number of tokens after which a text is cut.

    Tried by words of its own vocabulary: they have numbers that differ, none beyond those that the model knows. Raises DataError.
    """
    config = open_config(folder)
    config = getattr(config, "text_config", config)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise DataError(f"{folder} is a model of kind {config.model_type}, which reads no text: expected a text model.")
    with _opening(folder, "holds no tokenizer that transformers can read") as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
        longest = min(getattr(config, "max_position_embeddings", tokenizer.model_max_length), tokenizer.model_max_length)
        words = sample_words(tokenizer)
        own = longest - tokenizer.num_special_tokens_to_add()
        numbers = [tokenizer(word, truncation=True, max_length=longest)["input_ids"] for word in words] if own > 0 else []
    if own < 1:
        raise DataError(f"{folder} cuts texts after {longest} tokens, which leaves none for words: its config or tokenizer is damaged.")
    if len(words) < 2 or len(set(map(tuple, numbers))) <= len(words) // 2:
        raise DataError(
            f"{folder} has no working tokenizer, different words are one to it: expected the tokenizer.json, vocab.txt or .model "
            "with which its model was trained."
        )
    if (largest := max(map(max, numbers))) >= config.vocab_size:
        raise DataError(
            f"{folder} has the tokenizer of another model: it numbers words up to {largest:,}, and its model knows {config.vocab_size:,}."
        )
    return tokenizer, longest


def read_tensors_alone(file: Path) -> Any:
    """What a file of ``torch.save`` holds, by torch's reader that knows tensors and plain values alone. Raises DataError."""
    with storage.regular_file(file):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what there is to say of a file is said below
                return torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - of a damaged file, any
            raise DataError(
                f"{file} is no checkpoint of tensors and plain values, which alone are read: it is damaged, or holds objects, which could run "
                "code; take a whole copy of what its authors published."
            ) from None


def sample_words(tokenizer: Any) -> list[str]:
    """Different words of a tokenizer's own vocabulary, from its first to its last."""
    special = set(tokenizer.all_special_tokens)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) if token not in special]
    chosen = [*tokens[:: len(tokens) // _SAMPLE + 1], *tokens[-1:]]
    return list(dict.fromkeys(filter(None, (tokenizer.convert_tokens_to_string([token]).strip() for token in chosen))))


@torch.no_grad()
def tried(encode: Callable[[], Any], folder: Path, what: str) -> None:
    """Encode something once, so that files of a folder that do not fit together are found as it is opened. Raises DataError."""
    with _opening(folder, f"holds a model that cannot encode {what}"):
        vectors = encode()
    if not vectors.isfinite().all():
        raise DataError(f"{folder} is damaged: what its model says of {what} is not finite.")


@contextmanager
def _opening(folder: Path, problem: str) -> Iterator[Any]:
    """Read a folder in this block with ``transformers``: what it cannot read is a DataError, and what would run code is refused."""
    for file in folder.iterdir():
        if not file.is_dir():
            with storage.regular_file(file):
                pass
    _refuse_code(folder)
    try:
        with quiet_transformers() as transformers:
            yield transformers
    except (VisavisError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - transformers and tokenizers raise errors of every kind on damaged files
        raise DataError(f"{folder} {problem}: {_reason(error)}.") from None


def _refuse_code(folder: Path) -> None:
    """Raise DataError if a folder cannot be read without code of its own or of others, which is not run."""
    transformers = import_transformers()
    config = storage.read_json(folder / "config.json", dict[str, Any])
    kind = storage.read_json(folder / "config.json", _Config).model_type
    if config.get("auto_map") and kind not in transformers.CONFIG_MAPPING:
        raise DataError(f"{folder} is of the kind {kind}, whose code it brings itself (auto_map in its config.json); {_REFUSED}.")
    settings = storage.read_json(file, _Tokenizer) if (file := folder / "tokenizer_config.json").exists() else _Tokenizer()
    if settings.auto_map and not hasattr(transformers, settings.tokenizer_class or ""):
        raise DataError(f"{folder} has a tokenizer whose code it brings itself (auto_map in its tokenizer_config.json); {_REFUSED}.")
    for kernel in _kernels(config):
        raise DataError(
            f"{folder} asks in its config.json for the code {kernel!r} from elsewhere; such code is never run: remove that entry."
        )
    refuse_adapter(folder)


def refuse_adapter(folder: Path) -> None:
    """Raise DataError for a folder of an adapter, alone or beside a model."""
    if (folder / "adapter_config.json").exists():
        raise DataError(f"{folder} is an adapter to another model (adapter_config.json): merge the two and name the folder of the result.")


def _kernels(config: Any) -> Iterator[str]:
    """The implementations, at any depth of a config, that stand in a repository of the hub."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, str) and "/" in value and key.endswith("_implementation"):
            yield value
        yield from _kernels(value)


def _check_names(folder: Path, model: Any, loading: dict[str, Any], new_output: bool, expected: str) -> None:
    """Refuse weights that the folder lacks, or has more of than its config says; take away a pooler without weights."""
    base = f"{model.base_model_prefix}." if new_output else ""
    missing = sorted(key for key in loading["missing_keys"] if key.startswith(base) and not key.startswith(f"{base}pooler."))
    if missing:
        raise DataError(f"{folder} lacks weights of its own config: {missing[0]} and {len(missing) - 1} more; {expected}.")
    if loading["missing_keys"] and not new_output:
        model.pooler = None
    own = {_numberless(name) for name in model.state_dict()}
    more = sorted(key for key in loading["unexpected_keys"] if _numberless(key) in own)
    if more:
        raise DataError(
            f"{folder} holds weights beyond its own config: {more[0]} and {len(more) - 1} more; its config.json is of another model."
        )


def _finite(weight: Tensor) -> bool:
    return not weight.numel() or all(bound.isfinite() for bound in weight.aminmax())


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _reason(error: Exception) -> str:
    """What a library says, in one line."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says"
    if any(mark in str(error) for mark in ("weights_only", "PytorchStreamReader")):
        return "its weights are damaged, or hold objects, which could run code and are never opened"
    said = textwrap.shorten(str(error), 200, placeholder=" ...").rstrip(".: ")
    return f"{type(error).__name__} {said}" if isinstance(error, KeyError) else said or type(error).__name__
