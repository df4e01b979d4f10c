"""What the parts have found, and the two files that say so: gpu-results.json and gpu-results.md."""

import json


class LeftOut(Exception):
    """A part cannot run here, and that is no failure."""


class Findings:
    """What one part has found so far, and what has failed in it. `changed` is called after each change."""

    def __init__(self, changed=lambda: None):
        self.changed = changed
        self.facts, self.tables, self.output = {}, {}, ""
        self.failures, self.left_out, self.seconds = [], None, None

    def fact(self, name, value):
        print(f"    {name}: {shown(value)}", flush=True)
        self.facts[name] = value
        self.changed()

    def row(self, row, table=""):
        print(f"    {json.dumps(row)}", flush=True)
        self.tables.setdefault(table, []).append(row)
        self.changed()

    def keep_output(self, text):
        self.output += text
        self.changed()

    def fail(self, why):
        self.failures.append(why)
        self.changed()

    def attempt(self, name, action):
        """Returns what `action` returns; None if it fails, and then the part goes on, unless its time is over."""
        try:
            return action()
        except (LeftOut, TimeoutError):
            raise
        except Exception as error:
            self.fail(f"{name}: {reason(error)}")
            return None

    def problem(self):
        """Returns why the part is not well; None if it is."""
        if self.failures:
            return "; ".join(self.failures)
        return None if self.seconds is not None else "it was cut off"

    def as_json(self):
        found = {"ok": self.problem() is None, "seconds": self.seconds}
        more = {"left_out": self.left_out, "problem": self.problem(), "output": self.output}
        more |= {"facts": self.facts, "tables": self.tables}
        return found | {name: value for name, value in more.items() if value}

    def as_markdown(self):
        text = f"- **left out**: {self.left_out}\n" if self.left_out else ""
        if problem := self.problem():
            text += f"- **failed**: {problem}\n"
        text += "".join(f"- {name}: {shown(value)}\n" for name, value in self.facts.items())
        blocks = [text] if text else []
        blocks += [(f"{name}:\n\n" if name else "") + table(rows) for name, rows in self.tables.items()]
        if self.output:
            blocks.append(f"```text\n{self.output.rstrip()}\n```\n")
        return "\n".join(blocks)


def reason(error):
    """Returns what an error says, with its type where the text alone may not say enough."""
    return str(error) if type(error) in [RuntimeError, TimeoutError] else f"{type(error).__name__}: {error}"


def shown(value):
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return "-" if value is None else str(value).replace("|", "/").replace("\n", " ")


def table(rows):
    """Rows as Markdown. What a row lacks is shown as a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(shown(row.get(name)) for name in names) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def page(results, simulated):
    """All parts as Markdown, by their names."""
    where = "a simulated GPU: no figure here is a measurement" if simulated else "a GPU"
    text = f"# ddp-mp on {where}\n"
    for name, findings in results.items():
        text += f"\n## {name[0].upper()}{name[1:]}\n\n{findings.as_markdown()}"
    return text


def write(folder, results, simulated):
    """Writes both files, each whole at every moment: the machine may end now."""
    found = json.dumps({name: findings.as_json() for name, findings in results.items()}, indent=1)
    for name, text in {"gpu-results.md": page(results, simulated), "gpu-results.json": found + "\n"}.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text)
        partial.rename(folder / name)
