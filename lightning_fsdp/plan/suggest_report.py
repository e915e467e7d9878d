"""Suggestions as a table for people, with what was assumed, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.tables import bullets, markdown_table
from lightning_fsdp.plan.dry_run import Run
from lightning_fsdp.plan.report import OPTIMIZERS, format_units
from lightning_fsdp.plan.suggest import Suggestion, Suggestions, worth_trying
from lightning_fsdp.simulate.network import Network

_SUGGESTED = [
    *("stage", "shard size", "state over", "units", "sequences", "recomputes"),
    *("memory", "step, s"),
    *("waits for the network, s", "tokens/s of a rank", "of one process alone"),
]


def format_suggestions(
    name: str, run: Run, found: Suggestions, device_bytes: int, assumed: Sequence[str]
) -> str:
    """A table, best first, what it takes to train so, and what is assumed."""
    device, nearest = format_bytes(device_bytes), found.nearest.plan
    total = f"{run.batch_size * run.grad_accum} x {run.seq_len}"
    head = (
        f"{name}: {nearest.num_parameters:,} parameters; {run.world_size} ranks over {run.backend},"
        f" {run.precision}, {OPTIMIZERS[run.optimizer]}; a rank takes {total} tokens in a step, "
        f"and has {device}"
    )
    if found.fitting:
        shown = worth_trying(found.fitting)
        table = markdown_table(_SUGGESTED, [_row(each) for each in shown])
        what = (
            f"{table}\n\nThe first is {_how(shown[0].plan.run)}. {len(found.fitting) - len(shown)} "
            "more fit, each beaten by one of these in both time and memory."
        )
    else:
        missing = format_bytes(nearest.peak_bytes - device_bytes)
        what = (
            f"Nothing fits. The nearest setting takes {format_bytes(nearest.peak_bytes)}, "
            f"{missing} more than there is: {_how(nearest.run)}."
        )
    return "\n\n".join([head, what, "Predicted; this is assumed:", bullets(assumed)])


def _row(suggestion: Suggestion) -> list[str]:
    run, timing = suggestion.plan.run, suggestion.timing
    return [
        *(str(run.zero_stage), str(run.shard_size or run.world_size)),
        *("all" if run.shard_size is None else run.state_over, format_units(run)),
        f"{run.batch_size} x {run.grad_accum}",
        "yes" if run.activation_checkpointing else "no",
        format_bytes(suggestion.plan.peak_bytes),
        *(f"{seconds:.3g}" for seconds in (timing.step_s, timing.waited_s)),
        *(f"{suggestion.tokens_per_s:,.0f}", f"{suggestion.share:.2f}"),
    ]


def _how(run: Run) -> str:
    size = "" if run.shard_size is None else f", shard_size={run.shard_size}"
    over = "" if run.state_over == "replica" else ', state_over="all"'
    units = f", units={list(run.units)}" if isinstance(run.units, tuple) else ""
    recomputes = ", activation checkpointing of the blocks" if run.activation_checkpointing else ""
    return (
        f"ScratchFSDPStrategy(zero_stage={run.zero_stage}{size}{over}{units}), "
        f"batches of {run.batch_size}, accumulate_grad_batches={run.grad_accum}{recomputes}"
    )


def assumptions(network: Network, flops_per_s: float) -> list[str]:
    """What a suggestion's time rests on, a sentence each."""
    speed = (
        f"A rank computes products of matrices and attention at {flops_per_s / 1e12:g} TFLOP/s, "
        "also of small batches. All other operations, the optimizer's, and reading data take no "
        "time: give the speed that training reaches, not that of the device."
    )
    units = (
        "Units that are found are blocks, embeddings, head; others are modules of the classes named"
        ", and what is left. Memory is of tensors only."
    )
    return [speed, *network.assumptions_of_links(), units]


def suggestions_as_json(name: str, found: Suggestions, assumed: Sequence[str]) -> dict[str, Any]:
    """Everything in bytes and seconds; ``suggestions`` is empty where nothing fits."""
    return {
        "model": name,
        "assumptions": list(assumed),
        "suggestions": [_suggestion_as_json(each) for each in found.fitting],
        "nearest": _suggestion_as_json(found.nearest),
    }


def _suggestion_as_json(suggestion: Suggestion) -> dict[str, Any]:
    plan = suggestion.plan
    return {
        "run": asdict(plan.run),
        "peak_bytes": plan.peak_bytes,
        "tokens_per_s": suggestion.tokens_per_s,
        "share": suggestion.share,
        **asdict(suggestion.timing),
    }
