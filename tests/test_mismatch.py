"""The mismatch of actor and policy: log-probs that line up, alpha that is exact, a tail that is an order statistic."""
import copy
import math

import pytest
import torch

from sparrow import (Config, Model, acceptance, acceptance_topk, chunked_acceptance, chunked_kl, lora_on, make_lora,
                     sample_tokens, sample_uniforms, tail, token_logprobs)

torch.set_num_threads(1)
P, Q = torch.tensor([.6, .2, .1, .1]), torch.tensor([.4, .4, .15, .05])


def random_logits(n, V, seed=0, scale=2.0):
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * scale


# ---- acceptance -------------------------------------------------------------------------------------------------

def test_acceptance_of_the_known_pair():
    """Guards against a ratio averaged over tokens, or a sum over listed tokens only: exactly 0.75 here."""
    assert acceptance(P.log(), Q.log()).item() == pytest.approx(0.75, abs=1e-6)
    assert acceptance(P.log() + 7, Q.log() - 3).item() == pytest.approx(0.75, abs=1e-6)  # logits: a shift is nothing


def test_acceptance_of_equal_and_disjoint():
    """Guards against NaN from 0/0 and -inf - -inf: 1 for equal distributions (masked ids too), 0 for disjoint ones."""
    logits, inf = random_logits(5, 50), float("inf")
    assert acceptance(logits, logits).tolist() == pytest.approx([1.0] * 5, abs=1e-6)
    masked = torch.tensor([0.0, 1.0, -inf, -inf])
    assert acceptance(masked, masked).item() == pytest.approx(1.0, abs=1e-6)
    assert acceptance(masked, masked.flip(0)).item() == 0.0


def test_acceptance_is_symmetric_and_matches_a_loop():
    """Guards against a one-sided ratio. Both sides of Eq. 2, in fp64."""
    p, q = random_logits(40, 30, 1), random_logits(40, 30, 2)
    alpha = acceptance(p, q)
    assert alpha.shape == (40,) and torch.equal(alpha, acceptance(q, p))
    for i in range(40):
        a, b = p[i].double().softmax(0).tolist(), q[i].double().softmax(0).tolist()
        assert alpha[i].item() == pytest.approx(sum(b_v * min(a_v / b_v, 1) for a_v, b_v in zip(a, b)), abs=1e-6)


def test_acceptance_of_bf16_logits_is_fp32():
    """Guards against a softmax in bf16: over a whole vocabulary its small terms vanish."""
    p, q = random_logits(2, 151936, 3).bfloat16(), random_logits(2, 151936, 4).bfloat16()
    alpha = acceptance(p, q)
    exact = torch.minimum(p.double().softmax(-1), q.double().softmax(-1)).sum(-1)
    assert alpha.dtype == torch.float32
    assert alpha.tolist() == pytest.approx(exact.tolist(), abs=2e-6)


def test_topk_bounds_of_the_known_pair():
    """Guards against remainders lumped wrongly: two listed tokens give 0.60, with the lumped tails 0.80."""
    lower, upper = acceptance_topk(P.log(), Q.log(), k=2)
    assert (lower.item(), upper.item()) == pytest.approx((0.60, 0.80), abs=1e-6)


def test_topk_lists_the_actors_tokens():
    """Guards against the policy's top k: the actor (second argument) is the one that lists."""
    p, q = torch.tensor([.7, .2, .1]).log(), torch.tensor([.2, .1, .7]).log()
    lower, upper = acceptance_topk(p, q, k=1)
    assert (lower.item(), upper.item()) == pytest.approx((0.1, 0.1 + min(.9, .3)), abs=1e-6)


@pytest.mark.parametrize("k", [1, 5, 20, 64, 1000])
def test_topk_bounds_hold_the_exact_value(k):
    """Guards against bounds that do not bound; with k at or past the vocabulary both are exact."""
    p = random_logits(300, 64, 5)
    q = p + random_logits(300, 64, 6, scale=0.7)
    alpha, (lower, upper) = acceptance(p, q), acceptance_topk(p, q, k)
    assert (lower <= alpha + 1e-6).all() and (alpha <= upper + 1e-6).all()
    if k >= 64:
        torch.testing.assert_close(lower, alpha, atol=1e-6, rtol=0)
        torch.testing.assert_close(upper, alpha, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mean_ratio_of_sampled_tokens_has_expectation_alpha(seed):
    """Guards against p and q exchanged, and a sampler whose distribution is not the one alpha is computed with.

    E over v ~ q of min(1, p(v)/q(v)) is alpha. Tolerance: 4 standard errors of the mean.
    """
    n, temperature = 40_000, 0.7
    p_logits = random_logits(1, 40, seed)
    q_logits = p_logits + random_logits(1, 40, seed + 100, scale=0.5)
    tokens, logq = sample_tokens(q_logits.expand(n, -1), sample_uniforms(seed, 0, 0, n), temperature)
    logp = (p_logits / temperature).log_softmax(-1)[0, tokens]
    ratio = (logp - logq).exp().clamp(max=1)
    alpha = acceptance(p_logits / temperature, q_logits / temperature).item()
    assert 0.2 < alpha < 0.9
    assert ratio.mean().item() == pytest.approx(alpha, abs=4 * ratio.std().item() / math.sqrt(n))


def test_truncated_sampling_on_one_side():
    """p = [.5, .3, .15, .05] cut to top_p 0.8 on the actor's side only: every kept ratio reads 0.8, a mismatch that is
    the sampler's and not the sparsity's.

    It cannot arise inside sparrow, which has no top-p or top-k: sampling, log-probs and alpha all use the full
    softmax. So this guards the two facts that this rests on: what alpha would report, and that the sampler's own
    log-probs are untruncated ones.
    """
    p = torch.tensor([.5, .3, .15, .05])
    cut = torch.tensor([.625, .375, 0, 0]).log()
    assert acceptance(p.log(), cut).item() == pytest.approx(0.8, abs=1e-6)
    assert acceptance(cut, cut).item() == pytest.approx(1.0, abs=1e-6)
    tokens, logq = sample_tokens(p.log().expand(4, -1), torch.tensor([0.2, 0.6, 0.9, 0.99]), 1.0)
    assert tokens.tolist() == [0, 1, 2, 3]
    assert (p[tokens].log() - logq).exp().tolist() == pytest.approx([1.0] * 4, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_acceptance_in_chunks(chunk):
    """Guards against a memory knob that changes alpha, and a temperature on one side only."""
    head = torch.nn.Linear(8, 33, bias=False).requires_grad_(False)
    p, q = random_logits(20, 8, 1), random_logits(20, 8, 2)
    want = acceptance(head(p) / 0.6, head(q) / 0.6)
    torch.testing.assert_close(chunked_acceptance(head, p, q, 0.6, chunk), want, atol=1e-6, rtol=0)
    assert chunked_acceptance(head, p[:0], q[:0], 0.6, chunk).shape == (0,)


# ---- tail -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fraction,n,rank", [
    (0.05, 100, 5), (0.05, 101, 6), (0.07, 100, 7), (0.05, 20, 1), (0.05, 21, 2), (0.05, 1, 1), (0.01, 250, 3),
    (0.29, 100, 29), (0.5, 3, 2), (1.0, 9, 9)])
def test_tail_is_the_order_statistic(fraction, n, rank):
    """Guards against interpolation, floor for ceil, an index off by one, and 0.07 * 100 = 7.000000000000001."""
    values = (torch.arange(1, n + 1).double() / (n + 1)).float()
    shuffled = values[torch.randperm(n, generator=torch.Generator().manual_seed(n))]
    assert tail(shuffled, fraction=fraction) == values[rank - 1].item()


def test_tail_leaves_out_nan_and_masked():
    """Guards against NaN sorted as the largest (or smallest) value, and padding that counts."""
    nan = float("nan")
    alpha = torch.tensor([[.9, nan, .3, .0], [.5, .7, nan, .0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, False]])
    assert tail(alpha, mask, 0.25) == pytest.approx(0.3)    # rank 1 of .3 .5 .7 .9
    assert tail(alpha, mask, 0.26) == pytest.approx(0.5)    # rank 2
    assert tail(alpha, fraction=0.5) == pytest.approx(0.3)  # rank 3 of 0 0 .3 .5 .7 .9


def test_tail_of_nothing_is_nan():
    """Guards against 0 (an alarm) or 1 (an all-clear) where there is no data."""
    assert math.isnan(tail(torch.empty(0)))
    assert math.isnan(tail(torch.full((3,), float("nan"))))
    assert math.isnan(tail(torch.rand(2, 3), torch.zeros(2, 3, dtype=torch.bool)))


def test_tail_of_bf16_is_fp32():
    """Guards against a rank or a comparison in bf16: ranks past 256 are not integers there."""
    alpha = torch.arange(2000).bfloat16() / 2048
    assert tail(alpha, fraction=0.5) == alpha.float().sort().values[999].item()


def test_tail_above_2_to_the_24():
    """Guards against torch.quantile's limit and against a rank computed in fp32."""
    n = 2**24 + 21
    rank = math.ceil(n / 20)
    alpha = torch.ones(n)
    alpha[::16][:rank - 1] = 0.25
    alpha[-1] = 0.5
    assert tail(alpha) == 0.5
    alpha[-2] = 0.25
    assert tail(alpha) == 0.25


# ---- log-probs --------------------------------------------------------------------------------------------------

class Stub:
    """Called as a Model is: puts logit 20 on (last id + 1) mod 13. Its hidden states are its logits."""
    dtype = torch.float32

    def __call__(self, ids, attend=None, positions=None, head=None):
        hidden = torch.nn.functional.one_hot((ids + 1) % 13, 13).to(self.dtype) * 20
        return head(hidden, lambda h: h) if head else hidden


def test_logprobs_are_shifted_by_one():
    """Guards against the logits of token t scoring token t: five completion tokens sum to 0; unshifted, to -100."""
    logp = token_logprobs(Stub(), torch.arange(9)[None])
    assert logp.shape == (1, 9) and logp.dtype == torch.float32 and logp[0, 0] == 0
    assert logp[0, 4:].sum().item() == pytest.approx(0.0, abs=1e-6)
    assert token_logprobs(Stub(), torch.full((1, 9), 3))[0, 4:].sum().item() == pytest.approx(-100, abs=1e-4)


def test_logprobs_of_one_token():
    """Guards against a crash on a sequence with nothing to predict, and on a prompt of length 1."""
    assert token_logprobs(Stub(), torch.tensor([[5], [7]])).tolist() == [[0.0], [0.0]]
    logp = token_logprobs(Stub(), torch.tensor([[5, 6], [5, 7]]))
    assert logp[:, 1].tolist() == pytest.approx([0.0, -20.0], abs=1e-4)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    D = 8
    config = Config(vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=D, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=True,
                    tied=False, norm_eps=1e-6, max_context=64, rope_scale=1.0,
                    inv_freq=[10000.0 ** (-2 * i / D) for i in range(D // 2)])
    return Model(config)


def naive_logprobs(model, ids):
    with torch.no_grad():
        logp = model(ids).double().log_softmax(-1)
    return torch.tensor([[0.0] + [logp[n, t - 1, ids[n, t]].item() for t in range(1, ids.shape[1])]
                         for n in range(len(ids))])


def test_unlike_lengths_in_one_batch(tiny):
    """Guards against padding that moves a row's log-probs. A right-padded row scores as it does alone."""
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 13, (n,), generator=g) for n in (1, 2, 9, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=12)
    logp = token_logprobs(tiny, padded)
    for n, row in enumerate(rows):
        torch.testing.assert_close(logp[n, :len(row)], naive_logprobs(tiny, row[None])[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_chunk_size_does_not_matter(tiny, chunk):
    """Guards against chunks that lose or repeat a token, in the values or in any gradient; and with no gradient on."""
    ids = torch.randint(0, 13, (3, 8), generator=torch.Generator().manual_seed(2))
    weight = torch.rand(3, 8, generator=torch.Generator().manual_seed(3))
    results = []
    for c in (chunk, 21):
        tiny.zero_grad()
        logp = token_logprobs(tiny, ids, chunk=c)
        (logp * weight).sum().backward()
        results.append([logp.detach()] + [p.grad.clone() for p in tiny.parameters()])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[0][0], naive_logprobs(tiny, ids), atol=2e-6, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(token_logprobs(tiny, ids, chunk=chunk), results[0][0], atol=1e-6, rtol=0)


def test_temperature_divides_the_logits(tiny):
    """Guards against a policy scored at temperature 1 for samples drawn at another: the ratio would be wrong."""
    ids = torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = (tiny(ids)[:, :-1].double() / 0.6).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(token_logprobs(tiny, ids, 0.6)[:, 1:].double(), want, atol=2e-6, rtol=0)


def test_attend_reaches_the_model(tiny):
    """Guards against a teacher-forced actor that is scored with dense attention after all."""
    layers = []

    def attend(layer, q, k, v):
        layers.append(layer)
        return torch.zeros_like(q)

    ids = torch.randint(0, 13, (1, 6), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert (token_logprobs(tiny, ids, attend=attend) - token_logprobs(tiny, ids)).abs().max() > 1e-4
    assert layers == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_softmax_over_a_whole_vocabulary(dtype):
    """Guards against a log-softmax in bf16, which is off by 0.068 nat over 151,936 ids."""
    logits = random_logits(3, 151936, 7).to(dtype)
    ids = torch.tensor([[11, 151935, 70000, 0]])

    class Wide:
        def __call__(self, ids, attend, positions=None, head=None):
            return head(torch.eye(3).repeat(2, 1)[None, :4].to(dtype), lambda h: h @ logits)

    got = token_logprobs(Wide(), ids)
    want = logits.double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0, 1:].double(), want, atol=1e-5, rtol=0)


def test_bf16_model_scores_in_fp32(tiny):
    """Guards against the same through the model's own output head: its bf16 logits, then fp32."""
    ids = torch.randint(0, 13, (1, 7), generator=torch.Generator().manual_seed(6))
    tiny.dtype = torch.bfloat16
    try:
        got = token_logprobs(tiny, ids).detach()
        want = naive_logprobs(tiny, ids)
    finally:
        tiny.dtype = torch.float32
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


def test_lora_on_is_the_merged_model_and_leaves_nothing_behind(tiny, random_ids):
    """Inside, the sum of both paths; W + B A merged gives the same log-probs. Outside, the policy is as it was."""
    model, ids = copy.deepcopy(tiny), random_ids(2, 12, high=tiny.config.vocab_size)
    lora = make_lora(model, 4)
    before = token_logprobs(model, ids)
    with lora_on(model, lora):
        assert torch.equal(token_logprobs(model, ids), before), "B is 0 at first"
    for _, B in lora.values():
        B.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    with lora_on(model, lora):
        inside = token_logprobs(model, ids)
        inside.sum().backward()
    merged = copy.deepcopy(tiny)
    for name, p in merged.named_parameters():
        if name in lora:
            p.data += lora[name][1].detach() @ lora[name][0].detach()
    assert (inside - token_logprobs(merged, ids)).abs().max() < 1e-4 < (inside - before).abs().max()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(x.grad is not None and x.grad.any() for pair in lora.values() for x in pair)
    assert torch.equal(token_logprobs(model, ids), before)


def test_chunked_kl_is_kl_with_a_gradient_in_q_alone():
    g = torch.Generator().manual_seed(0)
    head, q, p = torch.randn(50, 8, generator=g), torch.randn(7, 8, generator=g), torch.randn(7, 8, generator=g)
    q.requires_grad_(), p.requires_grad_()
    got = chunked_kl(lambda h: h @ head.T, q, p, 0.7, chunk=3)
    logq, logp = ((x.double() @ head.double().T / 0.7).log_softmax(-1) for x in (q, p))
    want = torch.nn.functional.kl_div(logp, logq, log_target=True, reduction="none").sum(-1)
    assert (got - want).abs().max() < 1e-5
    got.sum().backward()
    exact = torch.autograd.grad(want.sum(), q)[0]
    assert p.grad is None and (q.grad - exact).abs().max() < 1e-4
