"""The data of a run, as a LightningDataModule: a corpus, its tokens, one rank's share of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_fsdp.data import DealtSampler, ResumableLoader
from recipes.corpus import Corpus, open_corpus, standard_library
from recipes.errors import RecipeError
from recipes.packing import (
    PackedSequences,
    TokenFile,
    describe_difference,
    prepare,
    split_at_document,
)
from recipes.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, load_tokenizer, train_tokenizer


class TextData(L.LightningDataModule):
    """Text for language models: packed to full sequences, sharded by rank without overlap.

    A batch is a dict of ``input_ids`` and ``labels``, both ``(batch_size, seq_len)``, int64;
    ``labels`` are the next tokens. Nothing is padded, so every position counts.

    Args:
        path: A folder with ``.txt``, ``.json`` or ``.jsonl`` files. Without it the sources of
            Python's standard library are read.
        text_field: The field of a JSON object that holds its text.
        max_object_size: Characters of a JSON object, at most; several times as many bytes are in
            memory while it is read.
        skip_unreadable: Leave out files, lines and objects that cannot be read, and say how many.
            Without it, the first one ends the run.
        tokenizer: A ``tokenizer.json``, a folder that holds one, or a name on the Hugging Face hub.
            Without it a byte-level BPE is trained on the corpus.
        vocab_size: Tokens of the trained tokenizer. Also the model's, unless it is pretrained: with
            a ``tokenizer`` of your own, set it to that one's size.
        end_of_text: The token that ends every document.
        seq_len: Tokens in a sequence.
        batch_size: Sequences per rank and micro-batch.
        val_fraction: Share of the tokens that is kept for validation; 0 for none.
        standard_library_mb: How much of the standard library is read, in 10^6 bytes.
        cache_dir: Where tokenised corpora are kept; a folder per corpus and tokenizer.
        num_workers: Processes per rank that read ahead.
        seed: Of the shuffle; the same on every rank.

    Attributes:
        tokens: The prepared corpus; ``None`` before ``setup``.
        train: Training sequences, of all ranks.
        val: Validation sequences, of all ranks; share no token with ``train``.
    """

    tokens: TokenFile | None
    train: PackedSequences
    val: PackedSequences

    def __init__(
        self,
        *,
        path: Path | None = None,
        text_field: str = "text",
        max_object_size: int = 8_000_000,
        skip_unreadable: bool = False,
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        end_of_text: str = END_OF_TEXT,
        seq_len: int = 128,
        batch_size: int = 8,
        val_fraction: float = 0.02,
        standard_library_mb: float = 8.0,
        cache_dir: Path = Path("runs/cache"),
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _at_least("vocab_size", vocab_size, MIN_VOCAB_SIZE)
        _at_least("max_object_size", max_object_size, 1)
        _at_least("seq_len", seq_len, 1)
        _at_least("batch_size", batch_size, 1)
        _at_least("num_workers", num_workers, 0)
        if not 0 <= val_fraction < 1:
            raise RecipeError(
                f"val_fraction: expected 0 or more and less than 1, got {val_fraction}. "
                f"Correct --data.val_fraction."
            )
        self.path = None if path is None else Path(path)
        self.text_field = text_field
        self.max_object_size = max_object_size
        self.skip_unreadable = skip_unreadable
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.standard_library_mb = standard_library_mb
        self.cache_dir = Path(cache_dir)
        self.num_workers = num_workers
        self.seed = seed
        self.tokens = None
        self._train_loader: ResumableLoader[dict[str, Tensor]] | None = None
        self._position: dict[str, Any] | None = None

    @override
    def prepare_data(self) -> None:
        """Tokenise the corpus into the cache; the first rank of every node does it."""
        self.open()

    @override
    def setup(self, stage: str) -> None:
        """Open the tokens and split them.

        Raises:
            RecipeError: Ranks found different text; or there are too few sequences to give every
                rank a batch.
        """
        self._open_together()
        self.require_enough(self._shards()[0], for_training=stage == "fit")

    def open(self) -> TokenFile:
        """Prepare the corpus if need be, split it, and return it. Needs no Trainer.

        A second call finds what the first one found, whatever happened to the files.
        """
        if self.tokens is not None:
            return self.tokens
        self.tokens = self._prepare()
        if self.tokens.num_skipped:
            rank_zero_warn(
                f"Corpus: {self.tokens.num_skipped:,} files, lines or objects could not be read "
                f"and are left out. All of them are in {self.tokens.folder / 'skipped.txt'}; the "
                f"first: {self.tokens.first_skipped()}"
            )
        if self.tokens.num_empty:
            rank_zero_info(f"Corpus: {self.tokens.num_empty:,} empty documents, which add nothing")
        tokens = self.tokens.tokens()
        cut = split_at_document(
            tokens, end_of_text=self.tokens.end_of_text, val_fraction=self.val_fraction
        )
        self.train = PackedSequences(tokens.part(0, cut), self.seq_len)
        self.val = PackedSequences(tokens.part(cut, len(tokens)), self.seq_len)
        return self.tokens

    def require_enough(self, num_ranks: int, *, for_training: bool) -> None:
        """Check that every rank gets a whole training batch and a validation sequence.

        Args:
            num_ranks: Ranks that share the data.
            for_training: Check the training data as well.

        Raises:
            RecipeError: There are too few sequences, or none are kept to validate on.
        """
        if not for_training and not self.val_fraction:
            raise RecipeError(
                "val_fraction: expected more than 0 to validate, got 0. Raise --data.val_fraction."
            )
        wanted = [("validation", self.val, num_ranks if self.val_fraction else 0)]
        if for_training:
            wanted.insert(0, ("training", self.train, num_ranks * self.batch_size))
        for name, sequences, needed in wanted:
            if len(sequences) < needed:
                raise RecipeError(
                    f"{name} data: expected at least {needed} sequences of {self.seq_len} tokens "
                    f"for {num_ranks} ranks, got {len(sequences)} ({len(sequences.tokens):,} "
                    f"tokens). Add text, lower --data.seq_len or --data.batch_size, or change "
                    f"--data.val_fraction."
                )

    @override
    def train_dataloader(self) -> ResumableLoader[dict[str, Tensor]]:
        """This rank's training batches; remembers its position."""
        num_ranks, rank = self._shards()
        self._train_loader = ResumableLoader(
            self.train,
            batch_size=self.batch_size,
            seed=self.seed,
            num_replicas=num_ranks,
            rank=rank,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self._on_cuda(),
        )
        if self._position is not None:
            self._go_on_from(self._position)
            self._position = None
        return self._train_loader

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """This rank's validation batches, as many on every rank; the last may be smaller."""
        if not self.val_fraction:
            return []
        num_ranks, rank = self._shards()
        return DataLoader(
            self.val,
            batch_size=self.batch_size,
            sampler=DealtSampler(self.val, num_replicas=num_ranks, rank=rank, shuffle=False),
            num_workers=self.num_workers,
            pin_memory=self._on_cuda(),
            generator=torch.Generator(),  # or else validating would shift what training draws
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, and which data that is."""
        if self._train_loader is None:
            return {}
        assert self.tokens is not None, "there is a loader"
        return {"corpus": self.tokens.folder.name, **self._train_loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position; the Trainer calls it before or after it asked for the loader."""
        if self._train_loader is not None:
            self._go_on_from(state_dict)
        else:
            self._position = state_dict

    @override
    def teardown(self, stage: str) -> None:
        """Forget the loader: the next run begins at the beginning, or at its checkpoint."""
        if stage == "fit":
            self._train_loader = None

    def _go_on_from(self, position: dict[str, Any]) -> None:
        assert self._train_loader is not None
        assert self.tokens is not None, "there is a loader"
        before = self.cache_dir / position["corpus"]
        if before.name != self.tokens.folder.name:
            raise RecipeError(
                f"checkpoint: expected the corpus that it was written with, got another one: "
                f"{describe_difference(before, self.tokens.folder)}. Restore it, or start from "
                f"the weights alone."
            )
        try:
            self._train_loader.load_state_dict(position)
        except ValueError as error:
            raise RecipeError(
                f"checkpoint: {error} That is --data.path, --data.seq_len, --data.seed and "
                "--data.batch_size."
            ) from error

    def _corpus(self) -> Corpus:
        if self.path is not None:
            return open_corpus(
                self.path,
                text_field=self.text_field,
                max_object_size=self.max_object_size,
                skip_unreadable=self.skip_unreadable,
            )
        return standard_library(round(self.standard_library_mb * 1e6))

    def _prepare(self) -> TokenFile:
        corpus = self._corpus()
        if self.tokenizer is None:
            key = f"bpe {self.vocab_size}"

            def make() -> Tokenizer:
                return train_tokenizer(
                    corpus.pieces(), vocab_size=self.vocab_size, end_of_text=self.end_of_text
                )
        else:
            given = load_tokenizer(self.tokenizer)
            key = hashlib.sha256(given.to_str().encode()).hexdigest()

            def make() -> Tokenizer:
                return given

        return prepare(
            corpus,
            make,
            tokenizer_key=key,
            end_of_text=self.end_of_text,
            cache_dir=self.cache_dir,
        )

    def _open_together(self) -> None:
        """:meth:`open` on every rank, or the same failure on every rank."""
        failure, found = None, None
        try:
            found = self.open().folder.name
        except RecipeError as error:
            failure = error
        if self.trainer is not None:
            strategy = self.trainer.strategy
            expected = strategy.broadcast(found)
            is_same = found is not None and found == expected
            if not strategy.reduce_boolean_decision(is_same) and failure is None:
                failure = RecipeError(
                    "corpus: expected the same text on every rank, got other text, or none, on "
                    "some. Give all hosts the same files and, without --data.path, the same "
                    "version of Python; write to none while a run starts."
                )
        if failure is not None:
            raise failure

    def _shards(self) -> tuple[int, int]:
        """Number of ranks that share the data, and this one's place among them."""
        kwargs = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])

    def _on_cuda(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise RecipeError(f"{name}: expected {least} or more, got {value}. Correct --data.{name}.")
