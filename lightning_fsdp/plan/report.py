"""A plan as a table for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.search import Search
from lightning_fsdp.harness.tables import markdown_table
from lightning_fsdp.plan.dry_run import OWNERS, PHASES, Plan, Run

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}


def format_plan(name: str, plan: Plan) -> str:
    """Bytes by owner and phase, each at the phase's peak, with a summary above."""
    run = plan.run
    head = ["owner", *(f"{phase}, peak" for phase in PHASES), "most at any time"]
    body = []
    for owner in OWNERS:
        most = max(plan.phases[phase].most[owner] for phase in PHASES)
        cells = [plan.phases[phase].peak[owner] for phase in PHASES]
        body.append([owner, *(format_bytes(num_bytes) for num_bytes in (*cells, most))])
    totals = [sum(plan.phases[phase].peak.values()) for phase in PHASES]
    body.append(["together", *map(format_bytes, totals), format_bytes(plan.peak_bytes)])
    size = run.shard_size or run.world_size
    over = ", state over all" if run.state_over == "all" else ""
    count = run.world_size // size
    replicas = f" ({count} replicas of {size}{over})" if size < run.world_size else ""
    ranks = f"{run.world_size} ranks{replicas}"
    more = ", activation checkpointing" if run.activation_checkpointing else ""
    more += ", all logits at once" if run.loss == "plain" else ""
    more += "" if run.units is None else f", units: {format_units(run)}"
    return (
        f"{name}: {plan.num_parameters:,} parameters; ZeRO-{run.zero_stage} on {ranks} over "
        f"{run.backend}, {run.precision}, {OPTIMIZERS[run.optimizer]}; per rank "
        f"{run.batch_size} x {run.grad_accum} sequences of {run.seq_len} tokens{more}\n\n"
        f"{markdown_table(head, body)}{_balance(plan)}"
    )


def format_units(run: Run) -> str:
    """What a unit is."""
    if isinstance(run.units, int):
        return f"of {run.units:,} parameters or more"
    return "found" if run.units is None else ", ".join(run.units)


def _balance(plan: Plan) -> str:
    """Of owners, in a sentence."""
    if plan.owners is None:
        return ""
    numels, works = ([getattr(o, what) for o in plan.owners] for what in ("numel", "work"))
    most, mean = max(numels), sum(numels) / len(numels)
    return (
        f"\n\nMuon steps each matrix whole on one rank, which has its moment. A rank has "
        f"{most:,} elements at most, and {mean:,.0f} on average; the work of a rank is at most "
        f"{max(works) * len(works) / sum(works):.2f} of the average. The table, and what fits, is "
        "of the rank that keeps most."
    )


def format_search(search: Search, device_bytes: int) -> str:
    """One sentence."""
    device = format_bytes(device_bytes)
    if search.largest is None:
        return f"Largest batch on {device}: none; {search.limit}"
    return f"Largest batch on {device}: {search.largest} per rank; not more, as {search.limit}"


def format_rest(plan: Plan | None, at_start: int | None) -> str:
    """What a process holds beside the tensors of the table, as far as it can be told."""
    if plan is None or at_start is None:
        return (
            "Tensors only. Leave room beside them for the CUDA context, buffers of NCCL, "
            "workspaces of kernels and the allocator's fragments."
        )
    return (
        f"On CPU a process holds at least {format_bytes(plan.peak_bytes + at_start)}: these "
        f"tensors, and {format_bytes(at_start)} that it has before it trains (Python, torch, "
        "Lightning, transformers; measured here). What lies free between blocks comes on top: up "
        "to a tenth for GPT-2 medium (benchmarks/results/real_size). Over gloo, ranks are planned "
        "to send to each other in pairs: those of one host that read each other's memory take less "
        "for a reduction."
    )


def as_json(
    model: str, plan: Plan | None, search: Search | None, at_start: int | None = None
) -> dict[str, Any]:
    """Everything in bytes; ``plan`` is null where nothing fits, ``search`` where none was made.

    ``process_at_start_bytes`` is what a process on CPU holds before it trains, null on CUDA.
    """
    return {
        "model": model,
        "plan": None if plan is None else plan.as_json(),
        "process_at_start_bytes": at_start,
        "search": None if search is None else {**asdict(search), "limit": search.limit},
    }
