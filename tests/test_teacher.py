"""Teacher forcing on Triton against its reference (interpreted on a CPU): outputs, gradients, the choice of pages."""
import pytest
import torch

import sparse_attn as sa

pytestmark = pytest.mark.skipif(sa.triton is None, reason="no Triton on this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def inputs(B, H, G, D, T, C, seed=0, dtype=torch.float32, size=1.0):
    """-> q, k, v as the model makes them ([B,T,H,D] transposed, so not contiguous), and a gradient of the output"""
    g = torch.Generator().manual_seed(seed)
    q, k, v, w = (torch.randn(B, t, n, D, generator=g).to(DEVICE, dtype) for n, t in ((H, C), (G, T), (G, T), (H, C)))
    return *(x.transpose(1, 2).requires_grad_() for x in (q * size, k, v)), w.transpose(1, 2)


def some_budgets(*shape, high=9):
    budgets = torch.randint(1, high, shape, generator=torch.Generator().manual_seed(1)).int()
    budgets[..., ::5] = sa.DENSE
    return budgets.to(DEVICE)


def check(q, k, v, w, budgets, *rule, exact=3e-6):
    """The reference in one chunk: so it multiplies the same matrices, and near ties fall the same way."""
    want = sa.sparse_attention_ref(q, k, v, budgets, *rule, chunk=2**20)
    got = sa.sparse_attention_triton(q, k, v, budgets, *rule)
    grads = [torch.autograd.grad((out * w).sum(), (q, k, v)) for out in (want, got)]
    for name, x, y in zip(("out", "dq", "dk", "dv"), (got, *grads[1]), (want, *grads[0])):
        x, y = x.detach().float(), y.detach().float()
        error = float((x - y).abs().max() / y.abs().max().clamp(min=1))
        assert error < (exact if q.dtype == torch.float32 else 2e-2), f"{name} is off by {error:.1e} of its largest"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,H,G,D,S,T,C,first,last", [
    (1, 4, 2, 32, 8, 60, 60, 1, 2), (2, 3, 1, 80, 4, 41, 41, 1, 0), (1, 3, 1, 32, 4, 150, 40, 0, 1),
    (1, 2, 2, 96, 32, 100, 34, 2, 3), (1, 2, 1, 128, 128, 140, 9, 1, 2), (3, 2, 1, 16, 16, 1, 1, 1, 2),
    (1, 1, 1, 160, 8, 37, 37, 1, 2)])
def test_output_and_gradients(B, H, G, D, S, T, C, first, last, dtype):
    check(*inputs(B, H, G, D, T, C, dtype=dtype), some_budgets(B, C), S, first, last)


@pytest.mark.parametrize("C", [150, 100])
def test_large_tiles_and_large_scores(C, monkeypatch):
    """The tiles of bf16, which the interpreter lacks; scores whose exponential overflows unless a maximum is taken."""
    monkeypatch.setattr(sa, "_tiles", lambda D, dtype: ((128, 64, 8), (64, 64, 4), (32, 128, 8)))
    check(*inputs(1, 2, 1, 16, 150, C, size=30.0), some_budgets(C), 8, exact=3e-5)


def bits(q, k, budgets, S, first, last):
    """The choice of the reference, packed: [B,G,C,W]"""
    (B, G, T, _), C = k.shape, q.shape[2]
    position = torch.arange(T - C, T, device=k.device)
    scores = sa._teacher_scores(q, *sa._teacher_landmarks(k, C, S), T - C, S)
    order, counts = sa._choose(scores, position + 1, budgets.expand(B, C)[:, None], S, first, last)
    kept = torch.nn.functional.pad(order.argsort(-1) < counts[..., None], (0, -order.shape[-1] % 32))
    return (kept.view(B, G, C, -1, 32).long() << torch.arange(32, device=k.device)).sum(-1).int()


@pytest.mark.parametrize("first,last", [(1, 2), (1, 0), (0, 1), (3, 4)])
def test_the_choice_bit_for_bit(first, last):
    """Two words of pages; some scores equal; a budget under the reserved pages; scored at once and in chunks."""
    B, S, T, C = 2, 4, 165, 50
    with torch.no_grad():
        q, k, *_ = inputs(B, 4, 2, 16, T, C)
        q, k = q.round(), k.round()
        k[:, :, 40:100] = k[:, :, 39:40]
        k[:, 1, :, 1:] = 0
    budgets = some_budgets(B, C, high=45)
    want = bits(q, k, budgets, S, first, last)
    assert (want < 0).any() and (want[..., 1] != 0).any()  # bit 31 and the second word are in use
    for limit in (2**26, B * 2 * 42 * 23):
        assert torch.equal(sa._page_mask(q, k, budgets, S, first, last, limit), want)


def test_ties_go_to_the_lower_page(monkeypatch):
    """0.0 and -0.0 are equal, though their bits are not."""
    q, k, *_ = inputs(1, 2, 2, 16, 80, 80)
    zeros = torch.zeros(1, 2, 80, 20, device=DEVICE) * torch.tensor([-1.0, 1.0], device=DEVICE).repeat(10)
    monkeypatch.setattr(sa, "_teacher_scores", lambda *args: zeros)
    mask = sa._page_mask(q.detach(), k.detach(), torch.full((1, 80), 6, dtype=torch.int32, device=DEVICE), 4, 1, 2)
    assert mask[0, :, 79, 0].tolist() == [0b11000000000000001111] * 2 and mask[0, :, 30, 0].tolist() == [0b11001111] * 2


@pytest.mark.parametrize("C,chunk", [(1, 256), (37, 256), (37, 10), (80, 7)])
def test_the_last_queries_alone(C, chunk):
    """A prompt in chunks: the last C queries over all T keys are the last C rows of all T queries."""
    q, k, v, _ = inputs(2, 6, 2, 16, 80, 80)
    budgets = some_budgets(2, 80)
    want = sa.sparse_attention_ref(q, k, v, budgets, 8, 1, 0)[:, :, -C:]  # last=0: a query's own page competes
    got = sa.sparse_attention_ref(q[:, :, -C:], k, v, budgets[:, -C:], 8, 1, 0, chunk)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
