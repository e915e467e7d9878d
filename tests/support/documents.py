"""Corpora read with blocks and pieces of any size, and what is left out of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from recipes import documents as reader
from recipes.corpus import Corpus

SUFFIXES = (".txt", ".json", ".jsonl")

SIZES = [(2**20, 2**16), (1, 3), (5, 8), (64, 64)]  # of a block, of a piece


@contextmanager
def sizes(block: int, piece: int) -> Iterator[None]:
    before = reader.BLOCK_LENGTH, reader.PIECE_LENGTH
    reader.BLOCK_LENGTH, reader.PIECE_LENGTH = block, piece
    try:
        yield
    finally:
        reader.BLOCK_LENGTH, reader.PIECE_LENGTH = before


def outcome_of_corpus(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Documents, and what was left out."""
    left_out: list[str] = []
    found, parts = [], []
    for piece in corpus.pieces(lambda error: left_out.append(str(error))):
        assert len(piece.text) <= reader.PIECE_LENGTH
        parts.append(piece.text)
        if piece.is_last:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found, left_out
