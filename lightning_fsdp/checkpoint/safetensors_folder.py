"""A folder of safetensors, as transformers lays it out; read by ranges, written tensor by tensor.

    model.safetensors                       if all fits into one file; else
    model-00001-of-00002.safetensors ...    and
    model.safetensors.index.json            which file has which tensor

Nothing is held: a range is copied from the mapped file to where it belongs, and a tensor is in the
file when ``write`` returns. (``safetensors.torch.save_file`` wants all tensors of a file at once.)

    file     | header's length, 8 bytes | header: JSON, padded to 8 bytes | tensors, end to end |
    header   {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [start, stop]}, ...}

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_fsdp.amounts import parse_bytes
from lightning_fsdp.checkpoint.files import DiskFile, naming

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Outline(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsFolder:
    """Open to read, until it is left as a context.

    Args:
        path: The folder.
        single: The name of the file, if all fits into one.

    Attributes:
        outlines: Of the tensors in all files, by name, in the order of the files.
        aliases: Further names of tensors, and the name each is stored under.

    Raises:
        FileNotFoundError: There is no such folder, or a file is missing in it.
        ValueError: A file is damaged or holds what torch does not know; named.
    """

    def __init__(self, path: Path, *, single: str = SINGLE) -> None:
        self.outlines: dict[str, Outline] = {}
        self.aliases: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for file in _files_in(path, single):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read_into(self, name: str, box: ChunkStorageMetadata, target: Tensor) -> None:
        """Copy a part of a tensor; no other part is touched.

        Args:
            name: Of the tensor.
            box: Which part.
            target: ``box.sizes``; other dtypes and devices are converted to.
        """
        file = self._files[name]
        if not box.sizes:
            part = file.get_tensor(name)
        else:
            ranges = zip(box.offsets, box.sizes, strict=True)
            part = file.get_slice(name)[tuple(slice(start, start + n) for start, n in ranges)]
        target.copy_(part)  # from the mapped file, at once

    def mapped(self, name: str) -> Tensor:
        """A whole tensor in the mapped file, without memory of its own; not to be written to."""
        whole: Tensor = self._files[name].get_tensor(name)
        return whole

    def _open(self, file: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
        except SafetensorError as error:
            raise ValueError(
                f"{file}: expected a whole safetensors file, got a damaged one ({error}). Copy or "
                "download it again."
            ) from error
        for name in opened.keys():  # noqa: SIM118 (it is no dict)
            found = opened.get_slice(name)
            code = found.get_dtype()
            if code not in _DTYPES:
                raise ValueError(
                    f"{file}: expected a dtype of {', '.join(_DTYPES)}, got {code} for {name!r}."
                )
            self.outlines[name] = Outline(tuple(found.get_shape()), _DTYPES[code])
            self._files[name] = opened
        notes = opened.metadata() or {}
        notes.pop("format", None)  # whose value, "pt", may be the name of a tensor, too
        self.aliases |= {a: name for a, name in notes.items() if name in self.outlines}


class SafetensorsWriter:
    """Writes a folder's tensors, one after another, in an order of its own.

    Left as a context, it holds no file open any more, finished or not.

    Args:
        path: An existing folder.
        outlines: Of all tensors, by name.
        max_bytes: Of a file's tensors; one that is larger gets a file to itself.
        aliases: Further names of tensors and the name each is stored under, noted in the files.

    Attributes:
        groups: Names, file by file: the order in which tensors must be written.

    Raises:
        ValueError: A dtype that the format has no name for.
        OSError: A file cannot be written; says which one.
    """

    def __init__(
        self,
        path: Path,
        outlines: Mapping[str, Outline],
        *,
        max_bytes: int,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._outlines = outlines
        self._aliases = aliases or {}
        groups = plan_files(outlines, max_bytes)
        total = len(groups)
        names = [f"model-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]
        self._names_in = dict(zip(names if total > 1 else [SINGLE], groups, strict=True))
        self._file_of = {name: file for file, group in self._names_in.items() for name in group}
        self.groups = groups
        self._open_file: Any = None
        self._open_name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._open_file is not None:
            with contextlib.suppress(OSError):  # which a write has raised already
                self._open_file.__exit__(*raised)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a whole tensor, on any device."""
        if self._file_of[name] != self._open_name:
            self._begin(self._file_of[name])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            with naming(self._open_name):
                self._open_file.write(flat.view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Close the last file, and write the index if there are several."""
        if not self._file_of:
            self._begin(SINGLE)
        self._close_file()
        if len(self._names_in) > 1:
            sizes = {name: outline.nbytes for name, outline in self._outlines.items()}
            elements = sum(torch.Size(o.shape).numel() for o in self._outlines.values())
            index = {
                "metadata": {"total_parameters": elements, "total_size": sum(sizes.values())},
                "weight_map": dict(sorted(self._file_of.items())),
            }
            with naming(INDEX):
                (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _begin(self, file: str) -> None:
        self._close_file()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in self._names_in.get(file, ()):
            outline = self._outlines[name]
            stop = position + outline.nbytes
            header[name] = {
                "dtype": _CODES[outline.dtype],
                "shape": list(outline.shape),
                "data_offsets": [position, stop],
            }
            position = stop
        header["__metadata__"] |= {a: name for a, name in self._aliases.items() if name in header}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._open_name = file
        with naming(file):
            self._open_file = DiskFile(self._path / file, "wb")
            self._open_file.write(len(text).to_bytes(8, "little") + text)

    def _close_file(self) -> None:
        if self._open_file is not None:
            with naming(self._open_name):
                self._open_file.close()
            self._open_file = None


def plan_files(outlines: Mapping[str, Outline], max_bytes: int) -> list[list[str]]:
    """Which tensors are in a file together; within a file, wide dtypes first, so all are aligned.

    Args:
        outlines: In the order in which they fill files.
        max_bytes: Of a file's tensors; one that is larger gets a file to itself.

    Raises:
        ValueError: A dtype that the format has no name for.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, outline in outlines.items():
        if outline.dtype not in _CODES:
            raise ValueError(
                f"{name!r}: expected a dtype that safetensors has a name for, got {outline.dtype}."
            )
        if groups[-1] and filled + outline.nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += outline.nbytes
    for group in groups:
        group.sort(key=lambda name: -outlines[name].dtype.itemsize)  # else in their order
    return groups


def bytes_of(size: int | str) -> int:
    """``5_000_000_000`` or ``"5GB"`` in bytes; GB is 10^9, as transformers has it.

    Raises:
        ValueError: Not a positive size.
    """
    try:
        return parse_bytes(str(size))
    except ValueError as error:
        raise ValueError(
            f"max_shard_size: expected bytes or a size such as '5GB', got {size!r}."
        ) from error


def is_folder(path: Path) -> bool:
    """Whether there are safetensors in a folder."""
    return path.is_dir() and any(path.glob("*.safetensors*"))


def _files_in(path: Path, single: str) -> Sequence[Path]:
    if not path.is_dir():
        what = "a file" if path.exists() else "nothing"
        raise FileNotFoundError(f"{path}: expected a folder with {single}, got {what} there.")
    if (path / single).exists():  # asked first, as transformers does, which may leave an old index
        return [path / single]
    index = path / f"{single}.index.json"
    if not index.exists():
        others = sorted(file.name for file in path.iterdir())
        raise FileNotFoundError(
            f"{path}: expected {single} or {index.name}, got {others}. A folder with "
            "adapter_model.bin or pytorch_model.bin has to be saved again by peft or transformers, "
            "which write safetensors."
        )
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = [path / file for file in dict.fromkeys(weight_map.values())]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{index}: expected an index with a weight_map, got a damaged one ({error!r}). "
            "Copy or download it again."
        ) from error
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{path}: the index names {missing}, which are not there.")
    return files
