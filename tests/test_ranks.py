"""Several processes: two gloo ranks do what one does, whoever has gradients; checkpoints cross from one count to another."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train
import verify
from test_cli import SMALL, metrics, refusal, weights

ROOT = Path(__file__).parents[1]
# Rewards by the text alone, so that an untrained model has something to learn from; of some or all prompts none.
SCRIPT = """
import sys, zlib
sys.path.insert(0, {root!r})
import train, verify
def reward(response, problem, *how):
    return 0.0 if problem.prompt[0] in {flat!r} else float(zlib.crc32(response.encode()) % 2)
verify.grade = reward
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """launch(ranks, out, *flags, flat=...): a run of so many processes; prompts that begin with a letter of `flat` earn 0."""
    root = tmp_path_factory.mktemp("ranks")

    def go(ranks, out, *flags, flat=""):
        argv = [*SMALL, "--prompts", "3", "--out", str(out), "--warm-dir", str(root / "warm"), "--eval", "3", *map(str, flags)]
        script = SCRIPT.format(root=str(ROOT), flat=flat)
        if ranks == 1:
            with pytest.MonkeyPatch.context() as m:
                m.setattr(verify, "grade", None)  # put back at the end
                exec(script, {})
                return train.main(argv)
        (root / "run.py").write_text(script + "train.main(sys.argv[1:])")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                               root / "run.py", *argv], capture_output=True, text=True, timeout=300,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]

    go(1, root / "first", "--steps", 1)  # makes the warm start
    return go


def same(one, two, step, tolerance=1e-5):
    a, b = (weights(x / f"step-{step:06d}") for x in (one, two))
    assert max((a[name] - b[name]).abs().max() for name in a) <= tolerance
    for m, w in zip(metrics(one), metrics(two), strict=True):
        assert m.keys() == w.keys() and m["step"] == w["step"]
        for key in "reward length pages_by_bin dropped alpha_tokens alpha_tail eval loss grad_norm kl ess distill_kl".split():
            assert key not in m or m[key] == pytest.approx(w[key], abs=2e-4, rel=1e-3, nan_ok=True), key


@pytest.mark.parametrize("flat, more", [
    ("", "--minibatches 2 --distill 0.5 --lora-rank 2 --kl-ref 0.01"), (train.string.ascii_letters[:26], ""),
    (train.string.printable, "")])
def test_two_ranks_give_what_one_gives(launch, tmp_path, flat, more):
    """Faults: a token mean a rank, a seed a rank, a hang when one rank has no gradient (3 groups), 0/0 when none has."""
    for ranks, name in ((1, "one"), (2, "two")):
        launch(ranks, tmp_path / name, "--steps", 3, *more.split(), flat=flat)
    same(tmp_path / "one", tmp_path / "two", 3)
    moved = [m["grad_norm"] > 0 for m in metrics(tmp_path / "one") if "reward" in m]
    assert any(moved) is (flat != train.string.printable)
    assert not [*tmp_path.rglob("*.part")]


def test_a_run_crosses_from_two_ranks_to_one_and_back(launch, tmp_path):
    launch(1, tmp_path / "one", "--steps", 3)
    for ranks, steps in ((2, 1), (1, 2), (2, 3)):
        launch(ranks, tmp_path / "hops", "--steps", steps, *["--resume"] * (steps > 1))
    same(tmp_path / "one", tmp_path / "hops", 3)


def test_more_ranks_than_prompts_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert "--prompts 8" in refusal(capsys)
