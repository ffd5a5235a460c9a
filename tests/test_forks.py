"""The README's "Change one thing": each recipe, as printed there, applied to a copy of the sources and run."""
import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import test_actor
import test_schedule
import test_sparse_attn
import train  # noqa: F401 (all four files are loaded before a fork stands in for them)
from sparse_attn import sparse_attention
from test_cli import SMALL

torch.set_num_threads(1)
ROOT = Path(train.__file__).parent
NAMES = "sparse_attn", "sparrow", "verify", "train"
README = (ROOT / "README.md").read_text()
SECTION = README.partition("## Change one thing\n")[2].partition("\n## ")[0]
BLOCKS = [block.splitlines() for block in re.findall(r"```diff\n(.*?)```", SECTION, re.S)]


def apply(block, texts):
    """A block's hunks, by hand: the old lines stand once in the file, after the line that the hunk names."""
    file = where = None
    hunks = []
    for line in block:
        if line.startswith("--- "):
            file = line[4:]
        elif line.startswith("@@ "):
            where = line[3:]
            hunks.append((file, where, [], []))
        else:
            assert line[0] in " +-", f"README, {file}, {where}: no hunk line: {line!r}"
            for side, marks in zip(hunks[-1][2:], (" -", " +")):
                if line[0] in marks:
                    side.append(line[1:] + "\n")
    for file, where, old, new in hunks:
        old, new, text = "".join(old), "".join(new), texts[file]
        assert old and text.count(old) == 1, f"README, {file}, {where}: these lines stand {text.count(old)} times:\n{old}"
        assert where in text[:text.index(old)], f"README: {file} has no {where!r} before\n{old}"
        texts[file] = text.replace(old, new)


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(i, *tests): {name: module} with recipe i applied, which the modules `tests` use from then on, to the test's end."""
    def make(i, *tests):
        texts = {f"{name}.py": (ROOT / f"{name}.py").read_text() for name in NAMES}
        apply(BLOCKS[i], texts)
        for file, text in texts.items():
            (tmp_path / file).write_text(text)
        for name in NAMES:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        modules = {name: importlib.import_module(name) for name in NAMES}
        assert all(Path(m.__file__).parent == tmp_path for m in modules.values())
        for test in tests:
            for name, value in list(vars(test).items()):
                if callable(value) and getattr(value, "__module__", None) in NAMES:
                    monkeypatch.setattr(test, name, getattr(modules[value.__module__], name))
        return modules
    return make


def test_the_recipes_are_short():
    """Fault: a fork that has outgrown an afternoon, or a block that no test below applies."""
    assert len(BLOCKS) == 3
    for block in BLOCKS:
        assert sum(line[0] in "+-" and not line.startswith("--- ") for line in block) < 20
        assert max(map(len, block)) <= 128 and all(line[1:].isascii() for line in block)


def bound_pages(q, k, S, budget, first, last):
    """`naive_pages` under Quest's score, by its definition. q: [R,D]; k: [T,D] -> sorted list"""
    pages = k.double().split(S)
    score = [sum(float(torch.maximum(x * p.amin(0), x * p.amax(0)).sum()) for x in q.double()) for p in pages]
    kept = [p for p in range(len(pages)) if p < first or p >= len(pages) - last]
    others = sorted(set(range(len(pages))) - set(kept), key=lambda p: (-score[p], p))
    return sorted((kept + others)[:min(max(budget, first + last), len(pages))])


def test_another_page_score(fork, checkpoints, monkeypatch):
    """The score is the one it claims to be, decoding is teacher forcing under it, in the actor too, and it chooses otherwise."""
    T = test_sparse_attn
    sa = fork(0, T, test_actor)["sparse_attn"]
    pool = T.empty_pool
    monkeypatch.setattr(T, "empty_pool", lambda *a: [*pool(*a)[:2], pool(*a)[2].repeat(1, 1, 2)])
    monkeypatch.setattr(T, "naive_pages", bound_pages)
    T.test_gradients_are_those_of_masked_attention(1, 0)
    for first, last in ((1, 0), (1, 2)):  # last = 0: a token's own unfinished page competes
        T.test_teacher_forcing_is_decoding(8, first, last)
    test_actor.test_sparse_rollout_equals_teacher_forcing({"qwen3": checkpoints["qwen3"]}, [[5, 9, 4], list(range(2, 35))])
    q, k, v = T.qkv(1, 4, 2, 90, 16)
    budgets = torch.full((90,), 5, dtype=torch.int32)
    out = sa.sparse_attention(q, k, v, budgets, 8)
    assert (out - sparse_attention(q, k, v, budgets, 8)).abs().max() > 0.05, "the same pages as by the mean"
    if sa.triton:  # teacher forcing's kernels need no change
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kernel = sa.sparse_attention_triton(*(x.to(device) for x in (q, k, v, budgets)), 8)
        assert (kernel.cpu() - out).abs().max() < 1e-5


def test_another_rule_for_the_budget(fork):
    """The toy loop closes under it, its state survives a checkpoint, and it is another rule."""
    T = test_schedule
    fork(1, T)
    for start in (1, None):
        T.test_closed_loop(start)
    T.test_state_round_trip_continues_identically()
    c = T.Controller(T.table(50))
    assert T.moved(c, *T.rows(10, 100, 4)) == pytest.approx(5 * (0.04 - 0.05))  # the built-in rule is not sure, and holds
    kept = 0.8 * math.exp(-0.05 / 0.2)  # of the first step's evidence
    e = (0.04 * kept + 0.1) / (kept + 1)
    assert T.moved(c, *T.rows(10, 100, 10)) == pytest.approx(5 * (e - 0.05) + 2 * (0.1 - e) / (kept + 1))


def test_another_reward(fork, tmp_path, monkeypatch):
    """Two steps of the built-in model run, the advantages see the bonus, and the metrics keep the task's reward."""
    forked, seen = fork(2)["train"], []
    plain = forked.advantages
    monkeypatch.setattr(forked, "advantages", lambda rewards, *how: seen.append(rewards) or plain(rewards, *how))
    forked.main([*SMALL, "--out", str(tmp_path / "out"), "--steps", "2", "--samples", "8"])
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [m["step"] for m in steps] == [1, 2] and len(seen) == 2
    for m, shaped in zip(steps, seen):
        assert math.isfinite(m["loss"]) and m["grad_norm"] > 0 and sum(shaped) / len(shaped) > m["reward"]
