"""transformers as the reference: loading, one forward, and comparisons whose messages say what broke."""

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

# What a config says about the program that wrote it or the folder it came from, not about the model.
NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path")


tensors = load_file  # read by the safetensors package, not by a reader of ours


def load(folder, dtype=None):
    """The model as transformers reads it (in the dtype on disk, unless one is named); every key must fit."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True)
    trouble = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    assert not trouble, f"transformers does not take {folder} whole: {trouble}"
    return model.eval()


def double(folder):
    """The model in float64 throughout; by itself transformers takes its norms through float32."""
    model = load(folder).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm.__get__(module)
    return model


def _norm(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def forward(model, ids, hidden: bool = False):
    """Logits [N, vocab] of one fresh forward; with hidden also the list of hidden states."""
    # The rotary module of transformers remembers the longest input it saw: a new one has no past.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    out = model(torch.tensor([list(ids)]), output_hidden_states=hidden, use_cache=False)
    if hidden:
        return out.logits[0], [state[0] for state in out.hidden_states]
    return out.logits[0]


def generate(model, ids, new: int) -> list[int]:
    """The new ids of transformers' own greedy generation, which no end token stops."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(ids)])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def config(folder) -> dict:
    """The settings of a folder as transformers understands them, whichever form its config.json has."""
    config = AutoConfig.from_pretrained(folder)
    config.standardize_rope_params()  # its models do so again, and only then a top-level original context counts
    settings = config.to_dict()
    for key in NOT_OF_THE_MODEL:
        settings.pop(key, None)
    rope = settings["rope_parameters"]
    rope.pop("type", None)  # the legacy name of rope_type, which is there too
    settings.pop("original_max_position_embeddings", None)  # moved into the rotary settings
    if rope["rope_type"] == "longrope":  # without a factor, the two contexts give it
        rope.setdefault("factor", config.max_position_embeddings / rope["original_max_position_embeddings"])
    return settings


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    assert ours.shape == theirs.shape, f"{what}: shape {list(ours.shape)}, but transformers gives {list(theirs.shape)}"
    away = (ours.double() - theirs.double()).abs()
    away[away.isnan()] = torch.inf
    if away.max() > tolerance:
        where = [int(i) for i in torch.unravel_index(away.argmax(), away.shape)]
        first = int((away.reshape(len(away), -1).amax(1) > tolerance).nonzero()[0])
        raise AssertionError(
            f"{what}: {float(away.max()):.2e} away at {where} ({float(ours[tuple(where)]):.6f}, transformers "
            f"{float(theirs[tuple(where)]):.6f}), allowed {tolerance:.0e}; the first row that differs is {first}"
        )


def assert_greedy(model, prompt, new, tolerance: float, what: str) -> None:
    """Every new id has the highest of transformers' logits given all before it, to within the tolerance."""
    logits = forward(model, prompt + new)[len(prompt) - 1 : -1].double()
    lost = logits.max(-1).values - logits[torch.arange(len(new)), torch.tensor(new)]
    wrong = (lost > tolerance).nonzero().flatten().tolist()
    if wrong:
        i = wrong[0]
        raise AssertionError(f"{what}: new token {i} is {new[i]}, but transformers has {int(logits[i].argmax())}")


def assert_same_ids(ours: list[int], theirs: list[int], what: str) -> None:
    if ours != theirs:
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        raise AssertionError(f"{what}: {len(ours)} and {len(theirs)} ids, different from {first}:\n{ours}\n{theirs}")
