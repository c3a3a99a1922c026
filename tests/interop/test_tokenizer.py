"""Token ids and decoded text equal those of the Python tokenizers package, line by line."""

import json
import shutil

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

LINES = 1000  # from each of the sources, which makes 7,000 lines for each tokenizer
SOURCES = (
    ("tinystories", "stories.txt"),
    ("books", "bleak_house_1853.txt"),
    ("books", "pride_and_prejudice_1813.txt"),
    ("books", "tale_of_two_cities_1859.txt"),
    ("math", "algebra.tex"),
    ("math", "categories.tex"),
    ("math", "sets.tex"),
)

HARD = [
    "",
    " ",
    "   two  spaces   and a trailing one ",
    "\ttab\tand\rcarriage return\r",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "中文字符,日本語のテキスト、한국어 텍스트",
    "e\u0301 vs \u00e9, n\u0303, Z\u0351\u036b\u0343a\u0323\u0307lgo, \u1100\u1161\u11a8",
    "עברית العربية हिन्दी ไทย",
    "\u200b zero width \ufeff byte order mark \u202e reversed \u00a0 hard space \u3000 wide",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff \uffff \u0001\u007f\u0080",
    "<s> </s> <unk> <0x41> <|endoftext|> <|im_start|>user<|im_end|> [INST] <<SYS>>",
    "▁underlines▁of▁sentencepiece ▁ ▁▁ _",
    "1234567890 3.14159 1,000,000 0x1F 1e-5 ½ ² Ⅷ ٣",
    "def f(x):    return x**2 # \\frac{a}{b} $\\mathbb{Z}/p^n$ don't I'LL we've",
    "a" * 3000,
    " " * 300 + "x",
    "\0nul\0inside\0",
]

INVALID = [
    b"\xff\xfe plain \x80 wrong",
    b"cut short \xe4\xb8",  # two of three bytes
    b"cut short \xf0\x9f\x98",  # three of four
    b"\xf0\x9f and on",
    b"overlong \xc0\xaf \xe0\x80\xaf",
    b"surrogate \xed\xa0\x80\xed\xb0\x80",
    b"too high \xf4\x90\x80\x80 \xf8\x88\x80\x80\x80",
    b"good \xc3\xa9 bad \xe9 good \xf0\x9f\x98\x80",
    bytes(range(128, 256)),
]


@pytest.fixture
def reference(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def lines(shared) -> list[bytes]:
    """Evenly spread lines of every source; some are empty, as those of the files are."""
    chosen = []
    for name in SOURCES:
        every = shared("data", *name).read_bytes().split(b"\n")
        chosen += every[:: len(every) // LINES][:LINES]
    assert len(chosen) >= 5000
    return chosen


def encode(tapetune, folder, texts: list[bytes], *options) -> list[list[int]]:
    assert not any(b"\n" in text for text in texts)
    out = tapetune("tokenize", folder, *options, stdin=b"".join(text + b"\n" for text in texts))
    return [json.loads(line) for line in out.splitlines()]


def assert_same(ours, theirs, texts):
    assert len(ours) == len(theirs), f"{len(ours)} answers for {len(theirs)} lines"
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    if wrong:
        i = wrong[0]
        pytest.fail(f"{len(wrong)} of {len(texts)} differ, first {texts[i]!r}:\n{ours[i]}\n{theirs[i]}", pytrace=False)


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_ids_of_real_text(special, folder, reference, lines, tapetune):
    texts = [line.decode("utf8", errors="replace") for line in lines]
    theirs = [one.ids for one in reference.encode_batch(texts, add_special_tokens=special)]
    assert_same(encode(tapetune, folder, lines, *([] if special else ["--no-special"])), theirs, lines)


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_ids_of_hard_text(special, folder, reference, tapetune):
    lines = [text.encode("utf8", errors="surrogatepass") for text in HARD] + INVALID
    theirs = [
        reference.encode(line.decode("utf8", errors="replace"), add_special_tokens=special).ids for line in lines
    ]
    assert_same(encode(tapetune, folder, lines, *([] if special else ["--no-special"])), theirs, lines)


def test_input_from_a_file(folder, reference, tapetune, tmp_path):
    """A last line without a line end counts, one after the last line end does not."""
    path = tmp_path / "text"
    for text, count in ((b"one\n\ntwo", 3), (b"one\n\ntwo\n", 3), (b"", 0)):
        path.write_bytes(text)
        out = [json.loads(line) for line in tapetune("tokenize", folder, "--file", path).splitlines()]
        assert out == [reference.encode(part).ids for part in ("one", "", "two")][:count]


@pytest.mark.parametrize("bos", [True, False, None], ids=["bos", "no-bos", "bos-unsaid"])
@pytest.mark.parametrize("eos", [True, False, None], ids=["eos", "no-eos", "eos-unsaid"])
def test_special_tokens_as_tokenizer_config_says(bos, eos, folder, reference, tapetune, tmp_path):
    """add_bos_token and add_eos_token decide, each where it is said; elsewhere tokenizer.json's template does."""
    said = {"add_bos_token": bos, "add_eos_token": eos}
    said = {key: value for key, value in said.items() if value is not None}
    template = reference.encode("a").ids[0] != reference.encode("a", add_special_tokens=False).ids[0]  # BOS, if any
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("add_")} | said
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # transformers 4 reads the two keys from the file, 5 only as arguments, of which one calls for the other.
    words = {"add_bos_token": template, "add_eos_token": False} | said if said else {}
    peer = AutoTokenizer.from_pretrained(tmp_path, **words)
    texts = ["Hello world", "", "a <s> b"]
    for text, ours in zip(texts, encode(tapetune, tmp_path, [text.encode() for text in texts])):
        # The ids between are those of tokenizer.json; AutoTokenizer builds some classes anew and differs in spaces.
        middle = reference.encode(text, add_special_tokens=False).ids
        theirs, bare = (peer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
        start = next(i for i in range(len(theirs) - len(bare) + 1) if theirs[i : i + len(bare)] == bare)
        if not bare:  # an empty text leaves open which of the special tokens stands before it
            assert ours == theirs, (text, said)
        else:
            assert ours == theirs[:start] + middle + theirs[start + len(bare) :], (text, said)


def test_decoded_text(folder, reference, lines, tapetune):
    """Ids of real and hard text, and runs of all ids in a row, which break characters and hold special tokens."""
    texts = [line.decode("utf8", errors="replace") for line in lines[::7]] + HARD
    ids = [one.ids for one in reference.encode_batch(texts)]
    size = reference.get_vocab_size()
    ids += [list(range(start, min(start + 50, size))) for start in range(0, size, 50)]
    stdin = "".join(json.dumps(one) + "\n" for one in ids).encode()
    ours = [json.loads(line) for line in tapetune("tokenize", folder, "--decode", stdin=stdin).splitlines()]
    assert_same(ours, reference.decode_batch(ids, skip_special_tokens=True), ids)
