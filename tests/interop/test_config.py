"""config.json files as people have them: old forms, missing keys, keys that overrule others."""

import json

import peer
import pytest
import tiny
import torch

FIRST_HALF = tiny.SHAPES[0]["hidden_size"] // tiny.SHAPES[0]["num_attention_heads"] // 2


def without(*keys):
    return lambda config: [config.pop(key, None) for key in keys]


def with_(**settings):
    """Old-style rotary settings in place of whatever is there."""

    def change(config):
        config.pop("rope_parameters")
        config.update(settings)

    return change


LONGROPE = {
    "short_factor": [1.0 + 0.1 * i for i in range(FIRST_HALF)],
    "long_factor": [2.0 + 0.3 * i for i in range(FIRST_HALF)],
}

CHANGES = {
    "no-rope-at-all": with_(),
    "theta-is-an-integer": with_(rope_theta=5000),
    "type-and-rope_type": with_(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0}),
    "integer-factor": with_(rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4}),
    "rope_scaling-says-default": with_(rope_theta=700.0, rope_scaling={"rope_type": "default"}),
    "theta-inside-rope_scaling": with_(
        rope_theta=10000.0, rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}
    ),
    "yarn-without-original": with_(rope_theta=10000.0, rope_scaling={"type": "yarn", "factor": 2.0}),
    "original-at-top-level": with_(
        rope_theta=10000.0,
        original_max_position_embeddings=24,
        rope_scaling={"type": "longrope", **LONGROPE, "original_max_position_embeddings": 48},
    ),
    "longrope-factor-from-contexts": with_(
        rope_theta=10000.0, original_max_position_embeddings=16, rope_scaling={"type": "longrope", **LONGROPE}
    ),
    "llama-3.1": with_(
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
    ),
    "rope_scaling-beside-rope_parameters": lambda config: config.update(
        rope_scaling={"type": "linear", "factor": 3.0}, rope_theta=200.0
    ),
    "nulls": lambda config: config.update(
        head_dim=None, num_key_value_heads=None, eos_token_id=None, bos_token_id=None, rope_scaling=None
    ),
    "keys-left-to-their-defaults": without(
        "head_dim", "num_key_value_heads", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "max_position_embeddings", "dtype",
    ),
    "unknown-key": lambda config: config.update(somebodys_own={"a": [1, 2.5, None]}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_odd_config(change, tapetune, tmp_path):
    folder, out = tmp_path / "model", tmp_path / "out"
    case = tiny.Case("llama", "mha", False, "nobias", "default", number=36)  # the shape without explicit head_dim
    tiny.random_model(case.config(), seed=36).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = 64
    change(config)
    path.write_text(json.dumps(config))

    model = peer.load(folder, torch.float32)
    for count in (12, tiny.ABOVE, 80):
        ids = tiny.tokens(count, 1)
        ours = tapetune.logits(folder, ids)["logits"]
        peer.assert_close(ours, peer.forward(model, ids), 1e-4, f"logits of {count} tokens")

    tapetune("convert", folder, "--out", out)
    before, after = peer.config(folder), peer.config(out)
    before["dtype"] = "float32"  # what is written names it, also where the source leaves it out
    assert after == before
    ids = tiny.tokens(tiny.ABOVE, 2)
    assert torch.equal(peer.forward(peer.load(out), ids), peer.forward(model, ids))


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_config_and_tokenizer_files_are_carried_over(arch, tapetune, tmp_path):
    """Files beside the weights arrive unchanged, apart from config.json, which is written anew."""
    folder, out = tmp_path / "model", tmp_path / "out"
    tiny.Case(arch, "gqa", False, "nobias", "default", number=2).save(folder)
    beside = {
        "generation_config.json": '{"temperature": 0.6,\n "eos_token_id": [2, 7]}',
        "tokenizer_config.json": '{"add_bos_token": true}\n',
        "special_tokens_map.json": "{}",
        "tokenizer.model": "\0binary",
    }
    for name, text in beside.items():
        (folder / name).write_text(text)
    (folder / "model-00001-of-00002.bin.part").write_text("not of the checkpoint")
    tapetune("convert", folder, "--out", out)
    for name, text in beside.items():
        assert (out / name).exists(), f"{name} was left behind"
        assert (out / name).read_text() == text, f"{name} changed on the way"
    assert not (out / "model-00001-of-00002.bin.part").exists()
    assert not list(tmp_path.glob("*tmp*")) and not list(tmp_path.glob("*part*")), "something temporary is left"
