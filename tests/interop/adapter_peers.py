"""What the tests of adapters share: base models, gradients and the comparison of ours with PEFT's."""

import math
import warnings

import peer
import pytest
import tiny
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open

TOLERANCE = 1e-4  # absolute on logits of standard deviation 2; relative to a gradient's largest entry
COUNT = 32  # tokens: the context of every case, and a multiple of four for LongLoRA's groups
PREFIX = "base_model.model."

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
NORMS = ["norm", "input_layernorm", "post_attention_layernorm"]
KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}

# Of three layers, the second and third.
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

# Grouped-query heads, another shape each; biases where the architecture has them, which DoRA must leave unscaled.
BASES = {
    "llama": tiny.Case("llama", "gqa", False, "nobias", "default", 1),
    "mistral": tiny.Case("mistral", "gqa", False, "nobias", "default", 2),
    "qwen2": tiny.Case("qwen2", "gqa", False, "nobias", "default", 3),
    "qwen3": tiny.Case("qwen3", "gqa", False, "nobias", "default", 5),
    "smollm3": tiny.Case("smollm3", "gqa", True, "attnbias", "default", 6),
    "window": tiny.Case("mistral", "gqa", False, "nobias", "default", 2, {"sliding_window": 7}),
    "windows": tiny.Case("qwen3", "gqa", False, "nobias", "default", 5, WINDOWS),
    "bias": tiny.Case("llama", "gqa", False, "allbias", "llama3", 7),
    "tied": tiny.Case("llama", "gqa", True, "nobias", "default", 4),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("llama") is the folder of that checkpoint, made when first asked for."""
    folders = {}

    def find(name):
        if name not in folders:
            folders[name] = BASES[name].save(tmp_path_factory.mktemp(name) / "model")
        return folders[name]

    return find


# --- the peer's half ------------------------------------------------------------------------------------------------


def load_base(folder, rope=None):
    """The plain model; rope overrules settings of its rotary embedding, as a method does that changes them."""
    model = peer.load(folder, torch.float32)
    if rope:
        model.config.rope_parameters = model.config.rope_parameters | rope
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def noise_like(name, tensor, source):
    """Random values of a size that moves the logits: B is not zero, magnitudes are not the norms they started as."""
    noise = torch.randn(tensor.shape, generator=source)
    if "lora_A" in name:
        return noise / math.sqrt(tensor.shape[-1])
    if "lora_B" in name:
        return 0.1 * noise
    return tensor + 0.2 * tensor.abs().mean() * noise


def randomise(model, seed):
    source = torch.Generator().manual_seed(3000 + seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(noise_like(name, parameter, source))


def plain(name):
    """A parameter's name as adapter_model.safetensors has it, without the prefix."""
    name = name.removeprefix(PREFIX).replace(".default", "").replace(".modules_to_save", "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def gradients(model, ids, checkpointing=False, mask=None):
    """Loss and gradients by the names that `tapetune check gradients` uses."""
    model.train()  # where checkpointing counts; nothing else here depends on it, once dropout is off
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.zero_grad(set_to_none=True)
    ids = torch.tensor([ids])
    with torch.enable_grad():
        loss = model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss
        loss.backward()
    if checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
    model.eval()
    trained = {plain(name): weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(grad is not None and grad.abs().max() > 0 for grad in trained.values()), "PEFT leaves a parameter alone"
    return loss.detach(), trained


def shifted_groups(heads, count, group):
    """LongLoRA's pattern as a mask [1, H, N, N]: half the heads see their group, half see groups moved by half of one.

    Causal throughout, as in its authors' code for flash attention: the two half groups at the ends stay apart.
    """
    at = torch.arange(count)
    causal = at[:, None] >= at
    fixed, moved = at // group, (at + group // 2) // group
    seen = [causal & (own[:, None] == own) for own in (fixed, moved)]
    return torch.stack([seen[0]] * (heads // 2) + [seen[1]] * (heads - heads // 2))[None]


def load_adapter(folder, adapter, rope=None):
    """The adapter as PEFT reads it: every key fits, and it has nothing to warn of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(load_base(folder, rope), adapter, is_trainable=True).eval()
        # from_pretrained keeps the result to itself, and is silent about tensors that it has no place for.
        again = get_peft_model(load_base(folder, rope), PeftConfig.from_pretrained(adapter))
        result = again.load_adapter(adapter, "default")
    assert not said, "PEFT warns: " + "; ".join(str(warning.message) for warning in said)
    assert not result.missing_keys and not result.unexpected_keys, result
    return model


def contents(adapter):
    """The tensors of an adapter by their names without the prefix, which all must have."""
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
        assert all(name.startswith(PREFIX) for name in names), names
        return {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}


# --- comparisons ----------------------------------------------------------------------------------------------------


def our_gradients(tapetune, folder, ids, *options):
    out = tapetune.scratch / "gradients.safetensors"
    tapetune("check", "gradients", folder, "--tokens", ",".join(map(str, ids)), "--out", out, *options)
    tensors = peer.tensors(out)
    out.unlink()
    return tensors.pop("loss"), {name.removeprefix("grad."): tensor for name, tensor in tensors.items()}


def assert_gradients(ours, theirs, what):
    (our_loss, ours), (their_loss, theirs) = ours, theirs
    assert abs(float(our_loss) - float(their_loss)) < TOLERANCE, f"{what}: loss {our_loss}, PEFT has {their_loss}"
    assert sorted(ours) == sorted(theirs), f"{what}: other parameters are trained than by PEFT"
    for name, grad in theirs.items():
        peer.assert_close(ours[name], grad, TOLERANCE * float(grad.abs().max()), f"{what}: gradient of {name}")


def assert_agree(tapetune, model, folder, adapter, ids, modes=("off", "full", "selective"), mask=None):
    """Logits and gradients of one adapter, by us and by PEFT; the mask is for the latter, where training has one."""
    ours = tapetune.logits(folder, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
    peer.assert_close(ours, model(torch.tensor([ids])).logits[0], TOLERANCE, "logits with the adapter")
    theirs = {kept: gradients(model, ids, not kept, mask) for kept in {mode == "off" for mode in modes}}
    for mode in modes:
        ours = our_gradients(tapetune, folder, ids, "--adapter", adapter, "--checkpointing", mode, "--dtype", "f32")
        assert_gradients(ours, theirs[mode == "off"], f"checkpointing {mode}")


# --- from PEFT to tapetune ------------------------------------------------------------------------------------------
