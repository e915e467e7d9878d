"""The cross entropy of a head without its logits, against torch's of the logits."""

from collections.abc import Callable

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp import linear_cross_entropy, losses
from lightning_fsdp.losses import body_and_head
from tests.support.adapters import lora, qwen2
from tests.support.memory import StorageTracker

IGNORED = -100


def _inputs(dtype: torch.dtype, *, frozen: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 101, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(333, 16, generator=generator).to(dtype).requires_grad_(not frozen)
    bias = torch.randn(333, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(333, (3, 101), generator=generator)
    labels[0, :50] = IGNORED
    return hidden, weight, labels, bias


def _plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str
) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return F.cross_entropy(logits.float(), labels.flatten(), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("at_once", [2**23, 700])  # 700: several blocks of columns, and of rows
def test_loss_and_gradients_are_those_of_the_logits(
    reduction: str,
    dtype: torch.dtype,
    tolerance: float,
    frozen: bool,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "_AT_ONCE", at_once)
    hidden, weight, labels, bias = _inputs(dtype, frozen=frozen)
    scale = 1024.0  # as of a gradient scaler, below whose factor fp16 has no small gradients
    wanted = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    expected = _plain(hidden, weight, labels, bias, reduction)
    found = linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    of_expected = torch.autograd.grad(scale * expected, wanted)
    for gradient, other in zip(
        torch.autograd.grad(scale * found, wanted), of_expected, strict=True
    ):
        assert gradient.dtype == dtype
        biggest = other.float().abs().max()
        assert (gradient.float() - other.float()).abs().max() <= tolerance * biggest
    assert not (frozen and weight.grad)


def test_small_gradients_of_fp16_are_scaled_before_they_are_rounded() -> None:
    hidden, weight, labels, bias = _inputs(torch.float16)
    many = hidden.detach().repeat(200, 1, 1).requires_grad_(), weight, labels.repeat(200, 1)
    of = [
        torch.autograd.grad(2.0**16 * loss, weight)
        for loss in (_plain(*many, bias, "mean"), linear_cross_entropy(*many, bias))
    ]
    assert not of[1][0].eq(0).any()
    torch.testing.assert_close(of[1], of[0], atol=0.5, rtol=0.05)


def test_sums_over_chunks_lose_nothing_under_bf16() -> None:
    hidden, weight, labels, _ = _inputs(torch.bfloat16)
    many = hidden.detach().repeat(5, 1, 1), weight, labels.repeat(5, 1)
    (whole,), (parts,) = (
        torch.autograd.grad(linear_cross_entropy(*many, chunk_size=size), weight)
        for size in (10_000, 8)
    )
    assert (parts.float() - whole.float()).abs().max() <= 2**-8 * whole.abs().max()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num", "most"), [(64, 1.1), (256, 2.2)])  # one product, or one a block
def test_few_positions_under_bf16_have_gradients_about_as_near_as_those_of_the_logits(
    num: int, most: float, has_bias: bool
) -> None:
    """To those in double precision; rows of the weight have a part in common, which cancels."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num + 7, 160), (1000, 160), (1000,)  # a mean over 64 or 256: nothing is rounded
    inputs = [torch.randn(shape, generator=generator) / 4 for shape in shapes]
    inputs[1] += torch.randn(160, generator=generator)
    labels = torch.randint(1000, (num + 7,), generator=generator)
    labels[:7] = IGNORED

    def computed(loss_of: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        # Rounded to bf16 first: what is compared is the computation.
        hidden, weight, bias = (x.bfloat16().to(dtype).requires_grad_() for x in inputs)
        loss = loss_of(hidden, weight, labels, bias if has_bias else None)
        wanted = (hidden, weight, bias)[: 2 + has_bias]
        return [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, wanted))]

    assert losses.chunk_size_of(*(x.bfloat16().requires_grad_() for x in inputs[:2])) == num + 7
    exact = computed(lambda *x: F.cross_entropy(F.linear(x[0], x[1], x[3]), x[2]), torch.double)
    plain = computed(lambda *x: _plain(*x, "mean"), torch.bfloat16)
    for found, other, expected in zip(
        computed(linear_cross_entropy, torch.bfloat16), plain, exact, strict=True
    ):
        errors = [float((each - expected).norm()) for each in (found, other)]
        assert errors[0] <= most * errors[1] + 1e-6 * expected.norm()


class Products(TorchDispatchMode):
    """Multiplications in the products of matrices; torch's counter does not see ``addmm_``."""

    work = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.work += left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num", [256, 300])  # a chunk, and more
@pytest.mark.parametrize("frozen", ["", "hidden", "weight", "both"])
def test_no_product_is_made_that_nobody_needs(num: int, frozen: str) -> None:
    """One for the logits, and one for each gradient."""
    hidden, weight = torch.ones(num, 160).bfloat16(), torch.ones(1000, 160).bfloat16()
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    with Products() as products:
        linear_cross_entropy(hidden, weight, torch.zeros(num, dtype=torch.long))
    num_products = 1 + hidden.requires_grad + weight.requires_grad
    assert products.work == num_products * num * weight.numel()


def test_autocast_computes_as_the_linear_layer_does() -> None:
    hidden, weight, labels, bias = _inputs(torch.float32)
    losses = []
    for loss_of in (_plain, lambda *args: linear_cross_entropy(*args[:4], reduction=args[4])):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(hidden, weight, labels, bias, "mean")
        losses.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))])
    for found, expected in zip(*reversed(losses), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(
            found, expected, atol=0.02 * float(expected.abs().max()), rtol=1e-6
        )


def test_what_is_left_out_need_not_be_finite() -> None:
    hidden, weight, labels, bias = _inputs(torch.float32)
    with torch.no_grad():
        bias[0] = -torch.inf
        labels[labels == 0] = 1  # what is left out counts as the first entry
    found = linear_cross_entropy(hidden, weight, labels, bias)
    expected = _plain(hidden, weight, labels, bias, "mean")
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_no_position_that_counts_gives_what_torch_gives() -> None:
    hidden, weight, labels, _ = _inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels.fill_(IGNORED))
    assert loss.isnan()
    loss.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()
    assert linear_cross_entropy(hidden, weight, labels, reduction="sum") == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_made_for_gradients_that_nobody_needs(is_on: bool) -> None:
    hidden, weight, labels, _ = _inputs(torch.float32, frozen=True)
    hidden, labels = hidden.detach()[0].requires_grad_(), labels[0]
    sizes: list[int] = []
    with torch.set_grad_enabled(is_on), StorageTracker() as tracker:
        tracker.track([hidden, weight, labels])
        tracker.at_each_operation = lambda: sizes.append(tracker.live_bytes([hidden, weight]))
        loss = linear_cross_entropy(hidden, weight, labels, chunk_size=1)
    assert loss.requires_grad == is_on
    # Labels and masks are 8,021, the gradient of the weight would be 21,312 more.
    assert max(sizes) < 8_200 + is_on * hidden.nbytes


def _peak(loss_of: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Of a forward and a backward, beside the gradient of the weight."""
    sizes: list[int] = []
    with StorageTracker() as tracker:
        tracker.track(inputs)
        tracker.at_each_operation = lambda: sizes.append(tracker.live_bytes())
        start = tracker.live_bytes()
        loss_of(*inputs).backward()
    return max(sizes) - start - inputs[1].nbytes


def _plain_mean(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _plain(hidden, weight, labels, None, "mean")


def test_peak_is_a_fraction_of_that_of_the_logits() -> None:
    """Beside the gradient of the weight, for the shape of a head: a large vocabulary."""
    hidden = torch.randn(1024, 8, requires_grad=True)
    weight, labels = torch.randn(4096, 8, requires_grad=True), torch.zeros(1024, dtype=torch.long)
    peaks = [_peak(loss, hidden, weight, labels) for loss in (linear_cross_entropy, _plain_mean)]
    assert peaks[0] <= 0.12 * peaks[1]  # 1 of 12: four chunks three times over, or one once


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("num", [256, 448, 449])
def test_peak_under_bf16_is_a_fraction_of_that_of_the_logits(
    num: int, is_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to twice the width of positions are one chunk."""
    width, vocabulary, chunk = 224, 4096, 64
    monkeypatch.setattr(losses, "CHUNK_SIZE", chunk)
    dtype = torch.float32 if is_autocast else torch.bfloat16
    hidden = torch.randn(num, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    labels, peaks = torch.zeros(num, dtype=torch.long), []
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        peaks = [
            _peak(loss, hidden, weight, labels) for loss in (linear_cross_entropy, _plain_mean)
        ]
    assert peaks[0] <= 0.25 * peaks[1]
    if not is_autocast and num > 2 * width:  # the gradient in fp32, beside it in bf16
        assert 4 * weight.numel() <= peaks[0] <= 1.12 * 4 * weight.numel()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_without_a_gradient_of_the_weight_few_positions_under_bf16_are_chunks(
    is_frozen: bool,
) -> None:
    hidden = torch.empty(300, 160, dtype=torch.bfloat16)
    weight = torch.empty(333, 160, dtype=torch.bfloat16, requires_grad=not is_frozen)
    with torch.set_grad_enabled(is_frozen):
        assert losses.chunk_size_of(hidden, weight) == losses.CHUNK_SIZE
    assert losses.chunk_size_of(hidden, weight) == (losses.CHUNK_SIZE if is_frozen else 300)


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels, _ = _inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward, got a second one"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, labels, _ = _inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="without create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 1, 2)])
@pytest.mark.parametrize("width", [0, 3])
def test_any_shape_is_computed(shape: tuple[int, ...], width: int) -> None:
    hidden, weight = torch.ones(*shape, width), torch.ones(5, width)
    labels = torch.ones(shape, dtype=torch.long)
    found = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    torch.testing.assert_close(found, torch.tensor(5.0).log() * labels.numel())


@pytest.mark.parametrize("label", [-1, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_label_that_is_no_class_is_an_error(label: int, dtype: torch.dtype) -> None:
    hidden, weight, labels, bias = _inputs(dtype)
    labels[2, 3] = label
    for loss_of in (lambda *given: _plain(*given, bias, "mean"), linear_cross_entropy):
        with pytest.raises(IndexError, match="out of"):
            loss_of(hidden, weight, labels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_few_bytes_are_the_classes_that_they_name(dtype: torch.dtype) -> None:
    hidden, weight, labels, bias = _inputs(torch.float32)
    labels = labels.fill_(156)  # as a byte, what -100 is
    found = linear_cross_entropy(hidden, weight, labels.to(dtype), bias)
    torch.testing.assert_close(found, _plain(hidden, weight, labels, bias, "mean"))
    found = linear_cross_entropy(hidden, weight, labels.to(dtype), bias, ignore_index=10**6)
    torch.testing.assert_close(found, _plain(hidden, weight, labels, bias, "mean"))


def test_double_precision_is_computed_with() -> None:
    doubles = [
        tensor.double() if tensor.is_floating_point() else tensor
        for tensor in _inputs(torch.float32)
    ]
    found, expected = linear_cross_entropy(*doubles), _plain(*doubles, "mean")
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"labels": torch.zeros(3, 101)}, "labels of int64, one class"),
        ({"labels": torch.zeros(3, 101, dtype=torch.bool)}, "labels of int64, one class"),
        ({"labels": torch.zeros(4, dtype=torch.long)}, r"labels of shape \(3, 101\)"),
        ({"weight": torch.zeros(333, 15)}, r"weight of shape \(333, 16\)"),
        ({"bias": torch.zeros(3)}, r"bias of shape \(333,\)"),
        ({"reduction": "none"}, "'mean' or 'sum' for reduction, got 'none'"),
        ({"chunk_size": 0}, "a chunk_size of at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], text: str) -> None:
    hidden, weight, labels, bias = _inputs(torch.float32)
    inputs = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    with pytest.raises(ValueError, match=f"linear_cross_entropy: expected {text}"):
        linear_cross_entropy(**(inputs | changed))


def test_of_a_model_of_peft_the_head_is_found_where_it_is_still_a_linear_layer():
    plain = qwen2()
    assert body_and_head(plain) == (plain, plain.model, plain.lm_head)
    adapted = peft.get_peft_model(qwen2(), lora("q_proj"))
    base = adapted.get_base_model()
    assert body_and_head(adapted) == (base, base.model, base.lm_head)
    assert body_and_head(peft.get_peft_model(qwen2(), lora("lm_head"))) is None
    capped = qwen2()
    capped.config.final_logit_softcapping = 30.0
    assert body_and_head(capped) is None
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert body_and_head(peft.get_peft_model(qwen2(), prompts)) is None
