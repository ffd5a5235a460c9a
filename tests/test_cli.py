"""The command line: what it refuses and how, a very small whole run, and an exact resume. CASES: Resume, command line."""
import json
import math
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from sparrow import Model

SMALL = ("--device cpu --task chain:4,4,2 --warm-start 2 --warm-tokens 500 --prompts 2 --samples 2 --max-new-tokens 24 --eval 2 "
         "--save-every 1 --eval-every 1").split()
CLOCKS = {"rollout_s", "grade_s", "train_s", "tokens_per_s"}


def run(out, *more):
    train.main([*SMALL, "--out", str(out), *map(str, more)])


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def refusal(capsys, *argv):
    """What the user reads when a command line is refused: exit status 2, a last line, no traceback."""
    with pytest.raises(SystemExit) as stopped:
        train.main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and "Traceback" not in err and "train.py: error: " in err
    return err.rpartition("train.py: error: ")[2]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder of things that a user might give."""
    root = tmp_path_factory.mktemp("given")
    for name, config in (("gpt2", {"model_type": "gpt2"}), ("unknown", {"model_type": "mamba99"}), ("empty", None)):
        (root / name).mkdir()
        if config:
            (root / name / "config.json").write_text(json.dumps(config))
    train.build_tiny(root / "cut", 0)
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    (root / "good.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (root / "bad.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "a"\n')
    return root


@pytest.mark.parametrize("argv, named", [
    ("--stepz 3", "--stepz"), ("--step 3", "--step 3"), ("--steps x", "--steps"), ("--steps 0", "--steps 0"),
    ("--budget 0", "--budget 0"), ("--budget 1.5", "--budget 1.5"), ("--budget -1", "--budget -1"), ("--tau 1", "--tau 1"),
    ("--samples 1", "--samples 1"), ("--adv mean", "--adv"), ("--device tpu", "tpu"), ("--schedule nosuch", "nosuch"),
    ("--warm-start 5 --data {given}/good.jsonl", "--warm-start"), ("--resume", "--resume"),
    ("--task chain:a,b --warm-start 5", "chain:a,b"), ("--task countdown:3,20,7", "countdown:3,20,7"),
    ("--task poetry", "poetry"), ("--task chain:4,2,3", "chain:4,2,3"),
    ("--model {given}/nowhere", "{given}/nowhere"), ("--model {given}/empty", "config.json"), ("--model nosuch", "Qwen/nosuch"),
    ("--model {given}/gpt2", "'gpt2' is not supported"), ("--model {given}/unknown", "mamba99"), ("--model {given}/cut", "{given}/cut"),
    ("--data {given}/bad.jsonl", "bad.jsonl, line 2"), ("--data {given}/none.jsonl", "none.jsonl"),
    ("--max-new-tokens 1010", "context of 1024"), ("--pool-pages 2", "--pool-pages"), ("--chat on", "--chat")])
def test_refusals(argv, named, given, tmp_path, capsys):
    """Fault: a traceback, or a message that does not name what was given."""
    argv = argv.format(given=given).split()
    task = [] if "--task" in argv else ["--task", "chain:4,4,2"]
    warm = [] if "--warm-start" in argv else ["--warm-start", "0"]
    assert named.format(given=given) in refusal(capsys, *task, *warm, "--device", "cpu", "--out", tmp_path / "out", *argv)


def test_from_a_shell_there_is_no_traceback():
    """Once as a process, from elsewhere: the script finds its modules, and fails like a command."""
    script = Path(train.__file__)
    done = subprocess.run([sys.executable, script, "--stepz", "3"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and "unrecognized arguments: --stepz 3" in done.stderr and "Traceback" not in done.stderr


def test_help_names_every_flag(capsys):
    """Fault: a % in a help text, or a flag without help."""
    with pytest.raises(SystemExit) as stopped:
        train.parse_args(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"--{key.replace('_', '-')} " in text for key in vars(train.parse_args([])) if key not in ("parser", "resume"))


def text_reward(response, problem):
    """Something to learn from an untrained model: a hash of the text."""
    return zlib.crc32(response.encode()) % 1000 / 1000


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps in one go, under the stand-in reward: (folder, what was printed)."""
    out, patch = tmp_path_factory.mktemp("straight"), pytest.MonkeyPatch()
    patch.setattr(train, "grade", text_reward)
    lines = []
    patch.setattr("builtins.print", lambda *a, **k: lines.append(" ".join(map(str, a))))
    try:
        run(out, "--steps", 4)
    finally:
        patch.undo()
    return out, "\n".join(lines)


def test_a_small_run_leaves_what_it_says(straight):
    """The whole loop on the built-in model: metrics, plot, checkpoint, summary."""
    out, printed = straight
    lines = metrics(out)
    assert [m["step"] for m in lines] == [0, 1, 2, 3, 4] and all("eval" in m for m in lines)
    for m in lines[1:]:
        assert {"reward", "solved", "length", "cut_off", "dropped", "alpha_mean", "alpha_tail", "alpha_low", "tail_by_bin", "kv_read",
                "pages_by_bin", "ratio_mean", "kl", "clipped", "entropy", "loss", "grad_norm", "lr", *CLOCKS} <= m.keys()
        assert all(math.isfinite(v) for v in m.values() if not isinstance(v, list))
        assert 0 < m["alpha_tail"] <= m["alpha_mean"] <= 1 + 1e-5 and 0 < m["kv_read"] <= 1 and 0 < m["reward"] < 1
        assert m["grad_norm"] > 0 and len(m["tail_by_bin"]) == len(m["pages_by_bin"])
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "Done." in printed and "step-000004" in printed and "step    4 |" in printed
    assert sorted(p.name for p in out.glob("step-*")) == ["step-000003", "step-000004"]
    assert not list(out.glob(".*.part")) and json.loads((out / "config.json").read_text())["samples"] == 2


def test_the_checkpoint_opens_in_transformers(straight):
    """Faults: weights under other names, a tokenizer that does not come back, text that does not round-trip."""
    folder = straight[0] / "step-000004"
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), Model.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "a1;Zz9;a+b=c;?c#c0."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text and ours.stop_ids == [tokenizer.encode(".")[0]]
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits - ours(torch.tensor([ids]))).abs().max() < 1e-4
    start = Model.from_pretrained(straight[0] / "warm")
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), ours.parameters())), "nothing was trained"


def test_resume_is_exact(straight, tmp_path, monkeypatch, capsys):
    """Fault: a resumed run repeats or skips problems, draws, budgets or the optimizer's state. Bitwise on a CPU."""
    monkeypatch.setattr(train, "grade", text_reward)
    run(tmp_path, "--steps", 2)
    assert "--lr" in refusal(capsys, "--resume", "--out", tmp_path, "--lr", "0.5"), "a changed flag is named"
    assert "--task" in refusal(capsys, "--resume", "--out", tmp_path, "--task", "countdown")
    train.main(["--resume", "--out", str(tmp_path), "--steps", "4"])
    for a, b in zip(metrics(straight[0]), metrics(tmp_path), strict=True):
        for key in (a.keys() | b.keys()) - CLOCKS:
            assert a[key] == b[key] or str(a[key]) == str(b[key]), (a["step"], key)  # NaN is not itself
    one, two = (Model.from_pretrained(out / "step-000004").state_dict() for out in (straight[0], tmp_path))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_constant_rewards_change_nothing_and_are_measured(straight, tmp_path, monkeypatch):
    """Fault: 0/0 when no group has any spread; and then nothing left to steer by. Reuses the warm start."""
    monkeypatch.setattr(train, "grade", lambda response, problem: 1.0)
    run(tmp_path, "--steps", 1, "--warm-dir", straight[0] / "warm", "--weight-decay", 0.1)
    before, after = (Model.from_pretrained(f).state_dict() for f in (straight[0] / "warm", tmp_path / "step-000001"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    m = metrics(tmp_path)[1]
    assert m["dropped"] == 2 and m["grad_norm"] == 0 and m["loss"] == 0 and 0 < m["alpha_tail"] <= 1 + 1e-5
    assert m["alpha_tokens"] % 2 == 0 and m["alpha_tokens"] >= 4, "one sample of each group counts for both"


def test_an_older_run_in_the_folder_is_no_trap(straight, tmp_path):
    """Fault: a new run in a used folder deletes its own checkpoints, being lower in number, and resumes from the old one."""
    for step in (40, 50):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "trainer.pt").write_text("older")
    with suppress(SystemExit):  # refusing would do as well
        run(tmp_path, "--steps", 1, "--warm-dir", straight[0] / "warm")
        assert (tmp_path / "step-000001" / "config.json").exists()
        assert train.newest_checkpoint(tmp_path).name == "step-000001"
