"""The corpus as one array of token ids on disk, cut into sequences without padding.

    document 0 . document 1 . document 2 ...      every document ends with the end-of-text token
    |------- train ------------|-- val --|        cut at the end of a document
    [ seq 0 ][ seq 1 ] ... [ ]                    tokens i*L to i*L+L; the rest is left over
     targets are the same tokens one further, so a sequence reads one token of its successor

Preparing writes into a folder of its own and renames it when it is complete: what is there is
whole. Several processes may prepare at once; one works, the others wait for its lock.
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

from recipes.corpus import Corpus, CorpusError, Document
from recipes.tokenizer import encode_documents, end_of_text_id

TokenArray: TypeAlias = NDArray[np.unsignedinteger[Any]]

_FORMAT = 1  # raise it when the files of a cache folder change their meaning


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A prepared corpus on disk.

    Attributes:
        folder: Holds ``tokens.bin``, ``tokenizer.json`` and ``corpus.json``.
        num_documents: Documents in the corpus.
        num_tokens: Tokens in the array, end-of-text tokens included.
        vocab_size: Tokens the tokenizer knows; every id is below it.
        end_of_text: The id that ends every document.
        dtype: ``uint16`` or, for more than 65,536 tokens, ``uint32``.
    """

    folder: Path
    num_documents: int
    num_tokens: int
    vocab_size: int
    end_of_text: int
    dtype: str

    def tokens(self) -> TokenArray:
        """All token ids, ``(num_tokens,)``, read-only, mapped from disk.

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
        return np.memmap(path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the tokens were made with."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))


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
    key = f"{_FORMAT} {corpus.fingerprint()} {tokenizer_key} {end_of_text}"
    folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _write(corpus, make_tokenizer(), end_of_text, folder)
    described = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return TokenFile(**(described | {"folder": folder}))


def _write(corpus: Corpus, tokenizer: Tokenizer, end_of_text: str, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    end = end_of_text_id(tokenizer, end_of_text)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    num_documents = num_tokens = 0
    with (partial / "tokens.bin").open("wb") as file:
        for ids in encode_documents(tokenizer, _with_progress(corpus)):
            file.write(np.asarray([*ids, end], dtype=dtype).tobytes())
            num_documents += 1
            num_tokens += len(ids) + 1
    if not num_documents:
        raise CorpusError(
            f"{corpus.root}: expected text, got {len(corpus.files)} files without any. "
            f"Put text there."
        )
    tokenizer.save(str(partial / "tokenizer.json"))
    written = TokenFile(
        folder=folder,
        num_documents=num_documents,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        end_of_text=end,
        dtype=dtype.name,
    )
    described = json.dumps(asdict(written) | {"folder": folder.name}, indent=2)
    (partial / "corpus.json").write_text(described, encoding="utf-8")
    partial.rename(folder)


def _with_progress(corpus: Corpus) -> Iterator[Document]:
    """The documents, with a bar on a terminal."""
    # `disable=None`: only a terminal gets a bar.
    with tqdm(
        total=corpus.num_bytes(), desc="tokenise", unit="B", unit_scale=True, disable=None
    ) as bar:
        for document in corpus.documents():
            yield document
            bar.update(len(document.text))


def split_at_document(tokens: TokenArray, *, end_of_text: int, val_fraction: float) -> int:
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
    ends = np.flatnonzero(tokens[start:wanted] == end_of_text)
    return start + int(ends[-1]) + 1 if len(ends) else wanted


class PackedSequences(Dataset[dict[str, Tensor]]):
    """Sequences of equal length, next to each other in one array, without padding.

    Attributes:
        tokens: ``(num_tokens,)``, unsigned integers, mapped from disk.
        seq_len: Tokens in a sequence.
    """

    def __init__(self, tokens: TokenArray, seq_len: int) -> None:
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
