"""Perplexity under each protocol beside an independent computation with transformers, and known numbers of real models."""

import json
import math

import numpy
import peer
import pytest
import tiny
import torch

CASES = [
    tiny.Case("llama", "gqa", False, "nobias", "default", 1),
    tiny.Case("qwen2", "mha", True, "nobias", "linear", 3),
    *(tiny.Case("llama", "mqa", True, "nobias", kind, 4 + i) for i, kind in enumerate(tiny.LENGTH_DEPENDENT)),
]
STORIES = ("--delimiter", "<|endoftext|>", "--strip", "--eos", "none")  # a BOS before each story, and nothing else


def losses(model, ids, context: int) -> torch.Tensor:
    """-log p of each of these tokens but the first, given those before it; the model reads `context` of them."""
    logits = peer.forward(model, ids[:context]).double()
    targets = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")


def blocks(model, ids, context, stride):
    starts = range(0, len(ids) - context, context)
    return torch.cat([losses(model, ids[i : i + context + 1], context) for i in starts])


def longlora(model, ids, context, stride):
    starts = range(0, len(ids) - context, stride)
    return torch.cat([losses(model, ids[i : i + context], context) for i in starts])


def sliding(model, ids, context, stride):
    counted, start = [losses(model, ids[: context + 1], context)], 0
    while (left := len(ids) - 1 - sum(map(len, counted))) > 0:
        start = min(start + stride, len(ids) - 1 - context)
        counted.append(losses(model, ids[start : start + context + 1], context)[-min(stride, left) :])
    assert sum(map(len, counted)) == len(ids) - 1
    return torch.cat(counted)


PROTOCOLS = {"blocks": blocks, "longlora": longlora, "sliding": sliding}


def evaluate(tapetune, model, data, protocol, contexts, *words) -> dict[int, dict]:
    """The rows of the table by context."""
    contexts = ",".join(map(str, contexts))
    out = tapetune("eval", "perplexity", model, "--data", data, "--protocol", protocol, "--context", contexts, "--json", *words)
    found = json.loads(out)
    assert found["protocol"] == protocol
    return {row["context"]: row for row in found["results"]}


def compare(tapetune, folder, data, ids, contexts, stride, *words):
    model = peer.load(folder, torch.float32)
    for protocol, reference in PROTOCOLS.items():
        own = () if protocol == "blocks" else ("--stride", stride)
        rows = evaluate(tapetune, folder, data, protocol, contexts, *own, *words)
        for context in contexts:
            theirs = reference(model, ids, context, stride)
            what = f"{protocol}, context {context}"
            assert rows[context]["tokens"] == len(theirs), what
            expected = math.exp(theirs.mean().item())
            assert rows[context]["perplexity"] == pytest.approx(expected, rel=5e-5), what


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_protocols_equal_transformers(case, tapetune, tmp_path):
    folder, data, ids = case.save(tmp_path / "model"), tmp_path / "data.bin", tiny.tokens(203, 11)
    numpy.array(ids, dtype=numpy.uint16).tofile(data)
    compare(tapetune, folder, data, ids, (tiny.BELOW, tiny.ABOVE), 9)


def test_buckets_equal_transformers(tapetune, tmp_path):
    folder, data, ids = CASES[0].save(tmp_path / "model"), tmp_path / "data.bin", tiny.tokens(203, 11)
    numpy.array(ids, dtype=numpy.uint16).tofile(data)
    row = evaluate(tapetune, folder, data, "blocks", (40,), "--buckets", 5)[40]
    theirs = blocks(peer.load(folder, torch.float32), ids, 40, 40).reshape(-1, 5, 8).mean((0, 2))
    assert [bucket["begin"] for bucket in row["buckets"]] == [0, 8, 16, 24, 32]
    assert [bucket["loss"] for bucket in row["buckets"]] == pytest.approx(theirs.tolist(), rel=2e-5)


@pytest.fixture(scope="module")
def stories(shared, stories260k, tapetune, tmp_path_factory):
    path = tmp_path_factory.mktemp("stories") / "stories.tokens"
    tapetune("data", "pack", shared("data", "tinystories", "stories.txt"), "--model", stories260k, *STORIES, "--out", path)
    return path


def test_known_numbers_by_window(stories, stories260k, tapetune):
    """The first 32,768 tokens, by length of window, as the shared data's README has them from a float64 reference.

    Its windows hold their last target, as those of the papers do: a window of 512 has 511 targets.
    """
    known = {256: "3.95", 512: "3.80", 1024: "3.98", 2048: "4.61", 4096: "29.5", 8192: "162"}
    found = {}
    for context in known:
        row = evaluate(tapetune, stories260k, stories, "longlora", (context,), "--stride", context, "--limit", 32769)
        found[context] = f"{row[context]['perplexity']:#.3g}".rstrip(".")
    assert found == known


def test_known_numbers_of_the_last_tenth(stories, stories260k, tapetune):
    """The untrained base in the table of small-scale results: the last 10% of the stories."""
    known = {512: "4.02", 1024: "4.22", 2048: "4.86", 4096: "31.8"}
    rows = evaluate(tapetune, stories260k, stories, "blocks", known, "--split", "held-out", "--held-out", 0.1)
    assert {context: f"{row['perplexity']:.3g}" for context, row in rows.items()} == known


def test_stories260k_equals_transformers(shared, stories, stories260k, tapetune):
    header = json.loads(tapetune("data", "show", stories, "--json"))
    assert header["bits"] == 16
    ids = numpy.fromfile(stories, dtype=numpy.uint16, count=4000, offset=128).astype(int).tolist()
    compare(tapetune, stories260k, stories, ids, (512, 1024), 256, "--limit", 4000)


@pytest.mark.slow
def test_smollm2_equals_transformers(shared, smollm2, tapetune, tmp_path):
    path = tmp_path / "stories.tokens"
    tapetune("data", "pack", shared("data", "tinystories", "stories.txt"), "--model", smollm2, *STORIES, "--out", path)
    ids = numpy.fromfile(path, dtype=numpy.uint16, count=700, offset=128).astype(int).tolist()
    compare(tapetune, smollm2, path, ids, (256,), 128, "--limit", 700)
