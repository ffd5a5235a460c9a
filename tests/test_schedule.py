"""How many pages a row may read: the schedule's arithmetic, and the controller that moves it."""
import hashlib
import io
import json
import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sparrow import PUBLISHED, Controller, Schedule

torch.set_num_threads(1)

# ---- schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["0.05", "0.07", "0.1", "0.13", "0.29", "0.3", "0.5", "0.7", "0.999", "1"])
@pytest.mark.parametrize("page_size,min_pages", [(16, 32), (16, 1), (8, 4), (128, 0)])
def test_fraction_is_the_exact_formula(share, page_size, min_pages):
    """Guards against 0.07 * 100 pages being 8 (7.000000000000001 in floating point), floor for ceil, --min-pages above
    the pages there are, and pages counted from the wrong number of tokens. Exact rational arithmetic here."""
    schedule = Schedule.fraction(float(share), page_size=page_size, min_pages=min_pages)
    lengths = [*range(1, 700), *range(1500, 1700), 4095, 4096, 4097, 9999, 32767, 32768, 100000]
    want = []
    for length in lengths:
        P = -(-length // page_size)
        want.append(min(max(math.ceil(Fraction(share) * P), min_pages), P))
    assert schedule.pages(torch.tensor(lengths)).tolist() == want
    assert schedule.dense == (share == "1")


def test_fraction_by_hand():
    """The same, by hand: 0.1 of 30 pages is 3 and not 4, and 0.07 of 100 is 7 and not 8."""
    assert Schedule.fraction(0.07, min_pages=0).pages(1600) == 7
    assert Schedule.fraction(0.1, min_pages=0).pages(480) == 3
    assert Schedule.fraction(0.1, min_pages=0).pages(481) == 4
    assert Schedule.fraction(0.1).pages(480) == 30 and Schedule.fraction(0.1).pages(16 * 400) == 40


def test_ints_and_tensors_agree():
    """Guards against a host that counts otherwise than the device (int division, dtype of the result)."""
    for schedule in (Schedule.fraction(0.13, 5000, 7, min_pages=3), Schedule.published("qwen3-4b-0.86")):
        lengths = torch.tensor([[1, 15, 16, 17, 1999], [2000, 2001, 16000, 40000, 123457]])
        for dtype in (torch.int32, torch.int64):
            pages = schedule.pages(lengths.to(dtype))
            assert pages.dtype == torch.int32 and pages.shape == lengths.shape
            assert pages.flatten().tolist() == [schedule.pages(n) for n in lengths.flatten().tolist()]
        assert type(schedule.pages(17)) is int


@pytest.mark.parametrize("share", [0, -0.1, 1.0001, 2, float("nan"), float("inf")])
def test_fractions_out_of_range_name_the_flag(share):
    """Guards against a percentage (10 for 0.1) or NaN being taken for a budget."""
    with pytest.raises(ValueError, match="--budget"):
        Schedule.fraction(share)


def test_published_table():
    """Guards against the three reserved pages left out, bins of another width, and a table that ends."""
    schedule = Schedule.published("qwen3-4b-0.86")  # 29 45 61 ... 381 509 509 without the reserved pages
    assert [schedule.pages(n) for n in (1999, 2000, 3999, 4000, 39999)] == [32, 48, 48, 64, 512]
    assert schedule.pages(36000) == 512 and schedule.pages(35999) == 384
    assert schedule.pages(10**6) == 512                     # the last value holds beyond the last bin
    assert schedule.pages(100) == 7 and not schedule.dense  # never more than there are
    assert Schedule.published("qwen3-4b-0.86", page_size=32).pages(2000) == 24      # the same tokens
    assert Schedule.published("qwen3-1.7b-0.94", page_size=128).pages(10000) == 56  # (445 + 3) / 8
    with pytest.raises(ValueError, match="--schedule.*qwen3-4b-0.86"):
        Schedule.published("qwen3-4b-0.87")


def test_published_tables_are_the_published_ones():
    """Guards against a slip in copying 400 numbers: the digest is that of the tables as published, in this same form."""
    tables = {name: list(map(int, row.split())) for name, row in PUBLISHED.items()}
    assert all(len(row) == 20 and row == sorted(row) for row in tables.values())
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()
    assert digest == "4d9569f9f3f4e8d0c1aff7de1aba51a0bc3e336db2f49042a943ebaf95476f32"


def test_save_and_load(tmp_path):
    """Guards against a field lost on the way to disk (a share turned table, a floor dropped)."""
    for i, schedule in enumerate((Schedule.fraction(0.1, 8000, 5), Schedule.published("qwen3-14b-0.86"),
                                  Schedule((4, 9, 9), 300, 16, min_pages=4))):
        path = tmp_path / f"{i}.json"
        schedule.save(path)
        again = Schedule.load(path)
        assert again == schedule and hash(again) == hash(schedule)
        assert again.pages(torch.arange(9000)).equal(schedule.pages(torch.arange(9000)))
    assert Schedule.load("qwen3-14b-0.86") == Schedule.published("qwen3-14b-0.86")


GOOD = {"bins": [4, 8], "bin_tokens": 100, "page_size": 16}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", json.dumps(GOOD)[:-1], *(json.dumps(GOOD | wrong) for wrong in (
    {"bins": []}, {"bins": None}, {"bins": [4, 0]}, {"bins": ["x"]}, {"bin_tokens": 0}, {"bin_tokens": "100"},
    {"bin_tokens": None}, {"page_size": 32}, {"page_size": "16"}, {"pagesize": 16}, {"share": 1.5}, {"share": "0.1"},
    {"min_pages": "4"})), '{"bins": [4]}', "\x00\x01"])
def test_broken_files_name_the_flag(tmp_path, text):
    """Guards against a traceback, or worse a run, from a file that is no schedule."""
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--schedule"):
        Schedule.load(path)


def test_missing_file_lists_the_published():
    """Guards against a bare FileNotFoundError or KeyError for a misspelt name."""
    with pytest.raises(ValueError, match="--schedule nowhere.json.*qwen3-1.7b-0.86"):
        Schedule.load("nowhere.json")


# ---- controller: one rule at a time -----------------------------------------------------------------------------
# Bins of 1,000 tokens at page size 10. A row has one token per entry; `rows(n, T, bad)` makes n rows of T tokens in
# one bin, the first `bad` tokens of each under tau.

def table(*pages, bin_tokens=1000, page_size=10):
    return Schedule(pages, bin_tokens, page_size)


def rows(n, T, bad=0, bin=0, low=0.5):
    alpha = torch.full((n, T), 0.99)
    alpha[:, :bad] = low
    return alpha, torch.full((n, T), bin * 1000 + 500), torch.ones(n, T, dtype=torch.bool)


def stack(*groups):
    return [torch.cat(parts) for parts in zip(*groups)]


def u_of(controller):
    return controller.state_dict()["u"].tolist()


def moved(controller, *args, bin=0, **kw):
    """The change of log(budget) of one bin in one update."""
    before = u_of(controller)[bin]
    controller.update(*args, **kw)
    return u_of(controller)[bin] - before


def test_no_news_changes_nothing():
    """Guards against rounding that drifts: exp(log(budget)) must be the same whole number of pages."""
    for schedule in (table(*range(1, 90)), Schedule.published("qwen3-4b-0.92"), Schedule.fraction(0.1)):
        c = Controller(schedule)
        nothing = torch.full((8, 5), 0.1), torch.zeros(8, 5, dtype=torch.long), torch.zeros(8, 5, dtype=torch.bool)
        for _ in range(3):
            assert c.update(*nothing).bins == schedule.bins


@pytest.mark.parametrize("T,bad,e", [(20, 2, 0.1), (20, 10, 0.5), (100, 6, 0.06)])
def test_attack_on_any_evidence(T, bad, e):
    """Guards against a slow or a hesitant attack: u rises by 5 (e - 0.05) as soon as e > 0.05, whatever its error."""
    assert moved(Controller(table(3)), *rows(4, T, bad)) == pytest.approx(5 * (e - 0.05), abs=1e-9)


def test_alpha_equal_to_tau_does_not_exceed():
    """Guards against <= for <: with alpha exactly tau (in fp32) there is no exceedance."""
    c = Controller(table(50), tau=0.5)
    assert moved(c, *rows(400, 20, 20, low=0.5)) == pytest.approx(-0.10)


@pytest.mark.parametrize("n,bad,du", [
    (400, 0, -0.10),                                                # far below: 0.10 a step, no more
    (400, 4, 5 * (0.04 + math.sqrt(0.05 * 0.95 / 8000) - 0.05)),    # surely below: in part
    (10, 4, 0.0),                                                   # 0.04 + 0.0154 is not surely below 0.05
    (400, 5, 0.0)])                                                 # at epsilon: hold
def test_release_only_when_surely_below(n, bad, du):
    """Guards against lowering on thin evidence, and against lowering faster than 0.10 a step."""
    assert moved(Controller(table(50)), *rows(n, 100, bad)) == pytest.approx(du, abs=1e-9)


def test_the_error_is_over_sequences():
    """Guards against tokens counted as independent: the same 3% in 6 of 200 rows is less sure than 3 in every row."""
    spread = moved(Controller(table(50)), *rows(200, 100, 3))
    lumped = moved(Controller(table(50)), *stack(rows(6, 100, 100), rows(194, 100)))
    se = math.sqrt(6 * 97**2 + 194 * 3**2) / 20000
    assert lumped == pytest.approx(5 * (0.03 + se - 0.05), abs=1e-9)
    assert spread == pytest.approx(5 * (0.03 + math.sqrt(0.05 * 0.95 / 4000) - 0.05), abs=1e-9) and spread < lumped


def test_fewer_than_four_sequences_leave_the_bin():
    """Guards against one bad row that opens the budget; evidence adds up, 3 * 0.8 + 3 being enough."""
    c = Controller(table(1))
    assert moved(c, *rows(3, 50, 50)) == 0
    assert moved(c, *rows(3, 50, 25)) == pytest.approx(5 * ((0.8 + 0.5) / 1.8 - 0.05))
    c = Controller(table(3))
    assert [moved(c, *rows(1, 50, 25)) > 0 for _ in range(8)] == [False] * 7 + [True]  # 5 * (1 - 0.8^8) = 4.16


def test_running_maximum():
    """Guards against later positions that read less than earlier ones, in the start table and after a move."""
    c = Controller(table(5, 9, 7, 30))
    start = c.update(*rows(3, 10)).bins                # too little to move: the running maximum alone
    assert start == (5, 9, 9, 30)
    bins = Controller(table(5, 9, 7, 30)).update(*rows(8, 10, 2)).bins  # 5 * (0.2 - 0.05) = 0.75
    assert bins == (math.ceil(5 * math.exp(0.75)), 11, 11, 30)


def test_anti_windup():
    """Guards against a covered bin that sinks without end, and then takes many steps to come back."""
    c = Controller(table(40, 40))
    for _ in range(30):
        bins = c.update(*stack(rows(40, 20, 1), rows(400, 20, 0, bin=1))).bins
    u = u_of(c)
    assert bins == (40, 40)
    assert u[1] == pytest.approx(math.log(400) - math.log(2), abs=1e-9)


def test_unreached_bins_hold():
    """Guards against a bin without data that sinks, or stays below the last bin reached."""
    c = Controller(table(20, 20, 20, 60))
    for _ in range(5):
        c.update(*rows(400, 20, 0, bin=0))
    assert c.schedule.bins[1:] == (20, 20, 60) and c.schedule.bins[0] < 20   # lowered: the rest hold their start
    c = Controller(table(20, 20, 20, 60))
    c.update(*rows(8, 10, 2, bin=1))
    raised = math.ceil(20 * math.exp(0.75))
    assert c.schedule.bins == (20, raised, raised, 60)                        # raised: the next hold the last reached
    c = Controller(table(20, 20))
    c.update(*rows(8, 10, 10))
    assert c.schedule.bins == (100, 100)
    for _ in range(40):
        c.update(*rows(400, 10))
    assert c.schedule.bins[0] < 20 and c.schedule.bins[1] == 20               # there and back: their start again


def test_old_evidence_decays_and_fades_when_the_budget_moves():
    """Guards against evidence from another budget weighing on: by 0.8 a step, and by exp(-|du|/0.2) more."""
    c = Controller(table(3))
    du = moved(c, *rows(10, 100, 10))
    assert du == pytest.approx(0.25)
    keep = 0.8 * math.exp(-0.25 / 0.2)
    e = (100 * keep + 300) / (1000 * keep + 1000)
    assert moved(c, *rows(10, 100, 30)) == pytest.approx(5 * (e - 0.05), abs=1e-9)
    c = Controller(table(10))
    assert moved(c, *rows(10, 100, 5)) == 0  # no move: decay alone
    assert moved(c, *rows(10, 100, 30)) == pytest.approx(5 * ((50 * 0.8 + 300) / 1800 - 0.05), abs=1e-9)


def test_clip_at_dense_and_at_the_floor():
    """Guards against budgets over the pages that a bin has, or under --min-pages."""
    c = Controller(table(10, 10, bin_tokens=995), min_pages=4)
    alpha, _, mask = rows(8, 50, 50)
    for _ in range(4):
        c.update(alpha, torch.full((8, 50), 500), mask)
    assert c.schedule.bins == (100, 100)                   # ceil(995 / 10) pages are everything at the bin's end
    for _ in range(60):
        c.update(torch.ones(400, 20), torch.arange(20).expand(400, 20) * 99, torch.ones(400, 20, dtype=torch.bool))
    assert c.schedule.bins == (4, 4)
    c = Controller(Schedule.fraction(0.1, 32768))          # the schedule's own floor, when none is given
    positions = torch.arange(0, 32768, 512).expand(40, -1)
    for _ in range(60):
        c.update(torch.ones(40, 64), positions, torch.ones(40, 64, dtype=torch.bool))
    assert set(c.schedule.bins) == {32}


def test_a_table_under_the_floor_is_not_lifted():
    """Guards against a table given by hand being changed before anything is measured. It may rise, and come back."""
    c = Controller(table(3, 8), min_pages=6)
    assert c.update(*rows(2, 5)).bins == (3, 8)
    for _ in range(30):
        c.update(*stack(rows(400, 10), rows(400, 10, bin=1)))
    assert c.schedule.bins == (3, 6)


def test_positions_beyond_the_last_bin_count_in_it():
    """Guards against an index error, or lost evidence, past the longest context of the table."""
    c = Controller(table(3, 3))
    assert moved(c, *rows(8, 10, 5, bin=7), bin=1) == pytest.approx(5 * 0.45)


def test_bins_are_of_the_schedules_own_lookup():
    """Guards against evidence filed in one bin and the budget looked up in its neighbour, at the edge."""
    c = Controller(table(3, 3))
    alpha, _, mask = rows(8, 10, 10)
    c.update(alpha, torch.full((8, 10), 1000), mask)
    assert c.schedule.pages(999) == 3 and c.schedule.pages(1000) > 3


def test_guard_on_shrinking_responses():
    """Guards against lowering while responses collapse: under 0.8 of the running mean no release, but still attack."""
    easy, hard = rows(400, 20), rows(400, 20, 10)
    c = Controller(table(50))
    assert moved(c, *easy, response_length=100.0) == pytest.approx(-0.10)  # no mean yet
    assert moved(c, *easy, response_length=81.0) == pytest.approx(-0.10)   # 81 of 100
    assert moved(c, *easy, response_length=76.0) == 0                      # 76 of 96.2: under 0.8
    assert moved(c, *hard, response_length=50.0) > 0
    assert moved(Controller(table(50)), *easy) == pytest.approx(-0.10)     # not given: no guard


def test_guard_on_worsening_kl():
    """Guards against lowering while the actor drifts from the policy: kl above 1.25 of its running mean."""
    easy, hard = rows(400, 20), rows(400, 20, 10)
    c = Controller(table(50))
    assert moved(c, *easy, kl=0.010) == pytest.approx(-0.10)
    assert moved(c, *easy, kl=0.012) == pytest.approx(-0.10)
    assert moved(c, *easy, kl=0.0131) == 0                                 # 1.25 * 0.0104 = 0.0130
    assert moved(c, *hard, kl=1.0) > 0


def test_a_guard_without_data_does_not_jam():
    """Guards against one NaN (a step in which nothing was measured) that forbids every later release."""
    c, easy = Controller(table(50)), rows(400, 20)
    c.update(*easy, response_length=100.0, kl=0.01)
    c.update(*easy, response_length=float("nan"), kl=float("nan"))
    assert moved(c, *easy, response_length=100.0, kl=0.01) == pytest.approx(-0.10)


def test_weight_counts_for_the_whole_group():
    """Guards against a biased rate: one measured sample of a dropped group of 8 stands for 8."""
    c = Controller(table(3))
    parts = stack(rows(4, 10, 5), rows(4, 10, 0))
    weight = torch.tensor([1.0] * 4 + [8.0] * 4)
    e = 4 * 5 / (4 * 10 + 8 * 4 * 10)
    assert e > 0.05 and moved(c, *parts, weight=weight) == pytest.approx(5 * (e - 0.05), abs=1e-9)


@pytest.mark.parametrize("position", [0, 500, 1500, 10**6, -1])
def test_nan_and_masked_tokens_count_nowhere(position):
    """Guards against padding in either count, whatever lies in its alpha and position, and NaN read as 0 or 1."""
    plain, padded = Controller(table(3, 3)), Controller(table(3, 3))
    alpha, positions, mask = rows(6, 20, 3)
    plain.update(alpha, positions, mask)
    junk = torch.tensor([0.0, 1.0, float("nan"), 0.0])
    alpha = torch.cat([alpha, junk.expand(6, 4)], 1)
    positions = torch.cat([positions, torch.full((6, 4), position)], 1)
    mask = torch.cat([mask, torch.zeros(6, 4, dtype=torch.bool)], 1)
    alpha = torch.cat([alpha, torch.full((6, 1), float("nan"))], 1)          # measured, but NaN
    positions = torch.cat([positions, torch.full((6, 1), 1500)], 1)
    mask = torch.cat([mask, torch.ones(6, 1, dtype=torch.bool)], 1)
    padded.update(alpha, positions, mask)
    for name in ("u", "sums", "reached"):
        assert torch.equal(plain.state_dict()[name], padded.state_dict()[name]), name


# ---- controller: as a whole -------------------------------------------------------------------------------------

class PlainController:
    """The controller's docstring again, with lists and loops."""

    def __init__(self, bins, width, size, tau, eps, floor):
        self.width, self.size, self.tau, self.eps = width, size, tau, eps
        self.u = [math.log(b * size) for b in bins]
        self.low = [min(math.log(floor * size), u) for u in self.u]
        self.high = [math.log(-(-width * (i + 1) // size) * size) for i in range(len(bins))]
        self.sums = [[0.0] * 6 for _ in bins]
        self.reached = [False] * len(bins)

    def update(self, alpha, positions, mask, weight, may_release):
        bins = range(len(self.u))
        self.sums = [[0.8 * s for s in row] for row in self.sums]
        for a_row, p_row, m_row, w in zip(alpha.tolist(), positions.tolist(), mask.tolist(), weight.tolist()):
            x, n = [0.0] * len(self.u), [0.0] * len(self.u)
            for a, p, m in zip(a_row, p_row, m_row):
                if m and a == a:
                    i = min(p // self.width, len(self.u) - 1)
                    n[i], x[i] = n[i] + w, x[i] + w * (a < self.tau)
            for i in bins:
                for j, add in enumerate((x[i], n[i], x[i]**2, x[i] * n[i], n[i]**2, n[i] > 0)):
                    self.sums[i][j] += add
                self.reached[i] |= n[i] > 0
        for i in bins:
            x, n, xx, xn, nn, S = self.sums[i]
            if S < 4:
                continue
            e = x / n
            floor = math.sqrt(self.eps * (1 - self.eps) / (20 * S))
            se = max(math.sqrt(max(xx - 2 * e * xn + e * e * nn, 0)) / n, floor)
            du = 5 * (e - self.eps) if e > self.eps else max(5 * min(0, e + se - self.eps), -0.1) * may_release
            u = min(max(self.u[i] + du, self.low[i]), self.high[i])
            self.sums[i] = [s * math.exp(-abs(u - self.u[i]) / 0.2) for s in self.sums[i]]
            self.u[i] = u
        applied = [max(self.u[:i + 1]) for i in bins]
        self.u = [max(u, a - math.log(2)) if r else u for u, a, r in zip(self.u, applied, self.reached)]
        return [math.ceil(math.exp(a) / self.size - 1e-9) for a in applied]


def random_step(g, n_bins, width, hardness):
    """Ragged, with NaN, padding and weights; alpha falls with position. -> alpha, positions, mask, weight"""
    N, T = 12, 40
    reach = torch.randint(1, n_bins * width, (N, 1), generator=g)
    positions = (torch.rand(N, T, generator=g) * reach).long()
    harder = hardness * (1 + positions / width)
    alpha = torch.rand(N, T, generator=g) ** (harder / 20)
    alpha[torch.rand(N, T, generator=g) < 0.05] = float("nan")
    mask = torch.rand(N, T, generator=g) < 0.8
    return alpha, positions, mask, torch.randint(1, 9, (N,), generator=g).float()


def test_sixty_steps_equal_the_plain_loop():
    """Guards against any rule applied in the wrong order, over a random run that goes up, down and to both ends."""
    g, bins = torch.Generator().manual_seed(0), (4, 6, 6, 10, 8, 40)
    fast = Controller(Schedule(bins, 250, 16), tau=0.8, epsilon=0.1, min_pages=3)
    plain = PlainController(bins, 250, 16, 0.8, 0.1, 3)
    for step in range(60):
        batch = random_step(g, 5, 250, hardness=[0.1, 3.0, 0.5][step // 20])
        length = 50.0 if step % 7 == 6 else 100.0
        schedule = fast.update(*batch, response_length=length)
        assert list(schedule.bins) == plain.update(*batch, may_release=length == 100), f"step {step}"
        assert u_of(fast) == pytest.approx(plain.u, abs=1e-9), f"step {step}"
    assert fast.schedule.page_size == 16 and fast.schedule.bin_tokens == 250 and fast.schedule is schedule


def test_state_round_trip_continues_identically():
    """Guards against state left out of the checkpoint: sums, reached bins, the guards' means, the schedule in use."""
    g = torch.Generator().manual_seed(1)
    start = Schedule.fraction(0.2, 1500, 6, min_pages=2)
    c = Controller(start)
    for step in range(7):
        c.update(*random_step(g, 3, 250, 0.6), response_length=100.0 + step, kl=0.01)
    buffer = io.BytesIO()
    torch.save(c.state_dict(), buffer)
    buffer.seek(0)
    again = Controller(start)
    again.load_state_dict(torch.load(buffer))
    assert again.schedule == c.schedule
    for step in range(12):
        batch = random_step(g, 6, 250, 0.6)
        kw = dict(response_length=80.0 + 3 * step, kl=0.009 + 0.001 * step)
        assert c.update(*batch, **kw) == again.update(*batch, **kw)
        for name, value in c.state_dict().items():
            other = again.state_dict()[name]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other, name


@pytest.mark.parametrize("start", [1, None])
def test_closed_loop(start):
    """Guards against a loop that does not close: from far too little and from dense, every reached bin's exceedance
    ends within 0.02 of epsilon, and budgets grow with position.

    alpha ~ Beta(a, 1), whose epsilon quantile is epsilon^(1/a); a rises with the budget and falls with position, so
    that the quantile is tau exactly when bin i reads `need[i]` tokens. Rows end in the first six of eight bins.
    """
    g, width, size, tau, eps = torch.Generator().manual_seed(2), 512, 16, 0.86, 0.05
    need = torch.tensor([64.0 + 96 * i for i in range(8)])
    dense = [width // size * (i + 1) for i in range(8)]
    first = tuple([start] * 8 if start else dense)
    c = Controller(Schedule(first, width, size), tau, eps, min_pages=1)
    exceed, tokens = torch.zeros(8), torch.zeros(8)
    for step in range(120):
        positions = torch.arange(8, 6 * width, 16).expand(48, -1)
        mask = positions < torch.rand(48, 1, generator=g) * 12 * width
        bin_of = positions // width
        budget = c.schedule.pages(positions) * float(size)
        a = math.log(eps) / math.log(tau) * (budget / need[bin_of]).sqrt()
        alpha = torch.rand(positions.shape, generator=g) ** (1 / a)
        if step >= 80:
            exceed.index_add_(0, bin_of[mask], (alpha[mask] < tau).float())
            tokens.index_add_(0, bin_of[mask], torch.ones(int(mask.sum())))
        c.update(alpha, positions, mask)
    rate = (exceed / tokens)[:6]
    assert ((rate - eps).abs() < 0.02).all(), rate
    bins = c.schedule.bins
    assert all(a < b for a, b in zip(bins[:6], bins[1:6])), bins
    assert bins[6:] == tuple(max(first[i], bins[5]) for i in (6, 7))


def test_mean_control_by_hand():
    """Guards against the mean mode counting tokens below tau, and against 1 - alpha < 0 from an alpha a hair above 1."""
    c = Controller(table(3), tau=0.999, epsilon=0.03, control="mean")
    assert moved(c, *rows(4, 20, 6, low=0.8)) == pytest.approx(5 * (0.3 * 0.2 + 0.7 * 0.01 - 0.03), abs=1e-6)
    du = 5 * (0.01 + math.sqrt(0.03 * 0.97 / 8000) - 0.03)
    assert moved(Controller(table(50), epsilon=0.03, control="mean"), *rows(400, 20)) == pytest.approx(du, abs=1e-6)
    alpha, positions, mask = rows(4, 20, 5, low=0.8)
    alpha[:, 5:10], alpha[:, 10:] = 1.5, float("nan")
    c = Controller(table(3), epsilon=0.03, control="mean")
    assert moved(c, alpha, positions, mask) == pytest.approx(5 * (0.2 * 5 / 10 - 0.03), abs=1e-6)


@pytest.mark.parametrize("start", [1, None])
def test_closed_loop_of_the_mean(start):
    """Guards against a mean mode that holds something else: from too little and from dense, the mean of 1 - alpha ends
    within 10% of its target in every reached bin. alpha ~ Beta(a, 1), whose mean is a / (a + 1); a rises with the budget,
    so that the mean is right exactly when bin i reads need[i] tokens."""
    g, width, size, eps = torch.Generator().manual_seed(4), 512, 16, 0.04
    need = torch.tensor([96.0 + 96 * i for i in range(6)])
    first = tuple([start] * 6 if start else [width // size * (i + 1) for i in range(6)])
    c = Controller(Schedule(first, width, size), tau=0.5, epsilon=eps, min_pages=1, control="mean")
    total, tokens = torch.zeros(6), torch.zeros(6)
    positions = torch.arange(8, 6 * width, 16).expand(64, -1)
    for step in range(150):
        mask = positions < torch.rand(64, 1, generator=g) * 9 * width
        bin_of = positions // width
        a = (1 - eps) / eps * (c.schedule.pages(positions) * float(size) / need[bin_of]).sqrt()
        alpha = torch.rand(positions.shape, generator=g) ** (1 / a)
        if step >= 100:
            total.index_add_(0, bin_of[mask], 1 - alpha[mask])
            tokens.index_add_(0, bin_of[mask], torch.ones(int(mask.sum())))
        c.update(alpha, positions, mask)
    assert (total / tokens / eps - 1).abs().max() < 0.1, total / tokens


# ---- controller: ranks ------------------------------------------------------------------------------------------

def rank_batches(step):
    """One step's batch, cut unevenly: 12 rows for rank 0 and none for rank 1, then 3 and 9, then 12 rows apart."""
    batch = random_step(torch.Generator().manual_seed(step), 4, 250, 1.0)
    cut = [12, 3, 7, 0][step % 4]
    return batch, [x[:cut] for x in batch], [x[cut:] for x in batch]


def run_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        c = Controller(Schedule((4, 4, 6, 6), 250, 16))
        for step in range(6):
            c.update(*rank_batches(step)[1 + rank])
        torch.save(c.state_dict(), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_get_the_schedule_of_the_pooled_data(tmp_path):
    """Guards against a schedule per rank: two ranks (one of them at times without rows) agree with one process."""
    c = Controller(Schedule((4, 4, 6, 6), 250, 16))
    for step in range(6):
        c.update(*rank_batches(step)[0])
    mp.spawn(run_rank, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt")
        assert state["schedule"] == c.state_dict()["schedule"]
        torch.testing.assert_close(state["u"], c.u, atol=1e-9, rtol=0)
        assert torch.equal(state["reached"], c.reached)
    assert c.schedule.bins != (4, 4, 6, 6)
