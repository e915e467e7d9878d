"""The corpus as one array of token ids on disk, cut into sequences without padding.

    document 0 . document 1 . document 2 ...      every document ends with the end-of-text token
    |------- train ------------|-- val --|        cut at the end of a document
    [ seq 0 ][ seq 1 ] ... [ ]                    tokens i*L to i*L+L; the rest is left over
     targets are the same tokens one further, so a sequence reads one token of its successor

Preparing fills a folder beside the place and puts it there when it is complete: what is there is
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from lightning_fsdp.checkpoint.files import naming
from lightning_fsdp.checkpoint.new_folder import NewFolder
from recipes.corpus import Corpus
from recipes.documents import CorpusError
from recipes.tokenizer import encode, end_of_text_id, load_tokenizer, train_tokenizer

_SEARCHED_AT_ONCE = 2**20  # tokens
_FORMAT = 3  # raise it when the files of a cache folder change their meaning


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A prepared corpus on disk.

    Attributes:
        folder: Its name stands for the corpus and the tokenizer, wherever it is.
        num_documents: Documents in the corpus.
        num_empty: Documents without text beside them, which add nothing.
        num_skipped: Files, lines, objects and rows left out since they could not be read.
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

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """The token ids from one to another, ``(end - begin,)``, ``dtype``."""
        offset = begin * np.dtype(self.dtype).itemsize
        return np.fromfile(self.folder / "tokens.bin", self.dtype, end - begin, offset=offset)

    def ends(self, begin: int, end: int) -> NDArray[np.int64]:
        """Places of the end-of-text tokens from one token to another."""
        found = [np.array([], np.int64)]
        for first in range(begin, end, _SEARCHED_AT_ONCE):
            part = self.read(first, min(first + _SEARCHED_AT_ONCE, end))
            found.append(first + np.flatnonzero(part == self.end_of_text))
        return np.concatenate(found)

    def sequences(self, begin: int, end: int, seq_len: int) -> PackedSequences:
        """Those from one token to another; each needs the token behind it."""
        return PackedSequences(self.read, range(begin, end - seq_len, seq_len))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the tokens were made with."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def difference_from(self, before: Path) -> str:
        """Which files are not what they were when a corpus was prepared the first time.

        Args:
            before: The folder of its tokens; need not be there any more.
        """
        try:
            folders = (before, self.folder)
            old, new = (json.loads((each / "files.json").read_bytes()) for each in folders)
        except OSError:
            return f"other files or options; what they were is gone with {before}"
        same = "the same files with another tokenizer, or read with other options"
        return _changed_files(old, new) or same


def prepare(
    corpus: Corpus, tokenizer: str | None, *, vocab_size: int, end_of_text: str, cache_dir: Path
) -> TokenFile:
    """Tokenise a corpus, or find it tokenised. Safe when several processes call it at once.

    Args:
        corpus: What to tokenise.
        tokenizer: As of :func:`load_tokenizer`; ``None``: one is trained on the corpus.
        vocab_size: Tokens of the trained one.
        end_of_text: The token that ends every document.
        cache_dir: Folder of all prepared corpora; created if missing.

    Raises:
        CorpusError: The corpus cannot be read or holds no text; or its tokens are damaged.
        RecipeError: The tokenizer does not know ``end_of_text``.
    """
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    sums = corpus.sums()
    kind = f"bpe {vocab_size}" if given is None else given.to_str()
    options = [corpus.text_field, corpus.max_object_size, corpus.skip_unreadable]
    key = json.dumps([_FORMAT, options, sums, kind, end_of_text])
    folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                made = given or train_tokenizer(corpus.pieces(), vocab_size, end_of_text)
                with NewFolder(folder) as new, naming(str(folder)):
                    _write(corpus, made, end_of_text, new.beside)
                    if changed := _changed_files(sums, corpus.sums()):
                        expected = "files that stay as they are while they are read"
                        cure = "Start again when nothing writes to them."
                        raise CorpusError.at(corpus.root, expected, changed, cure)
                    (new.beside / "files.json").write_bytes(json.dumps(sums, indent=0).encode())
                    new.finish()
    found = TokenFile(folder=folder, **json.loads((folder / "corpus.json").read_bytes()))
    path, num_bytes = folder / "tokens.bin", found.num_tokens * np.dtype(found.dtype).itemsize
    actual = path.stat().st_size if path.is_file() else 0
    if actual != num_bytes:
        cure = f"Delete {folder} to have it prepared again."
        raise CorpusError.at(path, f"{num_bytes:,} bytes", f"{actual:,}", cure)
    return found


def _write(corpus: Corpus, tokenizer: Tokenizer, end_of_text: str, folder: Path) -> None:
    """Write all but the sums into a new folder."""
    end = end_of_text_id(tokenizer, end_of_text)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    counts = dict.fromkeys(("num_documents", "num_empty", "num_skipped", "num_tokens"), 0)
    in_document = 0  # tokens so far
    num_bytes = sum(path.stat().st_size for path in corpus.files if path.exists())

    def leave_out(error: CorpusError) -> None:
        counts["num_skipped"] += 1
        print(*str(error).splitlines(), file=left_out)  # names of files need not be one line

    with (
        (folder / "tokens.bin").open("wb") as file,
        # Names of files need not be UTF-8.
        (folder / "skipped.txt").open("w", encoding="utf-8", errors="backslashreplace") as left_out,
        # `disable=None`: only a terminal gets a bar.
        tqdm(total=num_bytes, desc="tokenise", unit="B", unit_scale=True, disable=None) as bar,
    ):
        for piece, ids in encode(tokenizer, corpus.pieces(leave_out)):
            bar.update(len(piece.text))
            in_document += len(ids)
            if piece.is_last:
                counts["num_documents" if in_document else "num_empty"] += 1
                ids += [end] if in_document else []
                in_document = 0
            counts["num_tokens"] += len(ids)
            file.write(np.asarray(ids, dtype).tobytes())  # `tofile` would not say why it fails
    if not counts["num_documents"]:
        skipped = f" ({counts['num_skipped']} times something was left out)"
        got = f"{len(corpus.files)} files without any{skipped if counts['num_skipped'] else ''}"
        raise CorpusError.at(corpus.root, "text", got, "Put text there.")
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {**counts, "vocab_size": vocab_size, "end_of_text": end, "dtype": dtype}
    (folder / "corpus.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def _changed_files(old: dict[str, str], new: dict[str, str]) -> str:
    """The first of them by name, with what happened to them; empty if there are none."""
    found = [
        f"'{name}' {'is new' if name not in old else 'is gone' if name not in new else 'changed'}"
        for name in sorted(dict(old.items() ^ new.items()))
    ]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


@dataclass(frozen=True)
class PackedSequences(Dataset[dict[str, Tensor]]):
    """Sequences of equal length, next to each other in a run of tokens, without padding.

    Attributes:
        read: Gives the tokens from one to another.
        begins: Where the sequences begin, a sequence's length apart.
    """

    read: Callable[[int, int], NDArray[Any]]
    begins: range

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence.

        Returns:
            ``input_ids`` and ``labels``, each ``(seq_len,)``, int64; ``labels[i]`` is the token
            that follows ``input_ids[i]``.
        """
        begin = self.begins[index]
        end = begin + self.begins.step + 1
        window = torch.from_numpy(self.read(begin, end).astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


def split_at_document(
    tokens: TokenFile, seq_len: int, val_fraction: float
) -> tuple[PackedSequences, PackedSequences]:
    """Sequences to train on and, after them, to validate on.

    The cut is after the last document that ends before the wanted place, so that no document is in
    both; at the wanted place itself where that would more than double the validation text.

    Args:
        tokens: A prepared corpus.
        seq_len: Tokens in a sequence.
        val_fraction: Wanted share of the tokens for validation; 0 for none.
    """
    num_val = round(tokens.num_tokens * val_fraction)
    wanted = tokens.num_tokens - num_val
    ends = tokens.ends(max(0, wanted - num_val), wanted)
    cut = int(ends[-1]) + 1 if len(ends) else wanted
    return tokens.sequences(0, cut, seq_len), tokens.sequences(cut, tokens.num_tokens, seq_len)
