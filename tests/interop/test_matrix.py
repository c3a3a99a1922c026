"""Tiny random checkpoints by transformers: architecture x heads x tied x bias x rotary variant."""

import json

import peer
import pytest
import tiny
import torch
from safetensors import safe_open

TOLERANCE = 1e-4  # absolute, on logits of standard deviation 1.7; float32 rounding alone gives 2e-5


class Checkpoint:
    def __init__(self, case, folder):
        self.case, self.folder = case, case.save(folder)
        self.model = peer.load(folder)

    def tokens(self, count):
        return tiny.tokens(count, self.case.number)


@pytest.fixture(scope="module", params=tiny.matrix(), ids=lambda case: case.id)
def checkpoint(request, tmp_path_factory):
    return Checkpoint(request.param, tmp_path_factory.mktemp("model"))


def test_matrix_leaves_nothing_out():
    """What follows from the number of a case (form of the config, shards, shape, options) must meet every variant."""
    cases = tiny.matrix()
    for rope in tiny.ROPES:
        mine = [case for case in cases if case.rope == rope]
        assert {case.version4 for case in mine} == {True, False}, rope
        assert len({case.shard_size for case in mine}) == 2, rope
        assert len({case.config().hidden_size for case in mine}) == len(tiny.SHAPES), rope
        assert len({str(case.config().eos_token_id) for case in mine}) == 2, rope
    yarns = {case.number % len(tiny.YARNS) for case in cases if case.rope == "yarn"}
    assert len(yarns) == len(tiny.YARNS)
    assert len(cases) == (4 + 1 + 1 + 1 + 1) * 3 * 2 * 6


def test_logits(checkpoint, tapetune):
    for length, side in ((tiny.BELOW, "below"), (tiny.ABOVE, "above")):
        ids = checkpoint.tokens(length)
        ours = tapetune.logits(checkpoint.folder, ids)["logits"]
        peer.assert_close(ours, peer.forward(checkpoint.model, ids), TOLERANCE, f"logits {side} the original context")


def test_generate(checkpoint, tapetune):
    """From below to above the original context; with the cache, without it, and by transformers."""
    case, model, prompt = checkpoint.case, checkpoint.model, checkpoint.tokens(12)
    cached = tapetune.generate(checkpoint.folder, prompt, 28, "--ignore-eos")
    uncached = tapetune.generate(checkpoint.folder, prompt, 28, "--ignore-eos", "--no-cache")
    peer.assert_same_ids(cached["tokens"], uncached["tokens"], "with and without the cache")
    ends = ("context", tiny.ORIGINAL) if case.rope == "default" else ("length", 40)
    for result in (cached, uncached):
        assert (result["stopped"], len(prompt + result["tokens"])) == ends
    # transformers turns dynamic and longrope keys by other frequencies before and after the original context;
    # tapetune by those of the planned length, which are those of one forward of that length.
    peer.assert_greedy(model, prompt, cached["tokens"], TOLERANCE, "greedy across the original context")

    below = cached
    if case.rope in tiny.LENGTH_DEPENDENT:
        below = tapetune.generate(checkpoint.folder, prompt, 8, "--ignore-eos")
        assert below["stopped"] == "length" and len(below["tokens"]) == 8
    assert below["prompt_tokens"] == prompt
    if below["tokens"][:8] != peer.generate(model, prompt, 8):  # only a tie within rounding excuses that
        peer.assert_greedy(model, prompt, below["tokens"][:8], TOLERANCE, "greedy below the original context")


def test_convert(checkpoint, tapetune, tmp_path):
    case, source, out = checkpoint.case, checkpoint.folder, tmp_path / "out"
    sharded = case.number % 3 == 1
    tapetune("convert", source, "--out", out, *(["--shard-size", "24KB"] if sharded else []))
    assert (out / "model.safetensors.index.json").exists() == sharded

    written = peer.load(out)
    weights = written.state_dict()
    for name, weight in checkpoint.model.state_dict().items():
        assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), f"{name} is not as it was"
    assert stored_names(out) == stored_names(source)

    assert peer.config(out) == peer.config(source)
    assert_version4_reads(out)

    ids = checkpoint.tokens(tiny.ABOVE)
    theirs = peer.forward(checkpoint.model, ids)
    assert torch.equal(peer.forward(written, ids), theirs), "transformers gives other logits for what was written"
    if case.number % 3 == 0:  # starting a process is what this suite spends its time on
        peer.assert_close(tapetune.logits(out, ids)["logits"], theirs, TOLERANCE, "tapetune on what it wrote")


def stored_names(folder):
    names = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}, path
            names += file.keys()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        contents = json.loads(index.read_text())
        assert sorted(contents["weight_map"]) == sorted(names)
        assert set(contents["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    return sorted(names)


def assert_version4_reads(folder):
    """transformers 4 knows neither rope_parameters nor dtype: rope_theta, rope_scaling, torch_dtype must say it all."""
    raw = json.loads((folder / "config.json").read_text())
    meant = peer.config(folder)["rope_parameters"]
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    understood = {"rope_theta": raw.get("rope_theta"), "rope_type": scaling.get("rope_type", scaling.get("type"))}
    understood |= {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    if meant["rope_type"] == "longrope":  # there it looks for the original context at the top level only
        understood["original_max_position_embeddings"] = raw.get("original_max_position_embeddings")
        understood["factor"] = understood.get("factor") or meant["factor"]
    assert understood == meant, "transformers 4 would read other rotary settings"
    assert raw.get("torch_dtype") == "float32"


CHOSEN = [
    tiny.Case("llama", "gqa", False, "nobias", "default", 1),
    tiny.Case("llama", "mha", True, "allbias", "llama3", 3),
    tiny.Case("mistral", "mqa", False, "nobias", "yarn", 6),
    tiny.Case("qwen2", "gqa", True, "nobias", "longrope", 5),
    tiny.Case("qwen3", "gqa", False, "attnbias", "yarn", 4),
    tiny.Case("smollm3", "gqa", True, "allbias", "llama3", 8),
]
chosen = pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)


@chosen
def test_hidden_states(case, tapetune, tmp_path):
    folder = case.save(tmp_path / "model")
    ids = tiny.tokens(tiny.ABOVE, case.number)
    logits, hidden = peer.forward(peer.load(folder), ids, hidden=True)
    ours = tapetune.logits(folder, ids, "--hidden")
    assert sorted(ours) == sorted(["logits"] + [f"hidden.{i}" for i in range(len(hidden))])
    for i, state in enumerate(hidden):
        peer.assert_close(ours[f"hidden.{i}"], state, TOLERANCE, f"hidden.{i}")
    peer.assert_close(ours["logits"], logits, TOLERANCE, "logits beside the hidden states")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@chosen
def test_half_precision_on_disk(case, stored, tapetune, tmp_path):
    folder = case.save(tmp_path / "model", stored)
    ids = tiny.tokens(tiny.ABOVE, case.number)
    exact = peer.forward(peer.load(folder, torch.float32), ids)
    ours = tapetune.logits(folder, ids, "--dtype", "f32")["logits"]
    peer.assert_close(ours, exact, TOLERANCE, "computed in f32")

    out = tmp_path / "out"
    tapetune("convert", folder, "--out", out)
    assert peer.config(out) == peer.config(folder)
    kept = peer.load(out).state_dict()
    for name, weight in peer.load(folder).state_dict().items():
        assert weight.dtype == stored and kept[name].dtype == stored and torch.equal(kept[name], weight), name


@chosen
def test_bf16_arithmetic(case, tapetune, tmp_path):
    """Rounding differs from one order of operations to the next; ours must lose no more than theirs does, about."""
    folder = case.save(tmp_path / "model", torch.bfloat16)
    ids = tiny.tokens(tiny.ABOVE, case.number)
    exact = peer.forward(peer.load(folder, torch.float32), ids)
    theirs = (peer.forward(peer.load(folder), ids).float() - exact).pow(2).mean().sqrt()
    ours = (tapetune.logits(folder, ids, "--dtype", "bf16")["logits"] - exact).pow(2).mean().sqrt()
    assert ours < 1.5 * theirs, f"bf16 loses {ours:.4f} against transformers' {theirs:.4f} (root mean square)"


@chosen
def test_f64_arithmetic(case, tapetune, tmp_path):
    folder = case.save(tmp_path / "model")
    ids = tiny.tokens(tiny.ABOVE, case.number)
    ours = tapetune.logits(folder, ids, "--dtype", "f64")["logits"]
    peer.assert_close(ours, peer.forward(peer.double(folder), ids), 1e-6, "computed in f64")
