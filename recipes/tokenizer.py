"""Byte-level BPE: trained on a corpus, or the one that belongs to pretrained weights.

Byte level means that every text can be encoded and comes back unchanged. The end-of-text token
separates documents; where a document contains its spelling, that is ordinary text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.corpus import Document
from recipes.errors import RecipeError

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
_TRAINING_CHARACTERS = 64_000_000  # more text changes a vocabulary little and costs minutes


def train_tokenizer(
    documents: Iterable[Document], *, vocab_size: int, end_of_text: str = END_OF_TEXT
) -> Tokenizer:
    """Byte-level BPE trained on the first 64 million characters.

    Args:
        documents: The corpus, in order.
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
    tokenizer.train_from_iterator(_sample(documents), trainer)
    return tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer that exists already.

    Args:
        name: A ``tokenizer.json``, a folder that holds one, or a name on the Hugging Face hub.

    Raises:
        RecipeError: Nothing there is a tokenizer.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        if not path.exists():
            return Tokenizer.from_pretrained(name)
    # The library's errors are plain `Exception`s, whatever the cause.
    except Exception as error:
        raise _no_tokenizer(name, f"{type(error).__name__}: {error}") from error
    raise _no_tokenizer(name, "a folder without tokenizer.json")


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


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[Document], *, batch_size: int = 256
) -> Iterator[list[int]]:
    """Token ids of every document, in order, without separators.

    Args:
        tokenizer: Special tokens spelled out in a text are encoded as ordinary text.
        documents: The corpus.
        batch_size: Documents encoded at once, on all cores.
    """
    tokenizer.encode_special_tokens = True
    iterator = iter(documents)
    while batch := list(itertools.islice(iterator, batch_size)):
        texts = [document.text for document in batch]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids


def _sample(documents: Iterable[Document]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for document in documents:
        if left <= 0:
            return
        yield document.text[:left]
        left -= len(document.text)


def _no_tokenizer(name: str, why: str) -> RecipeError:
    return RecipeError(
        f"tokenizer: expected a tokenizer.json, a folder with one or a name on the hub, got "
        f"'{name}' ({why}). Correct --data.tokenizer, or leave it out to train one."
    )
