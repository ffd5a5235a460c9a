"""Problems, graders, the math workers and pass@k. The sandbox has its own file."""
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import types
from math import comb

import pytest

import verify
from verify import (BOXED, FENCED, Problem, chain, grade, grade_all, grade_chain, grade_countdown, grade_math,
                    load_problems, pass_at_k)

ROOT = os.path.dirname(verify.__file__)
THIRD = r"\boxed{\frac{2}{6}}", r"\frac13"  # a right answer that only the worker can tell


def boxed(text):
    return "so \\boxed{%s} it is" % text


@pytest.mark.parametrize("spec", ["chain", "chain:4,4,2", "chain:2,1,1", "countdown", "countdown:2,9", "countdown:6,5"])
def test_every_worked_trace_is_right(spec):
    """Faults: a task whose own solution scores under 1; problems that depend on more than the seed."""
    problems = load_problems(spec, 7, 50)
    assert all(grade(p.trace, p) == 1 for p in problems)
    assert problems[:20] == load_problems(spec, 7, 20) and problems != load_problems(spec, 8, 50)


@pytest.mark.parametrize("far", [False, True])
def test_chain_by_its_own_rules(far):
    """Faults: values that do not follow from the sheet; sizes ignored; a sheet of another length."""
    p, chained = chain(random.Random(1), 10, 12, 3, far=far), 0
    value = {x[0]: int(x[1]) for x in p.prompt.split(";")[:10]}
    leaves = set(value)
    for a, b, c in re.findall(r"(\w)\+(\w)=(\w)", p.prompt):
        chained += not {a, b} <= leaves
        value[c] = (value[a] + value[b]) % 5
    assert len(value) == 22 and chained == (0 if far else 12 - 3)
    assert p.answer == "".join(f"{x}{value[x]}" for x in p.prompt.split("?")[1])
    assert all(value[x] == int(v) for x, v in re.findall(r"([a-zA-Z])(\d)", p.trace))
    p = load_problems("chain", 0, 1)[0]
    assert len(p.prompt) == 209 and len(p.trace) == 226 and len(p.answer) == 8


def test_chain_traces_that_give_up():
    whole, short = ([chain(random.Random(i), give_up=g) for i in range(60)] for g in (0.0, 1.0))
    for a, b in zip(whole, short):
        assert (a.prompt, a.answer) == (b.prompt, b.answer) and len(b.trace) < len(a.trace) == 226
        assert a.trace.startswith(b.trace.partition("#")[0]) and len(b.trace.partition("#")[2]) == 9
    assert 0.2 < sum(grade(p.trace, p) for p in short) / 60 < 0.8, "guessing must pay, and less than working"


@pytest.mark.parametrize("response, share", [
    ("a1+b2=c3;#l3H2.", 1), ("#l3H2", 1), ("#l3H1.", .5), ("#H2l3.", 0), ("#l0H0.", 0), ("l3H2.", 0), ("", 0), ("#", 0),
    ("#l3H2H1.", 0), ("#l3H2l3H2.", 0), ("#l3.", 0), ("#l3H2.#", 0), ("#l0H0.#l3H2.", 1), ("#l3H2.#l0H2.", .5)])
def test_chain_grades(response, share):
    """Fault: more guesses than questions are worth something."""
    assert grade_chain(response, "l3H2") == share


@pytest.mark.parametrize("text, reward", [
    ("(3 + 5) * 2", 1), ("2*(5+3)", 1), ("(3+5)*2 = 16", 1), ("(3+5)*2 = 17", 0), ("(3+5)*2=16=16", 0), ("16", 0),
    (r"(3+5)\times2", 1), (r"\left(3+5\right)\cdot 2", 1), ("(3+5)\u00d72", 1), ("$(3+5)*2$", 1), ("2*2*(5-1)", 0),
    ("3+3+5+5", 0), ("3+5+2", 0), ("5*3+1", 0), ("(7+1)*2", 0), ("2**3*2", 0), ("abs(16)", 0), ("3.2*5", 0), ("x", 0),
    ("__import__('os').abort()", 0), ("[16][0]", 0), ("16 if 3 else 5", 0), ("True*16", 0), ("9" * 4000, 0), ("", 0),
    ("(" * 90 + "3" + ")" * 90, 0), ("(3+5)*2/(5-5)", 0), ("3\x00+5", 0), ("(3+5)*", 0), ("-" * 150 + "5", 0)])
def test_countdown_grades(text, reward):
    """Faults: eval, a number used twice or not given, a crash instead of 0. Numbers 2, 3, 5; target 16."""
    assert grade_countdown(boxed(text), "16", (2, 3, 5)) == reward


def test_countdown_divides_exactly():
    """Faults: floating point (8/(3-8/3) is 24 in fractions only), integer division, a minus sign of another kind."""
    assert grade_countdown(boxed("8\\div(3\u22128/3)"), "24", (3, 3, 8, 8)) == 1
    assert grade_countdown(boxed("7/2"), "3", (2, 7)) == 0


@pytest.mark.parametrize("response, answer, reward", [
    (boxed("5") + boxed("7"), "7", 1), (boxed("5") + boxed("7"), "5", 0), ("\\boxed{5", "5", 0), ("", "42", 0),
    (boxed("5") + "\\boxed{5", "5", 0), (r"\boxed{\sqrt{\frac{4}{9}}}", "2/3", 1), (boxed(""), "42", 0),
    ("**73**", "73", 1), ("The steps.\n**Answer:** 73", "73", 1), ("The steps.\nAnswer: **73**.", "73", 1),
    (".5", "1/2", 1), ("Work.\n#### 42 " + "and so on " * 50, "42", 1), ("#### 41\n#### 42", "42", 1),
    ("#### 42", "#### 42", 1), ("I do not know.\nSorry.", "42", 0),
    *[(boxed(guess), "42", 0)
      for guess in ("41, 42", "42, 41", "41,42", "41 or 42", r"\{41, 42\}", "41$ $42", "41\n42")]])
def test_math_table(response, answer, reward):
    """Faults: box cut at the first brace, mixed forms, lists of guesses. More forms and tolerance: below."""
    assert grade_math(response, answer) == reward


EQUAL = r"""
    1/2 | 0.5 || \frac{1}{2} | 2/4 || \dfrac12 | .5 || 0.\overline{3} | \frac13 || 0.1\overline{6} | 1/6
    \sqrt{8} | 2\sqrt{2} || \frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2} || \sqrt{3+2\sqrt{2}} | 1+\sqrt{2}
    2^{10} | 1024 || 3\sqrt{5}-1 | -1+3\sqrt5 || [1,2) | [1, 2) || (-\infty, 3] | \left(-\infty,3\right]
    (1/2, 3) | (0.5, 3) || [0,1]\cup[2,3] | [2,3]\cup[0,1] || x \in [1,2] | [1,2] || \{1,2\} | \{2,1\}
    \{1/2, 3\} | \{3, 0.5\} || 1, 2 | 2, 1 || 1, 2 | \{2, 1\} || \pm 3 | 3, -3 || 1\pm\sqrt2 | 1-\sqrt2, 1+\sqrt{2}
    ±5 | \pm 5 || \pm 3 | \pm 3.0 || 1<x<3 | 3>x>1 || 2x=4 | x=2 || -x<-5 | x>5 || 5 \text{ or } 7 | 7, 5 || \{5\} | 5
    (1, 2, 3) | (1,2,3) || (\frac12, -1) | (0.5, -1) || \langle 1, 2\rangle | (1,2)
    ((1,2),(3,4)) | ((1, 2), (3, 4))
    \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
    \begin{pmatrix}1/2\\0\end{pmatrix} | \begin{pmatrix} 0.5 \\ 0 \end{pmatrix} || -3 | −3
    -\frac{1}{2} | \frac{-1}{2} || +5 | 5 || -(-2) | 2 || 1.5\times 10^3 | 1500 || 1.5e3 | 1500
    2.50\cdot10^{-2} | 0.025 || 6.02 \times 10^{23} | 602\times10^{21} || 1,234,567 | 1234567 || 10{,}000 | 10000
    10\,000 | 10000 || 3.0 | 3 || 007 | 7 || 10!/8! | 90 || \binom{5}{2} | 10 || \text{Monday} | monday
    \text{(B)} | B || (C) | C || \text{yes} | Yes || \text{no solution} | No solution || 50\% | 50 || 50 | 50\%
    0.5 | 50\% || 12.5\% | \frac18 || 50\% | 1/2 || 150\% | 1.5 || 5 | 5\text{ cm} || 5\text{ cm} | 5 cm
    5\text{ cm}^2 | 5 || 90^\circ | 90 || 90 | 90° || \$18 | 18 || 18 dollars | 18 || 3 hours | 3\text{ hours}
    12_8 | 12_{8} || 60 mph | 60 || 7\mathrm{~m/s} | 7 \text{ m/s} || x = 5 | 5 || 5 | k=5 || 2x+1 | 1 + 2x
    (x+1)^2 | x^2+2x+1 || y = 2x+1 | y=1+2x || x<5 | 5>x || \frac{x^2-1}{x-1} | x+1 || 3+4i | 4i+3 || \log_2 8 | 3
    2\pi | \pi\cdot 2 || e^{2} | e^2 || |{-3}| | 3 || 1/3 | \frac{1}{3} || \frac{2}{3} | 2/3 || 1000 | 1,000
    8/3 | 2 2/3 || -8/3 | -2\frac{2}{3} || 3/4 | 1.5/2 || (5,120) | (5, 120) || 1+x^2 | x^2+1"""
UNEQUAL = r"""
    1/2 | 0.51 || 1/3 | 0.333333333333 || 1/3 | 0.33 || 2/3 | 3/2 || 0.\overline{3} | 0 || 0.3 | 0.\overline{3}
    \sqrt{2} | 1.41421356237 || \sqrt{2} | \sqrt{3} || \pi | 3.14159265358979 || \pi | 22/7 || [1,2) | (1,2)
    [1,2] | [1,2) || (1,2) | (2,1) || (2,1) | (5,3) || (1/2004!, 1) | (1/2006!, 1) || [0,1]\cup[2,3] | [0,1]\cup[2,4]
    (-\infty,3) | (-\infty,4) || \{1,2\} | \{1,3\} || \{1,2\} | \{1\} || \{1,2\} | (1,2)
    \{1/2004!, 1\} | \{1, 1/2006!\} || 1, 2 | 1 || 1 | 1, 2 || 5 | 5 \text{ or } 7 || 1,2,2 | 1,1,2 || (1,2,3) | (1,2)
    (1,2) | (1,3) || (0,0) | 0 || ((1,2),(3,4)) | ((1,2),(4,3))
    \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
    \begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} || -3 | 3 || 1, 2 | \pm 3 || \pm 3 | 3
    3 | \pm 3 || -\frac12 | \frac12 || 1.5\times10^3 | 1.5\times10^4 || 1e3 | 1e-3 || 1.5e3 | 4.5e || 1,234 | 1234.5
    1,234 | 1, 234 || 10000 | 1000 || Monday | Tuesday || \text{yes} | no || A | B || \text{silent} | \text{listen}
    5 | five hundred 5 || \text{even} | 2 || 50\% | 0.05 || 50\% | 5 || 50\% | 0.5\% || 25\% | 75\% || 5 | 0.5\%
    5\text{ cm} | 5\text{ m} || 5\text{ cm} | 50 \text{ mm} || 3 hours | 3 minutes || 12_8 | 12_9
    5\text{ cm}^2 | 5\text{ cm}^3 || 5\text{ cm} | 6\text{ cm} || 2 | 2x || 90^\circ | 80^\circ || x = 5 | 6
    x<1/2004! | x<1/2006! || 1<x<3 | 1<x\le 3 || 2x<4 | -x<-2 || 5 | 5\text{ or 6} || 5 | 5\text{ or six}
    5 | 5\text{ 6} || 5 | 5 6 || 5 | \pm 5 || x = 5 | y = 5 || x<5 | x>5 || x<5 | x\le 5 || (x+1)^2 | x^2+1
    \frac{1}{0} | 5 || 1/0 | 2/0 || \sin(x) | \cos(x) || 2^{-99} | 2^{-98} || 1/2004! | 1/2006!
    12345678901234567890 | 12345678901234567891 || 1234567.8901234567891 | 1234567.8901234567892
    10^{40}+1 | 10^{40} || \sqrt{10^{40}+1} | 10^{20} || 2021 | \pm 2021 || \pm 2021 | 2021 || 2 | 2 2/3 || 3 | 2 2/3
    12345678901234567891 | \frac{12345678901234567890}{1} || \frac13 | 0.33333333333333333 || (5,120) | 5120
    (2^{-98},1) | (2^{-99},1)"""
PAIRS = [(*map(str.strip, pair.split(" | ")), float(table is EQUAL)) for table in (EQUAL, UNEQUAL)
         for pair in re.split(r"\|\||\n", table) if pair.strip()]


def test_pairs_of_answers():
    """Faults: rounding; shape lost (a tuple read as an interval, (2,1) as the empty set); a word read as a product of
    its letters; 0.333... read as 0; units and percents without a rule. The rules are in grade_math's docstring."""
    assert len(PAIRS) > 130
    rewards = grade_all([boxed(given) for _, given, _ in PAIRS], [Problem("", gold) for gold, *_ in PAIRS])
    wrong = [(*pair, reward) for pair, reward in zip(PAIRS, rewards) if reward != pair[2]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("text", [
    "\\boxed{" * 20_000, boxed("1") * 20_000 + "\\boxed{", "\\boxed{" + "{" * 10**6, "####" * 20_000,
    "answer " * 20_000, boxed("9" * 10**5), boxed("1+" * 50_000 + "1")], ids=lambda text: text[:9])
def test_long_nonsense_takes_no_time(text):
    start = time.perf_counter()
    assert grade_math(text, "5") == 0 and time.perf_counter() - start < 1


@pytest.mark.parametrize("tower, in_thread", [
    ("5^{5^{5^5}}", False), ("5^(5^(5^5))", False), ("10^10^10", True), ("9999999!", True), ("(1, 9999999!)", False)])
def test_power_towers_cost_their_own_sample(tower, in_thread, monkeypatch):
    """Fault: a hang, or the next sample ungraded. An alarm works in a main thread only: also from another."""
    monkeypatch.setattr(verify, "MATH_SECONDS", 1.5)
    grade_math(*THIRD)  # a worker is up
    found, start = [], time.perf_counter()

    def work():
        found.extend([grade_math(boxed(tower), "(1, 1/3)"), time.perf_counter() - start, grade_math(*THIRD)])
    thread = threading.Thread(target=work, daemon=True)
    thread.start() if in_thread else work()
    if in_thread:
        thread.join(20)
    assert found[0] == 0 and found[1] < 1.5 + 3 and found[2] == 1


def test_worker_is_replaced():
    """Fault: a worker that died is not replaced, or brings the run down."""
    assert grade_math(*THIRD) == 1
    worker = verify._idle[-1]
    worker.child.kill()
    worker.child.wait()
    assert grade_math(*THIRD) == 1 and worker not in verify._idle


def test_no_worker_outlives_the_run():
    code = f"import verify; verify.grade_math(*{THIRD}); print(verify._idle[0].child.pid)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=ROOT)
    end = time.monotonic() + 5
    while os.path.exists(f"/proc/{int(done.stdout)}") and time.monotonic() < end:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{int(done.stdout)}")


def test_worker_ends_by_itself():
    """Fault: the run is killed during a power tower, and its worker goes on computing for ever."""
    code = "import verify; verify.MATH_SECONDS = 0.5; verify._serve_math()"
    done = subprocess.run([sys.executable, "-c", code], input='\n["1/3", "9999999!"]\n', text=True, capture_output=True,
                          cwd=ROOT, timeout=15)
    assert done.returncode < 0 and done.stdout == "ready\n"


def test_grading_in_parallel(monkeypatch):
    """Faults: rewards in the order of finishing; a hang that holds up the others; two threads talking to one worker."""
    monkeypatch.setattr(verify, "MATH_SECONDS", 2.0)
    pairs = [(boxed(f"\\frac{{{i}}}{{7}}"), Problem("", f"{i + (i % 3 == 0)}/7")) for i in range(60)]
    pairs[5] = (boxed("5^{5^{5^5}}"), Problem("", "5"))
    pairs[7] = ("#l3H2.", Problem("", "l3H2", "chain"))
    rewards = grade_all(*zip(*pairs), workers=4)
    assert rewards == [0.0 if i % 3 == 0 or i == 5 else 1.0 for i in range(60)]
    assert grade_all([], []) == [] and len(verify._idle) <= 4
    with pytest.raises(ValueError, match="1 responses to 0 problems"):
        grade_all(["a"], [])


def test_problem_files(tmp_path):
    file = tmp_path / "p.jsonl"
    user, system = {"role": "user", "content": "h\u2028"}, {"role": "system", "content": "s"}
    rows = [dict(prompt="a", answer=0), dict(question="b", answer="So 6*7 is\n#### 42"),
            dict(problem="c", solution="1/2"), dict(prompt="d", answer="24", kind="countdown", numbers=[4, 6]),
            dict(prompt=[user], answer="3"),
            dict(prompt=[system, user], solution="It is $\\boxed{\\frac{1}{2}}$. Check:\nyes"),
            dict(prompt=[user, dict(user, role="assistant"), user], answer="Put it in a box", kind="math"),
            dict(prompt="In \\boxed{}", answer="4"), dict(prompt="e", tests=["assert f() == 1"]),
            dict(prompt="f", answer="x", tests=[{"stdin": "", "stdout": "1"}, {"fn": "g", "args": [[1]], "out": None}],
                kind="code")]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    h = "h\u2028"
    assert load_problems(str(file)) == [
        Problem(f"a\n{BOXED}", "0"), Problem(f"b\n{BOXED}", "42"), Problem(f"c\n{BOXED}", "1/2"),
        Problem("d", "24", "countdown", (4, 6)), Problem(f"{h}\n{BOXED}", "3"),
        Problem(f"s\n\n{h}\n{BOXED}", "\\frac{1}{2}"),
        Problem(f"user: {h}\n\nassistant: {h}\n\nuser: {h}\n{BOXED}", "Put it in a box"), Problem("In \\boxed{}", "4"),
        Problem(f"e\n{FENCED}", "", "code", tests=({"assert": "assert f() == 1"},)),
        Problem(f"f\n{FENCED}", "", "code", tests=tuple(rows[-1]["tests"]))]
    file.write_text("\n")
    with pytest.raises(ValueError, match="no problems"):
        load_problems(str(file))
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="p.jsonl, line 1: .*utf-8"):
        load_problems(str(file))
    for spec in ("nowhere.jsonl", str(tmp_path), "", "hub"):
        with pytest.raises(ValueError, match="neither a task"):
            load_problems(spec)


def test_hub(monkeypatch):
    """The optional package is named when it is missing; its errors, and its rows' places, are passed on."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="hub:a/b.*pip install datasets"):
        load_problems("hub:a/b")
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "none":
            raise RuntimeError("no such thing")
        return [{"question": "q", "answer": "#### 7", "tests": None, "kind": None}, {"question": name}]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for spec, call in (("hub:a/b", ("a/b", None, "train")), ("hub:gsm,main:test", ("gsm", "main", "test"))):
        with pytest.raises(ValueError, match=f"{spec}, row 1: no \"answer\""):
            load_problems(spec)
        assert asked[-1] == call
    with pytest.raises(ValueError, match="hub:none.*no such thing"):
        load_problems("hub:none")
    with pytest.raises(ValueError, match="hub:NAME"):
        load_problems("hub:")


@pytest.mark.parametrize("line", [
    '{"prompt": "a"', "[1, 2]", '{"prompt": "a"}', '{"answer": "1"}', '{"prompt": "", "answer": "1"}',
    '{"prompt": 3, "answer": 1}', '{"prompt": "a", "answer": 1, "kind": "x"}',
    '{"prompt": "a", "answer": 1, "numbers": 5}',
    '{"prompt": "a", "answer": "ten", "kind": "countdown", "numbers": [5, 5]}',
    '{"prompt": "a", "answer": 1, "numbers": [1.5]}',
    '{"prompt": "a", "answer": 1, "kind": [1]}', '{"prompt": [], "answer": 1}',
    '{"prompt": [{"role": "user"}], "answer": 1}',
    '{"prompt": "a", "answer": "long\\nand no end"}', '{"prompt": "a", "kind": "code"}', '{"prompt": "a", "tests": 5}',
    "[" * 10**5,
    '{"prompt": "a", "tests": [5]}', '{"prompt": "a", "tests": [{}]}', '{"prompt": "a", "tests": [{"stdin": "a"}]}',
    '{"a": ' + "9" * 5000 + "}",
    '{"prompt": "a", "tests": [{"stdin": 1, "stdout": 2}]}',
    '{"prompt": "a", "tests": [{"fn": "f", "args": 5, "out": 1}]}',
    '{"prompt": "a", "tests": ["assert f( == 1"]}', '{"prompt": "a", "tests": ["f() == 1"]}',
    '{"prompt": "a", "answer": {"a": []}, "kind": 5}'])
def test_a_broken_line_is_named(tmp_path, line):
    """Fault: a traceback without the place; or only hours later, when the problem is graded."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: "):
        load_problems(str(file))


@pytest.mark.parametrize("spec", [
    "chain:1,4,2", "chain:4,2,3", "chain:30,30,4", "chain:4,4,0", "chain:a", "chain:4,", "chain:-4,4,2",
    "chain:4,4,2,1,1,1",
    "countdown:1", "countdown:9", "countdown:3,1", "countdown:3,20,7"])
def test_bad_sizes_are_refused(spec):
    """Fault: a hang, or a TypeError's traceback."""
    with pytest.raises(ValueError, match=spec.partition(":")[0]):
        load_problems(spec, 0, 1)


def test_pass_at_k_counts_subsets():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            right = sum(any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k))
            assert pass_at_k(n, c, k) == pytest.approx(right / comb(n, k), abs=1e-12)
    for bad in ((5, 6, 1), (5, -1, 1), (5, 2, 0), (5, 2, 6)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(*bad)
