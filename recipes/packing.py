"""The corpus as one array of token ids on disk, cut into sequences without padding.

    document 0 . document 1 . document 2 ...      every document ends with the end-of-text token
    |------- train ------------|-- val --|        cut at the end of a document
    [ seq 0 ][ seq 1 ] ... [ ]                    tokens i*L to i*L+L; the rest is left over
     targets are the same tokens one further, so a sequence reads one token of its successor

Preparing writes into a folder of its own and renames it when it is complete: what is there is
whole. Several processes may prepare at once; one works, the others wait for its lock.

    corpus.json     a TokenFile          tokens.bin       the array
    files.json      SHA-256 of each file, so that a change of the corpus can be named
    skipped.txt     what was left out, a line each with file, line and reason

Memory does not grow with the corpus: text passes through in pieces, and a sequence is read from
the file when it is wanted. (Mapped into memory, a shuffled epoch would make all of it resident.)
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from recipes.corpus import Corpus, Snapshot
from recipes.pieces import CorpusError, Piece
from recipes.tokenizer import encode, end_of_text_id

TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]

_SEARCHED_AT_ONCE = 2**20  # tokens
_FORMAT = 2  # raise it when the files of a cache folder change their meaning


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A prepared corpus on disk.

    Attributes:
        folder: Its name stands for the corpus and the tokenizer, wherever it is.
        num_documents: Documents in the corpus.
        num_empty: Documents without text beside them, which add nothing.
        num_skipped: Files, lines and objects left out since they could not be read.
        num_tokens: Tokens in the array, end-of-text tokens included.
        vocab_size: Tokens the tokenizer knows; every id is below it.
        end_of_text: The id that ends every document.
        dtype: ``uint16`` or, for more than 65,536 tokens, ``uint32``.
    """

    folder: Path
    num_documents: int
    num_empty: int
    num_skipped: int
    num_tokens: int
    vocab_size: int
    end_of_text: int
    dtype: str

    def tokens(self) -> TokensOnDisk:
        """All token ids.

        Raises:
            CorpusError: The file does not have the size it was written with.
        """
        path = self.folder / "tokens.bin"
        expected = self.num_tokens * np.dtype(self.dtype).itemsize
        actual = path.stat().st_size if path.is_file() else 0
        if actual != expected:
            raise CorpusError(
                f"{path}: expected {expected:,} bytes, got {actual:,}. Delete {self.folder} to "
                f"have it prepared again."
            )
        return TokensOnDisk(path, self.dtype, 0, self.num_tokens)

    def first_skipped(self) -> str:
        """The first line of ``skipped.txt``."""
        with (self.folder / "skipped.txt").open(encoding="utf-8") as file:
            return file.readline().strip()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the tokens were made with."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))


@dataclass(frozen=True)
class TokensOnDisk:
    """A stretch of a file of tokens; slices are read when they are asked for.

    Attributes:
        path: The file.
        dtype: Of a token in it.
        begin: First token of the stretch.
        end: One past the last.
    """

    path: Path
    dtype: str
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, where: slice) -> TokenArray:
        begin, end, step = where.indices(len(self))
        assert step == 1, "tokens are read next to each other"
        offset = (self.begin + begin) * np.dtype(self.dtype).itemsize
        return np.fromfile(self.path, self.dtype, count=max(0, end - begin), offset=offset)

    def part(self, begin: int, end: int) -> TokensOnDisk:
        """A stretch of this one; nothing is read."""
        return TokensOnDisk(self.path, self.dtype, self.begin + begin, self.begin + end)


def prepare(
    corpus: Corpus,
    make_tokenizer: Callable[[], Tokenizer],
    *,
    tokenizer_key: str,
    end_of_text: str,
    cache_dir: Path,
) -> TokenFile:
    """Tokenise a corpus, or find it tokenised. Safe when several processes call it at once.

    Args:
        corpus: What to tokenise.
        make_tokenizer: Called only when there is work to do.
        tokenizer_key: Tells one tokenizer from another; part of the folder's name.
        end_of_text: The token that ends every document.
        cache_dir: Folder of all prepared corpora; created if missing.

    Raises:
        CorpusError: The corpus cannot be read or holds no text.
        RecipeError: The tokenizer does not know ``end_of_text``.
    """
    snapshot = corpus.snapshot()
    key = f"{_FORMAT} {snapshot.fingerprint} {tokenizer_key} {end_of_text}"
    folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _write(corpus, snapshot, make_tokenizer, end_of_text, folder)
    described = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return TokenFile(**(described | {"folder": folder}))


def _write(
    corpus: Corpus,
    snapshot: Snapshot,
    make_tokenizer: Callable[[], Tokenizer],
    end_of_text: str,
    folder: Path,
) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    tokenizer = make_tokenizer()
    end = end_of_text_id(tokenizer, end_of_text)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    num_documents = num_empty = num_skipped = num_tokens = 0
    in_document = 0  # tokens so far

    with (
        (partial / "tokens.bin").open("wb") as file,
        # Names of files need not be UTF-8.
        (partial / "skipped.txt").open(
            "w", encoding="utf-8", errors="backslashreplace"
        ) as left_out,
    ):

        def leave_out(error: CorpusError) -> None:
            nonlocal num_skipped
            num_skipped += 1
            left_out.write(f"{error}\n")

        for piece, ids in encode(tokenizer, _with_progress(corpus, snapshot, leave_out)):
            in_document += len(ids)
            if piece.is_last and in_document:
                ids.append(end)
                num_documents += 1
            elif piece.is_last:
                num_empty += 1
            if piece.is_last:
                in_document = 0
            file.write(np.asarray(ids, dtype=dtype).tobytes())
            num_tokens += len(ids)
    snapshot.require_unchanged(corpus)
    if not num_documents:
        raise CorpusError(
            f"{corpus.root}: expected text, got {len(corpus.files)} files without any"
            f"{f' ({num_skipped} times something was left out)' if num_skipped else ''}. "
            f"Put text there."
        )
    tokenizer.save(str(partial / "tokenizer.json"))
    written = TokenFile(
        folder=folder,
        num_documents=num_documents,
        num_empty=num_empty,
        num_skipped=num_skipped,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        end_of_text=end,
        dtype=dtype.name,
    )
    described = json.dumps(asdict(written) | {"folder": folder.name}, indent=2)
    (partial / "corpus.json").write_text(described, encoding="utf-8")
    (partial / "files.json").write_text(json.dumps(snapshot.sums, indent=0), encoding="utf-8")
    partial.rename(folder)


def _with_progress(
    corpus: Corpus, snapshot: Snapshot, skipped: Callable[[CorpusError], None]
) -> Iterator[Piece]:
    """The documents, with a bar on a terminal."""
    # `disable=None`: only a terminal gets a bar.
    with tqdm(
        total=snapshot.num_bytes(), desc="tokenise", unit="B", unit_scale=True, disable=None
    ) as bar:
        for piece in corpus.pieces(skipped):
            yield piece
            bar.update(len(piece.text))


def describe_difference(before: Path, now: Path) -> str:
    """Which files of a corpus are not what they were when it was prepared the first time.

    Args:
        before: A folder that :func:`prepare` made; need not be there any more.
        now: Another one.
    """
    try:
        old, new = (
            json.loads((folder / "files.json").read_text(encoding="utf-8"))
            for folder in (before, now)
        )
    except OSError:
        return f"other files or options; what they were is gone with {before}"
    found = [
        f"'{name}' {'is new' if name not in old else 'is gone' if name not in new else 'changed'}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if not found:
        return "the same files with another tokenizer, or read with other options"
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def split_at_document(
    tokens: TokenArray | TokensOnDisk, *, end_of_text: int, val_fraction: float
) -> int:
    """Where training text ends and validation text begins.

    After the last document that ends before the wanted place, so that no document is in both; at
    the wanted place itself where that would more than double the validation text.

    Args:
        tokens: ``(num_tokens,)``, integers.
        end_of_text: The id that ends every document.
        val_fraction: Wanted share of the tokens for validation; 0 gives ``num_tokens``.

    Returns:
        The number of training tokens.
    """
    num_val = round(len(tokens) * val_fraction)
    wanted = len(tokens) - num_val
    start = max(0, wanted - num_val)
    for end in range(wanted, start, -_SEARCHED_AT_ONCE):  # backwards: documents are mostly short
        begin = max(start, end - _SEARCHED_AT_ONCE)
        ends = np.flatnonzero(tokens[begin:end] == end_of_text)
        if len(ends):
            return begin + int(ends[-1]) + 1
    return wanted


class PackedSequences(Dataset[dict[str, Tensor]]):
    """Sequences of equal length, next to each other in one array, without padding.

    Attributes:
        tokens: ``(num_tokens,)``, unsigned integers.
        seq_len: Tokens in a sequence.
    """

    def __init__(self, tokens: TokenArray | TokensOnDisk, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence.

        Returns:
            ``input_ids`` and ``labels``, each ``(seq_len,)``, int64; ``labels[i]`` is the token
            that follows ``input_ids[i]``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index}: expected 0 to {len(self) - 1}")
        start = index * self.seq_len
        window = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}
