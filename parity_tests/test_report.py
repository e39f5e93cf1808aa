"""The report: what it says of runs that agree and of runs that do not, and that it stands alone."""

import base64
import dataclasses
import html
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from parity_tests.cases import CASES, SCHEDULE_CASES
from parity_tests.report import Summary, format_table, write_report
from parity_tests.schedule_parity import compare_schedule
from parity_tests.tolerances import TIERS, TRAINING_FLOAT64
from parity_tests.training import ModelShape, TrainingResult, runs
from parity_tests.trajectory import run_case

SECTIONS = ("cases", "growth", "schedules", "training", "newton-schulz", "routing")
HOSTILE = "<script>alert('why')</script> & \"quoted\""
STEPS = 4
RUN = (("float64", "free"), ("bfloat16", "forced"))


def case_named(name, rows=CASES):
    return next(row for row in rows if row.id == name)


class OtherMomentum:
    """jax with another momentum than the case asks for."""

    name = "jax"

    def __init__(self, backend):
        self.backend = backend

    def start(self, case, precision):
        kwargs = {**case.kwargs, "muon_momentum": 0.951}
        return self.backend.start(dataclasses.replace(case, kwargs=kwargs), precision)


def training_result(dtype="float64", final_distance=1e-14):
    """A training that was never run: 20 steps, three snapshots, two groups."""
    rng = np.random.default_rng(0)
    loss = 4.0 - 0.05 * np.arange(20.0)
    rates = np.linspace(1e-3, 1e-4, 20)[:, None] * [1.0, 2.0]
    distances = np.array([[0.0, 0.0], [1e-15, 2e-15], [0.5 * final_distance, final_distance]])
    return TrainingResult(
        run=runs(20)[0],
        dtype=dtype,
        shape=ModelShape(vocab=11),
        devices={"torch": "cpu", "jax": "cpu"},
        losses={"torch": loss, "jax": loss + 1e-15},
        loss_difference=np.full(20, 1e-15),
        learning_rates={"torch": rates, "jax": rates},
        snapshot_steps=np.array([0, 10, 20]),
        names=("embed.weight", "lm_head.weight"),
        tensor_distances=distances,
        worst_distance=distances.max(axis=1),
        total_distance=distances.max(axis=1),
        routing={"torch": "name", "jax": "name"},
        momentum={"blocks.0.attn.q.weight": rng.standard_normal((8, 12))},
        seconds_per_step={"torch": 0.01, "jax": 0.02},
        wall_seconds=1.0,
    )


@pytest.fixture(scope="module")
def summary(backends):
    case = dataclasses.replace(case_named("adamw-defaults"), why=HOSTILE)
    return Summary(
        title="parity",
        command="python -m parity_tests -k 'muon and not hard' > log",
        environment={"torch": "2.9 <b>"},
        cases=[run_case(case, TIERS[name], mode, backends, STEPS) for name, mode in RUN],
        schedules=[compare_schedule(case_named("wsd-cosine", SCHEDULE_CASES))],
        trainings=[training_result(), training_result("float32", 1e-3)],
        routing={"torch": "name  role\nup    matrix", "jax": "name  role\nup    matrix <jax>"},
        seconds=3.2,
    )


@pytest.fixture(scope="module")
def failing(summary, backends):
    sides = {**backends, "jax": OtherMomentum(backends["jax"])}
    case = run_case(case_named("muon-shapes"), TIERS["float64"], "free", sides, STEPS)
    schedule = summary.schedules[0]
    values = {**schedule.values, "jax": 1.01 * schedule.values["jax"]}
    schedule = dataclasses.replace(schedule, values=values, errors={**schedule.errors, "jax": 0.01})
    trainings = [training_result(final_distance=1e-3), training_result("float32", np.nan)]
    return dataclasses.replace(summary, cases=[summary.cases[0], case], schedules=[schedule], trainings=trainings)


@pytest.fixture(scope="module")
def text(summary, tmp_path_factory):
    return written(summary, tmp_path_factory.mktemp("report"))


def written(summary, folder):
    path = folder / "deep" / "index.html"
    write_report(path, summary)
    assert [file.name for file in path.parent.iterdir()] == ["index.html"]
    return path.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags that are open, ids, and everything that a browser would fetch."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.fetched = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self.fetched += [attributes[key] for key in ("src", "href", "srcset", "data") if key in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def images(text):
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)]


def test_page_stands_alone_and_has_all_sections(text):
    page = Page(text)
    assert not page.open
    assert page.tags.count("html") == 1
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert page.ids == list(SECTIONS)
    assert all(url.startswith(("data:image/svg+xml;base64,", "#")) for url in page.fetched)
    assert {url[1:] for url in page.fetched if url[0] == "#"} <= set(page.ids)
    pictures = images(text)
    assert len(pictures) == 1 + 1 + 1 + 2 + 1  # growth, schedule, rates, trainings, Newton-Schulz
    assert "http" not in re.sub(r"base64,[^\"]+", "", text)
    for part in (text, *pictures):
        assert not re.search(r"url\((?!#)|@import|(?:href|src)=\"(?!#|data:)", part)
    assert len(text) < 3e6


def test_page_says_what_was_run_and_found(summary, text):
    assert summary.passed
    assert "All equal" in text
    assert "adamw-defaults" in text
    assert summary.command in html.unescape(text)
    assert "up    matrix" in text
    assert "muonwithauxadamw + wsd" in text
    for raw in (HOSTILE, "<script", "2.9 <b>", "<jax>", "> log"):
        assert raw not in text
    assert HOSTILE in html.unescape(text)
    growth = images(text)[0]
    assert "float64, free-running" in growth
    assert "bfloat16, forced-running" in growth
    assert "float32" not in growth


def test_singular_values_are_shown_in_every_dtype(text):
    picture = images(text)[-1]
    for words in ("8x12", "float64", "float32", "bfloat16", "after, torch", "after, jax", "0.6818"):
        assert words in picture


def test_terminal_table(summary):
    table = format_table(summary)
    lines = table.splitlines()
    assert table.isascii()
    assert max(map(len, lines)) <= 110
    assert lines[-1].startswith("ALL EQUAL: 2 runs of 1 cases, 1 schedules, 2 trainings")
    (row,) = (line.split() for line in lines if line.startswith("adamw-defaults"))
    assert row[2:4] == ["-", "-"]
    assert row[-1] == "ok"
    assert 0 < float(row[1]) < 1e-12
    assert [line.split()[-1] for line in lines if line.startswith("muonwithauxadamw")] == ["ok", "info"]
    assert "FAIL" not in table


def test_table_fits_the_terminal_whatever_fails(failing):
    longest = max((case.id for case in CASES), key=len)
    case = failing.cases[-1]
    cases = [
        dataclasses.replace(case, case=dataclasses.replace(case.case, id=longest), tier=tier.name, mode=mode)
        for tier in TIERS.values()
        for mode in tier.modes
    ]
    table = format_table(dataclasses.replace(failing, cases=cases)).split("\n\n")[0]
    assert table.count("FAIL") == 5
    assert max(map(len, table.splitlines())) <= 110


def test_every_mismatch_is_shown_in_full(failing, tmp_path):
    text, table = written(failing, tmp_path), format_table(failing)
    messages = failing.failures
    assert len(messages) == 4
    assert messages[0] == str(failing.cases[-1].divergence)
    assert messages[1] == failing.schedules[0].failure()
    for message in messages:
        assert message in table
        assert message in html.unescape(text)
    assert "muon-shapes (float64, free-running): jax and reference part" in table
    assert f"allowed {TRAINING_FLOAT64.value:.3g}" in messages[2]
    assert "tensor lm_head.weight: distance 0.001" in messages[2]
    assert "nan at the end, allowed 0.0001" in messages[3]
    assert not failing.passed
    assert "4 mismatches" in text
    assert "4 MISMATCHES: " in table
    assert Page(text).ids == ["failures", *SECTIONS]
    assert "above its tolerance" in images(text)[0]


@pytest.mark.parametrize("part", ["cases", "schedules", "trainings"])
def test_one_bad_part_fails_the_whole(summary, failing, part):
    assert summary.passed
    assert not dataclasses.replace(summary, **{part: getattr(failing, part)}).passed


def test_float32_training_is_shown_and_not_judged(summary):
    far = dataclasses.replace(summary, trainings=[training_result("float32", 0.5)])
    assert far.passed
    assert not dataclasses.replace(summary, trainings=[training_result("float64", 0.5)]).passed


@pytest.mark.parametrize("kept", [(), ("cases",), ("schedules",), ("trainings",), ("routing",)], ids="-".join)
def test_parts_that_were_not_run(summary, kept, tmp_path):
    empty = {"cases": [], "schedules": [], "trainings": [], "routing": {}}
    partial = dataclasses.replace(summary, **{name: value for name, value in empty.items() if name not in kept})
    text, table = written(partial, tmp_path), format_table(partial)
    assert Page(text).ids == list(SECTIONS)
    assert ("No case was run." in text) == ("cases" not in kept)
    assert ("No schedule was run." in text) == ("schedules" not in kept)
    assert ("No training was run." in text) == ("trainings" not in kept)
    assert ("No routing table was made." in text) == ("routing" not in kept)
    compared = bool({"cases", "schedules", "trainings"} & set(kept))
    assert partial.passed == compared
    assert ("Nothing was compared" in text) != compared
    assert ("NOTHING WAS COMPARED" in table) != compared


def test_a_report_that_cannot_be_made_leaves_the_old_one(summary, tmp_path):
    path = tmp_path / "index.html"
    write_report(path, dataclasses.replace(summary, cases=[], trainings=[]))
    before = path.read_bytes()
    broken = dataclasses.replace(training_result(), losses={})
    with pytest.raises(KeyError):
        write_report(path, dataclasses.replace(summary, trainings=[broken]))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_values_that_are_not_finite_can_be_drawn(summary, tmp_path):
    t = training_result()
    momentum = {name: np.full_like(G, np.nan) for name, G in t.momentum.items()}
    t = dataclasses.replace(t, losses={"torch": t.losses["torch"], "jax": np.full(20, np.nan)}, momentum=momentum)
    case = summary.cases[0]
    errors = {key: np.full_like(values, [np.nan, np.inf, 0.0, 1e290]) for key, values in case.errors.items()}
    partial = dataclasses.replace(summary, cases=[dataclasses.replace(case, errors=errors)], trainings=[t])
    assert "No training with Muon was run." in written(partial, tmp_path)
    assert "inf" in format_table(partial)
