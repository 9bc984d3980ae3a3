"""The pictures in docs/screens: those that the documents show, whole, small and of one width."""

import re
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCREENS = ROOT / "docs" / "screens"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WIDTH, MOST_BYTES = 1200, 200_000

SHOWN = sorted(
    {
        (page.parent / place).resolve()
        for page in PAGES
        for place in re.findall(r"!\[[^\]]+\]\(([^)]*screens/[^)]+)\)", page.read_text("utf-8"))
    }
)


def test_every_picture_is_shown_somewhere() -> None:
    assert sorted(SCREENS.glob("*")) == SHOWN


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_a_picture_is_whole_and_small(path: Path) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">I", data[16:20]) == (WIDTH,)
    assert len(data) <= MOST_BYTES


def test_the_script_takes_them_all() -> None:
    script = (ROOT / "scripts" / "screens.py").read_text(encoding="utf-8")
    assert all(f'"{path.stem}"' in script for path in SHOWN)
