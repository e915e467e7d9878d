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
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_fsdp.strategies.registry import NAMES
from recipes.choices import classes_of, close_to, first_unknown, of_this_project, options_of
from recipes.errors import RecipeError, is_said_first

_COMMAND = "python -m recipes.train"
_CONFIG = "--config recipes/gpt2_zero3.yaml"
_STRATEGY = "lightning.pytorch.strategies.Strategy"


class OptionParser(LightningArgumentParser):
    """Lightning's parser, with mistakes in one line."""

    subcommands: Mapping[str, LightningArgumentParser] = {}

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the parsers of the sub-commands, which know the options."""
        added = super().add_subcommands(*args, **kwargs)
        self.subcommands = added.choices
        return added

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with exit code 2."""
        if not self.exit_on_error:  # the parser of a class, inside of the command's
            super().error(message, ex)
        if (broken := _broken_config(self.args)) is not None:
            message = broken
        given = [parser for name, parser in self.subcommands.items() if name in self.args]
        known = chain.from_iterable(parser.get_defaults().keys() for parser in given or [self])
        said = f"error: {in_one_line(message, list(known))}\n"
        self.exit(2, said if is_said_first(said) else None)


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
        return {"epilog": shown, "formatter_class": _Help, "allow_abbrev": False}

    return {
        **with_examples(fit[0], validate[0]),
        "fit": with_examples(*fit),
        "validate": with_examples(*validate),
    }


def in_one_line(message: str, known: Iterable[str] = ()) -> str:
    """What jsonargparse says of a mistake, with the choices; what is not understood stays whole.

    Args:
        message: Of jsonargparse.
        known: Dotted names of the command's own options.
    """
    option = "--" + ".".join(re.findall(r'Parser key "([^"]+)"', message))
    literals = re.findall(r"Literal\[([^\]]+)\]", message)
    given = re.search(r"(?:Given value:|Got value:) *(\S.*)", message)
    missing = re.search(r"(?:File does not exist|Path is not a file): *'?([^'\n]+)", message)
    if option == "--config" and missing is not None:
        return _expected(option, [*_recipes(), "another file"], missing[1])
    if literals and given is not None:
        choices = re.findall(r"[^\s',]+", ", ".join(literals))
        return _expected(option, choices, given[1])
    simple = re.search(r"Expected an? <class '(\w+)'>\. Got value: *(\S.*)", message)
    if simple is not None:
        return f"{option}: expected {simple[1]}, got {simple[2]!r}. Correct it."
    if message.endswith(("required: fit.model", "required: validate.model")):
        cure = f"Give --config a recipe ({', '.join(_recipes())}) or another file with a model."
        return f"--model: expected one, got none. {cure}"
    unknown = _unknown_option(option, message, known) or _unknown_class(option, message)
    return unknown or _one_of_types(option, message) or " ".join(message.split())


def _one_of_types(option: str, message: str) -> str | None:
    """What to say of a value of none of the types that the innermost option takes."""
    _, is_told, innermost = message.rpartition('Parser key "')
    types = r"Expected an? (?:<class ')?(\w+(?: with \d+ elements| with form \"[^\"]+\")?)"
    expected = [name for name in re.findall(types, innermost) if name != "NoneType"]
    given = re.search(r"(?:Given value:|Got value:) *(\S.*)", innermost)
    if not (is_told and expected and given):
        return None
    return f"{option}: expected {' or '.join(expected)}, got {given[1]!r}. Correct it."


def _broken_config(args: Sequence[str]) -> str | None:
    """What to say of the first file after ``--config`` that holds no options."""
    for option, following in pairwise([*args, ""]):
        name, _, value = option.partition("=")
        path = Path(value or following)
        if name not in ("--config", "-c") or not path.is_file():
            continue
        try:
            found = yaml.safe_load(path.read_text())
        except yaml.MarkedYAMLError as error:
            line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            return f"{path}{line}: expected YAML, got: {error.problem}. Correct it."
        except (yaml.reader.ReaderError, UnicodeDecodeError) as error:
            return f"{path}: expected YAML, got: {error.reason}. Correct it."
        if not isinstance(found, dict):
            shown = " ".join(str(found).split())
            return f"{path}: expected options, such as `trainer:`, got {shown!r}. Correct it."
    return None


def _unknown_option(option: str, message: str, known: Iterable[str]) -> str | None:
    """What to say of an option that the command, or the class that ``option`` names, lacks."""
    found = re.search(
        r"unrecognized arguments: --(?P<argument>[\w.]+)"
        r"|(?:Group '(?P<group>[\w.]+)'|Subcommand '\w+') does not accept option '(?P<key>[^']+)"
        r"|Option '(?P<name>[\w.]+)' is not accepted$",
        message,
        re.MULTILINE,
    )
    if found is None:
        return None
    name = found["argument"] or found["name"] or ".".join(filter(None, found.group("group", "key")))
    within = re.findall(r"Problem with given class_path '([^']+)'", message[: found.start()])
    unknown = first_unknown(name, options_of(within[-1]) if within else known)
    if unknown is None:
        return None
    name, choices = unknown
    place = f"{option}.{name} of {within[-1]}" if within else f"--{name}"
    if not choices:
        return f"{place}: expected none, as it has no options, got {name!r}. Leave it out."
    return _expected(place, choices, name.rpartition(".")[2])


def _unknown_class(option: str, message: str) -> str | None:
    """What to say of a class that there is not, or that ``option`` does not take."""
    found = re.search(
        r"given class_path '(?P<path>[^']+)':\s+(?:module '.*' has no attribute|No module named)"
        r"|Expected a dot import path string: (?P<name>\S+)"
        r"|does not correspond to a subclass(?s:.*)Given value: (?P<other>\S+)",
        message,
    )
    if found is None:
        return None
    *_, subtypes = ["", *re.findall(r"Subtypes: \[(.*)\]", message[: found.start()])]
    known = classes_of(re.findall(r"<class '([\w.]+\.\w+)'>", subtypes))
    given = found["path"] or found["name"] or found["other"]
    own = [path for path in known if of_this_project(path)]
    choices = [*(own or known), "another class"]
    key = re.search(r"NestedArg\(key='([\w.]+)'", message)
    if found["name"] and key and not option.endswith(f".{key[1]}"):
        option = f"{option}.{key[1]}: an option of a class; {option}"
    return _expected(option, choices, given, among=known)


def known_strategy(strategy: object) -> object:
    """The strategy; a path of a class, which alone is taken for a name, as a class.

    Args:
        strategy: As it was parsed.

    Raises:
        RecipeError: It is neither such a path nor a name, of which the Trainer shows no choices.
    """
    known = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(strategy, str) or strategy.lower() in known:
        return strategy
    classes = classes_of([_STRATEGY])
    if strategy in classes:
        return Namespace(class_path=strategy, init_args={})  # type: ignore[no-untyped-call]
    others = [name for name in known if "_" not in name]
    choices = [*NAMES, *filter(of_this_project, classes), *others, "another of Lightning's"]
    raise RecipeError(_expected("--trainer.strategy", choices, strategy, among=known))


def _expected(place: str, choices: Sequence[str], got: str, *, among: Sequence[str] = ()) -> str:
    """The line with the choices, before them those, also ``among`` others, that ``got`` is like."""
    *choices, last = dict.fromkeys([*close_to(got, [*among, *choices]), *choices])
    separator = " or " if last.startswith("another") else ", " if choices else ""
    shown = f"one of {', '.join(choices)}{separator}{last}"
    return f"{place}: expected {shown}, got {got!r}. Correct it."


def _recipes() -> list[str]:
    return [os.path.relpath(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))]
