"""What merge writes, in the last transformers 4: plain models, and TAPE by its own code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import models
import peer
import pytest
import test_adapters_written
import torch
from test_tape_transformers import NEW, TINY, Case, grouped, randomise

PLAIN = [
    Case("plain-linear", grouped(), "rank=4 scaling=linear factor=2 train_also=embeddings,norms"),
    Case("plain-yarn", grouped("mistral"), "rank=4 scaling=yarn factor=4"),
    Case("plain-theta", grouped("qwen2", tied=True), "rank=4 theta=50000"),
]


@pytest.fixture(scope="module")
def cases(tapetune, tmp_path_factory):
    """Each with its base, adapter and merged folder."""
    made = []
    for case in PLAIN + TINY:
        folder = tmp_path_factory.mktemp(case.id)
        base, adapter, merged = case.base.save(folder / "base"), folder / "adapter", folder / "merged"
        tapetune("adapter", base, "--method", "lora" if case in PLAIN else "tape", *case.words.split(), "--out", adapter)
        if case in PLAIN:
            test_adapters_written.fill(adapter)
        else:
            randomise(adapter, seed=len(case.id))
        tapetune("merge", adapter, "--model", base, "--out", merged)
        made.append((case, base, adapter, merged))
    return made


@pytest.mark.slow
def test_transformers_4(cases, tapetune):
    """One process for all: nothing missing, unexpected or new; our logits; our greedy ids, cached and uncached."""
    package = models.cache() / "transformers4"
    if not package.is_dir():
        pytest.skip(f"{package} is not there: run tools/setup --full")
    request = [
        {"folder": str(merged), "ids": case.prompt(), "prompt": case.prompt(20), "new": NEW} for case, _, _, merged in cases
    ]
    script = Path(__file__).with_name("transformers4.py")
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(request), capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["version"].startswith("4."), f"transformers {said['version']} answered"
    for (case, base, adapter, _), theirs in zip(cases, said["answers"]):
        assert not theirs["trouble"], f"{case.id}: {theirs['trouble']}"
        words = ["--adapter", adapter, "--dtype", "f32"]
        ours = tapetune.logits(base, case.prompt(), *words)["logits"]
        peer.assert_close(ours, torch.tensor(theirs["logits"]), 1e-4, f"{case.id}: logits")
        peer.assert_same_ids(theirs["cached"], theirs["uncached"], f"{case.id}: cached and uncached")
        new = tapetune.generate(base, case.prompt(20), NEW, *words, "--ignore-eos", "--context", 20 + NEW)["tokens"]
        peer.assert_same_ids(new, theirs["cached"], f"{case.id}: tapetune and transformers 4")
