"""A file system without the flags of renameat2, as NFS and FUSE are: outputs are whole there too, and runs resume."""

import os
import shutil
import signal
import subprocess
import time

import numpy
import pytest
import tiny

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("bindfs") or not os.path.exists("/dev/fuse"),
    reason="a FUSE mount needs root, bindfs (tools/setup --full) and /dev/fuse",
)


@pytest.fixture
def mount(tmp_path):
    real, seen = tmp_path / "real", tmp_path / "seen"
    real.mkdir(), seen.mkdir()
    subprocess.run(["bindfs", real, seen], check=True, capture_output=True)
    try:
        # Else this test would show nothing.
        (seen / "a").mkdir()
        libc = __import__("ctypes").CDLL(None, use_errno=True)
        assert libc.renameat2(-100, bytes(seen / "a"), -100, bytes(seen / "b"), 1) == -1
        (seen / "a").rmdir()
        yield seen
    finally:
        subprocess.run(["fusermount", "-u", seen], check=True, capture_output=True)


def names(folder):
    return sorted(os.listdir(folder))


def test_outputs_are_put_in_place(tapetune, mount):
    model = tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(mount / "model")
    for force in ([], ["--force"]):
        tapetune("convert", model, "--out", mount / "converted", *force)
        tapetune("logits", model, "--tokens", "1,2,3", "--out", mount / "logits", *force)
    for words in (["convert", model, "--out", mount / "converted"], ["logits", model, "--tokens", "1", "--out", mount / "logits"]):
        done = subprocess.run([tapetune.path, *words], capture_output=True, text=True)
        assert done.returncode == 1 and "already exists" in done.stderr
    assert names(mount) == ["converted", "logits", "model"]


def test_a_killed_run_resumes_to_the_bit(tapetune, mount, tmp_path):
    model = tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(tmp_path / "model")
    numpy.array(tiny.tokens(4000, 7), dtype=numpy.uint16).tofile(tmp_path / "data.bin")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {model}\ndata: {tmp_path / 'data.bin'}\nrun: {tmp_path / 'whole'}\ncontext: 16\n"
        "adapter: {method: lora, rank: 2}\nsteps: 20\nbatch: 2\ndtype: f32\nsave_every: 3\nseed: 3\n"
    )
    tapetune("train", recipe, "--threads", "1")
    run = mount / "run"
    for moment in ("saving:2", "commit:4", "committed:5", "remove:1", "step:2"):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TAPETUNE_STOP_AT": moment}
        process = subprocess.Popen(
            [tapetune.path, "-q", "train", recipe, f"run={run}", "--threads", "1"], env=environment
        )
        end = time.monotonic() + 60
        while not os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT):
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, moment
    tapetune("train", recipe, f"run={run}", "--threads", "1")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run / "adapter" / name).read_bytes() == (tmp_path / "whole/adapter" / name).read_bytes()
    assert all(name.startswith("step-") for name in names(run / "checkpoints"))
    # More steps: the adapter, which is there already, is replaced.
    tapetune("train", recipe, f"run={run}", "steps=22", "--threads", "1")
    assert not [name for name in names(run) if name.startswith(".")]
