"""Generated code is hostile: what it tries must be worth nothing, end in time and leave nothing."""
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import verify
from verify import extract_code, grade, load_problems, run_tests

LIMIT = 1.5
ECHO = {"stdin": "42\n", "stdout": "42\n"}
ADD = {"fn": "add", "args": [2, 3], "out": 5}
try:
    FENCE = verify._fence()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)
fenced = pytest.mark.skipif(FENCE == "plain", reason="only namespaces hold this off")


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory):
    """Jails' folders are made here, so that those of other runs on this machine do not count."""
    folder = tmp_path_factory.mktemp("jails")
    folder.chmod(0o755)
    tempfile.tempdir = str(folder)
    yield
    tempfile.tempdir = None


def jail_processes():
    """Processes of our jails carry their folder's name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"JAIL={tempfile.tempdir}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def zombies():
    """Has a child of ours ended that nobody waited for?"""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def left_overs():
    end = time.monotonic() + 2  # the kernel takes a namespace apart after its first process has been waited for
    while (found := jail_processes()) and time.monotonic() < end:
        time.sleep(0.01)
    return found, zombies(), list(Path(tempfile.tempdir).glob("verify-*"))


def judge(code, tests, limit=LIMIT, **options):
    """run_tests, and: back in time, nothing left, nobody harmed."""
    start = time.monotonic()
    reward = run_tests(code, tests, limit, **options)
    assert time.monotonic() - start < limit + 1
    assert left_overs() == ([], False, [])
    return reward


FORGERIES = {
    "exit 0": "import sys; sys.exit(0)", "os._exit": "import os; os._exit(0)",
    "exit hook": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 6",
    "print patched": "import builtins\nbuiltins.print = lambda *a, **k: None",
    "test names": "passed = True; reward = 1.0; verdict = 'passed'; test = lambda *a: True\nprint('passed')",
    "True": "True",
    "equal to all":
        "class E:\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n def __hash__(s): return 5\n"
        " def __repr__(s): return '5'\ndef add(a, b): return E()\nprint(E())",
    "int that is equal":
        "class I(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\ndef add(a, b): return I(7)",
    "list that is equal": "class L(list):\n def __eq__(s, o): return True\ndef add(a, b): return L()",
    "assert removed":
        "import ast, builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
        "builtins.compile = lambda *a, **k: None\ndef add(a, b): return 6",
    "builtins patched":
        "import builtins, sys\nfor n in ('abs', 'len', 'sorted', 'isinstance', 'all', 'any', 'bool', 'int'):\n"
        " setattr(builtins, n, lambda *a, **k: True)\nabs = len = sorted = lambda *a: 5\ndef add(a, b): return 6",
    "raises SystemExit": "def add(a, b): raise SystemExit(0)",
    "raises nothing known": "def add(a, b): raise type('E', (Exception,), {})()",
    "harness's frames":
        "import sys\ndef add(a, b):\n f = sys._getframe()\n while f:\n"
        "  for k, v in list(f.f_locals.items()) + list(f.f_globals.items()):\n"
        "   if k in ('out', 'token', 'tests', 'passed', 'judged'): return v\n  f = f.f_back\nprint(add(1, 1))",
    "harness's memory":
        "import gc\ndef add(a, b):\n for o in gc.get_objects():\n"
        "  if isinstance(o, dict) and o.get('out'): return o['out']\nfor o in gc.get_objects():\n"
        " if isinstance(o, dict) and o.get('stdout') == '42': print(42)",
    "writes to all descriptors":
        "import os, json\nfor fd in range(128):\n"
        " for m in ({'token': '', 'passed': True}, {'ok': True, 'stdout': 'x'}):\n"
        "  try: os.write(fd, (json.dumps(m) + '\\n').encode() * 50)\n  except OSError: pass\ndef add(a, b): return 6",
    "json patched":
        "import json\njson.dumps = lambda *a, **k: '{\"passed\": true, \"ok\": true, \"token\": null}'\n"
        "def add(a, b): return 6",
    "looks at its peers":
        "import os\nfound = []\nfor p in os.listdir('/proc'):\n if p.isdigit():\n"
        "  for f in ('environ', 'mem', 'cmdline'):\n   try: found.append(open(f'/proc/{p}/{f}', 'rb').read(9))\n"
        "   except OSError: pass\ndef add(a, b): return found",
    "syntax error": "def add(a, b) return a + b", "null byte": "x = 1\0", "empty": "", "raises": "1 / 0",
    "lone surrogate": "print('\ud800')",
    "deep": "(" * 5000 + ")" * 5000,
    "recursion": "def add(a, b): return add(a, b)\nadd(1, 2)",
    "returns itself": "def add(a, b):\n x = []; x.append(x); return x",
    "endless iterator": "import itertools\ndef add(a, b): return itertools.count()",
    "huge number": "def add(a, b): return 10 ** 100000\nprint(9 ** 9 ** 6 % 7)",
    "nan": "def add(a, b): return float('nan')",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_pass_is_worth_nothing(name):
    """Faults: a verdict by exit status or output, comparisons by the program's objects, a token that can be found."""
    tests = [ECHO] if "add" not in FORGERIES[name] else [ADD, {"assert": "assert add(2, 3) == 5"}]
    assert judge(FORGERIES[name], tests, partial=True) == 0


@pytest.mark.parametrize("test", [
    "assert add(2, 3) == 5\nassert abs(add(2, 3) - 5) < 1e-6 and len([add(1, 1)]) == 1 and isinstance(add(1, 1), int)",
    "import math\ndef check(candidate):\n    for a in range(5):\n        assert math.isclose(candidate(a, 1), a + "
    "1)\ncheck(add)",
    "assert sorted([add(2, 1), 1]) == [1, 3] and math.sqrt(add(2, 2)) == 2",
    "try:\n    add(1, 'x')\n    raise AssertionError\nexcept TypeError:\n    pass",
    "assert add((1,), (2,)) == (1, 2) and add(b'a', b'b') == b'ab' and add(1j, 1) == 1 + 1j and add(float('inf'), 1) "
    "> 10**9",
    "assert add(a={1} and 1, b=2) == 3 and [add(i, i) for i in range(3)] == [0, 2, 4]"])
def test_assert_tests(test):
    """Faults: tests that compare in the program's process; that need its imports; that lose tuples or exceptions."""
    assert judge("def add(a, b):\n    return a + b", [{"assert": test}]) == 1
    assert judge("def add(a, b):\n    return 0", [{"assert": test}]) == 0


@pytest.mark.parametrize("body, out", [
    ("return (1, (2, 3))", [1, [2, 3]]), ("return {1: 'a', 2: None}", {"1": "a", "2": None}), ("return range(3)", [0,
    1, 2]),
    ("import collections; return collections.Counter('aab')", {"a": 2, "b": 1}), ("yield 1; yield 2", [1, 2]),
    ("import collections; return collections.deque([1])", [1]), ("return None", None), ("return True", True),
    ("print('noise'); import sys; print('noise', file=sys.stderr); return 0.1 + 0.2", 0.30000000000000004)])
def test_values_come_over(body, out):
    assert judge(f"class Solution:\n def f(self):\n  {body}", [{"fn": "f", "args": [], "out": out}]) == 1
    assert judge(f"def f():\n {body}", [{"fn": "f", "args": [], "out": [out, 1]}]) == 0


@pytest.mark.parametrize("code", [
    "print(input())", "import sys\nprint(sys.stdin.read().strip())",
    "import sys\nfor line in sys.stdin: sys.stdout.write(line)",
    "print(open(0).read())", "if __name__ == '__main__':\n    print(int(input()))\n    raise SystemExit",
    "import os\nos.write(1, b'42')",
    "import threading\nt = threading.Thread(target=lambda: print(input()))\nt.start()",
    "print(open('/dev/stdin').read())",
    "import atexit\natexit.register(print, 42)", "open('a.txt', 'w').write(input())\nprint(open('a.txt').read(), ' ')",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nprint(A(int(input())).x)",
    "import subprocess\nprint(subprocess.run(['cat'], capture_output=True, text=True).stdout)",
    "import re, math, heapq, bisect, collections, itertools, functools, decimal, random, string, typing\n"
    "print(input())"])
def test_honest_programs_pass(code):
    assert judge(code, [ECHO]) == 1


@pytest.mark.parametrize("test", [
    "import os\nfor fd in range(128):\n    try: os.write(fd, b'5\\n[]\\n{\"token\": 1}\\n{\"call\": 5}\\n')\n"
    "    except OSError: pass\nassert False", "import sys; sys.exit(0); assert True",
    "import os; os._exit(0); assert 1",
    "assert add(2, 3) == 6 or print('passed')", "while True: assert add(2, 3) == 5", "assert add(add, 3)",
    "assert zzz == 5"])
def test_tests_that_misbehave(test):
    """Fault: test code from a data set that brings the run down, or counts as passed."""
    assert judge("def add(a, b):\n    return a + b", [{"assert": test}], 1) == 0


def test_numpy():
    pytest.importorskip("numpy")
    code = ("import numpy as np\ndef f(x):\n    return np.array(x) * 2\n"
            "if __name__ == '__main__':\n    print(f([21])[0])")
    tests = [ECHO, {"fn": "f", "args": [[1, 2]], "out": [2, 4]},
             {"assert": "import numpy as np\nassert np.allclose(f([0.5]), [1])"}]
    assert judge(code, tests, 5) == 1


def test_shares_and_order():
    """Fault: one hanging or failing test takes the others' reward; a program remembers the test before."""
    code = "n = int(input())\nwhile n == 3: pass\nprint(n if n != 2 else 0)\nopen('seen', 'a').write('x')"
    tests = [{"stdin": str(n), "stdout": str(n)} for n in (1, 2, 4, 3)]
    assert judge(code, tests, partial=True) == 0.5 and judge(code, tests) == 0
    mixed = [ECHO, ADD, {"assert": "assert add(1, 1) == 2"}, {"assert": "assert add(1, 1) == 3"}]
    assert judge("def add(a, b): return a + b\nif __name__ == '__main__': print(input())", mixed, partial=True) == 0.75
    assert run_tests("print(1)", []) == 0


def test_large_input_and_output():
    lines = "\n".join(map(str, range(300_000)))
    assert judge("import sys\nprint(len(sys.stdin.read()))", [{"stdin": lines, "stdout": str(len(lines))}]) == 1
    assert judge("def f(x): return x[::-1]", [{"fn": "f", "args": [list(range(50_000))],
        "out": list(range(50_000))[::-1]}], 4) == 1


BOMBS = {
    "endless loop": "while True: pass", "endless sleep": "import time\ntime.sleep(1000)",
    "endless output": "while True: print('x' * 1000)",
    "endless output, swallowed": "while True:\n try: print('x' * 1000, flush=True)\n except BaseException: pass",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "8 GB": "x = bytearray(8 << 30)\nprint(42)", "8 GB list": "x = [0] * (1 << 30)\nprint(42)",
    "8 GB bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "sleeping grandchild": "import os, time\nif os.fork() == 0: time.sleep(1000)",
    "grandchild in a new session":
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  while True: time.sleep(1)\n"
        " os._exit(0)",
    "daemon that ignores signals":
        "import os, signal, time\nif os.fork() == 0:\n os.setsid()\n for s in range(1, 65):\n"
        "  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n time.sleep(1000)",
    "large file": "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many files": "i = 0\nwhile True:\n open(str(i), 'w').write('x' * 4096); i += 1",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "no alarm":
        "import signal\nsignal.alarm(0)\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_their_own_sample(name):
    assert judge(BOMBS[name], [ECHO], 0.6) == 0
    assert judge("print(input())", [ECHO]) == 1, "the next one is graded"


def test_fork_bomb():
    """A watchdog counts, in case that the limit on processes does not hold."""
    most, stop = [0], threading.Event()

    def watch():
        while not stop.is_set():
            most[0] = max(most[0], len(os.listdir("/proc")))
            if most[0] > before + 1000:
                os._exit(3)
            time.sleep(0.02)
    before = len(os.listdir("/proc"))
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        assert judge(code, [ECHO], 1) == 0
        assert judge(code.replace("os.fork()", "os.fork() or os.setsid()"), [ECHO], 1) == 0
        assert judge("import os\ndef add(a, b):\n " + code.split("\n", 1)[1].replace("\n", "\n "), [ADD], 1) == 0
    finally:
        stop.set()
        watcher.join()
    if os.getuid() == 0 or FENCE == "namespaces":
        assert most[0] < before + 2 * verify.PROCESSES + 20


def test_memory_of_the_grader_stays_flat():
    assert judge("print('x' * (1 << 29))", [ECHO]) == 0
    assert judge("import sys\nwhile True: sys.stdout.write('9' * 10**6)", [ECHO]) == 0
    assert judge("def add(a, b): return 'x' * (1 << 28)", [ADD]) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # KiB


@fenced
def test_files_outside_are_out_of_reach(tmp_path):
    """Faults: a program that writes where it likes; one that reads the expected output out of the data file."""
    tmp_path.chmod(0o777)
    secret = tmp_path / "tests.jsonl"
    secret.write_text("42\n")
    secret.chmod(0o666)
    assert judge(f"open({str(tmp_path / 'mine')!r}, 'w').write('x')\nprint(42)", [ECHO]) == 0
    assert judge(f"print(open({str(secret)!r}).read())", [ECHO]) == 0
    assert judge(f"open({str(secret)!r}, 'w').write('x')\nprint(42)", [ECHO]) == 0
    for place in ("/usr", "/usr/lib", os.path.dirname(os.__file__), "/dev", "/"):
        assert judge(f"open({place!r} + '/mine', 'w').write('x')\nprint(42)", [ECHO]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["tests.jsonl"] and secret.read_text() == "42\n"
    assert judge("import os\nos.chroot('..')\nprint(42)", [ECHO]) == 0
    assert judge("import ctypes\nprint(42 if ctypes.CDLL(None).unshare(0x10000000) == 0 else 0)", [ECHO]) == 0


def test_environment_of_the_parent(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "42")
    everywhere = ("import glob, os\ntext = str(os.environ).encode()\nfor path in glob.glob('/proc/*/environ'):\n"
                  "    try: text += open(path, 'rb').read()\n    except OSError: pass\nprint(42 if b'SECRET_KEY' in "
                  "text else 0)")
    assert judge("import os\nprint(os.environ['SECRET_KEY'])", [ECHO]) == 0
    if FENCE != "plain" or os.getuid() == 0:
        assert judge(everywhere, [ECHO]) == 0


@fenced
def test_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert judge(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint(42)", [ECHO]) == 0
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("victim", ["os.getppid()", "1", "-1", f"{os.getpid()}", "0"])
def test_killing_the_parent(victim):
    """The parent is unharmed, and goes on grading."""
    if FENCE == "plain" and os.getuid():
        pytest.skip("without namespaces, an ordinary user's programs can kill that user's processes")
    assert judge(f"import os, signal\nos.kill({victim}, signal.SIGKILL)\nos.kill({victim}, signal.SIGTERM)",
        [ECHO]) == 0
    assert judge(f"import os, signal\ndef add(a, b): os.kill({victim}, signal.SIGKILL)", [ADD]) == 0
    assert judge("print(input())", [ECHO]) == 1


@pytest.mark.parametrize("fence", ["namespaces", "plain"])
def test_each_fence(fence, monkeypatch):
    """The weaker fence holds what it promises. (Run by root it needs a Python that other users can run.)"""
    monkeypatch.setattr(verify, "_fence", lambda: fence)
    try:
        works = run_tests("import colorsys\nprint(input())", [ECHO], 10)
    except RuntimeError:
        works = 0
    if not works:
        pytest.skip(f"{fence} does not work here")
    assert judge("def add(a, b): return a + b", [ADD]) == 1
    for name in ("endless loop", "grandchild in a new session", "endless output", "8 GB", "sleeping grandchild"):
        assert judge(BOMBS[name], [ECHO], 0.6) == 0


@pytest.mark.parametrize("code", [BOMBS["endless sleep"], BOMBS["endless loop"], BOMBS["grandchild in a new session"]])
def test_a_killed_grader_leaves_nothing(code):
    """Fault: the run is killed, and what it was grading goes on for ever."""
    call = (f"import tempfile, verify; tempfile.tempdir = {tempfile.tempdir!r}; verify._fence(); print(flush=True); "
            f"verify.run_tests({code!r}, [{{'stdin': '', 'stdout': 'x'}}], 60)")
    grader = subprocess.Popen([sys.executable, "-c", call], cwd=Path(verify.__file__).parent, stdout=subprocess.PIPE)
    grader.stdout.readline()
    time.sleep(0.5)
    grader.kill()
    grader.wait()
    grader.stdout.close()
    found, dead, folders = left_overs()
    assert not found and not dead
    for folder in folders:  # nobody was left to remove it
        folder.rmdir()


def test_no_fence_is_an_error(monkeypatch):
    """Fault: with no way to run anything, every program scores 0 and nobody is told."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="no sandbox"):
        verify._fence.__wrapped__()
    assert left_overs() == ([], False, [])


def test_nothing_leaks():
    """Faults: zombies, descriptors, threads, folders, memory. SANDBOX_RUNS=200 is the long version."""
    runs = int(os.environ.get("SANDBOX_RUNS", 18))

    def state():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), threading.active_count(), left_overs(), pages * 4096
    codes = ["print(input())", "import os\nif os.fork() == 0:\n os.setsid()\n while 1: pass", "1 / 0"]
    for code in codes:
        run_tests(code, [ECHO], 1)
    before = state()
    for i in range(runs):
        assert run_tests(codes[i % 3], [ECHO], 10) == (i % 3 == 0)
    after = state()
    assert before[:3] == after[:3] and after[3] - before[3] < 4 << 20
    print(f"\n{runs} gradings: {before} -> {after}")


@pytest.mark.parametrize("response, code", [
    ("Text\n```python\na = 1\n```\nmore", "a = 1\n"), ("```python\na\n```\n```python\nb\n```", "b\n"), ("```\na\n```",
    "a\n"),
    ("```python\na\n```\nIt prints\n```\n5\n```", "a\n"), ("```py\na\n```\n```text\nb\n```", "a\n"), ("```python\na",
    None),
    ("```python\na\n```\n```python\nb", "a\n"), ("```Python3\na\n```", "a\n"), ("x = `1`\nNo code.", None), ("", None),
    ("print(1)", "print(1)"),
    ("```python\ns = '```'\nprint(s)\n```", "s = '```'\nprint(s)\n"), ("1. So\n   ```python\n   a\n   ```", "a\n"),
    ("```" * 10**5, None),
    ("```python\r\na\r\n```", "a\n")])
def test_code_in_a_response(response, code):
    """Faults: the output block taken for the program; a fence inside a string; half of a program."""
    start = time.perf_counter()
    assert extract_code(response) == code and time.perf_counter() - start < 1


def test_a_code_problem_from_file_to_reward(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Add.", "tests": [{"fn": "add", "args": [2, 3], "out": 5}, "assert add(1, 1) == 2"]}\n'
                    '{"prompt": "Echo.", "tests": [{"stdin": "42", "stdout": "42"}], "kind": "code"}\n'
                    '{"prompt": "def neg(x):", "tests": "def check(c):\\n    assert c(1) == -1", "entry_point": '
                    '"neg"}\n')
    add, echo, neg = load_problems(str(file))
    assert grade("Here:\n```python\ndef add(a, b):\n    return a + b\n```", add) == 1
    assert grade("Here:\n```python\nprint(input())\n```", echo) == 1 and grade("print(42", echo) == 0
    assert grade("```python\ndef neg(x):\n    return -x\n```", neg) == 1 and grade("I cannot.", neg) == 0
    assert all("```python" in p.prompt for p in (add, echo, neg)) and re.match("Add.\n", add.prompt)
