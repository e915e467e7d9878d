"""Tensors that are stepped in blocks: a fused weight as q, k and v, or head by head.

A group of an optimizer over whole tensors may say ``"blocks": [(512, 512), (128, 512)]`` of each of
its parameters, or ``"blocks": {"*.qkv.weight": [...]}`` of those with such names. Blocks lie one
after another along one dimension, and have all of the others:

    [ q ]                       shapes (512, 512), (128, 512), (128, 512) of (768, 512)
    [ k ]   or   [ q | k | v ]  shapes (768, 768) three times of (768, 2304)
    [ v ]

State of a block that has its shape is kept as that of the whole, so that it is the same as without
blocks; other state is under ``"blocks"``, one dict each.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCKS_GROUP = "blocks"
"""An option of a parameter group, and the name of what is not of the whole in the state."""


class Blocks(NamedTuple):
    """Their shapes, and along which dimension of the whole they lie one after another."""

    shapes: list[tuple[int, ...]]
    dim: int


def blocks_in(group: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Blocks | None:
    """Of a parameter, as its group says; ``None`` if it says nothing.

    Raises:
        ValueError: The shapes are not those of blocks of the parameter.
    """
    said = group.get(BLOCKS_GROUP)
    if isinstance(said, Mapping):
        named = (value for key, value in said.items() if fnmatch.fnmatchcase(name, key))
        said = next(named, None)
    if said is None:
        return None
    shapes = [tuple(each) for each in said]
    for dim, whole in enumerate(shape):
        sizes = [size for each in shapes for size in each[dim : dim + 1]]
        fitting = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
        if shapes == fitting and sum(sizes) == whole:
            return Blocks(shapes, dim)
    raise ValueError(
        f"blocks of {name!r}: expected shapes that lie one after another along one dimension of "
        f"{shape}, got {shapes}. Correct the group's 'blocks', or leave the parameter to "
        "another group."
    )


def check_names(group: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that ``"blocks"`` by names names parameters of its group.

    Raises:
        ValueError: A pattern fits none of the names.
    """
    said = group.get(BLOCKS_GROUP)
    for pattern in said if isinstance(said, Mapping) else ():
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"blocks of {pattern!r}: expected the name of a parameter of the group, or a "
                f"pattern of some, got none of {', '.join(names)}. Correct the group's 'blocks'."
            )


def blocks_of(whole: Tensor, blocks: Blocks | None) -> Sequence[Tensor]:
    """The blocks, sharing memory with the whole; the whole itself if there are none."""
    if blocks is None:
        return [whole]
    return torch.split(whole, [shape[blocks.dim] for shape in blocks.shapes], blocks.dim)


def cut_state(
    values: Mapping[str, Any], shape: tuple[int, ...], blocks: Blocks
) -> list[dict[str, Any]]:
    """State of each block.

    Args:
        values: Of the whole.
        shape: Of the whole.
        blocks: Of the whole.
    """
    of_blocks = [dict(each) for each in values.get(BLOCKS_GROUP, [{}] * len(blocks.shapes))]
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape == shape:
            for each, block in zip(of_blocks, blocks_of(value, blocks), strict=True):
                each[name] = block
        elif name != BLOCKS_GROUP:
            for each in of_blocks:
                each[name] = value.clone() if isinstance(value, Tensor) else value
    return of_blocks


def joined_state(of_blocks: Sequence[Mapping[str, Any]], blocks: Blocks) -> dict[str, Any]:
    """State of the whole.

    Args:
        of_blocks: Of each block; empty, of those that were not stepped.
        blocks: Of the whole.
    """
    values: dict[str, Any] = {}
    apart = [dict(each) for each in of_blocks]
    for name in of_blocks[0]:
        if [getattr(each.get(name), "shape", None) for each in of_blocks] == blocks.shapes:
            values[name] = torch.cat([each[name] for each in of_blocks], blocks.dim)
            for each in apart:
                del each[name]
    if any(apart):
        values[BLOCKS_GROUP] = apart
    return values
