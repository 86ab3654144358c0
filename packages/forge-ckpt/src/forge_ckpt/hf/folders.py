"""Folders of safetensors files. Pickles are never opened, and no code of a folder is ever run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.files import map_file
from forge_ckpt.hf.weights import Info
from forge_ckpt.tensorfile import Entry, read_entries, read_tensor

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
CONFIG_JSON = "config.json"
MODEL_TOML = "model.toml"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


class TensorFolder:
    """The tensors of a folder: `model.safetensors`, or what its index lists. Files are mapped, not read.

    Raises:
        CheckpointError: no safetensors, with the way out where there are pickles.
        DamagedError: a file is missing or cut short, or the index lists what is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Tensor, dict[str, Entry]]] = {}
        self.place = self._find()

    def _find(self) -> dict[str, str]:
        """File of each tensor."""
        index = self.folder / WEIGHTS_INDEX
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, Mapping) or not all(isinstance(f, str) for f in listed.values()):
                raise DamagedError(f"{index} has no weight_map", WEIGHTS_INDEX)
            for name, file in listed.items():
                if name not in self._entries(file):
                    raise DamagedError(f"{index} lists {name}, which {file} does not hold", file)
            return dict(listed)
        single = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if WEIGHTS in single or len(single) == 1:
            file = WEIGHTS if WEIGHTS in single else single[0]
            return dict.fromkeys(self._entries(file), file)
        raise _no_weights(self.folder, single)

    def _entries(self, file: str) -> dict[str, Entry]:
        if file not in self._files:
            path = self.folder / file
            if path.parent != self.folder:
                raise DamagedError(f"{WEIGHTS_INDEX} names a file outside of its folder: {file}", file)
            if not path.is_file():
                raise DamagedError(f"{path} is missing", file, "copy the folder once more")
            buffer = map_file(path, file)
            self._files[file] = buffer, read_entries(buffer, str(path))
        return self._files[file][1]

    def names(self) -> Sequence[str]:
        return list(self.place)

    def info(self, name: str) -> Info:
        entry = self._entries(self.place[name])[name]
        return Info(entry.dtype, entry.shape)

    def read(self, name: str) -> Tensor:
        file = self.place[name]
        entry = self._entries(file)[name]
        return read_tensor(self._files[file][0], entry)


def _no_weights(folder: Path, safetensors: Sequence[str]) -> CheckpointError:
    if safetensors:
        return RequestError(f"{folder} has several safetensors files and no {WEIGHTS_INDEX}")
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return RequestError(
            f"{folder} has its weights only as {', '.join(pickles[:3])}, whose loading can run any code; "
            "they are not opened",
            "get the safetensors of this model, or convert them where nothing can be harmed: transformers' "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) writes safetensors",
        )
    return RequestError(f"{folder} has no {WEIGHTS}", "give a folder with weights in safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it cannot be read or is none.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "give a folder as transformers writes it (hf download NAME --local-dir DIR brings one here)"
        raise RequestError(f"there is no {path}", hint) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not JSON: {error}", path.name) from error
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is not a JSON object", path.name)
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One JSON object laid over another, object by object."""
    found = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = merged(found[name], value) if both else value
    return found


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype from fp32, bf16, fp16 or fp64, or torch's own name.

    Raises:
        CheckpointError: no such dtype.
    """
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise RequestError(f"{name!r} is no floating-point type", f"one of {', '.join(short)}")
    return dtype
