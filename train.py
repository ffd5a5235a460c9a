"""Sparrow: GRPO with a sparse actor and a dense policy, and a controller that keeps the two close. Read top to bottom.

One step, one direction:

    problems -> prompt ids -> actor.generate (sparse, under the schedule) -> rollouts -> rewards -> group advantages
      -> log-probs of the dense policy; alpha comes free here -> loss (Eq. 1) -> step theta
      -> controller.update(alpha) -> the next schedule -> actor.load(policy)

The loss is Eq. 1 of arXiv 2606.08446, per token, averaged over all response tokens of the step:

    w * min(r * A, clip(r, 1 - 0.2, 1 + 0.28) * A)     r = pi / pi_old,   w = min(pi_old / pi_actor, 2), no gradient

w is truncated importance sampling (TIS): it corrects the small mismatch that remains. It does not rescue a large one;
that is the controller's work, which moves the budget of each bin of cached tokens so that the `--tail` quantile of
alpha = sum_v min(p(v), q(v)) stays above `--tau` (see sparrow.Controller).

    python train.py                                            a tiny model, made and trained here, on a laptop CPU
    python train.py --model Qwen2.5-1.5B --budget 0.1          a real one

Deviations from the paper:
 1. The schedule is found while training, by a controller; theirs comes from an offline sweep (`--schedule` takes it).
 2. alpha is exact, over the whole vocabulary; their engine sees the top 20 of each side.
 3. More to compare with: `--adv none` (Dr. GRPO), `--correction`, `--control mean`, `--kl-ref`. Groups without spread are
    dropped, but still measured.
 4. The built-in model reads its tail at 1%, not 5%: its traces are near-deterministic, and fewer than 5% of the tokens
    decide anything.
"""
import argparse
import json
import math
import os
import pickle
import random
import shutil
import signal
import string
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from sparrow import (Actor, Config, Controller, Model, Rollout, Schedule, chunked_acceptance, chunked_kl, encode_prompt,
                     gather_logprobs, load_with_tokenizer, lora_on, make_lora, matrix_weights, save_lora, sparse_attend, tail,
                     token_logprobs, whole)
from sparse_attn import DENSE
from verify import check_flags, grade_all, load_problems, parse_task

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from tqdm import tqdm

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a checkpoint of one process: as it should be

# ---- flags ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One flag; `builtin` is its default for the built-in model, where that is another."""
    name: str
    default: object
    help: str
    builtin: object = None
    choices: list | None = None


FLAGS = [
    Flag("--model", None, "checkpoint folder or Hub name; without it, the built-in model"),
    Flag("--task", "countdown", "problems made up as needed: chain or countdown, or with sizes, as in chain:20,24,4",
         "chain:16,18,3"),
    Flag("--data", None, "problems from a JSONL file instead, or hub:NAME[,CONFIG][:SPLIT]; kinds may be mixed"),
    Flag("--code-timeout", 10.0, "seconds for all tests of one generated program"),
    Flag("--code-reward", "all", "a program is worth 1 if it passes all tests, or the fraction passed",
         choices=["all", "fraction"]),
    Flag("--chat", "auto", "wrap prompts in the tokenizer's chat template; auto: if it has one",
         choices=["auto", "on", "off"]),
    Flag("--out", "out", "folder for metrics, plot and checkpoints"),
    Flag("--steps", 200, "GRPO steps", 16),
    Flag("--seed", 0, "seeds problems, samples and weights"),
    Flag("--device", "auto", "where to run", choices=["auto", "cpu", "cuda"]),
    # rollouts
    Flag("--prompts", 32, "prompts a step, over all processes", 8),
    Flag("--samples", 8, "samples a prompt: the group that rewards are compared within"),
    Flag("--oversample", 1, "draw so many times --samples a prompt and keep the best by reward (the paper's Appendix A)"),
    Flag("--max-new-tokens", 1024, "longest response", 180),
    Flag("--temperature", 1.0, "of sampling, and of every distribution compared"),
    Flag("--rows", 256, "sequences decoded at once by a process, at most", 64),
    Flag("--pool-pages", 0, "pages in the KV pool; 0: enough for all rows, or what the GPU has left"),
    # sparsity
    Flag("--budget", 0.1, "share of a row's cached pages that one query reads, in (0, 1]; where the controller starts"),
    Flag("--schedule", None, "start from a published table (qwen3-4b-0.86, ...) or a schedule file, not from --budget"),
    Flag("--tau", 0.86, "the controller keeps the tail of alpha above this; 0: the budget stays as it is"),
    Flag("--tail", 0.05, "the fraction of tokens that may lie below tau. Near-deterministic traces need less: in the "
         "built-in task fewer than 5%% of the tokens decide anything", 0.01),
    Flag("--control", "tail", "what the controller holds: --tail of the tokens below --tau, or the mean at --mean-alpha",
         choices=["tail", "mean"]),
    Flag("--mean-alpha", 0.975, "mean of alpha that --control mean holds", 0.995),
    Flag("--page-size", 16, "tokens in a KV page"),
    Flag("--min-pages", 32, "floor of --budget and of the controller", 4),
    Flag("--dense-layers", 2, "first layers that stay dense", 1),
    Flag("--alpha-every", 4, "measure alpha at every n-th response token", 1),
    # policy update
    Flag("--lr", 1e-6, "learning rate of AdamW", 4e-4),
    Flag("--warmup", 5, "steps of linear learning-rate warm-up", 0),
    Flag("--minibatches", 1, "optimizer steps a rollout is split into"),
    Flag("--clip-low", 0.2, "lower clip of the ratio"),
    Flag("--clip-high", 0.28, "upper clip of the ratio"),
    Flag("--correction", "tis", "of actor-policy mismatch, by importance weights: none; tis (truncated at --cap); mask (drop "
         "outside --floor..--cap); seq (one a sequence); jackpot (rejection sampling); tv (drop where 1 - alpha is over "
         "--max-tv)", choices=["none", "tis", "mask", "seq", "jackpot", "tv"]),
    Flag("--cap", 2.0, "largest importance weight"),
    Flag("--floor", 0.5, "least importance weight of --correction mask"),
    Flag("--max-tv", 0.14, "largest total variation 1 - alpha of --correction tv"),
    Flag("--kl-ref", 0.0, "weight of a KL term (k3) to the starting policy; costs a second copy of the fp32 weights in memory, "
         "and a forward pass"),
    Flag("--distill", 0.0, "DistillSparse: train a LoRA of the sparse actor's own; weight of KL(sparse || dense); 0: none"),
    Flag("--lora-rank", 16, "rank of that LoRA"),
    Flag("--distill-lr", 1e-3, "its learning rate"),
    Flag("--adv", "std", "divide advantages by the group's standard deviation, or not", choices=["std", "none"]),
    Flag("--overlong", 0, "soft penalty (DAPO): over the last n tokens before --max-new-tokens the reward sinks by up to 1"),
    Flag("--truncated", "keep", "responses cut off at --max-new-tokens: keep in the loss, or mask", choices=["keep", "mask"]),
    Flag("--grad-clip", 1.0, "largest gradient norm"),
    Flag("--max-skipped", 5, "stop after so many steps in a row whose gradient was not finite"),
    Flag("--weight-decay", 0.0, "of AdamW"),
    Flag("--micro-tokens", 16384, "tokens in one forward pass, at most: memory only, the mathematics stays", 8192),
    Flag("--offload", False, "keep fp32 weights, gradients and AdamW's state in CPU memory (FSDP2's CPU offload): slower, for "
         "small GPUs"),
    Flag("--gpu-memory", 0.0, "GiB of each GPU to plan for and stay within; 0: all that is free"),
    # supervised warm start on a procedural task's own traces
    Flag("--warm-start", 0, "supervised steps on the task's worked traces before GRPO, at most: it ends when mastered", 720),
    Flag("--warm-dir", None, "where the warm-started model is kept and looked for (default OUT/warm)"),
    Flag("--warm-lr", 1e-5, "AdamW learning rate of the warm start", 3e-3),
    Flag("--warm-muon", 0.0, "Muon learning rate for hidden matrices in the warm start; 0: AdamW for all", 0.02),
    Flag("--warm-tokens", 16384, "tokens in a warm-start step", 3600),
    Flag("--give-up", 0.0, "share of the warm start's chain traces that stop working half-way and guess: a habit for GRPO "
         "to break", 0.4),
    # evaluation and saving
    Flag("--eval", 32, "held-out problems for evaluating the dense policy; 0: none", 48),
    Flag("--eval-samples", 1, "samples for each of them", 2),
    Flag("--eval-every", 20, "steps between evaluations (also before the first and after the last)", 8),
    Flag("--save-every", 50, "steps between checkpoints (also after the last)"),
    Flag("--keep", 2, "checkpoints kept, the newest ones"),
]


# Flags that leave the mathematics as it is: a resumed run may change them, and runs that differ in them are the same to --plot.
FREE = set("out steps eval_every save_every keep rows pool_pages micro_tokens offload gpu_memory device warm_dir".split())


def parse_args(argv=None):
    """The command line -> args. Values not given come from the run being resumed, else they are the defaults."""
    p = argparse.ArgumentParser(prog="train.py", allow_abbrev=False, description=__doc__.split("\n")[0])
    defaults = {f.name[2:].replace("-", "_"): f.default for f in FLAGS}
    builtins = {f.name[2:].replace("-", "_"): f.default if f.builtin is None else f.builtin for f in FLAGS}
    for f in FLAGS:
        if f.default is False:
            p.add_argument(f.name, action="store_true", default=None, help=f.help)
            continue
        kind = str if f.default is None else type(f.default)
        note = f" (default {f.default}" + (")" if f.builtin is None else f"; {f.builtin} for the built-in model)")
        p.add_argument(f.name, type=kind, choices=f.choices, metavar=kind.__name__.upper(), help=f.help + note)
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, with its flags")
    p.add_argument("--allow-changes", action="store_true", help="with --resume: take the flags given here, though they make it "
                   "another run than the one that was begun")
    p.add_argument("--plot", nargs="+", metavar="DIR", help="train nothing: draw these runs' metrics side by side; runs that "
                   "differ in their seed only become one line (mean) and band (least to largest)")
    p.add_argument("--plot-out", default="runs.png", metavar="FILE", help="where --plot draws (default runs.png)")
    args = p.parse_args(argv)
    args.parser, saved = p, {}
    if args.plot:
        return args
    if args.resume:
        config = Path(args.out or defaults["out"]) / "config.json"
        try:
            saved = read_flags(config)
        except ValueError as error:
            p.error(f"--resume: no run in '{config.parent}' ({error})")
        for key in saved.keys() - FREE if not args.allow_changes else ():
            if getattr(args, key) not in (None, saved[key]):
                p.error(f"--resume: --{key.replace('_', '-')} is {saved[key]} in that run, given {getattr(args, key)}; "
                        "leave it out, start a new run with another --out, or give --allow-changes")
    for key, default in (defaults if args.model or saved.get("model") else builtins).items():
        if getattr(args, key) is None:
            setattr(args, key, saved.get(key, default))
    _check_args(args, p)
    return args


def read_flags(path):
    """A run's config.json -> its flags, checked for type and choice. Raises ValueError that names the file."""
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(saved, dict):
        raise ValueError(f"{path}: not a JSON object")
    kinds = {float: (int, float), int: int, str: str, bool: bool, type(None): (str, type(None))}
    flags = {f.name[2:].replace("-", "_"): f for f in FLAGS}
    for key in (known := {k: v for k, v in saved.items() if k in flags}):
        value, f = saved[key], flags[key]
        if (not isinstance(value, kinds[type(f.default)]) or isinstance(value, bool) > isinstance(f.default, bool)
                or f.choices and value not in f.choices):
            raise ValueError(f"{path}: {key} is {json.dumps(value)}, which {f.name} does not take")
    return known


def _check_args(a, p):
    check_flags(a, p, "steps prompts samples oversample max_new_tokens rows page_size temperature lr minibatches cap "
                "micro_tokens warm_tokens code_timeout grad_clip eval_samples eval_every save_every keep warm_lr alpha_every "
                "lora_rank distill_lr max_skipped", "pool_pages min_pages dense_layers warmup clip_low clip_high weight_decay "
                "warm_start warm_muon give_up eval overlong kl_ref distill gpu_memory")
    for key, high in (("budget", 1), ("tail", 0.5), ("mean_alpha", 0.9999), ("max_tv", 1), ("floor", a.cap)):
        if not 0 < getattr(a, key) <= high:
            p.error(f"--{key.replace('_', '-')} {getattr(a, key)}: must be in (0, {high}]")
    if not 0 <= a.tau < 1:
        p.error(f"--tau {a.tau}: must be in [0, 1); 0 holds the budget fixed")
    if a.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: PyTorch sees no CUDA GPU here")
    if a.offload and (a.device == "cpu" or not torch.cuda.is_available()):
        p.error("--offload: there is no GPU here whose memory it could spare; leave it out")
    if a.prompts < int(os.environ.get("WORLD_SIZE", 1)):
        p.error(f"--prompts {a.prompts}: each of the {os.environ['WORLD_SIZE']} processes needs one at least")
    try:
        task = parse_task(a.task)
    except ValueError as error:
        p.error(str(error))
    if a.warm_start and (a.data or not task):
        p.error("--warm-start needs a procedural --task, which can write worked traces; with --data give --warm-start 0")
    if a.overlong > a.max_new_tokens:
        p.error(f"--overlong {a.overlong}: must not be over --max-new-tokens {a.max_new_tokens}")
    if a.correction in ("jackpot", "tv") and a.alpha_every > 1:
        p.error(f"--correction {a.correction} needs alpha at every token: give --alpha-every 1, not {a.alpha_every}")
    if a.minibatches > a.prompts:
        p.error(f"--minibatches {a.minibatches}: must not be over --prompts {a.prompts}, for groups stay whole")
    if a.samples == 1:
        p.error("--samples 1: a group of one has no spread, so nothing could be learned; give 2 or more")


# ---- processes --------------------------------------------------------------------------------------------------
# torchrun starts one process a GPU. Each generates and grades its share of the prompts with a whole actor of its own; the
# policy's fp32 weights, gradients and AdamW state are sharded (FSDP2). A sample's random numbers depend on its place in the
# global batch and every sum runs over all ranks, so that the number of processes changes nothing but time and memory.


def connect(args):
    """Join the processes that torchrun started; --offload needs a group too, if only of one -> this process's device"""
    gpu, local = args.device != "cpu" and torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    if gpu:
        torch.cuda.set_device(local)
    if ("RANK" in os.environ or args.offload) and not dist.is_initialized():
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        # gloo beside NCCL: for objects, and for what --offload keeps in CPU memory. The others wait out a warm start.
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(hours=2), **alone)
    return torch.device("cuda", local) if gpu else torch.device("cpu")


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def wait():
    if dist.is_initialized():
        dist.barrier()


def gather(items):
    """Every rank's list, joined, on every rank; all must call it."""
    if world() == 1:
        return list(items)
    lists = [None] * world()
    dist.all_gather_object(lists, list(items))
    return sum(lists, [])


def say(*words):
    if not rank():
        print(*words)


def shard(model, device, offload):
    """FSDP2: a process keeps its part of every weight, gradient and optimizer state, in CPU memory with `offload`; a layer is
    put together while it computes. Without a process group the model stays as it is."""
    if not dist.is_initialized():
        return model.to(device)
    how = dict(mesh=init_device_mesh(device.type, (world(),))) | (dict(offload_policy=CPUOffloadPolicy()) if offload else {})
    for layer in model.model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def plan_memory(config, context, free, args, ranks=1):
    """What fits on a GPU with `free` bytes, sequences of `context` tokens -> (rows, pool pages, tokens of a micro-batch, the
    numbers in words). Rows and micro-batch start from --rows and --micro-tokens and are halved until the page pool has room.

    An estimate, meant to be a little high. Raises ValueError, with the numbers, when one sequence does not fit.
    """
    c, GiB = config, 2**30
    embedding, layers = c.vocab_size * c.hidden_size, c.num_hidden_layers
    weights = matrix_weights(c) + (0 if c.tied else embedding)
    page = 2 * layers * c.num_key_value_heads * c.head_dim * 2 * args.page_size  # bytes of K and V in bf16
    page += page // (2 * args.page_size)                                         # and of its landmarks
    row_pages = -(-context // args.page_size) + 1
    samples = -(-args.prompts // ranks) * args.samples * args.oversample
    kept = -(-args.max_new_tokens // args.alpha_every) * c.hidden_size * 2       # hidden states of one sample
    layer = (matrix_weights(c) - embedding) // layers

    def use(rows, micro):
        head = 1024 * c.vocab_size * 4                                           # one chunk of logits
        token = 4 * layers * c.hidden_size + 48 * c.hidden_size + 16 * c.intermediate_size \
            + 40 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        gathered = 8 * (embedding * (1 if c.tied else 2) + 2 * layer)            # fp32, with gradients
        state = 0 if args.offload else (16 + 4 * bool(args.kl_ref)) * weights // ranks
        return dict(policy=state + (gathered if ranks > 1 or args.offload else 0), actor=2 * weights,
                    passes=5 * head + token * micro, other=GiB,
                    rollouts=samples * kept + rows * (kept + 16 * args.max_new_tokens))

    rows, micro = min(args.rows, samples), max(args.micro_tokens, context)
    while True:
        parts = use(rows, micro)
        pages = (free - sum(parts.values())) // page
        if pages >= rows * row_pages / 2 or micro == context and (rows == 1 or pages >= row_pages):
            break
        rows, micro = (rows, max(micro // 2, context)) if micro > context else ((rows + 1) // 2, micro)
    wanted = args.pool_pages or min(pages, rows * row_pages)
    numbers = ", ".join(f"{name} {size / GiB:.1f}" for name, size in (parts | dict(pool=max(wanted, row_pages) * page)).items())
    if pages < max(row_pages, args.pool_pages):
        other = "" if args.offload else f" or --offload (spares {16 * weights / ranks / GiB:.1f}),"
        raise ValueError(f"this does not fit: {free / GiB:.1f} GiB are free, and {numbers} GiB are needed for sequences of "
                         f"{context} tokens. Try{other} a smaller --max-new-tokens, --samples or --pool-pages, or more GPUs")
    return rows, wanted, micro, f"{free / GiB:.1f} GiB free; planned: {numbers}"


# ---- GRPO -------------------------------------------------------------------------------------------------------


def advantages(rewards, group_size, scale="std"):
    """Rewards relative to their prompt's group. rewards: [N], groups of group_size in a row -> [N] fp32.

    Mean removed; divided by the n-1 standard deviation (scale="std", GRPO) or not ("none", Dr. GRPO). A group of equal
    rewards, or of one, gives exactly 0.
    """
    r = torch.as_tensor(rewards, dtype=torch.float32).view(-1, group_size)
    flat = (r == r[:, :1]).all(1, keepdim=True)
    a = r - r.mean(1, keepdim=True)
    if scale == "std" and group_size > 1:
        a = a / r.std(1, keepdim=True).masked_fill(flat, 1)
    return a.masked_fill(flat, 0).flatten()


def best_of(rewards, drawn, n):
    """Indices of the n best of every `drawn` in a row, in their order; ties to the earlier. --oversample keeps these."""
    starts = range(0, len(rewards), drawn)
    return [i for s in starts for i in sorted(sorted(range(s, s + drawn), key=lambda i: -rewards[i])[:n])]


def importance_weights(log_ratio, mask, correction="tis", cap=2.0, alpha=None, floor=0.5, max_tv=0.14):
    """What a token's loss is multiplied by since the actor is not the policy -> (w, kept, cut), all [N,T].

    kept: tokens that count; cut: 1 where w was truncated or the token dropped. With rho = pi_old / pi_actor = p / q:
    none     1
    tis      min(rho, cap): truncated importance sampling (Yao et al., 2025, "Your efficient RL framework...")
    mask     rho; tokens with rho outside [floor, cap] dropped: IcePop (Ling team, 2025), there 0.5 to 5
    seq      min(product of rho over the sequence, cap) for all its tokens (Liu et al., 2025, "When speed kills stability"):
             right for whole sequences, where tis is biased, but wild when they are long
    jackpot  optimal-budget rejection sampling (Chen et al., 2026, arXiv 2602.06107) at lambda = 1. A token of q is accepted
             with a = min(1, rho). Accepted ones follow min(p, q) / alpha, since alpha is just that sum, so each weighs p over
             that, alpha * max(1, rho), capped. Instead of tossing a coin, each token counts by a: the same mean gradient,
             less noise, no seed. So it is tis with every position scaled by its overlap. (Derived from the acceptance rule;
             their top-k estimate of the sum, and their training of the actor, are left out.)
    tv       min(rho, cap); positions of total variation 1 - alpha > max_tv dropped. After DPPO (Qi et al., 2026, arXiv
             2602.04879), which estimates it and drops only updates that lead further away.
    """
    rho, kept, w = log_ratio.exp(), mask, torch.ones_like(log_ratio)
    cut = (rho > cap).float()
    if correction == "tis":
        w = rho.clamp(max=cap)
    elif correction == "mask":
        w, kept = rho, mask & (rho >= floor) & (rho <= cap)
    elif correction == "seq":
        product = log_ratio.sum(-1, keepdim=True).expand_as(rho).clamp(max=80).exp()  # clamped: exp stays finite
        w, cut = product.clamp(max=cap), (product > cap).float()
    elif correction == "jackpot":
        accept = rho.clamp(max=1)
        w, cut = accept * (alpha * rho.clamp(min=1)).clamp(max=cap), 1 - accept
    elif correction == "tv":
        w, kept = rho.clamp(max=cap), mask & (1 - alpha <= max_tv)
    return w.masked_fill(~kept, 0), kept, cut.masked_fill(~kept, 1)


def policy_loss(logp, old_logp, actor_logp, adv, mask, clip_low=0.2, clip_high=0.28, correction="tis", cap=2.0,
                n_tokens=None, alpha=None, floor=0.5, max_tv=0.14):
    """Eq. 1, negated, as a token mean -> (loss, metrics).

    logp, old_logp, actor_logp: [N,T] (or flat [M]: one sequence) log-probs of the sampled tokens under the policy, the
    policy that was copied into the actor, and the actor; adv: [N] a sample (or of logp's shape); mask: tokens that count.
    n_tokens is the whole step's count of such tokens over all micro-batches and ranks (known before tokens are dropped, so it
    counts those too); default: those kept here. correction, cap, alpha [N,T], floor, max_tv: see importance_weights.
    """
    A = adv[:, None] if adv.ndim < logp.ndim else adv
    r = _log_ratio(logp, old_logp, mask).exp()
    log_w = _log_ratio(old_logp, actor_logp, mask).detach()
    raw = log_w.exp()
    w, kept, cut = importance_weights(log_w, mask, correction, cap, alpha, floor, max_tv)
    objective = w * torch.minimum(r * A, r.clamp(1 - clip_low, 1 + clip_high) * A)
    loss = -objective.masked_fill(~kept, 0).sum() / (kept.sum().clamp(min=1) if n_tokens is None else n_tokens)

    def mean(x, where=mask):
        return (x.detach().masked_fill(~where, 0).sum() / where.sum().clamp(min=1)).item()
    w1, w2 = mean(raw), mean(raw * raw)  # before anything is cut (only ratio_mean leaves out dropped tokens), for ess, the
    # effective sample size over the sample size, (sum w)^2 / (n sum w^2)
    metrics = dict(
        tokens=int(mask.sum()), kept=int(kept.sum()), ratio_mean=mean(raw, kept), w1=w1, w2=w2, ess=w1 * w1 / max(w2, 1e-30),
        ratio_max=raw.masked_fill(~mask, 0).max().item() if raw.numel() else 0.0,
        truncated=mean(cut), kl=mean(raw - 1 - log_w), k1=mean(-log_w),
        clipped=mean(((r < 1 - clip_low) & (A < 0)) | ((r > 1 + clip_high) & (A > 0))), entropy=mean(-logp))
    return loss, metrics


def _log_ratio(a, b, mask):
    """a - b where mask holds, else 0; two log-probs of -inf have ratio 1; bounded, so that exp stays finite."""
    a, b = a.masked_fill(~mask, 0), b.masked_fill(~mask, 0)
    return (a - b).nan_to_num(nan=0.0).clamp(-20, 20)


@dataclass
class Scored:
    """A rollout with its worth. weight: how many samples it stands for when alpha is measured."""
    rollout: Rollout
    adv: float
    weight: float = 1.0
    group: int = 0  # its prompt's place in the step's global batch


@dataclass
class Batch:
    """Right-padded sequences for one forward pass. Masks come from lengths; a pad id means nothing."""
    ids: torch.Tensor         # [N,T] prompt and response
    mask: torch.Tensor        # [N,T] response tokens
    in_loss: torch.Tensor     # [N,T] those that the loss counts
    actor_logp: torch.Tensor  # [N,T] fp32
    adv: torch.Tensor         # [N]
    weight: torch.Tensor      # [N]
    measured: torch.Tensor    # [N,T] tokens whose alpha is measured
    hidden: torch.Tensor      # [M,d] the actor's last states of those, row by row
    old_logp: torch.Tensor | None = None  # [N,T], and alpha [N,T], if the policy has moved since it was the actor
    alpha: torch.Tensor | None = None


def make_batches(samples, args, device):
    """Scored -> Batches of at most --micro-tokens padded tokens each, similar lengths together."""
    def length(s):
        return len(s.rollout.prompt_ids) + len(s.rollout.ids)
    groups, group = [], []
    for s in sorted(samples, key=length):  # ascending: the newest is the longest
        if group and (len(group) + 1) * length(s) > args.micro_tokens:
            groups.append(group)
            group = []
        group.append(s)
    return [_pad(g, args, device) for g in groups + [group] if g]


def _pad(group, args, device):
    N, T = len(group), max(len(s.rollout.prompt_ids) + len(s.rollout.ids) for s in group)
    ids = torch.zeros(N, T, dtype=torch.long)
    mask, in_loss, measured = (torch.zeros(N, T, dtype=torch.bool) for _ in range(3))
    actor_logp = torch.zeros(N, T)
    for i, s in enumerate(group):
        r, start = s.rollout, len(s.rollout.prompt_ids)
        end = start + len(r.ids)
        ids[i, :end] = torch.tensor(r.prompt_ids + r.ids)
        mask[i, start:end] = True
        in_loss[i, start:end] = not (r.finish == "length" and args.truncated == "mask")
        measured[i, start:end:args.alpha_every] = True
        actor_logp[i, start:end] = r.logprobs
    adv, weight = torch.tensor([s.adv for s in group]), torch.tensor([s.weight for s in group])
    tensors = [x.to(device) for x in (ids, mask, in_loss, actor_logp, adv, weight, measured)]
    return Batch(*tensors, hidden=torch.cat([s.rollout.hidden for s in group]).to(device))


def in_step(samples, policy, args, device):
    """make_batches, and empty ones for a rank with fewer than another: FSDP's passes are taken together."""
    batches = make_batches(samples, args, device)
    nothing = Scored(Rollout([0], [], torch.zeros(0), torch.zeros(0, policy.config.hidden_size), "stop"), 0.0, weight=0.0)
    missing = max(gather([len(batches)])) - len(batches)
    return batches + [_pad([nothing], args, device) for _ in range(missing)]


def halves(batch):
    """A batch as two of half the rows; of one row, as it is."""
    if len(batch.ids) == 1:
        return [batch]
    cut = len(batch.ids) // 2
    at = dict.fromkeys(vars(batch), cut) | {"hidden": int(batch.measured[:cut].sum())}
    return [Batch(**{k: None if x is None else x[part(at[k])] for k, x in vars(batch).items()})
            for part in (lambda n: slice(None, n), lambda n: slice(n, None))]


def accumulate(batches, run, optimizer, args):
    """run(batch) on every micro-batch -> its results. When memory runs out, gradients are dropped and all of it is run anew in
    halves, which holds for the rest of the run: the same sums, in smaller passes."""
    while True:
        try:
            return [run(batch) for batch in batches]
        except torch.OutOfMemoryError:
            if world() > 1 or max(len(b.ids) for b in batches) == 1:  # other ranks are waiting in the middle of a pass
                raise
        # Here, not in the clause above: the exception keeps what the failed pass had made.
        optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batches = [half for b in batches for half in halves(b)]
        args.micro_tokens = max(b.ids.numel() for b in batches)
        print(f"out of memory in the policy pass: run again with --micro-tokens {args.micro_tokens}", file=sys.stderr)


def policy_pass(policy, batch, temperature, measure=True):
    """One dense forward -> (log-probs of the response tokens [N,T], alpha [N,T]; NaN where not measured).

    Token t is predicted by the state at t-1. alpha must be measured by the weights that the actor had.
    """
    def head(hidden, project):                                                            # hidden: [N,T,d]
        states = hidden[:, :-1]
        logp = torch.zeros(batch.ids.shape, device=hidden.device)
        logp[batch.mask] = gather_logprobs(project, states[batch.mask[:, 1:]], batch.ids[batch.mask], temperature)
        alpha = torch.full(batch.ids.shape, float("nan"), device=hidden.device)
        if measure:
            with torch.no_grad():
                p_states = states[batch.measured[:, 1:]].detach()
                alpha[batch.measured] = chunked_acceptance(project, p_states, batch.hidden, temperature)
        return logp, alpha
    return policy(batch.ids, head=head)


class Measured(list):
    """One step's (alpha [N,T], weight [N]) of every pass; T differs."""
    def rows(self):
        """(alpha [N,T], positions [N,T], mask [N,T], weight [N]); a token at index t was drawn with t tokens cached."""
        alphas, weights = zip(*self)
        T = max(a.shape[1] for a in alphas)
        alpha = torch.cat([torch.nn.functional.pad(a, (0, T - a.shape[1]), value=float("nan")) for a in alphas])
        positions = torch.arange(T, device=alpha.device).expand_as(alpha)
        return alpha, positions, ~alpha.isnan(), torch.cat(weights)


def update_policy(policy, optimizer, kept, unmoved, args, device, reference=None):
    """The step's optimizer steps. kept: Scored of groups with spread; unmoved: one of each other group, measured only;
    reference: the model of --kl-ref.

    -> (Measured, metrics over all ranks). Nothing to learn from is a no-op, not 0/0.
    """
    passes, measured, steps = [], Measured(), []

    def run(batch, n_tokens):
        old_logp, alpha = batch.old_logp, batch.alpha
        logp, new_alpha = policy_pass(policy, batch, args.temperature, measure=old_logp is None)
        if old_logp is None:
            old_logp, alpha = logp.detach(), new_alpha
        loss, metrics = policy_loss(logp, old_logp, batch.actor_logp, batch.adv, batch.in_loss, args.clip_low, args.clip_high,
                                    args.correction, args.cap, n_tokens, alpha, args.floor, args.max_tv)
        if reference is not None:  # GRPO's k3 estimate of KL(policy, reference)
            with torch.no_grad():
                ref_logp, _ = policy_pass(reference, batch, args.temperature, measure=False)
            x = _log_ratio(ref_logp, logp, batch.in_loss)
            k3 = (x.exp() - 1 - x).sum()
            loss, metrics["kl_ref"] = loss + args.kl_ref * k3 / n_tokens, k3.item() / max(metrics["tokens"], 1)
        if torch.is_grad_enabled():
            (loss * world()).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
        return metrics | {"loss": loss.item()}, None if batch.old_logp is not None else (new_alpha, batch.weight)

    def run_all(batches, n_tokens):
        found = accumulate(batches, partial(run, n_tokens=n_tokens), optimizer, args)
        passes.extend(metrics for metrics, _ in found)
        measured.extend(seen for _, seen in found if seen)

    with torch.no_grad():  # 1. groups without spread carry no gradient, but alpha would be biased without them
        run_all(in_step(unmoved, policy, args, device), 1)
    parts = [in_step(part, policy, args, device) for part in _split_groups(kept, args.minibatches)]
    if len(parts) > 1:     # 2. later parts meet a policy that has moved: alpha and pi_old before the first step
        with torch.no_grad():
            for batch in (b for part in parts for b in part):
                batch.old_logp, batch.alpha = policy_pass(policy, batch, args.temperature)
                measured.append((batch.alpha, batch.weight))
    for part in parts:     # 3. one optimizer step for each part; its token mean is over all its micro-batches
        n_tokens = sum(gather([int(b.in_loss.sum()) for b in part]))  # 0: all was cut off and masked; measured, but no step
        run_all(part, max(n_tokens, 1))
        norm = whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip))
        if n_tokens and norm.isfinite():
            optimizer.step()
        elif n_tokens:
            print(f"gradient norm is {norm.item()}: this update is skipped", file=sys.stderr)
        optimizer.zero_grad(set_to_none=True)
        steps.append((norm.item(), int(not norm.isfinite())))
    norms, skipped = zip(*steps) if steps else ([0.0], [0])
    return measured, _merge(gather(passes)) | dict(grad_norm=max(norms), skipped=sum(skipped))


def distill(policy, lora, optimizer, samples, schedule, args, device):
    """DistillSparse (Algorithm 1 of the paper): a step of the actor's own low-rank additions, theta held still.

        L = L_PPO,sparse + lambda * KL(sparse || dense)      over the full vocabulary; the dense side is a constant

    The sparse side is teacher-forced under the budgets that sampled. -> metrics
    """
    batches, weights = in_step(samples, policy, args, device), [x for pair in lora.values() for x in pair]
    n_tokens = max(sum(gather([int(b.in_loss.sum()) for b in batches])), 1)

    def run(batch):
        budgets = schedule.pages(torch.arange(1, batch.ids.shape[1] + 1, device=device)).expand(batch.ids.shape)
        budgets = budgets.masked_fill(batch.mask.cumsum(1) == 0, DENSE)                   # [N,T] prompts are dense
        predicts = batch.in_loss[:, 1:]
        with torch.no_grad():
            dense = policy(batch.ids, head=lambda hidden, _: hidden[:, :-1][predicts])    # [M,d]

        def head(hidden, project):
            states = hidden[:, :-1][predicts]
            return (gather_logprobs(project, states, batch.ids[batch.in_loss], args.temperature),
                    chunked_kl(project, states, dense, args.temperature))
        with lora_on(policy, lora):
            logp, kl = policy(batch.ids, sparse_attend(budgets, args.dense_layers, args.page_size), head=head)
            adv = batch.adv[:, None].expand_as(batch.ids)[batch.in_loss]
            loss, _ = policy_loss(logp, logp.detach(), logp.detach(), adv, torch.ones_like(logp, dtype=torch.bool),
                                  correction="none", n_tokens=n_tokens)
            (loss + args.distill * kl.sum() / n_tokens).backward()
        return kl.sum().item()

    kl_sum = sum(gather(accumulate(batches, run, optimizer, args)))
    for x in weights if world() > 1 else ():
        dist.all_reduce(x.grad)
    norm = torch.nn.utils.clip_grad_norm_(weights, args.grad_clip)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return dict(distill_kl=kl_sum / n_tokens, lora_norm=norm.item())


def _split_groups(samples, parts):
    """Whole prompt groups, of all ranks, dealt in their order into at most `parts` runs of similar size -> this rank's share of
    each."""
    order = {group: i for i, group in enumerate(sorted(set(gather([s.group for s in samples]))))}
    parts = min(parts, len(order))
    return [[s for s in samples if order[s.group] * parts // len(order) == i] for i in range(parts)]


def _merge(passes):
    """Metrics of all passes -> the step's: losses add up, the largest ratio counts, the rest is a token mean."""
    total = max(sum(s["tokens"] for s in passes), 1)
    keys = "truncated kl k1 clipped entropy w1 w2".split() + ["kl_ref"] * any("kl_ref" in s for s in passes)
    out = {k: sum(s[k] * s["tokens"] for s in passes) / total for k in keys}
    out["ess"] = out.pop("w1")**2 / max(out.pop("w2"), 1e-30)  # of the step's sums, so that the micro-batch does not show
    out["ratio_mean"] = sum(s["ratio_mean"] * s["kept"] for s in passes) / max(sum(s["kept"] for s in passes), 1)
    out["ratio_max"] = max((s["ratio_max"] for s in passes), default=0.0)
    return out | dict(loss=sum(s["loss"] for s in passes))


# ---- the built-in model and the warm start ----------------------------------------------------------------------


def build_tiny(folder, seed):
    """Write a random tiny Qwen3-kind model with a character tokenizer as an ordinary Hugging Face checkpoint."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config
    characters = string.ascii_letters + string.digits + "+=;?#."
    chars = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    chars.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    chars.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chars, eos_token=".", clean_up_tokenization_spaces=False)
    hf = Qwen3Config(vocab_size=len(characters), hidden_size=96, intermediate_size=192, num_hidden_layers=3,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
                     rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
                     eos_token_id=tokenizer.eos_token_id, architectures=["Qwen3ForCausalLM"])
    model = Model(Config.from_hf(hf), hf, tokenizer)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                # Embeddings of 1, not the usual 0.02: with 0.02 none of 11 recipes learned the far look-up in 540 steps.
                std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.02}.get(name, p.shape[1] ** -0.5)
                p.normal_(0, std, generator=g)
    model.save_pretrained(folder)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton-Schulz steps (Jordan et al., 2024), for [out,in] matrices.

    torch.optim.Muon is the same but computes in bf16, which CPUs without bf16 units emulate: on such a one it took 0.26 s
    a step for the built-in model, this takes 0.04 s.
    """
    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(m, group["momentum"])  # Nesterov
                wide = x if x.shape[0] <= x.shape[1] else x.T
                wide = wide / wide.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = wide @ wide.T
                    wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
                update = wide if x.shape[0] <= x.shape[1] else wide.T
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def traces(args, step, stage):
    """A warm-start step's (prompt, trace) pairs, at most about --warm-tokens long in all.

    chain has a curriculum. Stage 0: 4 leaves, 4 lines, both operands far back, whole traces, in smaller and so quicker
    steps, until that is mastered: left half-learned it costs far more steps later. Stage 1: a mix of three sheet sizes
    up to the task's own, some of whose traces give up.
    """
    make, sizes = parse_task(args.task)
    rng, extra, budget, per_token = random.Random(f"warm {args.seed} {step}"), {}, args.warm_tokens, 3.0
    if make.__name__ == "chain":
        per_token = 1.0  # characters
        leaves, lines, answers = sizes or (20, 24, 4)
        if stage == 0:
            sizes, extra, budget = (4, 4, 2), {"far": True}, 0.4 * budget
        else:
            sizes = rng.choice([(leaves * 2 // 5, lines // 4, answers // 2), (leaves * 7 // 10, lines // 2, answers),
                                (leaves, lines, answers)])
            sizes, extra = (max(sizes[0], 2), max(sizes[1], sizes[2], 1), max(sizes[2], 1)), {"give_up": args.give_up}
    pairs, total = [], 0
    while total < budget:
        problem = make(rng, *sizes, **extra)
        pairs.append((problem.prompt, problem.trace))
        total += (len(problem.prompt) + len(problem.trace)) / per_token
    return pairs


def warm_start(policy, args, device):
    """Supervised training on worked traces: what a pretrained model would bring along. Changes `policy`."""
    matrices = [p for n, p in policy.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in policy.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    optimizers = [Muon(matrices, lr=args.warm_muon)] if args.warm_muon else []
    optimizers.append(torch.optim.AdamW(others if optimizers else matrices + others, lr=args.warm_lr, weight_decay=0.0))
    base = [o.param_groups[0]["lr"] for o in optimizers]
    stage, running, cooling = (0 if args.task.startswith("chain") else 1), None, max(args.warm_start // 12, 1)
    step, end, bar = 0, args.warm_start, tqdm(total=args.warm_start, desc="warm start", unit=" steps")
    while step < end:
        for o, lr in zip(optimizers, base):  # ramp up over ten steps, cool down over the last ones
            o.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 10, (end - step) / cooling)
        loss = supervised_loss(policy, traces(args, step, stage), args, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.8 * running + 0.2 * loss.item()
        # Stages end by what the model can do, never by the clock: chain is learned in jumps, some seeds' later than others'.
        if stage == 0 and running < 0.06:
            stage, running = 1, None
        elif stage == 1 and running < 0.08:
            end = min(end, step + 1 + cooling)
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{running or 0:.3f}", stage=stage)
    bar.close()
    if end == args.warm_start:
        say(f"warm start: {end} steps, and a loss of {running or 0:.3f}: not mastered, so GRPO may find little to build on. "
            "Another --seed or a larger --warm-start may help")


def supervised_loss(policy, pairs, args, device):
    """Mean cross-entropy of the traces' tokens, in one padded batch."""
    group, stops = [], policy.stop_ids
    for prompt, trace in pairs:
        ids = policy.tokenizer.encode(trace, add_special_tokens=False)
        ids = ids if ids[-1] in stops else ids + stops[:1]
        prompt = encode_prompt(policy.tokenizer, prompt, args.chat)
        group.append(Scored(Rollout(prompt, ids, torch.zeros(len(ids)), torch.zeros(0), "stop"), 0.0))
    batch = _pad(group, args, device)
    return -token_logprobs(policy, batch.ids)[batch.mask].mean()


# ---- problems, prompts, evaluation ------------------------------------------------------------------------------


def pick(problems, start, count, seed):
    """`count` problems from place `start` of an endless stream: epoch after epoch, each in its own seeded order."""
    out, orders = [], {}
    for place in range(start, start + count):
        epoch, i = divmod(place, len(problems))
        if epoch not in orders:
            orders[epoch] = list(range(len(problems)))
            random.Random(f"order {seed} {epoch}").shuffle(orders[epoch])
        out.append(problems[orders[epoch][i]])
    return out


def rewards_of(rollouts, problems, n, tokenizer, args):
    """Rewards, prompt-major. The text graded is the sampled ids' own, without special tokens."""
    problems = [p for p in problems for _ in range(n)]
    texts = [tokenizer.decode(r.ids, skip_special_tokens=p.kind != "chain") for r, p in zip(rollouts, problems)]
    return grade_all(texts, problems, args.code_timeout, args.code_reward == "fraction", progress=not rank())


def overlong_penalty(rollout, args):
    """DAPO's soft punishment, 0 to 1: rises over the last --overlong tokens; a response that was cut off pays in full."""
    if not args.overlong:
        return 0.0
    over = (len(rollout.ids) - (args.max_new_tokens - args.overlong)) / args.overlong
    return 1.0 if rollout.finish == "length" else max(over, 0.0)


def load_policy(args, out, device, checkpoint=None):
    """The model to train: the checkpoint to resume from, or --model, or the built-in one. -> (policy, is it warm?)

    Where it is going to be sharded it is read to CPU memory: whole, it need not fit on the GPU.
    """
    name, warm = checkpoint or args.model or out / "builtin", Path(args.warm_dir or out / "warm")
    found = not checkpoint and args.warm_start and (warm / "warm.json").exists()
    if found:
        try:
            recipe = json.loads((warm / "warm.json").read_text())
        except (ValueError, RecursionError):
            recipe = "unreadable"
        if recipe != warm_recipe(args):
            raise ValueError(f"'{warm}' holds a warm start made with other flags (see its warm.json); give another --warm-dir, "
                             "or delete it")
        say(f"warm start: found in {warm}")
        name = warm
    elif name == out / "builtin":
        if not rank():
            with writing(name):
                build_tiny(name, args.seed)
        wait()
    policy = load_with_tokenizer(name, "cpu" if dist.is_initialized() else device)
    policy.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy.checkpoint_layers = device.type == "cuda"
    return policy, bool(checkpoint or found or not args.warm_start)


def starting_policy(args, out, device):
    """The model that training set out from, also after a resume: the reference of --kl-ref."""
    model, warm = load_policy(args, out, device)
    if not warm:
        args.parser.error(f"--kl-ref: the warm start that this run set out from is gone from '{args.warm_dir or out / 'warm'}'")
    return shard(model.requires_grad_(False), device, args.offload)


def warm_recipe(args):
    """The flags that a warm start depends on."""
    keys = "model task seed chat give_up warm_start warm_lr warm_muon warm_tokens".split()
    return {k: getattr(args, k) for k in keys}


def split_problems(args):
    """(training problems, held-out problems): of a task, another seed's; of a file, up to a fifth set aside."""
    if not args.data:
        return load_problems(args.task, args.seed), load_problems(args.task, args.seed + 10**6, args.eval)
    found = load_problems(args.data)
    random.Random(f"split {args.seed}").shuffle(found)
    cut = min(args.eval, len(found) // 5)
    return found[cut:], found[:cut]


def make_actor(policy, args, context, device):
    """The actor and the schedule it starts with. Raises ValueError, with the numbers, if a sequence cannot fit."""
    if context > policy.config.max_context:
        raise ValueError(f"the longest prompt and --max-new-tokens {args.max_new_tokens} make {context} tokens, over the "
                         f"model's context of {policy.config.max_context}")
    rows, pool_pages = min(args.rows, -(-args.prompts // world()) * args.samples * args.oversample), args.pool_pages or None
    if device.type == "cuda":
        free, all_of_it = torch.cuda.mem_get_info(device)
        if args.gpu_memory:
            free = min(free, args.gpu_memory * 2**30)
            torch.cuda.set_per_process_memory_fraction(min(args.gpu_memory * 2**30 / all_of_it, 1.0), device)
        held = torch.cuda.memory_allocated(device)  # the policy, not sharded; planned for below
        rows, pool_pages, args.micro_tokens, numbers = plan_memory(policy.config, context, int(free + held), args, world())
        say(f"GPU memory in GiB: {numbers}; micro-batches of {args.micro_tokens:,} tokens")
    actor = Actor(policy, rows, context, pool_pages, args.page_size, args.dense_layers, alpha_every=args.alpha_every,
                  device=device)
    if (need := -(-context // args.page_size) + 1) > actor.pool_pages:
        raise ValueError(f"--pool-pages: one sequence of {context} tokens may need {need} pages of {args.page_size}, the pool "
                         f"holds {actor.pool_pages}")
    return actor, Schedule.asked(args, context)


def generate(actor, policy, problems, n, schedule, seed, args):
    """n samples of each problem of this rank's share -> (Rollouts, those problems), prompt-major."""
    places = range(rank(), len(problems), world())
    share = [problems[i] for i in places]
    prompts = [encode_prompt(policy.tokenizer, p.prompt, args.chat) for p in share]
    rollouts = actor.generate(prompts, n, args.max_new_tokens, args.temperature, schedule, policy.stop_ids, seed, list(places),
                              progress=not rank())
    return rollouts, share


def evaluate(actor, policy, problems, args):
    """Mean reward and length of the *dense* policy on the held-out problems, sampled as in training."""
    if not problems:
        return {}
    actor.load(policy)  # without the actor's LoRA
    dense = Schedule.fraction(1.0, actor.max_context, page_size=args.page_size)
    rollouts, share = generate(actor, policy, problems, args.eval_samples, dense, (args.seed, 2**31), args)
    rewards = gather(rewards_of(rollouts, share, args.eval_samples, policy.tokenizer, args))
    lengths = gather([len(r.ids) for r in rollouts])
    return dict(eval=sum(rewards) / len(rewards), eval_length=sum(lengths) / len(lengths))


def alpha_metrics(rows, start, args):
    """Tail and mean of alpha over the batch and per bin of cached tokens; rows count by their weight."""
    alpha, positions, mask, weight = rows
    alpha, positions, mask = (x.repeat_interleave(weight.long(), 0) for x in (alpha, positions, mask))
    a, n_bins = alpha[mask], len(start.bins)
    bins = (positions[mask] // start.bin_tokens).clamp(max=n_bins - 1)
    return dict(alpha_mean=a.mean().item(), alpha_tail=tail(a, fraction=args.tail), alpha_tokens=len(a),
                alpha_low=(a < (args.tau or 0.86)).sum().item() * args.alpha_every / len(alpha), bin_tokens=start.bin_tokens,
                tail_by_bin=[tail(a[bins == i], fraction=args.tail) for i in range(n_bins)])


def budget_metrics(rollouts, schedule):
    """What the actor read: pages per bin, and the share of the cached pages over all tokens generated."""
    ends = [schedule.bin_tokens * (i + 1) for i in range(len(schedule.bins))]
    return dict(kv_read=schedule.share_read(rollouts), pages_by_bin=[schedule.pages(end) for end in ends])


# ---- checkpoints ------------------------------------------------------------------------------------------------


def save(out, done, policy, optimizer, controller, lora, keep):
    """A folder that `transformers` opens, with what resuming needs beside it; `keep` of them are kept. All ranks call it.

    Written aside, forced to disk, then renamed: whatever is named step-NUMBER is whole, also after a power cut; `whole.json`
    lists its files' sizes. AdamW's state is sharded as it is in memory, and any number of ranks reads it. There are no random
    states: every stream is seeded by step and place. The actor's LoRA goes to `sparse_actor`, as an adapter that PEFT opens.
    """
    final, part = out / f"step-{done:06d}", out / f".step-{done:06d}.part"
    if not rank():
        shutil.rmtree(part, ignore_errors=True)
    wait()
    with writing(final):
        policy.save_pretrained(part, write=not rank())
        dcp.save(adam_state(policy, optimizer), checkpoint_id=part / "optimizer", no_dist=not dist.is_initialized())
        if not rank():
            _finish(part, final, dict(step=done, controller=controller.state_dict()), lora)
            for old in sorted(out.glob("step-*"))[:-keep]:
                shutil.rmtree(old)
    wait()


def _finish(part, final, state, lora):
    """What one process writes, and the renaming."""
    if lora:
        pairs, lora_optimizer = lora
        state |= dict(lora={k: [x.detach() for x in pair] for k, pair in pairs.items()},
                      lora_optimizer=lora_optimizer.state_dict())
        save_lora(pairs, part / "sparse_actor")
    with open(part / "trainer.pt", "wb") as file:
        torch.save(state, file)
    files = [f for f in part.rglob("*") if f.is_file()]
    (part / "whole.json").write_text(json.dumps({str(f.relative_to(part)): f.stat().st_size for f in files}))
    for path in (*part.rglob("*"), part):
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    _sync(final.parent)


def adam_state(policy, optimizer):
    """{parameter name: AdamW's state of it}; before its first step, the zeros that it starts from."""
    def fresh(p):
        return dict(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    with torch.no_grad():
        return {name: optimizer.state.get(p) or fresh(p) for name, p in policy.named_parameters()}


@contextmanager
def writing(path):
    """A full disk, or what else keeps `path` from being written inside, becomes an OSError that names it."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, dcp.CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        if isinstance(cause, RuntimeError):  # torch.save hides the file's error so
            cause = cause.__context__
        if not isinstance(cause, (OSError, SafetensorError)):
            raise
        raise OSError(f"'{path}' cannot be written: {cause}") from error


def write_whole(path, text):
    """Written aside, then renamed: at no time is what was there lost, or what comes half there."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        part.write_text(text)
        _sync(part)
        os.replace(part, path)


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def restore(checkpoint, policy, optimizer, controller, lora, device):
    """Optimizers, controller and LoRA as they were -> steps done. Raises ValueError that names the checkpoint."""
    adam = adam_state(policy, optimizer)
    try:
        state = torch.load(checkpoint / "trainer.pt", map_location=device, weights_only=True)
        dcp.load(adam, checkpoint_id=checkpoint / "optimizer", no_dist=not dist.is_initialized())
        if lora:
            for name, pair in lora[0].items():
                for mine, saved in zip(pair, state["lora"][name]):
                    mine.data.copy_(saved)
            lora[1].load_state_dict(state["lora_optimizer"])
        controller.load_state_dict({k: v.cpu() if torch.is_tensor(v) else v for k, v in state["controller"].items()})
        done = int(state["step"])
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError,
            dcp.CheckpointException) as error:
        raise ValueError(f"checkpoint '{checkpoint}' cannot be read ({type(error).__name__}: {str(error)[:200]}); delete it, "
                         "and --resume takes the one before") from None
    optimizer.state.update({p: adam[name] for name, p in policy.named_parameters()})
    return done


def newest_checkpoint(out):
    """The newest whole checkpoint; broken ones (of a failing disk, or copied in part) are passed over, with a warning."""
    for folder in sorted(out.glob("step-*"), reverse=True):
        try:
            sizes = json.loads((folder / "whole.json").read_text())
            if not (wrong := [name for name, size in sizes.items() if (folder / name).stat().st_size != size]):
                return folder
            error = f"{wrong[0]} has another size than when it was written"
        except (OSError, ValueError) as found:
            error = found
        print(f"checkpoint '{folder}' is broken and passed over ({error})", file=sys.stderr)
    raise ValueError(f"--resume: no whole checkpoint (step-*) in '{out}'")


def read_metrics(path, needed=""):
    """A run's metrics, step by step, with the `needed` ones in every trained step; a last line that a kill has cut is left
    out. Raises ValueError naming file and line."""
    found, lines = [], path.read_text(errors="replace").split("\n")
    for i, line in enumerate(lines[:-1], 1):
        try:
            m = json.loads(line)
            flat = [x for v in m.values() for x in (v if isinstance(v, list) else [v])]
            if type(m["step"]) is not int or not all(type(x) is float or type(x) is int and abs(x) < 2**63 for x in flat):
                raise ValueError("not numbers alone")
            if wrong := [k for k in m if isinstance(m[k], list) != k.endswith("_by_bin")] or "reward" in m and [
                    k for k in needed.split() if k not in m]:
                raise ValueError(f"{wrong[0]} is missing or of another shape")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {i}: not the metrics of a step ({type(error).__name__}: {error})") from None
        found.append(m)
    return found


def stop_signals():
    """Catch SIGTERM and Ctrl-C, so that a step is finished first; a second one ends at once -> (the list that they arrive
    in, the handlers to put back)."""
    stops = []

    def stop(number, frame):
        if stops:
            raise KeyboardInterrupt
        stops.append(number)
        print("asked to stop: this step is finished and saved first (asked again: at once, unsaved)", file=sys.stderr)
    return stops, {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}


# ---- what a person sees -----------------------------------------------------------------------------------------


def readable(m):
    """The line printed for a step; README explains every number."""
    line = f"step {m['step']:4d}"
    if "reward" in m:
        worst = min((t for t in m["tail_by_bin"] if t == t), default=float("nan"))  # none: the weights have become NaN
        line += (f" | reward {m['reward']:.3f} | length {m['length']:6.1f} | alpha tail {m['alpha_tail']:.3f} worst bin "
                 f"{worst:.3f} mean {m['alpha_mean']:.4f} | reads {m['kv_read']:5.1%} of KV | kl {m['kl']:.1e} | rollout "
                 f"{m['rollout_s']:.1f}s ({m['tokens_per_s']:,.0f} tok/s) train {m['train_s']:.1f}s")
    return line + (f" | eval {m['eval']:.3f}" if "eval" in m else "")


PLOTTED = "bin_tokens tail_by_bin pages_by_bin length rollout_s train_s alpha_tail kv_read"  # and what summary says


def plot(history, args, path):
    """Four panels: is it learning; does the tail hold; what did that cost in pages; where did the time go."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(12, 8), layout="constrained")
    ax = fig.subplots(2, 2)
    trained = [m for m in history if "reward" in m]
    steps = [m["step"] for m in trained]
    evals = [(m["step"], m["eval"]) for m in history if "eval" in m]
    ax[0, 0].plot(steps, [m["reward"] for m in trained], label="reward, sparse actor", color="tab:blue", alpha=0.6)
    ax[0, 0].plot(*zip(*evals), "o-", label="held-out problems, dense policy", color="tab:green") if evals else None
    ax[0, 0].set(title="Is it learning?", xlabel="step", ylabel="mean reward")
    edges = [i * trained[-1]["bin_tokens"] for i in range(len(trained[-1]["tail_by_bin"]) + 1)]
    middles = [(a + b) / 2 for a, b in zip(edges, edges[1:])]
    third = max(len(trained) // 3, 1)
    for part, name, color in ((trained[:1], "step 1", "tab:gray"), (trained[-third:], "last third (median)", "tab:blue"),
                              (trained[third:2 * third], "middle third (median)", "tab:orange")):
        if part:  # one step's tail of one bin rests on a handful of tokens: the median over steps is what can be read
            tails = torch.tensor([m["tail_by_bin"] for m in part]).nanmedian(0).values
            pages = torch.tensor([m["pages_by_bin"] for m in part], dtype=torch.float).median(0).values.tolist()
            ax[0, 1].plot(middles, tails, "o-", color=color, label=name)
            ax[1, 0].step(edges, [*pages, pages[-1]], where="post", color=color, label=name)
    if args.tau:
        ax[0, 1].axhline(args.tau, color="tab:red", ls="--", label=f"tau = {args.tau}")
    ax[0, 1].set(title=f"Does the tail hold? ({args.tail:.0%} quantile of alpha)", xlabel="cached tokens", ylabel="alpha",
                 ylim=(-0.03, 1.03))
    dense = [-(-e // args.page_size) for e in edges[1:]]
    ax[1, 0].step(edges, [*dense, dense[-1]], where="post", color="black", ls=":", label="all pages (dense)")
    ax[1, 0].set(title="What the controller chose", xlabel="cached tokens", ylabel="pages read by a query")
    ax[1, 1].plot(steps, [m["length"] for m in trained], color="tab:purple", label="response length")
    ax[1, 1].set(title="Length and time", xlabel="step", ylabel="tokens", ylim=(0, None))
    time_axis = ax[1, 1].twinx()
    time_axis.stackplot(steps, [m["rollout_s"] for m in trained], [m["train_s"] for m in trained], alpha=0.3,
                        labels=["rollout", "training"], colors=["tab:orange", "tab:cyan"])
    time_axis.set(ylabel="seconds a step")
    for a in (*ax.flat, time_axis):
        a.legend(fontsize=8, loc="upper right" if a is time_axis else "best")
    part = path.with_suffix(".part.png")
    fig.savefig(part, dpi=110)
    os.replace(part, path)


def read_run(folder):
    """(flags, metrics) of a run's folder. Raises ValueError that names it."""
    try:
        flags, history = read_flags(folder / "config.json"), read_metrics(folder / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {folder}: not a run's config.json and metrics.jsonl ({error})") from None
    if not history:
        raise ValueError(f"--plot {folder}: its metrics.jsonl is empty")
    return flags, history


def mean_and_band(histories, key):
    """One metric over runs -> (steps, mean, least, largest), at the steps where all runs that have it have it."""
    series = [x for h in histories if (x := {m["step"]: m[key] for m in h if key in m})]
    steps = sorted(set.intersection(*map(set, series))) if series else []
    values = [[x[step] for x in series] for step in steps]
    return steps, [sum(v) / len(v) for v in values], list(map(min, values)), list(map(max, values))


def plot_runs(folders, path):
    """--plot: runs side by side, as a figure and a table; those whose flags differ only in the seed (and in folders) are a mean
    and a band."""
    from matplotlib.figure import Figure
    groups = {}
    for folder in dict.fromkeys(map(Path, folders)):
        flags, history = read_run(folder)
        same = {k: v for k, v in flags.items() if k not in FREE | {"seed"}}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append((folder, history))
    groups = [(names[0] if len(names) == 1 else os.path.commonprefix([*map(str, names)]).rstrip("-_./"), histories)
              for names, histories in (zip(*runs) for runs in groups.values())]
    panels = dict(eval="held-out accuracy, dense policy", reward="reward, sparse actor", length="response length in tokens",
                  alpha_tail="tail of alpha", alpha_mean="mean of alpha", kv_read="share of the cached pages read")
    fig = Figure(figsize=(15, 8), layout="constrained")
    for a, (key, title) in zip(fig.subplots(2, 3).flat, panels.items()):
        for name, histories in groups:
            steps, mean, low, high = mean_and_band(histories, key)
            line, = a.plot(steps, mean, ".-", label=f"{name}" + f", mean of {len(histories)} runs" * (len(histories) > 1))
            a.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        a.set(title=title, xlabel="step")
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    with writing(path):
        fig.savefig(path, dpi=110)
    print("each run's accuracy at first and at last, then its mean over the last third of the steps: pages read, mean of alpha, "
          "its tail (median), tokens under tau a sequence")
    for name, histories in groups:
        print(f"{name}: " + "; ".join(map(run_line, histories)))
    print(f"{path}: {len(folders)} runs, {len(groups)} configurations")


def run_line(history):
    evals, trained = [m["eval"] for m in history if "eval" in m], [m for m in history if "reward" in m]
    last = {k: torch.tensor([m.get(k, math.nan) for m in trained[-max(len(trained) // 3, 1):]])
            for k in ("kv_read", "alpha_mean", "alpha_tail", "alpha_low")}
    return ((f"{evals[0]:.2f} -> {evals[-1]:.2f}, " if evals else "") + f"{last['kv_read'].mean():.0%}, "
            f"{last['alpha_mean'].mean():.4f}, {last['alpha_tail'].median():.2f}, {last['alpha_low'].mean():.1f}")


def summary(history, args, actor, n_held_out, longest, started):
    """The run in plain words."""
    trained, evals = [m for m in history if "reward" in m], [m["eval"] for m in history if "eval" in m]
    first, last, out = trained[0], trained[-1], Path(args.out)
    reached = [i for i, t in enumerate(last["tail_by_bin"]) if t == t] or [0]
    print("\nDone.")
    if evals:
        print(f"  Accuracy of the dense policy on {n_held_out} held-out problems: {evals[0]:.3f} before, {evals[-1]:.3f} "
              f"after {last['step']} steps.")
    print(f"  Tail of alpha ({args.tail:.0%} quantile): {first['alpha_tail']:.3f} at first, {last['alpha_tail']:.3f} at last"
          + ("; the budget was fixed (--tau 0)." if not args.tau else f"; the controller's aim is {args.tau}."
             if args.control == "tail" else f"; the controller's aim is a mean alpha of {args.mean_alpha}."))
    asked = f"the schedule {args.schedule}" if args.schedule else f"{args.budget:.0%} of the cached pages"
    print(f"  Asked for: {asked}. Read at the first step: {first['kv_read']:.0%}; at the last: {last['kv_read']:.0%} (from "
          f"{last['pages_by_bin'][reached[0]]} pages early to {last['pages_by_bin'][reached[-1]]} late, of {actor.row_pages}).")
    print(f"  {sparse_pays(actor, longest, last)}")
    print(f"  Time: {sum(m['rollout_s'] for m in trained):.0f} s in rollouts, {sum(m['train_s'] for m in trained):.0f} s in "
          f"training, {time.perf_counter() - started:.0f} s in all.")
    print(f"  Checkpoint: {out}/step-{last['step']:06d} (opens in transformers). Plot: {out}/run.png. Metrics: "
          f"{out}/metrics.jsonl.")
    other = "--budget 1 --out out-dense" if args.budget < 1 else "--budget 0.1 --out out-sparse"
    same = f" --warm-dir {args.warm_dir or out / 'warm'}" if args.warm_start else ""
    print(f"  Next: python train.py{f' --model {args.model}' if args.model else ''}{same} {other}    to compare, or "
          f"--out {out} --resume --steps {2 * args.steps} to go on.")


def sparse_pays(actor, longest, m):
    """Bytes that a decode step must read, dense and sparse: the most that sparsity could save at this length."""
    c, width = actor.model.config, actor.model.dtype.itemsize
    read = [p.numel() for n, p in actor.model.named_parameters() if c.tied or "embed_tokens" not in n]
    weights = sum(read) * width
    tokens = longest + m["length"] / 2
    layer = actor.rows * tokens * 2 * c.num_key_value_heads * c.head_dim * width  # K and V of all rows in one layer
    sparse_layers = max(c.num_hidden_layers - actor.dense_layers, 0)
    dense = layer * c.num_hidden_layers
    sparse = dense - layer * sparse_layers * (1 - m["kv_read"] - 0.5 / actor.page_size)  # the landmarks are read too
    most = (weights + dense) / (weights + sparse)
    return (f"Does sparse pay here? At {tokens:.0f} cached tokens and {actor.rows} rows a decode step reads "
            f"{weights / 1e6:,.1f} MB of weights and {dense / 1e6:,.1f} MB of KV if dense, {sparse / 1e6:,.1f} MB if sparse: "
            f"at most {most:.2f}x faster" + (", so no; it pays at longer contexts." if most < 1.2 else "."))


# ---- main -------------------------------------------------------------------------------------------------------


def set_up(args, out):
    """Everything that the loop needs, as a new run or a resumed one has it. Raises ValueError or OSError, which say why, if
    what the user gave cannot work."""
    device, history, done, lora = connect(args), [], 0, None
    if not args.resume and any(out.glob("step-*")):
        raise ValueError(f"--out {out}: there is a run in it. --resume goes on with it; for a new one give another --out "
                         f"(and --warm-dir {out}/warm, to use its warm start again)")
    checkpoint = newest_checkpoint(out) if args.resume else None
    policy, warm = load_policy(args, out, device, checkpoint)
    problems, held_out = split_problems(args)
    longest = max(len(encode_prompt(policy.tokenizer, p.prompt, args.chat)) for p in problems + held_out)
    actor, schedule = make_actor(policy, args, longest + args.max_new_tokens, device)
    c = policy.config
    say(f"{args.model or 'built-in model'}: {sum(p.numel() for p in policy.parameters()):,} parameters, {c.num_hidden_layers} "
        f"layers, {c.num_attention_heads}/{c.num_key_value_heads} heads of {c.head_dim}, on {device.type}"
        + f" x {world()}" * (world() > 1) + f"; {actor.rows} rows, {actor.pool_pages:,} pages of {args.page_size} "
        f"({actor.pool_bytes / 1e6:,.0f} MB)")
    if not warm:
        if not rank():
            warm_start(policy.to(device), args, device)
            folder = Path(args.warm_dir or out / "warm")
            with writing(folder):
                policy.save_pretrained(folder)
            write_whole(folder / "warm.json", json.dumps(warm_recipe(args), indent=1))
        wait()
        policy, _ = load_policy(args, out, device) if rank() else (policy, True)
    policy = shard(policy, device, args.offload)
    reference = starting_policy(args, out, device) if args.kl_ref else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay,
                                  foreach=False)  # one weight after the other: no copy of them all in memory
    controller = Controller(schedule, args.tau, args.tail if args.control == "tail" else 1 - args.mean_alpha, args.min_pages,
                            args.control)
    if args.distill:
        pairs = make_lora(actor.model, args.lora_rank, args.seed)
        lora = pairs, torch.optim.AdamW([x for pair in pairs.values() for x in pair], lr=args.distill_lr, weight_decay=0.0)
    if checkpoint:
        done = restore(checkpoint, policy, optimizer, controller, lora, device)
        history = [m for m in read_metrics(out / "metrics.jsonl", PLOTTED) if m["step"] <= done]
    if not rank():
        out.mkdir(parents=True, exist_ok=True)
        flags = {k: v for k, v in vars(args).items() if k not in ("parser", "resume", "allow_changes", "plot", "plot_out")}
        write_whole(out / "config.json", json.dumps(flags, indent=1))
        write_whole(out / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in history))
    return policy, reference, optimizer, lora, actor, controller, problems, held_out, longest, done, history


def main(argv=None):
    started, args = time.perf_counter(), parse_args(argv)
    out, n = Path(args.out or ""), args.samples
    try:
        if args.plot:
            return plot_runs(args.plot, Path(args.plot_out))
        policy, reference, optimizer, lora, actor, controller, problems, held_out, longest, done, history = set_up(args, out)
    except (ValueError, OSError) as error:
        args.parser.error(str(error))
    device, schedule, plotted, saved = actor.device, controller.schedule, time.perf_counter(), done or None

    def record(m):
        history.append(m)
        if not rank():
            with writing(out / "metrics.jsonl"), (out / "metrics.jsonl").open("a") as f:
                f.write(json.dumps(m) + "\n")
            print(readable(m))

    (stops, before), skipped = stop_signals(), 0
    if not history:
        record({"step": 0} | evaluate(actor, policy, held_out, args))
    while done < args.steps and not (stopping := gather(stops)):
        # 1. the actor takes over theta, and what it has of its own; generate with it
        t0 = time.perf_counter()
        actor.load(policy, lora and lora[0])
        batch = pick(problems, done * args.prompts, args.prompts, args.seed)
        drawn, batch = generate(actor, policy, batch, n * args.oversample, schedule, (args.seed, done), args)
        # 2. grade, keep the best (all, without --oversample), and compare within each prompt's group. alpha is measured on what
        # is kept: it has to hold where the loss is, and the rest would cost a dense pass of its own
        t1 = time.perf_counter()
        graded = rewards_of(drawn, batch, n * args.oversample, policy.tokenizer, args)
        rollouts, rewards = zip(*((drawn[i], graded[i]) for i in best_of(graded, n * args.oversample, n)))
        adv = advantages([x - overlong_penalty(r, args) for x, r in zip(rewards, rollouts)], n, args.adv).tolist()
        # 3. groups without spread teach nothing (but a KL term); one sample of each still measures alpha, for all n
        t2 = time.perf_counter()
        spread = [bool(reference) or any(adv[i - i % n:i - i % n + n]) for i in range(len(adv))]
        kept = [Scored(r, a, group=rank() + i // n * world())
                for i, (r, a, s) in enumerate(zip(rollouts, adv, spread)) if s]
        unmoved = [Scored(rollouts[i], 0.0, n) for i in range(0, len(adv), n) if not spread[i]]
        # 4. update theta
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (done + 1) / max(args.warmup, 1))
        measured, stats = update_policy(policy, optimizer, kept, unmoved, args, device, reference)
        if lora:
            stats |= distill(policy, *lora, kept + unmoved, schedule, args, device)
        # 5. the controller reads alpha and sets the next schedule
        used, everyone = schedule, gather([replace(r, ids=range(len(r.ids)), logprobs=None, hidden=None) for r in rollouts])
        mean_length = sum(len(r.ids) for r in everyone) / len(everyone)
        if args.tau:
            schedule = controller.update(*measured.rows(), response_length=mean_length, kl=stats["kl"])
        if device.type == "cuda":
            torch.cuda.synchronize()
        # 6. write it down
        done, t3 = done + 1, time.perf_counter()
        rewards, graded, dropped = gather(rewards), gather(graded), sum(gather([len(unmoved)]))
        times = dict(rollout_s=t1 - t0, grade_s=t2 - t1, train_s=t3 - t2)
        m = dict(step=done, reward=sum(rewards) / len(rewards), reward_drawn=sum(graded) / len(graded),
                 solved=sum(r == 1 for r in rewards) / len(rewards), length=mean_length,
                 cut_off=sum(r.finish == "length" for r in everyone) / len(everyone), dropped=dropped)
        alphas = Measured(gather([(alpha.cpu(), weight.cpu()) for alpha, weight in measured]))
        m |= alpha_metrics(alphas.rows(), controller.start, args) | budget_metrics(everyone, used) | stats
        m |= times | dict(tokens_per_s=sum(gather([len(r.ids) for r in drawn])) / max(gather([t1 - t0])),
                          lr=optimizer.param_groups[0]["lr"])
        if done % args.eval_every == 0 or done == args.steps:
            m |= evaluate(actor, policy, held_out, args)
        record(m)
        skipped = skipped + 1 if stats["skipped"] else 0
        if skipped == args.max_skipped:
            print(f"--max-skipped: in {skipped} steps in a row the gradient was not finite; a lower --lr, or another --seed or "
                  "--data, may help", file=sys.stderr)
            stops.append(0)
        if done % args.save_every == 0 or done == args.steps or gather(stops):
            save(out, done, policy, optimizer, controller, lora, args.keep)
            saved = done
        if not rank() and (time.perf_counter() - plotted > 20 or done == args.steps):
            with writing(out / "run.png"):
                plot(history, args, out / "run.png")
            plotted = time.perf_counter()
    for number, handler in before.items():
        signal.signal(number, handler)
    if done < args.steps:
        if saved != done:
            save(out, done, policy, optimizer, controller, lora, args.keep)
        say(f"stopped after {done} of {args.steps} steps; --resume --out {out} goes on")
        sys.exit(128 + stopping[0] if stopping[0] else 1)
    if not rank():
        summary(history, args, actor, len(held_out), longest, started)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except torch.OutOfMemoryError as error:
        sys.exit(f"train.py: error: {str(error).split('.')[0]}. Try --offload, or a smaller --gpu-memory to plan for, "
                 "--rows or --max-new-tokens; --resume goes on from the last checkpoint")
    except OSError as error:  # full or failing disks: bad input has ended earlier
        sys.exit(f"train.py: error: {error}; once that is mended, --resume goes on from the last checkpoint")
