"""Command line of the plan; see ``--help``."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fsdp.harness import network_options
from lightning_fsdp.harness.amounts import bytes_argument
from lightning_fsdp.harness.command_line import (
    CommandParser,
    at_least,
    exit_with,
    positive,
    require_extra,
    write_whole,
)
from lightning_fsdp.plan.dry_run import CHOICES, Plan, Run, dry_run, largest_batch
from lightning_fsdp.plan.models import MODELS, config_of
from lightning_fsdp.plan.process import bytes_at_start
from lightning_fsdp.plan.report import as_json, format_plan, format_rest, format_search
from lightning_fsdp.plan.suggest import suggest
from lightning_fsdp.plan.suggest_report import (
    assumptions,
    format_suggestions,
    suggestions_as_json,
)
from lightning_fsdp.simulate.network import Network

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MAX_BATCH_SIZE = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan or suggestions, write the file.

    Returns:
        Exit code: 1 if not even the smallest batch fits.
    """
    parser = make_parser()
    args = parser.parse(arguments)
    _refuse_what_does_not_go_together(parser, args)
    if args.out is not None and (why := _why_not_a_file(args.out)) is not None:
        parser.error(_no_file(args.out, why))
    require_extra("recipes", "transformers")
    try:
        config = config_of(args.model)
        answer = (_suggest if args.suggest else _plan)(args, config, _run_of(args))
    except ValueError as error:
        parser.error(re.sub(r"^\w+", _option_of, str(error)))
    except RuntimeError as error:  # of an operation that torch refuses, or that asks for values
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        parser.error(
            f"--model: expected one whose step runs in {args.precision} on tensors without data, "
            f"got {args.model} ({why}). Try another --precision, or measure it."
        )
    print(answer.text)
    if args.out is not None:
        try:
            write_whole(args.out, (json.dumps(answer.document, indent=1) + "\n").encode())
        except OSError as error:
            parser.error(_no_file(args.out, str(error.strerror)))
    return 0 if answer.fits else 1


def _run_of(args: argparse.Namespace) -> Run:
    """Options are called as the fields of a run, but for two; what is ``None`` has its default."""
    given = {**vars(args), "world_size": args.ranks, "zero_stage": args.stage}
    given["units"] = _units(args.units)
    names = [field.name for field in fields(Run) if given[field.name] is not None]
    return Run(**{name: given[name] for name in names})


def _option_of(name: re.Match[str]) -> str:
    """The option that sets a field of a run, or of its network; another word stays."""
    is_field = name[0] in {"hosts", *(field.name for field in fields(Run))}
    return f"--{name[0].replace('_', '-')}" if is_field else name[0]


class _Answer(NamedTuple):
    text: str
    document: dict[str, Any]
    fits: bool


def _plan(args: argparse.Namespace, config: PretrainedConfig, run: Run) -> _Answer:
    search = None
    if args.device_memory is None:
        plan: Plan | None = dry_run(config, run)
    else:
        cap = _MAX_BATCH_SIZE if args.max_batch_size is None else args.max_batch_size
        search, plan = largest_batch(config, run, device_bytes=args.device_memory, cap=cap)
    at_start = bytes_at_start() if args.backend == "gloo" and plan is not None else None
    parts = [] if plan is None else [format_plan(args.model, plan)]
    parts += [] if search is None else [format_search(search, args.device_memory)]
    parts.append(format_rest(plan, at_start))
    document = as_json(args.model, plan, search, at_start)
    return _Answer("\n\n".join(parts), document, plan is not None)


def _units(words: list[str] | None) -> tuple[str, ...] | int | None:
    if words is None:
        return None
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else tuple(words)


def _suggest(args: argparse.Namespace, config: PretrainedConfig, run: Run) -> _Answer:
    network = Network(world_size=args.ranks, **network_options.links_of(args))
    speed, device_bytes = 1e12 * args.tflops, args.device_memory
    found = suggest(config, run, network=network, flops_per_s=speed, device_bytes=device_bytes)
    assumed = assumptions(network, speed)
    text = format_suggestions(args.model, run, found, device_bytes, assumed)
    document = suggestions_as_json(args.model, found, assumed)
    return _Answer(text, document, bool(found.fitting))


def _refuse_what_does_not_go_together(parser: CommandParser, args: argparse.Namespace) -> None:
    changed = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    given = {f"--{name.replace('_', '-')}" for name in changed}
    if args.suggest:
        if lacking := [option for option in _OF_SUGGEST_REQUIRED if option not in given]:
            parser.error(f"--suggest: expected {' and '.join(lacking)} with it. Add them.")
        for option in _THAT_SUGGEST_TRIES:
            if option in given:
                parser.error(f"{option}: not with --suggest, which tries several. Leave it out.")
        network_options.refuse_halves(parser, args)
        return
    for option in _OF_SUGGEST:
        if option in given:
            parser.error(f"{option}: expected --suggest with it, as it is about time")
    if args.batch_size is not None and args.device_memory is not None:
        parser.error(
            "--batch-size: not with --device-memory, which looks for the largest, "
            "unless with --suggest. Leave one out"
        )
    if args.max_batch_size is not None and args.device_memory is None:
        parser.error("--max-batch-size: expected --device-memory with it, as it ends a search")


def _why_not_a_file(path: Path) -> str | None:
    """What keeps a path from being written; creates nothing. Missing folders are no hindrance."""
    try:
        if path.is_dir():
            return "a folder"
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        if nearest != path and not nearest.is_dir():
            return f"{str(nearest)!r} is no folder"
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        return error.strerror
    return None if os.access(nearest, os.W_OK) else f"no leave to write {str(nearest)!r}"


def _no_file(path: Path, why: str) -> str:
    return f"--out: expected a file to write, got {str(path)!r} ({why}). Name another."


def make_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        "lightning_fsdp.plan",
        "What a rank holds in a training step, by owner and phase; nothing is allocated and no "
        "other rank is needed.",
        examples=[
            "--model gpt2-xl --ranks 8 --stage 3 --device-memory 80GB",
            (
                "--suggest --model FOLDER --ranks 64 --batch-size 8 --device-memory 80GB "
                "--tflops 300 --hosts 8 --bandwidth 400 --host-bandwidth 50"
            ),
        ],
        old={"--world": "--ranks", "--json": "--out"},
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"what is trained: one of {', '.join(MODELS)}; or a folder with a config.json",
    )
    parser.add_argument("--ranks", type=at_least(1), required=True, help="processes of the run")
    parser.add_argument(
        "--shard-size",
        type=at_least(1),
        metavar="RANKS",
        help="ranks that hold one copy of the model together (default: all)",
    )
    parser.add_argument(
        "--units",
        nargs="+",
        metavar="CLASS",
        help="classes whose modules are gathered one at a time, or the smallest number of "
        "parameters of a unit (default: blocks, embeddings and head are found)",
    )
    parser.add_argument(
        "--stage", type=int, choices=(2, 3), help=f"stage of ZeRO (default: {Run.zero_stage})"
    )
    parser.add_argument(
        "--precision",
        choices=CHOICES["precision"],
        default=Run.precision,
        help="precision of the Trainer; of 16-mixed plan bf16-mixed, which takes the same bytes",
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        help=f"sequences in a micro-batch of one rank (default: {Run.batch_size})",
    )
    parser.add_argument(
        "--device-memory",
        type=bytes_argument,
        metavar="AMOUNT",
        help="memory of a device, such as 80GB; the largest batch that fits is searched "
        "(default: none, no search)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=at_least(1),
        metavar="CAP",
        help=f"most sequences to try with --device-memory (default: {_MAX_BATCH_SIZE})",
    )
    parser.add_argument(
        "--seq-len", type=at_least(1), default=Run.seq_len, help="tokens per sequence"
    )
    parser.add_argument(
        "--grad-accum", type=at_least(1), default=1, help="micro-batches in an optimizer step"
    )
    parser.add_argument(
        "--state-over",
        choices=CHOICES["state_over"],
        default=Run.state_over,
        help="ranks that share the optimizer's state, with --shard-size; all: each rank also "
        "keeps the part of the weights that its replica gathers from",
    )
    parser.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="recompute the blocks in the backward",
    )
    parser.add_argument(
        "--optimizer",
        choices=CHOICES["optimizer"],
        default=Run.optimizer,
        help="optimizer of the run; muon: for the matrices of the blocks, AdamW for the rest",
    )
    parser.add_argument(
        "--adapters",
        metavar="FOLDER",
        help="folder with an adapter_config.json of peft: its adapters are trained, the model is "
        "frozen and in bf16 (default: the model is trained)",
    )
    parser.add_argument(
        "--loss",
        choices=CHOICES["loss"],
        default=Run.loss,
        help="loss of the run; chunked: logits of few positions at a time; plain: "
        "all of them, in fp32",
    )
    parser.add_argument(
        "--backend",
        choices=CHOICES["backend"],
        default=Run.backend,
        help="backend of the process group",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON file with everything that is shown (default: not written)",
    )
    suggesting = parser.add_argument_group("which settings are worth trying")
    for option, takes in _OF_SUGGEST.items():
        suggesting.add_argument(option, **takes)
    return parser


_OF_SUGGEST: dict[str, dict[str, Any]] = {
    "--suggest": {
        "action": "store_true",
        "help": "rank settings by predicted speed, of those that fit on --device-memory; a rank "
        "takes --batch-size times --grad-accum sequences in a step",
    },
    "--tflops": {
        "type": positive,
        "help": "speed of a rank in training, in 10^12 FLOP/s (default: none, --suggest needs it)",
    },
    **network_options.OPTIONS,
    "--bandwidth": {
        "type": positive,
        "help": "gigabytes per second of a rank's link (default: none, --suggest needs it)",
    },
}
_THAT_SUGGEST_TRIES = (
    *("--stage", "--shard-size", "--state-over", "--units"),
    *("--activation-checkpointing", "--max-batch-size"),
)
_OF_SUGGEST_REQUIRED = ("--device-memory", "--tflops", "--bandwidth")


if __name__ == "__main__":
    exit_with(main)
