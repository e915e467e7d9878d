"""Byte-level BPE: trained on a corpus, or the one that belongs to pretrained weights.

Byte level means that every text can be encoded and comes back unchanged. The end-of-text token
separates documents; where a document contains its spelling, that is ordinary text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer, Tokenizer

from recipes.documents import Piece
from recipes.errors import RecipeError

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
_TRAINING_CHARACTERS = 8_000_000  # 85 MB of memory while it is trained; 64 would take 400
_BATCH_CHARACTERS = 2**20  # encoded at once, on all cores


def train_tokenizer(
    pieces: Iterable[Piece], vocab_size: int, end_of_text: str = END_OF_TEXT
) -> Tokenizer:
    """Byte-level BPE trained on the first 8 million characters.

    Args:
        pieces: The corpus, in order.
        vocab_size: Number of tokens, at least 257; fewer come out of a text that has too few pairs.
        end_of_text: The token that separates documents; gets id 0.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        _sample(pieces),
        vocab_size=vocab_size,
        min_frequency=0,
        special_tokens=[end_of_text],
        show_progress=False,
    )
    return Tokenizer.from_str(bpe.to_str())


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer that exists already; texts come out of it whole, whatever it was saved with.

    Args:
        name: A ``tokenizer.json``, a folder that holds one, or a name on the Hugging Face hub.

    Raises:
        RecipeError: Nothing there is a tokenizer.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = (
            Tokenizer.from_file(str(file)) if path.exists() else Tokenizer.from_pretrained(name)
        )
    # The library's errors are plain `Exception`s, whatever the cause.
    except Exception as error:
        raise RecipeError(
            f"tokenizer: expected a tokenizer.json, a folder with one or a name on the hub, got "
            f"'{file}' ({error}). Correct --data.tokenizer, or leave it out to train one."
        ) from error
    # A file keeps what its tokenizer was last called with: a document would lose its end.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer, token: str = END_OF_TEXT) -> int:
    """The id of the token that separates documents.

    Raises:
        RecipeError: The tokenizer has no such token.
    """
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise RecipeError(
            f"end_of_text: expected a token of the tokenizer, got '{token}'. Name the token that "
            f"separates documents with --data.end_of_text."
        )
    return int(token_id)


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, list[int]]]:
    """Token ids of every piece, in order, without separators.

    Args:
        tokenizer: Special tokens spelled out in a text are encoded as ordinary text.
        pieces: The corpus.
    """
    tokenizer.encode_special_tokens = True
    num_characters = 0

    def number_of_batch(piece: Piece) -> int:
        nonlocal num_characters
        num_characters += len(piece.text) + 1  # an empty one takes room as well
        return num_characters // _BATCH_CHARACTERS

    for _, group in itertools.groupby(pieces, number_of_batch):
        batch = list(group)
        texts = [piece.text for piece in batch]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        yield from zip(batch, (each.ids for each in encoded), strict=True)


def _sample(pieces: Iterable[Piece]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for piece in pieces:
        if left <= 0:
            return
        yield piece.text[:left]
        left -= len(piece.text)
