"""What only a GPU can show: bf16 actor against bf16 policy, references on CUDA tensors. Skipped without one."""
import pytest
import torch

import sparrow
import sparse_attn
from sparrow import Actor, Config, Model, Schedule, chunked_acceptance, sparse_attend, token_logprobs
from sparse_attn import DENSE, append_kv, paged_attention, select_pages, sparse_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def policy(checkpoints):
    model = Model.from_pretrained(checkpoints["qwen3"][0], "cuda")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(0.3)
    model.dtype = torch.bfloat16
    return model


def states(policy, rollout, attend=None):
    ids = torch.tensor([rollout.prompt_ids + rollout.ids], device="cuda")
    with torch.no_grad():
        args = (ids, attend) if attend else (ids,)
        return policy(*args, head=lambda h, _: h)[0, len(rollout.prompt_ids) - 1:-1]


def test_dense_actor_agrees_with_the_policy_to_bf16_rounding(policy, random_ids):
    actor = Actor(policy, rows=16, max_context=256)
    rollouts = actor.generate([random_ids(n).tolist() for n in (5, 16, 33)], 4, 150, 1.0)
    alpha = torch.cat([chunked_acceptance(policy.logits, states(policy, r), r.hidden) for r in rollouts])
    assert alpha.min() > 0.97 and alpha.mean() > 0.99


def test_sparse_actor_agrees_with_teacher_forcing_to_bf16_rounding(policy, random_ids):
    schedule = Schedule((4, 5, 6), 40, 8)
    actor = Actor(policy, rows=16, max_context=256, page_size=8, dense_layers=1)
    rollouts = actor.generate([random_ids(n).tolist() for n in (5, 16, 33)], 4, 150, 1.0, schedule)
    forced, dense = [], []
    for r in rollouts:
        budgets = schedule.pages(torch.arange(1, len(r.prompt_ids) + len(r.ids) + 1, device="cuda"))
        budgets[:len(r.prompt_ids)] = DENSE
        forced.append(chunked_acceptance(policy.logits, states(policy, r, sparse_attend(budgets, 1, 8)), r.hidden))
        dense.append(chunked_acceptance(policy.logits, states(policy, r), r.hidden))
    forced, dense = torch.cat(forced), torch.cat(dense)
    # a near tie between two pages may fall the other way in bf16; almost all tokens must agree
    assert (forced > 0.97).float().mean() > 0.9 and forced.mean() > dense.mean() + 0.02


@pytest.mark.parametrize("heads, kv, dim", [(16, 8, 128), (14, 2, 64), (40, 8, 128), (12, 2, 80)])
def test_operations_on_the_gpu_equal_those_on_the_cpu(heads, kv, dim):
    g = torch.Generator().manual_seed(0)
    B, T, S = 3, 50, 16
    q, k, v = (torch.randn(B, n, T, dim, generator=g) for n in (heads, kv, kv))
    table = (torch.randperm(12, generator=g) + 1).view(3, 4).int()
    out = []
    for device in ("cpu", "cuda"):
        pools = [torch.zeros(13, kv, S, dim, device=device) for _ in range(2)]
        marks = torch.zeros(13, kv, dim, device=device)
        for t in range(T):
            n = torch.full((B,), t, dtype=torch.int32, device=device)
            kt, vt, qt = (x[:, :, t].to(device) for x in (k, v, q))
            append_kv(kt, vt, *pools, marks, table.to(device), n)
        budgets = torch.tensor([3, 4, 1], dtype=torch.int32, device=device)
        chosen = select_pages(qt, marks, table.to(device), n + 1, budgets)
        forced = sparse_attention(*(x.to(device) for x in (q, k, v)), torch.full((T,), 3, dtype=torch.int32, device=device))
        out.append([x.cpu() for x in (paged_attention(qt, *pools, table.to(device), n + 1, *chosen), *marks, forced)])
    for a, b in zip(*out):
        assert (a - b).abs().max() < 1e-4


def test_graph_replay_with_a_smaller_batch(policy, random_ids):
    """Same ids as eager for batches of 1, 5 and 3 in turn; idle lanes write nowhere live."""
    schedule = Schedule((4, 5, 6), 40, 8)
    graphs, eager = (Actor(policy, rows=8, max_context=128, page_size=8, dense_layers=1) for _ in range(2))
    eager._step = lambda: eager._decode(len(eager.live), eager.row_pages)
    for n, s in ((1, schedule), (5, None), (3, schedule), (7, schedule)):
        prompts = [random_ids(9 + i, seed=i).tolist() for i in range(n)]
        a, b = (x.generate(prompts, 1, 60, 1.0, s, stop_ids=[5], seed=n) for x in (graphs, eager))
        assert sum(x.ids == y.ids for x, y in zip(a, b)) >= n - 1, "a batch of another size may round one sample away"
    assert graphs.graphs and not eager.graphs


def test_kernels_that_overlap_give_the_bits_of_kernels_that_do_not(random_ids, monkeypatch):
    """Hundreds of replays of a real model's step, where each kernel starts while the one before it runs, against
    launches that wait for each other; also one by one outside a graph."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(Config.from_hf(sparrow.model_shape("Qwen3-0.6B")))
    prompts, schedule = random_ids(16, 60).tolist(), Schedule((4, 6), 128, 16)
    graphs, eager = (Actor(model, rows=16, max_context=512) for _ in range(2))
    eager._step = lambda: eager._decode(len(eager.live), eager.row_pages)
    overlapped = [actor.generate(prompts, 1, 300, 1.0, schedule) for actor in (graphs, graphs, eager)]
    monkeypatch.setattr(sparse_attn, "_turns", lambda x: dict(PDL=False))
    plain = eager.generate(prompts, 1, 300, 1.0, schedule)
    for rollouts in overlapped:
        assert all(a.ids == b.ids and torch.equal(a.hidden, b.hidden) for a, b in zip(rollouts, plain))


def test_graphs_are_captured_anew_for_another_length(policy, random_ids):
    """A change of --max-new-tokens or temperature drops all graphs, and with them the memory they shared."""
    actor = Actor(policy, rows=8, max_context=128)
    for length, temperature in ((20, 1.0), (40, 1.0), (40, 0.5), (20, 1.0)):
        rollouts = actor.generate([random_ids(9).tolist()], 8, length, temperature)
        assert all(len(r.ids) == length for r in rollouts)


def test_bench_prints_steps_floors_and_a_rollout(capsys):
    """No step is faster than its bytes allow."""
    sparrow.main("--bench --model Qwen3-0.6B --rows 2 --context 4096 --budget 0.2 --min-pages 4 --profile".split())
    out = capsys.readouterr().out
    ratios = [float(x) for line in out.splitlines() if "over its byte floor" in line for x in line.split()[4:]]
    assert len(ratios) == 3 * 2 and min(ratios) > 0.95
    assert "_attend_kernel" in out and "_select_kernel" in out and out.count("a rollout to 4096 tokens is") == 2
