"""What every language model of the recipes shares: loss, perplexity, logging, optimizer.

A subclass says which transformers config it has, how the model is built and which of its modules
are the repeated blocks.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from recipes.data import TextData
from recipes.errors import RecipeError
from recipes.optimizer import OptimizerConfig, build_adamw, lr_factor

Batch = dict[str, Tensor]


class CausalLM(L.LightningModule):
    """A decoder-only model of transformers, trained to predict the next token.

    Args:
        config: Of the model.
        pretrained: A folder or hub name whose weights are loaded; ``None`` for new ones.
        activation_checkpointing: Keep only the blocks' inputs for backward and compute the rest
            again.
        compile_blocks: ``torch.compile`` each block.
        optimizer: AdamW and its schedule.

    Attributes:
        model: The transformers model; ``None`` until ``configure_model``.
    """

    model: PreTrainedModel | None

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        pretrained: str | None,
        activation_checkpointing: bool,
        compile_blocks: bool,
        optimizer: OptimizerConfig,
    ) -> None:
        super().__init__()
        self.config = config
        self.pretrained = pretrained
        self.activation_checkpointing = activation_checkpointing
        self.compile_blocks = compile_blocks
        self.optimizer_config = optimizer
        self.model = None
        self._micro_batch_losses: list[Tensor] = []
        self._val_losses: list[Tensor] = []

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """The longest sequence the model has positions for, in tokens."""

    @abstractmethod
    def build(self) -> PreTrainedModel:
        """The model, with new or pretrained weights, in torch's default dtype."""

    @abstractmethod
    def blocks(self) -> Iterable[nn.Module]:
        """The repeated blocks of ``model``."""

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that does not fit the model."""
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, TextData):
            self.require_fitting(data)

    def require_fitting(self, data: TextData) -> None:
        """Check that the model can read the data.

        Args:
            data: With its tokens open.

        Raises:
            RecipeError: Too long sequences, or a tokenizer that is not the model's.
        """
        assert data.tokens is not None, "the data is open"
        if data.seq_len > self.max_seq_len:
            raise RecipeError(
                f"seq_len: expected at most the model's {self.max_seq_len} positions, got "
                f"{data.seq_len}. Lower --data.seq_len."
            )
        if self.pretrained is not None and data.tokenizer is None:
            raise RecipeError(
                f"pretrained: expected the tokenizer that '{self.pretrained}' was trained with, "
                f"got one trained on the corpus. Add --data.tokenizer {self.pretrained}."
            )
        if data.tokens.vocab_size > self.config.vocab_size:
            raise RecipeError(
                f"vocab_size: expected at least the tokenizer's {data.tokens.vocab_size}, got "
                f"{self.config.vocab_size}. Set --data.vocab_size {data.tokens.vocab_size}."
            )

    @override
    def configure_model(self) -> None:
        """Build the model, once."""
        if self.model is not None:
            return
        self.model = self.build()
        blocks = list(self.blocks())
        checkpointed = {kind: _checkpointed(kind) for kind in {type(block) for block in blocks}}
        for block in blocks:
            if self.compile_blocks:
                # `forward` and not the module: parameter names stay, and a strategy's hooks, which
                # communicate, stay outside the graph.
                block.forward = torch.compile(block.forward)
            if self.activation_checkpointing:
                block.__class__ = checkpointed[type(block)]

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits.

        Args:
            input_ids: ``(batch, seq_len)``, int64.

        Returns:
            ``(batch, seq_len, vocab_size)``, the compute dtype.
        """
        if self.model is None:
            raise RuntimeError(
                f"{type(self).__name__}: expected a model that is built, got none. Call "
                f"configure_model() before using it outside the Trainer."
            )
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        assert isinstance(logits, Tensor), type(logits)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross entropy of the next tokens, in nats, 0-d, float32.

        Args:
            batch: ``input_ids`` and ``labels``, both ``(batch, seq_len)``, int64.
        """
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        loss = self.loss(batch)
        self._micro_batch_losses.append(loss.detach())
        return loss

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the loss of the whole step: all its micro-batches, all ranks."""
        loss = torch.stack(self._micro_batch_losses).mean()
        self._micro_batch_losses.clear()
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log("train/lr", optimizer.param_groups[0]["lr"])

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the sum of the losses of this rank's tokens, and their number."""
        loss, num_tokens = self.loss(batch), batch["labels"].numel()
        self._val_losses.append(torch.stack([loss * num_tokens, loss.new_tensor(num_tokens)]))

    @override
    def on_validation_epoch_end(self) -> None:
        """Log loss and perplexity over the tokens of all ranks."""
        total = torch.stack(self._val_losses).sum(dim=0)
        self._val_losses.clear()
        total = self.trainer.strategy.reduce(total, reduce_op="sum")
        loss = total[0] / total[1]
        # Every rank has the mean of all already; sync_dist only tells the Trainer that it is so.
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)
        self.log("val/perplexity", loss.exp(), sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW in decay groups; the learning rate moves with every optimizer step.

        Raises:
            RecipeError: The run has no end, so the cosine has none.
        """
        num_steps = self.trainer.estimated_stepping_batches
        if math.isinf(num_steps):
            raise RecipeError(
                "schedule: expected a run with an end, got one without. Set --trainer.max_steps "
                "or --trainer.max_epochs."
            )
        config = self.optimizer_config
        optimizer = build_adamw(self.parameters(), config)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, functools.partial(lr_factor, num_steps=int(num_steps), config=config)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """``kind``, with calls that keep only their inputs for backward while it trains.

    The whole call and not ``forward``: a strategy's hooks then run in the recomputation as well,
    and gather the block's parameters for it. (transformers' own option wraps ``forward``.) A class
    of the same name and not a wrapping module: parameter names and the strategy's units stay.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(kind.__call__, self)
        if not self.training:
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
