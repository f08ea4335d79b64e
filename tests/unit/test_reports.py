"""Reports: what the page and the Markdown say is what the report says, and nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from loopcore.reports import files, to_html, to_markdown, write
from loopcore.reports.content import content_of
from loopcore.reports.drawing import _svg
from loopcore.reports.values import DASH, duration, moment, number
from loopcore.studies.verdicts import Estimate
from tests.unit.made_up_report import report

Report = dict[str, Any]

VOID = {"meta", "link", "img", "br", "hr", "input"}
EVIL = "<script>alert(1)</script>\" onload='x' | \\ `a` **b** _c_ [d](javascript:e) ](f) &amp; $g$ \x00\x1b\n# h"
NOTHING_ELSE = re.compile(r"\b(?:nan|NaN|None|null|inf|Infinity|Undefined)\b")


class Page(HTMLParser):
    """What a browser makes of a page: its elements with their text, and whether they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.tables: list[list[list[tuple[str, str | None]]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", None))
        elif tag == "data":
            said, _ = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (said, found["value"])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open[-1:] != ["style"] and self.tables and {"td", "th"} & set(self.open):
            said, exact = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (said + data, exact)

    def names(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.elements if attribute in found]

    @property
    def said(self) -> str:
        return " ".join(self.text)


@pytest.fixture(scope="module")
def every_finding() -> Report:
    found = report("inside-the-loop", "smoke", groups=("S3",))
    for finding in found["findings"]:  # two of a finding show what twenty would
        finding["detail"]["plots"] = finding["detail"].get("plots", [])[:2]
    return found


@pytest.fixture(scope="module")
def its_page(every_finding: Report) -> Page:
    return Page(to_html(every_finding))


@pytest.fixture(scope="module")
def its_markdown(every_finding: Report) -> str:
    return to_markdown(every_finding, {picture.name: f"{picture.name}.svg" for picture in content_of(every_finding).pictures})


@pytest.fixture(scope="module")
def law() -> Report:
    return report("budget-law", "smoke", seeds=2)


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Tables as GitHub's dialect reads them: rows of what their cells say."""
    tables: list[list[list[str]]] = []
    cell = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("td_open", "th_open", "td_close", "th_close"):
            cell = token.nesting > 0
        elif cell:
            tables[-1][-1].append("".join(one.content for one in token.children or () if one.type.startswith("text")))
    return tables


# --- the page


def test_the_page_stands_alone(its_page: Page) -> None:
    tags = Counter(tag for tag, _ in its_page.elements)
    assert not {"script", "link", "iframe", "object", "base", "form"} & tags.keys()
    links = [link for name in ("href", "src", "xlink:href", "action", "srcset") for link in its_page.names(name)]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    outside = [style for style in [*its_page.names("style"), its_page.said] if re.search(r"url\((?!#)|@import|https?://", style)]
    assert outside == []
    assert not [name for _, found in its_page.elements for name in found if name.startswith("on")]


def test_every_link_leads_somewhere(its_page: Page) -> None:
    ids = its_page.names("id")
    assert len(ids) == len(set(ids)), [one for one, count in Counter(ids).items() if count > 1]
    targets = {link[1:] for name in ("href", "xlink:href") for link in its_page.names(name) if link.startswith("#")}
    targets |= {
        found
        for style in [*its_page.names("style"), *its_page.names("clip-path")]
        for found in re.findall(r"url\(#([^)]+)\)", style)
    }
    targets |= set(its_page.names("aria-labelledby"))
    assert targets <= set(ids)


def test_the_page_is_for_everybody(its_page: Page) -> None:
    plots = [found for tag, found in its_page.elements if tag == "svg"]
    assert plots
    assert all(found["role"] == "img" and len(found["aria-label"]) > 20 for found in plots)
    tags = Counter(tag for tag, _ in its_page.elements)
    assert tags["caption"] == tags["table"]
    assert all(found["scope"] in ("col", "row") for tag, found in its_page.elements if tag == "th")
    assert ("html", {"lang": "en"}) in its_page.elements
    assert tags["h1"] == 1


def test_the_summary_says_what_the_findings_are(its_page: Page, every_finding: Report) -> None:
    head, *rows = its_page.tables[0]
    assert [said for said, _ in head] == ["Id", "Finding", "Published", "Measured", "Verdict", "Seeds", "Job time"]
    assert len(rows) == len(every_finding["findings"]) == 18
    for row, finding in zip(rows, every_finding["findings"], strict=True):
        (id_, _), (title, _), (published, _), (measured, exact), (verdict, _), (seeds, _), (_, seconds) = row
        assert (id_, title, published) == (finding["id"], finding["title"], finding["published"])
        assert verdict.split(" ", 1)[1] == finding["verdict"], "a verdict is text, not colour alone"
        assert seeds == str(finding["seeds"])
        assert seconds is not None
        assert float(seconds) == finding["seconds"]
        assert measured.endswith(finding["unit"])
        if finding["measured"] is None:
            assert exact is None
        else:
            assert float(exact or "") == finding["measured"]
            assert measured.startswith(str(Estimate(finding["measured"], finding["low"], finding["high"])))


def test_every_run_of_a_finding_is_in_its_table(its_page: Page, every_finding: Report) -> None:
    first = next(finding for finding in every_finding["findings"] if finding["id"] == "1a")
    table = next(table for table in its_page.tables if [said for said, _ in table[0]][:3] == ["cell", "group", "seed"])
    head, *rows = table
    names = [said for said, _ in head]
    assert len(rows) == len(first["detail"]["rows"])
    for row, run in zip(rows, first["detail"]["rows"], strict=True):
        cells = dict(zip(names, row, strict=True))
        assert cells["cell"][0] == run["cell"]
        assert cells["v"][0] == str(Estimate(run["v"], run["low"], run["high"]))
        for name in ("seed", "n", "T", "demand", "v", "frontier .8", "tau p90", "tau mean"):
            assert float(cells[name][1] or "") == run[name]


def test_all_plots_are_in_the_page(its_page: Page, every_finding: Report) -> None:
    count = sum(len(finding["detail"]["plots"]) for finding in every_finding["findings"])
    assert sum(tag == "figure" for tag, _ in its_page.elements) == sum(tag == "svg" for tag, _ in its_page.elements) == count > 20


def test_each_section_tells_its_claim(its_page: Page, every_finding: Report) -> None:
    for finding in every_finding["findings"]:
        for text in (finding["detail"]["statement"], finding["detail"]["rule"], finding["reason"]):
            assert text in its_page.said
    for text in (
        "loop study inside-the-loop --scale smoke",
        "4f2e57d0c1",
        "Linux-6.1-x86_64",
        "2 cores, 8 GiB, no GPU",
        "matplotlib",
    ):
        assert text in its_page.said
    assert "[M] " in its_page.said or "[M]" in "".join(its_page.text)


def test_what_else_a_finding_has_is_told(its_page: Page, every_finding: Report) -> None:
    detail = {finding["id"]: finding["detail"] for finding in every_finding["findings"]}
    remedy = next(table for table in its_page.tables if "speed ratio" in [row[0][0] for row in table])
    told = {row[0][0]: row[1] for row in remedy}
    assert told["reason"][0] == detail["1e"]["remedy"]["reason"]
    assert float(told["measured"][1] or "") == detail["1e"]["remedy"]["measured"]
    assert float(told["speed ratio"][1] or "") == detail["1e"]["remedy"]["speed_ratio"]["value"]
    estimators = next(table for table in its_page.tables if [said for said, _ in table[0]] == ["", "exponent", "R2"])
    assert [row[0][0] for row in estimators[1:]] == list(detail["1a"]["estimators"])
    for row, entry in zip(estimators[1:], detail["1a"]["estimators"].values(), strict=True):
        assert float(row[1][1] or "") == entry["exponent"]
        assert row[1][0] == str(Estimate(entry["exponent"], entry["low"], entry["high"]))


# --- Markdown


def test_images_of_the_markdown_are_there(law: Report, tmp_path: Path) -> None:
    write(law, tmp_path)
    named = re.findall(r"!\[[^\n]*?\]\(([^)]+)\)|<img src=\"([^\"]+)\"", (tmp_path / "report.md").read_text())
    paths = [one or other for one, other in named]
    assert sorted(paths) == sorted(f"plots/{path.name}" for path in (tmp_path / "plots").iterdir())
    assert len(paths) == 5


def test_the_markdown_says_the_same(its_markdown: str, its_page: Page) -> None:
    summary, *tables = markdown_tables(its_markdown)
    of_page = [[said for said, _ in row] for row in its_page.tables[0][1:]]
    assert [[*row[:3], row[5]] for row in summary[1:]] == [[*row[:3], row[4].split(" ", 1)[1]] for row in of_page]
    assert [f"{row[3]}{row[4]}" for row in summary[1:]] == [row[3] for row in of_page]
    assert [row[6:] for row in summary[1:]] == [row[5:] for row in of_page]
    # The other tables stand in the same order; a page leaves out the heading of names and values.
    for of_markdown, of_html in zip(tables, its_page.tables[1:], strict=True):
        lines = [[said for said, _ in row] for row in of_html]
        assert of_markdown in (lines, [["", "value"], *lines])
    assert "[Budget law](#finding-1a)" in its_markdown
    assert '<a id="finding-1a"></a>' in its_markdown


def test_markdown_without_images_tells_the_plots(law: Report) -> None:
    text = to_markdown(law)
    assert "![" not in text
    assert text.count("- Plot: ") == 5
    assert "- Plot: Budget law: v, positions a loop against demand n_train / T_train, both axes logarithmic" in text


# --- what is missing


def test_nothing_measured() -> None:
    empty = report("inside-the-loop", "smoke", measured=False)
    for text in (Page(to_html(empty)).said, to_markdown(empty)):
        assert not NOTHING_ELSE.search(text)
        assert text.count("undecided") >= 18
        assert "its training is not started" in text
        assert DASH in text


@pytest.mark.parametrize(
    "bare",
    [
        {},
        {"findings": []},
        {"findings": None},
        {"findings": [{}]},
        dict.fromkeys(
            ("study", "id", "scale", "title", "asked", "created_at", "provenance", "command", "machine", "cost", "findings")
        ),
        {
            "findings": [
                dict.fromkeys(("id", "title", "measured", "low", "high", "unit", "published", "verdict", "reason", "detail"))
            ]
        },
        {"findings": [{"id": "1a", "detail": dict.fromkeys(("statement", "rule", "rows", "plots", "remedy", "by_group"))}]},
        {"findings": [{"measured": 1.0, "low": None, "high": 2.0, "seeds": None, "seconds": None}]},
        {"findings": [{"measured": float("nan"), "low": float("-inf"), "high": 0.5, "seconds": float("inf")}]},
        {
            "findings": [
                {
                    "detail": {
                        "rows": [
                            {"cell": {"of": [None, {"x": None}]}},
                            {"cell": "a", "v": None, "low": None, "high": None},
                            {"cell": "b", "v": float("nan")},
                            {},
                        ],
                        "plots": [None, {"kind": "xy"}, {"kind": "heat"}, {"kind": "another"}, {}],
                        "nested": {"a": {"b": {"c": [{"d": None}]}}, "e": []},
                        "mixed": [1, None, {"x": 2}],
                    }
                }
            ]
        },
        {
            "cost": {"jobs": None, "succeeded": 3, "seconds": None},
            "provenance": {"packages": None, "commit": None, "gpu": {"name": None}},
        },
    ],
)
def test_any_field_may_be_missing(bare: Report, tmp_path: Path) -> None:
    page, text = to_html(bare), to_markdown(bare)
    assert not NOTHING_ELSE.search(Page(page).said)
    assert not NOTHING_ELSE.search(text)
    assert not any("nan" in value.lower() for value in Page(page).names("value"))
    for path in write(bare, tmp_path):
        assert path.exists()
    json.loads((tmp_path / "report.json").read_text())


def test_one_end_alone_is_no_interval() -> None:
    (section,) = content_of({"findings": [{"measured": 1.0, "low": None, "high": 2.0}]}).sections
    assert section.measured.text == "1"


# --- hostile text


def hostile(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key if key in ("kind", "axis", "style") else key + EVIL * (key == "by_group"): hostile(entry)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [hostile(entry) for entry in value]
    return EVIL + value if isinstance(value, str) and value not in ("xy", "heat", "points", "line", "step", "x", "y") else value


@pytest.fixture(scope="module")
def bad(law: Report) -> Report:
    changed = hostile(copy.deepcopy(law))
    changed["findings"][0]["id"] = "../../evil"
    changed["findings"][1]["id"] = "../../evil"
    return changed


def test_text_is_text_in_the_page(bad: Report) -> None:
    page = Page(to_html(bad))
    assert not [tag for tag, _ in page.elements if tag in ("script", "b:", "img")]
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.said
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", to_html(bad))


def test_text_is_text_in_markdown(bad: Report) -> None:
    text = to_markdown(bad, {"evil-1": "a b(c).svg"})
    tokens = [token for one in MarkdownIt("commonmark").enable("table").parse(text) for token in (one, *(one.children or ()))]
    raw = {token.content for token in tokens if token.type in ("html_inline", "html_block")}
    assert all(re.fullmatch(r"(?:</?details>|<summary>[\w ]+</summary>|</?a[^<>]*>|<img [^<>]*>|\s)*", one) for one in raw)
    links = [str(token.attrs.get("href", token.attrs.get("src"))) for token in tokens if token.type in ("link_open", "image")]
    assert set(links) <= {"#finding-evil", "#finding-evil-2x", "a%20b%28c%29.svg"}
    assert not [token for token in tokens if token.type in ("em_open", "s_open")]
    assert all(len(row) == len(table[0]) for table in markdown_tables(text) for row in table)
    assert "javascript" in "".join(token.content for token in tokens if token.type == "text")
    headings = [token for token in tokens if token.type == "heading_open"]
    assert Counter(token.tag for token in headings) == {"h1": 1, "h2": 4}


def test_a_finding_cannot_name_a_file_elsewhere(bad: Report, tmp_path: Path) -> None:
    written = write(bad, tmp_path / "in")
    assert all(path.resolve().is_relative_to(tmp_path / "in") for path in written)
    assert {path.name for path in (tmp_path / "in" / "plots").iterdir()} == {
        *(f"evil-{number}.svg" for number in range(1, 5)),
        "evil-2x-1.svg",
    }


# --- files


def test_the_same_report_gives_the_same_bytes(law: Report, tmp_path: Path) -> None:
    first = write(law, tmp_path / "a")
    _svg.cache_clear()
    second = write(copy.deepcopy(law), tmp_path / "b")
    assert [path.relative_to(tmp_path / "a") for path in first] == [path.relative_to(tmp_path / "b") for path in second]
    assert len(first) == 5 + 3
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_names_of_ones_own(law: Report, tmp_path: Path) -> None:
    written = write(law, tmp_path, stem="budget-law", page=False)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in written) == [
        "budget-law.json",
        "budget-law.md",
        *(f"budget-law/{name}.svg" for name in ("1a-1", "1a-2", "1a-3", "1a-4", "1b-1")),
    ]
    assert 'src="budget-law/1a-2.svg"' in (tmp_path / "budget-law.md").read_text()
    assert json.loads((tmp_path / "budget-law.json").read_text()) == json.loads(json.dumps(law))


def test_plots_of_an_earlier_report_go_away_and_other_files_stay(law: Report, tmp_path: Path) -> None:
    write(law, tmp_path)
    (tmp_path / "plots" / "mine.svg").write_text("mine")
    fewer = copy.deepcopy(law)
    fewer["findings"][0]["detail"]["plots"] = fewer["findings"][0]["detail"]["plots"][:1]
    write(fewer, tmp_path)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"1a-1.svg", "1b-1.svg", "mine.svg"}


def test_a_file_is_there_as_a_whole_or_not_at_all(law: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"title": "before"}, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        write(law, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert list((tmp_path / "plots").iterdir()) == []


def test_reports_need_no_torch(run_python) -> None:
    done = run_python("import sys\nimport loopcore.reports\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, DASH),
        (True, "yes"),
        (3, "3"),
        (1.0, "1"),
        (0.99951, "0.9995"),
        (12345.6, "12346"),
        (-0.5, "-0.5"),
        (float("nan"), DASH),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.412, "0.412 s"),
        (47.4, "47 s"),
        (119.0, "119 s"),
        (720, "12 min"),
        (12240, "3 h 24 min"),
        (None, DASH),
        (float("inf"), DASH),
    ],
)
def test_durations(seconds: Any, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1764493964.5, "2025-11-30 09:12 UTC"),  # 20422 days and 33164.5 s since 1970
        ("2026-11-30T10:12:44+01:00", "2026-11-30 09:12 UTC"),
        ("2026-11-30T10:12:44", "2026-11-30 10:12"),
        ("yesterday", "yesterday"),
        (1e300, "1e+300"),
        (None, ""),
    ],
)
def test_moments(value: Any, text: str) -> None:
    assert moment(value) == text


def test_a_study_that_still_goes_on_says_so() -> None:
    running = {"created_at": 1764493964.5, "started_at": 1764497564.5, "finished_at": None, "cancelled_at": None}
    cost = {"jobs": 9, "succeeded": 4, "queued": 5, "failed": 0, "seconds": 720.0}
    facts = dict(content_of(running | {"cost": cost}).facts)
    assert facts["Started again"] == "2025-11-30 10:12 UTC"
    assert facts["Finished"] == "not yet: this is what there is so far"
    assert facts["Jobs"] == "9 (4 succeeded, 5 queued)"
    assert facts["Job time"] == "12 min"
    ended = dict(content_of(running | {"started_at": 1764493964.5, "finished_at": 1764497564.5}).facts)
    assert ended["Finished"] == "2025-11-30 10:12 UTC"
    assert "Started again" not in ended
    assert "Finished" not in dict(content_of(running | {"cancelled_at": 1764497564.5}).facts)
