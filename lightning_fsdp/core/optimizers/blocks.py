"""Tensors that are stepped in blocks: a fused weight as q, k and v, or head by head.

A group of an optimizer over whole tensors may have ``"blocks": [(512, 512), (128, 512)]`` for all
of its parameters, or ``"blocks": {"*.qkv.weight": [...]}`` for those with such names. Blocks lie
one after another along one dimension, and span all others:

    [ q ]                       shapes (512, 512), (128, 512), (128, 512) of (768, 512)
    [ k ]   or   [ q | k | v ]  shapes (768, 768) three times of (768, 2304)
    [ v ]

State that has the shape of its block is kept joined, in the shape of the whole, as it would be
without blocks; other state is kept under ``"blocks"``, a dict for each block.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCKS_GROUP = "blocks"
"""The option of a parameter group; also the key of state that is kept by block."""


class Blocks(NamedTuple):
    """The blocks' shapes, and the dimension of the whole along which they lie."""

    shapes: list[tuple[int, ...]]
    dim: int


def blocks_in(group: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Blocks | None:
    """The blocks of a parameter that its group asks for; ``None`` if it asks for none.

    Args:
        group: The parameter group.
        name: The parameter's name.
        shape: The parameter's shape.

    Raises:
        ValueError: Blocks of these shapes do not make up the parameter.
    """
    asked = group.get(BLOCKS_GROUP)
    if isinstance(asked, Mapping):
        asked = next((v for key, v in asked.items() if fnmatch.fnmatchcase(name, key)), None)
    if asked is None:
        return None
    shapes = [tuple(each) for each in asked]
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
    """Check that every pattern in a group's ``"blocks"`` matches one of its parameters' names.

    Raises:
        ValueError: A pattern matches none of the names.
    """
    asked = group.get(BLOCKS_GROUP)
    for pattern in asked if isinstance(asked, Mapping) else ():
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
    """The state of each block, from that of the whole.

    Args:
        values: State of the whole, by key.
        shape: Shape of the whole.
        blocks: Its blocks.

    Returns:
        A dict for each block; tensors of the block's shape share memory with the whole's.
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
    """The state of the whole, from that of each block.

    Args:
        of_blocks: State of each block by key; empty for blocks that were not stepped.
        blocks: The blocks.
    """
    values: dict[str, Any] = {}
    apart = [dict(each) for each in of_blocks]  # what is not of the blocks' shapes stays in these
    for name in of_blocks[0]:
        if [getattr(each.get(name), "shape", None) for each in of_blocks] == blocks.shapes:
            values[name] = torch.cat([each[name] for each in of_blocks], blocks.dim)
            for each in apart:
                del each[name]
    if any(apart):
        values[BLOCKS_GROUP] = apart
    return values
