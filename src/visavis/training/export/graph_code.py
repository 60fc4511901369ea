"""Python source of traced encoders, for programs that have neither visavis nor its modules."""

from __future__ import annotations

import ast
import re
from functools import reduce
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.fx.graph import CodeGen

from visavis.data.photo_worker import exif_orientation

OPEN_IMAGE_FILE = "open_image.py"
"""File of the function that opens images."""
MODULE_FILE = "visavis_encoder.py"
"""File of the module of sentence-transformers in an exported folder."""
LOCAL_IMPORTS = re.compile(
    r"^from (__future__|graphs|open_image|preprocess|visavis\.data\.\w+) import .*\n", re.MULTILINE
)
"""Imports of the templates that have no place in one file."""
CPU_DEVICE = re.compile(r"device\(type='cpu'(, index=None)?\)")
"""Devices in the code of a graph that was traced on the CPU."""


def module_source(programs: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Write the module of sentence-transformers with both encoders as one file of Python. Returns
    also the tensors that it reads.
    """
    parts = [*_preprocessing_parts(), template("sentence_module.py")]
    tensors: dict[str, Tensor] = {}
    for side, program in programs.items():
        source, weights = _function_source(f"encode_{side}", program.exported_program)
        parts.append(source)
        tensors |= {f"{side}.{name}": tensor for name, tensor in weights.items()}
    return _one_file(["inf, nan = float('inf'), float('nan')", *parts]), tensors


def preprocessing_source() -> str:
    """Write the preprocessing as one file of Python."""
    return _one_file(_preprocessing_parts())


def _preprocessing_parts() -> list[str]:
    # Texts are split by the code of this package: the library tokenizers has no rule for the end
    # of a Greek word, nor one that depends on the whole text.
    return [_data_module("words"), *_open_image_parts(0), template("preprocess.py")]


def open_image_source(min_side: int) -> str:
    """Write the opening of images as one file of Python."""
    return _one_file(_open_image_parts(min_side))


def _open_image_parts(min_side: int) -> list[str]:
    # The program that decodes photos stands alone, so the orientation is a part of it.
    worker = _data_module("photo_worker")
    orientation = [
        ast.get_source_segment(worker, node) or ""
        for node in ast.parse(worker).body
        if (isinstance(node, ast.FunctionDef) and node.name == exif_orientation.__name__)
        or (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "TRANSPOSE_OF_ORIENTATION"
        )
    ]
    imports = "from PIL import ExifTags\nfrom PIL.Image import Transpose"
    opening = template("open_image.py").replace("MIN_SIDE = 0", f"MIN_SIDE = {min_side}")
    modules = [_data_module("colors"), imports, *orientation, _data_module("upright_images")]
    return [*modules, opening]


def _data_module(name: str) -> str:
    return (files("visavis.data") / f"{name}.py").read_text("utf-8")


def _one_file(parts: list[str]) -> str:
    """Join sources. The first statement is the import of annotations, and the docstrings stay as
    comments of their parts.
    """
    sources = [LOCAL_IMPORTS.sub("", part).strip() for part in parts]
    return "\n\n\n".join(["from __future__ import annotations", *sources]) + "\n"


def template(name: str) -> str:
    """Read a file that is copied into exported folders."""
    return (files("visavis.training.export") / "exported_files" / name).read_text(encoding="utf-8")


def _function_source(name: str, program: Any) -> tuple[str, dict[str, Tensor]]:
    """Return a graph as a function of a module with its weights, and the weights."""
    module = program.module(check_guards=False)
    graph = module.graph
    graph.set_codegen(CodeGen())
    for node in reversed(graph.nodes):
        # Operations that only check sizes.
        function = getattr(node.target, "__name__", str(node.target))
        is_check = node.op == "call_module" or (
            node.op == "call_function"
            and function.startswith(("_assert", "sym_constrain_range", "_check", "sym_not"))
        )
        if is_check and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    weights = {
        node.target: reduce(getattr, node.target.split("."), module)
        for node in graph.nodes
        if node.op == "get_attr"
    }
    code = graph.python_code("weights").src.replace("def forward(", f"def {name}(", 1)
    # Names of the graph may end in a number, so the annotations of torch.fx are removed by their
    # own pattern.
    signature, _, body = code.strip().partition("\n")
    signature = re.sub(r"def (\w+)\(self, ?(.*?)\).*:", r"def \1(weights, \2):", signature)
    body = CPU_DEVICE.sub("device", body)
    body = re.sub(r"return \((\w+),\)", r"return \1", body)
    if "device" in body:
        body = "    device = next(weights.parameters()).device\n" + body
    dense = {
        key: tensor.detach().clone(memory_format=torch.contiguous_format)
        for key, tensor in weights.items()
    }
    return f"{signature}\n{body}", dense
