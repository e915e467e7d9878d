"""Prompts with answers: the model reads both and learns the answers alone.

A file of objects or a table, with one field for the prompt and one for the answer, is read as two
corpora, each tokenised and kept as any other. Their documents belong together one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes import documents
from recipes.corpus import Corpus
from recipes.documents import CorpusError
from recipes.packing import TokenFile, prepare

IGNORED = -100
"""A label that cross_entropy leaves out."""


@dataclass(frozen=True)
class Answers(Dataset[dict[str, Tensor]]):
    """A stretch of prompts with answers, one to a sequence, filled up to equal length.

    Attributes:
        prompts: Their tokens.
        answers: Theirs.
        prompt_ends: Place of the end-of-text token of each prompt, behind one of -1.
        answer_ends: Likewise.
        begin: Number of the first.
        end: One past the last.
        seq_len: Tokens in a sequence.
    """

    prompts: TokenFile
    answers: TokenFile
    prompt_ends: NDArray[np.int64]
    answer_ends: NDArray[np.int64]
    begin: int
    end: int
    seq_len: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence. Of what is too long, the prompt loses its beginning and the answer its end.

        Returns:
            ``input_ids`` and ``labels``, each ``(seq_len,)``, int64, labels -100 but for the
            answer and its end; and ``num_tokens``, 0-d, how many those are.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index}: expected 0 to {len(self) - 1}")
        number = self.begin + index
        before, last = map(int, self.prompt_ends[number : number + 2])
        prompt = self.prompts.read(before + 1, last)
        before, last = map(int, self.answer_ends[number : number + 2])
        answer = self.answers.read(before + 1, last + 1)[: self.seq_len]
        prompt = prompt[-(self.seq_len + 1 - len(answer)) :]
        ids = np.concatenate([prompt, answer]).astype(np.int64)
        sequence = np.full(self.seq_len, self.answers.end_of_text, np.int64)
        sequence[: len(ids) - 1] = ids[:-1]
        labels = np.full(self.seq_len, IGNORED, np.int64)
        labels[len(prompt) - 1 : len(ids) - 1] = answer
        return {
            "input_ids": torch.from_numpy(sequence),
            "labels": torch.from_numpy(labels),
            "num_tokens": torch.tensor(len(answer)),
        }


def prepare_answers(
    corpus: Corpus, answer_field: str, tokenizer: str | None, **options: Any
) -> tuple[TokenFile, TokenFile]:
    """Tokenise prompts and answers, or find them tokenised.

    Args:
        corpus: What to tokenise; its ``text_field`` holds the prompts.
        answer_field: The field that holds the answers.
        tokenizer: As of :func:`~recipes.tokenizer.load_tokenizer`; ``None``: one is trained on the
            answers.
        options: Of :func:`~recipes.packing.prepare`.

    Returns:
        Prompts and answers.

    Raises:
        CorpusError: Files without fields, or prompts and answers that do not belong together.
    """
    if corpus.text_field == answer_field:
        expected = f"another field for the answers than that of the prompts, '{answer_field}'"
        cure = "Set --data.text_field to the prompts'."
        raise CorpusError.at(corpus.root, expected, "the same", cure)
    with_fields = sorted(documents.READERS.keys() - {".txt"})
    for path in corpus.files:
        if path.suffix.lower() not in with_fields:
            expected = f"files with fields ({', '.join(with_fields)})"
            raise CorpusError.at(path, expected, "plain text", "Leave out --data.answer_field.")
    both = []
    for field in (answer_field, corpus.text_field):
        found = prepare(replace(corpus, text_field=field), tokenizer, **options)
        if found.num_empty or found.num_skipped:
            got = f"{found.num_empty} empty ones and {found.num_skipped} that cannot be read"
            cure = "Take out those lines."
            raise CorpusError.at(corpus.root, f"text in each '{field}'", got, cure)
        tokenizer = str(found.folder / "tokenizer.json")  # of the answers, for the prompts
        both.append(found)
    answers, prompts = both
    if answers.num_documents != prompts.num_documents:
        expected, got = f"{prompts.num_documents} answers", str(answers.num_documents)
        raise CorpusError.at(corpus.root, expected, got, "Give every prompt one answer.")
    return prompts, answers


def names_of(tokens: TokenFile, sequences: object) -> dict[str, str | None]:
    """What a checkpoint knows its data by.

    Args:
        tokens: The corpus, or the answers.
        sequences: Made of them; ``Answers`` have prompts as well.
    """
    prompts = sequences.prompts.folder.name if isinstance(sequences, Answers) else None
    return {"corpus": tokens.folder.name, "prompts": prompts}


def split_answers(
    prompts: TokenFile, answers: TokenFile, seq_len: int, val_fraction: float
) -> tuple[Answers, Answers]:
    """Sequences to train on and, after them, to validate on.

    Args:
        prompts: Prepared, like the next.
        answers: One to each.
        seq_len: Tokens in a sequence.
        val_fraction: Share of the sequences for validation; 0 for none.

    Raises:
        CorpusError: The token that ends documents occurs inside of them.
    """
    num, ends = answers.num_documents, []
    for tokens in (prompts, answers):
        found = tokens.ends(0, tokens.num_tokens)
        ends.append(np.insert(found, 0, -1))
        if (num_ends := len(found)) != tokens.num_documents:
            expected = f"the end-of-text token {tokens.num_documents} times, after each document"
            cure = "It occurs in the text as well: choose another with --data.end_of_text."
            raise CorpusError.at(tokens.folder, expected, f"{num_ends} times", cure)
    cut = num - round(num * val_fraction)
    parts = (0, cut), (cut, num)
    train, val = (Answers(prompts, answers, ends[0], ends[1], *part, seq_len) for part in parts)
    return train, val
