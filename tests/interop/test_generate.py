"""Stopping, sampling and batches, against what transformers' logits say they should be."""

import json
import shutil

import peer
import pytest
import tiny
import torch

CASE = tiny.Case("llama", "gqa", False, "nobias", "linear", number=4)
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "The cat",
    "",
    "Tom and Ben went to the park. They saw a big, red ball. Tom wanted to play with it, but Ben said",
    "«Où est-il?» 🐸",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return CASE.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("where", ["config", "list-in-config", "generation_config"])
def test_stops_at_the_end_token(where, folder, tapetune, tmp_path):
    prompt = tiny.tokens(12, 3)
    free = tapetune.generate(folder, prompt, 24, "--ignore-eos")["tokens"]
    ends = [i for i in range(3, 20) if free[i] not in free[:i]]  # an id that comes for the first time then
    assert ends, f"choose another seed: {free} repeats itself"
    stop = ends[0]
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    path = other / "config.json"
    config = json.loads(path.read_text())
    if where == "generation_config":  # transformers lets it overrule the config, as Llama-3-Instruct needs
        (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [96, free[stop]]}))
    else:
        config["eos_token_id"] = [96, free[stop]] if where == "list-in-config" else free[stop]
    path.write_text(json.dumps(config))

    ours = tapetune.generate(other, prompt, 24)
    assert ours["stopped"] == "eos"
    peer.assert_same_ids(ours["tokens"], free[: stop + 1], "up to the end token and with it, as transformers has it")
    peer.assert_same_ids(tapetune.generate(other, prompt, 24, "--ignore-eos")["tokens"], free, "--ignore-eos")


def test_sampling_follows_the_seed_and_not_the_cache(folder, tapetune):
    prompt = tiny.tokens(12, 4)
    sample = ["--ignore-eos", "--temperature", "1.0", "--seed"]
    first = tapetune.generate(folder, prompt, 30, *sample, "7")["tokens"]
    assert tapetune.generate(folder, prompt, 30, *sample, "7")["tokens"] == first, "one seed, two results"
    assert tapetune.generate(folder, prompt, 30, *sample, "8")["tokens"] != first, "two seeds, one result"
    peer.assert_same_ids(tapetune.generate(folder, prompt, 30, *sample, "7", "--no-cache")["tokens"], first, "no cache")


@pytest.mark.parametrize("option", [["--top-k", "1"], ["--top-p", "0.0001"]], ids=["top-k-1", "top-p-0"])
def test_narrowest_sampling_is_greedy(option, folder, tapetune):
    prompt = tiny.tokens(12, 5)
    greedy = tapetune.generate(folder, prompt, 20, "--ignore-eos")["tokens"]
    ours = tapetune.generate(folder, prompt, 20, "--ignore-eos", "--temperature", "1.5", "--seed", "1", *option)
    peer.assert_same_ids(ours["tokens"], greedy, " ".join(option))


@pytest.mark.parametrize("option", [["--top-k", "4"], ["--top-p", "0.5"]], ids=["top-k-4", "top-p-0.5"])
def test_sampling_keeps_to_the_best(option, folder, tapetune):
    prompt = tiny.tokens(12, 6)
    sample = ["--ignore-eos", "--temperature", "1.0", "--seed", "3"]
    new = tapetune.generate(folder, prompt, 60, *sample, *option)["tokens"]
    logits = peer.forward(peer.load(folder), prompt + new)[len(prompt) - 1 : -1]
    chances, order = logits.softmax(-1).sort(descending=True)
    ranks = (order == torch.tensor(new)[:, None]).int().argmax(-1)
    if option[0] == "--top-k":
        allowed = torch.full_like(ranks, int(option[1]))
    else:  # the smallest set that holds the share, as transformers keeps it
        allowed = ((chances.cumsum(-1) - chances) < float(option[1]) + 1e-5).sum(-1)
    assert (ranks < allowed).all(), f"{option}: ranks {ranks.tolist()}, allowed {allowed.tolist()}"
    assert ranks.max() > 0, "nothing was sampled"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_sampling_has_the_right_distribution(temperature, stories260k, tapetune):
    """The mean surprise of the sampled tokens is the mean entropy, to four standard errors."""
    sample = ["--ignore-eos", "--temperature", temperature, "--seed", "11"]
    new = tapetune.generate(stories260k, [1], 500, *sample)["tokens"]
    chances = (peer.forward(peer.load(stories260k), [1] + new)[:-1].double() / temperature).softmax(-1)
    surprise = -chances[torch.arange(len(new)), torch.tensor(new)].log()
    entropy = -torch.special.xlogy(chances, chances).sum(-1)
    spread = (torch.special.xlogy(chances, chances) * chances.clamp_min(1e-300).log()).sum(-1) - entropy**2
    error = spread.sum().sqrt() / len(new)
    assert len(new) == 500
    away = (surprise.mean() - entropy.mean()) / error
    assert away.abs() < 4, f"surprise {surprise.mean():.3f}, entropy {entropy.mean():.3f}: {away:.1f} standard errors"


@pytest.mark.parametrize("options", [[], ["--temperature", "1.0", "--seed", "5"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("end", ["</s>", "full-stop"])
def test_batch_equals_one_by_one(end, options, stories260k, tapetune, tmp_path):
    """Prompts of several lengths at once; ending at the first full stop, they end at several lengths too."""
    folder = tmp_path / "model"
    shutil.copytree(stories260k, folder)
    if end == "full-stop":
        stop = json.loads(tapetune("tokenize", folder, "--no-special", stdin=b"end.\n"))[-1]
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": stop}))
    words = ["--max-new-tokens", "40", "--json", *options]
    alone = [json.loads(tapetune("generate", folder, "--prompt", text, *words)) for text in PROMPTS]
    assert end == "</s>" or len({len(one["tokens"]) for one in alone}) > 1, "all ended together: the test shows little"

    repeated = [word for text in PROMPTS for word in ("--prompt", text)]
    batch = [json.loads(line) for line in tapetune("generate", folder, *repeated, *words).splitlines()]
    assert [one["prompt"] for one in batch] == list(PROMPTS)
    for one, other in zip(alone, batch):
        assert one == other, f"alone and in a batch differ for {one['prompt']!r}"

    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf8")  # an empty line is no prompt there
    batch = [json.loads(line) for line in tapetune("generate", folder, "--prompt-file", path, *words).splitlines()]
    assert batch == [one for one in alone if one["prompt"]], "--prompt and --prompt-file differ"


def test_text_streams_as_it_decodes(stories260k, tapetune):
    """What a reader sees piece by piece is the text of all ids together, with and without the prompt before it."""
    words = ["generate", stories260k, "--prompt", PROMPTS[3], "--max-new-tokens", "60"]
    whole = json.loads(tapetune(*words, "--json"))
    assert len(whole["text"]) > 20
    assert tapetune(*words).decode().strip("\n") == PROMPTS[3] + whole["text"]
    assert tapetune(*words, "--no-echo").decode().strip("\n") == whole["text"].strip("\n")
