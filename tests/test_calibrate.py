"""Calibration: the cost model against numbers worked out by hand, the choice of a schedule, the sweep, its figures."""
import json
import math

import numpy as np
import pytest
import torch

import sparrow
import train
from sparrow import (Config, Reading, Rollout, Schedule, beta_cdf, beta_fit, choose, measure, model_shape, pareto,
                     rollout_cost, sparse_attend, sweep)

NAN = math.nan


class Flags:
    """The flags that a sweep looks at."""
    def __init__(self, **changes):
        self.__dict__ |= dict(n=2, rows=4, max_new_tokens=40, temperature=1.0, seed=0, dense_layers=1, alpha_every=1,
                              bin_tokens=16, min_tokens=10, tail=0.05, page_size=[4], tau=[0.86], out=None,
                              ignore_stop=False) | changes


def measured(pages, tails, **more):
    return Reading("sparse", 16, pages, [1000] * len(tails), tails, 0.9, 0.95, 0.5, (NAN, NAN, NAN), [1.0] * 50, **more)


def test_cost_of_section_3_3_term_by_term():
    """P 1000, D 3, r 2; 5 samples of 70 after 40 tokens, B 16, page 8, I 7; every number below worked out on paper."""
    weights = 700_000             # 2 * 1000 * 5 * 70
    dense_flops = 315_000         # 2 * (80 + 70) * 70 * 5 * 3
    dense_traffic = 90_300        # 2 * 40 * 70 * 3 = 16,800 of the prompt, once; 5 * 70^2 * 3 = 73,500
    attend_flops = 67_200         # 2 * 2 * 5 * 3 * 16 * 70
    attend_traffic = 33_600       # 2 * 5 * 3 * 16 * 70
    score_flops = 93_187.5        # 2 * 5 * 40 * 3 * 70 = 84,000; 2 * 5 * 3 * 4,900 / 16 = 9,187.5
    score_traffic = 21_393.75     # 2 * 40 * 3 * 70 = 16,800; 5 * 3 * 4,900 / 16 = 4,593.75
    dense, sparse = rollout_cost((1000, 3, 2), 40, 70, 16, samples=5, page_size=8, intensity=7)
    assert dense == pytest.approx(weights + dense_flops + 7 * dense_traffic)
    assert sparse == pytest.approx(weights + attend_flops + score_flops + 7 * (attend_traffic + score_traffic))
    assert rollout_cost((1000, 3, 2), 40, 70, 16, 5, 6, 8, 7) == pytest.approx((6 * dense, 6 * sparse))


@pytest.mark.parametrize("budget, H", [
    (64, 8_384),      # 24 steps dense, (80 + 24) * 24 = 2,496; 46 at the budget, 2 * 64 * 46 = 5,888
    (16, 2_240),      # under the prompt's length: 2 * 16 * 70
    (1000, 10_500)])  # never reached: (80 + 70) * 70
def test_cost_of_appendix_f(budget, H):
    """P, D, r, I as above; 5 samples of 6 prompts."""
    def cost(h):
        return 2 * 1000 * 30 * 70 + 2 * 30 * 3 * h + 7 * (2 * 1000 * 70 + 30 * 3 * h)
    found = rollout_cost((1000, 3, 2), 40, 70, budget, samples=5, prompts=6, intensity=7, finite=True)
    assert found == pytest.approx((cost(10_500), cost(H)))


def test_cost_of_a_published_shape():
    """Qwen3-1.7B: D = 28 * 8 * 128 = 28,672, r = 2, P = 1,720,451,072; 32,768 tokens from nothing, B 4096, page 16, I 206."""
    P = 28 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144) + 151936 * 2048
    assert P == 1_720_451_072
    dense = 2 * P * 32768 + (2 + 206) * 32768**2 * 28672
    sparse = 2 * P * 32768 + (2 + 206) * (2 * 4096 * 32768 + 32768**2 / 32) * 28672
    assert rollout_cost("Qwen3-1.7B", 0, 32768, 4096) == pytest.approx((dense, sparse))
    assert rollout_cost(Config.from_hf(model_shape("Qwen3-1.7B")), 0, 32768, 4096) == pytest.approx((dense, sparse))
    assert dense / sparse == pytest.approx(3.405, abs=1e-3)  # (113 + 6,404) / (113 + 1,801) in units of 10^12


def test_cost_under_a_schedule():
    """The same budget as a number and as a schedule; a dense schedule costs what dense does; steps sum up."""
    shape = 1000, 3, 2
    flat = Schedule((5,), 100, 8)
    assert rollout_cost(shape, 60, 70, flat) == pytest.approx(rollout_cost(shape, 60, 70, 40, page_size=8))
    assert rollout_cost(shape, 60, 70, flat, finite=True) == pytest.approx(rollout_cost(shape, 60, 70, 40, finite=True))
    dense, everything = rollout_cost(shape, 60, 70, Schedule.fraction(1.0, 200, page_size=8), finite=True)
    assert dense == everything
    steps = Schedule((5, 9), 100, 8)  # up to 99 tokens cached 40 are read, then 72: a mean of (39 * 40 + 31 * 72) / 70
    assert rollout_cost(shape, 60, 70, steps) == pytest.approx(rollout_cost(shape, 60, 70, 3792 / 70, page_size=8))


def test_the_least_budget_that_holds():
    results = [measured(4, [0.90, 0.50, 0.40, 0.30, NAN]), measured(8, [0.95, 0.87, 0.50, 0.70, NAN]),
               measured(16, [0.99, 0.80, 0.90, 0.80, NAN]), measured(32, [1.0, 0.95, 0.88, 0.85, NAN])]
    # 8 pages held the second bin by luck, since 16 did not; nothing holds the fourth; nobody was in the fifth
    assert choose(results, 0.86) == ([4, 32, 32, 32, 32], [3])
    assert choose(results, 0.60) == ([4, 8, 16, 16, 16], []), "a running maximum over bins"
    assert choose([measured(4, [NAN, 0.5, 0.9]), measured(8, [NAN, 0.9, 0.95])], 0.86) == ([8, 8, 8], [])
    with pytest.raises(ValueError, match="--min-tokens"):
        choose([measured(4, [NAN, NAN])], 0.86)


def test_measure_bins_by_cached_tokens():
    """A response token at index j after a prompt of n was drawn with n + j tokens cached."""
    rollouts = [Rollout([5] * 30, [6] * 10, None, None, "length"), Rollout([5] * 46, [6] * 4, None, None, "stop")]
    alphas = [torch.arange(10) / 100, torch.full((4,), 0.9995)]
    m = measure("sparse", 3, 4, rollouts, alphas, 5, Flags(min_tokens=3))
    assert m.tokens == [0, 2, 10, 2, 0] and [t == t for t in m.tails] == [False, False, True, False, False]
    assert m.tails[2] == pytest.approx(0.02) and m.near_one == pytest.approx(4 / 14) and sum(m.histogram) == 14
    sparser = measure("sparse", 3, 4, rollouts, [a[::4] for a in alphas], 5, Flags(min_tokens=1, alpha_every=4))
    assert sparser.tokens == [0, 1, 3, 0, 0] and sparser.tails[1] == 0


def test_beta_fit():
    """Its distribution function against closed forms, and a fit to draws from a known one, also where it is U-shaped."""
    x = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    for a, b, cdf in ((1, 1, x), (2, 1, x**2), (0.5, 0.5, 2 / math.pi * x.sqrt().asin()), (1, 3, 1 - (1 - x)**3)):
        assert (beta_cdf(x, a, b) - cdf).abs().max() < 1e-4
    draws = torch.from_numpy(np.random.default_rng(0).beta(1.4, 0.3, 20000))
    a, b, ks = beta_fit(draws)
    assert a == pytest.approx(1.4, rel=0.05) and b == pytest.approx(0.3, rel=0.05) and ks < 0.012
    assert beta_fit((torch.arange(100) % 2) * 0.5 + 0.2)[2] > 0.2, "two points are no Beta distribution"
    assert math.isnan(beta_fit(torch.zeros(0))[2])


def test_pareto():
    points = [(1.0, 0.9), (0.5, 0.8), (0.7, 0.7), (0.5, 0.6), (0.9, 0.8), (0.2, 0.1)]
    assert pareto(points) == [(0.2, 0.1), (0.5, 0.8), (1.0, 0.9)]


def test_sweep(tiny, random_ids):
    """alpha is 1 where all is read, and what a plain computation on the same samples says, by either way of sampling."""
    prompts, args = random_ids(3, 20).tolist(), Flags()
    for on in ("sparse", "dense"):
        narrow, wide = sweep(tiny, prompts, [3, 15], on, 4, args)
        assert narrow.tokens[0] == 0 < min(narrow.tokens[1:]) and (on == "sparse" or narrow.tokens == wide.tokens)
        assert min(wide.tails[1:]) > 1 - 1e-4 and narrow.mean < 0.95 and narrow.tails[3] < 0.9
        alphas, schedule = [], Schedule((3,), 60, 4)
        actor = sparrow.Actor(tiny, 4, 60, page_size=4, dense_layers=1)
        for r in actor.generate(prompts, 2, 40, 1.0, schedule if on == "sparse" else None, tiny.stop_ids):
            ids = torch.tensor([r.prompt_ids + r.ids])
            budgets = schedule.pages(torch.arange(1, ids.shape[1] + 1))
            budgets[:20] = sparrow.DENSE  # prompts are prefilled dense
            with torch.no_grad():
                p, q = tiny(ids)[0, 19:-1], tiny(ids, sparse_attend(budgets, 1, 4))[0, 19:-1]
            alphas.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
        alphas = torch.cat(alphas)
        assert sum(narrow.tokens) == len(alphas)
        assert narrow.mean == pytest.approx(alphas.mean().item(), abs=1e-5)
        assert narrow.tail == pytest.approx(alphas.sort().values[math.ceil(0.05 * len(alphas)) - 1].item(), abs=1e-5)


def test_the_command(tmp_path, capsys):
    """From the command line: a schedule that --schedule takes, figures, numbers, and plain words for a tau out of reach."""
    train.build_tiny(tmp_path / "m", 0)
    run = f"--model {tmp_path / 'm'} --calibrate --task chain:4,4,2 --problems 3 --n 2 --max-new-tokens 24 --pages 3 6 "
    run += f"--page-size 4 8 --tau 0.02 0.999999 --min-tokens 5 --bin-tokens 12 --on both --out {tmp_path / 'out'}"
    sparrow.main(run.split())
    printed, out = capsys.readouterr().out, tmp_path / "out"
    low, high = (Schedule.load(out / f"page4-tau{tau}.json", 4) for tau in ("0.02", "0.999999"))
    assert set(low.bins + high.bins) <= {3, 6} and low.bins[-1] == 3 and high.bins[-1] == 6 and low.bin_tokens == 12
    assert printed.count("NOT MET") >= 1 and "by dense samples" in printed and "tails of sparse less" in printed
    record = json.loads((out / "calibration.json").read_text())
    assert [(m["page_size"], m["on"], m["pages"]) for m in record["measured"]] == [
        (4, "sparse", 3), (4, "sparse", 6), (4, "dense", 3), (4, "dense", 6),
        (8, "sparse", 3), (8, "dense", 3)], "equal tokens for every page size: 24 tokens are 3 pages of 8"
    for name in ("page4", "page8", "page_sizes"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    generate = f"--model {tmp_path / 'm'} --prompt a1;b2 --max-new-tokens 4 --page-size 4 --schedule {out}/page4-tau0.02.json"
    sparrow.main(generate.split())


@pytest.mark.parametrize("argv, named", [
    ("--calibrate --tau 1.2", "--tau"), ("--calibrate --pages 0 4", "--pages"), ("--calibrate --task poetry", "poetry"),
    ("--prompt a --page-size 4 8", "--page-size 4 8"), ("--calibrate --problems 0", "--problems 0"),
    ("--calibrate --min-tokens 10000 --problems 2 --max-new-tokens 8", "--min-tokens")])
def test_refusals(argv, named, tmp_path, capsys):
    train.build_tiny(tmp_path / "m", 0)
    with pytest.raises(SystemExit):
        sparrow.main(f"--model {tmp_path / 'm'} --pages 4 --task chain:4,4,2 --out {tmp_path} {argv}".split())
    err = capsys.readouterr().err
    assert named in err.rpartition("error: ")[2] and "Traceback" not in err
