"""Runs the tapetune binary beside its Python peers. Without the binary all fail; without the shared data some skip."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may reach for a model hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # CPU builds warn about a GPU that they cannot use
# torch crashes in bf16 on virtual machines that report AMX without its tile sizes; tapetune detects that itself.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# The copies that transformers imports of a folder's own code: one place a worker, gone with it, and not the user's.
_modules = tempfile.TemporaryDirectory(prefix="tapetune-modules-")
os.environ["HF_MODULES_CACHE"] = _modules.name

import pytest
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import models
import peer

torch.set_num_threads(1)  # one core for each worker of pytest-xdist
torch.set_grad_enabled(False)
logging.set_verbosity_error()
logging.disable_progress_bar()


class Tapetune:
    """The binary, and the two verbs that most tests call."""

    def __init__(self, path: Path, scratch: Path):
        self.path, self.scratch, self.calls = path, scratch, 0

    def __call__(self, *args, stdin: bytes = b"", seconds: float = 300) -> bytes:
        """Runs it and returns its stdout; any exit code but 0 fails the test with what it said."""
        command = [str(self.path), *map(str, args)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("ONEDNN_MAX_CPU_ISA")
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=seconds, env=environment)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-2000:]
            pytest.fail(f"exit {done.returncode} from: {' '.join(command)[:500]}\n{said}", pytrace=False)
        return done.stdout

    def logits(self, model, ids, *options) -> dict[str, torch.Tensor]:
        """The tensors that `tapetune logits` writes."""
        self.calls += 1
        out = self.scratch / f"logits-{self.calls}.safetensors"
        self("logits", model, "--tokens", ",".join(map(str, ids)), "--out", out, *options)
        tensors = peer.tensors(out)
        out.unlink()
        return tensors

    def generate(self, model, ids, new: int, *options) -> dict:
        """The JSON object of `tapetune generate` for one prompt of ids."""
        words = ["--tokens", ",".join(map(str, ids)), "--max-new-tokens", new, "--json", *options]
        return json.loads(self("generate", model, *words))


def pytest_collection_modifyitems(items):
    """The few slow tests go first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs a real model of 135 million parameters, or one process after another")
    config.addinivalue_line("markers", "long: takes minutes by itself; only `tools/test --long` runs it")


@pytest.fixture(scope="session")
def tapetune(tmp_path_factory) -> Tapetune:
    try:
        return Tapetune(models.binary(), tmp_path_factory.mktemp("out"))
    except models.Missing as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest.fixture(scope="session")
def shared():
    """shared("data", "books") is a path of the shared data; the test skips where it is absent."""

    def find(*parts: str) -> Path:
        try:
            return models.shared(*parts)
        except models.Missing as missing:
            pytest.skip(str(missing))

    return find


@pytest.fixture(scope="session")
def stories260k(shared) -> Path:
    return shared("data", "stories260K")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    try:
        return models.smollm2()
    except models.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=("llama2", "stories260k", "smollm2"))
def folder(request, shared, smollm2) -> Path:
    """A folder with a tokenizer, each of the three in turn."""
    if request.param == "llama2":
        return shared("data", "llama2-tokenizer")
    return smollm2 if request.param == "smollm2" else shared("data", "stories260K")
