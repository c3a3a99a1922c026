"""A program with an adapter of its own, examples/own-method: its IA3 is PEFT's, both ways, and so is what it merges."""

import json
import warnings

import models
import peer
import pytest
import tiny
import torch
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import save_file

TOLERANCE = 1e-5
IDS = tiny.tokens(24, 7)
BASES = {
    "llama": tiny.Case("llama", "gqa", False, "nobias", "default", 1),
    "qwen2": tiny.Case("qwen2", "gqa", False, "nobias", "default", 3),  # biases of q, k and v, which are scaled too
    "bias": tiny.Case("llama", "gqa", False, "allbias", "llama3", 7),
    "tied": tiny.Case("llama", "gqa", True, "nobias", "default", 4),
}


@pytest.fixture
def own(tapetune, tmp_path):
    return type(tapetune)(models.binary().parent / "own-method", tmp_path)


@pytest.fixture(params=BASES)
def base(request, tmp_path):
    return BASES[request.param].save(tmp_path / "model")


def noise(shape):
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(shape[0] + shape[-1]))


def load(base, adapter):
    """As PEFT reads it, in float64; it has nothing to warn of but that it cannot tie embeddings beside IA3."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(peer.double(base), adapter)
    said = [text for text in (str(warning.message) for warning in said) if "tie_word_embeddings" not in text]
    assert not said, "; ".join(said)
    return model.double().eval()


def assert_agree(own, base, adapter, merged):
    model = load(base, adapter)
    ours = own.logits(base, IDS, "--adapter", adapter, "--dtype", "f64")["logits"]
    theirs = model(torch.tensor([IDS])).logits[0]
    assert (theirs - peer.double(base)(torch.tensor([IDS])).logits[0]).abs().max() > 0.3
    peer.assert_close(ours, theirs, TOLERANCE, "logits with the adapter")
    own("merge", adapter, "--model", base, "--out", merged)
    mine, whole = peer.load(merged), model.merge_and_unload()
    for name, tensor in whole.state_dict().items():
        peer.assert_close(mine.state_dict()[name], tensor, TOLERANCE, f"merged {name}")


def test_ia3_saved_by_peft(own, base, tmp_path):
    targets = ["k_proj", "v_proj", "o_proj", "down_proj"]
    model = get_peft_model(peer.load(base, torch.float32), IA3Config(target_modules=targets, feedforward_modules=["down_proj"]))
    for name, parameter in model.named_parameters():
        if "ia3_l" in name:
            parameter.add_(noise(parameter.shape))
    model.save_pretrained(tmp_path / "adapter")
    assert_agree(own, base, tmp_path / "adapter", tmp_path / "merged")


def test_ia3_loaded_by_peft(own, base, tmp_path):
    made, adapter = tmp_path / "made", tmp_path / "adapter"
    own("adapter", base, "--method", "none", "adapter.type=ia3", "train_also=embeddings,norms", "--out", made)
    weights = adapter / "adapter_model.safetensors"
    tensors = {name: tensor + noise(tensor.shape) for name, tensor in peer.tensors(made / weights.name).items()}
    embeddings, head = (f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head"))
    if head in tensors:  # one matrix under both names
        tensors[head] = tensors[embeddings].clone()
    adapter.mkdir()
    for name in ("adapter_config.json", "tapetune.json"):
        (adapter / name).write_text((made / name).read_text())
    save_file(tensors, weights, {"format": "pt"})
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["peft_type"] == "IA3" and config["feedforward_modules"] == ["down_proj"]
    assert_agree(own, base, adapter, tmp_path / "merged")
