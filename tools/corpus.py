#!/usr/bin/env python3
"""tools/corpus.py OUT [--tokens N]: a small language with a long memory, for tools/quickstart.

Each document is an evening of songs, a line of eight words each: three lines of four repeat one that was sung before,
word for word, and the further back it was, the seldomer. A reader who remembers it knows the line after a word or two;
one who does not can only guess. Two of five repeats reach back further than 128 words, so remembering 512 pays.
Writes train.txt and held-out.txt (a document a line) and tokenizer.json, whose tokens are the language's words.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

SEED = 2501_00712
LINES = 400  # of an evening
NEW = 0.25  # the share of lines that nobody sang before
SOONEST = 4  # songs from one to its next repeat
CHOICES = 6  # words that may follow a word, two words on

ADJECTIVES = """amber ancient bitter blind bold brave broken clever copper crooked dark dusty empty faint foolish
gentle grand green hidden honest icy idle jolly late lonely loud merry narrow old pale plain quick rare red rusty shy
silver slow soft steep strange sweet tame thin warm weary windy wooden""".split()
NOUNS = """acorn anchor arrow badger barn bear bell boat book branch bridge brook bucket canvas cat chain chimney
clock coat cradle crown daisy deer door dragon duck ember farmer fence fiddle fire flag forest fox garden ghost goat
grove hammer hare hat hedge hill honey horse island jar kettle king kite ladder lamp lark letter lily loom maple
miller monk moon moth nest oar otter""".split()
VERBS = """admires asks blesses breaks brings burns calls carries chases counts covers draws drops envies feeds
follows gathers greets guides helps hides hunts keeps kisses lifts loves marks mends names needs opens passes""".split()
PREPOSITIONS = """above across against among around behind beneath beside beyond near outside over""".split()
SLOTS = (ADJECTIVES, NOUNS, VERBS, ADJECTIVES, NOUNS, PREPOSITIONS, ADJECTIVES, NOUNS)


def grammar(source):
    """What may follow a word, two words on: a part of the next slot's words for each word of a slot."""
    return [{word: source.sample(then, CHOICES) for word in words} for words, then in zip(SLOTS, SLOTS[2:])]


def line(follows, source):
    words = [source.choice(SLOTS[0]), source.choice(SLOTS[1])]
    for allowed in follows:
        words.append(source.choice(allowed[words[-2]]))
    return " ".join(words)


def evening(follows, source):
    """Lines, most of them heard before; `heard` has the last one last."""
    heard, lines = [], []
    for _ in range(LINES):
        if len(heard) < SOONEST or source.random() < NEW:
            song = line(follows, source)
        else:  # the n-th last with a chance of 1 / n
            song = heard.pop(-int(SOONEST * (len(heard) / SOONEST) ** source.random()))
        heard.append(song)
        lines.append(song + " .")
    return " ".join(lines)


def tokenizer():
    """Hugging Face's file of a tokenizer that splits at white space and knows the words above."""
    tokens = ["<unk>", "<end>", ".", *sorted({word for words in SLOTS for word in words})]
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
    parser.add_argument("--tokens", type=int, default=3_000_000, help="words to train on (default: %(default)s)")
    options = parser.parse_args()
    source = random.Random(SEED)
    follows = grammar(source)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "tokenizer.json", json.dumps(tokenizer(), indent=1) + "\n")
    for name, wanted in (("train", options.tokens), ("held-out", options.tokens // 120)):
        documents, count = [], 0
        while count < wanted:
            documents.append(evening(follows, source))
            count += LINES * (len(SLOTS) + 1)
            bar(min(count, wanted), wanted, name)
        write(options.out / f"{name}.txt", "\n".join(documents) + "\n")


if __name__ == "__main__":
    main()
