"""README.md and docs/ agree with the repository and the program: links lead somewhere, commands and options exist."""

import functools
import itertools
import re
import shlex

import models
import pytest

README = models.ROOT / "README.md"
PAGES = sorted([README, models.ROOT / "CONTRIBUTING.md", *models.ROOT.glob("docs/*.md"), *models.ROOT.glob("recipes/**/*.md"),
                models.ROOT / "adapters" / "README.md", models.ROOT / "tests" / "data" / "README.md"])
NESTED = ("data", "recipes", "eval", "check")  # commands that have commands of their own


def name(page):
    return str(page.relative_to(models.ROOT))


def code_lines(text):
    """The lines of indented code blocks, with continued lines joined; fenced blocks are C++ and CMake."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines = re.sub(r" *\\\n\s+", " ", text).split("\n")
    return [line[4:] for line in lines if line.startswith("    ") and not line.lstrip().startswith(("- ", "* "))]


def commands(page):
    """Every use of tapetune in the page's code blocks, as words; what launches it and shell syntax around it removed."""
    for line in code_lines(page.read_text()):
        line = re.sub(r"(^|\s)# .*", "", line)
        if not re.search(r"(^|\s)tapetune\s", line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        for separator, part in itertools.groupby(lexer, key=lambda word: set(word) <= set("&;|")):
            words = [] if separator else list(part)
            if words and words[0] in ("torchrun", "srun", "mpirun") and "tapetune" in words:
                words = words[words.index("tapetune"):]
            if "tapetune" not in words[:1]:
                continue
            words = words[1:]
            if words and words[0] == "launch" and "--" in words:
                yield words[:words.index("--")]
                words = words[words.index("--") + 1:]
            yield words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_checkpoints_are_named_as_train_names_them(page):
    assert all(len(digits) == 8 for digits in re.findall(r"\bstep-(\d+)", page.read_text()))


def test_readme_is_short():
    assert len(README.read_bytes()) <= 9000


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_scripts(page):
    text = page.read_text()
    for script in re.findall(r"(?<![\w/.-])(?:tools|\.ci)/[\w-]+(?:\.(?:py|sh|cpp))?", text):
        assert (models.ROOT / script).exists(), script


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_options(page, tapetune):
    @functools.cache
    def options(verb):
        return set(re.findall(r"--[a-z][a-z-]*", tapetune(*verb, "--help").decode()))

    for words in commands(page):
        verb = tuple(word for word in words[:2 if words[0] in NESTED else 1] if not word.startswith("-") and word != "help")
        for word in words:
            if word.startswith("--") and len(word) > 2:
                assert word.split("=")[0] in options(verb) | {"--help"}, " ".join(words)
