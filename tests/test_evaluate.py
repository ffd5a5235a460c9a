"""python verify.py: a checkpoint's mean@n and pass@k, and grading without one."""
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train
import verify
from verify import pass_at_k

ROOT = Path(verify.__file__).parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train.build_tiny(folder, 0)
    return str(folder)


def run(*args):
    verify.main([str(a) for a in args])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sparse", [(), ("--budget", "0.2", "--min-pages", "1", "--dense-layers", "0")])
def test_evaluate_and_grade_again(tiny, tmp_path, capsys, sparse):
    """Faults: a report that is not of the samples saved; one that is dense when asked for sparse; another run,
    other samples."""
    common = ["--model", tiny, "--task", "chain:4,4,2", "--limit", 3, "--n", 4, "--k", 1, 4, "--max-new-tokens", 24,
        "--seed", 3]
    for name in "ab":
        run(*common, *sparse, "--json", tmp_path / f"{name}.json", "--save", tmp_path / f"{name}.jsonl")
    printed, rows = capsys.readouterr().out, lines(tmp_path / "a.jsonl")
    m = json.loads((tmp_path / "a.json").read_text())
    assert rows == lines(tmp_path / "b.jsonl") and len(rows) == 3
    lengths = [x for row in rows for x in row["lengths"]]
    assert all(len(row[key]) == 4 for row in rows for key in ("responses", "rewards", "lengths"))
    assert m["samples"] == 12 and m["mean_length"] == sum(lengths) / 12
    assert 0 <= m["cut_off"] <= 1 and m["tokens_per_s"] > 0
    assert m["mean"] == pytest.approx(sum(sum(row["rewards"]) for row in rows) / 12)
    assert m["pass@1"] == pytest.approx(sum(x == 1 for row in rows for x in row["rewards"]) / 12)
    assert all(x in printed for x in ("3 problems, 12 samples: mean@4", "pass@1", "tokens/s", "cut off"))
    if sparse:
        assert 0 < m["kv_read"] < 0.9 and "alpha" in printed
        assert 0 < m["alpha_tail_1"] <= m["alpha_tail_5"] <= m["alpha_mean"] < 1
    else:
        assert "kv_read" not in m and "alpha" not in printed
    run("--grade", tmp_path / "a.jsonl", "--save", tmp_path / "c.jsonl", "--k", 1, 4, "--json", tmp_path / "c.json")
    assert [row["rewards"] for row in lines(tmp_path / "c.jsonl")] == [row["rewards"] for row in rows]
    assert json.loads((tmp_path / "c.json").read_text())["pass@1"] == m["pass@1"]


def test_schedule_file(tiny, tmp_path, capsys):
    (tmp_path / "s.json").write_text('{"bins": [1, 2], "bin_tokens": 32, "page_size": 8}')
    run("--model", tiny, "--task", "chain:2,1,1", "--limit", 2, "--n", 1, "--max-new-tokens", 9, "--temperature", 0,
        "--page-size", 8,
        "--schedule", tmp_path / "s.json")
    assert "sparse: read" in capsys.readouterr().out


def test_grade_a_file(tmp_path, capsys):
    """Mixed kinds, unlike numbers of responses; partial credit; only whole rewards pass."""
    code = "```python\ndef f(x):\n    return x if x < 5 else 0\n```"
    tests = [{"fn": "f", "args": [x], "out": x} for x in (1, 9)]
    rows = [dict(question="6*7?", answer="#### 42", responses=["\\boxed{42}", "\\boxed{41}", "42", "no idea,\nsorry"]),
            dict(prompt="f", tests=tests, responses=[code, "none"]), dict(prompt="?l", answer="l3", kind="chain",
                response="#l3.")]
    file, report = tmp_path / "r.jsonl", tmp_path / "r.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    run("--grade", file, "--json", report)
    m = json.loads(report.read_text())
    assert m["mean"] == pytest.approx((0.5 + 0 + 1) / 3) and m["pass@1"] == m["mean"]
    assert m["samples"] == 7 and "pass@4" not in m
    run("--grade", file, "--json", report, "--partial", "--save", tmp_path / "out.jsonl", "--limit", 2)
    m = json.loads(report.read_text())
    assert m["mean"] == pytest.approx((0.5 + 0.25) / 2) and m["pass@1"] == pytest.approx(0.25)
    assert [row["rewards"] for row in lines(tmp_path / "out.jsonl")] == [[1, 0, 1, 0], [0.5, 0]]
    assert "mean@n" in capsys.readouterr().out


def test_summary_is_pass_at_k():
    m = verify.summarise([[1, 0, 0.5, 0], [1, 1, 1, 1], [0, 0, 0, 0]], [1, 2, 4])
    for k in (1, 2, 4):
        assert m[f"pass@{k}"] == pytest.approx((pass_at_k(4, 1, k) + 1) / 3)
    assert m["mean"] == pytest.approx(5.5 / 12) and math.isclose(m["pass@1"], 5 / 12)


@pytest.mark.parametrize("args, named", [
    ("", "--model"), ("--model {m} --grade {r}", "either"), ("--model {m}", "--task"), ("--grade {r} --task chain",
    "--grade"),
    ("--model {m} --task chain --data {r}", "either"), ("--model {m} --task chains", "--task chains: not one of chain"),
    ("--model {m} --task chain:1", "chain:1"), ("--model {m} --data {d}/none.jsonl", "none.jsonl"),
    ("--grade {d}/none.jsonl", "none.jsonl"),
    ("--model {d}/none --task chain", "{d}/none"), ("--model {m} --data hub:a/b", "pip install datasets"),
    ("--grade {d}/bad.jsonl", "bad.jsonl, line 1"),
    ("--grade {d}/empty.jsonl", "no responses"), ("--grade {r} --k 2", "--k 2"), ("--grade {r} --k 0", "--k 0"),
    ("--grade {r} --k", "--k"),
    ("--model {m} --task chain --n 4 --k 5", "--k 5"), ("--model {m} --task chain --n 0", "--n 0"),
    ("--model {m} --task chain --n x", "--n"),
    ("--model {m} --task chain --budget 0", "--budget"), ("--model {m} --task chain --budget 2", "--budget"),
    ("--model {m} --task chain --budget nan", "--budget"), ("--model {m} --task chain --temperature -1",
    "--temperature"),
    ("--model {m} --task chain --schedule x", "--schedule x"), ("--model {m} --task chain --max-new-tokens 5000",
    "5000"),
    ("--model {m} --task chain --chat on", "--chat on"), ("--grade {r} --json {d}/no/x", "{d}/no/x"),
    ("--grade {r} --save {d}", "{d}"),
    ("--grade {r} --timeout 0", "--timeout"), ("--grade {r} --limit -1", "--limit"), ("--grad {r}", "--grad"),
    ("--grade {r} --bogus", "--bogus"),
    ("--model {m} --task chain --page-size 0", "--page-size"), ("--model {m} --task chain --dense-layers -1",
    "--dense-layers")])
def test_bad_input_is_named(tiny, tmp_path, capsys, monkeypatch, args, named):
    """Fault: a traceback; or half an hour of sampling, and then a report that cannot be written."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "answer": "1", "response": "1"}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    fill = dict(m=tiny, d=tmp_path, r=tmp_path / "r.jsonl")
    with pytest.raises(SystemExit) as stopped:
        run(*args.format(**fill).split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and named.format(**fill) in error and "Traceback" not in error


def test_as_a_program_without_torch(tmp_path):
    """Faults: grading imports torch; the help does not print."""
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "answer": "1/2", "responses": ["\\\\boxed{0.5}", "2"]}\n')
    code = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path('verify.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "--grade", str(tmp_path / "r.jsonl")], cwd=ROOT,
        capture_output=True, text=True)
    assert done.returncode == 0 and "mean@2 0.5000 | pass@1 0.5000" in done.stdout, done.stderr
    done = subprocess.run([sys.executable, "verify.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(re.findall(r"^  --\w", done.stdout, re.MULTILINE)) == 21
