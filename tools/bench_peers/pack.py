"""What Python does for `tools/bench pack`, in a process of its own: tokenizers' encode_batch and numpy.

pack.py TOKENIZER OUT FILE…     writes the ids of all files, each a document with BOS and EOS, as 16 bits
"""

import sys

import numpy as np
from tokenizers import Tokenizer


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    bos, eos = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    texts = []
    for name in sys.argv[3:]:
        with open(name, encoding="utf8", errors="replace", newline="") as file:
            texts.append(file.read())
    with open(sys.argv[2], "wb") as out:
        for one in tokenizer.encode_batch(texts, add_special_tokens=False):
            for ids in ([bos], one.ids, [eos]):
                np.array(ids, dtype=np.uint16).tofile(out)


main()
