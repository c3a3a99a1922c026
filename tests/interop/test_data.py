"""Packed token ids equal those of the Python tokenizers package with numpy, for real and for hard text."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from test_tokenizer import HARD, INVALID
from tokenizers import Tokenizer

HEADER = 128  # bytes before the first token


@pytest.fixture
def reference(folder) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def packed(tapetune, path: Path, *words) -> tuple[dict, list[np.ndarray]]:
    """The header of a new token file, and the ids of each of its documents."""
    tapetune("data", "pack", *words, "--out", path)
    header = json.loads(tapetune("data", "show", path, "--json"))
    dtype = {16: np.uint16, 32: np.uint32}[header["bits"]]
    ids = np.fromfile(path, dtype=dtype, count=header["tokens"], offset=HEADER)
    ends = np.fromfile(path, dtype=np.uint64, offset=path.stat().st_size - 8 * header["documents"])
    return header, np.split(ids, ends[:-1].astype(np.int64))


def assert_same(documents, theirs, texts):
    assert len(documents) == len(theirs)
    for ours, other, text in zip(documents, theirs, texts):
        if not np.array_equal(ours, other):
            shortest = min(len(ours), len(other))
            at = next((i for i in range(shortest) if ours[i] != other[i]), shortest)
            near = slice(max(0, at - 3), at + 3)
            pytest.fail(f"{text[:80]!r} differs at token {at}:\n{ours[near]}\n{other[near]}", pytrace=False)


def test_books(folder, reference, shared, tapetune, tmp_path):
    """Novels of up to 2 MB, each a document, between BOS and EOS where the checkpoint has them."""
    files = sorted(shared("data", "books").glob("*.txt"))
    assert len(files) == 4
    texts = [file.read_bytes().decode("utf8", errors="replace") for file in files]
    header, documents = packed(tapetune, tmp_path / "f", shared("data", "books"), "--model", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    bos = reference.encode("a").ids[0] != reference.encode("a", add_special_tokens=False).ids[0]
    assert (header["bos"] is not None) == bos
    eos = config["eos_token"]
    assert header["eos"] == reference.token_to_id(eos if isinstance(eos, str) else eos["content"])
    before = [header["bos"]] if bos else []
    theirs = [
        np.array([*before, *one.ids, header["eos"]], dtype=np.uint16)
        for one in reference.encode_batch(texts, add_special_tokens=False)
    ]
    assert_same(documents, theirs, texts)
    assert header["tokens"] == sum(map(len, theirs))


def test_stories(folder, reference, shared, tapetune, tmp_path):
    """One file of many documents, also compressed."""
    whole = shared("data", "tinystories", "stories.txt").read_text()
    path = tmp_path / "stories.txt.gz"
    path.write_bytes(gzip.compress(whole.encode()))
    texts = [text.strip() for text in whole.split("<|endoftext|>")]
    texts = [text for text in texts if text]
    words = (path, "--model", folder, "--delimiter", "<|endoftext|>", "--strip", "--bos", "none", "--eos", "none")
    header, documents = packed(tapetune, tmp_path / "f", *words)
    assert header["documents"] == len(texts)
    assert_same(documents, [one.ids for one in reference.encode_batch(texts, add_special_tokens=False)], texts)
    shown = tapetune("data", "show", tmp_path / "f", "--model", folder, "--from", 7).decode()
    assert shown.split("\n", 1)[1] == reference.decode(documents[7].tolist()) + "\n"


def hard_texts() -> list[str]:
    """Pieces of hard text in random order with spaces and line ends between, where texts are cut."""
    pieces = HARD + [part.decode("utf8", errors="replace") for part in INVALID]
    pieces += ["the", "don't", "it's", "I", "1984", "U.S.", "end.", "?!", "…", "“so”", "naïve", "Σ", "x,y", "(a)"]
    pieces += ["<s>", "</s>", "<|im_end|>", "▁", "_", "{\r", ";", "\u2028", "\x1c", "=", "5%", "'", '"', "--"]
    joints = [" "] * 12 + ["\n"] * 3 + ["", "  ", "   ", "\n\n", " \n", "\n ", "\r\n", "\r", "\t", "\u00a0", "\u3000"]
    source = random.Random(5)
    texts = []
    for _ in range(400):
        count = source.randrange(1, 40)
        texts.append("".join(source.choice(pieces)[:200] + source.choice(joints) for _ in range(count)))
    return [text for text in texts if text]


def test_hard_text(folder, reference, tapetune, tmp_path):
    texts = hard_texts()
    path = tmp_path / "hard.jsonl"
    # JSON in Python's own way, with escapes for half of the texts.
    lines = [json.dumps({"id": i, "content": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines), encoding="utf8", newline="")
    words = (path, "--model", folder, "--key", "content", "--bos", "none", "--eos", "none")
    _, documents = packed(tapetune, tmp_path / "f", *words)
    assert_same(documents, [one.ids for one in reference.encode_batch(texts, add_special_tokens=False)], texts)


def test_hard_text_in_one(folder, reference, tapetune, tmp_path):
    """The same as one long document, which is tokenised in parts; bytes that are no UTF-8 among it."""
    path = tmp_path / "hard.txt"
    path.write_bytes(b" ".join(text.encode() + INVALID[i % len(INVALID)] for i, text in enumerate(hard_texts())))
    text = path.read_bytes().decode("utf8", errors="replace")
    _, documents = packed(tapetune, tmp_path / "f", path, "--model", folder, "--bos", "none", "--eos", "none")
    assert_same(documents, [reference.encode(text, add_special_tokens=False).ids], [text])


def test_vocabulary_hash(folder, reference, tapetune, tmp_path):
    """FNV-1a over id (8 bytes) + piece + 0xff, by rising id: a file must fit its tokenizer on any machine."""
    (tmp_path / "a.txt").write_text("a")
    header, _ = packed(tapetune, tmp_path / "f", tmp_path / "a.txt", "--model", folder)
    value = 0xCBF29CE484222325
    pieces = sorted((number, piece) for piece, number in reference.get_vocab(with_added_tokens=True).items())
    for number, piece in pieces:
        for byte in number.to_bytes(8, "little") + piece.encode() + b"\xff":
            value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    assert header["vocabulary_hash"] == f"{value:016x}"
    assert header["vocabulary"] == pieces[-1][0] + 1
