"""Change the core in one small place after another, and show that a test notices each.

    python -m tests.mutants                            # all of them; or: make mutants
    python -m tests.mutants --only hooks.py detach     # those whose file or name says so
    python -m tests.mutants --search --only hooks.py   # which of the core's tests notices

The list is ``tests/support/mutants.toml``. Ends with 1 if a mutant survived, or its tests did not
run.
"""

import argparse
import signal
import sys
from collections import Counter

from lightning_fsdp.harness.command_line import exit_with
from lightning_fsdp.harness.tables import markdown_table
from tests.support.mutants import TIMEOUT_S, Mutant, Outcome, load_mutants, try_out

# The fastest first.
SEARCHED = [
    *("grouping", "core_guards", "core_leaf", "layout", "core_trace", "order", "core_whole_values"),
    *("core_step", "core_clip", "core_parameters", "core_freed", "core_methods", "core_recurrent"),
    *("core_nested_backward", "core_checkpoint", "core_collectives", "core_recomputation"),
    *("core_gradients", "core_narrow_reduction", "core_interleaving", "core_local_gradients"),
    *("core_threads", "core_materialize", "core_synchronisation", "core_conversion"),
    *("core_writes", "core_divergence", "core_wrong_use", "core_copies", "core_graphs"),
    *("core_grad_scaler", "core_accumulation", "core_memory", "core_precision", "core_programs"),
    *("core_hsdp_cost", "core_hsdp", "core_offload", "core_parity", "core_worst_case"),
]
SEARCH_TIMEOUT_S = 1800.0


def main(arguments: list[str] | None = None) -> int:
    """Try each, and print a table.

    Returns:
        Exit code: 0 if every mutant was noticed, or is known to change nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="of name or file")
    parser.add_argument(
        "--search", action="store_true", help="look for a test that notices, where none does so far"
    )
    args = parser.parse_args(arguments)
    chosen = [m for m in load_mutants() if any(text in f"{m.file}: {m.name}" for text in args.only)]
    if not chosen:
        parser.error(f"--only: expected a part of a mutant's name or file, got {args.only}.")
    rows, verdicts = [], Counter[str]()
    for mutant in chosen:
        verdict, says = _judge(mutant, searches=args.search)
        verdicts[verdict] += 1
        rows.append((mutant.file, mutant.name, verdict, says))
        print(": ".join(rows[-1]), file=sys.stderr, flush=True)
    print(markdown_table(("file", "mutant", "verdict", "by, or why"), rows))
    print(f"\n{len(rows)} mutants:", ", ".join(f"{n} {v}" for v, n in verdicts.items()))
    return int(verdicts["survived"] + verdicts["broken"] > 0)


def _judge(mutant: Mutant, *, searches: bool) -> tuple[str, str]:
    if mutant.changes_nothing and not searches:
        return "changes nothing", mutant.changes_nothing
    outcome = Outcome("survived", "", 0.0)
    if mutant.noticed_by:
        outcome = try_out(mutant, mutant.noticed_by, timeout_s=TIMEOUT_S)
    if outcome.verdict == "survived" and searches:
        files = [f"test_{name}.py" for name in SEARCHED]
        outcome = try_out(mutant, files, timeout_s=SEARCH_TIMEOUT_S)
    return outcome.verdict, f"{outcome.says} ({outcome.seconds:.0f} s)"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left behind then, too
    exit_with(main)
