"""Memory: a policy pass that does not fit is run again in halves; what the planner chooses and what it refuses."""
import copy

import pytest
import torch

import train
from sparrow import Config, model_shape
from test_loss import flags, scored  # noqa: F401 (a fixture)

GiB = 2**30


def updated(tiny, scored, args, limit, monkeypatch):
    """The policy after a step in which passes of more than `limit` padded tokens run out of memory, also half-way."""
    policy, seen, pass_of = copy.deepcopy(tiny), [], train.policy_pass

    def policy_pass(policy, batch, *rest, **more):
        logp, alpha = pass_of(policy, batch, *rest, **more)
        if torch.is_grad_enabled():
            if batch.ids.numel() > limit:
                logp.sum().backward()  # what a pass leaves behind that fails in its backward half
                raise torch.OutOfMemoryError("too much")
            seen.append(batch.ids.numel())
        return logp, alpha
    monkeypatch.setattr(train, "policy_pass", policy_pass)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    measured, stats = train.update_policy(policy, optimizer, scored, [], args, "cpu")
    monkeypatch.undo()
    return policy, measured, stats, seen


@pytest.mark.parametrize("minibatches", [1, 2])
def test_out_of_memory_halves_the_passes_and_changes_nothing(tiny, scored, minibatches, monkeypatch, capsys):  # noqa: F811
    args = flags(minibatches=minibatches, micro_tokens=10**6)
    undisturbed = flags(minibatches=minibatches, micro_tokens=10**6)
    whole, measured, stats, passes = updated(tiny, scored, undisturbed, 10**9, monkeypatch)
    halved, measured2, stats2, passes2 = updated(tiny, scored, args, 150, monkeypatch)
    assert len(passes) == minibatches and max(passes2) <= 150 and args.micro_tokens <= 150
    assert f"--micro-tokens {args.micro_tokens}" in capsys.readouterr().err
    for a, b in zip(whole.parameters(), halved.parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert stats2 == pytest.approx(stats, rel=1e-3, abs=1e-5)
    alphas = [torch.cat([a[~a.isnan()] for a, _ in m]).sort().values for m in (measured, measured2)]
    torch.testing.assert_close(*alphas)


def test_a_single_sequence_that_does_not_fit_is_an_error(tiny, scored, monkeypatch):  # noqa: F811
    with pytest.raises(torch.OutOfMemoryError):
        updated(tiny, scored, flags(micro_tokens=10**6), 5, monkeypatch)


def plan(free, context=16384, ranks=1, **changes):
    args = flags(**dict(rows=256, prompts=32, samples=8, max_new_tokens=context - 512, page_size=16, pool_pages=0,
                        alpha_every=4, micro_tokens=16384, offload=False, kl_ref=0, oversample=1) | changes)
    return train.plan_memory(Config.from_hf(model_shape("Qwen2.5-1.5B")), context, int(free * GiB), args, ranks)


def test_the_plan_shrinks_with_the_memory():
    """The pool first, then the micro-batch down to one sequence, then the rows; sharding and offload make room."""
    rows, pages, micro, text = plan(400)
    assert (rows, micro, pages) == (256, 16384, 256 * 1025) and "400.0 GiB free" in text
    assert plan(100)[0] == 256 and 100 * 1025 <= plan(100)[1] < 256 * 1025
    assert plan(100, context=4096, micro_tokens=65536)[2] <= 65536 and plan(48, context=4096)[2] >= 4096
    sizes = [plan(free)[1] for free in (60, 80, 100, 140)]
    assert sizes == sorted(sizes)
    assert plan(60, ranks=8, prompts=64)[1] > plan(60, prompts=8)[1], "eight shards"
    assert plan(60, offload=True)[1] > plan(60)[1]


def test_the_plan_refuses_with_the_numbers():
    with pytest.raises(ValueError, match=r"24\.0 GiB are free.*policy 2\d\.\d.*--offload"):
        plan(24, context=4096)
    rows, pages, micro, _ = plan(24, context=4096, offload=True)
    assert rows >= 1 and pages >= 257 and micro == 4096
    with pytest.raises(ValueError, match="more GPUs"):
        plan(8, offload=True)
    with pytest.raises(ValueError, match="--pool-pages"):
        plan(60, pool_pages=10**6)
