"""Tiny checkpoints of the three kinds, made by transformers, and what the tests share."""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before sparse_attn: its kernels then run on CPU tensors

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from sparrow import Model

transformers.logging.set_verbosity_error()
SMALL = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, pad_token_id=1, bos_token_id=0)
KINDS = {
    "qwen2": dict(SMALL, tie_word_embeddings=True),
    "qwen3": dict(SMALL, head_dim=16, tie_word_embeddings=False),
    "llama": dict(SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
}


def make_checkpoint(folder, kind, **changes):
    """Random weights, large enough that the logits are far from uniform, written by transformers. -> its model"""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(KINDS[kind] | changes)), dtype=torch.float32).eval()
    with torch.no_grad():
        for p in hf.parameters():
            p.normal_(0, 0.2) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.1)
    hf.save_pretrained(folder)
    return hf


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled")  # checkpoints of one process


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """kind -> (folder, transformers model)"""
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: (root / kind, make_checkpoint(root / kind, kind)) for kind in KINDS}


@pytest.fixture(scope="session")
def tiny(checkpoints):
    """The Qwen3-kind checkpoint as our Model: 3 layers, 6/2 heads of 16."""
    return Model.from_pretrained(checkpoints["qwen3"][0])


@pytest.fixture
def random_ids():
    def make(*shape, seed=0, high=97):
        return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(seed))
    return make
