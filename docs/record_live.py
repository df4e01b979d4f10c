"""Records the live view of a run as a picture: record_live.py PROGRAM FILE.svg

It starts a run with a slow rank in tmux, waits until the view names that rank, and draws what is on the screen. `make page`
runs it.
"""

import os
import pathlib
import re
import sys
import tempfile
import unicodedata
from xml.sax.saxutils import escape

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "interop"))
from tmux import Terminal  # noqa: E402

OPTIONS = [
    *["--live", "--nproc-per-node=4", "--model=mlp", "--hidden=256,256", "--dataset=digits", "--loss=cross-entropy"],
    *["--lr=0.1", "--max-epochs=1000", "--log-every=1", "--inject-fault=slow=15ms:rank=2,at=step"],
]
COLUMNS, LINES = 110, 27

# The first 16 colours of a terminal.
COLOURS = [
    *["#0d1117", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4"],
    *["#484f58", "#ffa198", "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#ffffff"],
]
BACKGROUND, BAR, RESULT = "#0d1117", "#161b22", "#e6edf3"
BUTTONS = ["#ff5f56", "#ffbd2e", "#27c93f"]

# Sizes are in pixels. A monospaced letter is 0.6 times as wide as the font is high.
FONT, LINE, MARGIN, TITLE = 14, 20, 20, 40
WIDTH = FONT * 0.6
FAMILY = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Style:
    """The colours of a letter: `None` is the terminal's own."""

    def __init__(self):
        self.text = self.background = None
        self.bold = False

    def apply(self, codes):
        """Reads an escape sequence of ratatui's: colours by number, bold, and their end."""
        match [int(code or 0) for code in codes.split(";")]:
            case [0]:
                self.text = self.background = None
                self.bold = False
            case [1]:
                self.bold = True
            case [38, 5, number]:
                self.text = COLOURS[number]
            case [48, 5, number]:
                self.background = COLOURS[number]
            case [39]:
                self.text = None
            case [49]:
                self.background = None
            case other:
                raise ValueError(f"the view uses the escape sequence {other}, which is not drawn yet")


def runs(line, style):
    """The parts of a line with one style each: their first column, text and style."""
    column = 0
    for codes, text in re.findall(r"(?:\x1b\[([0-9;]*)m)|([^\x1b]+)", line):
        if text:
            yield column, text, (style.text or RESULT, style.background, style.bold)
            column += sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
        else:
            style.apply(codes)


def picture(screen):
    width = round(COLUMNS * WIDTH) + 2 * MARGIN
    height = TITLE + LINE * LINES + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FAMILY}" font-size="{FONT}">',
        "<title>The live view of a run on four ranks: three of them wait for rank 2</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        f'<path d="M0 28V8a8 8 0 0 1 8-8h{width - 16}a8 8 0 0 1 8 8v20z" fill="{BAR}"/>',
    ]
    for index, colour in enumerate(BUTTONS):
        parts.append(f'<circle cx="{MARGIN + 20 * index}" cy="14" r="6" fill="{colour}"/>')
    style = Style()
    for index, line in enumerate(screen.splitlines()):
        for column, text, (colour, background, bold) in runs(line, style):
            x, y = MARGIN + column * WIDTH, TITLE + LINE * index
            length = f'textLength="{len(text) * WIDTH:.1f}"'
            if background:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{len(text) * WIDTH:.1f}" height="{LINE}" fill="{background}"/>'
                )
            if text.strip():
                weight = ' font-weight="bold"' if bold else ""
                parts.append(
                    f'<text x="{x:.1f}" y="{y + FONT}" fill="{colour}"{weight} {length} '
                    f'xml:space="preserve">{escape(text)}</text>'
                )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(program, file):
    with tempfile.TemporaryDirectory() as folder:
        with Terminal(COLUMNS, LINES, folder, ["CUDA_VISIBLE_DEVICES="]) as terminal:
            terminal.start(os.path.abspath(program), *OPTIONS)
            terminal.wait_for(r"the others wait for rank 2")
            terminal.wait_for(r"0 CPU:0 W waits for rank 2")
            terminal.wait_for(r"2 CPU:2 .*[SDFBOAW-]{40}")
            screen = terminal.screen(colours=True)
            terminal.keys("s")
            terminal.exit_code()
    with open(file, "w", encoding="utf-8") as output:
        output.write(picture(screen))


if __name__ == "__main__":
    main(*sys.argv[1:])
