"""The sub-commands of the benchmarks, the options of each, and what cannot be combined.

Nothing that only a benchmark needs is imported here, so that every ``--help`` works without it.
Before there were sub-commands, options chose what was done; those calls are read as well.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fsdp.bench.arms import ENGINES
from lightning_fsdp.bench.optimizer_outcome import ENGINES as ENGINES_WITH_OPTIMIZERS
from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import CommandParser, at_least, folder_argument, positive
from lightning_fsdp.simulate.network import networks_of

_COMMAND = "lightning_fsdp.bench"
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_OLD = {"--accelerator": "--device"}
_OLD_CHOICE = {"--simulate-world": "scaling", "--largest-batch": "largest-batch"}
_MAX_BATCH_SIZE = 1024
_OF_BATCH = "sequences per rank and micro-batch"


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Read and check the options; ends the process where one is wrong, and names it.

    Returns:
        The sub-command; and what was given, for ``scaling`` with the networks that it is about.
    """
    name, options = _split(arguments)
    parser = PARSERS[name]()
    args = parser.parse(options)
    if hasattr(args, "precision"):
        _refuse_what_cannot_run(parser, args)
    if name == "scaling":
        try:
            args.networks = networks_of(
                args.ranks,
                bandwidth_gb_s=args.bandwidth,
                latency_us=args.latency,
                num_hosts=args.hosts,
                host_bandwidth_gb_s=args.host_bandwidth,
            )
        except ValueError as error:
            parser.error(f"--ranks: {error}")
    return name, args


def _split(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The sub-command and its options."""
    first = next(iter(arguments), "")
    if not first.startswith("-") or first in ("-h", "--help"):
        return str(overview().parse(arguments[:1]).command), arguments[1:]
    given = {word.partition("=")[0] for word in arguments}
    return next((_OLD_CHOICE[old] for old in _OLD_CHOICE if old in given), "run"), arguments


def _refuse_what_cannot_run(parser: CommandParser, args: argparse.Namespace) -> None:
    on_cuda = args.device == "cuda"
    if args.precision == "16-mixed" and not on_cuda:
        parser.error(
            "--precision 16-mixed: expected --device cuda with it: on CPU Lightning trains in "
            "bf16-mixed instead"
        )
    num_wanted = args.ranks if isinstance(args.ranks, int) else 1
    if on_cuda and torch.cuda.device_count() < num_wanted:
        parser.error(
            f"--device cuda: expected a CUDA device per rank, so {num_wanted}, got "
            f"{torch.cuda.device_count()}. Lower --ranks, or leave it at --device cpu"
        )
    shard_size = getattr(args, "shard_size", None)
    if shard_size is not None and args.ranks % shard_size:
        parser.error(f"--shard-size: expected a divisor of --ranks {args.ranks}, got {shard_size}")
    if getattr(args, "snapshot", False) and (args.warmup < 1 or not on_cuda):
        parser.error(
            "--snapshot records CUDA's memory in the last warm-up step: expected --device cuda "
            f"and --warmup of at least 1, got {args.device} and {args.warmup}"
        )
    if getattr(args, "host_bandwidth", None) is not None and args.hosts < 2:
        parser.error("--host-bandwidth: expected --hosts of 2 or more with it")
    if hasattr(args, "device_memory") and args.device_memory is None and not on_cuda:
        parser.error("--device-memory: expected an amount of memory, or --device cuda")


def overview() -> CommandParser:
    """What there is: one positional, the sub-command."""
    says = "\n".join(f"  {name:15} {parser().description}" for name, parser in PARSERS.items())
    parser = CommandParser(
        _COMMAND,
        f"Benchmarks of the engines; each command has a --help of its own.\n\n{says}",
        examples=["run --engines scratch fsdp2 --stages 3 --batch-sizes 2 4", "plot runs/bench"],
    )
    parser.add_argument(
        "command", nargs="?", choices=list(PARSERS), default="run", metavar="COMMAND", help="to run"
    )
    return parser


def _run() -> CommandParser:
    parser = CommandParser(
        f"{_COMMAND} run",
        "Train one recipe under several strategies, in turns, and compare.",
        examples=[
            "--ranks 2 --engines scratch fsdp2 --stages 3 --batch-sizes 2 4 --grad-accum 1 2",
            "--recipe qwen_zero3 --device cuda --ranks 8 --precision bf16-mixed --out runs/qwen",
        ],
        old={**_OLD, "--nproc": "--ranks"},
    )
    add = parser.add_argument
    add("--ranks", type=at_least(1), default=2, help="processes of a sharded arm")
    _add_shard_size(parser)
    _add_training(parser, has_sizes=True)
    add("--profile", action="store_true", help="write a chrome trace of each run's profiled steps")
    add("--snapshot", action="store_true", help="write CUDA's memory of rank 0, per run")
    says = "FLOP/s of one device, for the MFU (default: what matrix products reach here)"
    add("--peak-flops", type=positive, help=says)
    _add_out(parser)
    return parser


def _scaling() -> CommandParser:
    parser = CommandParser(
        f"{_COMMAND} scaling",
        "Run each arm in one process, among more and more ranks that are only modelled.",
        examples=[
            "--ranks 8 64 256 1024 --bandwidth 10 --latency 3",
            "--ranks 8 64 --hosts 8 --host-bandwidth 1.25 --engines scratch --out runs/hosts",
        ],
        old={**_OLD, "--simulate-world": "--ranks"},
    )
    says = "so many; 2 or more"
    parser.add_argument("--ranks", nargs="+", type=int, required=True, metavar="N", help=says)
    add = parser.add_argument_group("the network (see network.py for its model)").add_argument
    add("--bandwidth", type=float, default=10.0, help="GB/s of a link")
    add("--latency", type=float, default=10.0, help="microseconds of a message")
    add("--hosts", type=int, default=1, help="that the most ranks are spread on")
    says = "GB/s of a link between hosts (default: as within one)"
    add("--host-bandwidth", type=float, help=says)
    _add_training(parser, has_sizes=True)
    _add_out(parser)
    return parser


def _largest_batch() -> CommandParser:
    parser = CommandParser(
        f"{_COMMAND} largest-batch",
        "Find the largest batch per rank that fits, for each arm, by trying.",
        examples=[
            "--max-batch-size 64 --device-memory 2GB",
            "--device cuda --ranks 8 --recipe gpt2_xl_zero3 --engines scratch fsdp2",
        ],
        old={**_OLD, "--nproc": "--ranks", "--largest-batch": "--max-batch-size"},
    )
    add = parser.add_argument
    add("--ranks", type=at_least(1), default=2, help="processes of each arm")
    _add_shard_size(parser)
    cap: dict[str, Any] = {"type": at_least(1), "default": _MAX_BATCH_SIZE, "metavar": "CAP"}
    add("--max-batch-size", **cap, help=f"{_OF_BATCH} where the search ends")
    says = (
        "what a rank's tensors may take, such as 2GB or 512MiB; required on CPU (default: on CUDA "
        "all that the device has)"
    )
    add("--device-memory", type=bytes_argument, metavar="AMOUNT", help=says)
    _add_training(parser, has_sizes=False)
    _add_out(parser)
    return parser


def _optimizer() -> CommandParser:
    parser = CommandParser(
        f"{_COMMAND} optimizer",
        "Build an optimizer before and after sharding, and see what it trains.",
        examples=["--ranks 2 --steps 4", "--engines scratch --out runs/optimizer-scratch"],
        old={"--nproc": "--ranks"},
    )
    parser.add_argument("--ranks", type=at_least(2), default=2, help="processes")
    _add_engines(parser, ENGINES_WITH_OPTIMIZERS)
    parser.add_argument("--steps", type=at_least(1), default=4, help="optimizer steps")
    parser.add_argument("--timeout", type=positive, default=300.0, help="seconds per arm")
    _add_out(parser, "runs/optimizer")
    return parser


def _plot() -> CommandParser:
    parser = CommandParser(
        f"{_COMMAND} plot",
        "Make report, table, pictures and TensorBoard runs of earlier results again.",
        examples=["runs/bench", "runs/scaling"],
    )
    parser.add_argument(
        "folder",
        type=folder_argument,
        help="the --out of a benchmark, with results.json or scaling.json",
    )
    return parser


PARSERS: dict[str, Callable[[], CommandParser]] = {
    "run": _run,
    "scaling": _scaling,
    "optimizer": _optimizer,
    "largest-batch": _largest_batch,
    "plot": _plot,
}


def _add_training(parser: CommandParser, *, has_sizes: bool) -> None:
    """What is trained and for how long; ``has_sizes``: each arm at some batch sizes, repeatedly."""
    add, known = parser.add_argument, ", ".join(_recipes()) or "a checkout's recipes"
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of a rank")
    add("--precision", choices=_PRECISIONS, default="32-true", help="of the Trainer")
    recipe: dict[str, Any] = {
        "type": _recipe,
        "default": "gpt2_zero3",
        "dest": "config",
        "metavar": "NAME",
    }
    says = f"one of {known}, or a YAML file; strategy and batch are an arm's"
    add("--recipe", **recipe, help=says)
    _add_engines(parser, ENGINES)
    add("--stages", nargs="+", type=int, choices=(2, 3), default=[2, 3], help="of ZeRO")
    several: dict[str, Any] = {"nargs": "+", "type": at_least(1)}
    add("--grad-accum", **several, default=[1], help="micro-batches per step")
    if has_sizes:
        add("--batch-sizes", **several, default=[4], help=_OF_BATCH)
    add("--steps", type=at_least(2), default=20, help="timed optimizer steps")
    add("--warmup", type=at_least(0), default=5, help="optimizer steps before them")
    add("--timeout", type=positive, default=300.0, help="seconds per run")
    if has_sizes:
        add("--repeats", type=at_least(1), default=2, help="rounds over all arms")


def _add_shard_size(parser: CommandParser) -> None:
    says = "of --ranks, those that hold one model together (default: all)"
    parser.add_argument("--shard-size", type=at_least(1), metavar="RANKS", help=says)


def _add_engines(parser: CommandParser, engines: Sequence[str]) -> None:
    parser.add_argument(
        "--engines", nargs="+", choices=engines, default=list(engines), help="to compare"
    )


def _add_out(parser: CommandParser, default: str = "runs/bench") -> None:
    parser.add_argument(
        "--out", type=folder_argument, default=default, help="folder for all that is written"
    )


def _recipes() -> dict[str, Path]:
    # Where they lie; to import them is for those above this package.
    found = importlib.util.find_spec("recipes")
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _recipe(name: str) -> Path:
    """The YAML file of a recipe, by its name or as itself."""
    recipes = _recipes()
    if not recipes:
        raise argparse.ArgumentTypeError(
            "expected a checkout, whose recipes are trained, got an installed package alone. "
            "Run it in a checkout, after: pip install 'lightning-fsdp[bench]'"
        )
    if name in recipes:
        return recipes[name]
    if Path(name).is_file():
        return Path(name)
    raise argparse.ArgumentTypeError(
        f"expected one of {', '.join(recipes)}, or a YAML file, got {name!r}"
    )
