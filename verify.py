"""The V in RLVR: problems, and what an answer to one is worth.

    Problem         a prompt, the right answer, and the kind of checker it wants
    load_problems   "chain", "countdown" (made up as needed, by seed) or a JSONL file
    grade           a response and a Problem -> reward in [0, 1]

Kinds:
    chain       the task of the built-in model. A sheet of letters with values and of sums to work out, modulo 5, in
                lines that refer back to each other; every step looks a value up far behind, so an actor that reads too
                little of its cache makes mistakes, and more of them the further it gets.
    countdown   reach a target from given numbers, each used at most once. The expression is parsed, never evaluated.
    math        a final answer in \\boxed{}, after #### or after "Answer:", compared by math-verify in a worker process
                that can be killed: a tower of powers costs its own sample, not the run.

No torch here: a grader must start fast and stay small.
"""
import ast
import atexit
import json
import random
import re
import select
import string
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from pathlib import Path

# ---- problems ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    kind: str = "math"
    numbers: tuple = ()   # countdown: what may be used
    trace: str = ""       # a worked response, where the task can make one: the warm start trains on it


def chain(rng, leaves=20, lines=24, answers=4, far=False, give_up=0.0):
    """A sheet of `lines` sums over `leaves` given values, in `answers` interleaved chains whose last results are asked.

    "h1;k4;...h+k=W;W+c=l;...?lH" wants "h1+k4=W0;W0+c3=l3;...#l3H2." and is worth the share of right results. far: both
    operands of every line are leaves (an easier look-up). give_up: the share of traces that stop working at some line
    and guess the rest: a habit for reinforcement learning to break.
    """
    if not (1 <= answers <= lines and leaves >= 2 and leaves + lines <= 52):
        raise ValueError(f"chain:{leaves},{lines},{answers}: need 1 <= answers <= lines, at least 2 leaves, and leaves + "
                         "lines <= 52 letters")
    names = rng.sample(string.ascii_letters, leaves + lines)
    value = {name: rng.randrange(5) for name in names[:leaves]}
    of_chain = [i % answers for i in range(lines)]
    rng.shuffle(of_chain)
    ends, sheet, work, done_at = {}, [], [], {}
    for i, (name, which) in enumerate(zip(names[leaves:], of_chain)):
        a, b = rng.sample(names[:leaves], 2)
        if which in ends and not far:
            a = ends[which]
        if rng.random() < 0.5:
            a, b = b, a
        value[name] = (value[a] + value[b]) % 5
        ends[which], done_at[name] = name, i
        sheet.append(f"{a}+{b}={name};")
        work.append(f"{a}{value[a]}+{b}{value[b]}={name}{value[name]};")
    asked = rng.sample(list(ends.values()), answers)
    stop = rng.randrange(lines) if rng.random() < give_up else lines
    guess = "".join(f"{x}{value[x] if done_at[x] < stop else rng.randrange(5)}" for x in asked)
    return Problem("".join(f"{x}{value[x]};" for x in names[:leaves]) + "".join(sheet) + "?" + "".join(asked),
                   "".join(f"{x}{value[x]}" for x in asked), "chain", trace="".join(work[:stop]) + f"#{guess}.")


def countdown(rng, count=3, largest=20):
    """Reach a target between 1 and 100 from `count` numbers in 1..largest; every target made has a solution."""
    if not (2 <= count <= 6 and largest >= 2):
        raise ValueError(f"countdown:{count},{largest}: need 2 to 6 numbers, the largest at least 2")
    while True:
        numbers = tuple(rng.randint(1, largest) for _ in range(count))
        total, text, steps = Fraction(numbers[0]), str(numbers[0]), []
        for n in numbers[1:]:
            op = rng.choice("+-*")
            step = {"+": total + n, "-": total - n, "*": total * n}[op]
            text = f"({text}) {op} {n}" if op == "*" and " " in text else f"{text} {op} {n}"
            steps.append(f"{total} {op} {n} = {step}")
            total = step
        if 1 <= total <= 100:
            break
    given = ", ".join(map(str, rng.sample(numbers, count)))
    return Problem(f"Using the numbers {given}, each at most once, and the operations +, -, * and /, write an expression "
                   f"that equals {total}. Think step by step, then give the expression alone in \\boxed{{}}.",
                   str(total), "countdown", numbers, trace="\n".join(steps) + f"\n\\boxed{{{text}}}")


TASKS = {"chain": chain, "countdown": countdown}
SIZES = {"chain": "leaves,lines,answers", "countdown": "count,largest"}


def parse_task(spec):
    """"chain:20,24,4" -> (chain, (20, 24, 4)); None if it names no task."""
    name, _, sizes = spec.partition(":")
    if name not in TASKS:
        return None
    if sizes and (not re.fullmatch(r"\d+(,\d+)*", sizes) or sizes.count(",") > SIZES[name].count(",")):
        raise ValueError(f"--task {spec}: after the colon come whole numbers, {name}:{SIZES[name]}")
    return TASKS[name], tuple(map(int, sizes.split(","))) if sizes else ()


def load_problems(spec, seed=0, count=4096):
    """Problems of a spec -> list of Problem.

    spec: a procedural task, "chain", "countdown" or with sizes ("chain:leaves,lines,answers", "countdown:count,largest"),
    of which `count` are made, the same ones for the same seed; or a JSONL file with one object a line: "prompt"
    ("question", "problem"), "answer" ("solution"), and optionally "kind" and "numbers". A worked solution ending in
    "#### 42" (GSM8K) counts as the answer 42. Raises ValueError naming file and line.
    """
    if task := parse_task(spec):
        make, sizes = task
        return [make(random.Random(f"{spec} {seed} {i}"), *sizes) for i in range(count)]
    path = Path(spec)
    if not path.is_file():
        raise FileNotFoundError(f"'{spec}' is neither a task ({', '.join(TASKS)}) nor a problem file")
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                problems.append(_read_problem(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems


def _read_problem(row):
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    def first(*names):
        for name in names:
            if row.get(name) not in (None, ""):
                return row[name]
        raise ValueError(f"no \"{names[0]}\" (or {', '.join(names[1:])})")
    prompt, answer = first("prompt", "question", "problem"), str(first("answer", "solution"))
    kind = row.get("kind", "math")
    if not isinstance(prompt, str):
        raise ValueError("the prompt is not a string")
    if kind not in ("math", "countdown", "chain"):
        raise ValueError(f"kind '{kind}' is not one of math, countdown, chain")
    if kind == "math" and "####" in answer:
        answer = answer.rsplit("####", 1)[1].strip()
    numbers = tuple(int(n) for n in row.get("numbers", ()))
    if kind == "countdown" and not (numbers and re.fullmatch(r"-?\d{1,9}", answer)):
        raise ValueError("a countdown needs a whole number as its answer, and \"numbers\"")
    return Problem(prompt, answer, kind, numbers, str(row.get("trace", "")))


# ---- grading ----------------------------------------------------------------------------------------------------


def grade(response, problem):
    """What a response is worth, in [0, 1]."""
    if problem.kind == "chain":
        return grade_chain(response, problem.answer)
    if problem.kind == "countdown":
        return grade_countdown(response, problem.answer, problem.numbers)
    return grade_math(response, problem.answer)


def grade_chain(response, answer):
    """Share of the results after the last '#' that are right; anything but one result per question scores 0."""
    given = response.rpartition("#")[2].strip().removesuffix(".") if "#" in response else ""
    if len(given) != len(answer):
        return 0.0
    pairs = [(given[i:i + 2], answer[i:i + 2]) for i in range(0, len(answer), 2)]
    return sum(a == b for a, b in pairs) / len(pairs)


def grade_countdown(response, target, numbers):
    """1 if the last box (or what follows "Answer:") is an expression over `numbers`, each at most once, equal to target."""
    text = extract_answer(response)
    if text is None or len(text) > 200:
        return 0.0
    for latex, plain in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("×", "*"), ("÷", "/"), ("−", "-"),
                         ("\\left", ""), ("\\right", ""), ("$", "")):
        text = text.replace(latex, plain)
    expression, _, claimed = text.partition("=")
    if claimed.strip() not in ("", target):
        return 0.0
    try:
        used = []
        value = _arithmetic(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == Fraction(target) and not Counter(used) - Counter(numbers))


def _arithmetic(node, used):
    """Value of a parsed expression of whole numbers and + - * /; collects the numbers. Nothing is executed."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        a, b = _arithmetic(node.left, used), _arithmetic(node.right, used)
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        return a * b if isinstance(node.op, ast.Mult) else a / b
    raise ValueError("only whole numbers and + - * /")


def extract_answer(response):
    """The final answer in a response: the last \\boxed{}, else what follows the last "####", else the last "Answer:",
    else a short one-line response itself. None if there is none; an unclosed last box is none."""
    start = max(response.rfind("\\boxed{"), response.rfind("\\fbox{"))
    if start >= 0:
        start = response.index("{", start)
        depth = 0
        for i in range(start, min(len(response), start + 10_000)):
            depth += (response[i] == "{") - (response[i] == "}")
            if depth == 0:
                return response[start + 1:i].strip()
        return None
    for marker in (r"####\s*(.*)", r"(?i:answer)\s*:\s*(.*)"):
        if found := re.findall(marker, response):
            line = found[-1].strip()
            return _bare(line if len(line) <= 60 else line.split()[0])
    text = response.strip()
    return _bare(text) if text and len(text) <= 100 and "\n" not in text else None


def _bare(text):
    return text.strip("*_` \t.").strip()


def grade_math(response, answer):
    """1.0 if the final answer of `response` equals `answer` exactly, by math-verify; else 0.0. No tolerance."""
    given = extract_answer(response)
    if given is None or len(given) > 1000:
        return 0.0
    given, gold = (_plain(x) for x in (given, extract_answer(answer) or answer))
    if given == gold:
        return 1.0
    if "$" in given or re.search(r"\d\s+\d", given):  # several answers at once
        return 0.0
    plain = r"[-+]?\d{1,1000}(\.\d{1,1000}|/0*[1-9]\d{0,999})?"  # exact, and no need to ask the worker
    if re.fullmatch(plain, given) and re.fullmatch(plain, gold):
        return float(Fraction(given) == Fraction(gold))
    return float(_worker.equal(gold, given))


def _plain(text):
    """Without dollars and thousands separators; 2 2/3 and 2\\frac{2}{3} become 8/3, not 4/3 and not 2."""
    text = text.replace("\\!", "").strip("$ \n")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    match = re.fullmatch(r"(-?)(\d{1,9})\s*(?:\s(\d{1,9})/(\d{1,9})|\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\})", text)
    if not match:
        return text
    sign, whole = match[1], int(match[2])
    top, bottom = (int(match[i] or match[i + 2]) for i in (3, 4))
    return f"{sign}{whole * bottom + top}/{bottom}"


class _MathWorker:
    """A process that runs math-verify, one question at a time; killed and replaced when it does not answer.

    sympy can be made to compute for years or to fill the memory by a short string, and its own time limit needs a main
    thread. A process of ours with a limit on memory, and a wait with a limit on time, needs neither.
    """
    SECONDS = 5.0

    def __init__(self):
        self.process, self.lock = None, threading.Lock()

    def equal(self, gold, given):
        with self.lock:
            for attempt in range(2):  # a worker found dead is replaced once; one that dies of its question has answered
                if self.process is None or self.process.poll() is not None:
                    self._start()
                try:
                    self.process.stdin.write(json.dumps([gold, given]).encode() + b"\n")
                    answered, _, _ = select.select([self.process.stdout], [], [], self.SECONDS)
                    if answered and (line := self.process.stdout.readline()):
                        return line == b"1\n"
                    break
                except BrokenPipeError:
                    self.stop()
            self.stop()
            return False

    def _start(self):
        self.process = subprocess.Popen([sys.executable, __file__, "--math-worker"], stdin=subprocess.PIPE, bufsize=0,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        ready, _, _ = select.select([self.process.stdout], [], [], 60)  # importing sympy is not the answer's time
        if not ready or self.process.stdout.readline() != b"ready\n":
            self.stop()
            raise RuntimeError("the math worker did not start: is math-verify installed? (pip install -r requirements.txt)")

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


_worker = _MathWorker()
atexit.register(_worker.stop)


def _serve_math():
    """The worker's side: lines of [gold, given] in, "1" or "0" out."""
    import resource
    import warnings
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    warnings.simplefilter("ignore")
    from math_verify import parse, verify
    print("ready", flush=True)
    for line in sys.stdin:
        # An orphan whose parent was killed must not compute on: CPU seconds are rationed question by question.
        used = resource.getrusage(resource.RUSAGE_SELF)
        ration = int(used.ru_utime + used.ru_stime + 2 * _MathWorker.SECONDS + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (ration, resource.RLIM_INFINITY))
        gold, given = json.loads(line)
        try:
            a, b = (parse(f"${x}$", parsing_timeout=None) for x in (gold, given))
            if a and b and all(getattr(x[0], "is_number", False) for x in (a, b)):
                same = bool((a[0] - b[0]).equals(0))  # math-verify rounds, and calls 1/2004! and 1/2006! equal
            else:
                same = bool(a and b) and verify(a, b, float_rounding=60, numeric_precision=80, timeout_seconds=None)
        except Exception:  # whatever sympy makes of nonsense, the answer is not the right one
            same = False
        print(int(same), flush=True)


def pass_at_k(n, c, k):
    """Unbiased chance that at least one of k samples is right, given c right among n (Chen et al., 2021, Eq. 1)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - prod(1 - k / i for i in range(n - c + 1, n + 1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--math-worker"]:
        _serve_math()
