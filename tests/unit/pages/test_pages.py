"""Pages need nothing else, escape what they show, and their figures follow light and dark."""

import re

from hvd_ray.pages.document import bullets, code, document, paragraph, section, table, tiles
from hvd_ray.pages.plots import INK, inline_svg, legend, marks, new_figure

EVIL = '<script>alert("x")</script>'


def test_text_is_escaped_everywhere():
    page = document(
        EVIL,
        section(EVIL, table([EVIL], [[EVIL]]), bullets([EVIL]), code(EVIL), caption=EVIL),
        tiles([(EVIL, EVIL)]),
        lead=EVIL,
    )
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 11


def test_words_between_backticks_are_code():
    line = f"type `hvd {EVIL}`, or ` alone"
    for shown in (bullets([line]), paragraph(line), section("s", caption=line)):
        assert "<code>hvd &lt;script&gt;" in shown.html
        assert shown.html.count("<code>") == 1


def test_a_page_fetches_nothing_and_has_dark_and_print_styles():
    figure, (ax,) = new_figure(3, 2)
    ax.plot([1, 2], [3, 4], color=INK, label="a < b")
    legend(ax)
    page = document("t", section("s", inline_svg(figure, "a & b")))
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_intervals_of_wide_tables_stand_small_below_their_figures():
    cells = ["a", "1.24 (0.76-2.01)", "1.10", "0.25 (few)", "-", "x (y)", "2"]
    wide = table(["n", "hvd_cost", *"cdefg"], [cells]).html
    assert "1.24<small> (0.76-2.01)</small>" in wide
    assert "0.25<small> (few)</small>" in wide
    assert "<td class=num>x (y)</td>" in wide
    assert "hvd_<wbr>cost" in wide
    assert "<small>" not in table(["n", "c"], [cells[:2]]).html


def test_no_two_of_many_names_look_alike():
    names = [f"system {number}" for number in range(16)]
    looks = marks(names)
    assert list(looks) == names
    assert len(set(looks.values())) == len(names)
    assert len({colour for colour, _ in list(looks.values())[:10]}) == 10


def test_figures_take_the_page_s_colours():
    figure, (ax,) = new_figure(3, 2)
    ax.plot([1, 2], [3, 4])
    markup = inline_svg(figure, "x").html
    assert markup.startswith('<svg role="img" aria-label="x"')
    assert INK not in markup
    assert "var(--ink)" in markup
    assert "var(--grid)" in markup
