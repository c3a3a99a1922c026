"""Files that tapetune writes, read by the safetensors package and compared with what that writes itself."""

import json
import struct
from pathlib import Path

import peer
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import save_file

CASE = tiny.Case("qwen2", "gqa", False, "nobias", "default", number=8)  # in one file
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def header(path: Path) -> bytes:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return file.read(length)


def test_logits_file(tapetune, tmp_path):
    folder = CASE.save(tmp_path / "model")
    out = tmp_path / "logits.safetensors"
    tapetune("logits", folder, "--tokens", "7,8,9", "--out", out, "--hidden")
    with safe_open(out, "pt") as file:
        assert file.get_slice("logits").get_shape() == [3, tiny.VOCAB]
        names = sorted(file.keys())
    tensors = peer.tensors(out)
    assert names == sorted(tensors) and all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert header(out).lstrip().startswith(b"{") and len(header(out)) % 8 == 0


@pytest.mark.parametrize("stored", DTYPES.values(), ids=DTYPES.keys())
def test_converted_file_is_byte_for_byte_theirs(stored, tapetune, tmp_path):
    """Header (order of tensors, spacing, padding) and data are what save_file makes of the same tensors."""
    folder, out, theirs = CASE.save(tmp_path / "model", stored), tmp_path / "out", tmp_path / "theirs.safetensors"
    tapetune("convert", folder, "--out", out)
    save_file(peer.tensors(folder / "model.safetensors"), theirs, metadata={"format": "pt"})
    ours = out / "model.safetensors"
    assert header(ours) == header(theirs)
    assert ours.read_bytes() == theirs.read_bytes()


def test_mixed_dtypes_keep_their_order_and_alignment(tapetune, tmp_path):
    """float32 norms beside bfloat16 matrices, as adapters leave them: larger dtypes come first in the file."""
    out, theirs = tmp_path / "out", tmp_path / "theirs.safetensors"
    folder = CASE.save(tmp_path / "model", torch.bfloat16)
    tensors = peer.tensors(folder / "model.safetensors")
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, theirs, metadata={"format": "pt"})
    tapetune("convert", folder, "--out", out)
    assert header(out / "model.safetensors") == header(theirs)
    assert (out / "model.safetensors").read_bytes() == theirs.read_bytes()


def test_unaligned_source(tapetune, tmp_path):
    """A header whose length is no multiple of 8 leaves the data unaligned in the file; it is valid all the same."""
    folder = CASE.save(tmp_path / "model")
    path = folder / "model.safetensors"
    ids = tiny.tokens(20, 1)
    aligned = tapetune.logits(folder, ids)["logits"]
    whole, old = path.read_bytes(), header(path)
    for extra in (1, 2, 4):
        new = old.rstrip() + b" " * ((extra - len(old.rstrip())) % 8)
        assert len(new) % 8 == extra
        path.write_bytes(struct.pack("<Q", len(new)) + new + whole[8 + len(old) :])
        assert torch.equal(tapetune.logits(folder, ids)["logits"], aligned), f"data at offset {extra} of 8"


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_conversion_of_dtype(stored, target, tapetune, tmp_path):
    """Rounding is torch's, to nearest even; config.json names the dtype."""
    folder, out = CASE.save(tmp_path / "model", DTYPES[stored]), tmp_path / "out"
    tapetune("convert", folder, "--out", out, "--dtype", target)
    source, written = peer.tensors(folder / "model.safetensors"), peer.tensors(out / "model.safetensors")
    assert list(source) == list(written)
    for name, tensor in source.items():
        expected = tensor.to(DTYPES[target])
        assert written[name].dtype == expected.dtype and torch.equal(written[name], expected), name
    assert peer.config(out)["dtype"] == str(DTYPES[target]).removeprefix("torch.")


def test_shards_are_full_but_not_over(tapetune, tmp_path):
    """Greedy split by decimal size; a tensor larger than the limit has a file of its own; the index adds up."""
    folder, out, limit = CASE.save(tmp_path / "model"), tmp_path / "out", 20_000
    tapetune("convert", folder, "--out", out, "--shard-size", "20KB")
    files = sorted(out.glob("*.safetensors"))
    count = len(files)
    assert [path.name for path in files] == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    sizes = {path.name: [tensor.nbytes for tensor in peer.tensors(path).values()] for path in files}
    assert count > 3 and index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    for name, parts in sizes.items():
        assert sum(parts) <= limit or len(parts) == 1, f"{name}: {sum(parts)} bytes in {len(parts)} tensors"
    for one, following in zip(files, files[1:]):
        assert sum(sizes[one.name]) + max(sizes[following.name]) > limit, f"{one.name} could hold more"
    source = peer.tensors(folder / "model.safetensors")
    for name, file in index["weight_map"].items():
        assert torch.equal(peer.tensors(out / file)[name], source[name]), name
