"""Every command and sub-command: what its help says, earlier spellings, and what --help needs."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fsdp.bench import options
from lightning_fsdp.compare import __main__ as compare
from lightning_fsdp.convert import __main__ as convert
from lightning_fsdp.harness.command_line import at_least, not_negative, positive
from lightning_fsdp.plan import __main__ as plan

ROOT = Path(__file__).parent.parent
PACKAGED = {
    "lightning_fsdp.bench": options.overview,
    **{f"lightning_fsdp.bench {name}": make for name, make in options.PARSERS.items()},
    "lightning_fsdp.compare": compare.make_parser,
    "lightning_fsdp.convert": convert.make_parser,
    "lightning_fsdp.plan": plan.make_parser,
}
WORKERS = {"benchmarks.hosts_ranks"}  # started by another command alone


def _benchmarks():
    """Each command of ``benchmarks/``, and its module."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        if 'if __name__ == "__main__"' in path.read_text():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if module not in WORKERS:
                yield module.removesuffix(".__main__"), module


PARSERS = {
    **PACKAGED,
    **{command: importlib.import_module(module).make_parser for command, module in _benchmarks()},
}


def test_no_command_is_left_out():
    found = {path.parent.name for path in ROOT.glob("lightning_fsdp/**/__main__.py")}
    assert found == {command.split()[0].partition(".")[2] for command in PACKAGED}


@pytest.mark.parametrize("command", PARSERS)
def test_each_option_says_what_it_takes_and_its_default_or_that_it_is_required(command):
    parser = PARSERS[command]()
    for action in parser._actions[1:]:  # but -h
        if action.help == argparse.SUPPRESS:  # of processes that the command starts itself
            continue
        says = parser._get_formatter()._expand_help(action)
        name = f"{command} {action.dest}: {says}"
        assert re.search(r"default: \S|required", says), name
        assert "None" not in says, name
        assert action.help, name
        for choice in action.choices or ():
            assert re.search(rf"(?<![\w-]){choice}(?![\w-])", says), name


@pytest.mark.parametrize("command", PARSERS)
def test_the_help_of_an_option_is_a_phrase_that_stands_alone(command):
    for action in PARSERS[command]()._actions[1:]:  # but -h
        if action.help != argparse.SUPPRESS:
            says = action.help.partition(" (")[0]
            assert len(says.split()) > 2, f"{command} {action.dest}: {says}"
            begins = re.match(r"(of|to|that|such|so|with|where|in|on|as|for|from|before) ", says)
            assert begins is None, f"{command} {action.dest}: {says}"


@pytest.mark.parametrize("command", PARSERS)
def test_a_help_ends_with_two_examples_whose_options_parse(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS[command]()
    title, *lines = parser.format_help().splitlines()[-3:]
    assert title == "examples:"
    for line in lines:
        assert line.startswith(f"  {parser.prog} ")
        given = shlex.split(line.removeprefix(f"  {parser.prog}"))
        assert given
        if command == "lightning_fsdp.bench":
            options.PARSERS[given[0]]().parse(given[1:])
        else:
            parser.parse(given)


@pytest.mark.parametrize("command", PARSERS)
def test_the_same_thing_has_one_name_everywhere(command):
    parser = PARSERS[command]()
    found = {option for action in parser._actions for option in action.option_strings}
    other = {"--nproc", "--world", "--world-size", "--world-sizes", "--accelerator", "--json"}
    other |= {"--batch", "--seq", "--folder"}
    assert not found & other
    assert set(parser.old).isdisjoint(found)
    assert set(parser.old.values()) <= found


SEARCH = ["--device-memory", "1GB", "--stages", "3"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([], ["run"]),
        (
            ["--nproc=4", "--accelerator", "cpu", "--batch-sizes", "2", "4", "--out", "runs/x"],
            ["run", "--ranks", "4", "--batch-sizes", "2", "4", "--out", "runs/x"],
        ),
        (
            ["--engines", "scratch", "--simulate-world", "8", "64", "--latency", "3"],
            ["scaling", "--engines", "scratch", "--ranks", "8", "64", "--latency", "3"],
        ),
        (
            ["--largest-batch=8", "--nproc", "3", *SEARCH],
            ["largest-batch", "--max-batch-size", "8", "--ranks", "3", *SEARCH],
        ),
    ],
)
def test_a_benchmark_is_also_chosen_as_it_was_before_there_were_sub_commands(old, new):
    (old_name, old_args), (new_name, new_args) = options.parse(old), options.parse(new)
    assert old_name == new_name == new[0]
    assert old_args == new_args


SHOW_QUARTILES = [
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "quantiles(" in path.read_text()
]


@pytest.mark.parametrize("name", SHOW_QUARTILES)
def test_a_benchmark_that_shows_quartiles_measures_twice_at_least(name):
    parser = PARSERS[f"benchmarks.{name}"]()
    option = "--steps" if "--steps" in parser._option_string_actions else "--rounds"
    with pytest.raises(SystemExit):
        parser.parse([option, "1"])
    assert getattr(parser.parse([option, "2"]), option.lstrip("-")) == 2


def test_no_command_writes_where_another_does():
    made = [*PACKAGED.values(), PARSERS["benchmarks.optimizer"]]
    folders = [make().get_default("out") for make in made]
    folders = [folder for folder in folders if folder is not None]
    assert len(folders) == 5
    assert len(set(folders)) == 5, folders


def test_other_commands_read_earlier_spellings():
    for make, old, new in (
        (compare.make_parser, ["--world-sizes", "1", "2"], ["--ranks", "1", "2"]),
        (
            PARSERS["benchmarks.core_step"],
            ["--batch", "2", "--seq=8", "--nproc", "4"],
            ["--batch-size", "2", "--seq-len", "8", "--ranks", "4"],
        ),
        (
            PARSERS["benchmarks.exact_counters"],
            ["--world-sizes", "8", "64"],
            ["--ranks", "8", "64"],
        ),
        (PARSERS["benchmarks.checkpoint_speed"], ["--folder", "/x"], ["--scratch", "/x"]),
        (
            plan.make_parser,
            ["--model", "gpt2-xl", "--world=8", "--json", "plan.json"],
            ["--model", "gpt2-xl", "--ranks", "8", "--out", "plan.json"],
        ),
    ):
        assert make().parse(old) == make().parse(new)


def test_what_is_no_command_is_named_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        options.parse(["scale"])
    said = capsys.readouterr().err
    assert "invalid choice: 'scale'" in said
    assert all(name in said for name in options.PARSERS)


@pytest.mark.parametrize(
    ("convert", "text", "message"),
    [
        (at_least(2), "1", "expected 2 or more, got '1'"),
        (at_least(0), "some", "expected 0 or more, got 'some'"),
        (positive, "0", "expected more than 0, got '0'"),
        (positive, "nan", "expected more than 0, got 'nan'"),
        (positive, "inf", "expected more than 0, got 'inf'"),
        (not_negative, "inf", "expected 0 or more, got 'inf'"),
        (at_least(1), "2147483648", "expected at most 2147483647, got '2147483648'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(convert, text, message):
    with pytest.raises(Exception, match=re.escape(message)):
        convert(text)


WITHOUT_EXTRAS = """
import importlib, sys
extras, *commands = sys.argv[1:]
sys.modules.update(dict.fromkeys(extras.split()))
for command in commands:
    module, *rest = command.split()
    try:
        importlib.import_module(f"{module}.__main__").main([*rest, "--help"])
    except SystemExit as ended:
        assert ended.code == 0, command
"""
# And what takes seconds to import.
EXTRAS = "psutil pydantic matplotlib tensorboard tokenizers transformers lightning torchmetrics"


def test_help_needs_no_extra_and_waits_for_no_lightning():
    commands = list(PACKAGED)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, EXTRAS, *commands],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples:") == len(commands)
