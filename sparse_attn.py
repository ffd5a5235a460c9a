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

Each operation has a PyTorch reference, `*_ref`, written to be read, and those of the decode step a Triton kernel,
`*_triton`, of the same signature. The unsuffixed name is what the rest of the project calls; it asserts shapes and
types first, then picks the implementation for the device.

Shape legend: B rows, T tokens, H query heads, G KV heads, R = H/G query heads per KV head, D head dim, N pages in the
pool, P pages of a row (the page table's width), S page size, K selected pages.

    python sparse_attn.py        checks the references against each other and against dense attention
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


def select_pages_ref(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2):
    (B, H, D), G = q.shape, landmarks.shape[1]
    # The sum over a group's R queries of q . landmark is one dot product with the summed query.
    q = q.view(B, G, H // G, D).float().sum(2)                                           # [B,G,D]
    marks = F.embedding(page_table.long(), landmarks.view(-1, G * D)).view(B, -1, G, D)  # [B,P,G,D]
    scores = torch.einsum("bgd,bpgd->bgp", q, marks.float())                             # [B,G,P]
    order, counts = _choose(scores, lengths[:, None], budgets[:, None], page_size, first, last)
    K = int(counts.max())  # the widest row; a narrower one ignores what stands behind its count
    return order[..., :K].int(), counts[:, 0].int()


# ---- decode: one query token per row ----------------------------------------------------------------------------

def paged_attention_ref(q, k_pages, v_pages, page_table, lengths, pages=None, counts=None):
    (B, H, D), (N, G, S, _) = q.shape, k_pages.shape
    if pages is None:  # dense: every page of the row, in order
        counts = (lengths + S - 1) // S
        pages = torch.arange(page_table.shape[1], device=q.device, dtype=torch.int32).expand(B, G, -1)
    K = pages.shape[-1]
    kept = torch.arange(K, device=q.device) < counts[:, None]                            # [B,K]
    pages = pages.masked_fill(~kept[:, None], 0)  # what stands behind the count may be anything
    pool = page_table.long()[:, None].expand(-1, G, -1).gather(2, pages.long())          # [B,G,K] pool pages
    head = torch.arange(G, device=q.device)[:, None]
    # An embedding look-up of (page, head) rows is the fastest gather PyTorch has.
    k, v = (F.embedding(pool * G + head, x.view(N * G, S * D)).view(B, G, K * S, D).float() for x in (k_pages, v_pages))
    token = pages[..., None] * S + torch.arange(S, device=q.device)                      # [B,G,K,S] positions
    valid = (token < lengths[:, None, None, None]) & kept[:, None, :, None]
    att = q.view(B, G, H // G, D).float() @ k.transpose(-1, -2) * D**-0.5                # [B,G,R,K*S]
    att = att.masked_fill(~valid.view(B, G, 1, K * S), float("-inf")).softmax(-1)
    return (att @ v).view(B, H, D).to(q.dtype)


# ---- teacher-forced: all query tokens of a sequence at once -----------------------------------------------------

def sparse_attention_ref(q, k, v, budgets, page_size=16, first=1, last=2, chunk=256):
    budgets = budgets.expand(q.shape[0], q.shape[2])
    means = _page_means(k.detach(), page_size).to(k.dtype)                               # [B,G,P,D]
    running = _running_page_mean(k.detach(), page_size).to(k.dtype)                      # [B,G,T,D]
    out = []
    for t0 in range(0, q.shape[2], chunk):
        # A chunk sees the keys up to its own last token. Recomputed in the backward pass: memory is chunk x T, not T x T.
        t1 = min(t0 + chunk, q.shape[2])
        args = (q[:, :, t0:t1], k[:, :, :t1], v[:, :, :t1], means, running[:, :, t0:t1], budgets[:, t0:t1], t0,
                page_size, first, last)
        recompute = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out.append(checkpoint(_sparse_chunk, *args, use_reentrant=False) if recompute else _sparse_chunk(*args))
    return torch.cat(out, dim=2)


def _running_page_mean(k, S):
    """Landmark of token t's own page as token t saw it: the mean of that page's keys up to and with t. [..., T, D]"""
    T = k.shape[-2]
    k = F.pad(k.float(), (0, 0, 0, -T % S)).unflatten(-2, (-1, S)).cumsum(-2)
    return (k / torch.arange(1, S + 1, device=k.device)[:, None]).flatten(-3, -2)[..., :T, :]


def _sparse_chunk(q, k, v, means, running, budgets, t0, S, first, last):
    """Queries t0..t0+C-1 over keys 0..t0+C-1. q: [B,H,C,D]; k, v: [B,G,t1,D]; running: [B,G,C,D]; budgets: [B,C]"""
    (B, H, C, D), (_, G, t1, _) = q.shape, k.shape
    query = torch.arange(t0, t0 + C, device=q.device)
    P = -(-t1 // S)
    with torch.no_grad():  # which pages to read is a choice, not a function to differentiate
        q_sum = q.view(B, G, H // G, C, D).float().sum(2)                                # [B,G,C,D]
        scores = q_sum @ means[:, :, :P].float().transpose(-1, -2)                       # [B,G,C,P]
        own = (q_sum * running.float()).sum(-1, keepdim=True)                            # [B,G,C,1]
        scores = scores.scatter(-1, (query // S).view(1, 1, C, 1).expand(B, G, C, 1), own)
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
def _append_kernel(k, v, k_pages, v_pages, landmarks, table, lengths, k_row, k_head, v_row, v_head, table_row,
                   G, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """One program a (row, KV head): write one key and value, average the page's keys anew (S is small)."""
    b, g = tl.program_id(0), tl.program_id(1)
    n = tl.load(lengths + b)
    page = tl.load(table + b * table_row + n // S).to(tl.int64) * G + g
    slot, d, s = n % S, tl.arange(0, BD), tl.arange(0, S)
    key = tl.load(k + b * k_row + g * k_head + d, d < D, 0.0).to(k_pages.dtype.element_ty)
    value = tl.load(v + b * v_row + g * v_head + d, d < D, 0.0)
    before = tl.load(k_pages + (page * S + s[:, None]) * D + d, (s[:, None] < slot) & (d < D), 0.0)  # [S,D]
    mean = (tl.sum(before.to(tl.float32), 0) + key.to(tl.float32)) / (slot + 1)
    tl.store(k_pages + (page * S + slot) * D + d, key, d < D)
    tl.store(v_pages + (page * S + slot) * D + d, value, d < D)
    tl.store(landmarks + page * D + d, mean, d < D)


def append_kv_triton(k, v, k_pages, v_pages, landmarks, page_table, lengths):
    (B, G, D), S = k.shape, k_pages.shape[2]
    _append_kernel[B, G](k, v, k_pages, v_pages, landmarks, page_table, lengths, k.stride(0), k.stride(1), v.stride(0),
                         v.stride(1), page_table.stride(0), G, S, D, triton.next_power_of_2(D), num_warps=1)


@jit
def _score_kernel(q, landmarks, table, lengths, scores, q_row, q_head, table_row, P, G, first, last, R: tl.constexpr,
                  S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr):
    """One program a (row, KV head, block of pages): q . landmark; reserved pages +inf, pages not there -inf."""
    b, g = tl.program_id(0), tl.program_id(1)
    d, p = tl.arange(0, BD), tl.program_id(2) * BP + tl.arange(0, BP)
    n_pages = (tl.load(lengths + b) + S - 1) // S
    there = p < n_pages
    query = tl.zeros([BD], tl.float32)
    for r in tl.static_range(R):
        query += tl.load(q + b * q_row + (g * R + r) * q_head + d, d < D, 0.0).to(tl.float32)
    page = tl.load(table + b * table_row + p, there, 0).to(tl.int64) * G + g
    marks = tl.load(landmarks + page[:, None] * D + d, there[:, None] & (d < D), 0.0).to(tl.float32)  # [BP,BD]
    score = tl.sum(marks * query, 1)
    score = tl.where((p < first) | (p >= n_pages - last), float("inf"), score)
    score = tl.where(there, score, float("-inf"))
    tl.store(scores + (b * G + g) * P + p, score, p < P)


@jit
def _top_kernel(scores, lengths, budgets, pages, counts, P, G, reserved, S: tl.constexpr, BP: tl.constexpr):
    """One program a (row, KV head): the exact `count` best, ties to the lower page, in ascending order.

    A float's bits, its negative half turned over, order like unsigned integers; so the count-th largest score is found
    bit by bit, 32 counts over the row, with no sort. Ties at it are settled by a prefix sum.
    """
    b, g, p = tl.program_id(0), tl.program_id(1), tl.arange(0, BP)
    score = tl.load(scores + (b * G + g) * P + p, p < P, float("-inf")) + 0.0  # -0.0 becomes 0.0
    count = tl.minimum(tl.maximum(tl.load(budgets + b), reserved), (tl.load(lengths + b) + S - 1) // S)
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    cut = tl.zeros([], tl.uint32)
    for i in tl.static_range(32):
        trial = cut | (1 << (31 - i))
        cut = tl.where(tl.sum((key >= trial).to(tl.int32)) >= count, trial, cut)
    above, equal = (key > cut).to(tl.int32), (key == cut).to(tl.int32)
    keep = (above > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= count - tl.sum(above)))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(pages + (b * G + g) * P + place, p, keep)
    tl.store(counts + b, count)  # every head writes the same


def select_pages_triton(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2):
    (B, H, D), G, P = q.shape, landmarks.shape[1], page_table.shape[1]
    scores = torch.empty(B, G, P, device=q.device)
    pages, counts = (torch.empty(shape, dtype=torch.int32, device=q.device) for shape in ((B, G, P), (B,)))
    block = min(64, triton.next_power_of_2(P))
    _score_kernel[B, G, triton.cdiv(P, block)](
        q, landmarks, page_table, lengths, scores, q.stride(0), q.stride(1), page_table.stride(0), P, G, first, last, H // G,
        page_size, D, triton.next_power_of_2(D), block, num_warps=4)
    _top_kernel[B, G](scores, lengths, budgets, pages, counts, P, G, first + last, page_size, triton.next_power_of_2(P),
                      num_warps=4)
    return pages, counts


@jit
def _attend_kernel(q, k_pages, v_pages, table, lengths, pages, counts, parts, stats, q_row, q_head, table_row, K, G, scale,
                   R: tl.constexpr, BR: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
                   SPLITS: tl.constexpr, TILE: tl.constexpr, SELECTED: tl.constexpr):
    """One program a (row, KV head, split of the tokens): online softmax over its tiles, for the group's R queries at once.

    Tokens are counted over the pages kept: token j is in the (j // S)-th of them. A split with no tokens leaves weight 0.
    """
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d, t = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, TILE)
    length = tl.load(lengths + b)
    total = tl.load(counts + b) * S if SELECTED else length
    per_split = tl.cdiv(tl.cdiv(total, TILE), SPLITS) * TILE
    query = tl.load(q + b * q_row + (g * R + r[:, None]) * q_head + d, (r[:, None] < R) & (d < D), 0.0)  # [BR,BD]
    best = tl.full([BR], float("-inf"), tl.float32)
    weight, acc = tl.zeros([BR], tl.float32), tl.zeros([BR, BD], tl.float32)
    for start in range(split * per_split, tl.minimum((split + 1) * per_split, total), TILE):
        j = start + t
        logical = j // S
        if SELECTED:
            logical = tl.load(pages + (b * G + g) * K + logical, j < total, 0)
        there = (j < total) & (logical * S + j % S < length)
        page = tl.load(table + b * table_row + logical, there, 0).to(tl.int64) * G + g
        at = ((page * S + j % S) * D)[:, None] + d                                        # [TILE,BD] 64-bit offsets
        ok = there[:, None] & (d < D)
        key = tl.load(k_pages + at, ok, 0.0)
        value = tl.load(v_pages + at, ok, 0.0)
        score = tl.dot(query.to(key.dtype), tl.trans(key), input_precision="ieee") * scale  # [BR,TILE]
        score = tl.where(there, score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)  # a tile may hold no valid token
        p = tl.exp(score - safe[:, None])
        fade = tl.exp(best - safe)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    row = ((b * G + g) * SPLITS + split) * R + r
    tl.store(parts + row[:, None] * D + d, acc, (r[:, None] < R) & (d < D))
    tl.store(stats + row * 2, best, r < R)
    tl.store(stats + row * 2 + 1, weight, r < R)


@jit
def _merge_kernel(parts, stats, out, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr):
    """One program a (row * KV head, query of the group): join the splits, each weighted by exp(its maximum)."""
    bg, r, d, s = tl.program_id(0), tl.program_id(1), tl.arange(0, BD), tl.arange(0, SPLITS)
    row = (bg * SPLITS + s) * R + r
    best, weight = tl.load(stats + row * 2), tl.load(stats + row * 2 + 1)
    scale = tl.exp(best - tl.max(best, 0))
    acc = tl.load(parts + row[:, None] * D + d, d < D, 0.0)
    result = tl.sum(acc * scale[:, None], 0) / tl.sum(weight * scale, 0)
    tl.store(out + (bg * R + r) * D + d, result, d < D)


def paged_attention_triton(q, k_pages, v_pages, page_table, lengths, pages=None, counts=None, splits=None):
    (B, H, D), (N, G, S, _) = q.shape, k_pages.shape
    R, BD, K = H // G, triton.next_power_of_2(D), page_table.shape[1] if pages is None else pages.shape[2]
    if splits is None:  # about four programs a multiprocessor, and no split under a few tiles
        programs = 4 * torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = max(1, min(32, programs // (B * G), K * S // 256))
    splits = triton.next_power_of_2(splits)
    parts = torch.empty(B, G, splits, R, D, device=q.device)
    stats = torch.empty(B, G, splits, R, 2, device=q.device)
    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    dense = pages is None
    _attend_kernel[B, G, splits](
        q, k_pages, v_pages, page_table, lengths, lengths if dense else pages, lengths if dense else counts, parts, stats,
        q.stride(0), q.stride(1), page_table.stride(0), K, G, D**-0.5, R, max(16, triton.next_power_of_2(R)), S, D, BD,
        splits, 64, not dense, num_warps=4)
    _merge_kernel[B * G, R](parts, stats, out, R, D, BD, splits, num_warps=1)
    return out


# ---- the names the project calls --------------------------------------------------------------------------------
# CUDA tensors go to the kernels, the rest to the references; `sparse_attention` is its reference everywhere as yet.

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


def select_pages(q, landmarks, page_table, lengths, budgets, page_size=16, first=1, last=2):
    """The pages each row and KV head should read: (pages [B,G,K] int32, counts [B] int32).

    q: [B,H,D]; landmarks: [N,G,D]; page_table: [B,P] int32; lengths: [B] int32, counting the new token; budgets: [B]
    int32 in pages, reserved ones included. A row keeps min(max(budget, first + last), ceil(length / S)) pages: its
    first `first` and last `last` always, the rest by highest score, ties to the lower page. `pages` are logical
    (indices into the row's page table), in no promised order; entries at and past counts[b] mean nothing. Paper, 3.1.
    """
    (B, H, D), (_, G, _) = q.shape, landmarks.shape
    assert H % G == 0, f"{H} query heads do not divide into {G} KV heads"
    assert page_table.dtype == lengths.dtype == budgets.dtype == torch.int32
    assert len(page_table) == len(lengths) == len(budgets) == B
    assert landmarks.is_contiguous() and q.stride(-1) == 1
    select = select_pages_triton if q.is_cuda else select_pages_ref
    return select(q, landmarks, page_table, lengths, budgets, page_size, first, last)


def paged_attention(q, k_pages, v_pages, page_table, lengths, pages=None, counts=None):
    """Softmax attention of one query token per row over the selected pages, or over all when `pages` is None.

    q: [B,H,D]; k_pages, v_pages: [N,G,S,D]; page_table: [B,P] int32; lengths: [B] int32, counting the new token;
    pages: [B,G,K] int32 and counts: [B] int32 from `select_pages`. Query head h reads KV head h // R. -> [B,H,D]
    """
    (B, H, D), (N, G, S, _) = q.shape, k_pages.shape
    assert H % G == 0 and k_pages.shape == v_pages.shape == (N, G, S, D)
    assert page_table.dtype == lengths.dtype == torch.int32 and len(page_table) == len(lengths) == B
    assert (pages is None) == (counts is None), "pages and counts come together, from select_pages"
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and q.stride(-1) == 1
    attend = paged_attention_triton if q.is_cuda else paged_attention_ref
    return attend(q, k_pages, v_pages, page_table, lengths, pages, counts)


def sparse_attention(q, k, v, budgets, page_size=16, first=1, last=2):
    """What decoding computes, for all T tokens of a sequence at once (teacher-forced); differentiable in q, k, v.

    q: [B,H,T,D]; k, v: [B,G,T,D]; budgets: [B,T] or [T] int32, in pages, reserved ones included: token t selects with
    budgets[t] exactly as `select_pages` would. A budget that covers all pages (`DENSE`) makes that position dense,
    which is how a prompt is expressed. -> [B,H,T,D]. Memory is linear in T.
    """
    (B, H, T, D), G = q.shape, k.shape[1]
    assert H % G == 0 and k.shape == v.shape == (B, G, T, D)
    assert budgets.dtype == torch.int32 and budgets.shape[-1] == T
    return sparse_attention_ref(q, k, v, budgets, page_size, first, last)


# ---- python sparse_attn.py --------------------------------------------------------------------------------------


def main():
    """Check that the three ways to the same attention agree: fp64 by definition, token by token, teacher-forced."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"on {device}; the decode step runs on the {'Triton kernels' if device == 'cuda' else 'references'}")
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


if __name__ == "__main__":
    main()
