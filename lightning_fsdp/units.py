"""Module tree -> modules that are gathered together. Changes nothing; shared by all engines.

Units are found automatically, in this order:

1. *Blocks*: children of one class that repeat in an ``nn.ModuleList`` or ``nn.Sequential``, and
   every child of an ``nn.ModuleList`` that has children itself; in the outermost such containers.
   A child without a forward, such as a list in a list, is searched instead. torch's adaptive
   softmax is a block as well, as its targets choose which of its parts run on a rank. What the user
   names (classes, a predicate, a minimum size) takes the place of all these.
2. *Leftovers*: modules that hold parameters outside the blocks. Neighbours in registration order
   form one unit, embeddings apart from the rest, so that a model becomes: embeddings, blocks, final
   norm with head; and those of two networks with blocks apart, as one may run without the other.
   Parameters held directly by a module that contains blocks are a unit of that module, whole while
   its forward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch import nn

UnitSelector = Sequence[str] | Callable[[nn.Module], bool] | int | None
"""Class names, a predicate on modules, a minimum number of parameters, or ``None``: automatic.

Only modules with a forward can be chosen: a predicate is not asked about an ``nn.ModuleList`` or
another container without one.
"""


def find_units(root: nn.Module, selector: UnitSelector) -> list[tuple[str, list[nn.Module]]]:
    """Choose the modules of each unit.

    Args:
        root: The whole model.
        selector: See :data:`UnitSelector`.

    Returns:
        Name and modules of each unit, inner units before those that enclose them; none is empty.

    Raises:
        ValueError: The selector matches nothing; see also :func:`check_selector`.
        TypeError: The selector is of no known kind.
    """
    blocks = list(dict.fromkeys(_select(root, selector)))
    leftovers = _find_leftovers(root, set(blocks), set())
    units = [[module] for module in blocks]
    # Neighbours are gathered together where all of them are embeddings, or none; apart from those
    # that a block has, too, which may be called at any time.
    inside = {module for block in blocks for module in block.modules()}
    kinds = ((m, (m is None, isinstance(m, nn.Embedding), m in inside)) for m in leftovers)
    for _, run in groupby(kinds, itemgetter(1)):
        neighbours = [module for module, _ in run if module is not None]
        units += [neighbours] if blocks else [[module] for module in neighbours]
    names = {module: name for name, module in root.named_modules()}
    return [(names[modules[0]], modules) for modules in units if modules]


def check_selector(selector: Any) -> None:
    """Refuse what is not a selector of units.

    Raises:
        ValueError: A number of parameters below 1.
        TypeError: It is of no known kind.
    """
    if isinstance(selector, int) and not isinstance(selector, bool):
        if selector < 1:
            raise ValueError(f"units: expected a positive number of parameters, got {selector}.")
    elif selector is not None and (isinstance(selector, type) or not callable(selector)):
        are_several = isinstance(selector, Collection) and not isinstance(selector, str)
        if not are_several or not selector or not all(isinstance(name, str) for name in selector):
            raise TypeError(
                f"units: expected a list of class names, a callable or an int, got {selector!r}."
            )


def has_forward(module: nn.Module) -> bool:
    """Whether a module is called, and so can be gathered by itself; containers are not."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _select(root: nn.Module, selector: UnitSelector) -> list[nn.Module]:
    """The modules that are units of their own, inner ones first."""
    check_selector(selector)
    if selector is None:
        return list(_find_blocks(root))
    if isinstance(selector, int):
        return _select_by_size(root, selector)
    modules = [module for module in root.modules() if _numel(module) and has_forward(module)]
    if callable(selector):
        chosen = [module for module in modules if selector(module)]
        if not chosen:
            raise ValueError(
                f"units: expected the callable to choose modules of {type(root).__name__}, got "
                "none. Return True for the modules to be gathered one at a time."
            )
    else:
        chosen = [module for module in modules if type(module).__name__ in set(selector)]
        missing = set(selector) - {type(module).__name__ for module in chosen}
        if missing:
            present = sorted({type(module).__name__ for module in modules})
            raise ValueError(
                f"units: expected classes that occur in {type(root).__name__} and have a forward, "
                f"got {sorted(missing)}. Choose from {present}."
            )
    return chosen[::-1]  # inner modules come later in ``modules()``


def _find_blocks(module: nn.Module, is_list: bool = False) -> Iterator[nn.Module]:
    """Find repeated layers below a module, the outermost ones; ``is_list``: it is in a list."""
    # A list or a dictionary inside a list is not a layer itself, but may hold layers.
    is_list = isinstance(module, nn.ModuleList) or (is_list and not has_forward(module))
    repeats = is_list or isinstance(module, nn.Sequential)
    counts = Counter(type(child) for child in module.children() if _numel(child))
    for child in module.children():
        is_layer = is_list and next(child.children(), None) is not None
        is_layer = is_layer or (repeats and counts[type(child)] > 1)
        is_layer = is_layer or isinstance(child, nn.AdaptiveLogSoftmaxWithLoss)
        if is_layer and _numel(child) and has_forward(child):
            yield child
        else:
            yield from _find_blocks(child, is_list)


def _select_by_size(root: nn.Module, minimum: int) -> list[nn.Module]:
    """Modules with at least ``minimum`` parameters that no chosen module inside them has."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        remaining = sum(p.numel() for p in module.parameters(recurse=False))
        remaining += sum(map(visit, module.children()))
        if remaining >= minimum and has_forward(module):
            chosen.append(module)
            return 0
        return remaining

    visit(root)
    return chosen


def _find_leftovers(
    module: nn.Module, blocks: set[nn.Module], visited: set[nn.Module]
) -> Iterator[nn.Module | None]:
    """Modules with parameters outside the blocks; ``None`` where neighbours are to be separated."""
    if module in visited:
        return
    is_called = has_forward(module) or not visited  # the root is called, whatever it is
    visited.add(module)
    if module in blocks:
        # The parameters of a block that are in no block inside it are the block's own unit.
        yield None
        return
    has_own = is_called and _has_own(module)
    if has_own and blocks.isdisjoint(module.modules()):
        yield module
        return
    has_network = False
    for child in module.children():
        if child not in visited and _is_network(child, blocks):
            if has_network:
                yield None
            has_network = True
        yield from _find_leftovers(child, blocks, visited)
    if has_own:
        yield from (None, module, None)


def _is_network(module: nn.Module, blocks: set[nn.Module]) -> bool:
    """Whether a module is called and holds blocks."""
    is_around = module not in blocks and not blocks.isdisjoint(module.modules())
    return is_around and has_forward(module)


def _has_own(module: nn.Module) -> bool:
    """Whether a module's forward reads parameters itself: its own, or those of a container."""
    containers = (child for child in module.children() if not has_forward(child))
    return any(True for _ in module.parameters(recurse=False)) or any(map(_has_own, containers))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
