"""Advantages, the loss and the update. Right values are computed by hand or from full logits."""
import copy
import math
from types import SimpleNamespace

import pytest
import torch

import train
from sparrow import Actor, Rollout, Schedule, acceptance, make_lora, rollout_alpha, sparse_attend, token_logprobs
from sparse_attn import DENSE
from train import Scored, advantages, best_of, importance_weights, make_batches, policy_loss, policy_pass, update_policy
from verify import Problem

SPARSE = Schedule((4, 5, 6, 7, 8), bin_tokens=24, page_size=4)


def flags(**changes):
    args = train.parse_args([])
    vars(args).update(dict(samples=2, minibatches=1, alpha_every=1, grad_clip=1e9) | changes)
    return args


def sampled(model, schedule=None, alpha_every=1, temperature=1.0):
    """Two samples each of four prompts, of unlike lengths, some cut off."""
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 97, (n,), generator=g).tolist() for n in (1, 9, 16, 21)]
    actor = Actor(model, rows=8, max_context=80, page_size=4, dense_layers=1, alpha_every=alpha_every)
    rollouts = actor.generate(prompts, 2, 50, temperature, schedule, stop_ids=(1, 2), seed=1)
    assert {r.finish for r in rollouts} == {"stop", "length"} and len({len(r.ids) for r in rollouts}) > 4
    return [Scored(r, a, group=i // 4) for i, (r, a) in enumerate(zip(rollouts, (1, -1, .5, -.5, 2, -2, .3, -.3)))]


@pytest.fixture(scope="module")
def scored(tiny):
    return sampled(tiny)


class KeepGradients(torch.optim.SGD):
    """Writes the gradients down and leaves the weights alone."""
    def step(self):
        self.kept = [p.grad.clone() for p in self.param_groups[0]["params"]]


def loss_of(logp, actor, adv=1.0, old=None, mask=None, **options):
    """policy_loss of one row of tokens -> (loss, metrics, gradient on logp)."""
    logp = torch.tensor([logp], requires_grad=True)
    options = {k: torch.tensor([v]) if k == "alpha" else v for k, v in options.items()}
    old = logp.detach() if old is None else torch.tensor([old])
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else torch.tensor([mask])
    loss, metrics = policy_loss(logp, old, torch.tensor([actor]), torch.tensor([adv]), mask, **options)
    loss.backward()
    return loss.item(), metrics, logp.grad[0].tolist()


def test_advantages_by_hand():
    """Faults: a spread over the batch, not the group; the biased deviation; samples dropped before grouping."""
    a = advantages([1, 0, 0, 0, 1, 1, 1, 0], 4, "none")
    assert a[[0, 4, 5, 6]].tolist() == [.75, .25, .25, .25]
    std = advantages([1, 0, 0, 0, 30, 10, 20, 20], 4)
    assert std.tolist() == pytest.approx([1.5, -.5, -.5, -.5, 1.5**.5, -1.5**.5, 0, 0], abs=1e-6)  # n-1: .5 and 8.165
    shuffled = advantages([0, 0, 1, 0, 20, 10, 30, 20], 4)
    assert shuffled.tolist() == pytest.approx(std[[1, 2, 0, 3, 6, 5, 4, 7]].tolist(), abs=1e-6)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards, size", [([.1] * 6, 3), ([1 / 3] * 7, 7), ([.7, .1, .3], 1), ([0.0] * 4, 4)])
def test_equal_rewards_teach_exactly_nothing(rewards, size, scale):
    """Fault: the mean of equal floats is off by a bit, and a tiny deviation blows that up."""
    assert advantages(rewards, size, scale).tolist() == [0.0] * len(rewards)


def test_the_importance_weight_is_detached_and_capped_above_only():
    """Fault: a gradient through w (0 or +2, not -1), or a floor under w."""
    logp, old, actor = (torch.full((1, 1), -3.0, requires_grad=True) for _ in range(3))
    policy_loss(logp, old, actor, torch.ones(1), torch.ones(1, 1, dtype=torch.bool))[0].backward()
    assert logp.grad.item() == -1 and old.grad.item() == 1 and actor.grad is None
    for policy, act, w in ((-.5, -.7, math.exp(.2)), (-.5, -3.0, 2.0), (-3.0, -.5, math.exp(-2.5))):
        loss, _, grad = loss_of([policy], [act])
        assert loss == pytest.approx(-w) and grad == pytest.approx([-w])
    assert loss_of([-.5], [-3.0], correction="none")[0] == -1 and loss_of([-.5], [-3.0], cap=5.0)[0] == -5


@pytest.mark.parametrize("adv, objective, gradient", [
    (1.0, [.5, .9, 1.2, 1.28], [.5, .9, 1.2, 0]), (-1.0, [-.8, -.9, -1.2, -1.5], [0, -.9, -1.2, -1.5])])
def test_clipping_by_hand(adv, objective, gradient):
    """Faults: low and high swapped, max for min, one side clipped for both signs. Ratios .5, .9, 1.2, 1.5."""
    logp = [math.log(r) for r in (.5, .9, 1.2, 1.5)]
    loss, metrics, grad = loss_of(logp, [0.0] * 4, adv, old=[0.0] * 4, n_tokens=1)
    assert loss == pytest.approx(-sum(objective)) and grad == pytest.approx([-g for g in gradient])
    assert metrics["clipped"] == .25


def test_metrics_by_hand():
    """Faults: ratio mean 0.492, rejected tokens being left in the denominator; kl other than k3 of policy over actor."""
    actor = [-math.log(w) for w in (1.11, .22, 2.23, 5e-5, 1.35)]
    _, metrics, grad = loss_of([0.0] * 5, actor, correction="mask", n_tokens=5)
    assert metrics["ratio_mean"] == pytest.approx(1.23) and metrics["truncated"] == pytest.approx(.6)
    assert grad == pytest.approx([-1.11 / 5, 0, 0, 0, -1.35 / 5])
    assert loss_of([-1.0, -1.0], [-1.5, -1.0])[1]["kl"] == pytest.approx((math.exp(.5) - 1.5) / 2)


def test_impossible_tokens_have_ratio_one():
    """Fault: -inf minus -inf is NaN, in the loss or in its gradient."""
    inf = float("inf")
    loss, metrics, grad = loss_of([-1.0, -inf, float("nan")], [-1.0, -inf, -1.0])
    assert loss == -1 and all(map(math.isfinite, grad)) and metrics["ratio_mean"] == 1 and metrics["kl"] == 0
    assert all(map(math.isfinite, loss_of([-inf, -1.0, -1.0], [-1.0, -inf, 0.0])[2]))


P, Q = [.5, .3, .2], [.2, .3, .5]  # policy and actor over three tokens: overlap .2 + .3 + .2, ratios 2.5, 1, 0.4


@pytest.mark.parametrize("correction, options, weights, cut", [
    ("none", {}, [1, 1, 1], 1 / 3), ("tis", {}, [2, 1, .4], 1 / 3), ("tis", {"cap": 3.0}, [2.5, 1, .4], 0),
    ("mask", {}, [0, 1, 0], 2 / 3), ("mask", {"floor": .3}, [0, 1, .4], 1 / 3), ("mask", {"cap": 5.0}, [2.5, 1, 0], 1 / 3),
    ("seq", {"cap": 0.9}, [.9] * 3, 1), ("seq", {}, [2.5 * 1 * .4] * 3, 0),
    ("jackpot", {}, [1 * .5 / (.2 / .7), 1 * .3 / (.3 / .7), .4 * .2 / (.2 / .7)], .2),  # accepted: min(P, Q) / 0.7
    ("jackpot", {"cap": 1.5}, [1.5, .7, .4 * .7], .2),
    ("tv", {"max_tv": .31}, [2, 1, .4], 1 / 3), ("tv", {"max_tv": .29}, [0, 0, 0], 1),
    ("tv", {"alpha": [.9, .7, .9]}, [2, 0, .4], 2 / 3)])
def test_each_correction_by_hand(correction, options, weights, cut):
    """Faults: a bound on the wrong side, q / p for p / q, a gradient through the weight, a rate other than the share cut."""
    logp, actor = ([math.log(x) for x in d] for d in (P, Q))
    options = dict(alpha=[sum(map(min, P, Q))] * 3) | options
    loss, metrics, grad = loss_of(logp, actor, -2.0, correction=correction, n_tokens=4, **options)
    assert grad == pytest.approx([2 * w / 4 for w in weights]) and loss == pytest.approx(2 * sum(weights) / 4)
    assert metrics["truncated"] == pytest.approx(cut)


def test_jackpots_mean_is_the_policys():
    """Over the actor's draws the weighted gradient is the overlap times the policy's, whatever it is a gradient of."""
    log_ratio, f = torch.tensor([[math.log(p / q) for p, q in zip(P, Q)]]), torch.tensor([3.0, -1.0, 7.0])
    w, _, _ = importance_weights(log_ratio, torch.ones(1, 3, dtype=torch.bool), "jackpot", 9.0, alpha=torch.full((1, 3), .7))
    assert (torch.tensor(Q) * w[0] * f).sum().item() == pytest.approx(.7 * (.5 * 3 - .3 + .2 * 7))


def test_a_sequences_weight_is_its_own():
    """Faults: seq's product over the batch, over padding, or overflowing. Rows: 1.5 * 1.2; 0.3; e^400."""
    log_w = torch.full((3, 20), 20.0)
    log_w[0, :2], log_w[1, 0] = torch.tensor([1.5, 1.2]).log(), math.log(.3)
    mask = torch.arange(20) < torch.tensor([[2], [1], [20]])
    w, _, cut = importance_weights(log_w.masked_fill(~mask, 0), mask, "seq", 5.0)
    assert w[:, 0].tolist() == pytest.approx([1.8, .3, 5.0]) and cut[:, 0].tolist() == [0, 0, 1]
    assert torch.equal(w, w[:, :1] * mask)


@pytest.mark.parametrize("correction", ["none", "tis", "mask", "seq", "jackpot", "tv"])
def test_metrics_are_of_the_ratios_before_truncation(correction):
    """Faults: an effective sample size of the capped weights (it would look healthy), k1 of the wrong sign. Ratios 4, 1, .5."""
    actor = [-math.log(w) for w in (4, 1, .5)]
    m = loss_of([0.0] * 3, actor, correction=correction, cap=2.0, alpha=[.9] * 3)[1]
    assert m["ess"] == pytest.approx(5.5**2 / (3 * 17.25)) and m["ratio_max"] == pytest.approx(4)
    assert m["k1"] == pytest.approx(-math.log(2) / 3) and m["kl"] == pytest.approx((2.5 - math.log(2)) / 3)
    assert m["ratio_mean"] == pytest.approx(.75 if correction == "mask" else 5.5 / 3)
    assert loss_of([-1.0] * 2, [-1.0] * 2)[1]["ess"] == 1


@pytest.mark.parametrize("correction", ["none", "tis", "mask", "seq", "jackpot", "tv"])
def test_masked_tokens_leak_nowhere(correction):
    """Fault: 0 * NaN, or a mean or a maximum over padding."""
    bad, nan = [float("nan"), float("inf"), -float("inf"), 50.0], [float("nan")] * 4
    clean = loss_of([-1.0, -2.0], [-1.2, -1.9], correction=correction, alpha=[.9, .8])
    dirty = loss_of([-1.0, -2.0, *bad], [-1.2, -1.9, *bad[::-1]], mask=[True] * 2 + [False] * 4, correction=correction,
                    alpha=[.9, .8, *nan])
    assert dirty[:2] == clean[:2] and dirty[2] == clean[2] + [0] * 4


def test_nothing_to_count_is_zero():
    """Fault: 0/0 when every token is masked, or rejected as too far off."""
    assert loss_of([-1.0], [-1.0], mask=[False])[0] == 0 and loss_of([-1.0], [-9.0], correction="mask")[0] == 0


def test_token_mean_is_over_the_whole_step():
    """Fault: a mean per sequence (2.5) or per micro-batch. 1 token of loss 4 and 9 tokens of loss 1: 1.3."""
    logp, adv = torch.full((2, 9), -2.0), torch.tensor([-4.0, -1.0])
    mask = torch.tensor([[True] + [False] * 8, [True] * 9])
    assert policy_loss(logp, logp, logp, adv, mask)[0].item() == pytest.approx(1.3)
    parts = [policy_loss(*[x[i:i + 1] for x in (logp, logp, logp, adv, mask)], n_tokens=10)[0] for i in range(2)]
    assert sum(parts).item() == pytest.approx(1.3)


def test_gradients_do_not_depend_on_the_micro_batch(tiny, scored):
    """Fault: micro-batches averaged as equals, or padding that counts. And alpha of a dense actor is 1."""
    found = []
    for size in (1, 90, 200, 10**6):
        keep, args = KeepGradients(tiny.parameters()), flags(micro_tokens=size)
        measured, stats = update_policy(tiny, keep, scored, [], args, "cpu")
        alpha, _, mask, _ = measured.rows()
        assert len(alpha) == 8 and (1 - alpha[mask]).abs().max() < 1e-5
        found.append((keep.kept, stats["loss"], len(make_batches(scored, args, "cpu"))))
    assert found[0][2] == 8 > found[1][2] > found[2][2] > found[3][2] == 1
    assert max(g.abs().max() for g in found[0][0]) > 1e-3, "no gradient: nothing was compared"
    for grads, loss, _ in found[:-1]:
        assert loss == pytest.approx(found[-1][1], abs=1e-6)
        assert all((a - b).abs().max() < 1e-6 * max(1, b.abs().max()) for a, b in zip(grads, found[-1][0]))


@pytest.mark.parametrize("correction", ["tis", "mask", "seq", "jackpot", "tv"])
def test_corrections_do_not_depend_on_the_micro_batch(tiny, correction):
    """Fault: a sequence's product, an alpha or an effective sample size that belongs to a micro-batch. The actor is sparse."""
    samples, found = sampled(tiny, SPARSE, temperature=0.7), []
    for size, minibatches in ((1, 1), (10**6, 1), (10**6, 2)):
        keep = KeepGradients(tiny.parameters(), lr=0.0)
        args = flags(micro_tokens=size, correction=correction, minibatches=minibatches, temperature=0.7,
                     cap=1.05, floor=0.9)
        found.append((update_policy(tiny, keep, samples, [], args, "cpu")[1], keep.kept))
    (one, grads), (all_, grads_all), (split, _) = found
    assert one["ess"] < 0.99 and one["truncated"] > 0, "nothing was corrected: the test would prove nothing"
    for k in one:
        assert one[k] == pytest.approx(all_[k], rel=1e-4, abs=1e-6), k
    for k in ("ess", "truncated", "kl", "k1", "entropy"):  # the policy stays, so two optimizer steps see the same
        assert split[k] == pytest.approx(all_[k], rel=1e-4, abs=1e-6), k
    assert all((a - b).abs().max() < 1e-5 * max(1, b.abs().max()) for a, b in zip(grads, grads_all))


@pytest.mark.parametrize("micro_tokens", [90, 10**6])
def test_the_kl_term_pulls_to_the_reference(tiny, scored, micro_tokens):
    """Faults: k3 with the ratio upside down, a gradient into the reference, a mean over a micro-batch. Without advantages
    only this term is left, and its gradient is taken here from log-probs of one sequence at a time."""
    reference = copy.deepcopy(tiny).requires_grad_(False)
    with torch.no_grad():
        for i, p in enumerate(reference.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.02)
    k3, n = [], sum(len(s.rollout.ids) for s in scored)
    for s in scored:
        ids, start = torch.tensor([s.rollout.prompt_ids + s.rollout.ids]), len(s.rollout.prompt_ids)
        p, q = (token_logprobs(m, ids)[0, start:] for m in (tiny, reference))
        k3.append((torch.exp(q - p) - (q - p) - 1).sum())
    wanted = torch.autograd.grad(0.3 * sum(k3) / n, list(tiny.parameters()))
    keep, args = KeepGradients(tiny.parameters()), flags(kl_ref=0.3, micro_tokens=micro_tokens)
    _, stats = update_policy(tiny, keep, [Scored(s.rollout, 0.0) for s in scored], [], args, "cpu", reference)
    assert stats["kl_ref"] == pytest.approx(sum(k3).item() / n, rel=1e-4) and stats["kl_ref"] > 0.01
    assert stats["loss"] == pytest.approx(0.3 * stats["kl_ref"], rel=1e-4)
    assert all((a - b).abs().max() < 1e-5 * max(1, b.abs().max()) for a, b in zip(keep.kept, wanted))
    assert all(p.grad is None for p in reference.parameters())


def test_oversampling_keeps_the_best_of_each_prompt():
    """Faults: the best of the batch and not of the prompt, the worst, ties to the later, an order by reward."""
    assert best_of([0, 1, 0, 1, .5, .5, 0, .5], 4, 2) == [1, 3, 4, 5]
    assert best_of([0, 0, 1, 5, 4, 3], 3, 1) == [2, 3] and best_of([0, 0, 1, 5, 4, 3], 3, 3) == list(range(6))


def test_masks_come_from_lengths():
    """Fault: a stop token that is also the pad id drops out of the loss; a cut-off answer out of the measurement."""
    def rollout(start, ids, finish):
        return Scored(Rollout([0] * start, ids, -torch.ones(len(ids)), torch.zeros(len(ids), 48), finish), 1.0)
    group = [rollout(3, [5, 0], "stop"), rollout(1, [0, 6, 7, 8, 0], "length"), rollout(2, [1], "stop")]
    for truncated in ("keep", "mask"):
        b, = make_batches(group, flags(truncated=truncated), "cpu")  # sorted by length: 3, 5, 6 tokens
        assert [m.nonzero()[:, 0].tolist() for m in b.mask] == [[2], [3, 4], [1, 2, 3, 4, 5]]
        assert torch.equal(b.measured, b.mask) and len(b.hidden) == 8 and (b.actor_logp == -b.mask.float()).all()
        assert b.in_loss.sum(1).tolist() == [1, 2, 5 if truncated == "keep" else 0]


@pytest.mark.parametrize("micro_tokens", [100, 10**6])
def test_policy_pass_against_full_logits(tiny, micro_tokens):
    """Faults: a shift by one, temperature on one side only, hidden states given to the wrong tokens."""
    args, lowest = flags(alpha_every=3, micro_tokens=micro_tokens, temperature=0.7), 1.0
    for batch in make_batches(sampled(tiny, SPARSE, 3, 0.7), args, "cpu"):
        with torch.no_grad():
            logp, alpha = policy_pass(tiny, batch, 0.7)
        for i, mask in enumerate(batch.mask):
            start, end = mask.nonzero()[0].item(), mask.nonzero()[-1].item() + 1
            ids, at = batch.ids[i:i + 1, :end], torch.arange(start, end, 3)
            budgets = SPARSE.pages(torch.arange(1, end + 1))
            budgets[:start] = DENSE
            with torch.no_grad():
                p, q = tiny(ids)[0] / 0.7, tiny(ids, sparse_attend(budgets, 1, 4))[0] / 0.7
                assert (logp[i, start:end] - token_logprobs(tiny, ids, 0.7)[0, start:]).abs().max() < 1e-4
            assert (alpha[i, at] - acceptance(p, q)[at - 1]).abs().max() < 1e-4
            assert alpha[i].isnan().sum() == len(alpha[i]) - len(at), "NaN wherever alpha is not measured"
            lowest = min(lowest, alpha[i, at].min().item())
    assert lowest < 0.9, "sparsity made no difference: the test would prove nothing"


def test_no_spread_is_measured_and_moves_nothing(tiny, scored):
    """Fault: 0/0, or weight decay and momentum stepping on no gradient; alpha read off the kept groups alone."""
    policy = copy.deepcopy(tiny)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, weight_decay=0.1)
    dropped = [Scored(s.rollout, 0.0, 2) for s in scored[::2]]
    cut = [s for s in scored if s.rollout.finish == "length"]
    for kept, unmoved in (([], dropped), (cut, [])):
        measured, stats = update_policy(policy, optimizer, kept, unmoved, flags(truncated="mask"), "cpu")
        assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), tiny.parameters()))
        assert all(math.isfinite(v) for v in stats.values())
        if unmoved:
            alpha, positions, mask, weight = measured.rows()
            assert weight.tolist() == [2.0] * 4 and mask.sum() == sum(len(s.rollout.ids) for s in dropped)
            assert (1 - alpha[mask]).abs().max() < 1e-5 and positions[0].tolist() == list(range(alpha.shape[1]))
    both = update_policy(tiny, KeepGradients(tiny.parameters()), scored[:4], dropped[2:], flags(), "cpu")[0]
    assert sorted(both.rows()[3].tolist()) == [1, 1, 1, 1, 2, 2], "a dropped group's one sample counts for the group"


def test_minibatches_keep_the_weights_that_generated(tiny, scored, monkeypatch):
    """Fault: from the second optimizer step on, pi_old and alpha read off a policy that has moved."""
    policy, seen = copy.deepcopy(tiny), []
    monkeypatch.setattr(train, "policy_loss", lambda *a: seen.append(a) or policy_loss(*a))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    alpha, _, measured, _ = update_policy(policy, optimizer, scored, [], flags(minibatches=2), "cpu")[0].rows()
    assert len(seen) == 2 and len(alpha) == 8 and (1 - alpha[measured]).abs().max() < 1e-5
    for logp, old, actor, _, mask, *rest in seen:  # the actor is dense: its log-probs are those of the first weights
        assert (old - actor)[mask].abs().max() < 1e-4 and (1 - rest[5])[mask].abs().max() < 1e-5
    assert (logp - old)[mask].abs().max() > 0.01, "the policy did not move: the test would prove nothing"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_is_torchs_in_fp32(shape):
    """Our Muon exists for speed on CPUs only: over several steps it must follow torch.optim.Muon to bf16 rounding."""
    g = torch.Generator().manual_seed(0)
    start, grads = torch.randn(shape, generator=g), [torch.randn(shape, generator=g) for _ in range(4)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    steps = [train.Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)]
    for grad in grads:
        for p, optimizer in zip((ours, theirs), steps):
            p.grad = grad.clone()
            optimizer.step()
    assert (ours - theirs).abs().max() < 0.02 * (ours - start).abs().max()


def test_violations_per_sequence():
    """alpha_low: every 2nd token measured, one row with 2 low tokens and one, standing for 3, with none: 2 * 2 / 4."""
    alpha = torch.tensor([[.5, .6, .9, .9], [.9, .9, 1.0, float("nan")]])
    rows = alpha, torch.arange(4).expand(2, 4), ~alpha.isnan(), torch.tensor([1.0, 3.0])
    m = train.alpha_metrics(rows, SPARSE, flags(alpha_every=2, tail=0.3))
    assert m["alpha_low"] == 1 and m["alpha_tokens"] == 13
    assert m["alpha_mean"] == pytest.approx((2.9 + 3 * 2.8) / 13) and m["alpha_tail"] == pytest.approx(.9)


def test_overlong_penalty_rises_over_the_last_tokens():
    """DAPO's soft punishment, with 100 tokens allowed and the last 20 of them penalised."""
    args = SimpleNamespace(max_new_tokens=100, overlong=20)
    def penalty(n, finish="stop"):
        return train.overlong_penalty(Rollout([1], [2] * n, torch.zeros(n), None, finish), args)
    assert [penalty(n) for n in (1, 80, 85, 90, 100)] == [0, 0, 0.25, 0.5, 1.0]
    assert penalty(100, "length") == 1.0
    args.overlong = 0
    assert penalty(100, "length") == 0.0


def test_rewards_of_mixed_kinds_keep_their_order():
    """Math, countdown and chain answers in one step, graded in parallel: each by its own checker."""
    problems = [Problem("", "1/2"), Problem("", "6", "countdown", (2, 3)), Problem("", "a1b2", "chain")]
    texts = ["\\boxed{0.5}", "\\boxed{0.4}", "\\boxed{2*3}", "\\boxed{6}", "#a1b2.", "#a1b3."]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: texts[ids[0]])
    rollouts = [Rollout([1], [i], torch.zeros(1), None, "stop") for i in range(6)]
    args = SimpleNamespace(code_timeout=5.0, code_reward="all")
    assert train.rewards_of(rollouts, problems, 2, tokenizer, args) == [1, 0, 1, 0, 1, 0.5]


def test_distill_brings_the_sparse_actor_closer_and_leaves_theta_alone(tiny):
    """At a fixed harsh budget and with no reward at stake: KL(sparse || dense) falls, alpha of the merged actor rises, the
    policy does not move a bit."""
    policy, args = copy.deepcopy(tiny), flags(distill=1.0, dense_layers=1, page_size=4, micro_tokens=200, temperature=1.0)
    samples = [Scored(x.rollout, 0.0) for x in sampled(policy)]
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    lora = make_lora(policy, 8)
    optimizer = torch.optim.AdamW([x for pair in lora.values() for x in pair], lr=3e-3, weight_decay=0.0)
    found = [train.distill(policy, lora, optimizer, samples, SPARSE, args, torch.device("cpu")) for _ in range(15)]
    assert found[-1]["distill_kl"] < 0.8 * found[0]["distill_kl"]
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in policy.parameters())

    actor, alphas = Actor(policy, rows=8, max_context=80, page_size=4, dense_layers=1), []
    for own in (None, lora):  # the actor's merged weights under the same budgets, on the same samples
        actor.load(policy, own)
        for x in samples:
            ids, start = torch.tensor([x.rollout.prompt_ids + x.rollout.ids]), len(x.rollout.prompt_ids)
            budgets = SPARSE.pages(torch.arange(1, ids.shape[1] + 1))
            budgets[:start] = DENSE
            with torch.no_grad():
                p, q = policy(ids)[0, start - 1:-1], actor.model(ids, sparse_attend(budgets, 1, 4))[0, start - 1:-1]
            alphas.append(acceptance(p, q))
    before, after = torch.cat(alphas[:len(samples)]).mean(), torch.cat(alphas[len(samples):]).mean()
    assert after > before + 0.01


def test_distill_gradient_does_not_depend_on_the_micro_batch(tiny):
    grads = []
    for micro in (60, 10_000):
        policy, args = copy.deepcopy(tiny), flags(distill=0.5, dense_layers=1, page_size=4, micro_tokens=micro, temperature=1.0)
        samples = sampled(tiny)
        lora = make_lora(policy, 4)
        for _, B in lora.values():
            B.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        seen = {}
        optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None, step=lambda: seen.update(
            {k: [x.grad.clone() for x in pair] for k, pair in lora.items()}))
        train.distill(policy, lora, optimizer, samples, SPARSE, args, torch.device("cpu"))
        grads.append(seen)
    for name, pair in grads[0].items():
        for a, b in zip(pair, grads[1][name]):
            assert (a - b).abs().max() < 1e-5 and a.any()
