"""The command line: what it refuses and how, a very small whole run, and an exact resume."""
import json
import math
import signal
import subprocess
import sys
import time
import zlib
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
import verify
from sparrow import Model

SMALL = ("--device cpu --task chain:4,4,2 --warm-start 2 --warm-tokens 500 --prompts 2 --samples 2 --max-new-tokens 24 "
         "--eval 2 --eval-every 1 --save-every 1 --page-size 8 --min-pages 3 --budget 0.8 --tail 0.05").split()
CLOCKS = {"rollout_s", "grade_s", "train_s", "tokens_per_s"}


def run(out, *more):
    train.main([*SMALL, "--out", str(out), *map(str, more)])


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return Model.from_pretrained(folder).state_dict()


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
    for name in ("gpt2", "mamba99"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({"model_type": name}))
    train.build_tiny(root / "cut", 0)
    file = root / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20_000])
    (root / "good.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (root / "bad.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "a"\n')
    return root


@pytest.mark.parametrize("argv, named", [
    ("--stepz 3", "--stepz"), ("--step 3", "--step 3"), ("--steps x", "--steps"), ("--steps 0", "--steps 0"),
    ("--budget 0", "--budget 0"), ("--budget 1.5", "--budget 1.5"), ("--budget -1", "--budget -1"), ("--tau 1", "--tau 1"),
    ("--samples 1", "--samples 1"), ("--adv mean", "--adv"), ("--device tpu", "tpu"), ("--schedule nosuch", "nosuch"),
    ("--warm-start 5 --data {given}/good.jsonl", "--warm-start"), ("--resume", "--resume"), ("--chat on", "--chat"),
    ("--task chain:a,b --warm-start 5", "chain:a,b"), ("--task countdown:3,20,7", "countdown:3,20,7"),
    ("--task poetry", "poetry"), ("--task chain:4,2,3", "chain:4,2,3"),
    ("--model {given}/nowhere", "{given}/nowhere"), ("--model {given}", "config.json"), ("--model nosuch", "Qwen/nosuch"),
    ("--model {given}/gpt2", "'gpt2' is not supported"), ("--model {given}/mamba99", "mamba99"),
    ("--model {given}/cut", "{given}/cut"), ("--data {given}/bad.jsonl", "bad.jsonl, line 2"),
    ("--data {given}/none.jsonl", "none.jsonl"), ("--max-new-tokens 1010", "context of 1024"),
    ("--pool-pages 2", "--pool-pages"), ("--control median", "--control"), ("--mean-alpha 1", "--mean-alpha 1"),
    ("--correction best", "--correction"), ("--correction jackpot --alpha-every 4", "--alpha-every 1"),
    ("--correction tv --max-tv 0", "--max-tv 0"), ("--floor 3", "--floor 3"), ("--oversample 0", "--oversample 0"),
    ("--kl-ref -1", "--kl-ref -1"), ("--plot", "--plot"), ("--plot {given}/nowhere", "{given}/nowhere"),
    ("--plot {given}", "{given}")])
def test_refusals(argv, named, given, tmp_path, capsys):
    """Fault: a traceback, or a message that does not name what was given."""
    defaults = ["--task", "chain:4,4,2", "--warm-start", 0, "--device", "cpu", "--out", tmp_path / "out"]
    assert named.format(given=given) in refusal(capsys, *defaults, *argv.format(given=given).split())


def test_from_a_shell_there_is_no_traceback():
    """Once as a process, from elsewhere: the script finds its modules, and fails like a command."""
    done = subprocess.run([sys.executable, Path(train.__file__), "--stepz", "3"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and "unrecognized arguments: --stepz 3" in done.stderr and "Traceback" not in done.stderr


def text_reward(response, problem, *how):
    """Something to learn for an untrained model: a hash of the text."""
    return zlib.crc32(response.encode()) % 1000 / 1000


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of four steps in one go, under the stand-in reward."""
    out, seen = tmp_path_factory.mktemp("straight"), set()
    with pytest.MonkeyPatch.context() as patch, open(out / "printed", "w") as printed, redirect_stdout(printed):
        patch.setattr(verify, "grade", lambda text, problem, *how: seen.add(problem.prompt) or text_reward(text, problem))
        run(out, "--steps", 4)
    assert len(seen) == 4 * 2 + 2, "every step its own problems, and the held-out ones apart"
    return out


def test_a_small_run_leaves_what_it_says(straight):
    """The whole loop on the built-in model: metrics, plot, checkpoints, summary."""
    lines, printed = metrics(straight), (straight / "printed").read_text()
    assert [m["step"] for m in lines] == [0, 1, 2, 3, 4] and all("eval" in m for m in lines)
    for m in lines[1:]:
        assert {"solved", "length", "cut_off", "dropped", "ratio_mean", "kl", "clipped", "entropy", *CLOCKS} <= m.keys()
        assert all(math.isfinite(v) for v in m.values() if not isinstance(v, list))
        assert 0 < m["alpha_tail"] <= m["alpha_mean"] <= 1 + 1e-5 and 0 < m["kv_read"] < 1 and 0 < m["reward"] < 1
        assert m["grad_norm"] > 0 and len(m["tail_by_bin"]) == len(m["pages_by_bin"])
    assert lines[1]["pages_by_bin"] != lines[4]["pages_by_bin"], "the controller did not move: resuming would prove less"
    assert (straight / "run.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "Done." in printed and "step-000004" in printed and "step    4 |" in printed
    assert sorted(p.name for p in straight.glob("*step-*")) == ["step-000003", "step-000004"]


def test_the_checkpoint_opens_in_transformers(straight):
    """Faults: weights under other names, a tokenizer that does not come back, text that does not round-trip."""
    folder, text = straight / "step-000004", "a1;Zz9;a+b=c;?c#c0."
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), Model.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text and ours.stop_ids == ids[-1:]
    with torch.no_grad():
        assert (theirs(torch.tensor([ids])).logits - ours(torch.tensor([ids]))).abs().max() < 1e-4
    start = weights(straight / "warm")
    assert any(not torch.equal(start[name], p) for name, p in ours.named_parameters()), "nothing was trained"


def test_resume_is_exact(straight, tmp_path, monkeypatch, capsys):
    """Fault: a resumed run repeats or skips problems, draws, budgets or the optimizer's state. Bitwise on a CPU."""
    monkeypatch.setattr(verify, "grade", text_reward)
    run(tmp_path, "--steps", 2)
    assert "--lr" in refusal(capsys, "--resume", "--out", tmp_path, "--lr", "0.5"), "a changed flag is named"
    assert train.parse_args(["--resume", "--allow-changes", "--out", str(tmp_path), "--lr", "0.5"]).lr == 0.5
    train.main(["--resume", "--out", str(tmp_path), "--steps", "4"])
    for a, b in zip(metrics(straight), metrics(tmp_path), strict=True):
        assert {k: str(v) for k, v in a.items() if k not in CLOCKS} == {k: str(v) for k, v in b.items() if k not in CLOCKS}
    one, two = weights(straight / "step-000004"), weights(tmp_path / "step-000004")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_broken_checkpoint_and_a_cut_line_are_passed_over(straight, tmp_path, monkeypatch, capsys):
    """What a kill or a full disk leaves: the last whole checkpoint is used, and said so; metrics go on from there."""
    monkeypatch.setattr(verify, "grade", text_reward)
    run(tmp_path, "--steps", 3)
    state = tmp_path / "step-000003" / "trainer.pt"
    state.write_bytes(state.read_bytes()[:-100])
    (tmp_path / ".step-000004.part").mkdir()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 4, "rew')
    train.main(["--resume", "--out", str(tmp_path), "--steps", "4"])
    assert "step-000003" in capsys.readouterr().err
    one, two = weights(straight / "step-000004"), weights(tmp_path / "step-000004")
    assert all(torch.equal(one[name], two[name]) for name in one) and [m["step"] for m in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    for folder in tmp_path.glob("step-*"):
        (folder / "model.safetensors").write_bytes(b"")
    assert "no whole checkpoint" in refusal(capsys, "--resume", "--out", tmp_path)


def test_gradients_that_stay_infinite_stop_the_run_with_a_checkpoint(straight, tmp_path, monkeypatch, capsys):
    """Each such update is skipped and counted; the weights stay what they were."""
    monkeypatch.setattr(verify, "grade", text_reward)
    loss = train.policy_loss
    monkeypatch.setattr(train, "policy_loss", lambda *a: (lambda found: (found[0] * float("nan"), found[1]))(loss(*a)))
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, "--warm-dir", straight / "warm", "--eval", 0, "--max-skipped", 2, "--steps", 9)
    assert stopped.value.code == 1 and "--max-skipped" in capsys.readouterr().err
    assert [m["skipped"] for m in metrics(tmp_path)[1:]] == [1, 1]
    one, two = weights(straight / "warm"), weights(tmp_path / "step-000002")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(straight, tmp_path_factory):
    """Four steps whose rewards differ by length: the flags, and the weights they end with."""
    out = tmp_path_factory.mktemp("undisturbed")
    more = ["--warm-dir", straight / "warm", "--overlong", 24, "--eval", 0]
    run(out, *more, "--steps", 4)
    last = weights(out / "step-000004")
    assert not torch.equal(last["lm_head.weight"], weights(straight / "warm")["lm_head.weight"]), "it learns something"
    return [*SMALL, *map(str, more)], last


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_in_the_middle_it_ends_the_same(number, status, undisturbed, tmp_path):
    """Faults: a signal that loses the run, leaves a half-written checkpoint, or makes the rest come out differently."""
    more, want = undisturbed
    command = [sys.executable, train.__file__, *more, "--out", tmp_path, "--steps"]
    child = subprocess.Popen([*map(str, command), "4000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob("step-*")) and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(number)
        assert child.wait(60) == status
    finally:
        child.kill()
    done = int(sorted(tmp_path.glob("step-*"))[-1].name[5:])
    if done > 4:
        pytest.skip("the machine was too slow to stop it in time")
    train.main(["--resume", "--out", str(tmp_path), "--steps", "4"])
    got = weights(tmp_path / "step-000004")
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_the_ablations_resume_exactly_too(straight, tmp_path, monkeypatch):
    """Faults: --kl-ref pulling to the checkpoint resumed from, not to the start; --oversample that keeps or counts wrongly."""
    monkeypatch.setattr(verify, "grade", text_reward)
    more = "--oversample 2 --kl-ref 0.1 --control mean --correction jackpot --adv none --minibatches 2 --eval 0 --steps".split()
    for name, steps in (("one", 2), ("two", 1)):
        run(tmp_path / name, "--warm-dir", straight / "warm", *more, steps)
    train.main(["--resume", "--out", str(tmp_path / "two"), "--steps", "2"])
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert {k: str(v) for k, v in a.items() if k not in CLOCKS} == {k: str(v) for k, v in b.items() if k not in CLOCKS}
    first, last = one[1], one[2]
    assert 0 <= first["kl_ref"] < last["kl_ref"] and first["reward"] > first["reward_drawn"] and first["dropped"] == 0
    assert first["pages_by_bin"] != last["pages_by_bin"] and all(0 < m["ess"] <= 1 for m in one[1:])


def test_six_steps_are_three_and_three_with_everything_on(straight, tmp_path, monkeypatch):
    """The controller, DistillSparse and two updates a rollout: bitwise, with the LoRA, its optimizer and its export; and the
    first step's theta is that without --distill."""
    monkeypatch.setattr(verify, "grade", text_reward)
    more = ["--warm-dir", straight / "warm", "--eval", 0, "--minibatches", 2, "--save-every", 1, "--keep", 9]
    for name, steps in (("one", 6), ("two", 3)):
        run(tmp_path / name, *more, "--distill", 1, "--lora-rank", 4, "--steps", steps)
    train.main(["--resume", "--out", str(tmp_path / "two"), "--steps", "6"])
    one, two = (torch.load(tmp_path / x / "step-000006/trainer.pt", weights_only=True)["lora"] for x in ("one", "two"))
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], two[name]))
    assert all(B.any() for _, B in one.values())
    a, b = (weights(tmp_path / x / "step-000006") for x in ("one", "two"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    for m, w in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert {k: str(v) for k, v in m.items() if k not in CLOCKS} == {k: str(v) for k, v in w.items() if k not in CLOCKS}
    assert metrics(tmp_path / "one")[1]["pages_by_bin"] != metrics(tmp_path / "one")[6]["pages_by_bin"]
    run(tmp_path / "without", *more, "--steps", 1)
    with_it, without = weights(tmp_path / "one/step-000001"), weights(tmp_path / "without/step-000001")
    assert all(torch.equal(with_it[name], without[name]) for name in with_it)
    adapter = tmp_path / "one/step-000006/sparse_actor"
    saved = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    assert torch.equal(saved[f"base_model.model.{name}.lora_B.weight"], one[name + ".weight"][1])
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4


def some_run(folder, rewards, seed=0, **flags):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(seed=seed, out=str(folder)) | flags))
    lines = [dict(step=0, eval=0.25)] + [dict(step=i, reward=r, length=9, alpha_tail=float("nan"), alpha_mean=1.0, kv_read=.5)
                                         for i, r in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    return folder


def test_plot_puts_runs_side_by_side(tmp_path, capsys):
    """Faults: seeds of one configuration as lines of their own, a mean over runs of unlike length, a folder taken on trust."""
    runs = [some_run(tmp_path / "a", [1.0, 2.0, 7.0]), some_run(tmp_path / "b", [3.0, 6.0], seed=1),
            some_run(tmp_path / "c", [0.0], tau=0.0)]
    train.main(["--plot", *map(str, runs), "--plot-out", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    out = capsys.readouterr().out
    assert "3 runs, 2 configurations" in out and out.count("0.25 -> 0.25, 50%, 1.0000, nan, nan") == 3
    histories = [train.read_run(r)[1] for r in runs[:2]]
    assert train.mean_and_band(histories, "reward") == ([1, 2], [2, 4], [1, 2], [3, 6])
    assert train.mean_and_band(histories, "eval") == ([0], [.25], [.25], [.25])
    assert train.mean_and_band(histories, "nothing") == ([], [], [], [])
    for name, text in (("empty", ""), ("cut", '{"step": 0}\n{"ste\n')):
        (some_run(tmp_path / name, []) / "metrics.jsonl").write_text(text)
        assert str(tmp_path / name) in refusal(capsys, "--plot", runs[0], tmp_path / name)
    assert "nowhere" in refusal(capsys, "--plot", runs[0], "--plot-out", tmp_path / "nowhere" / "x.png")


def test_constant_rewards_change_nothing_and_are_measured(straight, tmp_path, monkeypatch):
    """Fault: 0/0 when no group has any spread; and then nothing left to steer by. Reuses the warm start."""
    monkeypatch.setattr(verify, "grade", lambda response, problem, *how: 1.0)
    run(tmp_path, "--steps", 1, "--warm-dir", straight / "warm", "--weight-decay", 0.1)
    before, after, m = weights(straight / "warm"), weights(tmp_path / "step-000001"), metrics(tmp_path)[1]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert m["dropped"] == 2 and m["grad_norm"] == 0 and m["loss"] == 0 and 0 < m["alpha_tail"] <= 1 + 1e-5
    assert m["alpha_tokens"] % 2 == 0 and m["alpha_tokens"] >= 4, "one sample of each group counts for both"


def test_an_older_run_in_the_folder_is_no_trap(straight, tmp_path):
    """Fault: a new run in a used folder deletes its own checkpoints, lower in number, and resumes from the old one."""
    for step in ("step-000040", "step-000050"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "trainer.pt").write_text("older")
    with suppress(SystemExit):  # refusing would do as well
        run(tmp_path, "--steps", 1, "--warm-dir", straight / "warm")
        assert train.newest_checkpoint(tmp_path).name == "step-000001"
