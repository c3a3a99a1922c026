"""Sliding windows: each layer's token sees just as many tokens as in transformers, in texts that are longer."""

import json
import random
import subprocess

import adapter_peers
import numpy
import peer
import pytest
import ranks
import test_adapters
import test_adapters_written
import tiny
import torch

TOLERANCE = 1e-4
WINDOW, COUNT, NEW = 7, 30, 20
USED = {"use_sliding_window": True, "sliding_window": WINDOW}
OFF = ("--method", "none", "attention.window=none")

# Of all layers, of those behind the first, of every second, and of those without rotation.
ALTERNATING = ["sliding_attention", "full_attention"]
CASES = {
    "mistral": tiny.Case("mistral", "gqa", False, "nobias", "default", 2, {"sliding_window": WINDOW}),
    "mistral-narrow": tiny.Case("mistral", "mqa", True, "nobias", "default", 6, {"sliding_window": 2}),
    "qwen2": tiny.Case("qwen2", "gqa", False, "nobias", "default", 5, USED | {"max_window_layers": 1}),
    "qwen3": tiny.Case("qwen3", "gqa", False, "attnbias", "default", 3, USED | {"layer_types": ALTERNATING}),
    "smollm3": tiny.Case("smollm3", "mha", True, "allbias", "default", 8, USED),
}
MISTRAL = CASES["mistral"]
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(case) has its checkpoint and a tokenizer, made when first asked for."""
    folders = {}

    def find(case):
        if case.id not in folders:
            folders[case.id] = tiny.with_tokenizer(case.save(tmp_path_factory.mktemp(case.id) / "model"))
        return folders[case.id]

    return find


def full(folder):
    """The same model as if its config had no window."""
    model = peer.load(folder)
    model.config.sliding_window = None
    return model


@every
def test_logits_past_the_window_equal_transformers(case, folder, tapetune):
    ids = tiny.tokens(COUNT, case.number)
    theirs = peer.forward(peer.load(folder(case)), ids)
    peer.assert_close(tapetune.logits(folder(case), ids)["logits"], theirs, TOLERANCE, "logits in f32")
    exact = tapetune.logits(folder(case), ids, "--dtype", "f64")["logits"]
    peer.assert_close(exact, peer.forward(peer.double(folder(case)), ids), 1e-6, "logits in f64")
    rounded = tapetune.logits(folder(case), ids, "--dtype", "bf16")["logits"]
    without = tapetune.logits(folder(case), ids, *OFF)["logits"]
    assert (rounded - theirs).norm() < 0.1 * (without - theirs).norm(), "bf16 is not near to the model with windows"


@every
def test_generation_past_the_window_equals_transformers_with_a_cache_and_without(case, folder, tapetune):
    prompt, model = tiny.tokens(12, case.number), peer.load(folder(case))
    words = ["--ignore-eos", "--context", 12 + NEW]
    cached = tapetune.generate(folder(case), prompt, NEW, *words)["tokens"]
    uncached = tapetune.generate(folder(case), prompt, NEW, *words, "--no-cache")["tokens"]
    peer.assert_same_ids(cached, uncached, "with and without the cache")
    peer.assert_greedy(model, prompt, cached, TOLERANCE, "greedy past the window")
    peer.assert_same_ids(cached, peer.generate(model, prompt, NEW), "transformers with its cache")


@every
def test_a_padded_batch_past_the_window_equals_its_rows_alone(case, folder, tapetune):
    source = random.Random(case.number)
    texts = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=count)) for count in (11, 3, 19, 8)]
    words = ["--max-new-tokens", "10", "--ignore-eos", "--context", 32, "--json"]
    alone = [json.loads(tapetune("generate", folder(case), "--prompt", text, *words)) for text in texts]
    repeated = [word for text in texts for word in ("--prompt", text)]
    batch = [json.loads(line) for line in tapetune("generate", folder(case), *repeated, *words).splitlines()]
    assert batch == alone
    model = peer.load(folder(case))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    rows = [one["prompt_tokens"] for one in alone]
    longest = max(map(len, rows))
    ids = torch.tensor([[7] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    for one, theirs in zip(batch, out[:, longest:].tolist()):
        peer.assert_same_ids(one["tokens"], theirs, "transformers on the padded batch")


def test_two_ranks_that_share_a_sequence_past_the_window_train_as_one(folder, tapetune, tmp_path):
    numpy.array(tiny.tokens(64 * 8 + 1, 3), dtype=numpy.uint16).tofile(tmp_path / "data.bin")

    def losses(name, *words):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(
            f"model: {folder(MISTRAL)}\ndata: {tmp_path / 'data.bin'}\nrun: {tmp_path / name}\ncontext: 32\nsteps: 4\n"
            "batch: 2\nmicro_batch: 2\nadapter: {method: lora, rank: 4}\noptimizer: {lr: 1.0e-2}\ndtype: f32\nseed: 3\n"
        )
        if not words:
            tapetune("train", recipe)
        else:
            with ranks.Ranks(tapetune.path, ["train", recipe, *words], 2) as both:
                for rank, (code, said) in both.end().items():
                    assert code == 0, f"rank {rank}: {said}"
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    one, two = losses("one"), losses("two", "sequence_parallel=2")
    assert len(one) == len(two) == 4
    assert two == pytest.approx(one, abs=1e-5)
    ours = tapetune.logits(tmp_path / "two", tiny.tokens(COUNT, 4), "--dtype", "f32")["logits"]
    theirs = tapetune.logits(tmp_path / "one", tiny.tokens(COUNT, 4), "--dtype", "f32")["logits"]
    peer.assert_close(ours, theirs, TOLERANCE, "the model that two ranks trained")


def test_lora_past_the_window_equals_peft(folder, tapetune, tmp_path):
    """Logits and gradients under every kind of checkpointing; test_adapters.py has more of these."""
    case, adapter = test_adapters.Saved("window", "window", {}), tmp_path / "adapter"
    model = case.save(lambda _: folder(MISTRAL), adapter)
    adapter_peers.assert_agree(tapetune, model, folder(MISTRAL), adapter, tiny.tokens(adapter_peers.COUNT, 7))


def test_a_window_turned_off_is_off_and_merged_away(folder, tapetune, tmp_path):
    """attention.window=none: full attention here, and a merged model to which transformers gives no window either."""
    for case in CASES.values():
        home = tmp_path / case.id
        home.mkdir()
        base, adapter, merged, kept = folder(case), home / "adapter", home / "merged", home / "kept"
        ids = tiny.tokens(COUNT, 5)
        tapetune("adapter", base, "--method", "lora", "rank=4", "attention.window=none", "--out", adapter)
        test_adapters_written.fill(adapter)
        tapetune("merge", adapter, "--model", base, "--out", merged)
        ours = tapetune.logits(base, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
        peer.assert_close(peer.forward(peer.load(merged), ids), ours, TOLERANCE, "transformers on the merged model")
        peer.assert_close(tapetune.logits(merged, ids)["logits"], ours, TOLERANCE, "tapetune on the merged model")
        tapetune("adapter", base, "--method", "lora", "rank=4", "--out", adapter, "--force")
        test_adapters_written.fill(adapter)
        tapetune("merge", adapter, "--model", base, "--out", kept)
        windowed = tapetune.logits(base, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
        assert (windowed - ours).abs().max() > 0.1, "the window shows nowhere"
        peer.assert_close(peer.forward(peer.load(kept), ids), windowed, TOLERANCE, "the window that was kept")


def test_an_adapter_of_version_1_attends_fully_and_says_so(folder, tapetune, tmp_path):
    """It was trained before tapetune had windows, which its settings therefore do not mention."""
    adapter, ids = tmp_path / "adapter", tiny.tokens(COUNT, 5)
    tapetune("adapter", folder(MISTRAL), "--method", "lora", "rank=4", "--out", adapter)
    earlier = {"method": "lora", "rank": 4, "alpha": 16.0, "dropout": 0.0, "targets": "q,k,v,o", "rslora": False}
    earlier |= {"dora": False, "train_also": "", "untie": False}
    (adapter / "tapetune.json").write_text(json.dumps(earlier))
    ours = tapetune.logits(folder(MISTRAL), ids, "--adapter", adapter, "--dtype", "f32")["logits"]
    peer.assert_close(ours, peer.forward(full(folder(MISTRAL)), ids), TOLERANCE, "full attention")
    said = subprocess.run(
        [tapetune.path, "logits", folder(MISTRAL), "--adapter", adapter, "--tokens", "3,4", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
    ).stderr
    assert f"the model's sliding window of {WINDOW} tokens is off (attention.window: none)" in said


def test_a_window_as_long_as_the_context_acts_behind_it(tapetune, tmp_path):
    case = tiny.Case("mistral", "gqa", False, "nobias", "linear", 4, {"sliding_window": tiny.ORIGINAL * 5 // 2})
    folder, ids = case.save(tmp_path / "model"), tiny.tokens(100, 6)
    ours = tapetune.logits(folder, ids)["logits"]
    peer.assert_close(ours, peer.forward(peer.load(folder), ids), TOLERANCE, "logits behind the context")
    without = tapetune.logits(folder, ids, *OFF)["logits"]
    assert torch.equal(ours[: tiny.ORIGINAL * 5 // 2], without[: tiny.ORIGINAL * 5 // 2])
    assert (ours - without).abs().max() > 1e-3
