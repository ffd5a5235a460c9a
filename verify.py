"""The V in RLVR: problems, and what an answer to one is worth.

    Problem         a prompt, the right answer, and the kind of checker it wants
    load_problems   "chain", "countdown" (made up as needed, by seed), a JSONL file, or a data set of the Hub
    grade           a response and a Problem -> reward in [0, 1];  grade_all: many at once, in parallel
    pass_at_k       what k tries are worth

Kinds: chain     results of a sheet of sums, modulo 5, in lines that refer back to each other: the task of the built-in
                 model. Every step looks a value up far behind, so an actor that reads too little makes mistakes.
       countdown an expression that reaches a target from given numbers, each used at most once
       math      a final answer in \\boxed{}, after #### or after "Answer:", compared exactly (`grade_math`)
       code      the last fenced block, run against tests in a sandbox (`run_tests`)

Whatever is hostile or merely slow runs in a process that can be killed: math in a pool of workers, for a tower of
powers must cost its own sample, not the run; code in a jail, which never holds what would make it pass. No torch here:
a grader must start fast and stay small.

    python verify.py --model DIR-or-NAME --data test.jsonl --n 16 --k 1 4 16      mean@16 and pass@k of a checkpoint
    python verify.py --grade responses.jsonl                                      grade what something else has written
"""
import ast
import builtins
import ctypes
import functools
import gc
import glob
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

# ---- problems ---------------------------------------------------------------------------------------------------

BOXED = "Think step by step, then give the final answer in \\boxed{}."
FENCED = "Write it in Python and give the whole program in one ```python block."


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    kind: str = "math"
    numbers: tuple = ()   # countdown: what may be used
    trace: str = ""       # a worked response, where the task can make one: the warm start trains on it
    tests: tuple = ()     # code: {"stdin", "stdout"}, {"fn", "args", "out"} or {"assert"} each


def chain(rng, leaves=20, lines=24, answers=4, far=False, give_up=0.0):
    """A sheet of `lines` sums over `leaves` given values, in `answers` interleaved chains whose last results are asked.

    "h1;k4;...h+k=W;W+c=l;...?lH" wants "h1+k4=W0;W0+c3=l3;...#l3H2." and is worth the share of right results. far: both
    operands of every line are leaves (an easier look-up). give_up: the share of traces that stop working at some line
    and guess the rest: a habit for reinforcement learning to break.
    """
    if not (1 <= answers <= lines and leaves >= 2 and leaves + lines <= 52):
        raise ValueError(f"chain:{leaves},{lines},{answers}: need 1 <= answers <= lines, at least 2 leaves, and leaves "
                         "+ lines <= 52 letters")
    names = rng.sample(string.ascii_letters, leaves + lines)
    value = {name: rng.randrange(5) for name in names[:leaves]}
    of_chain = [i % answers for i in range(lines)]
    rng.shuffle(of_chain)
    ends, sheet, work, done_at = {}, [], [], {}
    for i, (name, which) in enumerate(zip(names[leaves:], of_chain)):
        a, b = rng.sample(names[:leaves], 2)
        if not far:
            a = ends.get(which, a)
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
    total = 0
    while not 1 <= total <= 100:
        numbers = tuple(rng.randint(1, largest) for _ in range(count))
        total, text, steps = numbers[0], str(numbers[0]), []
        for n in numbers[1:]:
            op = rng.choice("+-*")
            step = {"+": total + n, "-": total - n, "*": total * n}[op]
            text = f"({text}) {op} {n}" if op == "*" and " " in text else f"{text} {op} {n}"
            steps.append(f"{total} {op} {n} = {step}")
            total = step
    given = ", ".join(map(str, rng.sample(numbers, count)))
    return Problem(f"Using the numbers {given}, each at most once, and the operations +, -, * and /, write an "
                   f"expression that equals {total}. Think step by step, then give the expression alone in "
                   "\\boxed{}.",
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
    """Problems of a spec -> list of Problem. What cannot be read raises ValueError, naming the place.

    spec is one of
      - a procedural task, "chain", "countdown" or with sizes ("chain:leaves,lines,answers", "countdown:count,largest"),
        of which `count` are made, the same ones for the same seed;
      - a JSONL file, one object a line: "prompt" ("question", "problem"), as text or chat messages; "answer"
        ("solution"), where a worked solution counts as its last \\boxed{} or its "#### 42"; "kind"; "numbers"; "tests"
        (a list of the objects of `run_tests` or of assert statements, or one text of them), with "entry_point" the
        function that HumanEval's `check` is called with. A row with tests is code. How to answer is added to math and
        code prompts that do not say it;
      - hub:NAME[,CONFIG][:SPLIT], the same rows through the `datasets` package (split "train" if not given).
    """
    if task := parse_task(spec):
        make, sizes = task
        return [make(random.Random(f"{spec} {seed} {i}"), *sizes) for i in range(count)]
    problems = [_read_problem(row, where) for where, row in _rows(spec)]
    if not problems:
        raise ValueError(f"{spec} holds no problems")
    return problems


def _rows(spec):
    """(place, object) of every row of a JSONL file or a data set."""
    if spec.startswith("hub:"):
        yield from ((f"{spec}, row {i}", row) for i, row in enumerate(_load_hub(spec)))
        return
    try:
        lines = Path(spec).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        known = f"neither a task ({', '.join(TASKS)}), nor hub:NAME, nor a problem file"
        raise ValueError(f"'{spec}' is {known}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{spec}, line {number}"
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # "\ud800" alone is JSON, but no text: tokenizers refuse it
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from None
            yield where, row


def _load_hub(spec):
    name, _, split = spec.removeprefix("hub:").partition(":")
    name, _, config = name.partition(",")
    if not name:
        raise ValueError(f"{spec}: give hub:NAME[,CONFIG][:SPLIT], as in hub:openai/gsm8k,main:test")
    try:
        from datasets import load_dataset
        return load_dataset(name, config or None, split=split or "train")
    except ImportError as error:
        raise ValueError(f"{spec}: this needs the datasets package: pip install datasets ({error})") from None
    except Exception as error:  # its own exceptions have no common base
        raise ValueError(f"{spec}: cannot be loaded ({type(error).__name__}: {error})") from None


def _read_problem(row, where):
    try:
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        kind = row.get("kind") or ("code" if row.get("tests") else "math")
        if kind not in ("math", "code", *TASKS):
            raise ValueError(f"kind '{kind}' is not one of math, code, {', '.join(TASKS)}")
        prompt = _read_prompt(_first(row, "prompt", "question", "problem"))
        answer = "" if kind == "code" else str(_first(row, "answer", "solution"))
        tests = _read_tests(row.get("tests"), row.get("entry_point")) if kind == "code" else ()
        if kind == "math":
            answer = _read_gold(answer)
            prompt += "" if "\\boxed" in prompt or "####" in prompt else "\n" + BOXED
        if kind == "code" and "```" not in prompt:
            prompt += "\n" + FENCED
        numbers = row.get("numbers") or ()
        whole = isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)
        if not whole or kind == "countdown" and not (numbers and re.fullmatch(r"-?\d{1,9}", answer)):
            raise ValueError("\"numbers\" must be a list of whole numbers; a countdown needs it, and a whole answer")
        return Problem(prompt, answer, kind, tuple(numbers), str(row.get("trace", "")), tests)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _first(row, *names):
    for name in names:
        if row.get(name) not in (None, "", []):
            return row[name]
    raise ValueError(f"no \"{names[0]}\" (or {', '.join(names[1:])})")


def _read_prompt(prompt):
    """Text, or chat messages: one user turn (after a system one, if any) is its text, more are written out by role."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not all(
            isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in prompt):
        raise ValueError("the prompt is neither text nor a list of messages {\"role\", \"content\"}")
    alone = sum(m["role"] != "system" for m in prompt) == 1
    return "\n\n".join(m["content"] if alone else f"{m['role']}: {m['content']}" for m in prompt)


def _read_gold(answer):
    """The final answer in a worked solution; an answer alone is itself."""
    if "\\boxed" not in answer and "####" not in answer and "\n" not in answer.strip() and len(answer) <= 300:
        return answer.strip()
    if not (gold := extract_answer(answer)):
        raise ValueError("no final answer (\\boxed{}, \"#### 42\" or \"Answer: 42\") in the solution")
    return gold


def _read_tests(tests, entry_point):
    tests = [tests] if isinstance(tests, (str, dict)) else tests
    if not tests or not isinstance(tests, (list, tuple)):
        raise ValueError("code needs \"tests\", a list")
    checked = []
    for i, test in enumerate(tests, 1):
        if isinstance(test, str):
            test = {"assert": test + (f"\ncheck({entry_point})" if entry_point else "")}
        keys = {k for k, v in test.items() if v is not None} if isinstance(test, dict) else set()
        typed = all(isinstance(test[k], (list, tuple) if k == "args" else str) for k in keys - {"out"})
        if not typed or keys not in ({"stdin", "stdout"}, {"fn", "args", "out"}, {"fn", "args"}, {"assert"}):
            raise ValueError(f"test {i} is not one of {{\"stdin\", \"stdout\"}}, {{\"fn\", \"args\": [...], \"out\"}}, "
                             "{\"assert\": \"assert ...\"}")
        if "assert" in keys:
            try:
                tree = ast.parse(test["assert"])
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"test {i} is not Python: {error}") from None
            if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
                raise ValueError(f"test {i} asserts nothing, so it would always pass")
        checked.append({k: test.get(k) for k in (keys | {"out"} if "fn" in keys else keys)})
    return tuple(checked)


# ---- grading ----------------------------------------------------------------------------------------------------


def grade(response, problem, timeout=10.0, partial=False):
    """What a response is worth, in [0, 1]. timeout, partial: for code, see `run_tests`."""
    if problem.kind == "chain":
        return grade_chain(response, problem.answer)
    if problem.kind == "countdown":
        return grade_countdown(response, problem.answer, problem.numbers)
    if problem.kind == "code":
        code = extract_code(response)
        return 0.0 if code is None else run_tests(code, problem.tests, timeout, partial)
    return grade_math(response, problem.answer)


def grade_all(responses, problems, timeout=10.0, partial=False, workers=None, progress=False):
    """`grade` of every pair, in their order whatever the timing; `workers` at once (default: the CPUs, 16 at most).

    The threads here only wait; what computes is the math workers and the jails.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm
    responses, problems = list(responses), list(problems)
    if len(responses) != len(problems):
        raise ValueError(f"{len(responses)} responses to {len(problems)} problems")
    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 16)) as pool:
        rewards = pool.map(lambda pair: grade(*pair, timeout, partial), zip(responses, problems))
        return list(tqdm(rewards, total=len(problems), desc="grading", leave=False, disable=not progress))


def grade_chain(response, answer):
    """Share of the results after the last '#' that are right; anything but one result per question scores 0."""
    given = response.rpartition("#")[2].strip().removesuffix(".") if "#" in response else ""
    if len(given) != len(answer):
        return 0.0
    starts = range(0, len(answer), 2)
    return sum(given[i:i + 2] == answer[i:i + 2] for i in starts) / len(starts)


def grade_countdown(response, target, numbers):
    """1.0 if the final answer is an expression over `numbers`, each used at most once, that equals target; else 0.0."""
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


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _arithmetic(node, used):
    """Value of a parsed expression of whole numbers and + - * /; collects the numbers. Nothing is executed."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_arithmetic(node.left, used), _arithmetic(node.right, used))
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
    text = response.strip()
    found = re.findall(r"####\s*(.*)", response) or re.findall(r"(?i:answer)\s*:\s*(.*)", response)
    if found:
        text = found[-1] if len(found[-1].strip()) <= 60 else found[-1].split()[0]
    elif len(text) > 100 or "\n" in text:
        return None
    return text.lstrip("*_` \t").rstrip("*_` \t.\r") or None


def extract_code(response):
    """The last closed ```python block, else the last closed block of any kind; None if there is none.

    An unclosed block was cut off, and is none. A response without any fence is code itself if it parses as Python.
    """
    response = response.replace("\r\n", "\n")
    blocks = re.findall(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```[ \t]*$", response, re.MULTILINE | re.DOTALL)
    if blocks:
        python = [block for block in blocks if block[0].strip().lower() in ("python", "python3", "py")]
        return textwrap.dedent((python or blocks)[-1][1])
    try:
        return response if "```" not in response and ast.parse(response).body else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# ---- math -------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"[-+]?\d{1,1000}(\.\d{1,1000}|/0*[1-9]\d{0,999})?")
MATH_SECONDS = 5.0
_idle = []  # math workers between questions; append and pop are atomic. They end when we do, with their socket


def grade_math(response, answer):
    """1.0 if the final answer of `response` equals `answer`, else 0.0. Exact: no rounding, no tolerance.

    Tuples and intervals are compared item by item, with their brackets; sets, lists ("1, 2", "1 or 2", the two values
    of \\pm) and unions without regard to order; matrices entry by entry; single values are read by math-verify, with
    every decimal made a fraction first, and compared by sympy, for math-verify's own comparison rounds (to it 1/2004!
    and 1/2006! are equal). "x = 5" is 5. And:

      units    a unit (in \\text{}, a common one in plain words, degrees, \\$, the base of a numeral) may be missing on
               one side; two different ones are unequal: 5 cm is 5 and 5\\text{ cm}, but not 5 m. Nothing is converted.
      percent  the sign may be missing on one side, as a unit, or be worked out: 50% is 50 and 1/2. 50% is not 0.5%.
      words    answers of words must be the same words: case, \\text{} and (A) for A aside.
      lists    of guesses never equal one value, whatever they contain.
    """
    given = extract_answer(response)
    if given is None or len(given) > 1000:
        return 0.0
    given, gold = (_plain(x) for x in (given, extract_answer(answer) or answer))
    if given == gold:
        return 1.0
    if not given or "$" in given or re.search(r"\d\s+\d", given):  # several answers at once
        return 0.0
    if NUMBER.fullmatch(given) and NUMBER.fullmatch(gold):  # no need to ask a worker
        return float(Fraction(given) == Fraction(gold))
    return float(_ask_math(gold, given))


def _plain(text):
    """One way of writing: no dollars, spacing commands or thousands separators; 2 2/3 and 2\\frac{2}{3} become 8/3."""
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[!,$]", "", text)
    for old, new in ((r"\\[dt]frac", r"\\frac"), (r"\{,\}", ","), ("\u2212", "-"), ("\u00b1", r"\\pm "),
                     (r"~|(?<!\\)\\[; ]", " "), (r"\\langle", "("), (r"\\rangle", ")")):
        text = re.sub(old, new, text)
    text = text.strip("$ \n").removesuffix(".")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    fraction = re.sub(r"(?<=\d)\s*\\frac\{(\d{1,9})\}\{(\d{1,9})\}$", r" \1/\2", text)
    if mixed := re.fullmatch(r"(-?)(\d{1,9})\s+(\d{1,9})/(\d{1,9})", fraction):
        whole, top, bottom = map(int, mixed.groups()[1:])
        return f"{mixed[1]}{whole * bottom + top}/{bottom}"
    return text


def equal(gold, given):
    """Are two answers the same? For a worker: what is written here can take for ever."""
    gold, given = (_plain(re.sub(r"\\(?:text|mathrm)\{\s*(or|and)\s*\}|\s(or|and)\s", ",", x)) for x in (gold, given))
    (gold, unit), (given, unit2) = _split_unit(gold), _split_unit(given)
    if unit and unit2 and unit != unit2:
        return False
    if gold == given:
        return True
    if {unit, unit2} == {"%", ""}:
        percent, bare = (gold, given) if unit else (given, gold)
        if equal(f"\\frac{{{percent}}}{{100}}", bare):
            return True
    (shape, items), (shape2, items2) = _parts(gold), _parts(given)
    if shape != shape2 or len(items) != len(items2):
        return False
    if shape == "value":
        return _equal_values(*items, *items2)
    if shape != "any order":
        return all(map(equal, items, items2))
    for item in items:
        if not (found := next((x for x in items2 if equal(item, x)), None)):
            return False
        items2.remove(found)
    return True


UNITS = ("mm|cm|dm|km|in|ft|feet|foot|inch(?:es)?|yards?|miles?|met(?:er|re)s?|kg|grams?|lbs?|pounds?|ounces?|oz|ml|"
         "lit(?:er|re)s?|seconds?|sec|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|dollars?|cents?|euros?|"
         "degrees?|radians?|units?|mph|percent|people|points?")
UNIT = re.compile(r"(.*[\d)}\]])\s*"
                  r"(?:\\(?:text|mathrm|textrm|mbox)\{\s*([A-Za-z /.^-]*)\}"
                  rf"|((?:square |cubic |sq )?\b(?:{UNITS})(?:(?:/| per )(?:{UNITS}|s|h|m))?)"
                  r"|\^\{?(\\circ)\}?|(\u00b0)|\\?(%)|_\{?(\d+)\}?)(\^\{?-?\d\}?)?")


def _split_unit(text):
    """"5 \\text{ cm}^2" -> ("5", "cm2"); no unit: (text, "")."""
    match = UNIT.fullmatch(text.replace("\\circ C", "\\circ").replace("\\circ F", "\\circ"))
    if not match or re.search(r"\b(or|and)\b", match[2] or ""):  # 5 or 6 is not 5 of a unit
        return text, ""
    unit = re.sub(r"[ {}^.]", "", "".join(filter(None, match.groups()[1:])).lower())
    unit = {"\\circ": "degree", "\u00b0": "degree", "inches": "inch", "percent": "%"}.get(unit, unit)
    return match[1].strip(), unit.removesuffix("s") if len(unit) > 2 else unit


def _parts(text):
    """How an answer is built: (shape, items). A shape is "value" (one item), "any order" or ordering brackets."""
    text = re.sub(r"^[a-zA-Z]\s*\\in(?![a-z])", "", text).strip()
    if match := re.fullmatch(r"\\begin\{([pb]?matrix|array)\}(?:\{[^}]*\})?(.*)\\end\{\1\}", text, re.DOTALL):
        rows = [row.split("&") for row in match[2].strip().removesuffix("\\\\").split("\\\\")]
        return f"matrix {[len(row) for row in rows]}", [x.strip() for row in rows for x in row]
    if text.count("\\pm") == 1 and "," not in text:
        return "any order", [text.replace("\\pm", "+"), text.replace("\\pm", "-")]
    for separator in ("\\cup", ","):
        if len(items := _split(text, separator)) > 1:
            return "any order", items
    bare = text.replace("\\{", "{").replace("\\}", "}")
    if bare and bare[0] + bare[-1] in ("()", "[]", "(]", "[)", "{}") and len(items := _split(bare[1:-1], ",")) > 1:
        return ("any order" if bare[0] == "{" else bare[0] + bare[-1]), items
    if text.startswith("\\{") and text.endswith("\\}"):  # a set of one
        return "value", [text[2:-2]]
    return "value", [text]


def _split(text, separator):
    """At the separators outside all brackets; [text] also when a bracket closes that was never open."""
    items, depth = [""], 0
    for token in re.findall(rf"{re.escape(separator)}|.", text, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        if depth < 0:
            return [text]
        if token == separator and depth == 0:
            items.append("")
        else:
            items[-1] += token
    return [item.strip() for item in items]


def _equal_values(gold, given):
    gold, given = (re.sub(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r"\1", x).strip() for x in (gold, given))
    gold, given = (re.sub(r"^\(([A-Za-z])\)$", r"\1", x) for x in (gold, given))
    if gold.lower() == given.lower() and (gold == given or _words(gold)):
        return True
    if _words(gold) != _words(given):  # math-verify reads a word as a product of letters
        return False
    if len(sides := {"=" in re.sub(r"[<>!]=", "", x) for x in (gold, given)}) == 2 and True in sides:
        gold, given = (x.rpartition("=")[2].strip() for x in (gold, given))  # x = 5 is 5
    a, b = _parse(gold), _parse(given)
    return a is not None and b is not None and _same(a, b)


def _words(text):
    functions = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "gcd", "lcm"}
    return set(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text.lower())) - functions


def _parse(text):
    """math-verify's reading of a value, decimals as fractions; None if it has none."""
    from math_verify import parse

    def fraction(match):  # 0.5 or 0.1\overline{6}
        head, digits, cycle = match[1] or "0", match[2], match[3] or ""
        top = int(head + digits + cycle) - (int(head + digits) if cycle else 0)
        return f"\\frac{{{top}}}{{{10**len(digits) * (10**len(cycle) - 1 if cycle else 1)}}}"
    text = re.sub(r"(?<=\d)[eE]([-+]?\d{1,3})\b", r"\\times10^{\1}", text)
    text = re.sub(r"(?<![\d.])(\d*)\.(?=\d|\\over)(\d*)(?:\\overline\{(\d+)\})?", fraction, text)
    found = parse(f"${text}$", parsing_timeout=None)
    return found[0] if found and not isinstance(found[0], str) else None


def _same(a, b):
    """Two of sympy's objects: values by their difference, relations by the ratio of theirs."""
    from sympy import And, Expr, Rel, nan, zoo
    if isinstance(a, Expr) and isinstance(b, Expr):
        return a not in (nan, zoo) and bool(a == b or (a - b).doit().equals(0))
    if isinstance(a, Rel) and isinstance(b, Rel):
        b = b if a.rel_op == b.rel_op else b.reversed
        ratio = ((a.lhs - a.rhs) / (b.lhs - b.rhs)).simplify()
        return a.rel_op == b.rel_op and bool(ratio.is_positive or ratio.is_negative and a.rel_op in ("==", "!="))
    if isinstance(a, And) and isinstance(b, And):  # 1 < x < 3
        return len(a.args) == len(b.args) and all(any(_same(x, y) for y in b.args) for x in a.args)
    return a == b


# ---- processes that can be killed -------------------------------------------------------------------------------

LINE = 1 << 25     # bytes of one answer, at most


class _Process:
    """A child that answers a line with a line, in time or not at all; the first answer, to nothing, is "ready"."""
    def __init__(self, command, **how):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
                                          start_new_session=True, **how)
        if self.ask("", 60) != "ready":
            self.stop()
            raise RuntimeError(f"did not start: {' '.join(command)} (a math worker needs: pip install math-verify)")

    def ask(self, line, seconds):
        """Send a line, wait for one -> str; None if it is late or too long, or the child has ended."""
        end, got = time.monotonic() + seconds, bytearray()
        try:
            self.socket.settimeout(max(seconds, 0))
            self.socket.sendall(line.encode() + b"\n")
            while not got.endswith(b"\n"):
                self.socket.settimeout(max(end - time.monotonic(), 0))
                chunk = self.socket.recv(1 << 20)
                got += chunk
                if not chunk or len(got) > LINE:
                    return None
        except OSError:  # late, or it has ended
            return None
        return got.partition(b"\n")[0].decode(errors="replace")

    def stop(self):
        """End it and its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self.socket.close()


def _ask_math(gold, given):
    """`equal`, by a worker: started when needed, kept, asked by one thread at a time, replaced when it hangs.

    sympy can be made to compute for years or to fill the memory by a short string, and its own time limit needs a main
    thread. A process of ours with a limit on memory, and a wait with a limit on time, needs neither.
    """
    end = time.monotonic() + MATH_SECONDS
    while (left := end - time.monotonic()) > 0:  # one that somebody has ended is replaced
        try:
            worker = _idle.pop()
        except IndexError:
            worker = _Process([sys.executable, __file__, "--math-worker"])
        if answer := worker.ask(json.dumps([gold, given]), left):
            _idle.append(worker)
            return answer == "1"
        worker.stop()
    return False


def _serve_math():
    """The worker's side: lines of [gold, given] in, "1" or "0" out."""
    import warnings
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    warnings.simplefilter("ignore")
    import math_verify, sympy  # noqa: loaded before the first question's time runs
    sys.stdin.readline()
    print("ready", flush=True)
    for line in sys.stdin:
        # An orphan whose parent was killed must not compute on: CPU seconds are rationed question by question.
        used = resource.getrusage(resource.RUSAGE_SELF)
        ration = int(used.ru_utime + used.ru_stime + 2 * MATH_SECONDS + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (ration, resource.RLIM_INFINITY))
        try:
            same = equal(*json.loads(line))
        except Exception:  # whatever sympy makes of nonsense, the answer is not the right one
            same = False
        print(int(same), flush=True)


# ---- code: our side, which knows what is right --------------------------------------------------------------------

MEMORY, OUTPUT, PROCESSES = 1 << 30, 1 << 20, 32  # bytes a process, bytes of output or of one file, processes of a jail


def run_tests(code, tests, timeout=10.0, partial=False):
    """Run a program against tests, in a sandbox -> 1.0 if it passes all of them, else 0.0; partial: the share passed.

    Each test is {"stdin", "stdout"}: the program's output must be that, blanks at the ends of lines aside;
    {"fn", "args", "out"}: a function, or a method of `Solution`, must return that (tuples count as lists); or
    {"assert"}: test code that must run through. timeout: seconds for all tests together, starting the sandbox aside.

    The process that runs the program never holds what makes a pass. It is given input or arguments, and says what came
    out. Outputs are compared here; test code runs in a jail of its own, where functions that it uses but does not
    define are calls to the program's process, plain data going over. So exit codes, hooks, patched builtins, __eq__ and
    looks into memory or stack frames meet nothing. Verdicts bear a token drawn for the run. Linux only.

    Held off, where the kernel allows namespaces: the network, other processes, every file but Python's and the system's
    own (read-only), more than 64 MB of temporary space; else what bubblewrap or firejail, if installed, hold off.
    Everywhere: limits on time, memory, file size, output and processes; no stdin, a clean environment, no privileges (root
    becomes a user of its own); and the whole group is killed at the end, and what left it.

    Not held off: a fault in the kernel; load (memory is limited by the process, not by the jail); test code that leaves
    its judgement to a helper it does not define. Without namespaces also: files that the user may read (the tests'
    too), the network, attacks on other processes of the user, and descendants that leave the group and wipe their
    environment: run there only what you would run yourself. Not supported in test code: objects of the program's
    classes, functions as arguments, arguments changed in place.
    """
    passed = 0
    with closing(_verdicts(code, tests, timeout)) as verdicts:
        for right in itertools.islice(verdicts, len(tests)):
            passed += right
            if not (right or partial):
                break
    return passed / max(len(tests), 1) if partial else float(0 < len(tests) == passed)


def _verdicts(code, tests, timeout):
    """Whether the program passes, test by test, those on its output first; it ends early when time has run out."""
    programs, others = ([test for test in tests if ("stdout" in test) == side] for side in (True, False))
    with ExitStack() as jails:
        program, tester = (jails.enter_context(_jail(timeout)) if some else None for some in (tests, others))
        end = time.monotonic() + timeout
        for test in programs:
            line = program.ask(json.dumps({"code": code, "stdin": test["stdin"]}), end - time.monotonic())
            if line is None:
                return
            reply = _fields(line)
            yield reply.get("ok") is True and _lines(reply.get("stdout")) == _lines(test["stdout"])
        if not others or program.ask(json.dumps({"code": code}), end - time.monotonic()) is None:
            return
        token = os.urandom(16).hex()
        line = json.dumps({"token": token, "tests": others})
        while line is not None and (line := tester.ask(line, end - time.monotonic())) is not None:
            message = _fields(line)
            if message.get("token") == token:
                yield message.get("passed") is True
                line = "{}"
            else:
                line = program.ask(line, end - time.monotonic())


def _fields(line):
    """What a jail has said, which may be anything, as a dictionary."""
    try:
        found = json.loads(line or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(text):
    return [line.rstrip() for line in str(text).rstrip().split("\n")]


@contextmanager
def _jail(seconds, fence=None):
    """A process locked in, that waits for a line."""
    fence, jail, folder = fence or _fence(), None, tempfile.mkdtemp(prefix="verify-")
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
           "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)), "JAIL": folder}
    command = [sys.executable, "-sBm", "verify", "--jail", fence, str(int(seconds) + 2)]
    try:
        jail = _Process([*_through(fence, folder), *command], cwd=folder, env=env)
        yield jail
    finally:
        if jail:
            jail.stop()
        if fence == "plain":
            _kill_marked(f"JAIL={folder}\0".encode())
        shutil.rmtree(folder, ignore_errors=True)


def _through(fence, folder):
    """The command that a jail is started by."""
    if fence == "namespaces":  # root needs no user namespace, and without one can become a user of its own
        user = ["--user", "--map-root-user"] if os.getuid() else []
        return ["unshare", *user, "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]
    if fence == "bwrap":
        binds = [x for path in (*_readable(), os.path.abspath(__file__)) for x in ("--ro-bind", path, path)]
        return ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev",
                "--tmpfs", "/tmp", *binds, "--bind", folder, folder, "--chdir", folder]
    if fence == "firejail":
        return ["firejail", "--quiet", "--noprofile", "--net=none", "--caps.drop=all", "--nonewprivs", "--read-only=/",
                f"--read-write={folder}"]
    return []


def _readable():
    """What a program may read: Python and the system's libraries."""
    paths = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", sys.base_prefix, sys.prefix]
    return [path for path in dict.fromkeys(paths + [*map(os.path.realpath, paths)]) if os.path.exists(path)]


def _kill_marked(mark, seconds=1.0):
    """End what has left its group: it still has its jail's environment."""
    found, end = True, time.monotonic() + seconds
    while found and time.monotonic() < end:
        found = False
        for path in glob.glob("/proc/[0-9]*/environ"):
            with suppress(OSError):  # ended, or not ours
                if mark in Path(path).read_bytes():
                    os.kill(int(path.split("/")[2]), signal.SIGKILL)
                    found = True


@functools.cache
def _fence():
    """The strongest fence that works on this machine."""
    for fence in ("namespaces", "bwrap", "firejail", "plain"):
        try:
            with _jail(10, fence) as jail:
                reply = jail.ask('{"code": "import colorsys; print(6 * 7)", "stdin": ""}', 10)
        except (OSError, RuntimeError):
            continue
        if _fields(reply).get("stdout") == "42\n":
            if fence == "plain":
                print("verify.py: neither namespaces nor bubblewrap nor firejail work here, so generated code can reach "
                      "files and the network (see verify.run_tests)", file=sys.stderr)
            return fence
    raise RuntimeError(f"no sandbox for generated code works here. If you are root, other users must be able to run "
                       f"{sys.executable}: run as an ordinary user, or install bubblewrap")


# ---- code: the jail's side ----------------------------------------------------------------------------------------


def _serve_jail(fence, seconds):
    """Lock ourselves in; then a line with "stdin" runs the program on that, a line without becomes the program, or the
    test code, that goes on talking. In their processes this returns, and Python ends."""
    del sys.path[:2]  # the current folder and ours
    sys.stdin.buffer.readline()
    _lock_in(fence, seconds, os.environ["JAIL"])
    print("ready", flush=True)
    gc.freeze()  # a child that ends need not look through what it got from us: half of its time
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        with open(os.memfd_create("in"), "w+b") as stdin, open(os.memfd_create("out"), "rb") as stdout:
            stdin.write(request.get("stdin", "").encode())
            stdin.seek(0)
            if not (child := os.fork()):
                return _become(request, stdin, stdout)
            ok = _wait(child, seconds) == 0
            if os.getpid() == 1:  # of a process namespace: nothing of one test runs on into the next
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            if "stdin" not in request:
                break
            stdout.seek(0)
            print(json.dumps({"ok": ok, "stdout": stdout.read(OUTPUT).decode(errors="replace")}), flush=True)
    os._exit(0)


def _lock_in(fence, seconds, folder):
    """Give up files, rights and resources, for this process and all that come from it."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this goes first
    others = len(glob.glob("/proc/[0-9]*/task/*")) if os.getuid() else 0  # the limit counts the user's other threads
    if fence == "namespaces":
        _new_root(folder)
        folder = "/tmp"
    os.chmod(folder, 0o1777)
    os.chdir(folder)
    for name, limit in (("CPU", seconds), ("AS", MEMORY), ("CORE", 0), ("NOFILE", 128), ("NPROC", others + PROCESSES)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    if os.getuid() == 0:  # the limit on processes does not hold for root. A user of its own, so that no others count
        for uid in (random.randrange(2**30, 2**31), 65534):
            with suppress(OSError):  # a container may not have so many; in a user namespace of ours nobody else counts
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                break
    _libc("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # no capabilities
    _libc("prctl", 38, 1, 0, 0, 0)     # PR_SET_NO_NEW_PRIVS
    _libc("prctl", 4, 0)               # PR_SET_DUMPABLE: a program of the same user cannot look into us


def _new_root(folder):
    """An empty file system with Python and the system's libraries in it, read-only, and a /tmp."""
    def mount(source, target, kind, flags, data=None):
        _libc("mount", source.encode(), target.encode(), kind, flags, data)
    os.umask(0o022)
    mount("tmpfs", folder, b"tmpfs", 6, b"size=64m,mode=755")           # MS_NOSUID | MS_NODEV
    for path in (*_readable(), *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))):
        target = folder + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif not os.path.exists(target):
            os.mkdir(target) if os.path.isdir(path) else Path(target).touch()
            mount(path, target, None, 0x5000)                           # MS_BIND | MS_REC
            if not path.startswith("/dev"):                             # mount_setattr: all of it read-only, no setuid
                _libc("syscall", 442, -100, target.encode(), 0x8000, (ctypes.c_uint64 * 4)(3), 32)
    for name, path in (("fd", ""), ("stdin", "/0"), ("stdout", "/1")):
        os.symlink("/proc/self/fd" + path, f"{folder}/dev/{name}")
    for name in ("proc", "tmp"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    with suppress(OSError):  # not allowed in some containers, and seldom needed
        mount("proc", folder + "/proc", b"proc", 14)                    # MS_NOSUID | MS_NODEV | MS_NOEXEC
    os.chroot(folder)


def _libc(name, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(ctypes.c_ulong(x) if isinstance(x, int) else x for x in args)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _wait(child, seconds):
    """The child's exit status. If it takes too long, or whoever started us has gone, this jail ends."""
    watch = select.poll()
    watch.register(0, 0)  # hang-up only
    watch.register(os.pidfd_open(child), select.POLLIN)
    events = dict(watch.poll(seconds * 1000))
    if not events or 0 in events:
        os.killpg(0, signal.SIGKILL)
        os._exit(1)  # the first process of a namespace does not die of its own signals
    return os.waitpid(child, 0)[1]


def _become(request, stdin, stdout):
    """Run what is not ours, with input and output of its own."""
    channel = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")

    def talk(message):
        channel[1].write(json.dumps(message) + "\n")
        channel[1].flush()
        return json.loads(channel[0].readline(), object_hook=_unpack)
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT, OUTPUT))
    for i, file in enumerate((stdin, stdout, open("/dev/null", "wb"))):
        os.dup2(file.fileno(), i)
        file.close()
    sys.stdin, sys.stdout, sys.stderr = (open(i, mode, closefd=False) for i, mode in enumerate("rww"))
    if "tests" in request:
        return _serve_tests(request["tests"], request["token"], talk)
    _libc("prctl", 4, 1)  # PR_SET_DUMPABLE: /dev/stdin can be opened
    name = "solution"
    if "stdin" in request:
        name = "__main__"
        os.closerange(3, 128)
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(request["code"], "solution.py", "exec"), module.__dict__)
    if "stdin" not in request:
        _serve_calls(module.__dict__, talk)


def _serve_calls(names, talk):
    """The program's side of test code: answer calls for ever."""
    reply = {}
    while True:
        request = talk(reply)
        try:
            name = request["call"]
            function = names[name] if name in names else getattr(names["Solution"](), name)
            reply = {"value": _pack(function(*request["args"], **request["kwargs"]))}
        except Exception as error:
            reply = {"raise": type(error).__name__, "text": str(error)[:1000]}


def _serve_tests(tests, token, talk):
    """The test code's side: run every test, calling over to the program."""
    for test in tests:
        try:
            if "fn" in test:  # compared as JSON, where expected values come from: lists, and text as keys
                passed = json.loads(json.dumps(_call(talk, test["fn"], *test["args"]))) == test["out"]
            else:
                exec(compile(test["assert"], "test", "exec"), _names_for(test["assert"], talk))
                passed = True
        except BaseException:  # sys.exit() in a test is no pass either
            passed = False
        talk({"token": token, "passed": passed})


def _names_for(test, talk):
    """What test code finds defined: modules of the library, where it only takes their attributes; any other name that
    it does not set itself, and that is no builtin, is a function of the program."""
    nodes = list(ast.walk(ast.parse(test)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - set(dir(builtins))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    modules = (names & sys.stdlib_module_names) - called
    of_program = {name: functools.partial(_call, talk, name) for name in names - modules}
    return {"__name__": "test"} | of_program | {name: __import__(name) for name in modules}


def _call(talk, name, /, *args, **kwargs):
    """Call a function of the program from the test code's process. Its exceptions arrive as builtin ones."""
    reply = talk({"call": name, "args": _pack(args), "kwargs": _pack(kwargs)})
    if "raise" in reply:
        error = getattr(builtins, reply["raise"], None)
        raise (error if isinstance(error, type) and issubclass(error, Exception) else Exception)(reply["text"])
    return reply["value"]


def _pack(x):
    """Plain data as JSON that keeps tuples, sets and keys apart; what else can be iterated becomes a list."""
    for kind in (bool, int, float, str):
        if isinstance(x, kind):
            return kind(x)
    if isinstance(x, dict):
        return {"dict": [[_pack(k), _pack(v)] for k, v in x.items()]}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    for kind in (tuple, set, frozenset, bytes):
        if isinstance(x, kind):
            return {kind.__name__: [_pack(y) for y in x]}
    if hasattr(x, "tolist"):  # numpy
        return _pack(x.tolist())
    return None if x is None else [_pack(y) for y in itertools.islice(x, 10**6)]


def _unpack(found):
    """For json.loads, object by object: what `_pack` has named becomes itself again."""
    kinds = dict(tuple=tuple, set=set, frozenset=frozenset, bytes=bytes, dict=dict, complex=lambda xy: complex(*xy))
    name = next(iter(found), None)
    return kinds[name](found[name]) if name in kinds else found


# ---- evaluation -------------------------------------------------------------------------------------------------


def pass_at_k(n, c, k):
    """Unbiased chance that at least one of k samples is right, given c right among n (Chen et al., 2021, Eq. 1)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def read_responses(path):
    """A JSONL file of problems with a "response" or "responses" each -> (problems, their lists of responses)."""
    problems, responses = [], []
    for where, row in _rows(path):
        problems.append(_read_problem(row, where))
        texts = row.get("responses", [row["response"]] if "response" in row else None)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: no \"response\" (text) or \"responses\" (a list of texts)")
        responses.append(texts)
    if not problems:
        raise ValueError(f"{path} holds no responses")
    return problems, responses


def sample(args, problems):
    """Responses of a checkpoint -> (lists of texts, a problem each; lists of lengths; facts for the report).

    Of a sparse actor the facts also say how far it was from the dense policy on its own samples, and what it read."""
    import torch
    from sparrow import Actor, Schedule, encode_prompt, load_with_tokenizer, rollout_alpha, tail
    model = load_with_tokenizer(args.model)
    prompts = [encode_prompt(model.tokenizer, p.prompt, args.chat) for p in problems]
    context = max(map(len, prompts)) + args.max_new_tokens
    schedule = Schedule.asked(args, context)
    actor = Actor(model, min(args.rows, len(prompts) * args.n), context, page_size=args.page_size,
                  dense_layers=args.dense_layers)
    start = time.perf_counter()
    rollouts = actor.generate(prompts, args.n, args.max_new_tokens, args.temperature, schedule, model.stop_ids,
                              args.seed, progress=True)
    seconds, lengths = time.perf_counter() - start, [len(r.ids) for r in rollouts]
    facts = dict(mean_length=sum(lengths) / len(lengths), tokens_per_s=sum(lengths) / seconds, generate_s=seconds,
                 cut_off=sum(r.finish == "length" for r in rollouts) / len(rollouts))
    if not schedule.dense:
        alpha = torch.cat([rollout_alpha(model, r, args.temperature or 1.0) for r in rollouts])
        facts |= dict(kv_read=schedule.share_read(rollouts), alpha_mean=alpha.mean().item(), alpha_tail_5=tail(alpha),
                      alpha_tail_1=tail(alpha, fraction=0.01))
    texts = [model.tokenizer.decode(r.ids, skip_special_tokens=problems[i // args.n].kind != "chain")
             for i, r in enumerate(rollouts)]
    by_problem = [slice(i, i + args.n) for i in range(0, len(texts), args.n)]
    return [texts[i] for i in by_problem], [lengths[i] for i in by_problem], facts


def summarise(rewards, ks):
    """Lists of rewards, a problem each -> mean@n and pass@k over the problems. Only a whole reward of 1 is a pass."""
    means = [sum(r) / len(r) for r in rewards]
    out = dict(problems=len(rewards), samples=sum(map(len, rewards)), mean=sum(means) / len(means))
    for k in ks:
        out[f"pass@{k}"] = sum(pass_at_k(len(r), sum(x == 1 for x in r), k) for r in rewards) / len(rewards)
    return out


def report(m, n):
    """What a person reads."""
    print(f"{m['problems']} problems, {m['samples']} samples: mean@{n} {m['mean']:.4f}"
          + "".join(f" | {k} {v:.4f}" for k, v in m.items() if k.startswith("pass@"))
          + (f" | no final answer found in {m['no_answer']:.1%} of the math responses" if m.get("no_answer") else ""))
    if "mean_length" in m:
        print(f"response length {m['mean_length']:.1f} tokens on average, {m['cut_off']:.1%} cut off | generated in "
              f"{m['generate_s']:.1f} s ({m['tokens_per_s']:,.0f} tokens/s), graded in {m['grade_s']:.1f} s")
    if "kv_read" in m:
        print(f"sparse: read {m['kv_read']:.1%} of the cached pages; alpha against the dense policy: mean "
              f"{m['alpha_mean']:.4f}, 5% quantile {m['alpha_tail_5']:.3f}, 1% quantile {m['alpha_tail_1']:.3f}")


# ---- python verify.py -------------------------------------------------------------------------------------------


def check_flags(args, parser, positive, not_negative):
    """End with a message at a value that no command takes: nan, infinity, a number that over- or underflows, empty text; or
    that these flags (keys of args, with spaces between) do not."""
    for key, given in vars(args).items():
        flag = f"--{key.replace('_', '-')}"
        for x in given if isinstance(given, list) and given else [given]:
            if x in ("", []):  # argparse reads "--flag=--" as no value at all
                parser.error(f"{flag}: a value is missing")
            if isinstance(x, float) and x and not 1e-38 < abs(x) < 1e38:
                parser.error(f"{flag} {x}: must be finite, also in single precision")
            if isinstance(x, int) and abs(x) >= (2**63 if key == "seed" else 2**31):
                parser.error(f"{flag} {x}: too large")
            if x is not None and (key in positive.split() and x <= 0 or key in not_negative.split() and x < 0):
                parser.error(f"{flag} {x}: must {'be above 0' if key in positive.split() else 'not be negative'}")


def parse_args(argv=None):
    import argparse
    p = argparse.ArgumentParser(prog="verify.py", allow_abbrev=False, description=main.__doc__)
    flag = p.add_argument
    flag("--model", help="checkpoint folder or Hub name")
    flag("--task", help="procedural problems: chain or countdown, or with sizes, as in countdown:3,20")
    flag("--data", help="problems from a JSONL file, or hub:NAME[,CONFIG][:SPLIT]")
    flag("--grade", metavar="FILE", help="no model: grade the responses in this JSONL file")
    flag("--limit", type=int, default=0, help="only the first problems; 0: a whole file, or 200 of a task (default 0)")
    # sampling
    flag("--n", type=int, default=16, help="samples a problem (default 16)")
    flag("--max-new-tokens", type=int, default=1024, help="longest response (default 1024)")
    flag("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    flag("--seed", type=int, default=0, help="seeds samples, and the problems of a task (default 0)")
    flag("--chat", default="auto", choices=["auto", "on", "off"], help="the tokenizer's chat template (default auto)")
    flag("--rows", type=int, default=64, help="sequences decoded at once (default 64)")
    # sparsity
    flag("--budget", type=float, default=1.0, help="share of the cached pages read, in (0, 1] (default 1: dense)")
    flag("--schedule", help="a published table or a schedule file instead of --budget")
    flag("--min-pages", type=int, default=4, help="floor of --budget (default 4)")
    flag("--page-size", type=int, default=16, help="tokens in a KV page (default 16)")
    flag("--dense-layers", type=int, default=2, help="first layers that stay dense (default 2)")
    # grading and output
    flag("--k", type=int, nargs="+", help="the k of pass@k (default: 1, 4 and 16, up to the samples there are)")
    flag("--timeout", type=float, default=10.0, help="seconds for all tests of one program (default 10)")
    flag("--partial", action="store_true", help="a program is worth the share of tests passed, not all or nothing")
    flag("--json", metavar="FILE", help="write the report there, as one JSON object")
    flag("--save", metavar="FILE", help="write the samples there, as JSONL that --grade reads")
    args = p.parse_args(argv)
    args.parser = p
    if bool(args.grade) == bool(args.model):
        p.error("give either --model (to evaluate it) or --grade FILE (of responses)")
    if args.model and bool(args.task) == bool(args.data):
        p.error("--model: say on what, by either --task or --data")
    if args.grade and (args.task or args.data):
        p.error("--grade: its rows hold the problems; leave out --task and --data")
    check_flags(args, p, "n max_new_tokens rows page_size timeout k", "limit temperature min_pages dense_layers")
    files = [os.path.realpath(path) for path in (args.json, args.save, args.grade, args.data) if path]
    if twice := [path for path in files if files.count(path) > 1]:
        p.error(f"--json or --save {twice[0]}: another flag's file too, which would be overwritten")
    if not 0 < args.budget <= 1:
        p.error(f"--budget {args.budget}: must be in (0, 1]; 1 is dense")
    return args


def main(argv=None):
    """Evaluate a checkpoint, or grade responses."""
    args = parse_args(argv)
    try:
        # 1. problems and responses
        if args.grade:
            problems, responses = read_responses(args.grade)
        elif args.task and not parse_task(args.task):
            raise ValueError(f"--task {args.task}: not one of {', '.join(TASKS)}")
        else:
            problems = load_problems(args.task or args.data, args.seed, args.limit or 200)
        n = min(map(len, responses)) if args.grade else args.n
        if bad := [k for k in args.k or () if not 1 <= k <= n]:
            raise ValueError(f"--k {bad[0]}: pass@k needs 1 <= k <= {n}, the samples a problem")
        files = [open(path or os.devnull, "w") for path in (args.json, args.save)]  # before the work, not after it
        problems, facts, lengths = problems[:args.limit or None], {}, None
        if args.grade:
            responses = responses[:len(problems)]
        else:
            responses, lengths, facts = sample(args, problems)
    except (ValueError, OSError) as error:
        args.parser.error(str(error))
    # 2. rewards
    start = time.perf_counter()
    pairs = [(text, p) for p, texts in zip(problems, responses) for text in texts]
    flat = iter(grade_all(*zip(*pairs), args.timeout, args.partial, progress=True))
    rewards = [list(itertools.islice(flat, len(texts))) for texts in responses]
    # 3. what to know of them
    facts["grade_s"] = time.perf_counter() - start
    if answers := [extract_answer(text) for text, p in pairs if p.kind == "math"]:
        facts["no_answer"] = sum(not x for x in answers) / len(answers)
    m = summarise(rewards, args.k or [k for k in (1, 4, 16) if k <= n]) | facts
    report(m, n if len(set(map(len, responses))) == 1 else "n")
    try:
        if files[0]:
            files[0].write(json.dumps(m, indent=1) + "\n")
        for i, problem in enumerate(problems if files[1] else ()):
            row = {k: v for k, v in vars(problem).items() if v} | dict(responses=responses[i], rewards=rewards[i])
            files[1].write(json.dumps(row | ({"lengths": lengths[i]} if lengths else {})) + "\n")
        for file in filter(None, files):
            file.close()
    except OSError as error:
        sys.exit(f"verify.py: error: {' or '.join(filter(None, (args.json, args.save)))} cannot be written: {error}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--math-worker"]:
        _serve_math()
    elif sys.argv[1:2] == ["--jail"]:
        _serve_jail(sys.argv[2], int(sys.argv[3]))
    else:
        main()
