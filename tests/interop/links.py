"""Checks the links within the repository: links.py [BOOK]

In each Markdown file of the repository a link must lead to a file that exists, and its anchor to a heading there. A
picture must be one of its kind: git can leave a file with a path in the place of a link. BOOK is
the folder of the book that mdBook has built: each link in its pages must lead to a file and an anchor of the book. Links to
other sites are not followed.
"""

import html.parser
import pathlib
import re
import subprocess
import sys
import urllib.parse

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# The first bytes of a picture, by the end of its name.
PICTURES = {".svg": b"<svg ", ".png": b"\x89PNG\r\n\x1a\n"}
OTHER_SITES = ("http://", "https://", "mailto:", "data:", "javascript:")


def slug(heading):
    """The anchor of a heading, as GitHub and mdBook derive it."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    kept = (c for c in heading if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def without_code(text):
    text = re.sub(r"^[ ]*```.*?^[ ]*```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(page):
    """The anchors of the headings of a Markdown file."""
    found = []
    text = re.sub(r"^[ ]*```.*?^[ ]*```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        anchor = slug(heading)
        again = sum(it == anchor or re.fullmatch(re.escape(anchor) + r"-\d+", it) is not None for it in found)
        found.append(f"{anchor}-{again}" if again else anchor)
    return found


def links(page):
    text = without_code(page.read_text())
    yield from re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", text)
    yield from re.findall(r"(?:href|src)=\"([^\"]+)\"", text)


def is_picture_of_another_kind(path):
    begins = PICTURES.get(path.suffix)
    return begins is not None and path.is_file() and not path.read_bytes().startswith(begins)


def markdown_files():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return [REPOSITORY / name for name in sorted(set(listed.stdout.split())) if (REPOSITORY / name).exists()]


def check_markdown():
    wrong, count = [], 0
    for page in markdown_files():
        for link in links(page):
            if link.startswith(OTHER_SITES):
                continue
            count += 1
            path, _, anchor = urllib.parse.unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(REPOSITORY)}: {link}"
            if not target.exists():
                wrong.append(f"{where}: there is no such file")
            elif is_picture_of_another_kind(target):
                wrong.append(f"{where}: this is no {target.suffix}")
            elif not target.is_relative_to(REPOSITORY):
                wrong.append(f"{where}: outside of the repository")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                wrong.append(f"{where}: no heading has this anchor")
    book = REPOSITORY / "docs/src"
    listed = {(book / link).resolve() for link in links(book / "SUMMARY.md")}
    for page in book.rglob("*.md"):
        if page.name != "SUMMARY.md" and page.resolve() not in listed:
            wrong.append(f"{page.relative_to(REPOSITORY)} is not in SUMMARY.md")
    return wrong, count


class Page(html.parser.HTMLParser):
    """The links and the anchors of a page of the book."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ["href", "src"] and value:
                self.links.append(value)


def check_book(folder):
    wrong, count = [], 0
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        # 404.html is served at any address; print.html and toc.html repeat the other pages.
        if path.name in ["404.html", "print.html", "toc.html"]:
            continue
        for link in page.links:
            if link.startswith(OTHER_SITES):
                continue
            count += 1
            name, _, anchor = urllib.parse.unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists():
                wrong.append(f"{path.name}: {link}: there is no such file in the book")
            elif is_picture_of_another_kind(target):
                wrong.append(f"{path.name}: {link}: this is no {target.suffix}")
            elif anchor and target in pages and anchor not in pages[target].ids:
                wrong.append(f"{path.name}: {link}: no element has this anchor")
    return wrong, count


def main(arguments):
    wrong, count = check_markdown()
    for folder in arguments:
        more, of_book = check_book(pathlib.Path(folder))
        wrong, count = wrong + more, count + of_book
    if wrong:
        sys.exit("links.py:\n" + "\n".join(wrong))
    if count == 0:
        sys.exit("links.py: there are no links at all")
    print(f"links: {count} lead somewhere")


if __name__ == "__main__":
    main(sys.argv[1:])
