"""Charts show values at the right place, use the page's colours and are safe in a page."""

import re

import pytest
from report_page import Page

from collapipe.run_report.charts import Kind, Row, Series, cells, lines, rows

EVIL = "<script>$x$ 漢 \ud83d\n\x1b\"'& 0.123456 #000001"
BLUE, RED = Kind("blue", "c0"), Kind("", "c1", 0.5, 0.5, 0.5)


def _series(*points: tuple[float, float], joined: bool = True) -> list[Series]:
    return [Series("a series", 0, points, joined)]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 10], "0 2 4 6 8 10"),
        ([0.2, 0.9], "0.2 0.4 0.6 0.8 1.0"),
        ([0.0], "−0.05 0.00 0.05"),
        ([1e-12, 3e-12], "1.0 1.5 2.0 2.5 3.0 1e−12"),
        ([0, 4.2e6], "0 1M 2M 3M 4M 5M"),
        ([-3, 3], "−4 −2 0 2 4"),
        ([0, 9_000], "0 2k 4k 6k 8k 10k"),
        ([3840, 57_600], "0 20k 40k 60k"),
        ([1e37, 3e38], "0 1 2 3 1e38"),
    ],
)
def test_tick_labels_are_round_and_short(values: list[float], ticks: str) -> None:
    points = [(float(number), value) for number, value in enumerate(values, 1)]
    assert f" {ticks} " in Page(lines("a title", "samples", "", _series(*points))).text


def test_the_first_and_the_last_label_of_an_axis_fit_in_the_picture() -> None:
    drawn = [lines("a title", "s", "", _series((0.00012, 1), (0.00025, 3)))]
    drawn.append(rows("a title", "s", [Row("a", [(BLUE, (0, 0.00012))])]))
    for each in drawn:
        labels = re.findall(r'middle" x="([^"]*)" y="[^"]*">([\d.]+)<', each)
        for x, text in labels[0], labels[-1]:
            half = 7.1 * len(text) / 2  # of a digit's width in DejaVu Sans, at 12 px
            assert len(text) == 7 and half <= float(x) <= 420 - half


def test_a_curve_is_named_if_others_have_no_points() -> None:
    both = [*_series((1, 4)), Series("empty", 1, [])]
    assert "<li>" in lines("a", "s", "", both) and "<li>" not in lines("a", "s", "", both[:1])


def test_an_axis_begins_at_0_if_requested() -> None:
    drawn = (lines("a", "s", "", _series((1, 4), (2, 4.8)), zero=zero) for zero in (True, False))
    assert [" 0 1 2 3 4 5 " in Page(each).text for each in drawn] == [True, False]
    assert "−" not in Page(lines("a", "s", "", _series((1, 0), (2, 0)), zero=True)).text


@pytest.mark.parametrize(
    ("rounds", "ticks"), [(1, "0 1"), (3, "0 1 2 3"), (200, "0 50 100 150 200")]
)
def test_tick_labels_of_rounds_are_integers(rounds: int, ticks: str) -> None:
    points = [(float(number), 0.5) for number in range(1, rounds + 1)]
    assert f" {ticks} " in Page(lines("a title", "round", "", _series(*points))).text
    one = Page(cells("a title", [Row("unit", [(BLUE, (rounds, rounds))])], [rounds]))
    assert f" {rounds} unit round " in one.text.replace("  ", " ")


def test_a_line_passes_through_its_points() -> None:
    drawn = lines("a title", "samples", "", _series((0, 0), (5, 2), (10, 10)))
    (path,) = re.findall(r'd="([^"]*)" style="fill: none; stroke: var\(--c0\)', drawn)
    x0, y0, x1, y1, x2, y2 = map(float, re.findall(r"[\d.]+", path))
    assert ((x1 - x0) / (x2 - x0), (y1 - y0) / (y2 - y0)) == pytest.approx((0.5, 0.2), abs=1e-3)
    line = 'style="fill: none; stroke: var(--c0)'
    alone = lines("a title", "samples", "", _series((0, 0), (5, 2), joined=False))
    assert (line in drawn, line in alone, "fill: var(--c0)" in alone) == (True, False, True)


def test_boxes_are_as_long_as_their_values() -> None:
    drawn = rows(
        "a title", "s", [Row("a", [(BLUE, (0, 5)), (RED, (5, 10))]), Row("b", [(BLUE, (2, 4))])]
    )
    blue, red = (re.findall(rf'd="([^"]*)" style="fill: var\(--c{n}\)', drawn)[0] for n in (0, 1))
    (first, second), (other,) = _rectangles(blue), _rectangles(red)
    length, height = first[2] - first[0], first[3] - first[1]
    for box, share, of_row in ((first, 1, 1), (second, 0.4, 1), (other, 1, 0.5)):
        assert box[2] - box[0] == pytest.approx(share * length, abs=0.2)
        assert box[3] - box[1] == pytest.approx(of_row * height, abs=0.2)
    assert other[::3] == pytest.approx(first[2:], abs=0.2)  # to the right, in the lower half
    assert second[0] == pytest.approx(first[0] + 0.4 * length, abs=0.2)
    assert "opacity: 0.5" in drawn and Page(drawn).tags("li") == [{}]  # only one kind has a name


def _rectangles(path: str) -> list[tuple[float, ...]]:
    """Left, top, right and bottom of each rectangle of a path."""
    found = re.findall(r"M(\S+) (\S+)H([\d.]+)V([\d.]+)H", path)
    return [tuple(map(float, each)) for each in found]


@pytest.mark.filterwarnings("error")
def test_any_text_is_escaped_and_any_chart_is_drawn() -> None:
    series = [Series(EVIL, n, [(1.0, 1.0)], band=[(1.0, 0.0, 2.0)]) for n in range(17)]
    page = Page(lines(EVIL, EVIL, EVIL, series))
    shown = "<script>$x$ 漢 \"'& 0.123456 #000001"
    assert page.texts.count(shown) == 2 and page.texts.count(EVIL) == 1
    assert not page.tags("script")
    assert shown in Page(rows("a title", "s", [Row(EVIL, [], "told")], wide=True)).texts
    long = "x" * 1_000_000
    row = Row(long, [], caption=long)
    for drawn in (lines("a title", long, long, []), rows("a title", long, [row])):
        assert len(drawn) < 3_000
    for empty in (lines("a title", "s", "", [], zero=True), rows("a title", "s", [])):
        assert Page(empty).tags("svg")


def test_equal_charts_have_equal_markup_and_use_the_pages_colours() -> None:
    drawn = [lines(title, "s", "", _series((0, 0), (1, 1))) for title in ("a", "a", "b")]
    assert drawn[0] == drawn[1]
    assert not set(re.findall(' id="[^"]*"', drawn[0])) & set(re.findall(' id="[^"]*"', drawn[2]))
    assert "#0" not in drawn[0] and set(re.findall(r"var\(--\w+\)", drawn[0])) == {
        f"var(--{name})" for name in ("c0", "ground", "rule", "quiet")
    }
