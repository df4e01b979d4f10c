"""Records a terminal session of the program as a picture: record.py PROGRAM FILE.svg

It runs the commands below and writes what they print, a line of text each. `make page` runs it; a test compares
the picture with what the program prints today.
"""

import os
import subprocess
import sys
from xml.sax.saxutils import escape

COMMANDS = [
    "ddp-mp --max-epochs=2 --batch-size=32 --nproc-per-node=4",
    "ddp-mp --nproc-per-node=3 --inject-fault=error:rank=1,at=step,step=40",
]

# Sizes are in pixels. A monospaced letter is 0.6 times as wide as the font is high.
FONT, LINE, MARGIN, TITLE = 14, 20, 20, 40
FAMILY = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BACKGROUND, BAR, RESULT, NOTE, PROMPT = "#0d1117", "#161b22", "#e6edf3", "#8b949e", "#7ee787"
BUTTONS = ["#ff5f56", "#ffbd2e", "#27c93f"]


def session(program):
    """The lines on the terminal, each with its colour."""
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    for command in COMMANDS:
        yield f"$ {command}", PROMPT
        ended = subprocess.run(
            [program, *command.split()[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        for line in ended.stdout.splitlines():
            # What is on stderr begins with the program's name.
            yield line, NOTE if line.startswith("ddp-mp: ") else RESULT
    yield "$ echo $?", PROMPT
    yield str(ended.returncode), RESULT


def picture(lines):
    width = round(max(len(text) for text, _ in lines) * FONT * 0.6) + 2 * MARGIN
    height = TITLE + LINE * len(lines) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FAMILY}" font-size="{FONT}">',
        "<title>A terminal: ddp-mp trains on four ranks; then a rank fails and is named</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        f'<path d="M0 28V8a8 8 0 0 1 8-8h{width - 16}a8 8 0 0 1 8 8v20z" fill="{BAR}"/>',
    ]
    for index, colour in enumerate(BUTTONS):
        parts.append(f'<circle cx="{MARGIN + 20 * index}" cy="14" r="6" fill="{colour}"/>')
    for index, (text, colour) in enumerate(lines):
        y = TITLE + LINE * index + FONT
        parts.append(f'<text x="{MARGIN}" y="{y}" fill="{colour}" xml:space="preserve">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(program, file):
    lines = list(session(os.path.abspath(program)))
    with open(file, "w", encoding="utf-8") as output:
        output.write(picture(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
