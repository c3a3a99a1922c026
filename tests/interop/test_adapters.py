"""Adapters in PEFT's layout, both ways: what PEFT saved means the same here, and PEFT takes what we write."""

import copy
import json
import math
import subprocess
import warnings
from dataclasses import dataclass, field

import peer
import pytest
import tiny
import torch
from peft import (
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors import safe_open
from safetensors.torch import save_file

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


@dataclass(frozen=True)
class Saved:
    """An adapter that PEFT makes."""

    id: str
    base: str
    settings: dict = field(hash=False)

    def save(self, base, folder, seed=0):
        """Writes it with random values, and returns the model that has them."""
        settings = {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION} | self.settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it saves an embedding's base layer too, that it unties
            # A copy: LoraConfig makes sets of lists and adds to them.
            config = LoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(settings))
            model = get_peft_model(load_base(base(self.base)), config)
            randomise(model, seed)
            model.save_pretrained(folder)
        return model.eval()


SAVED = [
    Saved(f"{arch}-{kind}-{name}", arch, settings | {"target_modules": targets})
    for arch in tiny.CONFIGS
    for kind, settings in KINDS.items()
    for name, targets in (("attention", ATTENTION), ("everything", EVERYTHING))
]
SAVED += [
    Saved("window", "window", {"modules_to_save": ["embed_tokens", *NORMS]}),
    Saved("window-dora", "window", KINDS["dora"] | {"target_modules": EVERYTHING}),
    Saved("windows-of-some-layers", "windows", {}),
    Saved("norms-of-heads", "qwen3", {"modules_to_save": [*NORMS, "q_norm", "k_norm"]}),
    Saved("bias-dora", "bias", KINDS["dora"] | {"target_modules": EVERYTHING}),
    Saved("lora-head", "llama", {"target_modules": [*ATTENTION, "lm_head"]}),
    Saved("dora-head", "qwen2", KINDS["dora"] | {"target_modules": [*ATTENTION, "lm_head"]}),
    Saved("whole-modules", "llama", {"modules_to_save": ["embed_tokens", *NORMS]}),
    Saved("whole-modules-short", "mistral", KINDS["dora"] | {"modules_to_save": ["embed_tokens", "norm"]}),
    Saved("whole-head", "qwen2", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    Saved("rank-1-of-some", "mistral", {"r": 1, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj"]}),
    Saved("dropout", "llama", {"lora_dropout": 0.3}),  # off in all that is compared here
    Saved("all-linear", "llama", {"target_modules": "all-linear"}),  # saved as the full name of each
    Saved("tied", "tied", {}),
    Saved("tied-head", "tied", {"target_modules": [*ATTENTION, "lm_head"]}),
    # PEFT trains one matrix for both ends only when it is told to; else the head stays the frozen matrix.
    Saved("tied-kept", "tied", {"modules_to_save": ["embed_tokens", *NORMS], "ensure_weight_tying": True}),
    Saved("tied-parted", "tied", {"modules_to_save": ["embed_tokens"]}),
    # Some of the layers, some of the modules.
    Saved("layers", "llama", {"layers_to_transform": [1], "target_modules": EVERYTHING}),
    Saved("layers-pattern", "qwen2", KINDS["dora"] | {"layers_to_transform": 0, "layers_pattern": "layers"}),
    Saved("excluded", "llama", {"target_modules": EVERYTHING, "exclude_modules": ["up_proj", "layers.0.self_attn.q_proj"]}),
    Saved("excluded-pattern", "mistral", {"exclude_modules": r".*\.0\.self_attn\.[qk]_proj"}),
    Saved("excluded-head", "llama", {"target_modules": [*ATTENTION, "lm_head"], "exclude_modules": ["layers.1.self_attn.v_proj"]}),
    Saved("layers-excluded", "tied", {"layers_to_transform": [0], "exclude_modules": ["k_proj"]}),
    Saved("pattern", "bias", {"target_modules": r".*\.(0\.self_attn\.q_proj|1\.mlp\.down_proj)"}),
]


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.id)
def test_peft_saves(case, base, tapetune, tmp_path):
    folder, adapter, ids = base(case.base), tmp_path / "adapter", tiny.tokens(COUNT, 7)
    model = case.save(base, adapter)
    moved = (model(torch.tensor([ids])).logits[0] - peer.forward(load_base(folder), ids)).abs().max()
    assert moved > 0.3, "the adapter hardly changes the logits, so that they show nothing"
    assert_agree(tapetune, model, folder, adapter, ids)


# --- what PEFT has and tapetune does not: refused by name, and the remedy works ---------------------------------------

MERGE = "model.merge_and_unload().save_pretrained(DIR)"
NEVER = "cannot be merged into the weights"


@dataclass(frozen=True)
class Refused:
    id: str
    config: object = field(hash=False)
    name: str  # what the error must name
    remedy: str = MERGE

    @staticmethod
    def lora(id, name=None, remedy=MERGE, **settings):
        return Refused(id, LoraConfig(**({"r": 4, "target_modules": ATTENTION} | settings)), name or f"{id} = ", remedy)


REFUSED = [
    Refused.lora("rank_pattern", rank_pattern={"q_proj": 2}),
    Refused.lora("alpha_pattern", alpha_pattern={"q_proj": 2}),
    Refused.lora("bias", bias="lora_only"),
    Refused.lora("lora_bias", remedy="only where the projections have a bias", lora_bias=True),
    Refused.lora("layer_replication", remedy=NEVER, layer_replication=[(0, 2), (1, 2)]),
    Refused.lora("trainable_token_indices", trainable_token_indices=[3, 5]),
    Refused.lora("pissa", "init_lora_weights = ", init_lora_weights="pissa"),
    Refused.lora("olora", "init_lora_weights = ", init_lora_weights="olora"),
    Refused.lora("embeddings", "target_modules has the embeddings", target_modules=["q_proj", "embed_tokens"]),
    Refused.lora("whole-projection", "modules_to_save has model.layers.0.mlp.up_proj.weight", modules_to_save=["up_proj"]),
    Refused.lora("some-norms", "modules_to_save has 2 of the model's 5 norms", modules_to_save=["input_layernorm"]),
    Refused("ia3", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "peft_type IA3"),
    Refused("vera", VeraConfig(r=4, target_modules=["q_proj", "o_proj"]), "peft_type VERA"),
    Refused("loha", LoHaConfig(r=4, target_modules=ATTENTION), "peft_type LOHA"),
    Refused("lokr", LoKrConfig(r=4, target_modules=ATTENTION), "peft_type LOKR"),
    Refused("oft", OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]), "peft_type OFT"),
    Refused("ln-tuning", LNTuningConfig(target_modules=NORMS), "peft_type LN_TUNING"),
    Refused("prompt-tuning", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type PROMPT_TUNING", NEVER),
    Refused("prefix-tuning", PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type PREFIX_TUNING", NEVER),
]


def refusal(tapetune, *words):
    done = subprocess.run([tapetune.path, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: [adapter]"), done.stderr
    return done.stderr


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_refused(case, base, tapetune, tmp_path):
    folder, adapter, merged, ids = base("llama"), tmp_path / "adapter", tmp_path / "merged", tiny.tokens(COUNT, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(folder), copy.deepcopy(case.config))
        source = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=source))
        model.save_pretrained(adapter)
    out = tmp_path / "logits.safetensors"
    said = refusal(tapetune, "logits", folder, "--adapter", adapter, "--tokens", "3,4", "--out", out)
    assert case.name in said and case.remedy in said, said
    assert not out.exists()
    assert case.name in refusal(tapetune, "merge", adapter, "--model", folder, "--out", merged) and not merged.exists()
    if case.remedy != MERGE:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = PeftModel.from_pretrained(load_base(folder), adapter).merge_and_unload()
    whole.save_pretrained(merged)
    ours = tapetune.logits(merged, ids, "--dtype", "f32")["logits"]
    peer.assert_close(ours, peer.forward(whole, ids), TOLERANCE, "what PEFT merged")


def test_unknown_settings(base, tapetune, tmp_path):
    """Every setting that this PEFT writes is known; one that is not is named and ignored, as PEFT does."""
    folder, adapter, out = base("llama"), tmp_path / "adapter", tmp_path / "logits.safetensors"
    Saved("plain", "llama", {}).save(base, adapter)
    words = [tapetune.path, "logits", folder, "--adapter", adapter, "--tokens", "3,4", "--force", "--out", out]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_future": 3, "future": None}))
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0 and "use_future = 3 is unknown and ignored" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_base_model_name(base, tapetune, tmp_path):
    """The base model is where adapter_config.json says: for merge, and for an adapter that is given as the model."""
    folder, adapter, merged, ids = base("llama"), tmp_path / "adapter", tmp_path / "merged", tiny.tokens(COUNT, 7)
    model = Saved("plain", "llama", {}).save(base, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    expected = model(torch.tensor([ids])).logits[0]
    peer.assert_close(tapetune.logits(adapter, ids, "--dtype", "f32")["logits"], expected, TOLERANCE, "the adapter")
    tapetune("merge", adapter, "--out", merged)
    peer.assert_close(tapetune.logits(merged, ids, "--dtype", "f32")["logits"], expected, TOLERANCE, "merged")


# The layout on disk does not depend on the architecture: one of each is enough where only that is compared.
ONE_OF_EACH = [case for case in SAVED if not case.id.startswith(("mistral", "qwen", "smollm3"))]


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.id)
def test_copy(case, base, tapetune, tmp_path):
    """Inspected, read and written again: the same bits under the same names, and the same model to PEFT."""
    folder, adapter, new, ids = base(case.base), tmp_path / "adapter", tmp_path / "new", tiny.tokens(COUNT, 8)
    model = case.save(base, adapter, seed=1)
    tapetune("adapter", folder, "--adapter", adapter, "--out", new)
    said = json.loads(tapetune("inspect", folder, "--adapter", adapter, "--json"))["adapter"]
    trained = model.get_nb_trainable_parameters()[0]
    assert (said["method"], said["trained_parameters"]) == ("lora", trained)

    ours, theirs = contents(new), contents(adapter)
    for name in [name for name in theirs if ".base_layer." in name]:
        # PEFT saves the frozen matrix of a head that has LoRA too, and loads adapters without it as well.
        assert name not in ours or torch.equal(ours.pop(name), theirs[name])
        del theirs[name]
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), f"{name} is not as it was"

    before, after = PeftConfig.from_pretrained(adapter), PeftConfig.from_pretrained(new)
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", "bias", "ensure_weight_tying"):
        assert getattr(after, key) == getattr(before, key), key
    with warnings.catch_warnings():
        if case.id in ("tied-parted", "tied-head"):  # of these PEFT says that they part what was tied
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            written = PeftModel.from_pretrained(load_base(folder), new)
        else:
            written = load_adapter(folder, new)
    prompt = torch.tensor([ids])
    assert torch.equal(written(prompt).logits, model(prompt).logits), "PEFT gives other logits for what was written"


# --- from tapetune to PEFT ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fresh:
    """An adapter that tapetune makes, with what PEFT's side needs to mean the same."""

    id: str
    base: str
    method: str
    words: str = ""
    rope: dict = field(default_factory=dict, hash=False)  # what the method changes in the base's rotary settings
    config: dict = field(default_factory=dict, hash=False)  # what adapter_config.json must say
    also: tuple = ()  # trained whole
    targets: tuple = tuple(ATTENTION)
    group: float = 0.0  # the part of the context that attention sees in training

    @property
    def options(self):
        return ["--method", self.method, "rank=4", "alpha=12", *self.words.split()]

    def trained(self, model):
        """The names of all that the method trains, from those of the plain model."""
        parts = {"embeddings": "embed_tokens.weight", "norms": "norm.weight", "lm_head": "lm_head.weight"}
        names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
        whole = [name for name in names if any(name.endswith(parts[what]) for what in self.also)]
        adapted = [name.removesuffix("weight") for name in names if name.split(".")[-2] in self.targets]
        ends = ["lora_A.weight", "lora_B.weight"] + ["lora_magnitude_vector"] * self.config.get("use_dora", False)
        return sorted(whole + [name + end for name in adapted for end in ends])


ALSO = ("embeddings", "norms")
TRAIN_ALSO = "train_also=embeddings,norms"
FRESH = [
    Fresh("lora", "llama", "lora"),
    Fresh("head-norms-also", "qwen3", "lora", TRAIN_ALSO, also=ALSO),
    Fresh("lora-also", "mistral", "lora", TRAIN_ALSO, also=ALSO),
    Fresh("rslora-also", "llama", "lora", f"rslora=true {TRAIN_ALSO}", config={"use_rslora": True}, also=ALSO),
    Fresh("dora-also", "qwen2", "lora", f"dora=true {TRAIN_ALSO}", config={"use_dora": True}, also=ALSO),
    Fresh("dora", "bias", "lora", "dora=true dropout=0.1", config={"use_dora": True, "lora_dropout": 0.1}),
    Fresh("everything", "qwen2", "lora", "targets=q,k,v,o,gate,up,down", targets=tuple(EVERYTHING)),
    Fresh("head", "mistral", "lora", "targets=q,v,lm_head", targets=("q_proj", "v_proj", "lm_head")),
    Fresh("head-also", "llama", "lora", "train_also=lm_head", also=("lm_head",)),
    Fresh("tied-also", "tied", "lora", TRAIN_ALSO, config={"ensure_weight_tying": True}, also=ALSO),
    Fresh("longlora", "llama", "longlora", f"group=0.25 {TRAIN_ALSO}", also=ALSO, group=0.25),
    Fresh("in-windows", "window", "lora", TRAIN_ALSO, also=ALSO),
    Fresh("theta", "llama", "theta-scaling", "theta=1e6", {"rope_theta": 1e6}),
    Fresh("linear", "qwen2", "lora", "scaling=linear factor=2", {"rope_type": "linear", "factor": 2.0}),
    Fresh("theta-linear", "llama", "theta-scaling", "scaling=linear factor=2",  # as the paper's run; 1e6 by default
          {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}),
    Fresh("theta-also", "mistral", "theta-scaling", f"theta=2e5 {TRAIN_ALSO}", {"rope_theta": 2e5}, also=ALSO),
]


@pytest.mark.parametrize("case", FRESH, ids=lambda case: case.id)
def test_peft_loads(case, base, tapetune, tmp_path):
    folder, adapter, ids = base(case.base), tmp_path / "adapter", tiny.tokens(COUNT, 9)
    tapetune("adapter", folder, *case.options, "--seed", 5, "--out", adapter)
    plain_model = load_base(folder, case.rope)

    config = json.loads((adapter / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "bias": "none"} | case.config
    assert {key: config.get(key) for key in expected} == expected
    names = sorted(name for name in contents(adapter) if ".base_layer." not in name)
    kept = ["lm_head.weight"] if case.config.get("ensure_weight_tying") else []  # PEFT's second name of the matrix
    assert names == sorted(case.trained(plain_model) + kept)

    # The start: PEFT has the base's logits (in the method's rotary settings), and so have we, either way.
    model, expected = load_adapter(folder, adapter, case.rope), peer.forward(plain_model, ids)
    peer.assert_close(model(torch.tensor([ids])).logits[0], expected, TOLERANCE, "PEFT on a fresh adapter")
    for options in (["--adapter", adapter], case.options):
        ours = tapetune.logits(folder, ids, *options, "--dtype", "f32")["logits"]
        peer.assert_close(ours, expected, TOLERANCE, f"tapetune with a fresh adapter by {options[0]}")

    # A trained one: the same folder with other values.
    fill(adapter)
    model = load_adapter(folder, adapter, case.rope)
    assert (model(torch.tensor([ids])).logits[0] - expected).abs().max() > 0.3, "the values hardly change the logits"
    mask = None
    if case.group:
        mask = shifted_groups(plain_model.config.num_attention_heads, COUNT, int(case.group * COUNT))
    assert_agree(tapetune, model, folder, adapter, ids, ("off", "selective"), mask)

    if case.method != "lora":  # a copy keeps what adapter_config.json has no word for
        new = tmp_path / "new"
        tapetune("adapter", folder, "--adapter", adapter, "--out", new)
        assert json.loads(tapetune("inspect", folder, "--adapter", new, "--json"))["adapter"]["method"] == case.method
        assert_agree(tapetune, load_adapter(folder, new, case.rope), folder, new, ids, ("full",), mask)


def fill(adapter):
    """Random values in place of an adapter's own; the file is otherwise as it was."""
    path = adapter / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    source = torch.Generator().manual_seed(4000)
    tensors = contents(adapter)
    for name, tensor in tensors.items():
        if ".base_layer." not in name:
            tensors[name] = noise_like(name, tensor, source)
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("ensure_weight_tying"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, path, metadata)


def test_start_values(base, tapetune, tmp_path):
    """A is drawn as PEFT draws it, by the seed; B is zero; a magnitude is its row's norm; the rest is the base's."""
    folder, model = base("llama"), load_base(base("llama"))
    options = ["--method", "lora", "rank=16", "dora=true", TRAIN_ALSO]
    for seed, name in ((1, "one"), (1, "again"), (2, "other")):
        tapetune("adapter", folder, *options, "--seed", seed, "--out", tmp_path / name)
    one, again, other = (contents(tmp_path / name) for name in ("one", "again", "other"))
    weights = model.state_dict()
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name]), f"{name} differs with the same seed"
        if name.endswith("lora_A.weight"):
            assert not torch.equal(tensor, other[name]), f"{name} is the same with another seed"
            bound = 1 / math.sqrt(tensor.shape[1])  # kaiming_uniform_ with a = sqrt(5)
            assert tensor.abs().max() <= bound and abs(float(tensor.std()) / bound - 3**-0.5) < 0.1, name
        elif name.endswith("lora_B.weight"):
            assert not tensor.any(), name
        elif name.endswith("lora_magnitude_vector"):
            norm = weights[name.replace("lora_magnitude_vector", "weight")].norm(dim=1)
            peer.assert_close(tensor[:, None], norm[:, None], 1e-5, name)
        else:
            assert torch.equal(tensor, weights[name]), f"{name} does not start as the base's"


def test_transformers_takes_it(base, tapetune, tmp_path):
    """transformers loads adapters by itself, without a PeftModel, and has nothing to remark either."""
    folder, adapter, ids = base("llama"), tmp_path / "adapter", tiny.tokens(COUNT, 10)
    tapetune("adapter", folder, "--method", "lora", "rank=4", "--out", adapter)
    fill(adapter)
    model = load_base(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_adapter(adapter)
    ours = tapetune.logits(folder, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
    peer.assert_close(ours, peer.forward(model, ids), TOLERANCE, "transformers' own load_adapter")
