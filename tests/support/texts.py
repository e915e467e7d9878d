"""A small folder of text in every format that the recipes read."""

import json
from pathlib import Path

import numpy as np

from recipes.corpus import Corpus

WORDS = ["shard", "gather", "unit", "rank", "whole", "slice", "step", "é", "\n", "  ", "模型", "."]
NUM_DOCUMENTS = 6


def text(seed: int, num_words: int = 400) -> str:
    """Words in an order of their own for every seed."""
    generator = np.random.default_rng(seed)
    return " ".join(WORDS[index] for index in generator.integers(0, len(WORDS), num_words))


def write_folder(path: Path, num_words: int = 400) -> Path:
    """Four files with documents ``text(0)`` to ``text(5)``, in this order, and one without."""
    texts = [text(seed, num_words) for seed in range(NUM_DOCUMENTS)]
    (path / "more").mkdir(parents=True)
    (path / "a.txt").write_text(texts[0], encoding="utf-8")
    (path / "b.json").write_text(json.dumps([{"text": texts[1]}, {"text": texts[2]}]))
    (path / "c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[3:5]))
    (path / "more" / "d.TXT").write_text(texts[5], encoding="utf-8")
    (path / "ignored.md").write_text("not a document")
    return path


def documents(corpus: Corpus) -> list[str]:
    """The text of every document that has some, put together from its pieces."""
    found, parts = [], []
    for piece in corpus.pieces():
        parts.append(piece.text)
        if piece.is_last:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last piece ends a document"
    return [text for text in found if text]
