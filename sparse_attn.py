"""Paged KV attention, dense and block-sparse: the chapter about tensors.

A row (one sequence being generated) keeps its keys and values in *pages* of S tokens. Pages live in one pool per
layer; a row's page table says which pool page holds its tokens 0..S-1, S..2S-1, and so on. Beside every page we keep
one vector per KV head, its *landmark*: the mean of the keys written to it so far (after RoPE).

Reading the whole cache for every new token is what makes long generation slow. Sparrow (arXiv 2606.08446) reads only
the pages whose landmark agrees best with the query, chosen anew for each token, layer and KV head:

    append_kv         write one token's K and V, refresh its page's landmark
    select_pages      score every page by  sum over the group's queries of  q . landmark,  keep the best K
    paged_attention   softmax attention over the selected pages only (or over all of them: the dense baseline)

Three pages are always kept: the first (the attention sink) and the last two (the recent past). How many pages a row
may keep, its *budget*, is a number per row and per token: `sparrow.Schedule` decides it.

    sparse_attention  the same thing *teacher-forced*: all T tokens of a sequence at once, each with its own budget,
                      differentiable. What decoding gave token by token, this gives in one pass; so it can score a
                      rollout, train the sparse actor, and refill the cache of a row that was pushed out of memory.

A decode step has a few more operations around and between these, and a draw at its end:

    rope_append       append_kv with the norms and the rotation before it        add_norm, silu_mul, sample_tokens
    select_tables     select_pages in the form that paged_attention reads fastest
    linear            the matrix products, of so few rows that reading the weights is the work

Each operation has a PyTorch reference, `*_ref`, written to be read, and a Triton kernel, `*_triton`, of the same
signature. The unsuffixed name is what the rest of the project calls; it asserts shapes and types first, then picks the
implementation for the device. Read the references first, then the names at the end, then the kernels.

A step is hundreds of short kernels, with gaps between them as long as some of them. From Hopper on a kernel may be
launched while the one before it still runs (*programmatic dependent launch*). So every short kernel of a decode step begins
with `_take_turn`: it waits until the one before is complete and its writes are visible, then lets the next one come. That
one had itself waited before it could complete, hence all before it are complete too; one kernel launched so that did not
wait would break this for all behind it. Ordinary launches wait for the kernel before them as ever and may stand anywhere
between: cuBLAS's, PyTorch's, and selection and attention, whose programs must find the multiprocessors empty to spread
evenly over them.

Shape legend: B rows, T tokens, H query heads, G KV heads, R = H/G query heads per KV head, D head dim, N pages in the
pool, P pages of a row (the page table's width), S page size, K selected pages.

    python sparse_attn.py        checks that all ways to the same attention agree; on a GPU, times them against their bytes
"""
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # no Triton on this platform: everything runs on the references
    triton, tl, jit = None, SimpleNamespace(constexpr=int), lambda f: f

DENSE = 2**30  # a budget that covers every page: such a position attends densely
FEW_ROWS = 32  # up to here, as measured, `linear` has its own kernel: reading the weights is the work


# ---- the cache: one token, or a whole prompt --------------------------------------------------------------------

def append_kv_ref(k, v, k_pages, v_pages, landmarks, page_table, lengths):
    S = k_pages.shape[2]
    rows = torch.arange(k.shape[0], device=k.device)
    page = page_table[rows, lengths.long() // S].long()  # [B] the pool page that holds token `lengths[b]`
    slot = lengths.long() % S                            # [B] its place in that page
    k_pages[page, :, slot] = k.to(k_pages.dtype)         # [B,G,D]
    v_pages[page, :, slot] = v.to(v_pages.dtype)
    # The page may hold stale keys of an earlier owner behind `slot`: average what this row has written, no more.
    written = torch.arange(S, device=k.device) <= slot[:, None]                          # [B,S]
    keys = k_pages[page].float().masked_fill(~written[:, None, :, None], 0)              # [B,G,S,D]
    landmarks[page] = (keys.sum(2) / (slot + 1)[:, None, None]).to(landmarks.dtype)


def fill_kv(k, v, k_pages, v_pages, landmarks, pages):
    """Write a whole sequence into empty pages: the bulk form of `append_kv`, for prompts and recomputed rows.

    k, v: [G,T,D]; pages: [ceil(T/S)] the pool pages to fill, in order. Landmarks as `append_kv` would leave them.
    """
    (G, T, D), S, P = k.shape, k_pages.shape[2], len(pages)
    assert P == -(-T // S), f"{T} tokens fill {-(-T // S)} pages of {S}, got {P}"
    for x, pool in ((k, k_pages), (v, v_pages)):
        x = F.pad(x, (0, 0, 0, P * S - T)).view(G, P, S, D)
        pool[pages] = x.transpose(0, 1).to(pool.dtype)                                   # [P,G,S,D]
    landmarks[pages] = _page_means(k.to(k_pages.dtype), S).transpose(0, 1).to(landmarks.dtype)


def _page_means(k, S):
    """Mean key of every page of a sequence: [..., T, D] -> [..., ceil(T/S), D], fp32; the last page may be short."""
    T = k.shape[-2]
    k = F.pad(k.float(), (0, 0, 0, -T % S)).unflatten(-2, (-1, S))                       # [...,P,S,D]
    count = (T - torch.arange(k.shape[-3], device=k.device) * S).clamp(max=S)            # [P] tokens in each page
    return k.sum(-2) / count[:, None]


# ---- selection --------------------------------------------------------------------------------------------------

def _choose(scores, lengths, budgets, page_size, first, last):
    """The rule of selection, shared by decoding and teacher forcing.

    scores: [..., P], lengths and budgets: broadcastable to [...]. Returns (order [..., P], counts [...]): the first
    counts entries of `order` are the pages kept.
    """
    page = torch.arange(scores.shape[-1], device=scores.device)
    n_pages = (lengths + page_size - 1) // page_size
    counts = torch.minimum(budgets.clamp(min=first + last), n_pages)
    reserved = (page < first) | (page >= n_pages[..., None] - last)
    scores = scores.masked_fill(reserved, float("inf"))
    scores = scores.masked_fill(page >= n_pages[..., None], float("-inf"))
    # A stable sort breaks ties toward the lower page, so that every implementation picks the same pages.
    return scores.sort(dim=-1, descending=True, stable=True).indices, counts


def _group_query(q, G):
    """The sum over a group's R queries of q . landmark is one dot product with their sum. [B,H,...,D] -> [B,G,...,D] fp32"""
    return q.unflatten(1, (G, -1)).float().sum(2)


def select_pages_ref(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2):
    marks = F.embedding(page_table.long(), landmarks.flatten(1)).unflatten(-1, landmarks.shape[1:])  # [B,P,G,D]
    scores = torch.einsum("bgd,bpgd->bgp", _group_query(q, landmarks.shape[1]), marks.float())       # [B,G,P]
    order, counts = _choose(scores, lengths[:, None], budgets[:, None], page_size, first, last)
    K = int(counts.max())  # the widest row; a narrower one ignores what stands behind its count
    return order[..., :K].int(), counts[:, 0].int()


def _tables_of(pages, counts, page_table, lengths, page_size):
    """Logical pages and counts -> each KV head's own page table [B,G,K], and how many tokens it holds [B,G].

    In ascending order only the last page can be partly filled: so the tokens to read are the first so many again.
    """
    kept = torch.arange(pages.shape[-1], device=pages.device) < counts[:, None, None]    # [B,1,K]
    pages = pages.masked_fill(~kept, 2**30).sort(-1).values
    tokens = (lengths[:, None, None] - pages * page_size).clamp(0, page_size).masked_fill(~kept, 0).sum(-1)
    pool = page_table[:, None].expand(-1, pages.shape[1], -1).gather(2, pages.masked_fill(~kept, 0).long())
    return pool, tokens.int()


def select_tables_ref(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2):
    pages, counts = select_pages_ref(q, landmarks, page_table, lengths, budgets, page_size, first, last)
    return _tables_of(pages, counts, page_table, lengths, page_size)


# ---- decode: one query token per row ----------------------------------------------------------------------------

def paged_attention_ref(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (N, G, S, _) = q.shape, k_pages.shape
    if page_table.ndim == 2:  # all heads read the same pages
        page_table, lengths = page_table[:, None].expand(B, G, -1), lengths[:, None].expand(B, G)
    T = page_table.shape[2] * S
    there = torch.arange(T, device=q.device) < lengths[..., None]                        # [B,G,T]
    pool = page_table.long().masked_fill(~there[..., ::S], 0)  # what stands behind the last page may be anything
    # An embedding look-up of (page, head) rows is the fastest gather PyTorch has.
    at = pool * G + torch.arange(G, device=q.device)[:, None]                            # [B,G,K]
    k, v = (F.embedding(at, x.view(N * G, S * D)).view(B, G, T, D).float() for x in (k_pages, v_pages))
    att = q.view(B, G, H // G, D).float() @ k.transpose(-1, -2) * D**-0.5                # [B,G,R,T]
    att = att.masked_fill(~there[:, :, None], float("-inf")).softmax(-1)
    return (att @ v).view(B, H, D).to(q.dtype)


# ---- the rest of a decode step: between the matrix products, and the draw at the end ------------------------------

def rms_norm(x, weight, eps):
    """RMSNorm over the last dimension, in fp32; the caller casts the result."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x, cos, sin):
    """RoPE in Hugging Face's half-split layout, fp32. x: [...,heads,D]; cos, sin: [...,1,D/2]"""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_append_ref(q, k, v, cos, sin, norms, *cache):
    if norms:
        q_norm, k_norm, eps = norms
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = (rotate(x, cos[:, None], sin[:, None]).to(v.dtype) for x in (q, k))
    append_kv_ref(k, v, *cache)
    return q


def linear_ref(x, weight, bias=None, partial=False):
    y = F.linear(x, weight, bias)
    return y[None] if partial else y


def add_norm_ref(x, delta, weight, eps, dtype):
    if delta is not None:
        x += delta.view(-1, *x.shape).sum(0)
    return rms_norm(x, weight, eps).to(dtype)


def silu_mul_ref(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sample_tokens_ref(logits, uniforms, temperature):
    logits = logits.float()
    logp = (logits / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        cdf = logp.exp().cumsum(-1)  # right: the first entry *above* u, so a token of probability 0 is never drawn
        token = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None])[:, 0]


# ---- teacher-forced: all query tokens of a sequence at once -----------------------------------------------------

def sparse_attention_ref(q, k, v, budgets, page_size=16, first=1, last=2, chunk=256):
    (B, _, C, _), T = q.shape, k.shape[2]
    budgets = budgets.expand(B, C)
    means, running = _teacher_landmarks(k.detach(), C, page_size)                        # [B,G,P,D], [B,G,C,D]
    out = []
    for c0 in range(0, C, chunk):
        # A chunk sees the keys up to its last token. Recomputed in the backward pass: memory is chunk x T, not C x T.
        c1 = min(c0 + chunk, C)
        t0, t1 = T - C + c0, T - C + c1
        args = (q[:, :, c0:c1], k[:, :, :t1], v[:, :, :t1], means, running[:, :, c0:c1], budgets[:, c0:c1], t0,
                page_size, first, last)
        recompute = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out.append(checkpoint(_sparse_chunk, *args, use_reentrant=False) if recompute else _sparse_chunk(*args))
    return torch.cat(out, dim=2)


def _running_page_mean(k, S):
    """Landmark of token t's own page as token t saw it: the mean of that page's keys up to and with t. [..., T, D]"""
    T = k.shape[-2]
    k = F.pad(k.float(), (0, 0, 0, -T % S)).unflatten(-2, (-1, S)).cumsum(-2)
    return (k / torch.arange(1, S + 1, device=k.device)[:, None]).flatten(-3, -2)[..., :T, :]


def _teacher_landmarks(k, C, S):
    """Of every page, and of its own unfinished page as each of the last C tokens saw it: [...,P,D] and [...,C,D]."""
    start = (k.shape[-2] - C) // S * S  # where the first query's page begins
    return _page_means(k, S).to(k.dtype), _running_page_mean(k[..., start:, :], S)[..., -C:, :].to(k.dtype)


def _teacher_scores(q, means, running, t0, S):
    """Page scores of queries t0..t0+C-1. q: [B,H,C,D]; means: [B,G,>=P,D]; running: [B,G,C,D] -> [B,G,C,P] fp32"""
    (B, _, C, _), G = q.shape, means.shape[1]
    P = -(-(t0 + C) // S)
    query = torch.arange(t0, t0 + C, device=q.device)
    q_sum = _group_query(q, G)                                                           # [B,G,C,D]
    scores = q_sum @ means[:, :, :P].float().transpose(-1, -2)                           # [B,G,C,P]
    own = (q_sum * running.float()).sum(-1, keepdim=True)                                # [B,G,C,1]
    return scores.scatter_(-1, (query // S).view(1, 1, C, 1).expand(B, G, C, 1), own)


def _sparse_chunk(q, k, v, means, running, budgets, t0, S, first, last):
    """Queries t0..t0+C-1 over keys 0..t0+C-1. q: [B,H,C,D]; k, v: [B,G,t1,D]; running: [B,G,C,D]; budgets: [B,C]"""
    (B, H, C, D), (_, G, t1, _) = q.shape, k.shape
    query = torch.arange(t0, t0 + C, device=q.device)
    with torch.no_grad():  # which pages to read is a choice, not a function to differentiate
        scores = _teacher_scores(q, means, running, t0, S)                               # [B,G,C,P]
        order, counts = _choose(scores, query + 1, budgets[:, None], S, first, last)
        rank = order.argsort(-1)                                                         # [B,G,C,P] page -> place
        kept = (rank < counts[..., None]).repeat_interleave(S, dim=-1)[..., :t1]         # [B,G,C,t1]
        kept &= torch.arange(t1, device=q.device) <= query[:, None]                      # causal
    att = q.view(B, G, H // G, C, D).float() @ k.float().transpose(-1, -2)[:, :, None] * D**-0.5
    att = att.masked_fill(~kept[:, :, None], float("-inf")).softmax(-1)                  # [B,G,R,C,t1]
    return (att @ v.float()[:, :, None]).view(B, H, C, D).to(q.dtype)


# ---- Triton kernels of the decode step --------------------------------------------------------------------------
# Decoding is bound by bytes, so each kernel reads what it must once and keeps nothing else in memory. Lengths, budgets
# and page tables are read on the device: a captured CUDA graph stays right while they change. TRITON_INTERPRET=1 runs
# all of them on CPU tensors, which is how they are tested without a GPU.


@jit
def _take_turn(PDL: tl.constexpr):
    """Wait until all kernels before this one are complete, then let the next be launched: one ahead, no more."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def _turns(x):
    """Launch options of a kernel that takes its turn: programmatic dependent launch, where there is such a thing."""
    nvidia = x.is_cuda and torch.version.cuda and not triton.knobs.runtime.interpret
    pdl = nvidia and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return dict(PDL=True, launch_pdl=True) if pdl else dict(PDL=False)


@jit
def _append_kernel(q, k, v, cos, sin, q_norm, k_norm, q_out, k_pages, v_pages, landmarks, table, lengths, q_row, q_head, k_row,
                   k_head, v_row, v_head, table_row, H, G, eps, ROPE: tl.constexpr, NORM: tl.constexpr, S: tl.constexpr,
                   D: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr):
    """One program a (row, head), the H query heads first: norm and rotate one vector, held as its two halves; then a query
    goes out, and a key goes into its page with its value, where the page's keys are averaged anew (S is small)."""
    b, h, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BH)
    half: tl.constexpr = D // 2
    _take_turn(PDL)
    ok, g, n = i < half, h - H, tl.load(lengths + b)
    page = tl.load(table + b * table_row + n // S).to(tl.int64) * G + g  # asked for early: the longest wait
    at, norm = k + b * k_row + g * k_head + i, k_norm
    if h < H:
        at, norm = q + b * q_row + h * q_head + i, q_norm
    x1, x2 = tl.load(at, ok, 0.0).to(tl.float32), tl.load(at + half, ok, 0.0).to(tl.float32)
    if NORM:
        scale = 1 / tl.sqrt_rn((tl.sum(x1 * x1, 0) + tl.sum(x2 * x2, 0)) / D + eps)
        x1 = x1 * scale * tl.load(norm + i, ok, 0.0).to(tl.float32)
        x2 = x2 * scale * tl.load(norm + half + i, ok, 0.0).to(tl.float32)
    if ROPE:
        c, s = tl.load(cos + b * half + i, ok, 0.0), tl.load(sin + b * half + i, ok, 0.0)
        x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
    if h < H:
        tl.store(q_out + (b * H + h) * D + i, x1, ok)
        tl.store(q_out + (b * H + h) * D + half + i, x2, ok)
    else:
        slot, t = n % S, tl.arange(0, S)[:, None]
        k1, k2 = x1.to(k_pages.dtype.element_ty), x2.to(k_pages.dtype.element_ty)
        before, mine = (t < slot) & ok, (page * S + slot) * D + i
        keys = k_pages + (page * S + t) * D + i                                          # [S,BH]
        sum1 = tl.sum(tl.load(keys, before, 0.0).to(tl.float32), 0) + k1.to(tl.float32)
        sum2 = tl.sum(tl.load(keys + half, before, 0.0).to(tl.float32), 0) + k2.to(tl.float32)
        value = v + b * v_row + g * v_head + i
        tl.store(landmarks + page * D + i, sum1 / (slot + 1), ok)
        tl.store(landmarks + page * D + half + i, sum2 / (slot + 1), ok)
        tl.store(k_pages + mine, k1, ok)
        tl.store(k_pages + mine + half, k2, ok)
        tl.store(v_pages + mine, tl.load(value, ok, 0.0), ok)
        tl.store(v_pages + mine + half, tl.load(value + half, ok, 0.0), ok)


def append_kv_triton(k, v, k_pages, v_pages, landmarks, page_table, lengths):
    (B, G, D), S = k.shape, k_pages.shape[2]
    _append_kernel[B, G](k, k, v, k, k, k, k, k, k_pages, v_pages, landmarks, page_table, lengths, 0, 0, *k.stride()[:2],
                         *v.stride()[:2], page_table.stride(0), 0, G, 0.0, False, False, S, D,
                         triton.next_power_of_2(D // 2), num_warps=1, **_turns(k))


def rope_append_triton(q, k, v, cos, sin, norms, k_pages, v_pages, landmarks, page_table, lengths):
    (B, H, D), G, S = q.shape, k.shape[1], k_pages.shape[2]
    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    q_norm, k_norm, eps = norms or (q, k, 0.0)
    _append_kernel[B, H + G](q, k, v, cos, sin, q_norm, k_norm, out, k_pages, v_pages, landmarks, page_table, lengths,
                             *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], page_table.stride(0), H, G, eps, True,
                             norms is not None, S, D, triton.next_power_of_2(D // 2), num_warps=1, **_turns(q))
    return out


@jit
def _keep_best(score, count):
    """Which entries of each row of score [Q,P] are its `count` [Q,1] best, exactly; ties to the lower index. -> int32 0 or 1

    A float's bits, its negative half turned over, order like unsigned integers; so the count-th largest is found bit by bit,
    counting over the row, with no sort, and often long before the last bit.
    """
    bits = (score + 0.0).to(tl.uint32, bitcast=True)  # -0.0 becomes 0.0
    key = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    cut, n_kept, bit = tl.zeros_like(count).to(tl.uint32), tl.zeros_like(count) + score.shape[1], tl.full([], 31, tl.int32)
    while (tl.sum((n_kept != count).to(tl.int32)) > 0) & (bit >= 0):
        trial = cut | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
        n = tl.sum((key >= trial).to(tl.int32), 1, keep_dims=True)
        cut, n_kept = tl.where(n >= count, trial, cut), tl.where(n >= count, n, n_kept)
        bit -= 1
    keep = (key >= cut).to(tl.int32)
    if bit < 0:  # maybe ties at the cut, and not room for all
        tied = (key == cut).to(tl.int32)
        keep = tl.where(tl.cumsum(tied, 1) * tied <= count - tl.sum(keep - tied, 1, keep_dims=True), keep, 0)
    return keep


@jit
def _select_kernel(q, landmarks, table, lengths, budgets, scores, pages, counts, arrived, q_row, q_head, table_row, P, first,
                   last, POOL: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
                   BP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """One program a (chunk of pages, KV head, row): score the chunk's pages by q . landmark. Of a row and head's programs the
    one that finishes last keeps the exact `count` best, in ascending order: so choosing overlaps with other rows' scoring.
    """
    g, c, b, G = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    length, d = tl.load(lengths + b), tl.arange(0, BD)
    n_pages = (length + S - 1) // S
    query = tl.zeros([BD], tl.float32)
    for r in tl.static_range(R):
        query += tl.load(q + b * q_row + (g * R + r) * q_head + d, d < D, 0.0).to(tl.float32)
    scores += (b * G + g) * P
    for start in tl.range(c * CHUNK, tl.minimum((c + 1) * CHUNK, n_pages), TILE):
        p = start + tl.arange(0, TILE)
        page = tl.load(table + b * table_row + p, p < n_pages, 0).to(tl.int64) * G + g
        marks = tl.load(landmarks + page[:, None] * D + d, (p < n_pages)[:, None] & (d < D), 0.0)  # [TILE,BD]
        tl.store(scores + p, tl.sum(marks.to(tl.float32) * query, 1), p < n_pages)
    tl.debug_barrier()  # the whole chunk is written before it is counted as there
    if tl.atomic_add(arrived + b * G + g, 1) == tl.num_programs(1) - 1:
        tl.store(arrived + b * G + g, 0)  # ready for the next launch
        p = tl.arange(0, BP)[None, :]
        score = tl.load(scores + p, p < n_pages, float("-inf"), cache_modifier=".cg")
        score = tl.where(((p < first) | (p >= n_pages - last)) & (p < n_pages), float("inf"), score)
        count = tl.minimum(tl.maximum(tl.load(budgets + b), first + last), n_pages)
        keep = _keep_best(score, tl.full([1, 1], 0, tl.int32) + count)                    # [1,BP]
        place = pages + (b * G + g) * P + tl.cumsum(keep, 1) - 1
        if POOL:
            tl.store(place, tl.load(table + b * table_row + p, keep > 0, 0), keep > 0)
            tl.store(counts + b * G + g, tl.sum(tl.where(keep > 0, tl.minimum(length - p * S, S), 0)))
        else:
            tl.store(place, p, keep > 0)
            tl.store(counts + b, count)  # every head writes the same


def select_pages_triton(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2, arrived=None, pool=False,
                        chunk=256, tile=128):
    (B, H, D), G, P = q.shape, landmarks.shape[1], page_table.shape[1]
    scores = torch.empty(B, G, P, device=q.device)
    pages = torch.empty(B, G, P, dtype=torch.int32, device=q.device)
    counts = torch.empty((B, G) if pool else (B,), dtype=torch.int32, device=q.device)
    arrived = torch.zeros(B * G, dtype=torch.int32, device=q.device) if arrived is None else arrived
    _select_kernel[G, triton.cdiv(P, chunk), B](
        q, landmarks, page_table, lengths, budgets, scores, pages, counts, arrived, q.stride(0), q.stride(1),
        page_table.stride(0), P, first, last, pool, H // G, page_size, D, triton.next_power_of_2(D), triton.next_power_of_2(P),
        chunk, tile, num_warps=4)
    return pages, counts


@jit
def _attend_kernel(q, k_pages, v_pages, table, lengths, out, parts, stats, q_row, q_head, table_row, table_head, length_row,
                   length_head, G, scale, R: tl.constexpr, BR: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
                   BD: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr):
    """One program a (row, KV head, split of the tokens): online softmax over its tiles, for the group's R queries at once.

    A split with no tokens leaves weight 0. scale includes log2(e): powers of two are what the hardware has.
    """
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d, t = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, TILE)
    length = tl.load(lengths + b * length_row + g * length_head)
    per_split = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    table += b * table_row + g * table_head
    query = tl.load(q + b * q_row + (g * R + r[:, None]) * q_head + d, (r[:, None] < R) & (d < D), 0.0)  # [BR,BD]
    best = tl.full([BR], float("-inf"), tl.float32)
    weight, acc = tl.zeros([BR], tl.float32), tl.zeros([BR, BD], tl.float32)
    for start in tl.range(split * per_split, tl.minimum((split + 1) * per_split, length), TILE, num_stages=STAGES):
        j = start + t
        page = tl.load(table + j // S, j < length, 0).to(tl.int64) * G + g
        at = ((page * S + j % S) * D)[:, None] + d                                        # [TILE,BD] 64-bit offsets
        ok = (j < length)[:, None] & (d < D)
        key = tl.load(k_pages + at, ok, 0.0)
        value = tl.load(v_pages + at, ok, 0.0)
        score = tl.dot(query.to(key.dtype), tl.trans(key), input_precision="ieee") * scale  # [BR,TILE]
        score = tl.where(j < length, score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))  # finite: every tile has a first token
        p = tl.exp2(score - top[:, None])
        fade = tl.exp2(best - top)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    if SPLITS == 1:
        tl.store(out + ((b * G + g) * R + r[:, None]) * D + d, acc / weight[:, None], (r[:, None] < R) & (d < D))
    else:
        row = ((b * G + g) * SPLITS + split) * R + r
        tl.store(parts + row[:, None] * D + d, acc, (r[:, None] < R) & (d < D))
        tl.store(stats + row * 2, best, r < R)
        tl.store(stats + row * 2 + 1, weight, r < R)


@jit
def _merge_kernel(parts, stats, out, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
                  PDL: tl.constexpr):
    """One program a (row * KV head, query of the group): join the splits, each weighted by 2 to the power of its maximum."""
    bg, r, d, s = tl.program_id(0), tl.program_id(1), tl.arange(0, BD), tl.arange(0, SPLITS)
    _take_turn(PDL)
    row = (bg * SPLITS + s) * R + r
    best, weight = tl.load(stats + row * 2), tl.load(stats + row * 2 + 1)
    scale = tl.exp2(best - tl.max(best, 0))
    acc = tl.load(parts + row[:, None] * D + d, d < D, 0.0)
    result = tl.sum(acc * scale[:, None], 0) / tl.sum(weight * scale, 0)
    tl.store(out + (bg * R + r) * D + d, result, d < D)


def paged_attention_triton(q, k_pages, v_pages, page_table, lengths, splits=None):
    (B, H, D), (N, G, S, _), K = q.shape, k_pages.shape, page_table.shape[-1]
    R, BD, per_head, warps, stages = H // G, triton.next_power_of_2(D), page_table.ndim == 3, 2, 5
    if splits is None:
        # Programs that all run at once share the bandwidth evenly and end together: two a multiprocessor with many loads in
        # flight, up to five with fewer. Beyond that, many short ones, so that the last round is small against the whole.
        sm = torch.cuda.get_device_properties(q.device).multi_processor_count
        if B * G > 2 * sm:
            warps, stages, splits = 4, 3, 1 if B * G <= 5 * sm else 16 * sm // (B * G)
        splits = max(1, min(32, splits or 2 * sm // (B * G), K * S // 256))
        splits = 1 << (splits.bit_length() - 1)
    if BD * k_pages.element_size() > 256:  # fp32: shared memory holds fewer
        stages = 3
    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    parts = torch.empty(B, G, splits, R, D, device=q.device) if splits > 1 else out
    stats = torch.empty(B, G, splits, R, 2, device=q.device) if splits > 1 else out
    _attend_kernel[B, G, splits](
        q, k_pages, v_pages, page_table, lengths, out, parts, stats, q.stride(0), q.stride(1), page_table.stride(0),
        page_table.stride(1) if per_head else 0, lengths.stride(0), lengths.stride(1) if per_head else 0, G,
        D**-0.5 * 1.4426950408889634, R, max(16, triton.next_power_of_2(R)), S, D, BD, splits, 64, stages,
        num_warps=warps)
    if splits > 1:
        _merge_kernel[B * G, R](parts, stats, out, R, D, BD, splits, num_warps=1, **_turns(q))
    return out


@jit
def _linear_kernel(x, weight, bias, out, B, BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BB: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):
    """One program a (tile of BN outputs, split of the K inputs): weight x^T, as tensor cores want the long side first.

    Past the end it reads the last output or row again, and stores nothing.
    """
    n, split, b, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, BB), tl.arange(0, BK)
    start, end = split * (K // BK) // SPLITS * BK, (split + 1) * (K // BK) // SPLITS * BK
    weight += tl.minimum(n, N - 1)[:, None] * K                                           # [BN,1]
    _take_turn(PDL)
    inputs = x + tl.minimum(b, B - 1)[None, :] * K + k[:, None]                           # [BK,BB]
    acc = tl.zeros([BN, BB], tl.float32)
    for i in tl.range(start, end, BK, num_stages=STAGES):
        acc = tl.dot(tl.load(weight + (i + k)), tl.load(inputs + i), acc, input_precision="ieee")
    if BIAS:
        acc += tl.where(split == 0, tl.load(bias + tl.minimum(n, N - 1)).to(tl.float32), 0.0)[:, None]
    tl.store(out + (split * B + b)[None, :] * N + n[:, None], acc, (n < N)[:, None] & (b < B)[None, :])


def linear_triton(x, weight, bias=None, partial=False, tiles=None):
    (B, K), N, BB = x.shape, len(weight), max(16, triton.next_power_of_2(len(x)))
    BN, BK, splits, stages, warps = tiles or _linear_tiles(BB, weight, partial)
    shape, dtype = ((splits, B, N), torch.float32) if partial else ((B, N), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _linear_kernel[triton.cdiv(N, BN), splits](
        x, weight, x if bias is None else bias, out, B, bias is not None, N, K, BB, BN, BK, splits, stages,
        num_warps=warps, **_turns(x))
    return out


def _linear_tiles(BB, weight, partial):
    """(BN, BK, splits, stages, warps): one program a multiprocessor with many loads in flight, or where there are
    more tiles than that, two with fewer. BK divides K, so that no load needs a mask."""
    (N, K), size, sm, memory = weight.shape, weight.element_size(), 8, 2**17
    if weight.is_cuda:
        gpu = torch.cuda.get_device_properties(weight.device)
        sm, memory = gpu.multi_processor_count, getattr(gpu, "shared_memory_per_block_optin", 2**16)
    BN, BK = 64, min(256 // size, K & -K)
    tiles = triton.cdiv(N, BN)
    splits = max(1, min(4, sm // tiles, K // BK)) if partial else 1
    stages = min(5 if tiles * splits <= sm else 3, memory // ((BN + BB) * BK * size))
    return BN, BK, splits, stages, 4


@jit
def _add_norm_kernel(x, delta, weight, out, eps, SPLITS: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
                     PDL: tl.constexpr):
    """One program a row: the layer's output joins the fp32 residual stream, whose norm feeds the next."""
    b, B, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, BD)
    _take_turn(PDL)
    y = tl.load(x + b * d + i, i < d, 0.0)
    for split in tl.static_range(SPLITS):
        y += tl.load(delta + (split * B + b) * d + i, i < d, 0.0).to(tl.float32)
    if SPLITS > 0:
        tl.store(x + b * d + i, y, i < d)
    y *= 1 / tl.sqrt_rn(tl.sum(y * y, 0) / d + eps)
    tl.store(out + b * d + i, y * tl.load(weight + i, i < d, 0.0).to(tl.float32), i < d)


def add_norm_triton(x, delta, weight, eps, dtype):
    (B, d), out = x.shape, torch.empty(x.shape, dtype=dtype, device=x.device)
    splits, delta = (0, x) if delta is None else (delta.numel() // x.numel(), delta)
    _add_norm_kernel[(B,)](x, delta, weight, out, eps, splits, d, triton.next_power_of_2(d), num_warps=8, **_turns(x))
    return out


@jit
def _silu_mul_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _take_turn(PDL)
    gate = tl.load(gate_up + b * 2 * F + i, i < F, 0.0).to(tl.float32)
    up = tl.load(gate_up + b * 2 * F + F + i, i < F, 0.0).to(tl.float32)
    tl.store(out + b * F + i, (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty) * up, i < F)  # rounded as F.silu would


def silu_mul_triton(gate_up):
    (B, F), out = gate_up.shape, torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[B, triton.cdiv(F // 2, 1024)](gate_up, out, F // 2, 1024, num_warps=4, **_turns(gate_up))
    return out


@jit
def _mass_kernel(logits, parts, row, V, inv_t, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a (row, block of the vocabulary): its largest logit m, and its sum of exp(logit - m)."""
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _take_turn(PDL)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b * row + v, v < V, float("-inf")).to(tl.float32) * inv_t
    top = tl.max(x, 0)
    tl.store(parts + (b * tl.num_programs(1) + block) * 2, top)
    tl.store(parts + (b * tl.num_programs(1) + block) * 2 + 1, tl.sum(tl.exp(x - top), 0))


@jit
def _draw_kernel(logits, parts, uniforms, tokens, logprobs, row, V, blocks, inv_t, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
                 NB: tl.constexpr, PDL: tl.constexpr):
    """One program a row: the block where the running sum of probability passes u, then the token within it."""
    b, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, NB), tl.arange(0, BLOCK)
    _take_turn(PDL)
    best = tl.load(parts + (b * blocks + i) * 2, i < blocks, float("-inf"))
    mass = tl.load(parts + (b * blocks + i) * 2 + 1, i < blocks, 0.0)
    top = tl.max(best, 0)
    mass = mass * tl.exp(best - top)
    total = tl.sum(mass, 0)
    target = tl.load(uniforms + b) * total
    block = tl.argmax(best, 0) if GREEDY else tl.minimum(tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0), blocks - 1)
    v = block * BLOCK + j
    x = tl.load(logits + b * row + v, v < V, float("-inf")).to(tl.float32) * inv_t
    if GREEDY:
        place = tl.argmax(x, 0)
    else:  # rounding may leave u above the last sum: then the last token that has any probability
        p = tl.exp(x - top)
        target -= tl.sum(tl.where(i < block, mass, 0.0), 0)
        place = tl.minimum(tl.sum((tl.cumsum(p, 0) <= target).to(tl.int32), 0), tl.max(tl.where(p > 0, j, 0), 0))
    tl.store(tokens + b, (block * BLOCK + place).to(tl.int64))
    tl.store(logprobs + b, tl.sum(tl.where(j == place, x, 0.0), 0) - top - tl.log(total))


def sample_tokens_triton(logits, uniforms, temperature):
    (B, V), block = logits.shape, 1024
    blocks = triton.cdiv(V, block)
    parts = torch.empty(B, blocks, 2, device=logits.device)
    tokens = torch.empty(B, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(B, device=logits.device)
    inv_t = 1 / (temperature or 1.0)
    _mass_kernel[B, blocks](logits, parts, logits.stride(0), V, inv_t, block, **_turns(logits))
    _draw_kernel[(B,)](logits, parts, uniforms, tokens, logprobs, logits.stride(0), V, blocks, inv_t, temperature == 0, block,
                       triton.next_power_of_2(blocks), **_turns(logits))
    return tokens, logprobs


# ---- Triton kernels of teacher forcing --------------------------------------------------------------------------
# Flash attention whose mask is one bit per (query, KV head, page). Tokens read different pages, so a tile of queries
# needs nearly every tile of keys: the kernels walk them all and let the bits decide. What they save is memory.


@jit
def _mask_kernel(scores, budgets, mask, c0, n, rows, G, C, T, P, W, first, last, S: tl.constexpr, BQ: tl.constexpr,
                 BP: tl.constexpr):
    """One program a few queries (row b * G + g, query c0 + i of n): `_choose`, its answer left as 32 pages a word."""
    row, p = tl.program_id(0) * BQ + tl.arange(0, BQ)[:, None], tl.arange(0, BP)[None, :]
    bg, query = row // n, c0 + row % n                                                    # [BQ,1]
    n_pages = (T - C + query) // S + 1
    score = tl.load(scores + row.to(tl.int64) * P + p, (row < rows) & (p < n_pages), float("-inf"))
    score = tl.where((p < first) | ((p >= n_pages - last) & (p < n_pages)), float("inf"), score)
    count = tl.minimum(tl.maximum(tl.load(budgets + bg // G * C + query, row < rows, 0), first + last), n_pages)
    keep = tl.reshape(_keep_best(score, count), [BQ, BP // 32, 32])
    words, w = tl.sum(keep << tl.arange(0, 32)[None, None, :], 2), tl.arange(0, BP // 32)[None, :]  # [BQ,BP/32]
    tl.store(mask + (bg.to(tl.int64) * C + query) * W + w, words, (row < rows) & (w < W))


def _page_mask(q, k, budgets, S, first, last, limit=2**26):
    """The pages each query keeps: [B,G,C,ceil(P/32)] int32, bit p % 32 of word p // 32 for page p."""
    (B, _, C, _), (_, G, T, _) = q.shape, k.shape
    P = triton.cdiv(T, S)
    means, running = _teacher_landmarks(k, C, S)
    mask = torch.zeros(B, G, C, triton.cdiv(P, 32), dtype=torch.int32, device=q.device)
    chunk = max(1, limit // (B * G * P))  # so many scores at a time: 256 MB
    for c0 in range(0, C, chunk):
        n, t0 = min(chunk, C - c0), T - C + c0
        scores = _teacher_scores(q[:, :, c0:c0 + n], means, running[:, :, c0:c0 + n], t0, S)  # [B,G,n,pages so far]
        BP = max(32, triton.next_power_of_2(scores.shape[-1]))
        BQ = max(1, 1024 // BP)  # few enough for one warp, whose sums need no barrier
        _mask_kernel[(triton.cdiv(B * G * n, BQ),)](
            scores, budgets, mask, c0, n, B * G * n, G, C, T, scores.shape[-1], mask.shape[-1], first, last, S, BQ, BP,
            num_warps=max(1, BP // 2048))
    return mask


@jit
def _sees(word, t, j, S: tl.constexpr):
    """Which keys j of a tile a query sees: bit 0 of `word` is the tile's first page, t the query's place from there."""
    return ((word >> (j // S)) & 1 != 0) & (j <= t)


@jit
def _sparse_forward_kernel(q, k, v, mask, out, lse, C, T, W, scale, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
                           BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One program a (row and query head, tile of BM queries): online softmax, in base 2, over the keys up to its last.

    The pages of a key tile share a word of the mask, so a tile costs one more load a query. Long tiles start first.
    """
    bh, tile = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    i, d, j = tile * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BN)
    at = (bh * C + i)[:, None] * D + d
    k, v, mask = k + bh // R * T * D, v + bh // R * T * D, mask + (bh // R * C + i) * W
    query = tl.load(q + at, (i < C)[:, None] & (d < D), 0.0)                              # [BM,BD]
    best = tl.full([BM], -1e38, tl.float32)  # finite: a row may keep nothing of its first tiles
    weight, acc = tl.zeros([BM], tl.float32), tl.zeros([BM, BD], tl.float32)
    for start in range(0, tl.minimum(T, T - C + (tile + 1) * BM), BN):
        n = start + j
        ok = (n < T)[:, None] & (d < D)
        key = tl.load(k + n[:, None] * D + d, ok, 0.0)                                    # [BN,BD]
        value = tl.load(v + n[:, None] * D + d, ok, 0.0)
        word = tl.load(mask + start // (32 * S), i < C, -1) >> (start // S % 32)  # past C: any page, lest weight be 0
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * 1.4426950408889634)  # log2(e)
        score = tl.where(_sees(word[:, None], (T - C + i - start)[:, None], j[None, :], S), score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        p = tl.exp2(score - top[:, None])
        fade = tl.exp2(best - top)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    tl.store(out + at, acc / weight[:, None], (i < C)[:, None] & (d < D))
    tl.store(lse + bh * C + i, best + tl.log2(weight), i < C)


@jit
def _sparse_dq_kernel(q, k, v, mask, out, lse, dout, delta, dq, C, T, W, scale, R: tl.constexpr, S: tl.constexpr,
                      D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One program a (row and query head, tile of BM queries), as in the forward pass: the gradient of its queries.

    With p the attention weights: dp = dout . v, ds = p (dp - delta), delta = dout . out. Leaves delta for dk, dv.
    """
    bh, tile = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    i, d, j = tile * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BN)
    at, there = (bh * C + i)[:, None] * D + d, (i < C)[:, None] & (d < D)
    k, v, mask = k + bh // R * T * D, v + bh // R * T * D, mask + (bh // R * C + i) * W
    query, grad = tl.load(q + at, there, 0.0), tl.load(dout + at, there, 0.0)             # [BM,BD]
    norm = tl.load(lse + bh * C + i, i < C, 0.0)
    inner = tl.sum(grad.to(tl.float32) * tl.load(out + at, there, 0.0).to(tl.float32), 1)
    tl.store(delta + bh * C + i, inner, i < C)
    acc = tl.zeros([BM, BD], tl.float32)
    for start in range(0, tl.minimum(T, T - C + (tile + 1) * BM), BN):
        n = start + j
        ok = (n < T)[:, None] & (d < D)
        key = tl.load(k + n[:, None] * D + d, ok, 0.0)                                    # [BN,BD]
        value = tl.load(v + n[:, None] * D + d, ok, 0.0)
        word = tl.load(mask + start // (32 * S), i < C, 0) >> (start // S % 32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * 1.4426950408889634)
        sees = _sees(word[:, None], (T - C + i - start)[:, None], j[None, :], S)
        p = tl.where(sees, tl.exp2(score - norm[:, None]), 0.0)                           # [BM,BN]
        ds = p * (tl.dot(grad, tl.trans(value), input_precision="ieee") - inner[:, None])
        acc += tl.dot(ds.to(key.dtype), key, input_precision="ieee")
    tl.store(dq + at, acc * scale, there)


@jit
def _sparse_dkv_kernel(q, k, v, mask, lse, dout, delta, dk, dv, C, T, W, scale, R: tl.constexpr, S: tl.constexpr,
                       D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One program a (row and KV head, tile of BN keys): its gradients, summed over the group's queries at or after it.

    No other program writes them: no atomics, and always the same order of summation. Scores are transposed, [BN,BM].
    """
    bg, first_key, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN, tl.arange(0, BD)
    j, m = tl.arange(0, BN), tl.arange(0, BM)
    n = first_key + j
    at, there = (bg * T + n)[:, None] * D + d, (n < T)[:, None] & (d < D)
    key, value = tl.load(k + at, there, 0.0), tl.load(v + at, there, 0.0)                 # [BN,BD]
    dkey, dvalue = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    mask += bg * C * W + first_key // (32 * S)
    for r in range(R):
        row = (bg * R + r) * C
        for start in range(tl.maximum(first_key - (T - C), 0) // BM * BM, C, BM):
            i = start + m
            ok = (i < C)[:, None] & (d < D)
            query = tl.load(q + row * D + i[:, None] * D + d, ok, 0.0)                    # [BM,BD]
            grad = tl.load(dout + row * D + i[:, None] * D + d, ok, 0.0)
            word = tl.load(mask + i * W, i < C, 0) >> (first_key // S % 32)
            norm, inner = tl.load(lse + row + i, i < C, 0.0), tl.load(delta + row + i, i < C, 0.0)
            score = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * 1.4426950408889634)
            sees = _sees(word[None, :], (T - C + i - first_key)[None, :], j[:, None], S)
            p = tl.where(sees, tl.exp2(score - norm[None, :]), 0.0)                       # [BN,BM]
            dvalue += tl.dot(p.to(grad.dtype), grad, input_precision="ieee")
            ds = p * (tl.dot(value, tl.trans(grad), input_precision="ieee") - inner[None, :])
            dkey += tl.dot(ds.to(query.dtype), query, input_precision="ieee")
    tl.store(dk + at, dkey * scale, there)
    tl.store(dv + at, dvalue, there)


def _tiles(D, dtype):
    """(queries, keys, warps) in forward, dq and dkv: as big as Hopper's registers and 99 KB of shared memory allow."""
    if dtype == torch.float32:  # exact fp32 does without tensor cores, and holds its operands in registers
        return ((32, 32, 8) if D <= 128 else (16, 16, 4),) * 3
    return ((128, 64, 8), (64, 64, 4), (32, 128, 8)) if D <= 128 else ((64, 32, 8), (32, 32, 4), (32, 32, 8))


class _SparseAttention(torch.autograd.Function):
    """Saves q, k, v, out, one number a query (lse) and the page mask for the backward pass, no score matrix.

    The mask is P/8 bytes a token and KV head. With pages of 16 and D 128 in bf16 that is an eighth of K at 4K tokens,
    a quarter at 8K, as much as K itself at 32K: quadratic, and past that the larger part.
    """

    @staticmethod
    def forward(ctx, q, k, v, budgets, S, first, last):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        (B, H, C, D), (_, G, T, _) = q.shape, k.shape
        mask = _page_mask(q, k, budgets.expand(B, C).contiguous(), S, first, last)       # [B,G,C,W]
        out, lse = torch.empty_like(q), torch.empty(B, H, C, device=q.device)
        ctx.sizes = C, T, mask.shape[-1], D**-0.5, H // G, S, D, max(16, triton.next_power_of_2(D))
        ctx.save_for_backward(q, k, v, mask, out, lse)
        (BM, BN, warps), _, _ = _tiles(D, q.dtype)
        _sparse_forward_kernel[B * H, triton.cdiv(C, BM)](q, k, v, mask, out, lse, *ctx.sizes, BM, BN, num_warps=warps,
                                                          num_stages=2)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, mask, out, lse = ctx.saved_tensors
        (B, H, C, D), (_, G, T, _), dout = q.shape, k.shape, dout.contiguous()
        dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
        _, (BM, BN, warps), (BM2, BN2, warps2) = _tiles(D, q.dtype)
        _sparse_dq_kernel[B * H, triton.cdiv(C, BM)](q, k, v, mask, out, lse, dout, delta, dq, *ctx.sizes, BM, BN,
                                                     num_warps=warps, num_stages=2)
        _sparse_dkv_kernel[B * G, triton.cdiv(T, BN2)](q, k, v, mask, lse, dout, delta, dk, dv, *ctx.sizes, BM2, BN2,
                                                       num_warps=warps2, num_stages=2)
        return dq, dk, dv, None, None, None, None


def sparse_attention_triton(q, k, v, budgets, page_size=16, first=1, last=2):
    assert page_size >= 4 and page_size & (page_size - 1) == 0, f"a power of two from 4 up, not pages of {page_size}"
    return _SparseAttention.apply(q, k, v, budgets, page_size, first, last)


# ---- the names the project calls --------------------------------------------------------------------------------
# CUDA tensors go to the kernels, the rest to the references.

def append_kv(k, v, k_pages, v_pages, landmarks, page_table, lengths):
    """Write token `lengths[b]` of each row into its page and refresh that page's landmark, in place.

    k, v: [B,G,D]; k_pages, v_pages: [N,G,S,D]; landmarks: [N,G,D], mean of the keys written so far in the page;
    page_table: [B,P] int32, pool page of every page of a row; lengths: [B] int32, tokens cached *before* this one.
    """
    (B, G, D), (N, _, S, _) = k.shape, k_pages.shape
    assert v.shape == k.shape and k_pages.shape == v_pages.shape == (N, G, S, D) and landmarks.shape == (N, G, D)
    assert page_table.dtype == lengths.dtype == torch.int32 and len(page_table) == len(lengths) == B
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and landmarks.is_contiguous() and k.stride(-1) == 1
    (append_kv_triton if k.is_cuda else append_kv_ref)(k, v, k_pages, v_pages, landmarks, page_table, lengths)


def rope_append(q, k, v, cos, sin, norms, k_pages, v_pages, landmarks, page_table, lengths):
    """`append_kv` with what comes before it: RMSNorm of every head of q and k, then RoPE. -> the rotated q [B,H,D]

    q: [B,H,D]; k, v: [B,G,D], views of one fused projection are welcome; cos, sin: [B,D/2] fp32; norms: (q's weight [D],
    k's, eps) or None. The rest as for `append_kv`.
    """
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and landmarks.is_contiguous()
    run = rope_append_triton if q.is_cuda else rope_append_ref
    return run(q, k, v, cos, sin, norms, k_pages, v_pages, landmarks, page_table, lengths)


def linear(x, weight, bias=None, partial=False):
    """x weight^T + bias, by cuBLAS for more than FEW_ROWS rows. x: [B,in]; weight: [out,in]; bias: [out] -> [B,out]

    partial: -> [splits,B,out], fp32 from the kernel, sums over parts of the inputs: `add_norm` adds them up on its way.
    """
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype and weight.numel() < 2**31
    few = x.is_cuda and len(x) <= FEW_ROWS and x.shape[1] % 16 == 0  # tensor cores take 16 inputs at a time
    return (linear_triton if few else linear_ref)(x, weight, bias, partial)


def add_norm(x, delta, weight, eps, dtype):
    """x += delta (unless None), in place; -> RMSNorm of it in `dtype`.

    x: [B,d] fp32; delta: [B,d], or [splits,B,d] to be summed; weight: [d]
    """
    assert x.dtype == torch.float32 and x.is_contiguous() and (delta is None or delta.is_contiguous())
    return (add_norm_triton if x.is_cuda else add_norm_ref)(x, delta, weight, eps, dtype)


def silu_mul(gate_up):
    """silu(gate) * up. gate_up: [B,2F], the two side by side -> [B,F]"""
    assert gate_up.is_contiguous()
    return (silu_mul_triton if gate_up.is_cuda else silu_mul_ref)(gate_up)


def sample_tokens(logits, uniforms, temperature):
    """Inverse-CDF sampling, fp32 inside: (ids [B], their log-probs [B]). logits: [B,V]; uniforms: [B] in [0, 1).

    Temperature 0 is greedy, with log-probs of the untempered distribution.
    """
    assert logits.stride(-1) == 1 and uniforms.is_contiguous()
    return (sample_tokens_triton if logits.is_cuda else sample_tokens_ref)(logits, uniforms, temperature)


def select_pages(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2):
    """The pages each row and KV head should read: (pages [B,G,K] int32, counts [B] int32).

    q: [B,H,D]; landmarks: [N,G,D]; page_table: [B,P] int32; lengths: [B] int32, counting the new token; budgets: [B]
    int32 in pages, reserved ones included. A row keeps min(max(budget, first + last), ceil(length / S)) pages: its
    first `first` and last `last` always, the rest by highest score, ties to the lower page. `pages` are logical
    (indices into the row's page table), in no promised order; entries at and past counts[b] mean nothing. Paper, 3.1.
    """
    _check_selection(q, landmarks, page_table, lengths, budgets)
    select = select_pages_triton if q.is_cuda else select_pages_ref
    return select(q, landmarks, page_table, lengths, budgets, page_size, first, last)


def select_tables(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2, arrived=None):
    """`select_pages` in the form that `paged_attention` reads fastest: every KV head's own page table.

    -> (tables [B,G,K] int32, pool pages in ascending order of position; tokens [B,G] int32, how many they hold). arrived:
    scratch for the kernel, [B*G] int32 zeros, left zero; one that lives on saves clearing another at every call.
    """
    _check_selection(q, landmarks, page_table, lengths, budgets)
    args = q, landmarks, page_table, lengths, budgets, page_size, first, last
    return select_pages_triton(*args, arrived, pool=True) if q.is_cuda else select_tables_ref(*args)


def _check_selection(q, landmarks, page_table, lengths, budgets):
    (B, H, D), (_, G, _) = q.shape, landmarks.shape
    assert H % G == 0, f"{H} query heads do not divide into {G} KV heads"
    assert page_table.dtype == lengths.dtype == budgets.dtype == torch.int32
    assert len(page_table) == len(lengths) == len(budgets) == B
    assert landmarks.is_contiguous() and q.stride(-1) == 1


def paged_attention(q, k_pages, v_pages, page_table, lengths, pages=None, counts=None):
    """Softmax attention of one query token per row over the selected pages, or over all when `pages` is None.

    q: [B,H,D]; k_pages, v_pages: [N,G,S,D]; page_table: [B,P] int32; lengths: [B] int32, counting the new token;
    pages: [B,G,K] int32 and counts: [B] int32 from `select_pages`. Or page_table: [B,G,K] and lengths: [B,G], from
    `select_tables`. Query head h reads KV head h // R. -> [B,H,D]
    """
    (B, H, D), (N, G, S, _) = q.shape, k_pages.shape
    assert H % G == 0 and k_pages.shape == v_pages.shape == (N, G, S, D)
    assert page_table.dtype == lengths.dtype == torch.int32 and len(page_table) == len(lengths) == B
    assert (pages is None) == (counts is None), "pages and counts come together, from select_pages"
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and q.stride(-1) == page_table.stride(-1) == 1
    if pages is not None:
        page_table, lengths = _tables_of(pages, counts, page_table, lengths, S)
    attend = paged_attention_triton if q.is_cuda else paged_attention_ref
    return attend(q, k_pages, v_pages, page_table, lengths)


def sparse_attention(q, k, v, budgets, page_size=16, first=1, last=2):
    """What decoding computes, for many tokens of a sequence at once (teacher-forced); differentiable in q, k, v.

    q: [B,H,C,D], the last C of the T tokens (C = T: all of them); k, v: [B,G,T,D]; budgets: [B,C] or [C] int32, in
    pages, reserved ones included: each token selects with its own exactly as `select_pages` would. A budget that
    covers all pages (`DENSE`) makes that position dense, which is how a prompt is expressed. -> [B,H,C,D]. No score
    matrix is kept: the reference's memory is linear in T, the kernels' too but for a bit a (query, KV head, page).
    """
    (B, H, C, D), (_, G, T, _) = q.shape, k.shape
    assert H % G == 0 and k.shape == v.shape == (B, G, T, D) and C <= T
    assert budgets.dtype == torch.int32 and budgets.shape[-1] == C
    attend = sparse_attention_triton if q.is_cuda else sparse_attention_ref
    return attend(q, k, v, budgets, page_size, first, last)


# ---- python sparse_attn.py --------------------------------------------------------------------------------------


@jit
def _read_kernel(x, out, LOOP: tl.constexpr, BLOCK: tl.constexpr):
    """Reads as fast as the memory allows: one program a stretch of LOOP blocks."""
    i, acc = tl.program_id(0).to(tl.int64), tl.zeros([BLOCK], tl.int32)
    for j in tl.range(0, LOOP, num_stages=3):
        acc ^= tl.load(x + (i * LOOP + j) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + i, tl.sum(acc, 0))


def read_bandwidth(size=2**32):
    """Bytes a second that the fastest of a few streaming reads reaches on this GPU: what byte floors are measured against."""
    x, best = torch.randint(0, 100, (size // 4,), dtype=torch.int32, device="cuda"), float("inf")
    for block, loop, warps in ((8192, 8, 4), (4096, 8, 8), (8192, 8, 8), (4096, 32, 4), (8192, 32, 16)):
        out = torch.empty(size // 4 // (block * loop), dtype=torch.int32, device="cuda")
        best = min(best, timed([lambda: _read_kernel[(len(out),)](x, out, loop, block, num_warps=warps)] * 2))
    return size / best


def timed(calls, repeat=15, graph=True):
    """Median seconds of one of `calls`, launched one after another, as a CUDA graph unless they cannot be captured. Give so
    many inputs that together they outgrow the cache."""
    def run():
        for call in calls:
            call()
    run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
    times = []
    for _ in range(repeat + 2):  # the first two warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.replay() if graph else run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times[2:])[repeat // 2]


def bench(copies=4, S=16, D=128):
    """Time, GB/s and ratio to the byte floor of each part of a decode step's attention; peers beside them, if installed."""
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; streaming read "
          f"{bandwidth / 1e9:,.0f} GB/s; bf16, page {S}, random page tables, median of 15")
    print(f"{'rows x tokens, heads':24s}{'':26s}{'us':>8s}{'floor':>8s}{'ratio':>7s}{'GB/s':>7s}")
    for B, T, H, G in ((32, 32768, 16, 8), (32, 32768, 12, 2), (16, 32768, 32, 8), (64, 8192, 16, 8)):
        P, bf16 = T // S, dict(dtype=torch.bfloat16, device="cuda")
        N = B * P + 1  # as the actor's, with its scratch page; pools of exactly 2**n bytes may read slower
        layers = [(torch.randn(B, H, D, **bf16), *(torch.randn(N, G, S, D, **bf16) for _ in range(2)),
                   torch.randn(N, G, D, **bf16)) for _ in range(copies)]
        table = (torch.randperm(B * P, device="cuda") + 1).int().view(B, P)
        n, arrived = torch.full((B,), T, dtype=torch.int32, device="cuda"), torch.zeros(B * G, dtype=torch.int32, device="cuda")
        kv, marks = 4 * B * G * T * D, 2 * B * G * P * D                                  # bytes of K and V, of the landmarks
        def row(name, size, call):
            t = timed([lambda layer=layer: call(*layer) for layer in layers])
            print(f"{f'{B} x {T:,}, {H}/{G}':24s}{name:26s}{t * 1e6:8.1f}{size / bandwidth * 1e6:8.1f}"
                  f"{t / size * bandwidth:7.2f}{size / t / 1e9:7,.0f}", flush=True)
        row("dense", kv, lambda q, k, v, m: paged_attention(q, k, v, table, n))
        for name, call in peers(layers, table, n):
            row(name, kv, call)
        for K in (256, 64):
            budget = torch.full((B,), K, dtype=torch.int32, device="cuda")
            def select(q, k, v, m):
                return select_tables(q, m, table, n, budget, S, arrived=arrived)
            chosen = {id(layer[0]): select(*layer) for layer in layers}
            row(f"select {K} of {P:,} pages", marks, select)
            row(f"attend {K} pages", kv * K // P, lambda q, k, v, m: paged_attention(q, k, v, *chosen[id(q)]))
            row(f"sparse, {K} pages, whole", marks + kv * K // P,
                lambda q, k, v, m: paged_attention(q, k, v, *select(q, k, v, m)))


def bench_teaching(T=8192, H=16, G=8, D=128):
    """Forward and backward over one sequence, a tenth of the pages (32 at least), against dense causal attention."""
    q, k, v = (torch.randn(1, n, T, D, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (H, G, G))
    budgets = (torch.arange(T, device="cuda") // 160 + 1).clamp(min=32).int()
    found = {}
    for name, attend in (("SDPA", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
                         ("sparse_attention", lambda: sparse_attention(q, k, v, budgets))):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found[name] = timed([lambda: torch.autograd.grad(attend(), (q, k, v), torch.ones_like(q))], graph=False)
        print(f"forward + backward, {T:,} tokens, {H}/{G}: {name} {found[name] * 1e3:.2f} ms, "
              f"{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB")
    print(f"  ratio {found['sparse_attention'] / found['SDPA']:.2f}")


def peers(layers, table, n):
    """torch's SDPA over contiguous K and V of the same size, and FlashInfer's paged decode, if installed. -> (name, call)"""
    (B, H, D), (N, G, S, _), P = layers[0][0].shape, layers[0][1].shape, table.shape[1]
    def sdpa(q, k, v, m):
        k, v = (x[1:].view(B, G, P * S, D) for x in (k, v))  # other tokens than ours, as many bytes
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
    yield "SDPA, contiguous", sdpa
    try:
        import flashinfer
    except ImportError:
        print("  (FlashInfer is not installed: no row for it)")
        return
    plan = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(2**29, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty(B + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.empty(B * P, dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.empty(B, dtype=torch.int32, device="cuda"))
    plan.plan(torch.arange(B + 1, dtype=torch.int32) * P, table.flatten(), torch.full((B,), S, dtype=torch.int32), H, G, D, S,
              q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    yield "FlashInfer, paged", lambda q, k, v, m: plan.run(q, (k, v))


def check():
    """The three ways to the same attention agree: fp64 by definition, token by token, teacher-forced."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"on {device}; this runs the {'Triton kernels' if device == 'cuda' else 'references'}")
    torch.manual_seed(0)
    for H, G, D, S in ((16, 8, 128, 16), (12, 2, 128, 16), (14, 2, 64, 8), (9, 3, 64, 32)):
        T, worst = 200, 0.0
        q, k, v = (torch.randn(1, n, T, D, device=device) for n in (H, G, G))
        budgets = torch.randint(3, 8, (T,), device=device).int()
        forced = sparse_attention(q, k, v, budgets, S)
        N = -(-T // S)
        pools = [torch.zeros(N + 1, G, S, D, device=device) for _ in range(2)]
        marks = torch.zeros(N + 1, G, D, device=device)
        table = (torch.randperm(N, device=device) + 1).int()[None]
        for t in range(T):
            n = torch.tensor([t], dtype=torch.int32, device=device)
            append_kv(k[:, :, t], v[:, :, t], *pools, marks, table, n)
            chosen = select_pages(q[:, :, t], marks, table, n + 1, budgets[t:t + 1], S)
            out = paged_attention(q[:, :, t], *pools, table, n + 1, *chosen)
            worst = max(worst, (out - forced[:, :, t]).abs().max().item())
        dense = paged_attention(q[:, :, -1], *pools, table, n + 1)
        kk, vv = (x[0].double().repeat_interleave(H // G, 0) for x in (k, v))                # [H,T,D]
        att = (q[0, :, -1:].double() @ kk.transpose(1, 2) * D**-0.5).softmax(-1)
        exact = (dense[0].double() - (att @ vv)[:, 0]).abs().max().item()
        print(f"heads {H:2d}/{G}, D {D:3d}, page {S:2d}: dense against fp64 {exact:.1e}; decoding against teacher forcing "
              f"{worst:.1e}")
        assert exact < 1e-5 and worst < 1e-4, "these must agree to rounding"


def main():
    check()
    if torch.cuda.is_available():
        bench()
        bench_teaching()
    else:
        print("no CUDA GPU here, so nothing is timed: kernels, GB/s and ratios to the byte floor need one")


if __name__ == "__main__":
    main()
