"""The command line of the recipes.

::

    python -m recipes.train fit --config recipes/gpt2_zero3.yaml
    python -m recipes.train fit --config recipes/gpt2_zero3.yaml --data.path FOLDER
    python -m recipes.train validate --config recipes/gpt2_zero3.yaml --ckpt_path FILE

Everything in a YAML can be overridden: ``--trainer.max_steps 100 --model.optimizer.lr 3e-4``.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from typing_extensions import override

import lightning_fsdp as _strategies  # noqa: F401 (importing it registers the strategy names)
from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.harness.command_line import INTERRUPTED, folder_argument
from recipes.causal_lm import CausalLM
from recipes.data import TextData
from recipes.errors import RecipeError, find_recipe_error, is_said_first, mistakes_in
from recipes.monitor import BatchProgressBar, GracefulStop, Settings, Throughput
from recipes.options import OptionParser, known_strategy, parser_options

_REFUSALS = (ValueError, TypeError, NotImplementedError, ImportError, MisconfigurationException)


class SaveOptions(SaveConfigCallback):
    """Writes the run's options to the folder of its logger, or to the one given for all it writes.

    Without either nowhere: the folder that it was started in is not its own.
    """

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.loggers or Path(trainer.default_root_dir) != Path.cwd():
            super().setup(trainer, pl_module, stage)


class RecipeCLI(LightningCLI):
    """LightningCLI for a :class:`CausalLM` on :class:`TextData`.

    What can be found wrong is found before the Trainer starts the other ranks, and said once.
    """

    model: CausalLM
    datamodule: TextData

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate")}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the model as many tokens as the data has."""
        parser.link_arguments("data.vocab_size", "model.init_args.vocab_size")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Refuse a strategy or a checkpoint that there is not, and a seed out of range."""
        try:
            super().parse_arguments(parser, args)
        except UnicodeDecodeError as error:  # of a --config
            parser.error(str(error))
        config = self.config[self.config.subcommand]
        config.trainer.strategy = known_strategy(config.trainer.strategy)
        refuse_wrong_seed(config.seed_everything)
        refuse_wrong_checkpoint(config.get("ckpt_path"))

    @override
    def before_instantiate_classes(self) -> None:
        """For strategies, callbacks and loggers; model and data have Lightning's own before it."""
        self.parser.add_instantiator(instantiate, object)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """What the Trainer refuses before it does anything is a mistake of the user."""
        with mistakes_in("--trainer", *_REFUSALS, RuntimeError):
            trainer = super().instantiate_trainer(**kwargs)
        bar = trainer.progress_bar_callback
        if type(bar) is RichProgressBar:  # with its options; any other is the user's own
            bar.__class__ = BatchProgressBar
        return trainer

    def before_fit(self) -> None:
        """Prepare the data; refuse what cannot work."""
        self._prepare(for_training=True)

    def before_validate(self) -> None:
        """Prepare the data; refuse what cannot work."""
        self._prepare(for_training=False)

    def _prepare(self, *, for_training: bool) -> None:
        refuse_wrong_loops(self.trainer)
        refuse_conflicts(self.trainer, self.model)
        refuse_sealed_folders(self.trainer)
        with mistakes_in("--data.cache_dir", OSError):  # of files of text, errors name them
            tokens = self.datamodule.open()
        self.model.require_fitting(self.datamodule)
        self.datamodule.require_enough(self.trainer.world_size, for_training=for_training)
        rank_zero_info(
            f"Corpus: {tokens.num_documents:,} documents, {tokens.num_tokens:,} tokens of a "
            f"vocabulary of {tokens.vocab_size:,}, in {tokens.folder}"
        )


def instantiate(kind: type, *args: Any, **options: Any) -> Any:
    """Build a class that an option names; what it refuses of its own options ends the process.

    An error would be one of many that jsonargparse tells, which tries other types as well.
    """
    try:
        with mistakes_in(kind.__name__, *_REFUSALS):
            return kind(*args, **options)
    except RecipeError as mistake:
        exit_with(str(mistake))


def refuse_wrong_seed(seed: bool | int) -> None:
    """Refuse one that numpy would not take; ``True`` and ``False`` say whether there is one.

    Raises:
        RecipeError: It is out of range.
    """
    if not 0 <= seed < 2**32:
        expected = f"0 or more and less than {2**32}"
        raise RecipeError.at("--seed_everything", expected, seed, "Correct it.")


def refuse_wrong_checkpoint(path: str | None) -> None:
    """Refuse a path to nothing, and a file that cannot be read or that no run has written.

    What is elsewhere, or a word of Lightning's, is not looked at.

    Raises:
        RecipeError: It is one.
    """
    is_word = path in (None, "best", "last", "hpc") or re.match(r"registry\b|\w+://", path)
    if path is not None and not is_word and not Path(path).exists():
        expected = "a checkpoint that exists"
        raise RecipeError.at("--ckpt_path", expected, f"nothing at '{path}'", "Correct it.")
    if path is not None and Path(path).is_file():
        try:  # its structure, without values
            content = torch.load(path, map_location="meta", weights_only=True)
        except Exception as error:  # a damaged file is an error of many kinds
            got = f"'{path}' ({type(error).__name__})"
            expected, cure = "a checkpoint that torch loads", "Name a complete one."
            raise RecipeError.at("--ckpt_path", expected, got, cure) from error
        if "pytorch-lightning_version" not in (content if isinstance(content, dict) else ()):
            expected, got = "a checkpoint of a run", f"'{path}', which holds something else"
            raise RecipeError.at("--ckpt_path", expected, got, "Name one that a run has saved.")


def refuse_wrong_loops(trainer: L.Trainer) -> None:
    """Refuse numbers of batches by which the Trainer would divide, and samplers of its own.

    Raises:
        RecipeError: It is one.
    """
    for name in ("accumulate_grad_batches", "val_check_interval"):
        value = getattr(trainer, name)
        if isinstance(value, (int, float)) and value <= 0:
            least = "1 or more" if isinstance(value, int) else "more than 0"
            raise RecipeError.at(name, least, value, f"Raise --trainer.{name}.")
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        expected, cure = "none", "Leave it out, and name little text with --data.path."
        raise RecipeError.at("--trainer.overfit_batches", expected, trainer.overfit_batches, cure)  # type: ignore[attr-defined]


def refuse_conflicts(trainer: L.Trainer, model: CausalLM) -> None:
    """Refuse options that work alone and not together.

    Raises:
        RecipeError: Two options, and which of them to change.
    """
    # Only Lightning's own plugin; the strategies of lightning_fsdp bring one that can.
    clips_scaled = type(trainer.precision_plugin) is MixedPrecision and trainer.gradient_clip_val
    if clips_scaled and model.optimizer_config.fused:
        raise RecipeError(
            f"gradient_clip_val: expected none with a fused optimizer, precision "
            f"{trainer.precision} and the strategy {type(trainer.strategy).__name__}, got "
            f"{trainer.gradient_clip_val}. Add --model.optimizer.fused false, or use "
            f"--trainer.strategy scratch_fsdp."
        )


def refuse_sealed_folders(trainer: L.Trainer) -> None:
    """Refuse folders to which the run could not write what it logs and saves.

    Raises:
        RecipeError: It is one.
    """
    logs = [("--trainer.logger", each.save_dir) for each in trainer.loggers]
    savers = trainer.checkpoint_callbacks
    saves = [("--trainer.callbacks", getattr(each, "dirpath", None)) for each in savers]
    for option, folder in logs + saves:
        if folder is not None and "://" not in str(folder):
            with mistakes_in(option, ArgumentTypeError):
                folder_argument(str(folder))


_MISTAKES = (ValueError, NotImplementedError, OSError, MisconfigurationException, DamagedCheckpoint)


def main() -> None:
    """Run the command line."""
    # Lightning's own use of torch; nothing a user of the command line could change.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    try:
        RecipeCLI(
            CausalLM,
            TextData,
            subclass_mode_model=True,
            trainer_defaults={"callbacks": [Settings(), Throughput(), GracefulStop()]},
            parser_class=OptionParser,
            parser_kwargs=parser_options(),
            seed_everything_default=42,
            save_config_callback=SaveOptions,
            save_config_kwargs={"overwrite": True},  # of a run that goes on in its folder
        )
    except _MISTAKES as error:
        found = find_recipe_error(error)
        mistake = found or _told(error)
        if mistake is None:
            raise
        if found is not None and found.is_shown_elsewhere:
            sys.exit(1)
        exit_with(str(mistake))
    except KeyboardInterrupt:  # while the Trainer does not run, which ends its ranks itself
        if getattr(rank_zero_only, "rank", 0) == 0:
            sys.stderr.write("\ninterrupted; no run was going on\n")
        sys.exit(INTERRUPTED)


def exit_with(mistake: str) -> NoReturn:
    """End the process with the mistake in one line, where no other rank has said it."""
    if not is_said_first(mistake):
        sys.exit(1)
    rank = getattr(rank_zero_only, "rank", 0)  # Lightning's place for it before a Trainer
    sys.exit(f"error{f' (rank {rank})' if rank else ''}: {mistake}")


def _told(error: Exception) -> str | None:
    """What Lightning or a strategy says of its options and files, and not what fails in a run."""
    if isinstance(error, IsADirectoryError):  # of a checkpoint: all else that is read was looked at
        return (
            f"--ckpt_path: expected a file, as Lightning's own strategies read, got the folder "
            f"'{error.filename}'. Use --trainer.strategy scratch_fsdp, or make a file of it: "
            "python -m lightning_fsdp.convert FOLDER FILE --to full"
        )
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_its_own = frame.f_globals["__name__"].startswith(("lightning.", "lightning_fsdp."))
    names_a_file = isinstance(error, (OSError, DamagedCheckpoint))
    place = "" if names_a_file else "--trainer: "
    return f"{place}{' '.join(str(error).split())}" if is_its_own else None


if __name__ == "__main__":
    main()
