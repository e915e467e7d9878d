"""What tests of copies share."""

from tests.support.one_exchange import wholes


def values_of(model):
    named = dict(model.named_parameters())
    return dict(zip(named, wholes([*named.values()]), strict=True))


def parameters_of(model):
    return list(model.named_parameters())
