"""Writes tests/data/pins/NAME: run folders, adapters and merges as one version of tapetune makes them, and what it
computes from them, so that later versions keep reading them to the same numbers. For a version that no longer builds,
its folder stays as it is. Run with the environment of tools/setup --full:

    python tests/interop/make_pins.py build/cpu/tapetune NAME
"""

import argparse
import array
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

DATA = Path(__file__).resolve().parents[1] / "data"
TOKENS = [3 + 7 * i % 50 for i in range(40)]
METHODS = {
    "full": ["adapter=full"],
    "lora": ["adapter=lora", "adapter.rank=2", "adapter.dora=true", "adapter.targets=q,v,down,lm_head"],
    "longlora": ["adapter=longlora", "adapter.rank=2", "train_also=embeddings,norms"],
    "theta-scaling": ["adapter=theta-scaling", "adapter.rank=2", "adapter.rslora=true"],
    "tape": ["adapter=tape", "adapter.mix=per-head", "adapter.width=2"],
    "tape-lora": ["adapter=tape", "adapter.rank=2", "adapter.random_offset=true", "train_also=norms"],
}
LINEAR = ["positions.scaling=linear", "positions.factor=2"]
RECIPE = """\
data: ../data.bin
model: ../m
context: 24
batch: 2
micro_batch: 1
save_every: 3
keep: 1
optimizer: {lr: 1.0e-2}
seed: 5
"""


def make_model(folder: Path) -> None:
    folder.mkdir()
    config = json.loads((DATA / "tiny-configs.json").read_text())["default"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(DATA / "tiny-model.safetensors", folder / "model.safetensors")


def make_peft_adapter(folder: Path, model: Path) -> None:
    torch.manual_seed(4)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config).save_pretrained(folder)
    (folder / "README.md").unlink()
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(model), "../m"))


def kill_after_a_checkpoint(command: list, run: Path, where: Path) -> int:
    """The step of the checkpoint that is left."""
    process = subprocess.Popen(list(map(str, command)), cwd=where, stderr=subprocess.DEVNULL)
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    process.kill()
    process.wait()
    for left in run.glob("checkpoints/.*"):  # of the checkpoint after it
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
    return max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tapetune", type=Path)
    parser.add_argument("name")
    options = parser.parse_args()
    program, out = options.tapetune.absolute(), DATA / "pins" / options.name
    os.environ |= {"OMP_NUM_THREADS": "1"}
    expected = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        work = home / "work"  # paths in recipes are relative to it, and to the run folders beside it
        work.mkdir()
        make_model(home / "m")
        base = load_file(home / "m" / "model.safetensors")
        ids = array.array("H", random.Random(3).choices(range(61), k=1000))
        (home / "data.bin").write_bytes(ids.tobytes())
        (work / "recipe.yaml").write_text(RECIPE)

        def tapetune(*words) -> None:
            subprocess.run([program, *map(str, words)], cwd=work, check=True, stdout=subprocess.DEVNULL)

        def look(name: str, *model) -> None:
            """The logits, and the tensors that merging changes where that is not all, or known from another name."""
            tapetune("logits", *model, "--tokens", ",".join(map(str, TOKENS)), "--dtype", "f64", "--out", home / "l", "--force")
            expected[f"logits.{name}"] = load_file(home / "l")["logits"]
            if name in ("full", "finished", "merged-tape"):
                return
            words = [model[2], "--model", model[0]] if len(model) > 1 else model
            tapetune("merge", *words, "--out", home / "merge")
            for tensor, value in load_file(home / "merge" / "model.safetensors").items():
                if tensor not in base or not torch.equal(base[tensor], value):
                    expected[f"merged.{name}.{tensor}"] = value
            if name == "tape-lora":
                shutil.copytree(home / "merge", home / "merged-tape")
            shutil.rmtree(home / "merge")

        for name, words in METHODS.items():
            positions = [] if name in ("full", "theta-scaling") else LINEAR
            tapetune("train", "recipe.yaml", *words, *positions, "steps=6", f"run=../{name}")
            shutil.copytree(home / name / "adapter", home / "adapters" / name)
            look(name, "../m", "--adapter", f"../adapters/{name}")
        make_peft_adapter(home / "peft", home / "m")
        look("peft", "../m", "--adapter", "../peft")
        shutil.move(home / "tape-lora", home / "finished")
        look("finished", "../finished")
        look("merged-tape", "../merged-tape")

        words = ["train", "recipe.yaml", *METHODS["tape-lora"], *LINEAR, "run=../killed"]
        step = kill_after_a_checkpoint([program, *words, "steps=100000", "log_every=1"], home / "killed", work)
        look("killed", "../killed")
        shutil.copytree(home / "killed", home / "resumed")
        words[-1] = "run=../resumed"
        tapetune(*words, f"steps={step + 4}")
        for tensor, value in load_file(home / "resumed" / "adapter" / "adapter_model.safetensors").items():
            expected[f"resumed.{tensor}"] = value
        expected["resumed_steps"] = torch.tensor([step + 4])

        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for name in ("adapters", "finished", "killed", "merged-tape", "peft"):
            shutil.copytree(home / name, out / name)
        for unneeded in [path for name in ("events.out.tfevents.*", "README.md", "*.py") for path in out.rglob(name)]:  # which nothing reads back
            unneeded.unlink()
        (out / "data.bin").write_bytes(ids.tobytes())
        save_file({name: value.contiguous() for name, value in expected.items()}, out / "expected.safetensors")


if __name__ == "__main__":
    main()
