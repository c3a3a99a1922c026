"""Real models: stories260K and SmolLM2-135M."""

import json
import os
import shutil
import subprocess

import models
import peer
import pytest
import torch
from tokenizers import Tokenizer


def book(shared, tokenizer: Tokenizer, count: int) -> list[int]:
    """The first ids of a chapter of Bleak House."""
    text = shared("data", "books", "bleak_house_1853.txt").read_text(encoding="utf8", errors="replace")
    return tokenizer.encode(text[100_000 : 100_000 + 10 * count], add_special_tokens=False).ids[:count]


def test_stories260k_logits(stories260k, shared, tapetune):
    text = shared("data", "tinystories", "stories.txt").read_text(encoding="utf8")[:4000]
    ids = Tokenizer.from_file(str(stories260k / "tokenizer.json")).encode(text).ids
    model = peer.load(stories260k)
    for count in (1, 2, 300, 700):  # 700 is past its context of 512: nothing forbids to ask
        ours = tapetune.logits(stories260k, ids[:count])["logits"]
        peer.assert_close(ours, peer.forward(model, ids[:count]), 1e-4, f"logits of {count} tokens")


def test_stories260k_greedy(stories260k, tapetune):
    ours = tapetune.generate(stories260k, [1], 200, "--ignore-eos")["tokens"]
    peer.assert_same_ids(ours, peer.generate(peer.load(stories260k), [1], 200), "200 greedy tokens")
    uncached = tapetune.generate(stories260k, [1], 200, "--ignore-eos", "--no-cache")["tokens"]
    peer.assert_same_ids(uncached, ours, "without the cache")


def test_ids_from_text_file_and_option_agree(stories260k, tapetune, tmp_path):
    """The three ways to give a prompt to `logits` are one."""
    text = "Once upon a time, there was a dog."
    ids = json.loads(tapetune("tokenize", stories260k, stdin=text.encode() + b"\n"))
    first = tapetune.logits(stories260k, ids)["logits"]
    (tmp_path / "ids").write_text(f"{ids[0]}, {ids[1]}\n" + " ".join(map(str, ids[2:])))
    for words in (["--text", text], ["--tokens-file", tmp_path / "ids"]):
        out = tmp_path / f"{words[0]}.safetensors"
        tapetune("logits", stories260k, *words, "--out", out)
        assert torch.equal(peer.tensors(out)["logits"], first), words


@pytest.mark.slow
def test_smollm2_logits(smollm2, shared, tapetune):
    ids = book(shared, Tokenizer.from_file(str(smollm2 / "tokenizer.json")), 512)
    ours = tapetune.logits(smollm2, ids)["logits"]
    peer.assert_close(ours, peer.forward(peer.load(smollm2), ids), 1e-3, "logits of 512 tokens")


@pytest.mark.slow
def test_smollm2_greedy_text(smollm2, tapetune):
    """Text in, text out; transformers works on the same ids and its text is decoded by Hugging Face tokenizers."""
    prompt = "The three laws of motion that Newton found are"
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    new = peer.generate(peer.load(smollm2), ids, 48)
    words = ["--prompt", prompt, "--max-new-tokens", "48", "--ignore-eos", "--json"]
    ours = json.loads(tapetune("generate", smollm2, *words))
    peer.assert_same_ids(ours["prompt_tokens"], ids, "the prompt")
    peer.assert_same_ids(ours["tokens"], new, "48 greedy tokens")
    assert prompt + ours["text"] == tokenizer.decode(ids + new)
    uncached = json.loads(tapetune("generate", smollm2, *words, "--no-cache"))
    assert uncached == ours, "with and without the cache"


@pytest.mark.slow
def test_get_smollm2_uses_the_installed_wheel(tapetune, tmp_path):
    """Without network where tools/setup --full has run, and never over something that is there."""
    try:
        models.smollm2_gguf()
    except models.Missing as missing:
        pytest.skip(str(missing))
    out = tmp_path / "smollm2-135m"
    environment = os.environ | {"TAPETUNE_BIN": str(tapetune.path), "PIP_NO_INDEX": "1"}

    def get():
        words = [models.ROOT / "tools" / "get-smollm2", out]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)

    done = get()
    assert done.returncode == 0, done.stderr
    assert f"wrote {out} (" in done.stdout
    said = tapetune("generate", out, "--prompt", "The capital of France is", "--max-new-tokens", 4).decode()
    assert "Paris" in said
    again = get()
    assert again.returncode == 1
    assert again.stderr == f"error: [get-smollm2] {out} already exists; remove it, or name another folder\n"
    shutil.rmtree(out)  # 540 MB
