"""The data of a run, as a LightningDataModule: a corpus, its tokens, one rank's share of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_fsdp.data import DealtSampler, ResumableLoader
from recipes.answers import Answers, names_of, prepare_answers, split_answers
from recipes.corpus import Corpus, open_corpus, standard_library
from recipes.errors import RecipeError, agreed_mistakes, mistakes_in, require_in_range
from recipes.packing import PackedSequences, TokenFile, prepare, split_at_document
from recipes.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE


@dataclass(kw_only=True, eq=False, repr=False)
class TextData(L.LightningDataModule):
    """Text for language models: packed to full sequences, sharded by rank without overlap.

    A batch is a dict of ``input_ids`` and ``labels``, both ``(batch_size, seq_len)``, int64;
    ``labels`` are the next tokens. Nothing is padded, so every position counts. With an
    ``answer_field`` there is one prompt with its answer to a sequence; the labels of the rest are
    -100, and ``num_tokens``, ``(batch_size,)``, counts those of the answers.

    Args:
        path: A folder with ``.txt``, ``.json`` or ``.jsonl`` files, or with tables (``.csv``,
            ``.parquet``); or one such file. Without it the sources of Python's standard library are
            read.
        text_field: The field of a JSON object, or the column of a table, that holds the text.
        answer_field: The field of the same object or row that holds the answer to it: the loss is
            that of the answers alone, its mean over all their tokens.
        max_object_size: Characters of a JSON object, or of a cell of a ``.csv``, at most; several
            times as many bytes are in memory while it is read.
        skip_unreadable: Leave out files, lines, objects and rows that cannot be read, and say how
            many. Without it, the first one ends the run.
        tokenizer: A ``tokenizer.json``, a folder that holds one, or a name on the Hugging Face hub.
            Without it a byte-level BPE is trained on the corpus.
        vocab_size: Tokens of the trained tokenizer. Also the model's, unless it is pretrained: with
            a ``tokenizer`` of your own, set it to that one's size.
        end_of_text: The token that ends every document.
        seq_len: Tokens in a sequence.
        batch_size: Sequences per rank and micro-batch.
        val_fraction: Share of the tokens that is kept for validation; 0 for none.
        standard_library_mb: How much of the standard library is read, in 10^6 bytes.
        cache_dir: Folder where tokenised corpora are kept; a folder per corpus and tokenizer.
        num_workers: Processes per rank that read ahead.
        seed: Seed of the shuffle; the same on every rank.

    Attributes:
        tokens: The prepared corpus; ``None`` before ``setup``.
        train: Training sequences, of all ranks.
        val: Validation sequences, of all ranks; share no token with ``train``.
    """

    path: Path | None = None
    text_field: str = "text"
    answer_field: str | None = None
    max_object_size: int = 8_000_000
    skip_unreadable: bool = False
    tokenizer: str | None = None
    vocab_size: int = 4096
    end_of_text: str = END_OF_TEXT
    seq_len: int = 128
    batch_size: int = 8
    val_fraction: float = 0.02
    standard_library_mb: float = 8.0
    cache_dir: Path = Path("runs/cache")
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        legal = {"vocab_size": (MIN_VOCAB_SIZE,), "val_fraction": (0, 1), "seed": (-(2**63), 2**63)}
        legal |= dict.fromkeys(("num_workers", "standard_library_mb"), (0,))
        legal |= dict.fromkeys(("max_object_size", "seq_len", "batch_size"), (1,))
        for name, limits in legal.items():
            require_in_range(name, getattr(self, name), f"Correct --data.{name}.", *limits)
        self.cache_dir = Path(self.cache_dir)
        self.tokens: TokenFile | None = None
        self.train: PackedSequences | Answers
        self.val: PackedSequences | Answers
        self._train_loader: ResumableLoader[dict[str, Tensor]] | None = None

    @override
    def prepare_data(self) -> None:
        """Tokenise the corpus into the cache; others wait for the first rank of every node."""
        self.open()

    @override
    def setup(self, stage: str) -> None:
        """Open the tokens and split them.

        Raises:
            RecipeError: Ranks found different text; or there are too few sequences to give every
                rank a batch.
        """
        strategy = None if self.trainer is None else self.trainer.strategy
        with agreed_mistakes(strategy):
            found = self.open().folder.name
        is_same = strategy is None or strategy.broadcast(found) == found
        if strategy is not None and not strategy.reduce_boolean_decision(is_same):
            expected, got = "the same text on every rank", "other text on some"
            same = "the same files and, without --data.path, the same version of Python"
            cure = f"Give all hosts {same}; write to none while a run starts."
            raise RecipeError.at("corpus", expected, got, cure)
        ranks, is_training = self._shard(), stage == "fit"
        self.require_enough(ranks["num_replicas"], for_training=is_training)
        if is_training:
            options = {"persistent_workers": self.num_workers > 0, **self._loading()}
            self._train_loader = ResumableLoader(self.train, seed=self.seed, **ranks, **options)

    def open(self) -> TokenFile:
        """Prepare the corpus if need be, split it, and return it. Needs no Trainer.

        A second call finds what the first one found, whatever happened to the files.
        """
        if self.tokens is not None:
            return self.tokens
        options = self._chosen("tokenizer", "vocab_size", "end_of_text", "cache_dir")
        shape = (self.seq_len, self.val_fraction)
        if self.answer_field is not None:
            prompts, tokens = prepare_answers(self._corpus(), self.answer_field, **options)
            self.train, self.val = split_answers(prompts, tokens, *shape)
        else:
            tokens = prepare(self._corpus(), **options)
            self.train, self.val = split_at_document(tokens, *shape)
        if tokens.num_skipped:
            with (path := tokens.folder / "skipped.txt").open(encoding="utf-8") as file:
                first = file.readline().strip()
            rank_zero_warn(
                f"Corpus: {tokens.num_skipped:,} files, lines, objects or rows could not be read "
                f"and are left out. All of them are in {path}; the first: {first}"
            )
        if tokens.num_empty:
            rank_zero_info(f"Corpus: {tokens.num_empty:,} empty documents, which add nothing")
        self.tokens = tokens
        return tokens

    def require_enough(self, num_ranks: int, *, for_training: bool) -> None:
        """Check that every rank gets a whole training batch and a validation sequence.

        Args:
            num_ranks: Ranks that share the data.
            for_training: Check the training data as well.

        Raises:
            RecipeError: There are too few sequences, or none are kept to validate on.
        """
        if not for_training and not self.val_fraction:
            cure = "Raise --data.val_fraction."
            raise RecipeError.at("val_fraction", "more than 0 to validate", 0, cure)
        wanted = [
            ("training", len(self.train), num_ranks * self.batch_size if for_training else 0),
            ("validation", len(self.val), num_ranks if self.val_fraction else 0),
        ]
        for name, got, needed in wanted:
            if got < needed:
                shape = f"sequences of {self.seq_len} tokens for {num_ranks} ranks"
                options = "lower --data.seq_len or --data.batch_size, or change --data.val_fraction"
                cure = f"Add text, {options}."
                raise RecipeError.at(f"{name} data", f"at least {needed} {shape}", got, cure)

    @override
    def train_dataloader(self) -> ResumableLoader[dict[str, Tensor]]:
        """This rank's training batches; remembers its position."""
        assert self._train_loader is not None, "made by setup"
        return self._train_loader

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """This rank's validation batches, as many on every rank; the last may be smaller."""
        if not self.val_fraction:
            return []
        sampler = DealtSampler(self.val, **self._shard(), shuffle=False)
        # A generator of its own, or else validating would shift what training draws.
        return DataLoader(self.val, sampler=sampler, generator=torch.Generator(), **self._loading())

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, and which data that is."""
        if self._train_loader is None:
            return {}
        return {**names_of(self.open(), self.train), **self._train_loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position, where there is training.

        Raises:
            RecipeError: It is one in other data, or lies inside a batch.
        """
        if self._train_loader is None:
            return
        before, now = self.cache_dir / state_dict["corpus"], self.open()
        if any(state_dict.get(key) != name for key, name in names_of(now, self.train).items()):
            got = f"another one: {now.difference_from(before)}"
            cure = "Restore it, or start from the weights alone."
            raise RecipeError.at("checkpoint", "the corpus that it was written with", got, cure)
        options = "--data.path, --data.seq_len, --data.seed and --data.batch_size"
        with mistakes_in(f"checkpoint, read with {options}", ValueError):
            self._train_loader.load_state_dict(state_dict)

    @override
    def teardown(self, stage: str) -> None:
        """Forget the loader: the next run begins at the beginning, or at its checkpoint."""
        self._train_loader = None

    def _corpus(self) -> Corpus:
        if self.path is None:
            return standard_library(round(self.standard_library_mb * 1e6))
        options = self._chosen("text_field", "max_object_size", "skip_unreadable")
        return open_corpus(Path(self.path), **options)

    def _chosen(self, *names: str) -> dict[str, Any]:
        """Options, to be handed on by name."""
        return {name: getattr(self, name) for name in names}

    def _shard(self) -> dict[str, Any]:
        """Which ranks share the data, and which of them this is."""
        kwargs = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return kwargs or {"num_replicas": 1, "rank": 0}

    def _loading(self) -> dict[str, Any]:
        """What both loaders have in common."""
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return {**self._chosen("batch_size", "num_workers"), "pin_memory": pin}
