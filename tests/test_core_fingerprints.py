"""Sums of bits, by which owners find out that somebody has written to slices."""

import pytest
import torch

from lightning_fsdp.core.optimizers.fingerprints import fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_fingerprint_tells_any_write(dtype):
    values = torch.linspace(-1, 2, 9).to(dtype)
    changes = [values.clone() for _ in range(4)]
    changes[0][4] = 1e-3
    changes[1].neg_()
    changes[2] = changes[2].flip(0)
    changes[3].zero_()
    before = values.clone()
    found = fingerprints([values, values.clone(), *changes])
    assert torch.equal(values, before)
    assert found[0] == found[1]
    assert len(set(found[1:])) == 5
    large = torch.arange(2**20 + 5).remainder(251).to(dtype)
    others = [large.clone() for _ in range(3)]
    others[0][-1] = 0
    others[1][[5, 2**19]] = others[1][[2**19, 5]]  # of different rows
    others[2][2**19 : 2**19 + 2] = others[2][2**19 : 2**19 + 2].flip(0)
    assert len({*fingerprints([large, *others])}) == 4
    # Round numbers differ in high bits only, and words have elements in their high bits as well.
    moved = [torch.ones(2**20, dtype=dtype) for _ in range(4)]
    for place, ones in zip((3, 2**19 + 3, 2**10 + 3, 2**20 - 1), moved, strict=True):
        ones[place] = 2
    assert len({*fingerprints(moved)}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_fingerprint_tells_a_write_wherever_the_elements_lie(dtype):
    for start in range(9):  # words of 64 bits begin elsewhere
        for numel in (1, 2, 7, 8, 2**13 - 1, 2**13 + 9):
            values = torch.ones(start + numel).to(dtype)[start:]
            before = fingerprints([values])
            for place in {0, numel // 2, numel - 1}:
                values[place] = 2
                assert fingerprints([values]) != before
                values[place] = 1
            assert fingerprints([values]) == before
