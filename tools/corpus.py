#!/usr/bin/env python3
"""tools/corpus.py OUT [--tokens N] [--seed N]: a small language with a long memory, for tools/quickstart.

Each document is the gossip of a village: "ada miller sings tom baker laughs". What a person does goes by the first name,
in all villages alike. The surname is drawn again for each village, so that it can only be predicted from the text so far:
a reader who remembers where the person was last named knows it, any other has to guess. Half of the people named are of the few
that the talk is about just now; the others come from anywhere, and most of them were last named more than 128 words ago.
Writes train.txt and held-out.txt (one document per line) and tokenizer.json, whose tokens are the language's words.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

SEED = 2501_00712
PEOPLE = 1000  # named in a document
COMPANY = 5  # whom the talk is about
STAYS = 0.5  # how often it stays with them

FIRST_NAMES = """ada agnes albert alma anton arthur barbara basil bertha boris carla carl clara conrad dora edgar edith
elsa emil emma ernest esther eva felix flora frank frida george gerda greta gustav hanna harold helen henry herman hilda
hugo ida irma jacob jane julius karin laura leo lina louis""".split()
SURNAMES = """archer baker barber bishop bowman brewer butcher carpenter carter carver chandler clark cook cooper cutler
draper dyer farmer fisher fletcher forester fowler gardener glover harper hunter joiner knight marshall mason mercer
miller painter parker piper porter potter sadler sawyer shepherd singer skinner slater smith spicer tailor tanner weaver""".split()
VERBS = """bakes coughs cries dances dreams drinks eats fishes frowns giggles hums jumps knits laughs limps mumbles nods
reads runs sews sings sleeps smiles whistles""".split()


def village(habits, source):
    surnames = dict(zip(FIRST_NAMES, source.sample(SURNAMES, len(FIRST_NAMES))))
    company, words = source.sample(FIRST_NAMES, COMPANY), []
    for _ in range(PEOPLE):
        name = source.choice(company if source.random() < STAYS else FIRST_NAMES)
        company = [*(other for other in company if other != name), name][-COMPANY:]
        words += [name, surnames[name], habits[name]]
    return " ".join(words)


def tokenizer():
    """Hugging Face's file of a tokenizer that splits at white space and knows the words above."""
    tokens = ["<unk>", "<end>", *FIRST_NAMES, *SURNAMES, *VERBS]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **special} for i in (0, 1)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<unk>"},
    }


def bar(done, total, what):
    if sys.stderr.isatty():
        filled = 24 * done // total
        end = "\n" if done == total else ""
        shown = f"\r[{'=' * filled}{' ' * (24 - filled)}] {what} {100 * done // total:3}%"
        print(shown, end=end, file=sys.stderr, flush=True)


def write(path, text):
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=6_000_000, help="words to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the villages; the language stays (default: %(default)s)")
    options = parser.parse_args()
    language, source = random.Random(SEED), random.Random(options.seed)
    habits = {name: language.choice(VERBS) for name in FIRST_NAMES}
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "tokenizer.json", json.dumps(tokenizer(), indent=1) + "\n")
    for name, wanted in (("train", options.tokens), ("held-out", options.tokens // 120)):
        documents, count = [], 0
        while count < wanted:
            documents.append(village(habits, source))
            count += 3 * PEOPLE
            bar(min(count, wanted), wanted, f"{name}.txt")
        write(options.out / f"{name}.txt", "\n".join(documents) + "\n")


if __name__ == "__main__":
    main()
