"""Problems, graders, the math worker and pass@k."""
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from math import comb

import pytest

import verify
from verify import Problem, chain, grade, grade_chain, grade_countdown, grade_math, load_problems, pass_at_k

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
    (boxed(r"\frac{1}{3}"), "1/3", 1), (boxed("5") + boxed("7"), "7", 1), (boxed("5") + boxed("7"), "5", 0),
    ("\\boxed{5", "5", 0), (boxed("5") + "\\boxed{5", "5", 0), (r"\boxed{\sqrt{\frac{4}{9}}}", "2/3", 1),
    (boxed("2/3"), r"\frac{2}{3}", 1), (boxed("0.5"), "1/2", 1), (boxed("1,000"), "1000", 1), (boxed("x^2+1"), "1+x^2", 1),
    (boxed("1/2004!"), "1/2006!", 0), (boxed("2^{-99}"), "2^{-98}", 0), (boxed("(2^{-99},1)"), "(2^{-98},1)", 0),
    (boxed("12345678901234567890"), "12345678901234567891", 0), (boxed("0.3333333333"), "1/3", 0),
    (boxed(r"\frac{12345678901234567890}{1}"), "12345678901234567891", 0), (boxed("0.33333333333333333"), r"\frac13", 0),
    (boxed(r"\pm 2021"), "2021", 0), (boxed("2021"), r"\pm 2021", 0), (boxed("(1,2)"), "(2,1)", 0),
    (boxed("(1,2)"), "(1, 2)", 1), (boxed("(5, 120)"), "(5,120)", 1), (boxed("5120"), "(5,120)", 0),
    ("**73**", "73", 1), ("The steps.\n**Answer:** 73", "73", 1), ("The steps.\nAnswer: **73**.", "73", 1),
    (boxed("2 2/3"), "2", 0), (boxed("2 2/3"), "3", 0), (boxed("2 2/3"), "8/3", 1), (boxed(r"-2\frac{2}{3}"), "-8/3", 1),
    ("Work.\n#### 42 " + "and so on " * 50, "42", 1), ("#### 41\n#### 42", "42", 1), ("#### 42", "#### 42", 1),
    ("I do not know.\nSorry.", "42", 0), ("", "42", 0), (boxed(""), "42", 0),
    *[(boxed(guess), "42", 0) for guess in ("41, 42", "42, 41", "41,42", "41 or 42", r"\{41, 42\}", "41$ $42", "41\n42")]])
def test_math_table(response, answer, reward):
    """Faults: box cut at the first brace, tolerance, mixed forms, lists of guesses."""
    assert grade_math(response, answer) == reward


@pytest.mark.parametrize("text", [
    "\\boxed{" * 20_000, boxed("1") * 20_000 + "\\boxed{", "\\boxed{" + "{" * 10**6, "####" * 20_000, "answer " * 20_000,
    boxed("9" * 10**5), boxed("1+" * 50_000 + "1")], ids=lambda text: text[:9])
def test_long_nonsense_takes_no_time(text):
    start = time.perf_counter()
    assert grade_math(text, "5") == 0 and time.perf_counter() - start < 1


@pytest.mark.parametrize("tower, in_thread", [
    ("5^{5^{5^5}}", False), ("5^(5^(5^5))", False), ("10^10^10", True), ("9999999!", True)])
def test_power_towers_cost_their_own_sample(tower, in_thread, monkeypatch):
    """Fault: a hang, or the next sample ungraded. An alarm works in a main thread only: also from another."""
    monkeypatch.setattr(verify._worker, "SECONDS", 1.5)
    grade_math(*THIRD)  # the worker is up
    found, start = [], time.perf_counter()

    def work():
        found.extend([grade_math(boxed(tower), "1/3"), time.perf_counter() - start, grade_math(*THIRD)])
    thread = threading.Thread(target=work, daemon=True)
    thread.start() if in_thread else work()
    if in_thread:
        thread.join(20)
    assert found[0] == 0 and found[1] < 1.5 + 3 and found[2] == 1


def test_worker_is_replaced_and_stopped(monkeypatch):
    """Faults: a worker that died is not replaced, or brings the run down; a process left behind."""
    for seen_dead in (True, False):
        assert grade_math(*THIRD) == 1
        process = verify._worker.process
        process.kill()
        process.wait()
        if not seen_dead:  # it dies just after it was looked at: the question goes into a broken pipe
            monkeypatch.setattr(process, "poll", lambda: None)
        assert grade_math(*THIRD) == 1 and verify._worker.process is not process
    pid = verify._worker.process.pid
    verify._worker.stop()
    assert verify._worker.process is None and not os.path.exists(f"/proc/{pid}")


def test_worker_ends_by_itself():
    """Fault: the run is killed during a power tower, and its worker goes on computing for ever."""
    code = "import verify; verify._MathWorker.SECONDS = 0.5; verify._serve_math()"
    done = subprocess.run([sys.executable, "-c", code], input='["1/3", "9999999!"]\n', text=True, capture_output=True,
                          cwd=os.path.dirname(verify.__file__), timeout=15)
    assert done.returncode < 0 and done.stdout == "ready\n"


def test_problem_files(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [dict(prompt="a", answer=0), dict(question="b", answer="So 6*7 is\n#### 42"), dict(problem="c", solution="1/2"),
            dict(prompt="d", answer="24", kind="countdown", numbers=[4, 6])]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert load_problems(str(file)) == [Problem("a", "0"), Problem("b", "42"), Problem("c", "1/2"),
                                        Problem("d", "24", "countdown", (4, 6))]
    file.write_text("\n")
    with pytest.raises(ValueError, match="no problems"):
        load_problems(str(file))
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl.*neither a task"):
        load_problems("nowhere.jsonl")


@pytest.mark.parametrize("line", [
    '{"prompt": "a"', "[1, 2]", '{"prompt": "a"}', '{"answer": "1"}', '{"prompt": "", "answer": "1"}',
    '{"prompt": 3, "answer": 1}', '{"prompt": "a", "answer": 1, "kind": "x"}', '{"prompt": "a", "answer": 1, "numbers": 5}',
    '{"prompt": "a", "answer": "ten", "kind": "countdown", "numbers": [5, 5]}'])
def test_a_broken_line_is_named(tmp_path, line):
    """Fault: a traceback without the place; or only hours later, when the problem is graded."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: "):
        load_problems(str(file))


@pytest.mark.parametrize("spec", [
    "chain:1,4,2", "chain:4,2,3", "chain:30,30,4", "chain:4,4,0", "chain:a", "chain:4,", "chain:-4,4,2", "chain:4,4,2,1,1,1",
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
