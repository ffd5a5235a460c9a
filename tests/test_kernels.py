"""Every Triton kernel against its reference: under the interpreter on a CPU (conftest sets it), compiled on a GPU."""
import ast
import inspect

import pytest
import torch

sa = pytest.importorskip("sparse_attn")
pytestmark = pytest.mark.skipif(sa.triton is None, reason="no Triton on this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
SHAPES = [(4, 2, 32, 16), (14, 2, 64, 16), (12, 2, 80, 8), (5, 5, 96, 32), (10, 2, 128, 64)]  # H, G, D, S


def cache(H, G, D, S, lengths, dtype=torch.float32, seed=0):
    """Rows of the given lengths on shuffled pages, full of random keys; -> q, pools, landmarks, table, lengths."""
    g = torch.Generator().manual_seed(seed)
    B, P = len(lengths), max(-(-n // S) for n in lengths) + 1
    N = B * P + 1
    table = (torch.randperm(B * P, generator=g) + 1).view(B, P).int()
    k, v = (torch.randn(N, G, S, D, generator=g) for _ in range(2))
    marks, q = torch.randn(N, G, D, generator=g), torch.randn(B, H, D, generator=g)
    q, k, v, marks = (x.to(DEVICE, dtype) for x in (q, k, v, marks))
    return q, k, v, marks, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def close(a, b, dtype):
    return (a.float() - b.float()).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, G, D, S", SHAPES)
def test_append(H, G, D, S, dtype):
    for lengths in ([0, 1, S - 1, S, 2 * S + 3],):
        _, k, v, marks, table, n = cache(H, G, D, S, lengths, dtype)
        k[:] = float("nan") if S == 8 else k  # stale keys behind the slot must not be read
        for b, length in enumerate(lengths):
            k[table[b, length // S].long(), :, :length % S] = 1.0
        new = torch.randn(2, len(lengths), G, D, device=DEVICE).to(dtype)
        ref, got = ([x.clone() for x in (k, v, marks)] for _ in range(2))
        if S == 8:
            ref[0] = ref[0].nan_to_num(0.0)
        sa.append_kv_ref(*new, *ref, table, n)
        sa.append_kv_triton(*new, *got, table, n)
        for a, b in zip(ref, got):
            assert close(a, b.nan_to_num(0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, G, D, S", SHAPES)
def test_select(H, G, D, S, dtype):
    lengths = [1, S, S + 1, 7 * S, 7 * S + 5, 11 * S - 1]
    q, _, _, marks, table, n = cache(H, G, D, S, lengths, dtype)
    for first, last, budgets in ((1, 2, [1, 3, 9, 4, 5, 7]), (0, 1, [1, 2, 3, 4, 5, 6]), (2, 0, [20] * 6)):
        budgets = torch.tensor(budgets, dtype=torch.int32, device=DEVICE)
        ref, count = sa.select_pages_ref(q, marks, table, n, budgets, S, first, last)
        got, counts = sa.select_pages_triton(q, marks, table, n, budgets, S, first, last)
        assert torch.equal(count, counts)
        for b, c in enumerate(count.tolist()):
            assert torch.equal(ref[b, :, :c].sort().values, got[b, :, :c].sort().values)


def test_select_breaks_ties_toward_the_lower_page():
    """Equal, zero, negative-zero and infinite-free scores: a landmark of zeros scores 0.0 or -0.0."""
    q, _, _, marks, table, n = cache(4, 2, 32, 16, [16 * 20, 16 * 9])
    marks.zero_()
    marks[::2] *= -1.0
    budgets = torch.tensor([9, 6], dtype=torch.int32, device=DEVICE)
    got, _ = sa.select_pages_triton(q, marks, table, n, budgets)
    assert got[0, 1, :9].tolist() == [0, 1, 2, 3, 4, 5, 6, 18, 19] and got[1, 0, :6].tolist() == [0, 1, 2, 3, 7, 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, G, D, S", SHAPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_attend(H, G, D, S, splits, dtype):
    """Also rows shorter than the number of splits: an empty split must not make the merge NaN."""
    q, k, v, marks, table, n = cache(H, G, D, S, [1, 5, S, S + 1, 70, 3 * S + 2], dtype)
    assert close(sa.paged_attention_triton(q, k, v, table, n, splits=splits), sa.paged_attention_ref(q, k, v, table, n), dtype)
    budgets = torch.tensor([1, 3, 2, 4, 3, 3], dtype=torch.int32, device=DEVICE)
    tables = sa.select_tables_ref(q, marks, table, n, budgets, S, 1, 1)
    ref = sa.paged_attention_ref(q, k, v, *tables)
    assert close(sa.paged_attention_triton(q, k, v, *tables, splits=splits), ref, dtype)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_every_length_in_every_number_of_splits(splits):
    lengths = [1, 2, 3, 5, 15, 16, 17, 33, 63, 64, 65, 70]
    q, k, v, _, table, n = cache(6, 2, 32, 16, lengths)
    got = sa.paged_attention_triton(q, k, v, table, n, splits=splits)
    assert (got - sa.paged_attention_ref(q, k, v, table, n)).abs().max() < 1e-6


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 18 GB of GPU memory")
def test_a_pool_of_more_than_2_to_the_31_elements():
    """Page 131072 x stride 16384 is 2147483648, not negative."""
    N, G, S, D = 131072 + 64, 8, 16, 128
    k, v = (torch.zeros(N, G, S, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    marks = torch.zeros(N, G, D, dtype=torch.bfloat16, device="cuda")
    table = (torch.arange(N - 8, N, dtype=torch.int32, device="cuda"))[None]
    for t in range(100):
        x = torch.randn(2, 1, G, D, device="cuda").bfloat16()
        sa.append_kv(*x, k, v, marks, table, torch.tensor([t], dtype=torch.int32, device="cuda"))
    q = torch.randn(1, 16, D, device="cuda").bfloat16()
    n = torch.tensor([100], dtype=torch.int32, device="cuda")
    chosen = sa.select_pages(q, marks, table, n, torch.tensor([5], dtype=torch.int32, device="cuda"))
    last = (k[-8:].clone(), v[-8:].clone())
    ref = sa.paged_attention_ref(q, *last, *sa._tables_of(*chosen, table - (N - 8), n, S))
    assert close(sa.paged_attention(q, k, v, table, n, *chosen), ref, torch.bfloat16)


def test_what_stands_behind_the_count_may_be_anything():
    """The kernels leave it unwritten; all that read it must ignore it. Nor does the order of the pages matter."""
    q, k, v, marks, table, n = cache(4, 2, 32, 16, [40, 100])
    pages, counts = sa.select_pages_ref(q, marks, table, n, torch.tensor([2, 5], dtype=torch.int32, device=DEVICE), 16, 1, 1)
    junk = pages.clone()
    junk[0, :, 2:] = 2**30
    junk[1] = junk[1].flip(-1)
    tables, tokens = sa._tables_of(pages, counts, table, n, 16)
    more, extra = sa._tables_of(junk, counts, table, n, 16)
    assert torch.equal(tokens, extra) and tokens.tolist() == [[24, 24], [68, 68]]
    wild = tables.clone()
    wild[0, :, 2:] = 2**30
    want = sa.paged_attention_ref(q, k, v, tables, tokens)
    for attend, splits in ((sa.paged_attention_ref, {}), (sa.paged_attention_triton, {"splits": 2})):
        for t in (more, wild):
            assert close(attend(q, k, v, t, tokens, **splits), want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, G, D, S", SHAPES)
def test_select_tables(H, G, D, S, dtype):
    """Pool pages in ascending order and the tokens in them, also without a reserved last page; the scratch is left zero."""
    q, _, _, marks, table, n = cache(H, G, D, S, [1, S, S + 1, 7 * S, 7 * S + 5, 11 * S - 1], dtype)
    arrived = torch.zeros(6 * G, dtype=torch.int32, device=DEVICE)
    for first, last, budgets in ((1, 2, [1, 3, 9, 4, 5, 7]), (2, 0, [1, 2, 2, 5, 4, 3])):
        budgets = torch.tensor(budgets, dtype=torch.int32, device=DEVICE)
        want, tokens = sa.select_tables_ref(q, marks, table, n, budgets, S, first, last)
        got, counted = sa.select_pages_triton(q, marks, table, n, budgets, S, first, last, arrived, pool=True, chunk=4, tile=2)
        assert torch.equal(tokens, counted) and not arrived.any()
        for b in range(6):
            for g in range(G):
                kept = -(-int(tokens[b, g]) // S)
                assert torch.equal(want[b, g, :kept], got[b, g, :kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("H, G, D, S", SHAPES)
def test_rope_append(H, G, D, S, normed, dtype):
    """Views of one fused projection in, as decoding has them; the cache as append_kv would leave it."""
    lengths = [0, S - 1, S, 2 * S + 3]
    _, k, v, marks, table, n = cache(H, G, D, S, lengths, dtype)
    g = torch.Generator().manual_seed(3)
    qkv = torch.randn(len(lengths), H + 2 * G, D, generator=g).to(DEVICE, dtype)
    phase = torch.rand(len(lengths), D // 2, generator=g).to(DEVICE) * 100
    norms = (*(torch.rand(2, D, generator=g) + 0.5).to(DEVICE), 1e-6) if normed else None
    caches = [[x.clone() for x in (k, v, marks)] for _ in range(2)]
    want, got = (run(*qkv.split((H, G, G), 1), phase.cos(), phase.sin(), norms, *c, table, n)
                 for run, c in zip((sa.rope_append_ref, sa.rope_append_triton), caches))
    for a, b in zip((want, *caches[0]), (got, *caches[1])):
        assert close(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_and_silu_mul(dtype):
    g = torch.Generator().manual_seed(0)
    x, delta, weight = (torch.randn(*shape, generator=g).to(DEVICE) for shape in ((3, 72), (3, 72), (72,)))
    for d in (None, delta.to(dtype)):
        a, b = x.clone(), x.clone()
        assert close(sa.add_norm_ref(a, d, weight, 1e-6, dtype), sa.add_norm_triton(b, d, weight, 1e-6, dtype), dtype)
        assert close(a, b, torch.float32) and (d is None) == torch.equal(b, x)
    gate_up = torch.randn(3, 2 * 1100, generator=g).to(DEVICE, dtype)
    assert close(sa.silu_mul_ref(gate_up), sa.silu_mul_triton(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, N, K", [(1, 96, 48), (5, 130, 896), (16, 64, 1536), (33, 70, 80)])
def test_linear(B, N, K, dtype):
    """Sizes that no tile divides, unequal splits, a bias that counts once; `add_norm` sums what `linear` leaves apart."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias, stream = (torch.randn(*shape, generator=g).to(DEVICE) for shape in ((B, K), (N, K), (N,), (B, N)))
    x, weight, bias = x.to(dtype), (weight / K**0.5).to(dtype), bias.to(dtype)
    for b in (None, bias):
        want = torch.nn.functional.linear(x.float(), weight.float(), None if b is None else b.float())
        assert close(sa.linear_ref(x, weight, b), want, dtype) and close(sa.linear_triton(x, weight, b), want, dtype)
        parts = sa.linear_triton(x, weight, b, partial=True)
        assert parts.dtype == torch.float32 and close(parts.sum(0), want, torch.float32)
        for add_norm, delta in ((sa.add_norm_ref, parts), (sa.add_norm_triton, parts),
                                (sa.add_norm_triton, sa.linear_ref(x, weight, b, partial=True))):
            got = stream.clone()
            add_norm(got, delta, torch.ones(N, device=DEVICE), 1e-6, dtype)
            assert close(got, stream + want, torch.float32 if delta is parts else dtype)


def test_every_kernel_of_a_step_takes_its_turn_first():
    """One that touched memory before, or did not wait, would let the kernels behind it overtake those before it."""
    kernels = [k.fn for name, k in vars(sa).items() if name.endswith("_kernel")]
    step = [fn for fn in kernels if "PDL" in inspect.signature(fn).parameters]
    assert len(step) == 7
    for kernel in step:
        before, _ = inspect.getsource(kernel).split("\n    _take_turn(PDL)\n")
        assert not any(access in before for access in ("tl.load(", "tl.store(", "tl.atomic"))


def test_every_launch_gives_what_its_kernel_takes():
    """Fault: an argument too many, which the interpreter overlooks and a GPU refuses."""
    calls = [c for c in ast.walk(ast.parse(inspect.getsource(sa))) if isinstance(c, ast.Call)
             and isinstance(c.func, ast.Subscript) and getattr(c.func.value, "id", "").endswith("_kernel")]
    assert len(calls) >= 9
    for call in calls:
        takes = inspect.signature(getattr(sa, call.func.value.id).fn).parameters
        named = [k.arg for k in call.keywords]  # None: **_turns(x), which gives PDL
        assert set(named) <= {"num_warps", "num_stages", None, *takes}, call.func.value.id
        assert (None in named) is ("PDL" in takes), call.func.value.id


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
def test_sample_tokens(temperature):
    """Two blocks of the vocabulary and a row stride wider than it (padded ids); the same draw but for the last bit of u."""
    g = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(40, 1500, generator=g)).to(DEVICE)
    logits[:, 1300:] = 100.0  # padding: must not count
    logits[:20, 1050] = 12.0
    logits, uniforms = logits[:, :1300], torch.rand(40, generator=g).to(DEVICE)
    uniforms[:2] = torch.tensor([0.0, 1.0 - 2**-24])
    want, logp = sa.sample_tokens_ref(logits, uniforms, temperature)
    got, found = sa.sample_tokens_triton(logits, uniforms, temperature)
    assert (want == got).sum() >= 39 and (got < 1300).all() and got.max() >= 1024 > got.min()
    exact = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, got[:, None])[:, 0]
    assert (found - exact).abs().max() < 1e-4


def test_sampling_frequencies():
    """The kernel's draws follow the distribution, and a token of probability zero is never drawn."""
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], device=DEVICE)
    u = (torch.arange(1000, device=DEVICE) + 0.5) / 1000
    tokens, _ = sa.sample_tokens_triton(p.log().expand(1000, -1).contiguous(), u, 1.0)
    assert tokens.bincount(minlength=4).tolist() == [500, 0, 300, 200]
