"""report.html in a real browser: nothing goes wrong, every chart shows something and nothing overlaps, at each width and
in each colour scheme."""

import csv
import json
import os
import re

import browser
import numpy
import pytest
import tiny

# Marks of a chart, its texts that touch one another, and whether the page is wider than the window.
CHARTS = """[...document.querySelectorAll('svg.chart')].filter(s => s.getBoundingClientRect().width > 0).map(s => {
  const inside = [...s.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const touching = [];
  for (const [i, [a, p]] of inside.entries()) for (const [b, q] of inside.slice(i + 1)) {
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && high > 3) touching.push([a, b]);
  }
  const own = s.getBoundingClientRect();
  const outside = inside.filter(([, p]) => p.left < own.left - 1 || p.right > own.right + 1).map(([t]) => t);
  return {name: s.getAttribute('aria-label'), marks: s.querySelectorAll('.line,.cell,.dot').length,
          scale: s.classList.contains('scale'), small: Math.min(...inside.map(([, p]) => p.height)), touching, outside};
})"""


@pytest.fixture(scope="module")
def report(tapetune, tmp_path_factory):
    """A comparison of three recipes on a tiny model."""
    if browser.find() is None:
        pytest.skip("chromium is not installed: run tools/setup --full")
    scratch = tmp_path_factory.mktemp("compare")
    model = tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(scratch / "model")
    numpy.array(tiny.tokens(4000, 7), dtype=numpy.uint16).tofile(scratch / "data.bin")
    recipes = []
    methods = {  # with positions that differ, so that the page has all its parts
        "lora": "{method: lora, rank: 2}",
        "theta-scaling": "{method: theta-scaling, rank: 2}",
        "tape": "{method: tape}\npositions: {scaling: yarn, factor: 2}",
    }
    for name, adapter in methods.items():
        recipes.append(scratch / f"{name}.yaml")
        recipes[-1].write_text(
            f"model: {model}\ndata: {scratch / 'data.bin'}\nrun: {scratch / 'runs' / name}\n"
            f"context: 32\nadapter: {adapter}\n"
            "steps: 12\nbatch: 2\noptimizer: {lr: 3.0e-3}\ndtype: f32\nsave_every: 0\nheld_out: 0.1\n"
        )
    tapetune("compare", *recipes, "--out", scratch / "out")
    return scratch / "out"


@pytest.fixture(scope="module")
def tab(report):
    with browser.Browser() as open_tab:
        yield open_tab


@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
@pytest.mark.parametrize("width", (390, 1280))
def test_every_chart_is_there_and_readable(report, tab, width, dark):
    tab.open(report / "report.html", width, dark)
    charts = tab.evaluate(CHARTS)
    names = [chart["name"] for chart in charts]
    words = "Perplexity against context", "Training loss", "Dot products of position", "Change in dot products", "Attention distance"
    for word in words:
        assert any(word in name for name in names), f"no chart {word} among {names}"
    for chart in charts:
        assert chart["scale"] or chart["marks"] > 0, f"{chart['name']} is empty"
        assert not chart["touching"], f"{chart['name']}: texts overlap: {chart['touching']}"
        assert not chart["outside"], f"{chart['name']}: texts are cut off: {chart['outside']}"
        assert chart["small"] >= 10, f"{chart['name']}: text of {chart['small']} pixels is too small to read"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    paper, ink = tab.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    lightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (paper, ink)]
    assert (lightness[0] < lightness[1]) == dark and abs(lightness[0] - lightness[1]) > 150
    # The caution about positions is above the fold of the results, and its command wraps instead of hiding its end.
    caution, command, table = tab.evaluate(
        "['.caution', '.caution pre', 'table'].map(s => document.querySelector(s)).map(e => ({top: "
        "e.getBoundingClientRect().top, right: e.getBoundingClientRect().right, hidden: e.scrollWidth - e.clientWidth}))"
    )
    hidden = tab.evaluate("[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)")
    assert max(hidden) <= 0, f"tables are wider than the page: {hidden}"
    assert caution["top"] < table["top"] and command["right"] <= width and command["hidden"] <= 0
    assert not tab.errors
    if folder := os.environ.get("TAPETUNE_SHOTS"):  # to look at
        tab.screenshot(report.joinpath(folder, f"report-{width}-{'dark' if dark else 'light'}.png"))


def test_values_follow_the_pointer(report, tab):
    tab.open(report / "report.html", 1280)
    box = tab.evaluate(
        "(b => (b.scrollIntoView({block: 'center'}), b.getBoundingClientRect().toJSON()))"
        "(document.querySelector('#perplexity .wide .band'))"
    )
    tab.point(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    said = tab.evaluate("document.getElementById('tip').innerText")
    first = json.loads((report / "results.json").read_text())["entries"][0]
    assert said.splitlines()[0] == f"context (tokens) {first['perplexity'][0][0]['context']}"
    assert f"base model {first['perplexity'][0][0]['perplexity']:.5g}" in said
    assert not tab.errors


def test_nothing_is_asked_of_a_network(report, tab):
    tab.requests.clear()
    tab.open(report / "report.html", 1280)
    assert tab.requests == [(report / "report.html").absolute().as_uri()]
    text = (report / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) == {"http://www.w3.org/2000/svg"}


def test_charts_are_files_of_their_own(report, tab):
    files = sorted((report / "charts").glob("*.svg"))
    positions = {"positions-tape", "position-changes-tape"}
    assert {file.stem for file in files} == {"perplexity", "loss", "attention-distance"} | positions
    for file in files:
        tab.open(file, 1280)
        assert tab.evaluate("document.querySelectorAll('.line,.cell').length") > 0, f"{file.name} is empty"
        rows = list(csv.reader(file.with_suffix(".csv").open()))
        assert len(rows) > 2 and len({len(row) for row in rows}) == 1, f"{file.stem}.csv is no table"
    assert not tab.errors
