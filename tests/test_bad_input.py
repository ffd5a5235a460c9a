"""Bad input: a fuzz, from seeds, of command lines and of every file that is read; and disks that fail under a run.

SPARROW_FUZZ=50 in the environment makes 50 times as many cases (default 1: some 20 s); the cases of a seed stay the same.
"""
import errno
import io
import json
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress

import pytest
import safetensors.torch
import torch

import sparrow
import train
import verify

TIMES = int(os.environ.get("SPARROW_FUZZ", 1))
INTS = ["0", "-1", "-7", "1", "2", "3", "4099", "2147483648", str(2**63), str(10**30), "-" + "9" * 30, "9" * 5000]
FLOATS = ["nan", "inf", "-inf", "1e400", "-0.0", "1e-300", "1e300", "0.5", "2.5", "1e-45", "NaN", "-1e-9"]
TEXTS = ["", " ", "x", "-", "--", "0x10", "1e", "1_0", "１２", "é\u202e🐦", "\udcff", "None", "true", "[1]", "{}", "%s",
         "a/b/c", "~", ".", "..", "hub:", "chain:", "chain:,", "chain:9,9,9,9", "chain:-1,2,3", "countdown:7,7",
         "countdown:3,0", "y" * 300]


class Started(Exception):
    """Everything that was given is accepted: the work itself would begin."""


def started(*args, **kwargs):
    raise Started


def fault_of(call, named, never=False):
    """Run a command -> None if it started, ended well, or was refused as it should be; else what is wrong with that.

    named: what a refusal must hold one of. never: starting would be wrong.
    """
    err, out = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with redirect_stderr(err), redirect_stdout(out):
        try:
            with suppress(Started):
                call()
            return "accepted" if never else None
        except SystemExit as stopped:
            status = stopped.code
        except Exception:  # the very thing looked for
            return traceback.format_exc(limit=-3)
    message = err.getvalue().rpartition(": error: ")[2].strip()
    if status != 2 or ": error: " not in err.getvalue():
        return f"exit status {status}: {err.getvalue()}"
    return None if any(str(name) in message for name in named) else f"names none of {[*map(str, named)][:5]}: {message}"


def check(cases):
    """cases: (what was given, call, and the rest of fault_of's arguments)."""
    faults = [f"{given}\n{fault}" for given, *case in cases if (fault := fault_of(*case))]
    if faults:
        shown = "\n".join(f"{f[:200]}\n... {f[-700:]}" for f in faults[:10])
        pytest.fail(f"{len(faults)} of {len(cases)} cases\n{shown}", pytrace=False)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder of things to give: a model, problems, responses, a schedule, and things that are none of them."""
    root = tmp_path_factory.mktemp("given")
    train.build_tiny(root / "model", 0)
    (root / "good.jsonl").write_text("".join(json.dumps(row | {"response": "\\boxed{2}"}) + "\n" for row in ROWS))
    shutil.copy(root / "good.jsonl", root / "other.jsonl")
    (root / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[3:5] * 3))  # graded in the process itself
    (root / "schedule.json").write_text(json.dumps(SCHEDULE))
    (root / "binary").write_bytes(random.Random(0).randbytes(300))
    (root / "empty").write_bytes(b"")
    return root


@pytest.fixture
def at_the_door(monkeypatch, tmp_path):
    """Commands end with Started where their work would begin; in a folder of their own."""
    monkeypatch.setattr(train, "warm_start", lambda *a: None)
    monkeypatch.setattr(train, "stop_signals", started)
    monkeypatch.setattr(sparrow.Actor, "generate", started)
    monkeypatch.setattr(verify, "grade_all", started)
    monkeypatch.setattr(train, "plot_runs", started)
    monkeypatch.chdir(tmp_path)


ROWS = [
    {"prompt": "What is 1 + 1?", "answer": "2"}, {"question": "1/3?", "solution": "so \\boxed{\\frac{1}{3}}"},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é🐦?"}], "answer": "#### 42"},
    {"prompt": "Reach 6.", "answer": "6", "kind": "countdown", "numbers": [1, 2, 3]},
    {"prompt": "a1;b2;a+b=c;?c", "answer": "c3", "kind": "chain"},
    {"prompt": "Double it.", "tests": [{"fn": "f", "args": [1, {"a": [None, 1.5]}], "out": 2}, {"stdin": "1", "stdout": "2"}]},
    {"prompt": "Halve it.", "tests": ["assert f(2) == 1"], "entry_point": "f"}]
SCHEDULE = {"bins": [4, 5, 6], "bin_tokens": 64, "page_size": 16, "min_pages": 0, "share": None}
VALUES = [None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), -0.5, "", "x", "\ud800", "\0", [], [[]],
          {}, {"a": 1}, [None], "9" * 400, [1, "x"], "{", 1.5]


def broken_json(rng, value):
    """One value somewhere in it replaced, dropped, or said twice -> JSON text."""
    value = json.loads(json.dumps(value))
    spot = value
    while True:
        keys = list(spot) if isinstance(spot, dict) else range(len(spot))
        if not keys:
            return json.dumps(value)
        key = rng.choice(keys)
        if not (isinstance(spot[key], (dict, list)) and spot[key] and rng.random() < 0.7):
            break
        spot = spot[key]
    if rng.random() < 0.2 and isinstance(spot, dict):
        del spot[key]
    elif rng.random() < 0.1 and isinstance(value, dict):
        return json.dumps(value)[:-1] + f', "{rng.choice(list(value))}": {json.dumps(rng.choice(VALUES))}}}'
    else:
        spot[key] = rng.choice(VALUES)
    return json.dumps(value, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def broken_bytes(rng, data):
    """Bytes flipped, cut, doubled, put in or taken out."""
    at = rng.randrange(len(data) + 1)
    how = rng.randrange(10)
    if how == 0:
        return data[:at]
    if how == 1:
        return b"\xef\xbb\xbf" + data
    if how == 2:
        return data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b"\0", b" \n\t\n"]))
    if how == 3:
        return b"" if rng.random() < 0.3 else data[at:]
    if how == 4:
        return data[:at] + rng.choice([b"[", b'{"a":', b'"', b"}"]) * rng.choice([1, 100_000]) + data[at:]
    if how == 5:
        return data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "latin-1", "utf-32"]), "replace")
    if how == 6:
        return data[:at] + rng.choice([b"\0", b"\xff", b"\xc3", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\\u0000",
                                       b"\\ud800", b"\n", b"null", b","]) + data[at:]
    flipped = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        if flipped:
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped)


# ---- command lines ------------------------------------------------------------------------------------------------


def values(rng, root):
    """Something to give to a flag."""
    kind = rng.randrange(5)
    files = [root, root / "binary", root / "empty", root / "nowhere", root / "other.jsonl", root / "binary" / "x",
             "/proc/self/mem"]
    return str(rng.choice((INTS, FLOATS, TEXTS, files, INTS + FLOATS)[kind]))


def names(changed):
    return [*changed, *filter(None, (v.strip() for v in changed.values())), *map(repr, changed.values())]


def not_finite(changed):
    """Is a number among them that no flag takes?"""
    free = {f.name for f in train.FLAGS if not isinstance(f.default, (int, float))} | set(
        "--prompt --json --save --grade --plot-out --on".split())
    wild = ("nan", "inf", "1e400", "1e300", "1e-300")
    return "--plot" not in changed and any(v.strip("-").lower() in wild for k, v in changed.items() if k not in free)


@pytest.mark.parametrize("seed", range(5))
def test_command_lines_of_train(seed, given, at_the_door, tmp_path):
    """One or two flags changed to anything: the run starts, or the message names a flag or what was given to it."""
    cases = []
    for i in range(20 * TIMES):
        rng = random.Random(f"train {seed} {i}")
        changed = {rng.choice(train.FLAGS).name: values(rng, given) for _ in range(rng.choice([1, 1, 2]))}
        if rng.random() < 0.1:
            changed[rng.choice(["--resume", "--plot", "--plot-out", "--nosuch", "", "x"])] = values(rng, given)
        base = {"--device": "cpu", "--data": given / "good.jsonl", "--model": given / "model", "--warm-start": 0,
                "--prompts": 2,
                "--samples": 2, "--max-new-tokens": 24, "--out": tmp_path / f"out{i}"}
        argv = [f"{k}={v}" for k, v in (base | changed).items()]
        cases.append((changed, lambda argv=argv: train.main(argv), names(changed), not_finite(changed)))
    check(cases)


@pytest.mark.parametrize("seed", range(3))
def test_command_lines_of_verify_and_sparrow(seed, given, at_the_door, monkeypatch, tmp_path):
    """The same for the two others."""
    lists = {"verify": "--model --task --data --grade --limit --n --max-new-tokens --temperature --seed --chat --rows --budget "
                       "--schedule --min-pages --page-size --dense-layers --k --timeout --json --save",
             "sparrow": "--model --prompt --n --max-new-tokens --temperature --budget --schedule --min-pages --page-size "
                        "--dense-layers --seed --rows --context --every --tau --tail --data --problems --pages --on --bin-tokens "
                        "--min-tokens --alpha-every --out"}
    cases = []
    for i in range(30 * TIMES):
        rng = random.Random(f"others {seed} {i}")
        program = rng.choice([verify, sparrow])
        changed = {rng.choice(lists[program.__name__].split()): values(rng, given) for _ in range(rng.choice([1, 1, 2]))}
        base = {"--model": given / "model", "--max-new-tokens": 24, "--n": 2}
        if program is verify:
            base |= {"--data": given / "good.jsonl"}
            if rng.random() < 0.3:
                base = {"--grade": given / "good.jsonl"}
        elif rng.random() < 0.5:
            base |= {"--prompt": "a1;b2"}
        else:
            base |= {"--calibrate": None, "--data": given / "good.jsonl", "--out": tmp_path / f"cal{i}"}
        argv = [k if v is None else f"{k}={v}" for k, v in (base | changed).items()]
        cases.append(((program.__name__, argv), lambda p=program, argv=argv: p.main(argv), names(changed), not_finite(changed)))
    check(cases)


# ---- files --------------------------------------------------------------------------------------------------------


def named_error(call, path):
    """A reader of a file: what it returns or None after a ValueError or OSError that names the file; all else is a fault."""
    try:
        return call()
    except (ValueError, OSError) as error:
        if str(path) not in str(error) and "in config.json" not in str(error):
            raise AssertionError(f"does not name {path}: {error!r}") from error


def damaged(rng, value, lines=False):
    """A JSON value (or list of them, a line each) with something wrong: bytes."""
    rows = [json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in (value if lines else [value])]
    if rng.random() < 0.5:
        i = rng.randrange(len(rows))
        rows[i] = broken_json(rng, value[i] if lines else value)
        return "\n".join(rows).encode("utf-8", "surrogatepass")
    return broken_bytes(rng, "\n".join(rows).encode())


@pytest.mark.parametrize("seed", range(3))
def test_problem_files(seed, given, tmp_path):
    """Damaged problems and responses: read, or refused with the file's name and, but for the encoding, the line's number."""
    tokenizer, path, cases = sparrow.Model.from_pretrained(given / "model").tokenizer, tmp_path / "x.jsonl", []

    def read(data, reader):
        path.write_bytes(data)
        try:
            found = reader(str(path))
        except ValueError as error:
            if not re.search(r"x.jsonl(, line \d+: |: cannot be read as UTF-8| holds no )", str(error)):
                raise
        else:
            for p in found[0] if isinstance(found, tuple) else found:
                assert sparrow.encode_prompt(tokenizer, p.prompt)
                if p.kind in ("countdown", "chain"):
                    verify.grade("\\boxed{1+2+3}", p)
    for i in range(150 * TIMES):
        rng = random.Random(f"problems {seed} {i}")
        data = damaged(rng, [row | {"response": "\\boxed{2}"} for row in ROWS], lines=True)
        reader = rng.choice([verify.load_problems, verify.read_responses])
        cases.append((data[:2000], lambda data=data, reader=reader: read(data, reader), ()))
    check(cases)


@pytest.mark.parametrize("seed", range(2))
def test_schedule_files(seed, tmp_path):
    """A damaged schedule is refused by name, or can be followed."""
    path, cases = tmp_path / "schedule.json", []

    def read(data):
        path.write_bytes(data)
        if schedule := named_error(lambda: sparrow.Schedule.load(path), path):
            schedule.pages(torch.arange(1, 1025))
    for i in range(200 * TIMES):
        data = damaged(random.Random(f"schedule {seed} {i}"), SCHEDULE)
        cases.append((data[:2000], lambda data=data: read(data), ()))
    check(cases)


@pytest.mark.parametrize("seed", range(2))
def test_model_folders(seed, given, tmp_path):
    """A model's folder with one file damaged or gone: it loads, or the message names the folder."""
    folder, cases = tmp_path / "damaged", []
    files = sorted(p.name for p in (given / "model").iterdir())

    def read(name, data):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(given / "model", folder)
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
        if model := named_error(lambda: sparrow.load_with_tokenizer(str(folder), "cpu"), folder):
            assert sparrow.encode_prompt(model.tokenizer, "a1;b2") and model.stop_ids is not None
    for i in range(40 * TIMES):
        rng = random.Random(f"model {seed} {i}")
        name = rng.choice(files)
        data = (given / "model" / name).read_bytes()
        if name.endswith(".json") and rng.random() < 0.6:
            data = damaged(rng, {k: v for k, v in json.loads(data).items() if k != "model_max_length"})
        elif rng.random() < 0.1:
            data = None
        else:
            data = broken_bytes(rng, data[:2000]) + data[2000:]
        cases.append(((name, data and data[:2000]), lambda name=name, data=data: read(name, data), ()))
    check(cases)


RUN = ("--device cpu --warm-start 0 --prompts 2 --samples 2 --max-new-tokens 24 --eval 1 --eval-every 1 --save-every 1 "
       "--page-size 8 --min-pages 3 --overlong 24 --steps").split()  # rewards differ by length: there is something to learn


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
    """The folder of a run of two steps on a copy of the problems."""
    out = tmp_path_factory.mktemp("finished")
    with redirect_stdout(io.StringIO()):
        train.main([*RUN, "2", "--data", str(given / "plain.jsonl"), "--model", str(given / "model"), "--out", str(out)])
    return out


@pytest.mark.parametrize("seed", range(3))
def test_folders_of_runs(seed, finished, monkeypatch, tmp_path):
    """One file of a run damaged or gone, then --plot or --resume: it goes on, or the message names the folder."""
    files = [finished / "config.json", finished / "metrics.jsonl"]
    files += [f for f in (finished / "step-000002").rglob("*") if f.is_file()]
    cases, out = [], tmp_path / "run"

    def read(name, data, argv):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(finished, out)
        shutil.rmtree(out / "step-000001")
        (out / name).unlink() if data is None else (out / name).write_bytes(data)
        with monkeypatch.context() as patch:
            if argv[0] == "--resume" and name != "metrics.jsonl":
                patch.setattr(train, "stop_signals", started)
            train.main(argv)
    for i in range(5 * TIMES):
        rng = random.Random(f"run {seed} {i}")
        path = rng.choice(files[:2] * 3 + files)
        data, name = path.read_bytes(), path.relative_to(finished)
        if path.suffix == ".json" and rng.random() < 0.6:
            data = damaged(rng, {k: v for k, v in json.loads(data).items() if k != "model_max_length"})
        elif path.suffix == ".jsonl":
            data = damaged(rng, [json.loads(line) for line in data.splitlines()], lines=True) + b"\n"
        else:
            data = rng.choice([None, broken_bytes(rng, data), broken_bytes(rng, data[:2000]) + data[2000:],
                               data[:-2000] + broken_bytes(rng, data[-2000:])])
        argv = ["--resume", "--out", str(out), "--steps", "3"]
        if path in files[:2] and rng.random() < 0.5:
            argv = ["--plot", str(out), "--plot-out", str(tmp_path / "x.png")]
        cases.append(((str(name), argv[0], data and data[:2000]), lambda *case, c=(str(name), data, argv): read(*c),
                      [out, "in config.json", *(f.name for f in train.FLAGS)]))
    check(cases)


# ---- disks that fail ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(given, tmp_path_factory):
    """(the flags of a run, the weights it has after three steps)"""
    out = tmp_path_factory.mktemp("straight")
    more = [*RUN, "3", "--data", str(given / "plain.jsonl"), "--model", str(given / "model"), "--lr", "1e-3", "--warmup", "0"]
    with redirect_stdout(io.StringIO()):
        train.main([*more, "--out", str(out)])
    weights = sparrow.Model.from_pretrained(out / "step-000003").state_dict()
    start = sparrow.Model.from_pretrained(given / "model").state_dict()
    assert any(not torch.equal(weights[name], start[name]) for name in start), "it learns something"
    return more, weights


def goes_on(out, weights):
    """--resume ends where the undisturbed run did."""
    train.main(["--resume", "--out", str(out)])
    got = sparrow.Model.from_pretrained(out / "step-000003").state_dict()
    assert all(torch.equal(weights[name], got[name]) for name in got)
    assert [m["step"] for m in train.read_metrics(out / "metrics.jsonl")] == [0, 1, 2, 3]


def full(call, after=0):
    """What stands in for `call` once the disk is full."""
    count = iter(range(10**6))

    def stand_in(*args, **kwargs):
        if next(count) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args, **kwargs)
    return stand_in


@pytest.mark.parametrize("module, name", [
    (train.os, "fsync"), (train.torch, "save"), (sparrow, "save_file"), (train, "plot"), (train.Path, "open")])
@pytest.mark.parametrize("after", [0, 1, 7] if TIMES > 1 else [1])
def test_a_full_disk_costs_no_step(module, name, after, straight, tmp_path, monkeypatch, capsys):
    """ENOSPC at one of the writes: the error names what was being written, and nothing half-written is taken as whole."""
    more, weights = straight
    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(module, name, full(getattr(module, name), after))
        try:
            train.main([*more, "--out", str(tmp_path)])
        except OSError as error:
            assert f"{tmp_path}/" in str(error) and "No space left on device" in str(error)
    if list(tmp_path.glob("step-*")):
        goes_on(tmp_path, weights)
    else:
        check([("--resume", lambda: train.main(["--resume", "--out", str(tmp_path)]),
                ["no whole checkpoint", "no run in"], True)])


def child(argv, **how):
    """train.py as a process of its own -> (exit status, the end of stderr)"""
    done = subprocess.run([*argv], capture_output=True, text=True, timeout=120, **how)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip().rpartition("\n")[2]


def test_a_file_that_grows_too_large(straight, tmp_path):
    """A limit of the operating system met while a checkpoint is written: one line, status 1, and --resume goes on."""
    more, weights = straight
    train.main([*more, "--out", str(tmp_path), "--steps", "1"])
    status, error = child([sys.executable, train.__file__, "--resume", "--out", str(tmp_path), "--steps", "3"],
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)))
    assert status == 1 and error.startswith(f"train.py: error: '{tmp_path}/step-000002' cannot be written: "), error
    assert "large" in error and sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000001"]
    goes_on(tmp_path, weights)


@pytest.mark.skipif(TIMES == 1, reason="slow: only with SPARROW_FUZZ above 1")
@pytest.mark.parametrize("room", [0, 8, 2000, 4000, 6500, 9000])
def test_a_disk_that_is_really_full(room, straight, tmp_path):
    """A tmpfs with that many kB left; then there is room again."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    more, weights = straight
    python = shlex.join([sys.executable, train.__file__])
    script = f"""
        mount -t tmpfs -o size=40m tmpfs {tmp_path} && mkdir {tmp_path}/out
        head -c {40960 - room}k /dev/zero > {tmp_path}/filler
        {python} {shlex.join(more)} --out {tmp_path}/out; echo status $? >&2
        rm {tmp_path}/filler
        if ls -d {tmp_path}/out/step-* >/dev/null 2>&1; then set -- --resume; else set -- {shlex.join(more)}; fi
        {python} "$@" --out {tmp_path}/out && cat {tmp_path}/out/step-000003/model.safetensors"""
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, timeout=200)
    errors = done.stderr.decode()
    assert re.search(f"train.py: error: .*{tmp_path}/out.*\nstatus [12]\n", errors) and "Traceback" not in errors, errors
    got = safetensors.torch.load(done.stdout[done.stdout.index(b'{"__metadata__') - 8:])
    assert all(torch.equal(weights[name], got[name]) for name in got)


def test_folders_that_cannot_be_written(given, capsys):
    """--out and --warm-dir under a file, and where nobody may write: refused before any work, by name."""
    base = [*RUN, "1", "--data", str(given / "plain.jsonl"), "--model", str(given / "model"), "--out"]
    cases = [(out, lambda out=out: train.main([*base, out]), [out], True)
             for out in (str(given / "binary"), str(given / "binary" / "out"), "/proc/out", "/dev/null/out")]
    check(cases)


def test_data_that_vanishes_before_a_resume(straight, given, tmp_path):
    """Refused by name; with the file back, the run ends as if nothing had been."""
    more, weights = straight
    data = tmp_path / "data.jsonl"
    shutil.copy(given / "plain.jsonl", data)
    out = tmp_path / "out"
    train.main([*more, "--data", str(data), "--out", str(out), "--steps", "1"])
    data.rename(tmp_path / "away")
    check([("--resume", lambda: train.main(["--resume", "--out", str(out), "--steps", "3"]), [data], True)])
    (tmp_path / "away").rename(data)
    train.main(["--resume", "--out", str(out), "--steps", "3"])
    got = sparrow.Model.from_pretrained(out / "step-000003").state_dict()
    assert all(torch.equal(weights[name], got[name]) for name in got)


def test_verify_never_writes_over_what_it_reads(given, tmp_path, monkeypatch):
    """Fault: --save FILE empties the responses that --grade FILE is about to read, or --json the samples."""
    file, link = tmp_path / "r.jsonl", tmp_path / "link"
    shutil.copy(given / "good.jsonl", file)
    link.symlink_to(file)
    argvs = [["--grade", file, "--save", file], ["--grade", file, "--json", link],
             ["--grade", file, "--json", "/x/y", "--save", "/x/y"],
             ["--model", given / "model", "--data", file, "--save", link]]
    check([(argv, lambda argv=argv: verify.main([*map(str, argv)]), ["--save"], True) for argv in argvs])
    assert file.read_bytes() == (given / "good.jsonl").read_bytes()
    monkeypatch.setattr(verify, "grade_all", lambda texts, *how, **more: [0.0] * len(texts))
    with pytest.raises(SystemExit, match="/dev/full cannot be written"), redirect_stdout(io.StringIO()):
        verify.main(["--grade", str(file), "--save", "/dev/full"])


def test_a_policy_that_blows_up_ends_without_a_traceback(straight, tmp_path, capsys):
    """Fault: weights that have become NaN leave no alpha to take the least of. A far too high --lr does it."""
    more, _ = straight
    with suppress(SystemExit):
        train.main([*more, "--out", str(tmp_path), "--lr", "1e30"])
    assert "worst bin nan" in capsys.readouterr().out
