"""Tensors inside of what modules take and return (``core/engine/structures.py``)."""

from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from lightning_fsdp.core.engine.structures import map_tensors, tensors_in

A, B, C = (torch.full((2,), float(value)) for value in (1, 2, 3))


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Fielded(NamedTuple):
    n_fields: Any  # torch's own tuples have an attribute of this name


class Doubled(Pair):
    """Its constructor computes, and takes other arguments than a tuple's."""

    def __new__(cls, left, right):
        return super().__new__(cls, left * 2, right)


@dataclass(frozen=True)
class Frozen:
    left: Tensor
    word: str
    later: Tensor = field(init=False)


@dataclass
class Output(ModelOutput):
    """A mapping and a dataclass, as models of transformers return."""

    left: Tensor | None = None
    right: Tensor | None = None


STRUCTURES = {
    "a tensor": (A, [A]),
    "nested": ([A, (B, {"c": C}), "word", None, 3], [A, B, C]),
    "a named tuple": (Pair(A, [B]), [A, B]),
    "an ordered mapping": (OrderedDict(b=B, a=A), [B, A]),
    "a frozen dataclass, a field unset": (Frozen(A, "word"), [A]),
    "an output of transformers": (Output(left=A, right=B), [A, B]),
    "nothing": ([(), {}, "word", None, Frozen], []),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_tensors_are_found_and_replaced_in_order(name):
    structure, expected = STRUCTURES[name]
    assert list(map(id, tensors_in(structure))) == list(map(id, expected))
    given = iter(expected)
    replaced = map_tensors(structure, lambda tensor: torch.stack([next(given), tensor]))
    assert type(replaced) is type(structure)
    for tensor, before in zip(tensors_in(replaced), expected, strict=True):
        assert torch.equal(tensor, torch.stack([before, before]))
    assert list(map(id, tensors_in(structure))) == list(map(id, expected))  # as it was


@pytest.mark.parametrize("name", STRUCTURES)
def test_where_nothing_changes_it_is_the_same_object(name):
    structure, _ = STRUCTURES[name]
    assert map_tensors(structure, lambda tensor: tensor) is structure


def test_what_is_no_tensor_is_passed_on():
    nested = map_tensors([A, ("word", {"n": 3})], lambda tensor: tensor + 1)
    assert nested[1] == ("word", {"n": 3})
    frozen = map_tensors(Frozen(A, "word"), lambda tensor: tensor + 1)
    assert frozen.word == "word"
    assert not hasattr(frozen, "later")
    output = map_tensors(Output(left=A), lambda tensor: tensor + 1)
    assert torch.equal(output.left, A + 1)
    assert output.right is None


def test_a_tuple_is_made_anew_without_its_own_constructor():
    doubled = Doubled(A, 3)
    replaced = map_tensors(doubled, lambda tensor: tensor + 1, in_place=True)
    assert type(replaced) is Doubled
    assert torch.equal(replaced.left, doubled.left + 1)
    assert replaced.right == 3
    assert map_tensors(Fielded(A), lambda tensor: 3) == Fielded(3)
    largest = map_tensors(torch.max(A, 0), lambda tensor: tensor + 1)  # torch makes its own
    assert torch.equal(largest.values, A.max() + 1)


def test_a_mapping_that_is_read_only_is_passed_on_as_it_is():
    read_only = MappingProxyType({"a": A})
    assert map_tensors(read_only, lambda tensor: tensor + 1, in_place=True) is read_only
    assert tensors_in(read_only) == [A]
