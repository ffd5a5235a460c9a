"""The actor: what it generates is what the teacher-forced model says it should be."""
import math

import pytest
import torch

from sparrow import (SHAPES, Actor, Config, Model, Schedule, chunked_acceptance, model_shape, sample_tokens, sample_uniforms,
                     sparse_attend, step_bytes, token_logprobs)
from sparse_attn import DENSE

SPARSE = Schedule((4, 5, 6, 7, 8), bin_tokens=24, page_size=4)  # pages of 4 tokens: a real choice from token 17 on


def actor_for(model, **changes):
    return Actor(model, **(dict(rows=6, max_context=160, page_size=4, dense_layers=1) | changes))


def teacher_forced(model, rollout, schedule, dense_layers=1, page_size=4, temperature=1.0):
    """Log-probs of a rollout's response, in one pass under the budgets that decoding had."""
    ids = torch.tensor([rollout.prompt_ids + rollout.ids])
    budgets = schedule.pages(torch.arange(1, ids.shape[1] + 1))
    budgets[:len(rollout.prompt_ids)] = DENSE
    attend = sparse_attend(budgets, dense_layers, page_size)
    with torch.no_grad():
        return token_logprobs(model, ids, temperature, attend)[0, len(rollout.prompt_ids):]


@pytest.fixture(scope="module")
def prompts():
    g = torch.Generator().manual_seed(3)
    return [torch.randint(2, 97, (n,), generator=g).tolist() for n in (5, 16, 17, 33)]


def test_sparse_rollout_equals_teacher_forcing(checkpoints, prompts):
    """The one test that covers selection, reserved pages, budgets per position, landmarks and positions together."""
    for kind, (folder, _) in checkpoints.items():
        model = Model.from_pretrained(folder)
        rollouts = actor_for(model).generate(prompts, 2, 90, 1.0, SPARSE, seed=5)
        for r in rollouts:
            forced = teacher_forced(model, r, SPARSE)
            assert (forced - r.logprobs).abs().max() < 1e-4, kind
            with torch.no_grad():
                dense = token_logprobs(model, torch.tensor([r.prompt_ids + r.ids]))[0, len(r.prompt_ids):]
            assert (dense - r.logprobs).abs().max() > 0.01, "sparsity made no difference: the test would prove nothing"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_prompts_around_page_borders(tiny, random_ids, length):
    """A prompt of exactly n pages, and a decode position one too high, are the classic faults here."""
    prompt = random_ids(length, seed=length).tolist()
    r, = actor_for(tiny, page_size=16).generate([prompt], 1, 40, 1.0)
    with torch.no_grad():
        logp = token_logprobs(tiny, torch.tensor([prompt + r.ids]))[0, length:]
    assert (logp - r.logprobs).abs().max() < 1e-4


def test_budget_one_is_dense(tiny, prompts):
    dense = actor_for(tiny).generate(prompts, 2, 60, 1.0, None, seed=1)
    one = actor_for(tiny).generate(prompts, 2, 60, 1.0, Schedule.fraction(1.0, 160, page_size=4), seed=1)
    table = actor_for(tiny).generate(prompts, 2, 60, 1.0, Schedule((1000,), 160, 4), seed=1)  # selects, and keeps all
    for a, b, c in zip(dense, one, table):
        assert a.ids == b.ids == c.ids
        assert torch.equal(a.logprobs, b.logprobs) and (a.logprobs - c.logprobs).abs().max() < 1e-5
        with torch.no_grad():
            states = tiny(torch.tensor([a.prompt_ids + a.ids]), head=lambda h, _: h)[0, len(a.prompt_ids) - 1:-1]
            alpha = chunked_acceptance(tiny.logits, states, a.hidden)
        assert (1 - alpha).abs().max() < 1e-5  # rounding in fp32


def test_greedy_equals_transformers(checkpoints, prompts):
    for folder, hf in checkpoints.values():
        got = actor_for(Model.from_pretrained(folder)).generate(prompts, 1, 30, temperature=0)
        for r, prompt in zip(got, prompts):
            want = hf.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None,
                               pad_token_id=1)
            assert r.ids == want[0, len(prompt):].tolist() and r.logprobs.isfinite().all()


def test_hidden_states_are_those_of_every_nth_response_token(tiny, prompts):
    for every in (1, 3):
        for r in actor_for(tiny, alpha_every=every).generate(prompts, 1, 20, 1.0, SPARSE):
            assert r.hidden.shape == (math.ceil(len(r.ids) / every), 48)
            logp = tiny.logits(r.hidden).log_softmax(-1).gather(-1, torch.tensor(r.ids[::every])[:, None])[:, 0]
            assert (logp - r.logprobs[::every]).abs().max() < 1e-5
    assert actor_for(tiny, alpha_every=0).generate(prompts[:1], 1, 20)[0].hidden is None


def test_stops(tiny, prompts):
    """The stop token ends the sample and is part of it; stop ids in a prompt end nothing."""
    free = actor_for(tiny).generate(prompts, 1, 40, 1.0, seed=2)
    stops = [free[0].ids[12], free[1].ids[20]]
    got = actor_for(tiny).generate([[*p, stops[0]] if i == 3 else p for i, p in enumerate(prompts)], 1, 40, 1.0, None, stops, 2)
    for r, f in zip(got[:3], free):
        cut = next((i for i, t in enumerate(f.ids) if t in stops), None)
        assert r.ids == (f.ids if cut is None else f.ids[:cut + 1])
        assert r.finish == ("length" if cut is None else "stop") and len(r.logprobs) == len(r.ids)
    assert len(got[3].ids) > 1 or got[3].ids[0] in stops


def test_a_sample_does_not_depend_on_its_neighbours(tiny, prompts):
    """Same (seed, key, sample): same draws, whatever the batch, the lanes or the order."""
    together = actor_for(tiny).generate(prompts, 3, 50, 1.0, SPARSE, seed=(7, 4))
    lanes = actor_for(tiny, rows=2).generate(prompts, 3, 50, 1.0, SPARSE, seed=(7, 4))
    for i, p in enumerate(prompts):
        alone = actor_for(tiny, rows=1).generate([p], 3, 50, 1.0, SPARSE, seed=(7, 4), keys=[i])
        for j in range(3):
            assert together[3 * i + j].ids == lanes[3 * i + j].ids == alone[j].ids
    other = actor_for(tiny).generate(prompts, 3, 50, 1.0, SPARSE, seed=(7, 5))
    assert all(a.ids != b.ids for a, b in zip(together, other))
    assert len({tuple(r.ids) for r in together}) == 12, "samples of one prompt must differ"


@pytest.mark.parametrize("schedule", [None, SPARSE])
def test_preemption_changes_nothing(tiny, prompts, schedule):
    roomy = actor_for(tiny).generate(prompts, 3, 70, 1.0, schedule, seed=3)
    actor = actor_for(tiny, pool_pages=40)
    preempted = []
    original = actor._preempt
    actor._preempt = lambda s: preempted.append(s) or original(s)
    tight = actor.generate(prompts, 3, 70, 1.0, schedule, seed=3)
    assert len(preempted) > 3, "the pool was meant to run dry"
    for a, b in zip(roomy, tight):
        assert a.ids == b.ids
        assert (a.logprobs - b.logprobs).abs().max() < 1e-4
        assert (a.hidden - b.hidden).abs().max() < 1e-3
    assert sorted(actor.free) == list(range(1, 41)) and not actor.refs.any(), "pages leaked"


def test_the_smallest_pool_that_fits_one_request(tiny, prompts):
    prompt = prompts[2]                      # 17 tokens: 5 pages, the last one partly filled
    need = math.ceil((17 + 30) / 4) + 1
    got = actor_for(tiny, pool_pages=need).generate([prompt, prompts[1]], 2, 30, 1.0, SPARSE)
    want = actor_for(tiny).generate([prompt, prompts[1]], 2, 30, 1.0, SPARSE)
    assert [r.ids for r in got] == [r.ids for r in want]
    with pytest.raises(ValueError, match=f"{need} pages of 4 tokens.*holds {need - 1}"):
        actor_for(tiny, pool_pages=need - 1).generate([prompt], 2, 30)


def test_prompt_pages_are_shared_and_given_back(tiny, prompts):
    actor = actor_for(tiny, rows=6)
    prefills, lowest = [], []
    original, decode = actor._prefill, actor._decode
    actor._prefill = lambda ids, *a: prefills.append(len(ids)) or original(ids, *a)
    actor._decode = lambda *a: lowest.append(len(actor.free)) or decode(*a)
    actor.generate([prompts[3]], 6, 3)
    assert prefills == [33], "six samples, one prefill"
    assert actor.pool_pages - min(lowest) == 8 + 6, "eight full pages shared, one page each of their own"
    assert len(actor.free) == actor.pool_pages


def test_a_request_over_the_context_is_refused_with_the_numbers(tiny, prompts):
    with pytest.raises(ValueError, match="33 tokens.*200.*233.*160"):
        actor_for(tiny).generate([prompts[3]], 1, 200)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        actor_for(tiny).generate([prompts[0], []], 1, 5)


def test_an_interrupted_call_leaves_nothing_behind(tiny, prompts):
    """Ctrl-C in the middle of a rollout: the next call has all pages and draws what it should."""
    actor, decode, calls = actor_for(tiny, pool_pages=60), Actor._decode, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return decode(actor, *args)
    actor._decode = interrupt
    with pytest.raises(KeyboardInterrupt):
        actor.generate(prompts, 2, 40, 1.0, SPARSE)
    got, want = actor.generate(prompts, 2, 40, 1.0, SPARSE), actor_for(tiny).generate(prompts, 2, 40, 1.0, SPARSE)
    assert [r.ids for r in got] == [r.ids for r in want] and len(actor.free) == 60


def test_a_schedule_of_another_page_size_is_refused(tiny, prompts):
    with pytest.raises(ValueError, match="pages of 16 tokens.*have 4"):
        actor_for(tiny).generate(prompts, 1, 5, 1.0, Schedule((4,), 10, 16))


def test_padded_vocabulary_is_never_sampled(checkpoints, prompts, monkeypatch):
    """Rows of the head above the tokenizer's size exist in the weights and in no distribution."""
    model = Model.from_pretrained(checkpoints["qwen3"][0])

    class Tokenizer:
        eos_token_id = None
        def get_vocab(self):
            return {str(i): i for i in range(60)}
    model.tokenizer = Tokenizer()
    assert model.n_tokens == 60 and model(torch.tensor([prompts[0]])).shape[-1] == 60
    for r in actor_for(model).generate([[i % 60 for i in p] for p in prompts], 4, 50, temperature=3.0):
        assert max(r.ids) < 60
        want = token_logprobs(model, torch.tensor([r.prompt_ids + r.ids]), 3.0)[0, len(r.prompt_ids):]
        assert (want - r.logprobs).abs().max() < 1e-4


def test_nothing_is_stale_after_an_update(checkpoints, prompts, tmp_path):
    """Rollout log-probs after load() equal those of a fresh process that loaded the new weights; also with a LoRA."""
    model = Model.from_pretrained(checkpoints["qwen3"][0])
    actor = actor_for(model)
    before = actor.generate(prompts, 2, 40, 1.0, SPARSE)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * p.std().nan_to_num() * torch.randn(p.shape, generator=g))
    name = "model.layers.1.self_attn.q_proj.weight"
    lora = {name: (torch.randn(2, 48, generator=g) * 0.1, torch.randn(96, 2, generator=g) * 0.1)}
    for adapter in (None, lora, None):
        actor.load(model, adapter)
        merged = Model.from_pretrained(checkpoints["qwen3"][0])
        merged.load_state_dict(model.state_dict())
        if adapter:
            with torch.no_grad():
                dict(merged.named_parameters())[name] += adapter[name][1] @ adapter[name][0]
        now, fresh = (a.generate(prompts, 2, 40, 1.0, SPARSE) for a in (actor, actor_for(merged)))
        for a, b in zip(now, fresh):
            assert a.ids == b.ids and torch.equal(a.logprobs, b.logprobs)
    assert any(a.ids != b.ids for a, b in zip(before, now))
    with pytest.raises(ValueError, match="nonsense"):
        actor.load(model, {"nonsense": lora[name]})


def test_sampling_follows_the_distribution():
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    u = (torch.arange(10000) + 0.5) / 10000
    ids, logp = sample_tokens(p.log().expand(10000, -1), u, 1.0)
    assert (ids.bincount(minlength=4) / 10000 - p).abs().max() < 1e-3 and not (ids == 1).any()
    assert torch.allclose(logp, p.log()[ids])
    edge = torch.tensor([0.0, 1 - 2**-24])
    assert sample_tokens(p.log().expand(2, -1), edge, 1.0)[0].tolist() == [0, 3]
    certain = torch.tensor([[-1e9, 0.0, -1e9]])
    assert sample_tokens(certain, torch.tensor([0.7]), 1.0)[1].item() == 0.0
    ids, logp = sample_tokens(torch.randn(5, 9), torch.rand(5), 0)
    assert logp.isfinite().all()


def test_uniforms_are_a_samples_own():
    a = sample_uniforms((1, 2), 3, 4, 100)
    assert torch.equal(a, sample_uniforms((1, 2), 3, 4, 100)) and torch.equal(a[:50], sample_uniforms((1, 2), 3, 4, 50))
    others = [sample_uniforms(*k, 100) for k in (((2, 1), 3, 4), ((1, 2), 4, 3), ((1, 2), 3, 5), ((1, 3), 3, 4), (1, 2, 3))]
    assert not any(torch.equal(a, b) for b in others)
    assert (a >= 0).all() and (a < 1).all()


def test_temperature_scales_both_sides(tiny, prompts):
    for r in actor_for(tiny).generate(prompts, 1, 40, 0.7, SPARSE):
        assert (teacher_forced(tiny, r, SPARSE, temperature=0.7) - r.logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("schedule", [None, Schedule((4, 5, 6), 12, 4)])
def test_prefill_in_chunks_is_prefill_at_once(tiny, random_ids, schedule):
    """Also of a recomputed row: a dense prompt, then tokens under their budgets; chunks end within the one and the other."""
    actor, ids, found = actor_for(tiny), random_ids(61).tolist(), []
    actor._follow(schedule or Schedule.fraction(1.0, actor.max_context, page_size=4))
    with torch.no_grad():
        for chunk in (8, 8192):
            hidden = actor._prefill(ids, list(range(1, 17)), 21, chunk)
            pools = *actor.k, *actor.v, *actor.landmarks
            found.append([hidden, *(x[1:17].clone() for x in pools)])
            for x in pools:
                x.zero_()
    for a, b in zip(*found):
        assert (a - b).abs().max() < 1e-5


def test_step_bytes_counts_every_weight_and_page_once(tiny):
    c, page_size = tiny.config, 16
    weights = sum(p.numel() for name, p in tiny.named_parameters() if p.ndim > 1 and "embed" not in name)
    dense, sparse = Schedule.fraction(1.0, 1024), Schedule((5,), 10000)
    assert step_bytes(c, 0, 1000, dense) == 2 * weights
    mark = c.num_key_value_heads * c.head_dim
    page = 2 * page_size * mark
    assert step_bytes(c, 4, 1000, dense) == 2 * (weights + 4 * 3 * 63 * page)
    assert step_bytes(c, 4, 1000, sparse, 2) == 2 * (weights + 4 * ((2 * 63 + 5) * page + 63 * mark))


@pytest.mark.parametrize("name", SHAPES)
def test_built_in_shapes_have_their_published_sizes(name):
    """The number in the name is the number of parameters, embeddings included; "1.5B" is 1.54."""
    c = Config.from_hf(model_shape(name))
    with torch.device("meta"):
        billions = sum(p.numel() for p in Model(c).parameters()) / 1e9
    said = float(name.split("-")[1][:-1])
    assert abs(billions / said - 1) < 0.1 and c.qk_norm == name.startswith("Qwen3")


def test_fused_projections_follow_a_load(tiny):
    """The decode step multiplies by the fused copy; loading new weights must reach it."""
    actor = actor_for(tiny)
    other = Model(tiny.config, tokenizer=None)
    actor.load(other)
    x = torch.randn(2, tiny.config.hidden_size)
    for (qkv, gate_up), layer in zip(actor.fused, other.model.layers):
        attn = layer.self_attn
        assert torch.allclose(qkv(x), torch.cat([attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)], -1), atol=1e-6)
        assert torch.allclose(gate_up(x), torch.cat([layer.mlp.gate_proj(x), layer.mlp.up_proj(x)], -1), atol=1e-6)
