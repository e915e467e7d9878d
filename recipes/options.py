"""Options of the command line: a wrong one in one line with its choices, examples in the help.

jsonargparse answers a mistake with all options and a tree of types::

    error: Parser key "model":
      Does not validate against any of the Union subtypes
      ...
        Parser key "size":
          Subtypes: [typing.Literal['nano', 'small'], <class 'NoneType'>]
          ...
          Given value: huge

What a user needs of it: ``--model.size: expected one of nano, small, got 'huge'``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_fsdp.strategies.registry import NAMES
from recipes.errors import RecipeError

_COMMAND = "python -m recipes.train"
_CONFIG = "--config recipes/gpt2_zero3.yaml"
_MODELS = ("recipes.gpt2.GPT2", "recipes.qwen.Qwen")


class OptionParser(LightningArgumentParser):
    """Lightning's parser, with mistakes in one line."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with exit code 2."""
        if not self.exit_on_error:  # the parser of a class, inside of the command's
            super().error(message, ex)
        self.exit(2, f"error: {in_one_line(message)}\n")


class _Help(DefaultHelpFormatter):
    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def parser_options() -> dict[str, Any]:
    """What Lightning's command line passes to its parsers: two examples for each."""
    fit = f"fit {_CONFIG}", f"fit {_CONFIG} --data.path FOLDER --trainer.max_steps 100"
    validate = (
        f"validate {_CONFIG} --ckpt_path FILE",
        f"validate {_CONFIG} --data.path FOLDER --ckpt_path FILE",
    )

    def with_examples(*examples: str) -> dict[str, Any]:
        shown = "\n".join(["examples:", *(f"  {_COMMAND} {options}" for options in examples)])
        return {"epilog": shown, "formatter_class": _Help}

    return {
        **with_examples(fit[0], validate[0]),
        "fit": with_examples(*fit),
        "validate": with_examples(*validate),
    }


def in_one_line(message: str) -> str:
    """What jsonargparse says of a mistake, with the choices; what is not understood stays whole."""
    option = "--" + ".".join(re.findall(r'Parser key "([^"]+)"', message))
    literals = re.findall(r"Literal\[([^\]]+)\]", message)
    given = re.search(r"(?:Given value:|Got value:) *(\S.*)", message)
    missing = re.search(r"File does not exist: *'?([^'\n]+)", message)
    if option == "--config" and missing is not None:
        return _expected(option, f"one of {', '.join(_recipes())}, or another file", missing[1])
    if option == "--model" and given is not None:
        return _expected(option, f"one of {', '.join(_MODELS)}, or another class", given[1])
    if literals and given is not None:
        choices = dict.fromkeys(re.findall(r"[^\s',]+", ", ".join(literals)))
        return _expected(option, f"one of {', '.join(choices)}", given[1])
    return " ".join(message.split())


def refuse_unknown_strategy(strategy: object) -> None:
    """Refuse a name that no strategy has, before the Trainer does without the choices.

    Args:
        strategy: As the Trainer takes it.

    Raises:
        RecipeError: It is such a name.
    """
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy.lower() not in known:
        others = [name for name in known if "_" not in name]
        choices = f"one of {', '.join(NAMES)}; or one of Lightning's, such as {', '.join(others)}"
        raise RecipeError(_expected("--trainer.strategy", choices, strategy))


def _expected(option: str, what: str, got: str) -> str:
    return f"{option}: expected {what}, got {got!r}. Correct it."


def _recipes() -> list[str]:
    return [os.path.relpath(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))]
