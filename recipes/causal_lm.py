"""What every language model of the recipes shares: loss, perplexity, logging, optimizer.

A subclass says of which class of transformers its model is, with which config, and where in it the
repeated blocks are.
"""

from __future__ import annotations

import contextlib
import functools
import math
from types import NoneType
from typing import Any, ClassVar, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from lightning_fsdp import (
    FSDP1Strategy,
    FSDP2Strategy,
    ScratchFSDPStrategy,
    call_with,
    linear_cross_entropy,
)
from lightning_fsdp.checkpoint.contents import LEFT_OUT
from lightning_fsdp.losses import body_and_head
from recipes.answers import IGNORED
from recipes.data import TextData
from recipes.errors import RecipeError, agreed_mistakes, mistakes_in
from recipes.optimizer import OptimizerConfig, build_adamw, build_muon, kinds_of, lr_factor
from recipes.pretrained import PretrainedSlices, load_model

Batch = dict[str, Tensor]
LossName = Literal["chunked", "plain"]
_SHARDED = (ScratchFSDPStrategy, FSDP1Strategy, FSDP2Strategy)


class CausalLM(L.LightningModule):
    """A decoder-only model of transformers, trained to predict the next token.

    Args:
        config: Of the model.
        pretrained: A folder or hub name whose weights are loaded; ``None`` for new ones.
        activation_checkpointing: Keep only the blocks' inputs for backward and compute the rest
            again: less memory, a third more compute.
        compile_blocks: ``torch.compile`` each block.
        loss: ``chunked`` computes the logits of a few positions at a time, which takes much less
            memory; ``plain`` all at once.
        meta_init: Build without memory, for the strategies of this package. ``scratch_fsdp``
            computes new weights (other values than without) one unit at a time, and no rank ever
            holds them all; those over torch's FSDP1 and FSDP2 hold them all until they shard. Of
            pretrained weights each rank then reads its slices.
        optimizer: AdamW and its schedule.

    Attributes:
        model_class: Of the model.
        blocks_name: Of the list of its repeated blocks.
        model: The transformers model; ``None`` until ``configure_model``.
        slices: Pretrained weights that are read once it is sharded; ``None``: there are none such.
        val_loss: Mean over the validation tokens of all ranks.
    """

    model_class: ClassVar[type[PreTrainedModel]]
    blocks_name: ClassVar[str]

    model: PreTrainedModel | None

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        pretrained: str | None,
        activation_checkpointing: bool = False,
        compile_blocks: bool = False,
        loss: LossName = "chunked",
        meta_init: bool = False,
        optimizer: OptimizerConfig = OptimizerConfig(),
    ) -> None:
        super().__init__()
        self.config = config
        self.pretrained = pretrained
        self.activation_checkpointing = activation_checkpointing
        self.compile_blocks = compile_blocks
        self.loss_name = loss
        self.meta_init = meta_init
        self.slices = PretrainedSlices(pretrained) if meta_init and pretrained else None
        self.optimizer_config = optimizer
        self.model = None
        self._micro_batch_losses: list[Tensor] = []
        self._saved_optimizers: list[str] = []  # of the checkpoint that a run goes on from
        # Not torchmetrics' Perplexity, which makes a softmax of all logits beside that of the loss.
        self.val_loss = MeanMetric()

    @property
    def max_seq_len(self) -> int:
        """The longest sequence the model has positions for, in tokens."""
        return int(self.config.max_position_embeddings)

    def build(self) -> PreTrainedModel:
        """The model, with new or pretrained weights, in torch's default dtype.

        Under ``meta_init`` without values.
        """
        if self.pretrained is None:
            return self.model_class(self.config)
        if self.slices is not None:
            return self.slices.build(self.model_class, self.config)
        return load_model(self.pretrained, self.model_class, self.config)

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of ``model``."""
        assert self.model is not None, "the model is built"
        return list(self.model.get_submodule(self.blocks_name).children())

    @override
    def setup(self, stage: str) -> None:
        """Refuse data that does not fit the model."""
        self._saved_optimizers = []
        if self.slices is not None:
            self.slices.begin(self.trainer)
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
        strategy = None if self._trainer is None else self.trainer.strategy
        if data.answer_field is not None and not isinstance(strategy, (*_SHARDED, NoneType)):
            raise RecipeError(
                "answer_field: expected a strategy of lightning_fsdp, which takes the mean over "
                f"the answers' tokens of all ranks, got {type(strategy).__name__}. Set "
                "--trainer.strategy scratch_fsdp."
            )
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
        device = torch.device("meta") if self.meta_init else contextlib.nullcontext()
        strategy = None if self._trainer is None else self.trainer.strategy
        with agreed_mistakes(strategy), mistakes_in("--model", ValueError), device:
            if self.meta_init:
                self._require_a_strategy_that_computes_values()
            self.model = self.build()
        blocks = self.blocks()
        checkpointed = {kind: _checkpointed(kind) for kind in {type(block) for block in blocks}}
        for block in blocks:
            if self.compile_blocks:
                # `forward` and not the module: parameter names stay, and a strategy's hooks, which
                # communicate, stay outside the graph.
                block.forward = torch.compile(block.forward)
            if self.activation_checkpointing:
                block.__class__ = checkpointed[type(block)]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model, of which torch would tell every weight.

        Raises:
            RecipeError: It has other names or shapes.
        """
        saved = {name: tuple(shape) for name, shape in checkpoint.get(LEFT_OUT, {}).items()}
        saved |= {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
        here = {name: tuple(value.shape) for name, value in self.state_dict().items()}
        for name in sorted(saved.keys() & here.keys()) + sorted(saved.keys() ^ here.keys()):
            if saved.get(name) == here.get(name):
                continue
            is_missing, has = name not in saved, f"has the shape {saved.get(name)}"
            found = "is missing" if is_missing else f"{has}, not {here.get(name, 'there at all')}"
            expected, got = "a checkpoint of this model", f"another, in which '{name}' {found}"
            cure = "Set --model to what it was saved with, or begin anew without it."
            raise RecipeError.at("--ckpt_path", expected, got, cure)
        states = checkpoint.get("optimizer_states", ())
        self._saved_optimizers = [kinds_of(state.get("param_groups", ())) for state in states]
        if self.slices is not None:
            self.slices.note(self, checkpoint)

    @override
    def on_fit_start(self) -> None:
        """Refuse the checkpoint of another optimizer, which is there now and not loaded yet.

        Raises:
            RecipeError: Its groups are stepped by another one, or have other numbers of parameters.
        """
        saved = self._saved_optimizers
        here = [kinds_of(optimizer.param_groups) for optimizer in self.trainer.optimizers]
        if saved and saved != here:
            expected = f"a checkpoint of this optimizer ({'; '.join(here)} parameters)"
            got = f"one of another ({'; '.join(saved)} parameters)"
            cure = "Set --model.optimizer.name to what it was saved with."
            with agreed_mistakes(self.trainer.strategy):
                raise RecipeError.at("--ckpt_path", expected, got, cure)

    def _require_a_strategy_that_computes_values(self) -> None:
        strategy = None if self._trainer is None else self.trainer.strategy
        if strategy is not None and not isinstance(strategy, _SHARDED):
            raise RecipeError(
                f"meta_init: expected a strategy of lightning_fsdp, got "
                f"{type(strategy).__name__}, which needs a model with values. Set "
                f"--model.meta_init false."
            )

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
            batch: ``input_ids`` and ``labels``, both ``(batch, seq_len)``, int64; of labels of
                -100 there is none.

        ``chunked`` computes the logits of a few positions at a time, ``plain`` all at once; so does
        ``chunked`` where they are more than a linear layer's (adapters on the head).
        """
        parts = body_and_head(self.model) if self.loss_name == "chunked" else None
        if parts is None:
            logits = self(batch["input_ids"])
            return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        model, body, head = parts

        def loss_of_hidden(hidden: Tensor, labels: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, head.weight, labels, head.bias)

        def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
            hidden = body(input_ids=input_ids, use_cache=False)[0]
            return call_with(head, loss_of_hidden, hidden, labels)

        # Its own forward is not called, and it may be a unit.
        return call_with(model, loss, batch["input_ids"], batch["labels"])

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """The loss of one micro-batch; where not every position counts, with how many do."""
        loss = self.loss(batch)
        self._micro_batch_losses.append(loss.detach())
        if "num_tokens" in batch:
            return {"loss": loss, "num_tokens": batch["num_tokens"]}
        return loss

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the loss of the whole step: all its micro-batches, all ranks."""
        loss = getattr(self.trainer.strategy, "mean_loss", None)
        if loss is None:
            loss = torch.stack(self._micro_batch_losses).mean()
        self._micro_batch_losses.clear()
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log("train/lr", optimizer.param_groups[0]["lr"])

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the loss, weighed by its tokens."""
        num_tokens = (batch["labels"] != IGNORED).sum()
        self.val_loss.update(self.loss(batch), weight=num_tokens)

    @override
    def on_validation_epoch_end(self) -> None:
        """Log loss and perplexity over the tokens of all ranks."""
        loss = self.val_loss.compute()
        self.val_loss.reset()
        # Every rank has the mean of all already; sync_dist only tells the Trainer that it is so.
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)
        self.log("val/perplexity", loss.exp(), sync_dist=True)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits."""
        logits = self(batch["input_ids"])
        assert isinstance(logits, Tensor), type(logits)
        return logits

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, in decay groups; the learning rate moves with every optimizer step.

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
        optimizer: torch.optim.Optimizer
        if config.name == "muon":
            assert self.model is not None, "configure_model has run"
            optimizer = build_muon(self.model, config)
        else:
            optimizer = build_adamw(self.parameters(), config)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, functools.partial(lr_factor, num_steps=int(num_steps), config=config)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def require_one_source(family: str, *, size: str | None, pretrained: str | None) -> None:
    """Check that a model is either new or pretrained.

    Raises:
        RecipeError: It is neither, or both.
    """
    if (size is None) == (pretrained is None):
        cure = "Give one of them" if size is None else "Set the other one to null"
        raise RecipeError(
            f"{family}: expected either size or pretrained, got size={size!r} and "
            f"pretrained={pretrained!r}. {cure}."
        )


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """``kind``, with calls that keep only their inputs for backward while it trains.

    The whole call and not ``forward``: a strategy's hooks then run in the recomputation as well,
    and gather the block's parameters for it. (transformers' own option wraps ``forward``.) A class
    of the same name and not a wrapping module: parameter names and the strategy's units stay.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # With its keywords, of which `checkpoint` would take for its own what has their names.
        plain = functools.partial(kind.__call__, self, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False) if self.training else plain(*args)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
