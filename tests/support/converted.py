"""What is equal in two checkpoints."""

import torch


def assert_identical(found, expected, where=""):
    """Equal in every bit, type and order, with the same ties."""
    if not isinstance(expected, dict):
        assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), where
        for key in expected:
            assert_identical(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_identical(*pair, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        assert found.tolist() == expected.tolist(), where
    else:
        assert found == expected, where


def load_plainly(path):
    return torch.load(path, weights_only=True)
