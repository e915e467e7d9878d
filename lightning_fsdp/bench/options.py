"""The sub-commands of the benchmarks, the options of each, and what cannot be combined.

Nothing that only a benchmark needs is imported here, so that every ``--help`` works without it.
Before there were sub-commands, options chose what was done; those calls are read as well.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_fsdp.bench.arms import ENGINES
from lightning_fsdp.harness import network_options
from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import CommandParser, at_least, folder_argument, positive
from lightning_fsdp.simulate.network import networks_of

_COMMAND = "lightning_fsdp.bench"
_OLD = {"--accelerator": "--device", "--nproc": "--ranks"}
_OLD_CHOICE = {"--simulate-world": "scaling", "--largest-batch": "largest-batch"}

Options = dict[str, dict[str, Any]]
"""What ``add_argument`` takes, by option."""


class _Command(NamedTuple):
    says: str
    examples: Sequence[str]
    options: Options
    old: dict[str, str] | None = None


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Read and check the options; ends the process where one is wrong, and names it.

    Returns:
        The sub-command; and what was given, for ``scaling`` with the networks that it is about.
    """
    name, options = _split(arguments)
    parser = PARSERS[name]()
    args = parser.parse(options)
    _refuse_what_cannot_run(parser, args)
    if name == "scaling":
        network_options.refuse_halves(parser, args)
        try:
            args.networks = networks_of(args.ranks, **network_options.links_of(args))
        except ValueError as error:
            parser.error(f"--ranks, --hosts: {error}")
    return name, args


def _split(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The sub-command and its options."""
    first = next(iter(arguments), "")
    if not first.startswith("-") or first in ("-h", "--help"):
        return str(overview().parse(arguments[:1]).command), arguments[1:]
    given = {word.partition("=")[0] for word in arguments}
    return next((_OLD_CHOICE[old] for old in _OLD_CHOICE if old in given), "run"), arguments


def _refuse_what_cannot_run(parser: CommandParser, args: argparse.Namespace) -> None:
    given = vars(args).get  # the sub-command may not have an option
    ranks, shard_size, warmup = given("ranks"), given("shard_size"), given("warmup", 0)
    on_cuda, num_devices = given("device") == "cuda", torch.cuda.device_count()
    num_wanted = ranks if isinstance(ranks, int) else 1
    num_sharing = ranks if isinstance(ranks, list) else [num_wanted]
    if given("precision") == "16-mixed" and not on_cuda:
        instead = "on CPU Lightning trains in bf16-mixed instead"
        parser.error(f"--precision 16-mixed: expected --device cuda with it: {instead}")
    if on_cuda and num_devices < num_wanted:
        got = f"so {num_wanted}, got {num_devices}. Lower --ranks, or leave it at --device cpu"
        parser.error(f"--device cuda: expected a CUDA device per rank, {got}")
    if shard_size and any(num_ranks % shard_size for num_ranks in num_sharing):
        parser.error(f"--shard-size: expected a divisor of --ranks {ranks}, got {shard_size}")
    if given("snapshot") and (warmup < 1 or not on_cuda):
        expected = "expected --device cuda and --warmup of at least 1"
        got = f"got {args.device} and {warmup}"
        says = "records CUDA's memory in the last warm-up step"
        parser.error(f"--snapshot {says}: {expected}, {got}")
    if given("device_memory", "all") is None and not on_cuda:
        parser.error("--device-memory: expected an amount of memory, or --device cuda")


def overview() -> CommandParser:
    """What there is: one positional, the sub-command."""
    says = "\n".join(f"  {name:15} {command.says}" for name, command in _COMMANDS.items())
    parser = CommandParser(
        _COMMAND,
        f"Benchmarks of the engines; each command has a --help of its own.\n\n{says}",
        examples=["run --engines scratch fsdp2 --stages 3 --batch-sizes 2 4", "plot runs/bench"],
    )
    parser.add_argument(
        "command", nargs="?", choices=[*PARSERS], default="run", metavar="NAME", help="what to do"
    )
    return parser


def _make(name: str) -> CommandParser:
    says, examples, options, old = _COMMANDS[name]
    parser = CommandParser(f"{_COMMAND} {name}", says, examples=examples, old=old)
    network = parser.add_argument_group("the network (see network.py for its model)")
    for option, takes in options.items():
        (network if option in _NETWORK else parser).add_argument(option, **takes)
    return parser


def _find_recipes() -> dict[str, Path]:
    # Where they lie; to import them is for those above this package.
    found = importlib.util.find_spec("recipes")
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


_RECIPES = _find_recipes()


def _recipe(name: str) -> Path:
    """The YAML file of a recipe, by its name or as itself."""
    if not _RECIPES:
        raise argparse.ArgumentTypeError(
            "expected a checkout, whose recipes are trained, got an installed package alone. "
            "Run it in a checkout, after: pip install 'lightning-fsdp[bench]'"
        )
    path = _RECIPES.get(name, Path(name))
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(_RECIPES)}, or a YAML file, got {name!r}"
        )
    return path


def _of(says: str, **takes: Any) -> dict[str, Any]:
    return {"help": says, **takes}


def _some(says: str, choices: Sequence[Any], **takes: Any) -> dict[str, Any]:
    """All of them by default."""
    return _of(says, nargs="+", choices=choices, default=list(choices), **takes)


def _out(folder: str) -> Options:
    return {"--out": _of("folder for all that is written", type=folder_argument, default=folder)}


# ``_OF_...``: the help of an option, where it does not fit into the option's line.
_OF_MODELLED = "numbers of ranks to model, each 2 or more"
_OF_BATCH = "sequences in a micro-batch of one rank"
_COUNTS: dict[str, Any] = {"nargs": "+", "type": at_least(1)}
_KNOWN = ", ".join(_RECIPES) or "a checkout's recipes"
_OF_RECIPE = f"recipe to train: one of {_KNOWN}, or a YAML file; arms set strategy and batch"
_OF_SHARDS = "ranks that hold one copy of the model together (default: all)"
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_SHARD_SIZE = {"--shard-size": _of(_OF_SHARDS, type=at_least(1), metavar="RANKS")}
_TRAINING = {
    "--device": _of("device of each rank", choices=("cpu", "cuda"), default="cpu"),
    "--precision": _of("precision of the Trainer", choices=_PRECISIONS, default="32-true"),
    "--recipe": _of(_OF_RECIPE, type=_recipe, default="gpt2_zero3", dest="config", metavar="NAME"),
    "--engines": _some("engines to compare", ENGINES),
    "--stages": _some("stages of ZeRO to compare", (2, 3), type=int),
    "--grad-accum": _of("micro-batches in an optimizer step", **_COUNTS, default=[1]),
}
_SIZES = {"--batch-sizes": _of(_OF_BATCH, **_COUNTS, default=[4])}
_STEPS = {
    "--steps": _of("timed optimizer steps", type=at_least(2), default=20),
    "--warmup": _of("optimizer steps before the timed ones", type=at_least(0), default=5),
    "--timeout": _of("most seconds that a run may take", type=positive, default=300.0),
}
_REPEATS = {"--repeats": _of("times that all arms are run", type=at_least(1), default=2)}
_HOSTS = _of("hosts that the most ranks are spread over", type=at_least(1), default=1)
_NETWORK = {**network_options.OPTIONS, "--hosts": _HOSTS}
_OF_PROFILE = "write a chrome trace of each run's profiled steps"
_OF_SNAPSHOT = "write a snapshot of rank 0's CUDA memory for each run"
_OF_FLOPS = "FLOP/s of a device at its best, for the MFU (default: measured by matrix products)"
_OF_CAP = f"most {_OF_BATCH} to try"
_OF_DEVICE_MEMORY = "memory for a rank's tensors, such as 2GB; required on CPU (default: all)"
_OF_FOLDER = "folder of an earlier run (its --out), with results.json or scaling.json"

_COMMANDS = {
    "run": _Command(
        "Train one recipe under several strategies, in turns, and compare.",
        [
            "--ranks 2 --engines scratch fsdp2 --stages 3 --batch-sizes 2 4 --grad-accum 1 2",
            "--recipe qwen_zero3 --device cuda --ranks 8 --precision bf16-mixed --out runs/qwen",
        ],
        {
            "--ranks": _of("processes that train together", type=at_least(1), default=2),
            **_SHARD_SIZE, **_TRAINING, **_SIZES, **_STEPS, **_REPEATS,
            "--profile": _of(_OF_PROFILE, action="store_true"),
            "--snapshot": _of(_OF_SNAPSHOT, action="store_true"),
            "--peak-flops": _of(_OF_FLOPS, type=positive),
            **_out("runs/bench"),
        },
        _OLD,
    ),
    "scaling": _Command(
        "Run each arm in one process, among more and more ranks that are only modelled.",
        [
            "--ranks 8 64 256 1024 --bandwidth 10 --latency 3",
            "--ranks 8 64 --hosts 8 --host-bandwidth 1.25 --engines scratch --out runs/hosts",
        ],
        {
            "--ranks": _of(_OF_MODELLED, nargs="+", type=int, required=True, metavar="N"),
            **_SHARD_SIZE, **_NETWORK, **_TRAINING, **_SIZES, **_STEPS, **_REPEATS,
            **_out("runs/scaling"),
        },
        {"--accelerator": "--device", "--simulate-world": "--ranks"},
    ),
    "largest-batch": _Command(
        "Find the largest batch per rank that fits, for each arm, by trying.",
        [
            "--max-batch-size 64 --device-memory 2GB",
            "--device cuda --ranks 8 --recipe gpt2_xl_zero3 --engines scratch fsdp2",
        ],
        {
            "--ranks": _of("processes that train together", type=at_least(1), default=2),
            **_SHARD_SIZE,
            "--max-batch-size": _of(_OF_CAP, type=at_least(1), default=1024, metavar="CAP"),
            "--device-memory": _of(_OF_DEVICE_MEMORY, type=bytes_argument, metavar="AMOUNT"),
            **_TRAINING, **_STEPS, **_out("runs/largest-batch"),
        },
        {**_OLD, "--largest-batch": "--max-batch-size"},
    ),
    "plot": _Command(
        "Make report, table, pictures and TensorBoard runs of earlier results again.",
        ["runs/bench", "runs/scaling"],
        {"folder": _of(_OF_FOLDER, type=folder_argument)},
    ),
}  # fmt: skip
PARSERS = {name: partial(_make, name) for name in _COMMANDS}
