"""Pictures of the page of a plan as a browser shows it, at three widths: of a phone, a tablet and a desktop.

    python tools/page_pictures.py plan.html pictures        # pictures/plan-390.png, plan-820.png, plan-1280.png

It needs Chromium or Chrome, and ends with an error where the page is wider than a window, so that one would have to
scroll sideways.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from jsonargparse import auto_cli
from PIL import Image

WIDTHS = (390, 820, 1280)
_NARROWEST = 500
"""Pixels of the narrowest window that the browser makes; in a frame a page may be narrower."""
_TALLEST = 16_000
"""Pixels of the tallest picture that it makes."""
_FRAME = """<!doctype html><title></title><style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<script>onmessage = (said) => document.title = said.data.join()</script>
<iframe src="page.html" width="{width}" height="{height}"></iframe>
"""
_SAID = """<script>
const root = document.documentElement
parent.postMessage([innerWidth, root.scrollWidth, root.scrollHeight], "*")
</script>"""
"""At the end of the framed page, which tells its frame how wide and how tall it is."""


def run(browser: str, *arguments: str) -> str:
    """What the browser prints, which makes no window."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000")
    done = subprocess.run([browser, *options, *arguments], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{browser} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def picture(browser: str, page: str, width: int, target: Path) -> tuple[int, int]:
    """Draw the whole page in a frame of this width; the width that it takes, and its height."""
    with tempfile.TemporaryDirectory() as folder:
        framed, frame = Path(folder) / "page.html", Path(folder) / "frame.html"
        framed.write_text(page.replace("</body>", f"{_SAID}</body>"), encoding="utf-8")
        frame.write_text(_FRAME.format(width=width, height=800))
        shown = run(browser, "--dump-dom", f"--window-size={max(width, _NARROWEST)},800", frame.as_uri())
        said = re.search(r"<title>(\d+),(\d+),(\d+)</title>", shown)
        if said is None or int(said[1]) != width:
            raise SystemExit(f"{browser} has not shown the page {width} pixels wide:\n{shown[:2000]}")
        height = min(int(said[3]), _TALLEST)
        frame.write_text(_FRAME.format(width=width, height=height))
        window = f"--window-size={max(width, _NARROWEST)},{height}"
        run(browser, f"--screenshot={target.absolute()}", window, frame.as_uri())
    with Image.open(target) as drawn:
        drawn.crop((0, 0, width, height)).save(target)
    return int(said[2]), height


def main(page: Path, folder: Path, browser: str | None = None) -> None:
    """Draw the page at each width.

    Args:
        page: of ``lightning-autotp plan --html``.
        folder: where the pictures go.
        browser: the command of Chromium or Chrome; one that is found by default.
    """
    known = ("chromium", "chromium-browser", "google-chrome", "chrome")
    command = browser or next(filter(None, map(shutil.which, known)), None)
    if command is None:
        raise SystemExit(f"none of {', '.join(known)} is installed: name a browser with --browser")
    folder.mkdir(parents=True, exist_ok=True)
    too_wide = []
    for width in WIDTHS:
        target = folder / f"{page.stem}-{width}.png"
        taken, height = picture(command, page.read_text(encoding="utf-8"), width, target)
        print(f"{target}: {taken} x {height}", flush=True)
        too_wide += [f"{taken} pixels in {width}"] * (taken > width)
    if too_wide:
        raise SystemExit(f"{page} is wider than its window: {', '.join(too_wide)}")


if __name__ == "__main__":
    auto_cli(main)
