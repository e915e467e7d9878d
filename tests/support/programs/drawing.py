"""What a program may hold, and how one is drawn from a seed.

    parts    linear, norm, a 0-d and an empty parameter, another dtype, tied to an earlier, frozen,
             the very module of an earlier unit
    calls    each child 0 to 3 times in any order; recomputed in both ways, under no_grad, detached,
             changed in place, one after the other on the same input; left out of some
             micro-batches, or on some ranks
    outputs  a tensor, a tuple, a dict, or None
    setup    stages, dtypes, replicas, shards on the host, from the meta device, a gradient scaler,
             averaged weights, hooks that edit gradients, one or two optimizers
    steps    micro-batches with and without communication, by context or by mode, in flight
             together, one or two backwards or a gradient penalty, forwards for evaluation, both
             ways to clear gradients, clipping, an overflow
    events   between micro-batches and between steps: see MICRO_BATCH_EVENTS and STEP_EVENTS

What the core refuses by name (docs/limits.md) is not drawn: a unit that takes part in the loss on
some ranks only, for one.
"""

import random
from dataclasses import dataclass

PARTS = ("linear", "linear", "norm", "scale", "empty", "double", "tied", "frozen", "shared")
HOWS = ("plain", "plain", "plain", "recomputed", "reentrant", "no_grad", "detached", "in place")
OUTPUTS = ("tensor", "tensor", "tuple", "dict", "none")
WHENS = (
    *(("always",),) * 7,
    ("always", "in every other micro-batch"),
    *(("always", "in every other micro-batch", "on every other rank"),) * 2,
)
STAGES = ("zero3", "zero3", "zero2", "kept until the backward", "default", "mixed")
OPTIMIZERS = ("sgd", "adamw", "fused adamw", "rmsprop")
EVALUATIONS = ("none",) * 6 + ("no_grad", "inference_mode")
QUIET_EVENTS = ("unshard", "reshard", "an inner call", "an exception", "copy")
MICRO_BATCH_EVENTS = (*QUIET_EVENTS, "write", "clear", "zero")
STEP_EVENTS = (
    *("state dict", "whole state dict", "optimizer's state dict", "whole optimizer's state dict"),
    *("copy", "go on with a copy", "freeze", "write"),
)


@dataclass(frozen=True)
class Call:
    """One call of a child: its number, how, and when."""

    child: int
    how: str
    when: str = "always"  # always | in every other micro-batch | on every other rank


@dataclass(frozen=True)
class Part:
    """A module; one with children is a group that calls them."""

    kind: str
    is_unit: bool
    output: str = "tensor"
    children: tuple["Part", ...] = ()
    calls: tuple[Call, ...] = ()
    is_compiled: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """Forward and backward; ``num_backwards`` of two halves of the loss."""

    syncs: bool
    num_backwards: int
    evaluates: str = "none"
    has_penalty: bool = False
    event: str = "nothing"  # before it


@dataclass(frozen=True)
class Step:
    """Micro-batches, of which the last one communicates in any case, and an optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    sets_to_none: bool
    event: str = "nothing"  # after it
    mode: str = "no_sync"  # no_sync | separate | local
    in_flight: bool = False  # all forwards first
    clears_module: bool = False
    max_norm: float | None = None
    overflows: bool = False


@dataclass(frozen=True)
class Setup:
    """How the model is sharded, and what trains it."""

    optimizer: str = "sgd"
    num_optimizers: int = 1
    stage: str = "zero3"
    dtype: str = "float32"
    has_replicas: bool = False
    is_offloaded: bool = False
    is_meta: bool = False
    scales: bool = False
    averages: bool = False
    edits: bool = False
    optimizer_first: bool = False
    input_needs_grad: bool = False


@dataclass(frozen=True)
class Program:
    root: Part
    steps: tuple[Step, ...]
    setup: Setup = Setup()


def draw_program(seed: int) -> Program:
    """The same program for the same seed, on every machine."""
    draw = random.Random(seed)
    whens = draw.choice(WHENS)
    has_penalties = draw.random() < 0.15
    is_conditional = len(whens) > 1
    hows = set(HOWS)
    if has_penalties:
        hows -= {"reentrant"}  # torch refuses it
    if "on every other rank" in whens:
        hows -= {"recomputed", "reentrant"}  # in there, ranks use the same parameters
    return Program(
        root=_Tree(draw, tuple(how for how in HOWS if how in hows), whens).group(depth=0),
        steps=tuple(_draw_step(draw, has_penalties) for _ in range(draw.randint(1, 3))),
        setup=Setup(
            optimizer=draw.choice(OPTIMIZERS),
            num_optimizers=draw.choice((1, 1, 1, 2)),
            stage=draw.choice(STAGES),
            dtype=draw.choice(("float32",) * 6 + ("bfloat16", "float16")),
            has_replicas=draw.random() < 0.25,
            is_offloaded=draw.random() < 0.15,
            is_meta=draw.random() < 0.15,
            scales=draw.random() < 0.2,
            averages=draw.random() < 0.15,
            edits=draw.random() < 0.15,
            optimizer_first=draw.random() < 0.3,
            # So every rank has a loss with a graph, whatever it leaves out.
            input_needs_grad=is_conditional or has_penalties or draw.random() < 0.2,
        ),
    )


@dataclass(frozen=True)
class _Tree:
    draw: random.Random
    hows: tuple[str, ...]
    whens: tuple[str, ...]

    def group(self, depth: int) -> Part:
        draw = self.draw
        children = tuple(
            self.group(depth + 1) if depth < 2 and draw.random() < 0.4 else self._leaf()
            for _ in range(draw.randint(1, 4))
        )
        numbers = [
            child for child in range(len(children)) for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))
        ]
        draw.shuffle(numbers)
        calls = tuple(
            Call(number, draw.choice(self.hows), self._when(children[number])) for number in numbers
        )
        output = "tensor" if depth == 0 else draw.choice(OUTPUTS)
        return Part("group", depth == 0 or draw.random() < 0.5, output, children, calls)

    def _leaf(self) -> Part:
        draw = self.draw
        kind = draw.choice(PARTS)
        return Part(kind, draw.random() < 0.4, is_compiled=draw.random() < 0.01)

    def _when(self, child: Part) -> str:
        when = self.draw.choice(self.whens)
        # Ranks agree on each unit that is called.
        may_differ = not child.is_unit and child.kind not in ("group", "shared")
        return when if may_differ or when != "on every other rank" else "always"


def _draw_step(draw: random.Random, has_penalties: bool) -> Step:
    in_flight = draw.random() < 0.15
    events = QUIET_EVENTS if in_flight else MICRO_BATCH_EVENTS
    return Step(
        micro_batches=tuple(
            MicroBatch(
                syncs,
                num_backwards=draw.choice((1, 1, 2)),
                evaluates=draw.choice(EVALUATIONS),
                has_penalty=has_penalties and draw.random() < 0.5,
                event=draw.choice(events) if draw.random() < 0.2 else "nothing",
            )
            for syncs in [draw.random() < 0.3 for _ in range(draw.choice((0, 0, 1, 2)))] + [True]
        ),
        sets_to_none=draw.random() < 0.7,
        event=draw.choice(STEP_EVENTS) if draw.random() < 0.5 else "nothing",
        mode=draw.choice(("no_sync",) * 6 + ("separate", "local")),
        in_flight=in_flight,
        clears_module=draw.random() < 0.3,
        max_norm=draw.choice((None, None, 0.05)),
        overflows=draw.random() < 0.15,
    )
