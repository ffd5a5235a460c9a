"""The model, the sparse actor that generates with it, the mismatch between the two, and the sparsity that bounds it.

Two views of the same weights play in one training step (Sparrow, arXiv 2606.08446):

    the policy   full attention; its log-probs are what GRPO trains           p(v | context)
    the actor    block-sparse attention over a paged KV cache; it generates   q(v | context)

They agree on most tokens to three digits, and the few where they do not decide whether training survives. The
measure is the acceptance rate of one token (Eq. 2), the overlap of the two distributions:

    alpha = E_{v~q}[ min(p(v)/q(v), 1) ] = sum_v min(p(v), q(v))           1: equal, 0: disjoint

The paper's finding: training is stable while the 5th percentile of alpha stays above tau (0.86) *at every position*.
Under a fixed budget that tail sinks as the context grows, so later positions need more pages. The paper finds the
schedule offline, model by model. Here `Controller` finds it online: the GRPO step computes the policy's last hidden
states anyway, the actor keeps its own, and one extra output-head product on each turns them into exact alphas.

Read in this order:
    Model       Qwen2, Qwen3 and Llama, Hugging Face weights in and out
    mismatch    token_logprobs, acceptance, tail
    sparsity    Schedule (pages a row may read, per bin of cached tokens) and Controller (moves it)
    Actor       paged cache, continuous batching, sampling
    commands    bench: what a step costs; calibrate: the schedule that holds a tail, found offline

Shape legend as in sparse_attn.py: B rows (N in training), T tokens, H query heads, G KV heads, D head dim, d hidden
size, P pages, S page size, V vocabulary, L layers.

    python sparrow.py --model DIR-or-NAME --prompt "Why is the sky blue?" --budget 0.1
    python sparrow.py --model Qwen3-1.7B --bench
    python sparrow.py --model Qwen3-1.7B --calibrate --tau 0.80 0.86 0.92
"""
import argparse
import json
import math
import os
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve each other on small CPUs

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sparse_attn import (DENSE, add_norm, fill_kv, linear, paged_attention, read_bandwidth, rms_norm, rope_append, rotate,
                         sample_tokens, select_tables, silu_mul, sparse_attention)

# ---- model ------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """The shape of a decoder, with nothing left to guess: what the kinds imply is spelled out by `from_hf`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool             # the output head is the embedding matrix
    norm_eps: float
    max_context: int       # positions the model was made for
    inv_freq: list         # [D/2] RoPE frequencies
    rope_scale: float      # factor on cos and sin (YaRN), else 1

    @classmethod
    def from_hf(cls, hf):
        """Read a transformers config. Raises ValueError naming whatever this decoder does not implement."""
        kind = hf.model_type
        if kind not in ("qwen2", "qwen3", "llama"):
            raise ValueError(f"model kind '{kind}' is not supported; sparrow reads qwen2 (also Qwen2.5), qwen3 and llama")
        if getattr(hf, "use_sliding_window", False):
            raise ValueError("use_sliding_window is set in config.json; sliding-window layers are not supported")
        if hf.hidden_act != "silu":
            raise ValueError(f"hidden_act '{hf.hidden_act}' in config.json is not supported, only 'silu'")
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        attention_bias = getattr(hf, "attention_bias", False)  # Qwen2 has no such flag, and always biases q, k and v
        inv_freq, rope_scale = rope_frequencies(hf, head_dim)
        return cls(
            hf.vocab_size, hf.hidden_size, hf.intermediate_size, hf.num_hidden_layers, hf.num_attention_heads,
            hf.num_key_value_heads or hf.num_attention_heads, head_dim, qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=kind != "qwen2" and attention_bias, mlp_bias=getattr(hf, "mlp_bias", False),
            qk_norm=kind == "qwen3", tied=bool(hf.tie_word_embeddings), norm_eps=hf.rms_norm_eps,
            max_context=hf.max_position_embeddings, inv_freq=inv_freq, rope_scale=rope_scale)


def rope_frequencies(hf, head_dim):
    """(inv_freq list [D/2], scale) of a transformers config in its old (`rope_theta`) or new (`rope_parameters`) layout."""
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", getattr(hf, "partial_rotary_factor", None)) not in (None, 1.0):
        raise ValueError("partial_rotary_factor in config.json is not supported: all of a head must be rotated")
    if rope_type == "default":
        theta = rope.get("rope_theta", getattr(hf, "rope_theta", 10000.0))
        return (1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).tolist(), 1.0
    if rope_type in ("dynamic", "longrope") or rope_type not in list(ROPE_INIT_FUNCTIONS):
        why = "its frequencies change with the length" if rope_type in ("dynamic", "longrope") else "unknown"
        raise ValueError(f"rope_type '{rope_type}' in config.json is not supported ({why})")
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](hf, "cpu")
    return inv_freq.tolist(), float(scale)


class Linear(nn.Linear):
    """Computes in the type of its input, whatever the weights are kept in (fp32 masters, bf16 compute)."""
    lora = None  # (A [r,in], B [out,r]) inside `lora_on`

    def forward(self, x):
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return y if self.lora is None else y + F.linear(F.linear(x, self.lora[0].to(x.dtype)), self.lora[1].to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, rope, attend):
        (B, T, _), D = x.shape, self.c.head_dim
        q, k, v = (proj(x).view(B, T, -1, D) for proj in (self.q_proj, self.k_proj, self.v_proj))  # [B,T,H or G,D]
        if self.c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(y, *rope).to(x.dtype) for y in (q, k))
        out = attend(*(y.transpose(1, 2) for y in (q, k, v)))                             # [B,H,T,D]
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x, rope, attend, dtype):
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x).to(dtype))


def dense_attend(layer, q, k, v):
    """Causal attention over the whole sequence: what the policy does. k, v: [B,G,T,D]; q: [B,H,C,D], the last C tokens."""
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def sparse_attend(budgets, dense_layers=2, page_size=16, first=1, last=2):
    """The actor's attention, teacher-forced: an `attend` for `Model`. budgets: [T] or [B,T] int32 pages per position."""
    def attend(layer, q, k, v):
        if layer < dense_layers:
            return dense_attend(layer, q, k, v)
        return sparse_attention(q, k, v, budgets, page_size, first, last)
    return attend


class Model(nn.Module):
    """A Qwen2, Qwen3 or Llama decoder whose parameter names are Hugging Face's.

    Attention itself is a function handed in: `attend(layer, q, k, v) -> [B,H,T,D]`. The policy, the prefill, the
    decode step and the teacher-forced actor are this one model under four such functions. The residual stream is fp32
    and the norms compute in fp32, so that policy and actor differ by their sparsity more than by their rounding.
    """
    def __init__(self, config, hf_config=None, tokenizer=None, generation_config=None):
        super().__init__()
        self.config, self.hf_config = config, hf_config
        self.tokenizer, self.generation_config = tokenizer, generation_config
        self.dtype = torch.float32         # compute type of the matrix products
        self.checkpoint_layers = False     # recompute each layer in the backward pass
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            norm=RMSNorm(config.hidden_size, config.norm_eps)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        # Not a buffer: model.to(bfloat16) would round it, and phases at far positions would be off by whole turns.
        self.inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device="cpu")

    @property
    def n_tokens(self):
        """Ids that exist. Rows of the head above the tokenizer's size are padding: never sampled, in no distribution."""
        if self.tokenizer is None:
            return self.config.vocab_size
        if getattr(self, "_n_tokens", None) is None:
            self._n_tokens = min(self.config.vocab_size, max(self.tokenizer.get_vocab().values()) + 1)
        return self._n_tokens

    def hidden_states(self, ids, attend=dense_attend, positions=None):
        """ids: [B,T]; positions: [B,T], default 0..T-1 -> states after the final norm [B,T,d], in `self.dtype`."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self.inv_freq = self.inv_freq.to(ids.device)
        phase = positions[..., None, None].float() * self.inv_freq                        # [B,T,1,D/2]
        rope = phase.cos() * self.config.rope_scale, phase.sin() * self.config.rope_scale
        x = self.model.embed_tokens(ids).to(self.dtype).float()                           # [B,T,d]
        for i, layer in enumerate(self.model.layers):
            args = x, rope, lambda q, k, v, i=i: attend(i, q, k, v), self.dtype
            x = checkpoint(layer, *args, use_reentrant=False) if self.checkpoint_layers else layer(*args)
        return self.model.norm(x).to(self.dtype)

    def logits(self, hidden):
        """[..., d] -> [..., V] over the ids that exist, fp32."""
        return self.lm_head(hidden)[..., :self.n_tokens].float()  # cut after: a product of odd width would be slow

    def forward(self, ids, attend=dense_attend, positions=None, head=None):
        """Logits [B,T,V], or whatever `head(hidden, self.logits)` makes of the hidden states without building them all."""
        hidden = self.hidden_states(ids, attend, positions)
        return self.logits(hidden) if head is None else head(hidden, self.logits)

    @property
    def stop_ids(self):
        """The union of what generation_config, config and tokenizer call end of sequence."""
        found = set()
        for source in (self.generation_config, self.hf_config):
            ids = getattr(source, "eos_token_id", None)
            found.update(ids if isinstance(ids, (list, tuple)) else [ids])
        found.add(getattr(self.tokenizer, "eos_token_id", None))
        return sorted(found - {None})

    @classmethod
    def from_pretrained(cls, name_or_dir, device="cpu"):
        """Load a local folder, or a name from the Hugging Face Hub ("Qwen2.5-1.5B" is short for "Qwen/Qwen2.5-1.5B").

        Weights are read as fp32 masters. Raises FileNotFoundError or ValueError with what to do.
        """
        folder = find_model(name_or_dir)
        hf = read_part(AutoConfig, folder)
        has_tokenizer = any((folder / f).exists() for f in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
        tokenizer = read_part(AutoTokenizer, folder) if has_tokenizer else None
        generation = read_part(GenerationConfig, folder) if (folder / "generation_config.json").exists() else None
        try:
            config = Config.from_hf(hf)
            with torch.device("meta"):  # allocates nothing: what fails here are numbers that fit no model
                model = cls(config, hf, tokenizer, generation)
        except (TypeError, ZeroDivisionError, RuntimeError) as error:
            raise ValueError(f"model folder '{folder}': no model can be made of its config.json "
                             f"({str(error)[:200]})") from error
        model.load_state_dict(read_weights(folder, model, device), assign=True)
        if model.config.tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model.requires_grad_(True)

    def save_pretrained(self, folder, write=True):
        """Write a folder that `transformers` opens: config, fp32 weights, tokenizer and generation config.

        Of a sharded model every rank must call it, one with `write`.
        """
        folder, state = Path(folder), {}
        for name, p in self.named_parameters():  # a tied head is there once, as the embedding
            p = whole(p.detach())
            if write:
                state[name] = p.cpu().contiguous()
        if not write:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        self.hf_config.dtype = "float32"
        for part in (self.hf_config, self.generation_config, self.tokenizer):
            if part is not None:
                part.save_pretrained(folder)


def whole(x):
    """A sharded tensor put together on every rank (all must call it); any other as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def find_model(name):
    """A local folder as it is; otherwise a Hub download. -> Path"""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"model folder '{name}' holds no config.json; give a Hugging Face checkpoint folder")
        return folder
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise FileNotFoundError(f"model folder '{name}' does not exist")
    from huggingface_hub import snapshot_download
    repo = str(name) if "/" in str(name) else f"Qwen/{name}"
    try:
        return Path(snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:  # offline, misspelt, gated: the Hub client has a dozen classes for it
        raise FileNotFoundError(
            f"model '{name}': no such local folder, and '{repo}' could not be had from the Hugging Face Hub "
            f"({type(error).__name__}). Give a folder with config.json and *.safetensors, or check name and network."
        ) from None


def read_part(kind, folder):
    """The config, tokenizer or generation config of a checkpoint folder. Raises ValueError naming the folder."""
    try:
        return kind.from_pretrained(folder)
    except Exception as error:  # a damaged file raises whatever its parser stumbles over; `tokenizers` has only Exception
        raise ValueError(f"model folder '{folder}': {kind.__name__} cannot read it ({type(error).__name__}: {error})") from None


def read_weights(folder, model, device):
    """State dict of `model` from the folder's (sharded) safetensors, as fp32. Names and shapes are checked."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / f for f in json.loads(index.read_text())["weight_map"].values()})
    if missing := [f.name for f in files if not f.exists()] or (["*.safetensors"] if not files else []):
        raise FileNotFoundError(f"model folder '{folder}' lacks {', '.join(missing)}")
    want, state = {k: v.shape for k, v in model.state_dict().items()}, {}
    for file in files:
        try:
            with safe_open(file, "pt", device=str(device)) as tensors:
                for name in tensors.keys():
                    if name in want and not (model.config.tied and name == "lm_head.weight"):
                        state[name] = nn.Parameter(tensors.get_tensor(name).float())
        except SafetensorError as error:
            raise ValueError(f"weight file '{file}' cannot be read: {error}") from None
    if model.config.tied:  # a spare head in the file is ignored: the embedding is the head
        state["lm_head.weight"] = state.get("model.embed_tokens.weight")
    for name, shape in want.items():
        if state.get(name) is None or state[name].shape != shape:
            got = "is missing" if state.get(name) is None else f"has shape {list(state[name].shape)}"
            raise ValueError(f"model folder '{folder}': weight {name} {got}; config.json asks for {list(shape)}")
    return state


def load_with_tokenizer(name, device=None):
    """A model that takes text, on the GPU if there is one; there it computes in bf16."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = Model.from_pretrained(name, device)
    if model.tokenizer is None:
        raise ValueError(f"model '{name}' has no tokenizer (tokenizer.json)")
    model.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model


# ---- LoRA: what the sparse actor has and the policy has not --------------------------------------------------------


def make_lora(model, rank, seed=0):
    """Low-rank additions W + B A (Hu et al., 2021) for every projection of the layers -> {parameter name: (A [r,in], B
    [out,r])}, fp32 leaves that require gradients. B is 0: at first nothing is added."""
    g, lora = torch.Generator().manual_seed(seed), {}
    for name, p in model.named_parameters():
        if p.ndim == 2 and ".layers." in name:
            A = torch.randn(rank, p.shape[1], generator=g) * p.shape[1]**-0.5
            lora[name] = tuple(x.to(p.device).requires_grad_() for x in (A, torch.zeros(p.shape[0], rank)))
    return lora


def save_lora(lora, folder):
    """Write it as an adapter folder that PEFT opens."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"base_model.model.{name.removesuffix('.weight')}.lora_{which}.weight": x.detach().cpu().contiguous()
             for name, pair in lora.items() for which, x in zip("AB", pair)}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    rank, targets = len(next(iter(lora.values()))[0]), sorted({name.split(".")[-2] for name in lora})
    (folder / "adapter_config.json").write_text(json.dumps(
        dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=rank, lora_dropout=0.0, bias="none",
             target_modules=targets, base_model_name_or_path=None), indent=1))


@contextmanager
def lora_on(model, lora):
    """Inside, `model` computes with its low-rank additions, and only they learn. Backward passes belong inside too: they
    recompute layers."""
    learning = [p for p in model.parameters() if p.requires_grad]
    for p in learning:
        p.requires_grad_(False)
    for name, pair in lora.items():
        model.get_submodule(name.removesuffix(".weight")).lora = pair
    try:
        yield
    finally:
        for name in lora:
            del model.get_submodule(name.removesuffix(".weight")).lora
        for p in learning:
            p.requires_grad_(True)


# ---- mismatch: log-probs, acceptance, its tail ------------------------------------------------------------------


def gather_logprobs(project, hidden, targets, temperature=1.0, chunk=1024):
    """log p(targets) from hidden states, a chunk of tokens at a time: no [M,V] tensor outlives its chunk, also in the
    backward pass. project: d -> V; hidden: [M,d]; targets: [M] -> [M] fp32."""
    def piece(h, t):
        return (project(h).float() / temperature).log_softmax(-1).gather(-1, t[:, None])[:, 0]
    parts = [checkpoint(piece, h, t, use_reentrant=False) if torch.is_grad_enabled() else piece(h, t)
             for h, t in zip(hidden.split(chunk), targets.split(chunk))]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def token_logprobs(model, ids, temperature=1.0, attend=dense_attend, chunk=1024):
    """log p(ids[:, t] | ids[:, :t]) -> [N,T] fp32; entry 0, which nothing predicts, is 0. Right-pad unlike lengths."""
    def head(hidden, project):
        logp = gather_logprobs(project, hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), temperature, chunk)
        return F.pad(logp.view(len(ids), -1), (1, 0))
    return model(ids, attend, head=head)


def acceptance(p_logits, q_logits):
    """alpha = sum_v min(p(v), q(v)) (Eq. 2), exact over the whole vocabulary. logits: [..., V] -> [...] fp32."""
    return torch.minimum(p_logits.float().softmax(-1), q_logits.float().softmax(-1)).sum(-1)


def acceptance_topk(p_logits, q_logits, k=20):
    """What an engine that lists only the actor's k likeliest tokens can know of alpha: (lower, upper).

    lower = sum of min(p, q) over those k, which is what the paper's engine reports; upper adds the smaller of the two
    remainders. On flat distributions the lower bound is far off, so it is for comparison, never for control.
    """
    p, q = p_logits.float().softmax(-1), q_logits.float().softmax(-1)
    q_top, index = q.topk(min(k, q.shape[-1]), dim=-1)
    p_top = p.gather(-1, index)
    lower = torch.minimum(p_top, q_top).sum(-1)
    return lower, lower + torch.minimum(1 - p_top.sum(-1), 1 - q_top.sum(-1)).clamp(min=0)


def chunked_acceptance(project, p_hidden, q_hidden, temperature=1.0, chunk=1024):
    """`acceptance` from the two last hidden states [M,d], through one head, a chunk at a time -> [M]."""
    parts = [acceptance(project(p).float() / temperature, project(q).float() / temperature)
             for p, q in zip(p_hidden.split(chunk), q_hidden.split(chunk))]
    return torch.cat(parts) if parts else p_hidden.new_zeros(0, dtype=torch.float32)


def chunked_kl(project, q_hidden, p_hidden, temperature=1.0, chunk=1024):
    """KL(q || p) over the full vocabulary from two last hidden states [M,d], a chunk at a time, also in the backward pass.
    Differentiable in q; p is a constant. -> [M] fp32"""
    def piece(q, p):
        logq = (project(q).float() / temperature).log_softmax(-1)
        with torch.no_grad():
            logp = (project(p).float() / temperature).log_softmax(-1)
        return (logq.exp() * (logq - logp)).sum(-1)
    return torch.cat([checkpoint(piece, q, p, use_reentrant=False)
                      for q, p in zip(q_hidden.split(chunk), p_hidden.split(chunk))])


def rollout_alpha(model, rollout, temperature=1.0, every=1, attend=dense_attend):
    """alpha of the response tokens whose hidden states a rollout kept (`every`-th), against the dense policy (or, for a dense
    rollout, the policy under another `attend`), by one forward pass -> [M]"""
    with torch.no_grad():
        ids = torch.tensor([rollout.prompt_ids + rollout.ids], device=next(model.parameters()).device)
        states = model(ids, attend, head=lambda hidden, _: hidden)[0, len(rollout.prompt_ids) - 1:-1]
        return chunked_acceptance(model.logits, states[::every], rollout.hidden.to(states.device), temperature)


def tail(alpha, mask=None, fraction=0.05):
    """The order statistic of rank ceil(fraction * n), smallest first, no interpolation. NaN is left out; none: NaN."""
    alpha = alpha[mask] if mask is not None else alpha.flatten()
    alpha = alpha[~alpha.isnan()].float()
    if not len(alpha):
        return float("nan")
    rank = math.ceil(fraction * len(alpha) - 1e-9)  # 0.07 * 100 is 7.000000000000001 in floating point
    return alpha.kthvalue(max(rank, 1)).values.item()


# ---- sparsity: how many pages a row may read --------------------------------------------------------------------

# Tables published with the paper: pages per 2,000 cached tokens at page size 16, without the three reserved pages.
# The last value holds beyond the last bin.
PUBLISHED = {
    "qwen3-1.7b-0.75": "29 29 45 45 61 61 77 77 93 93 93 93 93 93 93 93 93 93 93 93",
    "qwen3-1.7b-0.80": "29 45 61 77 93 93 125 125 125 157 157 157 157 157 157 157 157 157 157 157",
    "qwen3-1.7b-0.83": "29 61 77 93 125 125 157 157 189 189 189 189 189 189 189 189 189 189 189 189",
    "qwen3-1.7b-0.86": "29 61 93 93 125 157 189 221 221 253 253 253 253 253 253 253 253 253 253 253",
    "qwen3-1.7b-0.88": "45 77 125 157 157 189 221 253 253 317 317 317 317 317 317 317 317 317 317 317",
    "qwen3-1.7b-0.90": "45 93 157 189 221 253 317 317 381 381 381 381 381 381 381 381 381 381 381 381",
    "qwen3-1.7b-0.92": "61 125 189 221 253 317 381 381 445 509 509 509 509 509 509 509 509 509 509 509",
    "qwen3-1.7b-0.94": "77 157 221 317 381 445 509 509 637 765 765 765 765 765 765 765 765 765 765 765",
    "qwen3-4b-0.75": "29 29 29 29 45 61 77 93 125 125 125 125 157 157 157 157 157 157 189 189",
    "qwen3-4b-0.80": "29 29 45 61 77 93 125 157 157 157 189 221 221 221 221 221 221 221 221 221",
    "qwen3-4b-0.86": "29 45 61 77 93 125 157 221 253 253 317 317 317 317 381 381 381 381 509 509",
    "qwen3-4b-0.88": "29 61 93 125 157 189 253 317 381 445 445 509 509 509 637 637 637 637 637 637",
    "qwen3-4b-0.90": "45 77 125 157 189 253 317 445 637 765 765 765 765 765 765 893 893 893 893 893",
    "qwen3-4b-0.92": "45 93 157 189 253 381 445 765 893 1021 1021 1149 1149 1149 1149 1149 1149 1149 1149 1149",
    "qwen3-8b-0.75": "29 29 29 45 45 77 77 77 93 93 93 93 125 125 125 125 125 125 157 157",
    "qwen3-8b-0.80": "29 29 45 61 77 93 125 125 157 157 189 189 189 221 221 221 221 253 253 253",
    "qwen3-8b-0.86": "29 45 61 77 125 157 189 253 253 253 253 317 317 317 317 317 317 385 445 445",
    "qwen3-8b-0.87": "29 61 77 93 157 189 221 317 317 317 317 381 381 381 381 381 445 445 509 509",
    "qwen3-8b-0.92": "45 93 125 189 253 445 509 637 765 765 765 893 893 893 893 893 1021 1021 1021 1021",
    "qwen3-14b-0.86": "29 45 77 125 253 381 381 381 381 381 381 381 381 381 381 509 637 637 893 893",
}


@dataclass(frozen=True)
class Schedule:
    """How many pages a query may read (the budget), by the number of tokens cached, its own included.

    bins[i] is the budget, reserved pages included, while length // bin_tokens == i; the last value holds beyond. With
    `share` set, the budget is that fraction of the row's own pages instead. Never under `min_pages`, never over the
    pages there are.
    """
    bins: tuple
    bin_tokens: int
    page_size: int = 16
    min_pages: int = 0
    share: float | None = None

    @classmethod
    def fraction(cls, share, max_context=32768, n_bins=20, page_size=16, min_pages=32):
        """A fixed fraction of the cached pages, in (0, 1]; 1 is dense. Bins (for the controller) are of equal width."""
        if not 0 < share <= 1:
            raise ValueError(f"--budget {share}: give a fraction of the cached pages in (0, 1]; 1 is dense")
        width = -(-max_context // n_bins)
        ends = [-(-width * (i + 1) // page_size) for i in range(n_bins)]  # pages at each bin's upper edge
        return cls(tuple(max(_ceil(share * p), min_pages) for p in ends), width, page_size, min_pages, share)

    @classmethod
    def published(cls, name, page_size=16):
        """A table published with the paper, e.g. "qwen3-4b-0.86", plus its three reserved pages."""
        if name not in PUBLISHED:
            raise ValueError(f"--schedule {name}: no such file or published schedule; published are {', '.join(PUBLISHED)}")
        return cls(tuple(_ceil((int(p) + 3) * 16 / page_size) for p in PUBLISHED[name].split()), 2000, page_size)

    @classmethod
    def load(cls, name_or_file, page_size=16):
        """A published name, or a JSON file written by `save`."""
        path = Path(name_or_file)
        if not path.is_file():
            return cls.published(str(name_or_file), page_size)
        try:
            fields = json.loads(path.read_text())
            schedule = cls(tuple(fields.pop("bins")), **fields)
            whole = (*schedule.bins, schedule.bin_tokens, schedule.page_size, schedule.min_pages)
            least = [1] * (len(whole) - 1) + [0]
            if not schedule.bins or any(type(x) is not int or not low <= x < 2**31 for x, low in zip(whole, least)):
                raise ValueError("bins, bin_tokens, page_size and min_pages must be whole numbers, and bins not empty")
            if schedule.share is not None and not 0 < schedule.share <= 1:
                raise ValueError("share must be in (0, 1]")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"--schedule {path}: not a schedule file ({type(error).__name__}: {error})") from None
        if schedule.page_size != page_size:
            raise ValueError(f"--schedule {path}: made for page size {schedule.page_size}, but --page-size is {page_size}")
        return schedule

    @classmethod
    def asked(cls, args, max_context):
        """What the flags --schedule, or else --budget and --min-pages, ask for."""
        if args.schedule:
            return cls.load(args.schedule, args.page_size)
        return cls.fraction(args.budget, max_context, page_size=args.page_size, min_pages=args.min_pages)

    def save(self, path):
        Path(path).write_text(json.dumps(self.__dict__ | {"bins": list(self.bins)}) + "\n")

    def pages(self, length):
        """Budget in pages of a query with `length` cached tokens (itself included). int -> int; tensor -> int32 tensor."""
        if isinstance(length, int):
            return int(self.pages(torch.tensor(length)))
        have = self.have(length)
        if self.share is not None:
            want = (have.double() * self.share - 1e-9).ceil()
        else:
            want = torch.tensor(self.bins, device=length.device)[(length // self.bin_tokens).clamp(max=len(self.bins) - 1)]
        return torch.minimum(want.clamp(min=self.min_pages), have).int()

    def have(self, length):
        """Pages that `length` tokens fill."""
        return (length + self.page_size - 1) // self.page_size

    @property
    def dense(self):
        """Does it read everything, whatever the length?"""
        return self.share == 1

    def share_read(self, rollouts):
        """Share of the cached pages that a query read, over all tokens of the rollouts."""
        lengths = torch.cat([torch.arange(len(r.prompt_ids), len(r.prompt_ids) + len(r.ids)) for r in rollouts])
        return (self.pages(lengths).sum() / self.have(lengths).sum()).item()


def _ceil(x):
    """Ceiling that forgives the last bit: 0.07 * 100 is 7.000000000000001."""
    return math.ceil(x - 1e-9)


class Controller:
    """Holds the tail of alpha above tau in every bin of cached tokens, by moving that bin's budget.

    Per bin, u = log(budget in tokens). A token *exceeds* when alpha < tau; the tail (the `epsilon` quantile of alpha)
    is above tau exactly when the rate of exceedance e is at most epsilon. After each step, from decayed sums:

        e > epsilon:   u += eta * (e - epsilon)                          attack: fast, on any evidence
        else:          u += max(eta * min(0, e + se - epsilon), -0.10)   release: slow, only when surely below

    se is the standard error of e over sequences (tokens of one sequence err together), floored for small samples.
    Old evidence fades when the budget it was gathered under moves. The budget applied is the running maximum over
    bins: later positions never read less. A bin nobody reached holds its start or its neighbour's.

    control="mean" holds the mean of the violation 1 - alpha at epsilon instead, for comparison: e is that mean, not a rate.

    Without the two guards on release and the running maximum, this is adaptive conformal inference (Gibbs and Candes,
    2021) with its bound: mean exceedance <= epsilon + (u_max + eta - u_1) / (eta * steps) for any sequence whatever.
    The guards forfeit the proof; and no rule on alpha *proves* that RL is stable.
    """
    ETA, DECAY, FADE, MAX_RELEASE, MIN_SEQUENCES = 5.0, 0.8, 0.2, 0.10, 4

    def __init__(self, schedule, tau=0.86, epsilon=0.05, min_pages=None, control="tail"):
        self.start, self.schedule, self.tau, self.epsilon, self.control = schedule, schedule, tau, epsilon, control
        size, n = schedule.page_size, len(schedule.bins)
        ends = torch.arange(1, n + 1, dtype=torch.float64) * schedule.bin_tokens
        self.high = ((ends / size).ceil() * size).log()                     # everything, at the bin's upper edge
        floor = max(schedule.min_pages if min_pages is None else min_pages, 1)
        start = torch.tensor(schedule.bins, dtype=torch.float64) * size
        # A table given by hand may lie under the floor; the floor only stops the controller from going lower.
        self.u = start.log().minimum(self.high)
        self.low = torch.full_like(self.high, math.log(floor * size)).minimum(self.u)
        self.sums = torch.zeros(6, n, dtype=torch.float64)  # x, n, x^2, x*n, n^2 over sequences, and how many: S
        self.reached = torch.zeros(n, dtype=torch.bool)
        self.mean_length = self.mean_kl = None              # running means for the guards

    def update(self, alpha, positions, mask, weight=None, response_length=None, kl=None):
        """One step's measurements in, the next schedule out.

        alpha: [N,T]; positions: [N,T] cached tokens when the token was generated; mask: [N,T] measured tokens; weight:
        [N] how many samples a row stands for. response_length and kl (k3 of actor and policy), if given, are this
        step's means for the guards (over all ranks). With a process group, sums are taken over ranks: one schedule for all.
        """
        new = self._count(alpha, positions, mask, weight)
        if dist.is_available() and dist.is_initialized():
            device = alpha.device  # NCCL reduces on the GPU only
            new = new.to(device)
            dist.all_reduce(new)
            new = new.cpu()
        self.sums = self.sums * self.DECAY + new
        self.reached |= new[1] > 0
        x, n, xx, xn, nn_, S = self.sums
        e = x / n.clamp(min=1e-9)
        spread = (xx - 2 * e * xn + e * e * nn_).clamp(min=0).sqrt() / n.clamp(min=1e-9)
        floor = (self.epsilon * (1 - self.epsilon) / (20 * S.clamp(min=1e-9))).sqrt()
        attack = self.ETA * (e - self.epsilon)
        release = (self.ETA * (e + torch.maximum(spread, floor) - self.epsilon).clamp(max=0)).clamp(min=-self.MAX_RELEASE)
        if not self._may_release(response_length, kl):
            release = torch.zeros_like(release)
        du = torch.where(e > self.epsilon, attack, release).masked_fill(S < self.MIN_SEQUENCES, 0)
        u = (self.u + du).clamp(self.low, self.high)
        self.sums *= (-(u - self.u).abs() / self.FADE).exp()
        applied = u.cummax(0).values
        self.u = torch.where(self.reached, torch.maximum(u, applied - math.log(2)), u)  # anti-windup
        size = self.schedule.page_size
        bins = tuple(_ceil(tokens / size) for tokens in applied.exp().tolist())
        self.schedule = Schedule(bins, self.start.bin_tokens, size)
        return self.schedule

    def _count(self, alpha, positions, mask, weight):
        """Sums over sequences of (x, n, x^2, x*n, n^2, 1) in each bin -> [6, bins] float64."""
        (N, _), n_bins = alpha.shape, len(self.u)
        mask = mask & ~alpha.isnan()
        bin_of = (positions // self.start.bin_tokens).clamp(0, n_bins - 1).long()                      # [N,T]
        per_row = torch.zeros(2, N, n_bins, dtype=torch.float64, device=alpha.device)
        violation = alpha < self.tau if self.control == "tail" else 1 - alpha.double().clamp(0, 1)
        per_row[0].scatter_add_(1, bin_of, violation.double().masked_fill(~mask, 0))
        per_row[1].scatter_add_(1, bin_of, mask.double())
        if weight is not None:
            per_row *= weight.to(per_row)[:, None]
        x, n = per_row.cpu()
        return torch.stack([x, n, x * x, x * n, n * n, (n > 0).double()]).sum(1)

    def _may_release(self, response_length, kl):
        """The guards: no lowering while responses shrink or the actor drifts from the policy."""
        ok = True
        if response_length is not None and response_length == response_length:  # NaN is "no data"
            ok &= self.mean_length is None or response_length >= 0.8 * self.mean_length
            self.mean_length = _running(self.mean_length, response_length)
        if kl is not None and kl == kl:
            ok &= self.mean_kl is None or kl <= 1.25 * self.mean_kl
            self.mean_kl = _running(self.mean_kl, kl)
        return ok

    def state_dict(self):
        state = {k: getattr(self, k) for k in ("u", "sums", "reached", "mean_length", "mean_kl")}
        state = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
        return state | {"schedule": dict(self.schedule.__dict__)}

    def load_state_dict(self, state):
        state = dict(state)
        if len(state["u"]) != len(self.u):
            raise ValueError(f"the controller's state has {len(state['u'])} bins, this schedule {len(self.u)}")
        self.schedule = Schedule(**state.pop("schedule"))
        for k, v in state.items():
            setattr(self, k, v.clone() if torch.is_tensor(v) else v)


def _running(mean, value, decay=0.8):
    return value if mean is None else decay * mean + (1 - decay) * value


def encode_prompt(tokenizer, text, chat="auto"):
    """Prompt ids, in the tokenizer's chat template if it has one (chat="auto"), always ("on") or never ("off")."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat == "on" and not has_template:
        raise ValueError("--chat on: this tokenizer has no chat template; use --chat off")
    if has_template and chat != "off":
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(text)


# ---- actor: generate with a paged, sparse cache -----------------------------------------------------------------


@dataclass
class Rollout:
    """One sample. logprobs are the actor's, at the sampling temperature; hidden the actor's last states, [ceil(T/every), d],
    of response tokens 0, every, 2*every, ...: what `acceptance` needs."""
    prompt_ids: list
    ids: list              # the stop token, if one was sampled, included
    logprobs: torch.Tensor  # [T] fp32, CPU
    hidden: torch.Tensor | None
    finish: str            # "stop" or "length"


@dataclass(eq=False)
class _Prompt:
    """A prompt that is, or will be, prefilled once for its n samples."""
    ids: list
    waiting: int                                # samples not admitted yet
    pages: list = field(default_factory=list)   # pool pages while held, the last one maybe partly filled
    hidden: torch.Tensor | None = None          # [d] last state: the first response token is drawn from it


@dataclass(eq=False)
class _Sample:
    """One of a prompt's samples, from queue to Rollout. `saved` holds its lane's tensors while it is preempted."""
    prompt: _Prompt
    slot: int                                   # place among the results
    uniforms: torch.Tensor                      # [max_new_tokens] its own random numbers
    pages: list = field(default_factory=list)
    emitted: int = 0
    born: int = 0
    saved: dict | None = None

    @property
    def cached(self):  # the newest token's K and V are not in the cache yet
        return len(self.prompt.ids) + self.emitted - 1


def sample_uniforms(seed, key, index, n):
    """The random numbers of one sample, from (seed, problem, sample) alone: independent of batch, slot and ranks."""
    words = [int(s) & (2**64 - 1) for s in (seed if isinstance(seed, (tuple, list)) else [seed])]
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*words, int(key), int(index)])))
    return torch.from_numpy(rng.random(n, dtype=np.float32))


def fuse(*projections):
    """One product that does the work of several on the same input. Their weights become views of its own, so that loading
    them loads it."""
    def join(tensors):
        whole = torch.cat([t.data for t in tensors])
        for t, part in zip(tensors, whole.split([len(t) for t in tensors])):
            t.data = part
        return whole
    weight = join([p.weight for p in projections])
    bias = None if projections[0].bias is None else join([p.bias for p in projections])
    return lambda x: linear(x, weight, bias)


class Actor:
    """Generates with its own inference copy of the weights (bf16 on a GPU, fp32 on a CPU) and a paged cache.

    A *lane* is a row of the decode batch. Lanes 0..n-1 are live; a finished lane's place goes to the next sample in
    the queue, or else to the last lane. Pages are taken as rows grow. When the pool runs dry, the youngest row is
    preempted: its pages go back, and later it is recomputed by `sparse_attention` under the budgets it had, so its
    distribution does not change. The host looks at the device once every `burst` tokens.

    On a GPU a decode step is hundreds of small launches, so it is captured once as a CUDA graph for each of a few batch
    sizes and replayed. Weights, pools, lanes and budgets are refreshed in place, so graphs outlive training steps. Lanes
    without a row are idle: their page table points at the scratch page.
    """
    def __init__(self, model, rows=64, max_context=None, pool_pages=None, page_size=16, dense_layers=2, first=1, last=2,
                 alpha_every=1, device=None):
        c = model.config
        self.device = torch.device(device or next(model.parameters()).device)
        self.rows, self.page_size, self.dense_layers, self.first, self.last = rows, page_size, dense_layers, first, last
        self.alpha_every, self.max_context = alpha_every, min(max_context or c.max_context, c.max_context)
        self._make_model(model)
        self.row_pages = -(-self.max_context // page_size)
        self.budget_of = torch.zeros(self.max_context + 1, dtype=torch.int32, device=self.device)
        self.lanes_made_for, self.graphs, self.graph_memory = None, {}, None
        self._make_pool(pool_pages)

    def _make_model(self, model):
        """The actor's copy, in its own type; the norms are small and stay fp32."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        with torch.device("meta"):
            own = Model(model.config, tokenizer=model.tokenizer).requires_grad_(False).to(dtype)
        for module in own.modules():
            if isinstance(module, RMSNorm):
                module.float()
        self.model, own.dtype = own.to_empty(device=self.device), dtype
        own.inv_freq = own.inv_freq.to(self.device)
        if model.config.tied:
            own.lm_head.weight = own.model.embed_tokens.weight
        self.fused = [(fuse(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                       fuse(layer.mlp.gate_proj, layer.mlp.up_proj)) for layer in own.model.layers]
        if not next(model.parameters()).is_meta:  # a model of shapes alone: the caller fills in the weights
            self.load(model)

    def _make_pool(self, pool_pages):
        """K, V and landmark pools, one tensor per layer (one for all would outgrow 32-bit offsets early)."""
        c = self.model.config
        page = 2 * c.num_key_value_heads * self.page_size * c.head_dim * c.num_hidden_layers * self.model.dtype.itemsize
        wanted = self.rows * (self.row_pages + 1)
        if pool_pages is None:
            pool_pages = wanted
            if self.device.type == "cuda":  # leave room for the policy's activations
                pool_pages = min(wanted, int(0.5 * torch.cuda.mem_get_info(self.device)[0] / page))
        self.pool_pages, self.pool_bytes = pool_pages, page * (pool_pages + 1)
        def pool(*shape):  # page 0 is scratch, in nobody's table
            return [torch.zeros(pool_pages + 1, c.num_key_value_heads, *shape, c.head_dim, dtype=self.model.dtype,
                                device=self.device) for _ in range(c.num_hidden_layers)]
        self.k, self.v, self.landmarks = pool(self.page_size), pool(self.page_size), pool()
        self.lanes = torch.arange(self.rows, device=self.device)
        self.arrived = torch.zeros(self.rows * c.num_key_value_heads, dtype=torch.int32, device=self.device)

    @torch.no_grad()
    def load(self, model, lora=None):
        """Take over a policy's weights, in place. lora: {parameter name: (A [r,in], B [out,r])}, merged as W + B A in
        fp32 from the policy's pristine W, rounded once: nothing to unmerge, nothing drifts."""
        own = dict(self.model.named_parameters())
        theirs = dict(model.named_parameters())
        if unknown := set(lora or ()) - set(own):
            raise ValueError(f"lora names parameters the model does not have: {', '.join(sorted(unknown))}")
        for name, p in own.items():
            w = whole(theirs[name].detach().to(p.device))
            if lora and name in lora:
                A, B = (x.detach().to(p.device).float() for x in lora[name])
                w = w.float() + B @ A
            p.copy_(w)

    # -- the loop --

    @torch.no_grad()
    def generate(self, prompts, n=1, max_new_tokens=256, temperature=1.0, schedule=None, stop_ids=(), seed=0, keys=None,
                 progress=False):
        """n samples of each prompt (lists of ids) -> list of Rollout, prompt-major.

        schedule: a Schedule, None for dense. seed: an int or a tuple of ints, e.g. (seed, step). keys: one integer a
        prompt, its place in the step's global batch. Raises ValueError when a request can never fit.
        """
        self._check(prompts, n, max_new_tokens, temperature)
        if schedule and schedule.page_size != self.page_size:
            raise ValueError(f"the schedule counts pages of {schedule.page_size} tokens, this actor's pages have "
                             f"{self.page_size}")
        # Anew each time: a call that was interrupted leaves nothing behind.
        self.free, self.refs = list(range(self.pool_pages, 0, -1)), np.zeros(self.pool_pages + 1, dtype=np.int64)
        self._follow(schedule or Schedule.fraction(1.0, self.max_context, page_size=self.page_size))
        self._make_lanes(max_new_tokens, temperature, list(stop_ids))
        self.queue, self.live, self.results, self.born = deque(), [], [None] * (len(prompts) * n), 0
        for i, ids in enumerate(prompts):
            prompt = _Prompt(list(map(int, ids)), n)
            self.queue.extend(_Sample(prompt, i * n + j, sample_uniforms(seed, keys[i] if keys else i, j, max_new_tokens))
                              for j in range(n))
        with tqdm(total=len(self.queue) * max_new_tokens, unit=" tokens", desc="rollout", disable=not progress,
                  leave=False) as self.bar:
            while self.queue or self.live:
                self._harvest()
                self._admit()
                steps = min([self.burst, *(max_new_tokens - s.emitted for s in self.live)])
                if self.live and steps:
                    self._grow(steps)
                    for _ in range(steps):
                        self._step()
                    for s in self.live:
                        s.emitted += steps
                    self.bar.update(steps * len(self.live))
        return self.results

    def _follow(self, schedule):
        self.schedule = schedule
        lengths = torch.arange(self.max_context + 1, device=self.device)
        self.budget_of.copy_(schedule.pages(lengths))  # by cached length: the device looks its budgets up

    def _check(self, prompts, n, max_new, temperature):
        if n < 1 or max_new < 1 or temperature < 0:
            raise ValueError(f"need n >= 1, max_new_tokens >= 1, temperature >= 0; got {n}, {max_new}, {temperature}")
        for i, ids in enumerate(prompts):
            if not len(ids):
                raise ValueError(f"prompt {i} is empty")
            if (total := len(ids) + max_new) > self.max_context:
                raise ValueError(f"prompt {i} has {len(ids)} tokens; with --max-new-tokens {max_new} that is {total}, over "
                                 f"the context of {self.max_context}")
            need = -(-total // self.page_size) + 1  # one more: the prompt's last page is kept apart from the sample's copy
            if need > self.pool_pages:
                raise ValueError(f"prompt {i} may need {need} pages of {self.page_size} tokens, but the page pool holds "
                                 f"{self.pool_pages}: raise --pool-pages or lower --max-new-tokens")

    def _make_lanes(self, max_new, temperature, stop_ids):
        """Device tensors, one row a lane; those in `own` belong to the sample and follow it through a preemption."""
        if self.lanes_made_for == (max_new, temperature, stop_ids):
            return
        self.lanes_made_for, self.graphs, self.graph_memory = (max_new, temperature, stop_ids), {}, None
        self.max_new, self.temperature = max_new, temperature
        # How many tokens between two looks at the device: the tokens after a stop are wasted, but so is time spent waiting.
        self.burst = min(16, max(1, max_new // 64)) if self.device.type == "cuda" else 1
        self.stops = torch.tensor(stop_ids, dtype=torch.long, device=self.device)
        R, M, d, every = self.rows, self.max_new, self.model.config.hidden_size, self.alpha_every
        def zeros(*shape, dtype=torch.float32):
            return torch.zeros(*shape, dtype=dtype, device=self.device)
        self.own = dict(token=zeros(R, dtype=torch.long), emitted=zeros(R, dtype=torch.long), uniforms=zeros(R, M),
                        lengths=zeros(R, dtype=torch.int32),
                        ids=zeros(R, M, dtype=torch.long), logprobs=zeros(R, M),
                        # one entry more than kept: the states between go there
                        hidden=zeros(R, -(-M // every) + 1 if every else 1, d, dtype=self.model.dtype))
        self.table = zeros(R, self.row_pages, dtype=torch.int32)
        self.host_table, self.changed = torch.zeros(R, self.row_pages, dtype=torch.int32), set()

    def _emit(self, lanes, hidden):
        """Draw the next token of `lanes` ([B] indices) from their last states [B,d] and write it down."""
        o = self.own
        at = o["emitted"][lanes].clamp(max=self.max_new - 1)  # an idle lane counts on
        logits = self.model.lm_head(hidden)[:, :self.model.n_tokens]  # cut after: a product of odd width would be slow
        token, logp = sample_tokens(logits, o["uniforms"][lanes, at], self.temperature)
        o["token"][lanes], o["ids"][lanes, at], o["logprobs"][lanes, at] = token, token, logp
        if self.alpha_every:
            place = torch.where(at % self.alpha_every == 0, at // self.alpha_every, o["hidden"].shape[1] - 1)
            o["hidden"][lanes, place] = hidden
        o["emitted"][lanes] = at + 1

    def _step(self):
        """One token for every live lane; on a GPU by a graph, of the next larger batch size that has one."""
        n = len(self.live)
        if self.device.type != "cuda":
            return self._decode(n, max(-(-(s.cached + self.burst) // self.page_size) for s in self.live))
        self._replay(min(1 << (n - 1).bit_length(), self.rows))

    def _replay(self, n):
        key = (n, self.schedule.dense)
        if key not in self.graphs:
            self.graphs[key] = self._capture(n)
        self.graphs[key].replay()

    def _capture(self, n):
        """Capturing runs nothing, but the warm-up before it does: on lanes made idle, which are put back after."""
        kept = {name: tensor.clone() for name, tensor in self.own.items()}
        table = self.table.clone()
        self.table.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode(n, self.row_pages)
        torch.cuda.current_stream().wait_stream(side)
        graph, self.graph_memory = torch.cuda.CUDAGraph(), self.graph_memory or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.graph_memory):
            self._decode(n, self.row_pages)
        self.table.copy_(table)
        for name, tensor in kept.items():
            self.own[name].copy_(tensor)
        return graph

    def _decode(self, n, width):
        """One token for lanes 0..n-1, whose page tables are at most `width` pages wide: the model once more, written out
        for one token a row over the paged cache."""
        c, m, o, dtype = self.model.config, self.model.model, self.own, self.model.dtype
        H, G, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        before = o["lengths"][:n]
        after = before + 1
        table, budgets = self.table[:n, :width], self.budget_of[after.long()]
        phase = before[:, None].float() * self.model.inv_freq                             # [n,D/2]
        cos, sin = phase.cos() * c.rope_scale, phase.sin() * c.rope_scale
        x, delta = m.embed_tokens(o["token"][:n]).float(), None                           # [n,d] the residual stream
        for i, (layer, (qkv, gate_up)) in enumerate(zip(m.layers, self.fused)):
            attn, cache = layer.self_attn, (self.k[i], self.v[i], self.landmarks[i], table)
            h = add_norm(x, delta, layer.input_layernorm.weight, c.norm_eps, dtype)
            q, k, v = qkv(h).view(n, H + 2 * G, D).split((H, G, G), dim=1)
            norms = (attn.q_norm.weight, attn.k_norm.weight, c.norm_eps) if c.qk_norm else None
            q = rope_append(q, k, v, cos, sin, norms, *cache, before)
            read = table, after
            if i >= self.dense_layers and not self.schedule.dense:
                read = select_tables(q, self.landmarks[i], table, after, budgets, self.page_size, self.first, self.last,
                                     self.arrived)
            out = paged_attention(q, self.k[i], self.v[i], *read)                         # [n,H,D]
            delta = linear(out.flatten(1), attn.o_proj.weight, attn.o_proj.bias, partial=True)
            h = add_norm(x, delta, layer.post_attention_layernorm.weight, c.norm_eps, dtype)
            delta = linear(silu_mul(gate_up(h)), layer.mlp.down_proj.weight, layer.mlp.down_proj.bias, partial=True)
        hidden = add_norm(x, delta, m.norm.weight, c.norm_eps, dtype)
        o["lengths"][:n] = after.clamp(max=self.max_context - 1)  # an idle lane counts on
        self._emit(self.lanes[:n], hidden)

    def _prefill(self, ids, pages, prompt_length, chunk=8192):
        """Cache a sequence, its first prompt_length tokens dense, the rest under the schedule -> its last state [d].

        A chunk at a time, each over the keys cached so far: activations stay small however long the sequence is.
        """
        S, index = self.page_size, torch.tensor(pages, device=self.device)
        budgets = self.budget_of[1:len(ids) + 1].clone()
        budgets[:prompt_length] = DENSE
        for start in range(0, len(ids), chunk):
            end = min(start + chunk, len(ids))
            inner = dense_attend
            if end > prompt_length and not self.schedule.dense:
                inner = sparse_attend(budgets[start:end], self.dense_layers, S, self.first, self.last)

            def attend(layer, q, k, v):
                pools, so_far = (self.k[layer], self.v[layer]), index[:-(-end // S)]
                fill_kv(k[0], v[0], *pools, self.landmarks[layer], so_far[start // S:])
                if start:  # [P,G,S,D] -> [1,G,T,D]
                    k, v = (x[so_far].transpose(0, 1).flatten(1, 2)[None, :, :end] for x in pools)
                return inner(layer, q, k, v)

            positions = torch.arange(start, end, device=self.device)[None]
            hidden = self.model.hidden_states(torch.tensor([ids[start:end]], device=self.device), attend, positions)
        return hidden[0, -1]

    # -- pages and lanes, on the host --

    def _take(self, count):
        pages = [self.free.pop() for _ in range(count)]
        self.refs[pages] += 1
        return pages

    def _release(self, pages):
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self.free.append(page)

    def _reclaim(self):
        """Let go of prompts held for samples still to come; they will be prefilled again. -> was anything freed?"""
        before = len(self.free)
        for s in self.queue:
            self._release(s.prompt.pages)
            s.prompt.pages = []
        return len(self.free) > before

    def _admit(self):
        """Fill free lanes from the queue while the pool has room for the newcomers and a page of growth for everyone."""
        fresh, copies = [], []
        while self.queue and len(self.live) < self.rows:
            s = self.queue[0]
            prompt, full = s.prompt, len(s.prompt.ids) // self.page_size
            if s.saved:  # preempted before: all its pages anew
                need = -(-s.cached // self.page_size)
            else:        # the prompt, once; then a page of its own for the prompt's unfilled end and what follows
                need = 1 + (0 if prompt.pages else -(-len(prompt.ids) // self.page_size))
            if len(self.free) < need + (len(self.live) + 1 if self.live else 0):
                if not self.live and self._reclaim():
                    continue
                break
            self.queue.popleft()
            if s.saved:
                s.pages = self._take(need)
                ids = prompt.ids + s.saved["ids"][:s.emitted - 1].tolist()
                self._prefill(ids, s.pages, len(prompt.ids))
            else:
                if not prompt.pages:
                    prompt.pages = self._take(need - 1)
                    prompt.hidden = self._prefill(prompt.ids, prompt.pages, len(prompt.ids))
                self.refs[prompt.pages[:full]] += 1
                s.pages = prompt.pages[:full] + self._take(1)
                if full < len(prompt.pages):
                    copies.append((prompt.pages[full], s.pages[full]))
                prompt.waiting -= 1
                fresh.append((len(self.live), s))
            self._seat(s)
        self._copy_pages(copies)
        for _, s in fresh:
            if not s.prompt.waiting:
                self._release(s.prompt.pages)
                s.prompt.pages = []
        if fresh:
            lanes = torch.tensor([lane for lane, _ in fresh], device=self.device)
            self._emit(lanes, torch.stack([s.prompt.hidden for _, s in fresh]))
            for _, s in fresh:
                s.emitted = 1
            self.bar.update(len(fresh))

    def _copy_pages(self, copies):
        if copies:
            source, target = torch.tensor(copies, device=self.device).T
            for pool in (*self.k, *self.v, *self.landmarks):
                pool[target] = pool[source]

    def _seat(self, s):
        """Give a sample the next lane, with its saved tensors or fresh ones."""
        lane, s.born, self.born = len(self.live), self.born, self.born + 1
        self.live.append(s)
        self.changed.add(s)
        if s.saved:
            for name, value in s.saved.items():
                self.own[name][lane] = value
            s.saved = None
        else:
            self.own["emitted"][lane] = 0
            self.own["lengths"][lane] = len(s.prompt.ids)
            self.own["uniforms"][lane] = s.uniforms.to(self.device)

    def _unseat(self, lane):
        """Free a lane: its pages go back, and the last lane moves into its place."""
        self._release(self.live[lane].pages)
        self.live[lane].pages = []
        last = self.live.pop()
        self.changed.add(last)
        if lane < len(self.live):
            self.live[lane] = last
            for tensor in self.own.values():
                tensor[lane] = tensor[len(self.live)]

    def _grow(self, steps):
        """Pages for `steps` more tokens in every lane; when the pool is dry, prompts on hold go first, then young rows."""
        for s in sorted(self.live, key=lambda s: s.born):
            while not s.saved and len(s.pages) * self.page_size < s.cached + steps:
                if self.free or self._reclaim():
                    s.pages += self._take(1)
                    self.changed.add(s)
                else:
                    self._preempt(max(self.live, key=lambda s: s.born))
        if self.changed:
            for lane, s in enumerate(self.live):
                if s in self.changed:
                    self.host_table[lane, :len(s.pages)] = torch.tensor(s.pages, dtype=torch.int32)
            self.host_table[len(self.live):] = 0
            self.own["lengths"][len(self.live):] = 0  # idle lanes have next to nothing to attend to
            self.table.copy_(self.host_table)
            self.changed.clear()

    def _preempt(self, s):
        lane = self.live.index(s)
        s.saved = {name: tensor[lane].clone() for name, tensor in self.own.items()}
        self._unseat(lane)
        self.queue.appendleft(s)

    def _harvest(self):
        """Turn finished lanes into Rollouts."""
        written = torch.arange(self.max_new, device=self.device) < self.own["emitted"][:len(self.live), None]
        hits = torch.isin(self.own["ids"][:len(self.live)], self.stops) & written         # [B,M]
        stops = torch.where(hits.any(1), hits.int().argmax(1), -1).tolist()  # the one place where the host waits
        for lane in reversed(range(len(self.live))):
            s, stop = self.live[lane], stops[lane]
            if stop < 0 and s.emitted < self.max_new:
                continue
            T = stop + 1 if stop >= 0 else s.emitted
            hidden = self.own["hidden"][lane, :-(-T // self.alpha_every)].clone() if self.alpha_every else None
            self.results[s.slot] = Rollout(s.prompt.ids, self.own["ids"][lane, :T].tolist(),
                                           self.own["logprobs"][lane, :T].cpu().clone(), hidden,
                                           "stop" if stop >= 0 else "length")
            self.bar.total -= self.max_new - s.emitted
            self._unseat(lane)


# ---- python sparrow.py --bench: what a decode step costs, and what it must ------------------------------------------

# hidden, intermediate, layers, heads, KV heads, vocabulary, tied head: from the models' config.json
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True), "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False), "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, True), "Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, False), "Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, False),
}


def model_shape(name):
    """transformers config of a built-in shape, or of a checkpoint folder or Hub name."""
    if Path(name).is_dir() or name not in SHAPES:
        return AutoConfig.from_pretrained(find_model(name))
    d, ff, L, H, G, V, tied = SHAPES[name]
    kind = "qwen3" if name.startswith("Qwen3") else "qwen2"
    extra = dict(head_dim=128) if kind == "qwen3" else {}
    return AutoConfig.for_model(
        kind, hidden_size=d, intermediate_size=ff, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=G,
        vocab_size=V, tie_word_embeddings=tied, max_position_embeddings=40960, rms_norm_eps=1e-6, **extra)


def matrix_weights(config):
    """Weights that every token is multiplied with, the output head among them."""
    c = config
    width = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim  # of q and o, k and v
    return c.num_hidden_layers * c.hidden_size * (width + 3 * c.intermediate_size) + c.vocab_size * c.hidden_size


def step_bytes(config, rows, length, schedule, dense_layers=2, itemsize=2):
    """The fewest bytes a decode step can read: every weight once, the output head, and for each row K and V of the pages read
    and, in sparse layers, the landmarks of all its pages."""
    c, have, read = config, schedule.have(length), schedule.pages(length)
    width, sparse = c.num_key_value_heads * c.head_dim, 0 if schedule.dense else max(c.num_hidden_layers - dense_layers, 0)
    pages = (c.num_hidden_layers - sparse) * have + sparse * read
    cache = rows * width * (2 * schedule.page_size * pages + sparse * have)
    return itemsize * (matrix_weights(c) + cache)


def rollout_cost(shape, n_in, n_out, budget, samples=1, prompts=1, page_size=16, intensity=206.0, finite=False):
    """The paper's cost of a rollout, in equivalent FLOPs -> (dense, sparse); their ratio is the predicted speed-up.

    shape: a Config, a model's name, or (P, D, r): P weights, D = layers x KV heads x head dim, r = H/G query heads a KV
    head. N samples of a prompt, L_in and L_out tokens; B = budget in tokens, or a Schedule: its mean over the rollout.
    I = intensity, FLOPs worth a unit of traffic (an H200: 989 TFLOP/s / 4.8 TB/s). Section 3.3, for one prompt:

        dense    2 P N L_out + r (2 L_in + L_out) L_out N D + I (2 L_in L_out D + N L_out^2 D)
        sparse   2 P N L_out + 2 r N D B L_out + 2 I N D B L_out + scoring
        scoring  2 N L_in D L_out + r N D L_out^2 / (2 page) + I (2 L_in D L_out + N D L_out^2 / (2 page))

    Weights cost no traffic there, and B is paid for even where the context is shorter. finite=True is Appendix F, for b
    prompts at once: weights are read, and no more than there is; no scoring, and a prompt's samples share nothing.

        C = 2 P b N L_out + r b N D H + I (2 P L_out + b N D H),   H = 2 x the sum over steps of min(context, B)
    """
    if isinstance(shape, str):
        shape = Config.from_hf(model_shape(shape))
    if isinstance(shape, Config):
        G = shape.num_key_value_heads
        shape = matrix_weights(shape), shape.num_hidden_layers * G * shape.head_dim, shape.num_attention_heads / G
    (P, D, r), N, I, B = shape, samples, intensity, budget
    steps = torch.arange(n_in + 1, n_in + n_out + 1)
    if isinstance(budget, Schedule):
        page_size, B = budget.page_size, budget.pages(steps).double() * budget.page_size
    # Half a token less, so that dense is (2 L_in + L_out) L_out, the integral; H is the appendix's for any whole B.
    H = 2 * (steps.double() - 0.5).clamp(max=B).sum().item()
    if finite:
        return tuple(2 * P * prompts * N * n_out + r * prompts * N * D * h + I * (2 * P * n_out + prompts * N * D * h)
                     for h in ((2 * n_in + n_out) * n_out, H))
    B = H / (2 * n_out) if isinstance(budget, Schedule) else budget
    dense = r * (2 * n_in + n_out) * n_out * N * D + I * (2 * n_in * n_out * D + N * n_out**2 * D)
    sparse = 2 * r * N * D * B * n_out + 2 * I * N * D * B * n_out
    scoring = (2 * N * n_in * D * n_out + r * N * D * n_out**2 / (2 * page_size)
               + I * (2 * n_in * D * n_out + N * D * n_out**2 / (2 * page_size)))
    return tuple(prompts * (2 * P * N * n_out + x) for x in (dense, sparse + scoring))


def step_times(actor, rows, lengths, schedule, repeat=5):
    """Median seconds of one decode step with `rows` rows of each of the lengths cached, under a schedule."""
    actor._follow(schedule)
    out = []
    for length in lengths:
        times = []
        for i in range(repeat + 2):  # the first capture the graph and warm up
            actor.own["lengths"][:rows] = length - 1
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            actor._replay(rows)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        out.append(float(np.median(times[2:])))
    return out


def profile_step(actor, rows, length, schedule):
    """Where one decode step's time goes, kernel by kernel. A kernel's time counts its wait for the one before it, from which it
    may have been launched early (see sparse_attn.py): so the sum can be over the step's own time."""
    from torch.profiler import ProfilerActivity, profile
    seconds = step_times(actor, rows, [length], schedule)[0]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        actor.own["lengths"][:rows] = length - 1
        actor._replay(rows)
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda k: -k.device_time_total)
    print(f"  a step of {1e6 * seconds:,.0f} us: {sum(k.count for k in kernels)} launches, "
          f"{sum(k.device_time_total for k in kernels):,.0f} us in kernels")
    for k in kernels[:12]:
        print(f"{k.device_time_total:12.0f} us {k.count:5d} x {k.device_time_total / k.count:8.2f}  {k.key[:80]}")


def bench(args):
    """Step times over context length for dense, --budget and a published schedule; beside each, its byte floor."""
    if not torch.cuda.is_available():
        raise ValueError("--bench times the GPU's decode step, and no CUDA GPU was found")
    hf, S, rows, context = model_shape(args.model), args.page_size, args.rows, args.context
    c, P = Config.from_hf(hf), -(-context // S)
    with torch.device("meta"):
        model = Model(c)
    actor = Actor(model, rows, context, rows * P, S, args.dense_layers, device="cuda")
    for name, p in actor.model.named_parameters():
        p.fill_(1.0) if "norm" in name else p.normal_(0, 0.02)
    for pool in (*actor.k, *actor.v, *actor.landmarks):
        pool.normal_()
    actor._make_lanes(64, 1.0, [0])
    actor.table.copy_((torch.randperm(rows * P, device="cuda") + 1).view(rows, P))
    bandwidth, lengths = read_bandwidth(), [2048 * i for i in range(1, context // 2048 + 1)] or [context]
    size = args.model.split("-")[-1].lower()
    name = args.schedule or (f"qwen3-{size}-0.86" if f"qwen3-{size}-0.86" in PUBLISHED else "qwen3-1.7b-0.86")
    modes = {"dense": Schedule.fraction(1.0, context, page_size=S),
             f"budget {args.budget}": Schedule.fraction(args.budget, context, page_size=S, min_pages=args.min_pages),
             name: Schedule.load(name, S)}
    print(f"{args.model}: {rows} rows, page {S}, {args.dense_layers} dense layers; read bandwidth "
          f"{bandwidth / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'ms a step at':>22s}" + "".join(f"{n:>8d}" for n in lengths[::args.every])
          + "   rollout: seconds, floor, ratio, tok/s")
    totals = {}
    for mode, schedule in modes.items():
        measured = step_times(actor, rows, lengths, schedule)
        floors = [step_bytes(c, rows, n, schedule, args.dense_layers) / bandwidth for n in lengths]
        at = torch.tensor([0, *lengths], dtype=torch.float64)
        total, floor = (torch.trapezoid(torch.tensor([t[0], *t]).double(), at).item() for t in (measured, floors))
        totals[mode] = total, floor
        print(f"{mode:>22s}" + "".join(f"{1e3 * t:8.2f}" for t in measured[::args.every])
              + f"   {total:7.1f} {floor:7.1f} {total / floor:5.2f} {rows * lengths[-1] / total:8,.0f}")
        print(f"{'over its byte floor':>22s}" + "".join(f"{t / f:8.2f}" for t, f in list(zip(measured, floors))[::args.every]))
    for mode in list(totals)[1:]:
        gain, bound = (totals["dense"][i] / totals[mode][i] for i in (0, 1))
        print(f"{mode}: a rollout to {lengths[-1]} tokens is {gain:.2f}x as fast as dense; the byte floors' ratio is "
              f"{bound:.2f} ({gain / bound:.0%} of it)")
        short, full = (rollout_cost(c, 0, lengths[-1], modes[mode], prompts=rows, finite=f) for f in (False, True))
        print(f"  the cost model predicts {short[0] / short[1]:.2f}x (Section 3.3), {full[0] / full[1]:.2f}x (Appendix F)")
    for mode in modes if args.profile else ():
        print(f"{mode}, {lengths[-1]} tokens cached:")
        profile_step(actor, rows, lengths[-1], modes[mode])
    print(f"memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, of it the page pool {actor.pool_bytes / 2**30:.1f}")
    if args.peer:
        model = actor.model
        del actor, pool  # the pages make room
        bench_peer(model, hf, rows)


def bench_peer(model, hf, rows, context=2048):
    """Decoding alone, ours and transformers' `generate`, dense, same weights: from the time two unlike lengths take."""
    actor = Actor(model, rows, context, device="cuda")
    with torch.device("cuda"):
        peer = AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16).eval()
    peer.load_state_dict(model.state_dict(), strict=False)
    prompts = torch.randint(0, 1000, (rows, context - 256), device="cuda")
    def ours(n):
        actor.generate(prompts.tolist(), 1, n)
    def theirs(n):
        peer.generate(prompts, max_new_tokens=n, min_new_tokens=n, do_sample=True, top_k=0, pad_token_id=0)
    rates = []
    for generate in (ours, theirs):
        seconds = []
        for n in (32, 32, 160):  # the first warms up
            torch.cuda.synchronize()
            started = time.perf_counter()
            generate(n)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rates.append(rows * 128 / (seconds[2] - seconds[1]))
    print(f"decoding near {context} tokens, {rows} rows, dense: {rates[0]:,.0f} tokens/s here, {rates[1]:,.0f} by "
          f"transformers' generate: {rates[0] / rates[1]:.1f}x")


# ---- python sparrow.py --calibrate: the budget that holds the tail, position by position --------------------------------


@dataclass
class Reading:
    """alpha under one fixed budget. Bins are of cached tokens; NaN: too few tokens there to tell."""
    on: str               # whose samples: "sparse" (drawn under this budget) or "dense"
    page_size: int
    pages: int            # the budget, reserved pages included
    tokens: list          # [bins] measured tokens
    tails: list           # [bins] the --tail quantile
    tail: float           # over all positions, as the rest
    mean: float
    near_one: float       # share above 0.999
    beta: tuple           # (a, b, KS distance) of the Beta fitted to what is not, scaled to [0, 0.999]
    histogram: list       # [50] tokens per 0.02 of alpha


def measure(on, pages, page_size, rollouts, alphas, n_bins, args):
    """Sum up alpha of rollouts, a tensor each, of every --alpha-every-th token. Token t is drawn with t tokens cached."""
    alpha = torch.cat(alphas).cpu()
    at = torch.cat([len(r.prompt_ids) + torch.arange(0, len(r.ids), args.alpha_every) for r in rollouts])
    bins = [alpha[at // args.bin_tokens == i] for i in range(n_bins)]
    tails = [tail(x, fraction=args.tail) if len(x) >= args.min_tokens else math.nan for x in bins]
    rare = alpha[alpha <= 0.999]
    return Reading(on, page_size, pages, [len(x) for x in bins], tails, tail(alpha, fraction=args.tail), alpha.mean().item(),
                    1 - len(rare) / len(alpha), beta_fit(rare / 0.999), torch.histc(alpha.clamp(max=1), 50, 0, 1).tolist())


def beta_cdf(x, a, b):
    """By the trapezoid rule over the logit of x: there the density, x^a (1-x)^b, is smooth and fades at both ends."""
    z = torch.linspace(-40 / min(a, 1), 40 / min(b, 1), 20001, dtype=torch.float64)
    log_density = a * F.logsigmoid(z) + b * F.logsigmoid(-z)
    cdf = torch.cumulative_trapezoid((log_density - log_density.max()).exp(), z)
    return torch.from_numpy(np.interp(x.double().logit(), z[1:], cdf / cdf[-1]))


def beta_fit(x):
    """(a, b) of the Beta distribution with the mean and the variance of x [n], and its Kolmogorov-Smirnov distance from x."""
    x, n = x.double().clamp(0, 1).sort().values, len(x)
    if n < 2 or x[0] == x[-1]:
        return math.nan, math.nan, math.nan
    m, v = x.mean().item(), x.var(correction=0).item()
    a, b = m * (m * (1 - m) / v - 1), (1 - m) * (m * (1 - m) / v - 1)
    cdf, steps = beta_cdf(x, a, b), torch.arange(n + 1) / n
    return a, b, max((steps[1:] - cdf).max().item(), (cdf - steps[:-1]).max().item())


def sweep(model, prompts, budgets, on, page_size, args):
    """alpha against the dense policy under each budget, fixed -> list of Reading. on="sparse": of samples drawn under it, as
    in training; on="dense": teacher-forced on one set of dense samples, for a forward pass a budget."""
    context, T = max(map(len, prompts)) + args.max_new_tokens, args.temperature
    actor = Actor(model, min(args.rows, len(prompts) * args.n), context, page_size=page_size, dense_layers=args.dense_layers,
                  alpha_every=args.alpha_every)

    def sample(schedule):  # the same random numbers under every budget
        stops = () if args.ignore_stop else model.stop_ids
        return actor.generate(prompts, args.n, args.max_new_tokens, T, schedule, stops, args.seed, progress=True)

    def forced(rollout, schedule):
        pages = schedule.pages(torch.arange(1, len(rollout.prompt_ids + rollout.ids) + 1, device=actor.device))
        pages[:len(rollout.prompt_ids)] = DENSE
        return sparse_attend(pages, args.dense_layers, page_size)

    dense, results = sample(None) if on == "dense" else None, []
    for pages in budgets:
        schedule = Schedule((pages,), context, page_size)
        rollouts = dense or sample(schedule)
        alphas = [rollout_alpha(model, r, T or 1.0, args.alpha_every, forced(r, schedule) if dense else dense_attend)
                  for r in rollouts]
        results.append(measure(on, pages, page_size, rollouts, alphas, -(-context // args.bin_tokens), args))
    return results


def choose(results, tau):
    """The least budget that holds the tail at tau, as all larger ones do too, bin by bin -> (pages [bins], indices of the bins
    where none does and the largest is taken). Later positions never read less; a bin without data holds its neighbour's."""
    pages, unmet = [], []
    for i in range(len(results[0].tails)):
        known = [m for m in results if not math.isnan(m.tails[i])]
        failed = max((m.pages for m in known if m.tails[i] < tau), default=0)
        meets = [m.pages for m in known if m.pages > failed]
        pages.append(meets[0] if meets else results[-1].pages if known else 0)
        unmet += [i] if known and not meets else []
    if not any(pages):
        raise ValueError("no bin has --min-tokens tokens: raise --problems, --n or --max-new-tokens, or widen --bin-tokens")
    first = next(p for p in pages if p)
    return [max(first, *pages[:i + 1]) for i in range(len(pages))], unmet


def show(sweeps, args):
    """A table a sweep, whether a larger budget always helped, and what other samples change."""
    for results in sweeps:
        print(f"page {results[0].page_size}, {results[0].on} samples; {args.tail:.0%} tail of alpha: of all, and below so many "
              f"cached tokens (-: under {args.min_tokens} tokens)\n pages   mean  >.999 KS Beta   tail |"
              + "".join(f"{args.bin_tokens * (i + 1):6d}" for i in range(len(results[0].tails))))
        for m in results:
            print(f"{m.pages:6d} {m.mean:6.3f} {m.near_one:6.3f} {m.beta[2]:7.3f} {m.tail:6.3f} |"
                  + "".join("     -" if math.isnan(t) else f"{t:6.3f}" for t in m.tails))
        steps = np.diff([m.tails for m in results], axis=0)
        if (known := ~np.isnan(steps)).any():
            print(f"from a budget to the next larger, the tail of a bin falls in {(steps < 0).sum()} of {known.sum()} "
                  f"cases, by {max(0, -steps[known].min()):.3f} at most")
    gaps = np.subtract(*([m.tails for m in results] for results in (sweeps[0], sweeps[-1])))
    if len(sweeps) == 2 and (known := ~np.isnan(gaps)).any():
        gaps = gaps[known]
        print(f"tails of sparse less those of dense samples: mean {gaps.mean():+.3f}, {gaps.min():+.3f} to {gaps.max():+.3f}")


def write_schedule(sweeps, tau, page_size, n_in, config, args):
    """Choose by the first sweep, save and report -> Schedule."""
    (pages, unmet), *others = (choose(results, tau) for results in sweeps)
    schedule, path = Schedule(tuple(pages), args.bin_tokens, page_size), Path(args.out) / f"page{page_size}-tau{tau:g}.json"
    schedule.save(path)
    dense, sparse = rollout_cost(config, n_in, args.max_new_tokens, schedule, args.n)
    print(f"tau {tau:g}: pages {' '.join(map(str, pages))}; predicted speed-up {dense / sparse:.2f}; --schedule {path}")
    for other, _ in others:
        print(f"  by dense samples: {' '.join(map(str, other))}")
    if unmet:
        ends = ", ".join(str(args.bin_tokens * (i + 1)) for i in unmet)
        print(f"  NOT MET by any budget measured there: the bins that end at {ends}; they hold the largest; raise --pages")
    return schedule


def calibrate(args):
    """Measure the tail of alpha by budget and position; write the schedules that hold it, figures and raw numbers."""
    from verify import load_problems  # for prompts alone: the ones that training would see, in the same words
    if not max(*args.tau, args.tail) < 1:
        raise ValueError(f"--tau {' '.join(map(str, args.tau))} --tail {args.tail}: both are shares between 0 and 1")
    model, out, everything = load_with_tokenizer(args.model), Path(args.out), []
    problems = load_problems(args.data, args.seed, args.problems)[:args.problems]
    prompts = [encode_prompt(model.tokenizer, problem.prompt) for problem in problems]
    n_in, context = sum(map(len, prompts)) // len(prompts), max(map(len, prompts)) + args.max_new_tokens
    args.bin_tokens = args.bin_tokens or -(-context // 20)
    tokens = [p * args.page_size[0] for p in args.pages or ()] or np.geomspace(4 * max(args.page_size), context, 18)
    print(f"{args.model}: {args.n} samples of each of {len(prompts)} prompts of {args.data}, up to {context} tokens cached")
    out.mkdir(parents=True, exist_ok=True)
    for S in args.page_size:
        budgets = sorted({max(_ceil(t / S), 3) for t in tokens})  # three pages are always read
        sweeps = [sweep(model, prompts, budgets, on, S, args) for on in ("sparse", "dense") if args.on in (on, "both")]
        everything += sum(sweeps, [])
        show(sweeps, args)
        schedules = {tau: write_schedule(sweeps, tau, S, n_in, model.config, args) for tau in args.tau}
        plot_calibration(sweeps[0], schedules, args, out / f"page{S}.png")
        (out / "calibration.json").write_text(json.dumps(vars(args) | {"measured": [m.__dict__ for m in everything]}) + "\n")
    if len(args.page_size) > 1:
        plot_page_sizes([m for m in everything if m.on == everything[0].on], n_in, model.config, args, out / "page_sizes.png")
    print(f"figures and all numbers: {out}")


def plot_calibration(results, schedules, args, path):
    """The paper's Fig. 3 (tail against position, budgets in grey; the schedules) and Fig. 1 b (how alpha is distributed)."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(12, 8), layout="constrained")
    (tails, pages), (spread, means) = fig.subplots(2, 2)
    x, name = [args.bin_tokens * (i + 0.5) for i in range(len(results[0].tails))], f"{args.tail:.0%} tail of alpha"
    for m in results:
        tails.plot(x, m.tails, ".-", color="0.8", lw=1, ms=3)
    tails_of = {m.pages: m.tails for m in results}
    for i, (tau, schedule) in enumerate(schedules.items()):
        look = dict(color=f"C{i}", label=f"tau {tau:g}")
        tails.plot(x, [tails_of[p][b] for b, p in enumerate(schedule.bins)], "o-", ms=3, **look)
        tails.axhline(tau, color=f"C{i}", lw=0.8, ls=":")
        pages.step(x, schedule.bins, where="mid", **look)
    tails.set(title=f"Grey: budgets of {results[0].pages} to {results[-1].pages} pages", xlabel="cached tokens", ylabel=name)
    pages.set(title="The least budget that holds tau", xlabel="cached tokens", ylabel=f"pages of {results[0].page_size} tokens")
    m, edges = results[len(results) // 2], torch.linspace(0, 1, 51)
    spread.stairs(m.histogram, edges, fill=True, color="0.8", label=f"{m.near_one:.1%} above 0.999")
    if not math.isnan(m.beta[0]):
        fit = beta_cdf((edges / 0.999).clamp(max=1), *m.beta[:2]).diff() * (1 - m.near_one) * sum(m.histogram)
        spread.stairs(fit, edges, color="C3", label="the rest: Beta({:.2f}, {:.2f}), KS {:.3f}".format(*m.beta))
    spread.set(title=f"alpha under {m.pages} pages", xlabel="alpha", ylabel="tokens", yscale="log", ylim=(0.5, None))
    means.plot([m.pages for m in results], [m.mean for m in results], "o-", label="mean of alpha")
    means.plot([m.pages for m in results], [m.tail for m in results], "o-", label=name)
    means.set(title="Mean and tail, all positions", xlabel="pages")
    means.set_xscale("log", base=2)
    for ax in fig.axes:
        ax.legend()
    fig.savefig(path, dpi=110)


def pareto(points):
    """Of (cost, tail) points those that none reaches at less cost, by ascending cost."""
    points = sorted(points, key=lambda p: (p[0], -p[1]))
    return [p for i, p in enumerate(points) if all(p[1] > q[1] for q in points[:i])]


def plot_page_sizes(results, n_in, config, args, path):
    """The paper's Fig. 4 b: tail against the predicted cost, a line a page size, and the front."""
    from matplotlib.figure import Figure
    fig, points = Figure(figsize=(7, 5), layout="constrained"), {S: [] for S in args.page_size}
    ax = fig.subplots()
    for m in results:
        dense, sparse = rollout_cost(config, n_in, args.max_new_tokens, Schedule((m.pages,), 1, m.page_size), args.n)
        points[m.page_size].append((sparse / dense, m.tail))
    for S, line in points.items():
        ax.plot(*zip(*line), "o-", ms=4, label=f"page {S}")
    ax.plot(*zip(*pareto(sum(points.values(), []))), "ko", ms=9, mfc="none", label="on the front")
    ax.set(xlabel="predicted cost of a rollout, dense = 1", ylabel=f"{args.tail:.0%} tail of alpha, all positions")
    ax.legend()
    fig.savefig(path, dpi=110)


# ---- python sparrow.py ------------------------------------------------------------------------------------------


def main(argv=None):
    """Generate with the sparse actor, and say how far it is from the dense policy; or time it (--bench); or find schedules
    (--calibrate)."""
    p = argparse.ArgumentParser(prog="sparrow.py", allow_abbrev=False, description=main.__doc__)
    p.add_argument("--model", required=True, help="checkpoint folder or Hub name")
    p.add_argument("--prompt", help="text; put into the chat template if the tokenizer has one")
    p.add_argument("--n", type=int, default=1, help="samples (default 1)")
    p.add_argument("--max-new-tokens", type=int, default=256, help="longest response (default 256)")
    p.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    p.add_argument("--budget", type=float, default=0.1, help="share of the cached pages read, in (0, 1] (default 0.1)")
    p.add_argument("--schedule", help="a published table or a schedule file instead of --budget")
    p.add_argument("--min-pages", type=int, default=4, help="floor of --budget (default 4)")
    p.add_argument("--page-size", type=int, nargs="+", default=[16], help="tokens in a KV page (default 16)")
    p.add_argument("--dense-layers", type=int, default=2, help="first layers that stay dense (default 2)")
    p.add_argument("--seed", type=int, default=0, help="seeds the samples (default 0)")
    p.add_argument("--bench", action="store_true", help=f"time decode steps; --model may be a bare shape: {', '.join(SHAPES)}")
    p.add_argument("--rows", type=int, default=16, help="--bench: rows decoded at once (default 16)")
    p.add_argument("--context", type=int, default=32768, help="--bench: longest context (default 32768)")
    p.add_argument("--every", type=int, default=1, help="--bench: print every so many multiples of 2048 tokens (default 1)")
    p.add_argument("--profile", action="store_true", help="--bench: where a step's time goes, kernel by kernel")
    p.add_argument("--peer", action="store_true", help="--bench: also time transformers' generate near 2,048 tokens")
    p.add_argument("--calibrate", action="store_true", help="sweep fixed budgets; write the schedule that holds each --tau")
    p.add_argument("--tau", type=float, nargs="+", default=[0.86], help="--calibrate: floors of the tail (default 0.86)")
    p.add_argument("--tail", type=float, default=0.05, help="--calibrate: the quantile of alpha (default 0.05)")
    p.add_argument("--data", "--task", default="countdown", help="--calibrate: problems, as for verify.py (default countdown)")
    p.add_argument("--problems", type=int, default=64, help="--calibrate: how many of them (default 64)")
    p.add_argument("--pages", type=int, nargs="+", help="--calibrate: budgets, in pages of the first --page-size, the three "
                   "reserved ones included (default: 18, spaced by equal factors from 4 pages to all)")
    p.add_argument("--on", default="sparse", choices=["sparse", "dense", "both"], help="--calibrate: whose samples; sparse: "
                   "drawn under each budget; dense: one set, scored under each, far cheaper (default sparse)")
    p.add_argument("--ignore-stop", action="store_true", help="--calibrate: every sample runs to --max-new-tokens, so that far "
                   "positions are measured too on a model whose answers are short")
    p.add_argument("--bin-tokens", type=int, help="--calibrate: cached tokens in a bin (default: a 20th of all)")
    p.add_argument("--min-tokens", type=int, default=200, help="--calibrate: a bin with fewer tells nothing (default 200)")
    p.add_argument("--alpha-every", type=int, default=1, help="--calibrate: measure every so manieth token; larger takes less "
                   "memory (default 1)")
    p.add_argument("--out", default="calibration", help="--calibrate: folder for what it finds (default calibration)")
    args = p.parse_args(argv)
    from verify import check_flags  # here, as in calibrate: the decoder itself needs nothing of it
    check_flags(args, p, "n max_new_tokens page_size rows context every tau tail problems pages bin_tokens min_tokens "
                "alpha_every", "temperature min_pages dense_layers")
    if not args.bench and not args.calibrate and args.prompt is None:
        p.error("--prompt: give the text to continue (or --bench, or --calibrate)")
    try:
        if args.calibrate:
            return calibrate(args)
        if len(args.page_size) > 1:
            raise ValueError(f"--page-size {' '.join(map(str, args.page_size))}: only --calibrate takes several")
        args.page_size = args.page_size[0]
        if args.bench:
            return bench(args)
        model = load_with_tokenizer(args.model)
        prompt = encode_prompt(model.tokenizer, args.prompt)
        context = len(prompt) + args.max_new_tokens
        schedule = Schedule.asked(args, context)
        actor = Actor(model, args.n, context, page_size=args.page_size, dense_layers=args.dense_layers)
        rollouts = actor.generate([prompt], args.n, args.max_new_tokens, args.temperature, schedule, model.stop_ids,
                                  args.seed, progress=True)
    except (ValueError, OSError) as error:
        p.error(str(error))
    for i, r in enumerate(rollouts):
        print(f"--- sample {i + 1}: {len(r.ids)} tokens, {r.finish}\n{model.tokenizer.decode(r.ids, skip_special_tokens=True)}")
    alpha = torch.cat([rollout_alpha(model, r, args.temperature or 1.0) for r in rollouts])
    print(f"--- read {schedule.share_read(rollouts):.0%} of the cached pages; alpha against the dense policy: mean "
          f"{alpha.mean():.4f}, 5% quantile {tail(alpha):.3f}, 1% quantile {tail(alpha, fraction=0.01):.3f}, lowest "
          f"{alpha.min():.3f}")


if __name__ == "__main__":
    main()
