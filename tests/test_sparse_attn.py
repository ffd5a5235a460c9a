"""Paged KV attention against loops that a reader can check by eye: cache, selection, decode, teacher forcing."""
import math

import pytest
import torch
import torch.nn.functional as F

from sparse_attn import (DENSE, append_kv, fill_kv, paged_attention, select_pages, sparse_attention,
                         sparse_attention_ref)

torch.set_num_threads(1)
HEADS = [(14, 2), (12, 2), (28, 4), (40, 8)]  # R = 7, 6, 7, 5: none a power of two
LENGTHS = [1, 15, 16, 17, 50]


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def empty_pool(G, S, D, N, dtype=torch.float32):
    """A pool full of what earlier owners left: large and finite, so that reading any of it is plain to see."""
    return [torch.full(shape, 1e3, dtype=dtype) for shape in ((N, G, S, D), (N, G, S, D), (N, G, D))]


def make_cache(lengths, G, D, S, seed=0):
    """Rows of random keys and values, and a pool that holds them in scattered pages. -> ks, vs, kp, vp, marks, table"""
    g = torch.Generator().manual_seed(seed)
    width = max(-(-T // S) for T in lengths)
    N = len(lengths) * width + 3
    kp, vp, marks = empty_pool(G, S, D, N)
    table = torch.randperm(N, generator=g)[:len(lengths) * width].view(len(lengths), width).int()
    ks = [torch.randn(G, T, D, generator=g) for T in lengths]
    vs = [torch.randn(G, T, D, generator=g) for T in lengths]
    for b, T in enumerate(lengths):
        fill_kv(ks[b], vs[b], kp, vp, marks, table[b, :-(-T // S)].long())
    return ks, vs, kp, vp, marks, table


def naive_attention(q, k, v, allowed):
    """One query token in fp64, a head at a time. q: [H,D]; k, v: [G,T,D]; allowed: for each KV head, its tokens."""
    H, G = q.shape[0], k.shape[0]
    out = []
    for h in range(H):
        g = h // (H // G)
        keys, values = k[g, allowed[g]].double(), v[g, allowed[g]].double()
        p = (keys @ q[h].double() / math.sqrt(q.shape[1])).softmax(0)
        out.append(p @ values)
    return torch.stack(out)


def naive_pages(q, k, S, budget, first, last):
    """The pages one query keeps, by the words of the rule. q: [R,D]; k: [T,D], every key so far -> sorted list"""
    n = -(-len(k) // S)
    count = min(max(budget, first + last), n)
    kept = [p for p in range(n) if p < first or p >= n - last]
    score = [sum(float(q[r].double() @ k[p * S:(p + 1) * S].double().mean(0)) for r in range(len(q))) for p in range(n)]
    others = sorted((p for p in range(n) if p not in kept), key=lambda p: (-score[p], p))
    return sorted((kept + others)[:count])


# ---- cache ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32])
def test_append_writes_one_slot_and_the_mean_of_the_keys_so_far(length):
    """Guards against landmarks that average a page's stale tail, and against writes outside the row's own slot."""
    S, G, D = 16, 2, 8
    kp, vp, marks = empty_pool(G, S, D, N=9)
    table = ints([[5, 0, 7], [2, 8, 4]])
    g = torch.Generator().manual_seed(1)
    keys = torch.randn(length + 1, 2, G, D, generator=g)
    for t in range(length):
        append_kv(keys[t], -keys[t], kp, vp, marks, table, ints([t, t]))
    before = [x.clone() for x in (kp, vp, marks)]
    append_kv(keys[length], -keys[length], kp, vp, marks, table, ints([length, length]))

    start = length // S * S
    for b in range(2):
        page, slot = int(table[b, length // S]), length % S
        assert torch.equal(kp[page, :, slot], keys[length, b]) and torch.equal(vp[page, :, slot], -keys[length, b])
        torch.testing.assert_close(marks[page], keys[start:, b].mean(0), atol=1e-6, rtol=1e-6)
        before[0][page, :, slot], before[1][page, :, slot] = keys[length, b], -keys[length, b]
        before[2][page] = marks[page]
    assert all(torch.equal(x, y) for x, y in zip((kp, vp, marks), before)), "something else was touched"


def test_append_takes_rows_of_unlike_lengths():
    """Guards against one length (or one slot) for the whole batch."""
    S, G, D = 8, 1, 4
    kp, vp, marks = empty_pool(G, S, D, N=6)
    table, k = ints([[1, 3], [5, 2]]), torch.randn(2, G, D)
    append_kv(k, k, kp, vp, marks, table, ints([8, 3]))
    assert torch.equal(kp[3, :, 0], k[0]) and torch.equal(kp[5, :, 3], k[1])
    assert torch.equal(marks[3], k[0])
    assert int((kp != 1e3).any(-1).sum()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_fill_leaves_what_repeated_append_leaves(length, dtype):
    """Guards against a prefill whose pages or landmarks differ from decoding's (a recomputed row would drift)."""
    S, G, D = 16, 2, 8
    k, v = torch.randn(2, G, length, D, generator=torch.Generator().manual_seed(length)).to(dtype)
    pages = torch.tensor([4, 0, 2][:-(-length // S)])
    filled, grown = empty_pool(G, S, D, 6, dtype), empty_pool(G, S, D, 6, dtype)
    fill_kv(k, v, *filled, pages)
    for t in range(length):
        append_kv(k[None, :, t], v[None, :, t], *grown, pages.int()[None], ints([t]))
    for t in range(length):
        for one, other in zip(filled[:2], grown[:2]):
            assert torch.equal(one[pages[t // S], :, t % S], other[pages[t // S], :, t % S])
    torch.testing.assert_close(filled[2], grown[2], atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0)
    others = [p for p in range(6) if p not in pages]
    assert all((x[others] == 1e3).all() for x in filled), "a page of somebody else was touched"


def test_fill_refuses_the_wrong_number_of_pages():
    """Guards against a prompt of exactly n pages being given n + 1, or one of n pages and a token given n."""
    kv = torch.zeros(1, 16, 4)
    for tokens, n_pages in ((16, 2), (16, 0)):
        with pytest.raises(AssertionError, match="pages"):
            fill_kv(kv[:, :tokens], kv[:, :tokens], *empty_pool(1, 16, 4, 3), torch.arange(n_pages))


# ---- selection --------------------------------------------------------------------------------------------------

def integer_rows(lengths, H, G, D, S, seed, shuffle):
    """Small integers, so that every score is exact and ties are common. -> q, marks, table, ks (keys = landmarks)"""
    g = torch.Generator().manual_seed(seed)
    width = max(-(-T // S) for T in lengths)
    q = torch.randint(-2, 3, (len(lengths), H, D), generator=g).float()
    page_keys = torch.randint(-2, 3, (len(lengths), width, G, D), generator=g).float()
    N = len(lengths) * width
    table = torch.randperm(N, generator=g) if shuffle else torch.arange(N)
    marks = torch.empty(N, G, D)
    marks[table] = page_keys.flatten(0, 1)
    ks = [page_keys[b].repeat_interleave(S, 0)[:T] for b, T in enumerate(lengths)]           # [T,G,D]
    return q, marks, table.view(len(lengths), width).int(), ks


@pytest.mark.parametrize("first,last", [(1, 2), (0, 2), (1, 0), (2, 3), (0, 0)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_selection_is_the_naive_loop(first, last, shuffle):
    """Guards against: reserved pages dropped, wrong counts, a mean or max instead of the sum over the R queries, ties
    to the higher page, one budget for all rows, and physical pages mistaken for logical ones."""
    S, H, G, D = 16, 6, 2, 3
    lengths, budgets = [1, 16, 17, 50, 150, 160, 161, 170], [9, 1, 2, 3, 5, 4, 7, DENSE]
    for seed in range(8):
        q, marks, table, ks = integer_rows(lengths, H, G, D, S, seed, shuffle)
        pages, counts = select_pages(q, marks, table, ints(lengths), ints(budgets), S, first, last)
        assert pages.dtype == counts.dtype == torch.int32
        for b, (T, budget) in enumerate(zip(lengths, budgets)):
            assert counts[b] == min(max(budget, first + last), -(-T // S))
            for g in range(G):
                got = sorted(pages[b, g, :counts[b]].tolist())
                assert got == naive_pages(q[b].view(G, H // G, D)[g], ks[b][:, g], S, budget, first, last)


def test_ties_go_to_the_lower_page():
    """Guards against an unstable sort: with every score equal, the pages after the sink are the lowest."""
    q, marks, table = torch.zeros(1, 4, 8), torch.randn(64, 2, 8), torch.arange(64).int()[None]
    pages, counts = select_pages(q, marks, table, ints([1024]), ints([9]))
    assert counts.tolist() == [9]
    for g in range(2):
        assert sorted(pages[0, g, :9].tolist()) == [0, 1, 2, 3, 4, 5, 6, 62, 63]


def test_score_is_the_sum_over_the_group():
    """Guards against max pooling over a group: page 1 is one query's best, page 2 has the larger sum."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])                                             # [B=1,H=2,D=2], G=1
    marks = torch.tensor([[0.0, 0.0], [5.0, -4.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]])[:, None]
    pages, counts = select_pages(q, marks, torch.arange(5).int()[None], ints([80]), ints([4]))
    assert sorted(pages[0, 0, :4].tolist()) == [0, 2, 3, 4] and counts.tolist() == [4]


# ---- decode -----------------------------------------------------------------------------------------------------

def check_dense(H, G, D, S):
    ks, vs, kp, vp, _, table = make_cache(LENGTHS, G, D, S, seed=H + D + S)
    q = torch.randn(len(LENGTHS), H, D, generator=torch.Generator().manual_seed(3))
    out = paged_attention(q, kp, vp, table, ints(LENGTHS))
    for b, T in enumerate(LENGTHS):
        naive = naive_attention(q[b], ks[b], vs[b], [range(T)] * G)
        torch.testing.assert_close(out[b].double(), naive, atol=2e-6, rtol=1e-5)
        sdpa = F.scaled_dot_product_attention(q[b, None, :, None], ks[b][None], vs[b][None], enable_gqa=True)
        torch.testing.assert_close(out[b], sdpa[0, :, 0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("D", [64, 80, 96, 128])
@pytest.mark.parametrize("H,G", HEADS)
def test_dense_decode_is_attention(H, G, D):
    """Guards against query heads that read the wrong KV head, and padding to a power of two that leaks."""
    check_dense(H, G, D, 16)


@pytest.mark.parametrize("S", [8, 32, 64, 128])
def test_dense_decode_at_every_page_size(S):
    """Guards against a page size of 16 baked in, and against a last page read to its end."""
    check_dense(14, 2, 80, S)


@pytest.mark.parametrize("H,G,D,S", [(14, 2, 80, 8), (40, 8, 64, 16), (12, 2, 96, 16), (4, 4, 128, 32)])
def test_decode_over_selected_pages_with_unequal_counts(H, G, D, S):
    """Guards against entries behind a row's count being read, and one KV head's pages used for another."""
    lengths, counts = [1, 17, 50, 200, 197], [1, 1, 2, 4, 6]
    ks, vs, kp, vp, _, table = make_cache(lengths, G, D, S)
    g = torch.Generator().manual_seed(5)
    q, K = torch.randn(5, H, D, generator=g), 6
    pages = torch.zeros(5, G, K, dtype=torch.int32)  # behind its count a row repeats page 0: twice read is a wrong sum
    for b, T in enumerate(lengths):
        n = -(-T // S)
        for head in range(G):
            chosen = torch.randperm(n, generator=g)[:counts[b]]
            pages[b, head, :len(chosen)] = chosen
    counts = ints([min(c, -(-T // S)) for c, T in zip(counts, lengths)])
    out = paged_attention(q, kp, vp, table, ints(lengths), pages, counts)
    for b, T in enumerate(lengths):
        allowed = [[t for t in range(T) if t // S in pages[b, head, :counts[b]].tolist()] for head in range(G)]
        naive = naive_attention(q[b], ks[b], vs[b], allowed)
        torch.testing.assert_close(out[b].double(), naive, atol=2e-6, rtol=1e-5)


def test_order_of_pages_does_not_matter():
    """Guards against a mask built from the place in the list, not the page: the short last page may come first."""
    _, _, kp, vp, _, table = make_cache([50], 2, 64, 16)
    q, pages = torch.randn(1, 4, 64), ints([0, 1, 2, 3]).expand(1, 2, 4)
    a = paged_attention(q, kp, vp, table, ints([50]), pages, ints([4]))
    b = paged_attention(q, kp, vp, table, ints([50]), pages.flip(-1), ints([4]))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(a, paged_attention(q, kp, vp, table, ints([50])), atol=1e-6, rtol=1e-5)


def test_bf16_cache_is_computed_in_fp32():
    """Guards against a softmax or a sum in bf16: the result is the fp64 one on the same bf16 numbers, rounded once."""
    ks, vs, kp, vp, _, table = make_cache([300], 2, 64, 16)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = paged_attention(q, kp.bfloat16(), vp.bfloat16(), table, ints([300]))
    naive = naive_attention(q[0], ks[0].bfloat16(), vs[0].bfloat16(), [range(300)] * 2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].double(), naive, atol=1e-5, rtol=2**-8)


# ---- teacher forcing --------------------------------------------------------------------------------------------

def qkv(B, H, G, T, D, seed=0, **kw):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, heads, T, D, generator=g).requires_grad_(kw.get("grad", False)) for heads in (H, G, G)]


def decode(q, k, v, budgets, S, first, last):
    """One token at a time through the paged cache, as the actor generates. budgets: [B,T] -> [B,H,T,D]"""
    (B, H, T, D), G = q.shape, k.shape[1]
    width = -(-T // S)
    kp, vp, marks = empty_pool(G, S, D, B * width)
    table = torch.randperm(B * width, generator=torch.Generator().manual_seed(9)).view(B, width).int()
    out = []
    for t in range(T):
        append_kv(k[:, :, t], v[:, :, t], kp, vp, marks, table, ints([t] * B))
        lengths = ints([t + 1] * B)
        chosen = select_pages(q[:, :, t], marks, table, lengths, budgets[:, t].contiguous(), S, first, last)
        out.append(paged_attention(q[:, :, t], kp, vp, table, lengths, *chosen))
    return torch.stack(out, 2)


def naive_mask(q, k, budgets, S, first, last):
    """[B,G,T,T] bool: which key each query of a group may see. Plain loops."""
    (B, H, T, D), G = q.shape, k.shape[1]
    mask = torch.zeros(B, G, T, T, dtype=torch.bool)
    for b in range(B):
        for g in range(G):
            for t in range(T):
                queries = q[b].view(G, H // G, T, D)[g, :, t]
                for page in naive_pages(queries, k[b, g, :t + 1], S, int(budgets[b, t]), first, last):
                    mask[b, g, t, page * S:min((page + 1) * S, t + 1)] = True
    return mask


def naive_sparse(q, k, v, mask):
    R = q.shape[1] // k.shape[1]
    k, v, mask = (x.repeat_interleave(R, 1) for x in (k.double(), v.double(), mask))
    att = (q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
    return att.softmax(-1) @ v


@pytest.mark.parametrize("H,G,D,T", [(14, 2, 64, 50), (12, 2, 80, 17), (28, 4, 96, 16), (40, 8, 128, 15),
                                     (4, 2, 64, 1)])
def test_dense_budget_is_causal_attention(H, G, D, T):
    """Guards against a prompt (budget DENSE) that is not plain causal attention, an overflow of DENSE included."""
    q, k, v = qkv(2, H, G, T, D)
    out = sparse_attention(q, k, v, torch.full((T,), DENSE, dtype=torch.int32))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("S", [8, 16, 32])
@pytest.mark.parametrize("first,last", [(1, 2), (1, 0), (0, 2), (0, 1), (2, 3)])
def test_teacher_forcing_is_decoding(S, first, last):
    """Guards against a page scored with keys the token had not seen yet (a half-filled page's landmark is a running
    mean; it decides with last=0, when a query's own page competes), and budgets off by one token."""
    B, H, G, T, D = 2, 6, 2, 5 * S + 3, 16
    q, k, v = qkv(B, H, G, T, D, seed=S)
    budgets = torch.randint(1, 7, (B, T), generator=torch.Generator().manual_seed(4)).int()
    out = sparse_attention(q, k, v, budgets, S, first, last)
    torch.testing.assert_close(out, decode(q, k, v, budgets, S, first, last), atol=1e-5, rtol=1e-5)
    wrong = sparse_attention(q, k, v, budgets.roll(1, -1), S, first, last)
    assert (out - wrong).abs().max() > 0.05, "the budgets make no difference, so this proves nothing"


def test_dense_prompt_then_sparse_response():
    """Guards against a recomputed row (prompt dense, response by its schedule) that differs from how it was made."""
    T, S, prompt = 90, 8, 37
    q, k, v = qkv(1, 4, 2, T, 16, seed=3)
    budgets = torch.cat([torch.full((prompt,), DENSE), torch.full((T - prompt,), 4)]).int()
    out = sparse_attention(q, k, v, budgets, S)
    torch.testing.assert_close(out, decode(q, k, v, budgets[None], S, 1, 2), atol=1e-5, rtol=1e-5)
    dense = sparse_attention(q, k, v, torch.full_like(budgets, DENSE), S)
    torch.testing.assert_close(out[:, :, :prompt], dense[:, :, :prompt], atol=2e-6, rtol=1e-5)
    assert (out - dense)[:, :, prompt:].abs().max() > 0.05


def test_one_budget_row_serves_the_batch():
    """Guards against a [T] budget being read as [B]."""
    q, k, v = qkv(3, 4, 2, 70, 16)
    budgets = torch.randint(1, 6, (70,), generator=torch.Generator().manual_seed(1)).int()
    assert torch.equal(sparse_attention(q, k, v, budgets), sparse_attention(q, k, v, budgets.repeat(3, 1)))


@pytest.mark.parametrize("first,last", [(1, 2), (1, 0)])
def test_gradients_are_those_of_masked_attention(first, last):
    """Guards against gradient through the choice of pages, lost gradient to k or v (a detach too many), and a group's
    heads not summed into their KV head."""
    B, H, G, T, D, S = 2, 4, 2, 45, 8, 8
    q, k, v = qkv(B, H, G, T, D, grad=True)
    budgets = torch.randint(1, 5, (B, T), generator=torch.Generator().manual_seed(6)).int()
    weight = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        mask = naive_mask(q, k, budgets, S, first, last)
    want_out = naive_sparse(q, k, v, mask)
    want = torch.autograd.grad((want_out * weight).sum(), (q, k, v))
    for chunk in (7, 256):
        out = sparse_attention_ref(q, k, v, budgets, S, first, last, chunk)
        torch.testing.assert_close(out.double(), want_out, atol=2e-6, rtol=1e-5)
        got = torch.autograd.grad((out * weight).sum(), (q, k, v))
        for name, x, y in zip("qkv", got, want):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4, msg=lambda m: f"gradient of {name}, {chunk}: {m}")


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_gradient_is_the_slope(which):
    """Guards against an autograd that agrees with itself only: a central difference along a random direction."""
    B, H, G, T, D, S, h = 1, 4, 2, 40, 8, 8, 2e-3
    tensors = dict(zip("qkv", qkv(B, H, G, T, D, seed=11)))
    tensors["q"][..., 0] = 2.0                                 # pages far apart in score, lest a step change the choice
    tensors["k"][..., 0] = torch.tensor([1.0, 3.0, 0.0, 4.0, 2.0]).repeat_interleave(S)
    for name in "qk":
        tensors[name][..., 1:] *= 0.3
    budgets = torch.full((B, T), 4, dtype=torch.int32)
    d = torch.randn(tensors[which].shape, generator=torch.Generator().manual_seed(12))
    weight = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(13))

    def loss(step):
        args = tensors | {which: tensors[which] + step * d}
        mask = naive_mask(args["q"], args["k"], budgets, S, 1, 2)
        return (sparse_attention(*args.values(), budgets, S).double() * weight).sum(), mask

    (up, mask_up), (down, mask_down) = loss(h), loss(-h)
    assert torch.equal(mask_up, mask_down), "the step changed the choice: take another seed"
    x = tensors[which].requires_grad_()
    out = sparse_attention(*tensors.values(), budgets, S)
    slope = (torch.autograd.grad((out * weight).sum(), x)[0] * d).sum()
    torch.testing.assert_close(float(slope), float(up - down) / (2 * h), rtol=5e-3, atol=5e-2)


def test_chunks_do_not_matter():
    """Guards against a memory knob that changes the mathematics, chunk edges inside a page included."""
    q, k, v = qkv(2, 6, 2, 131, 16, grad=True)
    budgets = torch.randint(1, 8, (2, 131), generator=torch.Generator().manual_seed(8)).int()
    one, other = (sparse_attention_ref(q, k, v, budgets, 16, chunk=c) for c in (7, 256))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (one, other)]
    for x, y in zip(*grads):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_memory_is_linear_in_length():
    """Guards against a T x T matrix kept for the backward pass, in one piece or as a chunk each."""
    T, saved = 1024, {}
    q, k, v = qkv(1, 2, 1, T, 8, grad=True)

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = sparse_attention_ref(q, k, v, torch.full((T,), 8, dtype=torch.int32), chunk=64)
    assert max(saved.values(), default=0) < T * T
    assert sum(saved.values()) < T * T / 4, f"{sum(saved.values())} elements kept, in {len(saved)} tensors"
    out.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in (q, v))
