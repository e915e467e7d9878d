"""The options of the benchmarks, and what cannot be combined."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fsdp.bench.arms import ENGINES, choose_arms
from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import folder_argument

# What is only there if it was given, so that it can be refused where it would be ignored.
_DEFAULTS = {
    "nproc": 2,
    "batch_sizes": [4],
    "repeats": 2,
    "simulate_world": None,
    "bandwidth": 10.0,
    "latency": 10.0,
    "hosts": 1,
    "host_bandwidth": None,
    "largest_batch": None,
    "device_memory": None,
    "profile": False,
    "snapshot": False,
    "peak_flops": None,
}
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_MODES = {"simulate_world": "--simulate-world", "largest_batch": "--largest-batch"}
_ONLY_WITH = {
    "bandwidth": "simulate_world",
    "latency": "simulate_world",
    "hosts": "simulate_world",
    "host_bandwidth": "simulate_world",
    "device_memory": "largest_batch",
}
_NOT_WITH = {
    "nproc": ("simulate_world",),
    "profile": ("simulate_world", "largest_batch"),
    "snapshot": ("simulate_world", "largest_batch"),
    "peak_flops": ("simulate_world", "largest_batch"),
    "batch_sizes": ("largest_batch",),
    "repeats": ("largest_batch",),
}


def parse(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read and check the options; ends the process where one is wrong, and names it.

    Returns:
        The parser, for further errors; and what was given, with the ``arms`` that were chosen.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    _refuse_what_would_be_ignored(parser, set(vars(args)))
    for name, value in _DEFAULTS.items():
        vars(args).setdefault(name, value)
    try:
        args.arms = choose_arms(
            engines=args.engines,
            zero_stages=args.stages,
            batch_sizes=args.batch_sizes,
            grad_accums=args.grad_accum,
        )
    except ValueError as error:
        parser.error(str(error))
    if args.nproc < 1 or args.steps < 2 or args.repeats < 1 or args.warmup < 0:
        parser.error("--nproc and --repeats: at least 1; --steps: at least 2; --warmup: at least 0")
    if not args.timeout > 0:
        parser.error(f"--timeout: expected more than 0, got {args.timeout}")
    if args.host_bandwidth is not None and args.hosts < 2:
        parser.error("--host-bandwidth: expected --hosts of 2 or more with it")
    if args.largest_batch is not None and args.device_memory is None and args.accelerator == "cpu":
        parser.error("--largest-batch: expected --device-memory with it, or --accelerator cuda")
    if args.largest_batch is not None and args.largest_batch < 1:
        parser.error(f"--largest-batch: expected at least 1, got {args.largest_batch}")
    if args.peak_flops is not None and not args.peak_flops > 0:
        parser.error(f"--peak-flops: expected more than 0, got {args.peak_flops}")
    if args.precision == "16-mixed" and args.accelerator == "cpu":
        parser.error(
            "--precision 16-mixed: expected --accelerator cuda with it: on CPU Lightning trains in "
            "bf16-mixed instead"
        )
    num_devices = torch.cuda.device_count()
    num_wanted = args.nproc if args.simulate_world is None else 1
    if args.accelerator == "cuda" and num_devices < num_wanted:
        parser.error(
            f"--accelerator cuda: expected a CUDA device per rank, so {num_wanted}, got "
            f"{num_devices}. Lower --nproc, or leave it at --accelerator cpu"
        )
    if args.snapshot and (args.warmup < 1 or args.accelerator != "cuda"):
        parser.error(
            "--snapshot records CUDA's memory in the last warm-up step: expected --accelerator "
            f"cuda and --warmup of at least 1, got {args.accelerator} and {args.warmup}"
        )
    return parser, args


def _refuse_what_would_be_ignored(parser: argparse.ArgumentParser, given: set[str]) -> None:
    chosen = [mode for mode in _MODES if mode in given]
    if len(chosen) > 1:
        parser.error(f"{' and '.join(_MODES.values())}: expected one of them")
    for name, mode in _ONLY_WITH.items():
        if name in given and mode not in chosen:
            parser.error(f"{_option(name)}: expected {_MODES[mode]} with it")
    for name, modes in _NOT_WITH.items():
        for mode in chosen:
            if name in given and mode in modes:
                parser.error(f"{_option(name)}: cannot be combined with {_MODES[mode]}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _recipe(name: str) -> Path:
    """The YAML file of a recipe, by its name or as itself."""
    # Where they lie; to import them is for those above this package.
    found = importlib.util.find_spec("recipes")
    if found is None:
        raise argparse.ArgumentTypeError(
            "expected a checkout, whose recipes are trained, got an installed package alone. "
            "Run it in a checkout, after: pip install 'lightning-fsdp[bench]'"
        )
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    paths = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    for path in paths:
        if path.stem == name:
            return path
    if Path(name).is_file():
        return Path(name)
    known = ", ".join(path.stem for path in paths)
    raise argparse.ArgumentTypeError(f"expected one of {known}, or a YAML file, got {name!r}")


def _adder(group: Any) -> Callable[..., None]:
    """Adds options that are in the namespace only if they were given."""

    def add(option: str, says: str, **kwargs: Any) -> None:
        default = _DEFAULTS[option.removeprefix("--").replace("-", "_")]
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        if default not in (None, False):
            says += f" (default: {shown})"
        group.add_argument(option, default=argparse.SUPPRESS, help=says, **kwargs)

    return add


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_fsdp.bench",
        description="Train one recipe under several strategies, in turns, and compare. "
        "(`optimizer`: another benchmark, of optimizers built before sharding. `plot DIR`: tables "
        "and pictures of earlier results.)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = _adder(parser)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    add("--batch-sizes", "per rank", nargs="+", type=int)
    parser.add_argument("--grad-accum", nargs="+", type=int, default=[1])
    add("--nproc", "ranks", type=int)
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "cuda"), help="of a rank")
    parser.add_argument(
        "--recipe",
        dest="config",
        type=_recipe,
        default="gpt2_zero3",
        metavar="NAME",
        help="of a file in recipes/, or a YAML file; strategy and batch are those of an arm",
    )
    parser.add_argument("--precision", default="32-true", choices=_PRECISIONS)
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps")
    parser.add_argument("--warmup", type=int, default=5, help="optimizer steps before them")
    add("--repeats", "rounds over all arms", type=int)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per run")
    add("--profile", "write a chrome trace of each run's profiled steps", action="store_true")
    add(
        "--peak-flops",
        "of one device per second, for the MFU; else what matrix products reach here",
        type=float,
    )
    add("--snapshot", "CUDA memory of rank 0, per run", action="store_true")
    add = _adder(parser.add_argument_group("past this machine (see network.py for the model)"))
    add(
        "--simulate-world",
        "one real process each, among so many ranks that are only modelled",
        nargs="+",
        type=int,
        metavar="N",
    )
    add("--bandwidth", "of a link, GB/s", type=float)
    add("--latency", "of a message, us", type=float)
    add("--hosts", "that the largest N are spread on", type=int)
    add("--host-bandwidth", "of a link between hosts, GB/s; else as within one", type=float)
    add = _adder(parser.add_argument_group("the largest batch, in place of comparing"))
    add("--largest-batch", "per rank, of each arm, at most CAP", type=int, metavar="CAP")
    add(
        "--device-memory",
        "what a rank's tensors may take, such as 2GB; on CUDA, else all that the device has",
        type=bytes_argument,
        metavar="AMOUNT",
    )
    parser.add_argument("--out", type=folder_argument, default="runs/bench")
    return parser
