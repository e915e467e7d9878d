"""The sub-commands of the benchmarks, the options of each, and what cannot be combined.

Nothing that only a benchmark needs is imported here, so that every ``--help`` works without it.
Before there were sub-commands, options chose what was done; those calls are read as well.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_fsdp.bench.arms import ENGINES
from lightning_fsdp.bench.optimizer_outcome import ENGINES as ENGINES_WITH_OPTIMIZERS
from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import CommandParser, at_least, folder_argument, positive

_COMMAND = "lightning_fsdp.bench"
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_OLD = {"--accelerator": "--device"}
_OLD_CHOICE = {"--simulate-world": "scaling", "--largest-batch": "largest-batch"}
_MAX_BATCH_SIZE = 1024


def parse(arguments: Sequence[str]) -> tuple[str, CommandParser, argparse.Namespace]:
    """Read and check the options; ends the process where one is wrong, and names it.

    Returns:
        The sub-command; its parser, for further errors; and what was given.
    """
    name, options = _split(arguments)
    parser = PARSERS[name]()
    args = parser.parse(options)
    if hasattr(args, "precision"):
        _refuse_what_cannot_run(parser, args)
    return name, parser, args


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
    parser.add_argument("--ranks", type=at_least(1), default=2, help="processes of a sharded arm")
    _add_recipe(parser)
    _add_arms(parser)
    _add_batch_sizes(parser)
    _add_steps(parser)
    _add_repeats(parser)
    parser.add_argument(
        "--profile", action="store_true", help="write a chrome trace of each run's profiled steps"
    )
    parser.add_argument(
        "--snapshot", action="store_true", help="write CUDA's memory of rank 0, per run"
    )
    parser.add_argument(
        "--peak-flops",
        type=positive,
        help="FLOP/s of one device, for the MFU (default: what matrix products reach here)",
    )
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
    parser.add_argument(
        "--ranks", nargs="+", type=int, required=True, metavar="N", help="so many; 2 or more"
    )
    link = parser.add_argument_group("the network (see network.py for its model)")
    link.add_argument("--bandwidth", type=float, default=10.0, help="GB/s of a link")
    link.add_argument("--latency", type=float, default=10.0, help="microseconds of a message")
    link.add_argument("--hosts", type=int, default=1, help="that the most ranks are spread on")
    link.add_argument(
        "--host-bandwidth",
        type=float,
        help="GB/s of a link between hosts (default: as within one)",
    )
    _add_recipe(parser)
    _add_arms(parser)
    _add_batch_sizes(parser)
    _add_steps(parser)
    _add_repeats(parser)
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
    parser.add_argument("--ranks", type=at_least(1), default=2, help="processes of each arm")
    parser.add_argument(
        "--max-batch-size",
        type=at_least(1),
        default=_MAX_BATCH_SIZE,
        metavar="CAP",
        help="sequences per rank and micro-batch where the search ends",
    )
    parser.add_argument(
        "--device-memory",
        type=bytes_argument,
        metavar="AMOUNT",
        help="what a rank's tensors may take, such as 2GB or 512MiB; required on CPU (default: on "
        "CUDA all that the device has)",
    )
    _add_recipe(parser)
    _add_arms(parser)
    _add_steps(parser)
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


def _add_recipe(parser: CommandParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of a rank")
    parser.add_argument(
        "--precision", choices=_PRECISIONS, default="32-true", help="of the Trainer"
    )
    known = ", ".join(_recipes()) or "a checkout's recipes"
    parser.add_argument(
        "--recipe",
        dest="config",
        type=_recipe,
        default="gpt2_zero3",
        metavar="NAME",
        help=f"one of {known}, or a YAML file; strategy and batch are an arm's",
    )


def _add_engines(parser: CommandParser, engines: Sequence[str]) -> None:
    parser.add_argument(
        "--engines", nargs="+", choices=engines, default=list(engines), help="to compare"
    )


def _add_arms(parser: CommandParser) -> None:
    _add_engines(parser, ENGINES)
    parser.add_argument(
        "--stages", nargs="+", type=int, choices=(2, 3), default=[2, 3], help="of ZeRO"
    )
    parser.add_argument(
        "--grad-accum", nargs="+", type=at_least(1), default=[1], help="micro-batches per step"
    )


def _add_batch_sizes(parser: CommandParser) -> None:
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=at_least(1),
        default=[4],
        help="sequences per rank and micro-batch",
    )


def _add_steps(parser: CommandParser) -> None:
    parser.add_argument("--steps", type=at_least(2), default=20, help="timed optimizer steps")
    parser.add_argument("--warmup", type=at_least(0), default=5, help="optimizer steps before them")
    parser.add_argument("--timeout", type=positive, default=300.0, help="seconds per run")


def _add_repeats(parser: CommandParser) -> None:
    parser.add_argument("--repeats", type=at_least(1), default=2, help="rounds over all arms")


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
