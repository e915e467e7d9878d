import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fsdp.core.grouping import cut_flat_params, plan_units
from lightning_fsdp.units import find_units


def gpt2(num_layers=3):
    sizes = {"n_layer": num_layers, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.data))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)


def units_of(model, selector=None, ignored=()):
    plans = plan_units(model, find_units(model, selector), set(ignored), set())
    return {plan.name: [plan.names[p] for p in plan.sites] for plan in plans}


def names_of(flat_param):
    return [flat_param.users[0].names[p] for p in flat_param.parameters]


def test_gpt2_is_embeddings_blocks_and_final_norm_with_head():
    model = gpt2()
    units = units_of(model)
    assert list(units) == [
        "transformer.h.0", "transformer.h.1", "transformer.h.2", "transformer.wte",
        "transformer.ln_f",
    ]  # fmt: skip
    assert units["transformer.wte"] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert units["transformer.ln_f"] == [
        "transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.wte.weight",
    ]  # fmt: skip


def test_every_parameter_is_in_a_unit_and_only_tied_ones_in_two():
    model = gpt2()
    names = [name for unit in units_of(model).values() for name in unit]
    tied = ["transformer.wte.weight"]
    assert sorted(names) == sorted([name for name, _ in model.named_parameters()] + tied)


def test_a_weight_tied_across_units_is_a_flat_param_of_its_own():
    model = gpt2()
    plans = plan_units(model, find_units(model, None), set(), set())
    shared = [flat_param for flat_param in cut_flat_params(plans) if len(flat_param.users) == 2]
    assert [names_of(flat_param) for flat_param in shared] == [["transformer.wte.weight"]]


def test_every_second_block_is_laid_out_backwards():
    model = gpt2()
    plans = plan_units(model, find_units(model, None), set(), set())
    in_order = [names for plan in plans if (names := [plan.names[p] for p in plan.sites])]
    of_blocks = [names_of(flat_param) for flat_param in cut_flat_params(plans)[:3]]
    assert of_blocks == [in_order[0], in_order[1][::-1], in_order[2]]


def test_a_teacher_is_laid_out_as_its_student():
    model = nn.ModuleDict({"student": gpt2(), "teacher": gpt2().requires_grad_(False)})
    plans = plan_units(model, find_units(model, None), set(), set())
    names = list(map(names_of, cut_flat_params(plans)))
    of = {who: [[n.replace(who, "", 1) for n in run if who in n] for run in names] for who in model}
    assert list(filter(None, of["teacher"])) == list(filter(None, of["student"]))


def test_parameters_held_directly_by_the_root_are_a_unit_of_the_root():
    assert units_of(LM()) == {
        "blocks.0": ["blocks.0.0.weight", "blocks.0.0.bias"],
        "blocks.1": ["blocks.1.0.weight", "blocks.1.0.bias"],
        "embed": ["embed.weight"],
        "norm": ["norm.weight", "norm.bias", "head.weight", "head.bias"],
        "": ["scale"],
    }


def test_a_module_at_two_places_is_in_one_unit():
    model = LM()
    model.again = nn.ModuleDict({"embed": model.embed, "block": model.blocks[1]})
    model.more_blocks = nn.ModuleList([model.blocks[0], nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
    model.last = model.head
    for selector in (None, ["Linear"], 10, lambda m: isinstance(m, nn.Linear)):
        modules = [id(module) for _, unit in find_units(model, selector) for module in unit]
        assert len(modules) == len(set(modules)), selector


def test_a_layer_of_a_block_and_of_what_is_around_it_is_in_both_units():
    model = LM()
    model.layer = model.blocks[1][0]
    inner = ["blocks.1.0.weight", "blocks.1.0.bias"]
    assert units_of(model)["blocks.1"] == units_of(model)["blocks.1.0"] == inner
    block = nn.Sequential(nn.Linear(4, 4, bias=False))
    around = nn.ModuleDict({"outer": nn.Sequential(block, block[0])})
    inner = ["outer.0.0.weight"]
    assert units_of(around, ["Sequential"]) == {"outer.0": inner, "outer": inner}


def test_a_single_layer_is_still_a_block():
    assert "transformer.h.0" in units_of(gpt2(num_layers=1))


def test_a_block_that_begins_with_a_compiled_layer_is_one():
    model = LM()
    model.blocks[0][0] = torch.compile(model.blocks[0][0], backend="eager")
    assert list(units_of(model))[:2] == ["blocks.0", "blocks.1"]


def test_a_model_without_blocks_is_cut_at_what_holds_parameters():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert list(units_of(model)) == ["a", "b.0"]


def test_the_last_of_a_network_and_the_first_of_another_are_two_units():
    def network():
        blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(3, 4), blocks, nn.LayerNorm(4))

    model = nn.ModuleDict({"generator": network(), "critic": network(), "head": nn.Linear(4, 1)})
    units = units_of(model)
    assert list(units)[4:] == ["generator.0", "generator.2", "critic.0", "critic.2"]
    assert units["critic.2"][2:] == ["head.weight", "head.bias"], "what follows is no network"


def test_blocks_in_lists_beside_each_other_are_one_network():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
            self.second = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 1)

    assert list(units_of(Twice()))[4:] == ["norm"]


def test_leftovers_on_both_sides_of_blocks_are_two_units():
    model = nn.ModuleDict(
        {
            "inlet": nn.Linear(3, 4),
            "blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
            "norm": nn.LayerNorm(4),
            "head": nn.Linear(4, 5),
        }
    )
    units = units_of(model)
    assert list(units) == ["blocks.0", "blocks.1", "inlet", "norm"]
    assert units["norm"] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_a_module_with_parameters_and_children_stays_together():
    model = nn.Module()
    model.attention = nn.MultiheadAttention(4, 2)
    assert list(units_of(model)) == ["attention"]


class _Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(10, 4)
        self.more = nn.ParameterDict({"a": nn.Linear(4, 10).weight})

    def forward(self, tokens):
        return self.inner(tokens) @ self.more["a"].T


def test_a_container_of_parameters_belongs_to_the_module_that_reads_it():
    model = LM()
    model.embed = _Embedding()
    model.scales = nn.ParameterList([nn.Linear(1, 1).weight])
    units = units_of(model)
    assert units["embed"] == ["embed.inner.weight", "embed.more.a"]
    assert units[""] == ["scale", "scales.0"], "it encloses blocks, and has them as its own"
    assert "embed.more" not in dict(find_units(model, 30)), "by size as well"
    chosen = dict(find_units(model, lambda module: module is not model))
    assert chosen.keys() & {"blocks", "scales", "embed.more", "embed"} == {"embed"}


class _Called(nn.ModuleList):
    def forward(self, x):
        return self[0](x)


class _Layer(nn.Module):
    """Nobody calls it: the module around calls its parts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(1, 1).weight
        self.up = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.out = nn.ModuleDict({"down": nn.Linear(4, 4)})


def test_what_has_no_forward_is_no_unit_and_its_layers_are():
    model = LM()
    model.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), _Layer()])
    model.lists = nn.ModuleDict({"a": nn.ModuleList([nn.ParameterList([nn.Linear(1, 1).weight])])})
    model.calls = nn.ModuleList([_Called([nn.Linear(4, 4)]), _Called([nn.Linear(4, 4)])])
    units = units_of(model)
    assert units.pop("") == ["scale", "blocks.1.gate", "lists.a.0.0"]
    layers = ["blocks.0.0", "blocks.0.1", "blocks.1.up", "calls.0", "calls.1"]
    assert list(units) == [*layers, "embed", "blocks.1.out.down"]
    assert "norm.weight" in units["blocks.1.out.down"], "a neighbour"
    found = dict(find_units(model, lambda module: True))
    assert not found.keys() & {"blocks.0", "blocks.1", "blocks.1.out", "lists", "lists.a"}
    assert list(units_of(model, ["_Called"]))[:2] == ["calls.1", "calls.0"]


def test_classes_a_callable_and_a_size_choose_units():
    model = gpt2()
    by_class = units_of(model, ["GPT2MLP"])
    assert by_class["transformer.h.0.mlp"][0] == "transformer.h.0.mlp.c_fc.weight"
    assert "transformer.h.0.ln_1" in by_class
    blocks = units_of(model, lambda module: type(module).__name__ == "GPT2Block")
    assert blocks == units_of(model)
    assert units_of(model, 10**9).keys() == {name for name, _ in find_units(model, 10**9)}
    assert "transformer.h.0" in units_of(model, 3000)


def test_nested_choices_give_inner_units_first_and_the_rest_to_the_outer():
    model = LM()
    units = units_of(model, ["Sequential", "Linear"])
    assert units["blocks.0.0"] == ["blocks.0.0.weight", "blocks.0.0.bias"]
    assert "blocks.0" not in units, "nothing is left for it"


def test_ignored_parameters_belong_to_no_unit():
    model = LM()
    units = units_of(model, ignored={model.head.bias})
    assert units["norm"] == ["norm.weight", "norm.bias", "head.weight"]


def test_frozen_and_trainable_parameters_are_separate_flat_params():
    model = LM()
    model.blocks[0][0].bias.requires_grad_(False)
    plans = plan_units(model, find_units(model, None), set(), set())
    names = list(map(names_of, cut_flat_params(plans)))
    assert ["blocks.0.0.bias"] in names
    assert ["blocks.0.0.weight"] in names


def test_parameters_of_two_dtypes_are_separate_flat_params():
    model = LM()
    model.blocks[0][0].bias.data = model.blocks[0][0].bias.data.double()
    plans = plan_units(model, find_units(model, None), set(), set())
    names = list(map(names_of, cut_flat_params(plans)))
    assert ["blocks.0.0.bias"] in names
    assert ["blocks.0.0.weight"] in names


@pytest.mark.parametrize(
    ("selector", "error", "message"),
    [
        (["Block", "Linear"], ValueError, r"occur in LM and have a forward, got \['Block'\]"),
        (["ModuleList"], ValueError, r"and have a forward, got \['ModuleList'\]. Choose from"),
        ("Linear", TypeError, "expected a list of class names"),
        (0, ValueError, "expected a positive number of parameters, got 0"),
        (True, TypeError, "expected a list of class names, a callable or an int, got True"),
        ([], TypeError, r"expected a list of class names, a callable or an int, got \[\]"),
        (nn.Linear, TypeError, "expected a list of class names.*got <class .*Linear'>"),
        (lambda module: False, ValueError, "expected the callable to choose modules of LM"),
    ],
)
def test_a_wrong_selector_is_refused_by_name(selector, error, message):
    with pytest.raises(error, match=message):
        find_units(LM(), selector)
