"""A smaller program that fails as well: one part less, or one part simpler, as long as it goes."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tests.support.programs.drawing import Call, MicroBatch, Part, Program, Setup, Step

_NO_BATCH = MicroBatch(syncs=True, num_backwards=1)
_SIMPLEST = (Call(0, "plain"), Part("", is_unit=False), _NO_BATCH, Step((), True), Setup())
SIMPLEST = {type(each): each for each in _SIMPLEST}
KEPT = ("child", "kind", "children", "calls", "micro_batches", "input_needs_grad")


def smaller(value: Any) -> Iterator[Any]:
    """Values with one part less, or one part simpler: what a failure may still need."""
    if not is_dataclass(value):
        return
    for each in fields(value):
        inner = getattr(value, each.name)
        if isinstance(inner, tuple):
            for index, item in enumerate(inner):
                rest = inner[:index], inner[index + 1 :]
                if each.name != "children" and not (each.name != "calls" and len(inner) == 1):
                    yield replace(value, **{each.name: (*rest[0], *rest[1])})
                for less in smaller(item):
                    yield replace(value, **{each.name: (*rest[0], less, *rest[1])})
        elif is_dataclass(inner):
            for less in smaller(inner):
                yield replace(value, **{each.name: less})
        elif each.name not in KEPT:
            simplest = getattr(SIMPLEST[type(value)], each.name)
            if inner != simplest:
                yield replace(value, **{each.name: simplest})


def shrink(program: Program, fails: Callable[[Program], bool], *, max_tries: int = 60) -> Program:
    """A program as small as steps of :func:`smaller` lead to that fails as well."""
    found_one = True
    while found_one and max_tries > 0:
        found_one = False
        for less in smaller(program):
            max_tries -= 1
            if fails(less):
                program, found_one = less, True
                break
            if max_tries <= 0:
                break
    return program
