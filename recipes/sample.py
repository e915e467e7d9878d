"""Text that the model writes at the end of training, on all ranks together.

Under ZeRO-3 a forward is collective, so a rank may not stop because its own text has ended:

    rank 0   import  os  <end>   .     .       what a rank computes after its end is thrown away
    rank 1   import  re   as    r   <end>      all have ended: all stop
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from recipes.causal_lm import CausalLM
from recipes.data import TextData
from recipes.errors import RecipeError
from recipes.packing import TokenFile


class SampleText(L.Callback):
    """Shows at the end of training how the model goes on from a prompt: a text from each rank.

    Printed, and logged to TensorBoard as ``train/sample``. The run's random states are left alone.

    Args:
        prompt: The beginning of a document; may be empty.
        num_tokens: Tokens that are added at most; fewer if the model has fewer positions.
        temperature: Divides the logits; 0 takes the likeliest token.
        seed: Rank r draws with ``seed + r``.

    Attributes:
        prompt_ids: Token ids, with the end-of-text token that precedes every document.
        texts: Of all ranks, in their order; empty before the end of training.
    """

    def __init__(
        self,
        prompt: str = "import ",
        num_tokens: int = 64,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("num_tokens", num_tokens, 1), ("temperature", temperature, 0)):
            if value < least:
                raise RecipeError(
                    f"SampleText.{name}: expected {least} or more, got {value}. Correct it."
                )
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.temperature = temperature
        self.seed = seed
        self.prompt_ids: list[int] = []
        self.texts: list[str] = []

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the prompt, before training and not after it.

        Raises:
            RecipeError: The prompt leaves the model no position to write to.
        """
        module, tokens = _module_and_tokens(trainer, pl_module)
        tokenizer = tokens.tokenizer()
        self.prompt_ids = [
            tokens.end_of_text,
            *tokenizer.encode(self.prompt, add_special_tokens=False).ids,
        ]
        if len(self.prompt_ids) >= module.max_seq_len:
            raise RecipeError(
                f"SampleText.prompt: expected fewer tokens than the model's {module.max_seq_len} "
                f"positions, got {len(self.prompt_ids)}. Shorten it."
            )

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write, and show what came out."""
        module, tokens = _module_and_tokens(trainer, pl_module)
        ids = self._write(trainer, module, tokens)
        # Rank r fills row r; a sum then gathers, on every strategy.
        of_all_ranks = ids.new_zeros(trainer.world_size, len(ids))
        of_all_ranks[trainer.global_rank] = ids
        of_all_ranks = trainer.strategy.reduce(of_all_ranks, reduce_op="sum")
        self.texts = [self._decode(row, tokens) for row in of_all_ranks.tolist()]
        for rank, text in enumerate(self.texts):
            rank_zero_info(f"Sample of rank {rank}: {text!r}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                shown = "\n\n".join(f"    {text}".replace("\n", "\n    ") for text in self.texts)
                logger.experiment.add_text("train/sample", shown, trainer.global_step)

    @torch.no_grad()
    def _write(self, trainer: L.Trainer, module: CausalLM, tokens: TokenFile) -> Tensor:
        """Prompt and text, filled up with end-of-text tokens; as long on every rank."""
        begin = len(self.prompt_ids)
        # Computed at its full length from the beginning, as no position sees a later one: a shape
        # that grows would have compiled blocks compiled again.
        ids = torch.full((min(begin + self.num_tokens, module.max_seq_len),), tokens.end_of_text)
        ids[:begin] = torch.tensor(self.prompt_ids)
        ids = ids.to(module.device)
        generator = torch.Generator().manual_seed(self.seed + trainer.global_rank)
        has_ended = False
        was_training = module.training
        module.eval()
        for position in range(begin, len(ids)):
            # Through the strategy: in the precision of the run, and what the engine needs gathered.
            logits = trainer.strategy.predict_step({"input_ids": ids[None]}, 0)
            if not has_ended:
                token = self._draw(logits[0, position - 1, : tokens.vocab_size], generator)
                ids[position], has_ended = token, token == tokens.end_of_text
            if trainer.strategy.reduce_boolean_decision(has_ended, all=True):
                break
        module.train(was_training)
        return ids

    def _draw(self, logits: Tensor, generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        likely = (logits.float().cpu() / self.temperature).softmax(dim=0)
        return int(torch.multinomial(likely, 1, generator=generator))

    def _decode(self, row: list[int], tokens: TokenFile) -> str:
        written = row[1:]  # after the end-of-text token before the prompt
        begin = len(self.prompt_ids) - 1
        if tokens.end_of_text in written[begin:]:
            written = written[: written.index(tokens.end_of_text, begin)]
        return str(tokens.tokenizer().decode(written, skip_special_tokens=False))


def _module_and_tokens(
    trainer: L.Trainer, pl_module: L.LightningModule
) -> tuple[CausalLM, TokenFile]:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(pl_module, CausalLM) or not isinstance(data, TextData):
        raise RecipeError(
            f"SampleText: expected a CausalLM on TextData, got {type(pl_module).__name__} on "
            f"{type(data).__name__}. Leave it out."
        )
    assert data.tokens is not None, "the data is open"
    return pl_module, data.tokens
