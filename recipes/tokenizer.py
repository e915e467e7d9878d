"""Byte-level BPE: trained on a corpus, or the one that belongs to pretrained weights.

Byte level means that every text can be encoded and comes back unchanged. The end-of-text token
separates documents; where a document contains its spelling, that is ordinary text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.errors import RecipeError
from recipes.pieces import Piece

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
_TRAINING_CHARACTERS = 8_000_000  # 85 MB of memory while it is trained; 64 would take 400
_BATCH_CHARACTERS = 2**20  # encoded at once, on all cores


def train_tokenizer(
    pieces: Iterable[Piece], *, vocab_size: int, end_of_text: str = END_OF_TEXT
) -> Tokenizer:
    """Byte-level BPE trained on the first 8 million characters.

    Args:
        pieces: The corpus, in order.
        vocab_size: Number of tokens, at least 257; fewer come out of a text that has too few pairs.
        end_of_text: The token that separates documents; gets id 0.

    Raises:
        RecipeError: ``vocab_size`` cannot hold the bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise RecipeError(
            f"vocab_size: expected at least {MIN_VOCAB_SIZE} (256 bytes and the end-of-text "
            f"token), got {vocab_size}. Raise --data.vocab_size."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(pieces), trainer)
    return tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer that exists already; texts come out of it whole, whatever it was saved with.

    Args:
        name: A ``tokenizer.json``, a folder that holds one, or a name on the Hugging Face hub.

    Raises:
        RecipeError: Nothing there is a tokenizer.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise _no_tokenizer(name, "a folder without tokenizer.json")
    try:
        tokenizer = (
            Tokenizer.from_file(str(file)) if path.exists() else Tokenizer.from_pretrained(name)
        )
    # The library's errors are plain `Exception`s, whatever the cause.
    except Exception as error:
        raise _no_tokenizer(name, f"{type(error).__name__}: {error}") from error
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
    for batch in _batches(pieces):
        texts = [piece.text for piece in batch]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for piece, encoding in zip(batch, encoded, strict=True):
            yield piece, encoding.ids


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces of :data:`_BATCH_CHARACTERS` together, or a piece more."""
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text) + 1  # an empty one takes room as well
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _sample(pieces: Iterable[Piece]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for piece in pieces:
        if left <= 0:
            return
        yield piece.text[:left]
        left -= len(piece.text)


def _no_tokenizer(name: str, why: str) -> RecipeError:
    return RecipeError(
        f"tokenizer: expected a tokenizer.json, a folder with one or a name on the hub, got "
        f"'{name}' ({why}). Correct --data.tokenizer, or leave it out to train one."
    )
