"""Module tree -> units. Decides which parameters are gathered together; touches nothing.

Found automatically, in this order:

1. *Blocks*: children of one class that repeat in an ``nn.ModuleList`` or ``nn.Sequential``, and
   every child of an ``nn.ModuleList`` that has children itself; in the outermost such containers.
   Or what the user names: classes, a predicate, a minimum size.
2. *Leftovers*: what holds parameters outside of the blocks. Neighbours in registration order form
   one unit, embeddings apart from the rest, so that a model reads: embeddings, blocks, final norm
   with head. Parameters held directly by a module that contains blocks are a unit of that module,
   whole while its forward runs.

A unit's parameters are cut into flat parameters by dtype, by ``requires_grad``, and by the set of
units that use them: a weight tied across units is a flat parameter of its own, gathered alone for
each use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_fsdp.core.engine.sharded import Sharded
from lightning_fsdp.core.engine.unit import Site

UnitSelector = Sequence[str] | Callable[[nn.Module], bool] | int | None
"""Class names, a predicate on modules, a minimum number of parameters, or automatic.

Chosen are modules with a forward: a predicate that answers True for an ``nn.ModuleList`` or another
container chooses nothing by it.
"""


@dataclass(eq=False)
class UnitPlan:
    """One unit to be.

    Attributes:
        modules: The modules whose forward needs the parameters.
        sites: Every place where a parameter of the unit is registered, by parameter.
        names: Original name of each parameter, from the module that is being sharded.
    """

    name: str
    modules: list[nn.Module]
    sites: dict[Tensor, list[Site]] = field(default_factory=dict)
    names: dict[Tensor, str] = field(default_factory=dict)

    def site_modules(self) -> Iterator[nn.Module]:
        """Of every place, the module; as often as it has one."""
        return (site.module for sites in self.sites.values() for site in sites)


@dataclass(frozen=True)
class FlatParameterPlan:
    """Parameters that share one flat region, and the units that use it."""

    parameters: list[Tensor]
    names: list[str]
    users: list[UnitPlan]


def find_units(root: nn.Module, selector: UnitSelector) -> list[tuple[str, list[nn.Module]]]:
    """Choose the modules of each unit.

    Args:
        root: The whole model.
        selector: See :data:`UnitSelector`.

    Returns:
        Name and modules per unit, inner units before those that enclose them; without empty ones.

    Raises:
        ValueError: The selector matches nothing.
        TypeError: The selector is of no known kind.
    """
    blocks = _find_blocks(root) if selector is None else _select(root, selector)
    blocks = dict(_once(blocks.items()))
    leftovers = _once(_find_leftovers("", root, set(blocks.values())))
    units = [(name, [module]) for name, module in blocks.items()]
    if not blocks:
        return units + [(name, [module]) for name, module in leftovers]
    order = {module: position for position, module in enumerate(root.modules())}
    runs = _runs(leftovers, set(blocks.values()), order)
    return units + [(run[0][0], [module for _, module in run]) for run in runs]


def plan_units(
    root: nn.Module,
    units: Sequence[tuple[str, list[nn.Module]]],
    ignored: set[nn.Parameter],
    managed: set[nn.Module],
) -> list[UnitPlan]:
    """Assign every parameter below ``root`` to the unit of the innermost module that encloses it.

    Args:
        root: The module that is being sharded.
        units: Name and modules per unit, inner ones first.
        ignored: Parameters to leave alone.
        managed: Modules that earlier calls made part of a unit; their subtrees are left alone.
    """
    owner: dict[nn.Module, UnitPlan] = {}
    plans = [UnitPlan(name, modules) for name, modules in units]
    for plan in plans:
        for module in plan.modules:
            for inner in _subtree(module, managed):
                owner.setdefault(inner, plan)
    names = {parameter: name for name, parameter in root.named_parameters()}
    for module in root.modules():
        plan_of_module = owner.get(module)
        if plan_of_module is None:
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored:
                plan_of_module.sites.setdefault(parameter, []).append(Site(module, attribute))
                plan_of_module.names.setdefault(parameter, names[parameter])
    return [plan for plan in plans if plan.sites]


def cut_flat_params(plans: Sequence[UnitPlan]) -> list[FlatParameterPlan]:
    """Cut the units' parameters into flat ones, in order; those sharded already have theirs."""
    users: dict[Tensor, list[UnitPlan]] = {}
    for plan in plans:
        for parameter in plan.sites:
            if not isinstance(parameter, Sharded):
                users.setdefault(parameter, []).append(plan)
    flat_params: dict[object, FlatParameterPlan] = {}
    for parameter, plans_of_parameter in users.items():
        ids = tuple(id(plan) for plan in plans_of_parameter)
        key = (parameter.dtype, parameter.requires_grad, ids)
        flat_param = flat_params.setdefault(key, FlatParameterPlan([], [], plans_of_parameter))
        flat_param.parameters.append(parameter)
        flat_param.names.append(plans_of_parameter[0].names[parameter])
    return list(flat_params.values())


def is_container(module: nn.Module) -> bool:
    """Whether this holds parameters and has no forward."""
    return isinstance(module, nn.ParameterDict | nn.ParameterList)


def _has_forward(module: nn.Module) -> bool:
    """Whether there is a moment at which this could be gathered by itself."""
    return not (isinstance(module, nn.ModuleList | nn.ModuleDict) or is_container(module))


def reads_weights_in_backward(module: nn.Module) -> bool:
    """Whether a module may; a plain embedding does not, unless its weight is computed."""
    is_plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    # The old weight_norm is a hook.
    return not is_plain or is_parametrized(module) or bool(module._forward_pre_hooks)


def _find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        repeated: set[type] = set()
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            counts = Counter(type(child) for child in module.children() if _numel(child))
            repeated = {cls for cls, count in counts.items() if count > 1}
        for name, child in module.named_children():
            is_layer = isinstance(module, nn.ModuleList) and any(child.children())
            if _numel(child) and (is_layer or type(child) in repeated):
                blocks[prefix + name] = child
            else:
                visit(f"{prefix}{name}.", child)

    visit("", root)
    return blocks


def _select(root: nn.Module, selector: UnitSelector) -> dict[str, nn.Module]:
    named = [(name, m) for name, m in root.named_modules() if _numel(m) and _has_forward(m)]
    if isinstance(selector, bool) or selector is None:
        raise TypeError(f"units: expected class names, a callable or an int, got {selector!r}.")
    if isinstance(selector, int):
        return _select_by_size(root, selector)
    if callable(selector):
        chosen = {name: module for name, module in named if selector(module)}
        if not chosen:
            raise ValueError(
                f"units: expected the callable to choose modules of {type(root).__name__}, got "
                "none. Return True for the modules to be gathered one at a time."
            )
    else:
        if isinstance(selector, str) or not all(isinstance(name, str) for name in selector):
            raise TypeError(
                f"units: expected a list of class names, a callable or an int, got {selector!r}."
            )
        chosen = {name: m for name, m in named if type(m).__name__ in set(selector)}
        missing = set(selector) - {type(module).__name__ for module in chosen.values()}
        if missing:
            present = sorted({type(module).__name__ for _, module in named})
            raise ValueError(
                f"units: expected classes that occur in {type(root).__name__} and have a forward, "
                f"got {sorted(missing)}. Choose from {present}."
            )
    return dict(reversed(chosen.items()))  # inner modules come later in named_modules


def _select_by_size(root: nn.Module, minimum: int) -> dict[str, nn.Module]:
    if minimum < 1:
        raise ValueError(f"units: expected a positive number of parameters, got {minimum}.")
    chosen: dict[str, nn.Module] = {}

    def visit(prefix: str, module: nn.Module) -> int:
        remaining = sum(p.numel() for p in module.parameters(recurse=False))
        for name, child in module.named_children():
            remaining += visit(f"{prefix}.{name}" if prefix else name, child)
        if remaining >= minimum and _has_forward(module):
            chosen[prefix] = module
            return 0
        return remaining

    visit("", root)
    return chosen


def _find_leftovers(
    name: str, module: nn.Module, blocks: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in blocks:
        # The parameters of a block that are in no block inside it are the block's own unit.
        return
    # Containers of parameters have no forward: the module that has them reads them in its own.
    containers = [child for child in module.children() if is_container(child)]
    has_own = any(p is not None for m in (module, *containers) for p in m.parameters(recurse=False))
    contains_blocks = any(inner in blocks for inner in module.modules())
    if has_own and not contains_blocks:
        yield name, module
        return
    for child_name, child in module.named_children():
        if child not in containers:
            inner_name = f"{name}.{child_name}" if name else child_name
            yield from _find_leftovers(inner_name, child, blocks)
    if has_own:
        yield name, module


def _once(named: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Each module under the first of its names: it may be at several places of the tree."""
    first: dict[nn.Module, str] = {}
    for name, module in named:
        first.setdefault(module, name)
    return [(name, module) for module, name in first.items()]


def _runs(
    leftovers: Sequence[tuple[str, nn.Module]], blocks: set[nn.Module], order: dict[nn.Module, int]
) -> list[list[tuple[str, nn.Module]]]:
    """Neighbours among the leftovers: no block between them, all embeddings or none."""
    block_positions = [order[block] for block in blocks]
    runs: list[list[tuple[str, nn.Module]]] = []
    previous: nn.Module | None = None  # that others may join
    for name, module in leftovers:
        encloses = any(inner in blocks for inner in module.modules())
        joins = (
            previous is not None
            and not encloses
            and isinstance(previous, nn.Embedding) == isinstance(module, nn.Embedding)
            and not any(order[previous] <= block < order[module] for block in block_positions)
        )
        if not joins:
            runs.append([])
        runs[-1].append((name, module))
        previous = None if encloses else module
    return runs


def _subtree(module: nn.Module, managed: set[nn.Module]) -> Iterator[nn.Module]:
    if module in managed:
        return
    yield module
    for child in module.children():
        yield from _subtree(child, managed)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
