"""What is found in a picture of a benchmark."""

from matplotlib.text import Text

from lightning_fsdp.bench.arms import choose_arms

SMALL = {"engines": ["scratch", "fsdp2"], "batch_sizes": [1, 2], "accums": [1, 2]}
FAILURES = {
    "scratch_zero3_b2_a1": ("out of memory", "DefaultCPUAllocator: can't allocate memory"),
    "fsdp2_zero2_b1_a2": ("wrong losses", "losses differ from the reference by 0.2"),
    "ddp_b2_a2": ("timed out", "took longer than 300 s"),
}


def arms_of(**changes):
    chosen = {**SMALL, **changes}
    return choose_arms(
        engines=chosen["engines"], zero_stages=[2, 3], batch_sizes=chosen["batch_sizes"],
        grad_accums=chosen["accums"],
    )  # fmt: skip


def words(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text))
