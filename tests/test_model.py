"""The model against transformers: logits, kinds, heads, RoPE, saving."""
import json

import pytest
import torch
from conftest import KINDS, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sparrow import Config, Model, find_model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(checkpoints, random_ids, kind):
    folder, hf = checkpoints[kind]
    ids = random_ids(3, 70)
    ours, theirs = Model.from_pretrained(folder)(ids), hf(ids).logits
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std() > 0.5, "the comparison would be empty on flat logits"


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_hugging_faces_and_the_save_reopens(checkpoints, random_ids, tmp_path, kind):
    folder, hf = checkpoints[kind]
    model = Model.from_pretrained(folder)
    assert set(dict(model.named_parameters())) == set(dict(hf.named_parameters()))
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # a change that must survive the round trip
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(1, 20)
    assert (again(ids).logits - model(ids)).abs().max() < 1e-4
    assert (model(ids) - hf(ids).logits).abs().max() > 1e-2


def test_head_dim_is_read_not_guessed():
    """Qwen3-0.6B: 1024 hidden, 16 heads, head_dim 128, not 64; and Qwen2 biases q, k, v though no flag says so."""
    c = Config.from_hf(AutoConfig.for_model("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
                                            head_dim=128))
    assert c.head_dim == 128 and len(c.inv_freq) == 64 and c.qk_norm and not c.qkv_bias
    c = Config.from_hf(AutoConfig.for_model("qwen2", hidden_size=896, num_attention_heads=14, num_key_value_heads=2))
    assert c.head_dim == 64 and c.qkv_bias and not c.o_bias and not c.qk_norm
    c = Config.from_hf(AutoConfig.for_model("qwen3", attention_bias=True))
    assert c.qkv_bias and c.o_bias


def test_tied_and_untied_heads(tmp_path, random_ids):
    """Four checkpoints: tied, tied with a spare head (ignored), untied with its head, untied without (an error)."""
    ids = random_ids(1, 12)
    tied = make_checkpoint(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    file = tmp_path / "tied" / "model.safetensors"
    state = load_file(file)
    assert "lm_head.weight" not in state, "transformers writes no head when tied"
    assert (Model.from_pretrained(tmp_path / "tied")(ids) - tied(ids).logits).abs().max() < 1e-4
    save_file(state | {"lm_head.weight": torch.randn(97, 48)}, file, metadata={"format": "pt"})
    spare = Model.from_pretrained(tmp_path / "tied")
    assert (spare(ids) - tied(ids).logits).abs().max() < 1e-4
    untied = make_checkpoint(tmp_path / "untied", "qwen2", tie_word_embeddings=False)
    assert (Model.from_pretrained(tmp_path / "untied")(ids) - untied(ids).logits).abs().max() < 1e-4
    state = load_file(tmp_path / "untied" / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        Model.from_pretrained(tmp_path / "untied")


def test_still_tied_after_an_optimizer_step(checkpoints, random_ids, tmp_path):
    model = Model.from_pretrained(checkpoints["qwen2"][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(random_ids(1, 9)).square().mean().backward()
    optimizer.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    ids = random_ids(1, 9, seed=1)
    assert (AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits - model(ids)).abs().max() < 1e-4


def test_sharded_safetensors(checkpoints, random_ids, tmp_path):
    folder, hf = checkpoints["llama"]
    hf.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = random_ids(1, 10)
    assert (Model.from_pretrained(tmp_path)(ids) - hf(ids).logits).abs().max() < 1e-4
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
     "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}])
def test_rope_types_through_transformers_initialisers(tmp_path, random_ids, rope):
    hf = make_checkpoint(tmp_path, "llama", rope_parameters=rope)
    ids = random_ids(1, 400)
    assert (Model.from_pretrained(tmp_path)(ids) - hf(ids).logits).abs().max() < 1e-4


def test_rope_theta_of_the_old_config_layout(checkpoints, random_ids, tmp_path):
    """Files written before transformers 5 hold rope_theta and rope_scaling at the top level."""
    folder, _ = checkpoints["qwen3"]
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    for theta in (1e4, 1e6):
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        ids = random_ids(1, 30)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        assert (Model.from_pretrained(tmp_path)(ids) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "spiral"])
def test_rope_that_depends_on_length_is_refused_by_name(rope):
    hf = AutoConfig.for_model("llama")
    hf.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=rope):
        Config.from_hf(hf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_phases_are_right_at_far_positions(dtype):
    """Position 15962, D 128, theta 1e6: cos of the first frequency is -0.9080; in bf16 it would be -0.2680."""
    hf = AutoConfig.for_model("qwen3", hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                              num_key_value_heads=1, head_dim=128, vocab_size=8, max_position_embeddings=40960,
                              rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model = Model(Config.from_hf(hf)).to(dtype)
    model.dtype = dtype
    seen = {}

    def attend(layer, q, k, v):
        return q
    block = model.model.layers[0].self_attn
    original = block.forward
    block.forward = lambda x, rope, attend: seen.update(cos=rope[0], sin=rope[1]) or original(x, rope, attend)
    positions = torch.tensor([[0, 257, 4095, 15962, 32767]])
    model.hidden_states(torch.zeros(1, 5, dtype=torch.long), attend, positions)
    exact = positions[0, :, None].double() * 1e6 ** (-torch.arange(0, 128, 2).double() / 128)
    assert (seen["cos"][0, :, 0] - exact.cos()).abs().max() < 3e-3
    assert (seen["sin"][0, :, 0] - exact.sin()).abs().max() < 3e-3
    assert seen["cos"][0, 3, 0, 0].item() == pytest.approx(-0.9080, abs=1e-3)


def test_positions_past_8192_equal_transformers(tmp_path, random_ids):
    """No table of fixed length: positions are turned into phases as they come."""
    hf = make_checkpoint(tmp_path, "qwen3", max_position_embeddings=10000)
    model, ids = Model.from_pretrained(tmp_path), random_ids(1, 24)
    positions = torch.arange(9000, 9024)[None]
    theirs = hf(ids, position_ids=positions).logits
    assert (model(ids, positions=positions) - theirs).abs().max() < 1e-3


@pytest.mark.parametrize("change, culprit", [
    (dict(model_type="gpt2"), "gpt2"), (dict(hidden_act="gelu"), "gelu"), (dict(use_sliding_window=True), "sliding")])
def test_unsupported_models_are_refused(change, culprit):
    hf = AutoConfig.for_model("gpt2" if "model_type" in change else "qwen2")
    for key, value in change.items():
        if key != "model_type":
            setattr(hf, key, value)
    with pytest.raises(ValueError, match=culprit):
        Config.from_hf(hf)


def test_missing_folders_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="config.json"):
        find_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen9-1B.*network"):
        find_model("Qwen9-1B")


def test_a_short_name_is_a_local_folder_first(checkpoints, tmp_path, monkeypatch):
    (tmp_path / "Qwen2.5-1.5B").symlink_to(checkpoints["qwen2"][0])
    monkeypatch.chdir(tmp_path)
    assert Model.from_pretrained("Qwen2.5-1.5B").config.tied
