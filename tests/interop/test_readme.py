"""The commands of README.md and of recipes/**/README.md run as they are written, in small: models and texts that they
name are stand-ins, training is two short steps, contexts are a sixteenth, and eight ranks are two. Commands of all other pages name recipes and
settings that exist."""

import gzip
import json
import os
import re
import shlex
import subprocess

import models
import pytest
import test_docs

RECIPES = models.ROOT / "recipes"
RUN = [models.ROOT / "README.md", *sorted(RECIPES.glob("**/README.md"))]
SMALL = ("steps=2", "batch=2", "micro_batch=1", "context=64", "schedule.warmup=0", "log_every=1")
# Programs whose lines run; the others are tested elsewhere, or not here: torchrun, srun, tools/quickstart, ...
PROGRAMS = ("tapetune", "tools/corpus.py", "echo")
# Lines that need something that no stand-in is made of.
NOT_RUN = {"RedPajama-Data-1T-Sample": "there is no zstd in Python 3.11"}


def commands(text):
    return [re.sub(r"\s+# .*", "", line) for line in test_docs.code_lines(text) if not line.startswith("#")]


@pytest.mark.parametrize("page", RUN, ids=test_docs.name)
def test_no_command_is_in_a_fenced_block(page):
    """Only the lines of indented blocks are run."""
    assert not re.search(r"^\s*(```|~~~)", page.read_text(), flags=re.M)


def parts():
    """Pages, split where they go to another machine ("### On a laptop"): commands before that left nothing there."""
    for page in RUN:
        for number, text in enumerate(re.split(r"(?m)^### On ", page.read_text())):
            yield pytest.param(text, id=f"{test_docs.name(page)}-{number}")


def small(line):
    """A line of a page, with two steps of training in it and shorter contexts."""
    line = line.replace("/models/", "models/").replace("--nproc 8", "--nproc 2")
    if match := re.search(r"(?<=--context )[\d,]+|(?<=contexts: \[)[\d, ]+", line):
        shorter = ",".join(str(int(number) // 16) for number in match[0].split(","))
        line = line[: match.start()] + shorter + line[match.end() :]
    if re.match(r"tapetune (launch .*-- )?(train|compare) ", line):
        line += " " + " ".join(SMALL)
    return line


def byte_tokenizer(folder):
    """A tokenizer.json like GPT-2's without merges, for any text and for GGUF files."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [256 + i for i in range(256 - len(printable))]
    tokens = ["<unk>", "<s>", "</s>", *map(chr, printable + other)]
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, token in enumerate(tokens[:3])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    whole = {"version": "1.0", "added_tokens": special, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return len(tokens)


@pytest.fixture(scope="module")
def workshop(tapetune, tmp_path_factory):
    """What stands in for models and texts: tools/quickstart's corpus, and models that are hardly trained."""
    folder = tmp_path_factory.mktemp("workshop")
    quickstart = folder / "quickstart"
    corpus = [models.ROOT / "tools" / "corpus.py", quickstart, "--tokens", "48000"]
    subprocess.run(list(map(str, corpus)), check=True)
    villages = (quickstart / "train.txt").read_text().splitlines()

    def make(tokenizer, vocab, data, out):
        tapetune("data", "pack", quickstart / "train.txt", "--delimiter", "\\n", "--model", tokenizer, "--out", data)
        shape = ("hidden=32", "layers=2", "head_dim=8", "ffn=32", f"vocab={vocab}", f"tokenizer={tokenizer}")
        tapetune("train", "quickstart/base", *(f"model.{word}" for word in shape), f"data={data}", *SMALL, f"run={out}-run")
        tapetune("merge", f"{out}-run", "--out", out)

    make(quickstart, 122, quickstart / "train.tokens", quickstart / "base")
    make(folder / "bytes", byte_tokenizer(folder / "bytes"), folder / "rp.tokens", folder / "model")
    (folder / "rp-8k.tokens").symlink_to(folder / "rp.tokens")
    for name in ("smollm2-135m", "stories260K"):
        (folder / name).symlink_to(folder / "model")
    (folder / "stories.txt").write_text("<|endoftext|>\n".join(village + "\n" for village in villages))
    (folder / "prompt.txt").write_text(villages[0][:60])
    for name in ("book.txt", "books/one.txt", "pg19/test/one.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(villages[:4])[: 2000 if "pg19" in name else 60000])
    (folder / "proof-pile" / "test").mkdir(parents=True)
    with gzip.open(folder / "proof-pile" / "test" / "one.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": villages[0][:2000]}) + "\n")
    return folder


@pytest.fixture
def place(workshop, tapetune, tmp_path):
    """An empty folder with the stand-ins, and the program on the PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tapetune").symlink_to(tapetune.path)
    for source in (*workshop.iterdir(), models.ROOT / "tools"):
        (tmp_path / source.name).symlink_to(source)
    (tmp_path / "models").mkdir()  # which commands write to
    (tmp_path / "models" / "Llama-2-7b-hf").symlink_to(workshop / "model")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("text", list(parts()))
def test_commands_run(text, place):
    environment = os.environ | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["TAPETUNE_RECIPES"] = str(models.ROOT / "recipes")
    environment.pop("ONEDNN_MAX_CPU_ISA", None)
    for line in commands(text):
        if line.split()[0] not in PROGRAMS or any(word in line for word in NOT_RUN):
            continue
        done = subprocess.run(
            ["bash", "-c", small(line)], cwd=place, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize(
    "recipe",
    [f"{path.parent.name}/{path.stem}" for each in ("quickstart", "stories-2k") for path in sorted(RECIPES.glob(f"{each}/*.yaml"))],
)
def test_shipped_recipes_run_on_two_ranks(recipe, workshop, tapetune, tmp_path):
    """With their own batch, which the ranks share; only length and number of steps are less."""
    quickstart = recipe.startswith("quickstart/")
    model = f"model={workshop / ('quickstart/base' if quickstart else 'model')}"
    if recipe == "quickstart/base":
        model = f"model.tokenizer={workshop / 'quickstart'}"
    data = f"data={workshop / ('quickstart/train.tokens' if quickstart else 'rp.tokens')}"
    short = ("context=64", "steps=2", "schedule.warmup=0", "log_every=1", "eval_windows=4")
    tapetune("launch", "--nproc", 2, "--", "train", recipe, model, data, f"run={tmp_path / 'run'}", *short)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["ranks"]) for line in lines if "loss" in line] == [(1, 2), (2, 2)]
    assert (tmp_path / "run" / "adapter").is_dir()


def test_what_does_not_run_is_still_there():
    lines = [line for page in RUN for line in commands(page.read_text())]
    for word in NOT_RUN:
        assert any(word in line for line in lines), f"no page has {word} any more: drop it from NOT_RUN"


@pytest.mark.parametrize("page", test_docs.PAGES, ids=test_docs.name)
def test_recipes_and_settings_exist(page, tapetune):
    for line in commands(page.read_text()):
        match = re.search(r"\b(train|compare|plan|recipes show|recipes validate) (.*)", line)
        if "tapetune" not in line or not match or "RECIPE" in line:
            continue
        words = shlex.split(subprocess.run(["bash", "-c", f"printf '%q ' {match[2]}"], capture_output=True, text=True).stdout)
        settings, recipes = [word for word in words if "=" in word and not word.startswith("-")], []
        for word in words:
            if word.startswith("-"):
                break  # options come last
            if "=" not in word:
                recipes.append(word)
        for recipe in recipes:
            if recipe.startswith("runs/") or recipe.endswith(".yaml"):
                continue
            assert (models.ROOT / "recipes" / f"{recipe}.yaml").exists(), f"{line}: there is no recipe {recipe}"
            tapetune("recipes", "validate", recipe, *settings)


def test_llama2_figures_are_those_of_plan(tapetune, tmp_path):
    """The table of recipes/llama2-7b-8k/README.md."""
    llama2 = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama2 |= {"vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(llama2 | {"torch_dtype": "float16"}))
    text = (models.ROOT / "recipes" / "llama2-7b-8k" / "README.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| ([\d,]+) \| (.*) \|$", text, flags=re.M)
    assert [row[0] for row in rows] == ["lora", "longlora", "theta-scaling", "tape", "full"]
    options = ("--ranks", 8, "--gpu", "80GB", "--flops", "1.5e14", "--link", "100GB")

    def plan(recipe, *words):
        said = tapetune("plan", f"llama2-7b-8k/{recipe}", f"model={tmp_path}", *words, *options).decode()
        return [re.sub(r"\s{2,}", "  ", line.strip()).split("  ") for line in said.splitlines()]

    for recipe, trained, rest in rows:
        lines = plan(recipe)
        found = {value for _, *values in lines for value in values}
        for figure in (trained, *rest.split(" | ")):
            assert figure in found, f"{recipe}: README has {figure}, plan says\n" + "\n".join(map(str, lines))
    for recipe, figure in re.findall(r"(LoRA|TAPE) (?:needs )?([\d.]+ GB)", text.split("With `shard=base`")[1]):
        memory = {value for name, *values in plan(recipe.lower(), "shard=base") for value in values if "memory" in name}
        assert memory == {figure}, f"{recipe} with shard=base: README has {figure}, plan {memory}"
