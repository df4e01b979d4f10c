"""Opens the page of `--report` in Chromium, tries all of its controls, and compares what it shows with its data.

report_page.py PROGRAM    of runs that it makes
report_page.py PAGE.html  of a page that is there
"""

import collections
import json
import pathlib
import re
import sys
import tempfile

from browser import Browser
from checks import check, run

RUNS = {  # and their exit codes
    "demo": [0, "--max-epochs=2", "--batch-size=32", "--nproc-per-node=2"],
    "digits": [
        *[0, "--model=mlp", "--hidden=256,256", "--dataset=digits", "--loss=cross-entropy", "--val-fraction=0.2"],
        *["--bucket-cap-mb=0.1", "--nproc-per-node=4", "--max-epochs=3", "--log-every=5"],
    ],
    "alone": [0, "--max-epochs=1", "--batch-size=64", "--nproc-per-node=1"],
    "processes": [0, "--spawn=processes", "--nproc-per-node=3", "--num-samples=1000", "--max-epochs=3"],
    "failed": [1, "--nproc-per-node=3", "--inject-fault=error:rank=1,at=step,step=40"],
    "stopped": [0, "--nproc-per-node=2", "--max-steps=3"],
}
SCREENS = {"desk": (1280, 800, False), "phone": (390, 844, True)}
SECTIONS = ["Verdict", "What ran", "Curves", "Timeline", "Samples", "Bucket plan", "Bytes", "Replicas", "Options"]
COLLECTIVES = {
    *["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"],
    *["all_to_all", "send", "recv", "new_group", "barrier", "synchronize"],
}
UNITS = {"ns": 1e-3, "µs": 1, "ms": 1e3, "s": 1e6, "min": 60e6, "h": 3600e6, "%": 0.01}
UNITS |= {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GUTTER = 56  # pixels left of the lanes

# The contrast of each text with what it stands on; that of disabled buttons does not count.
CONTRAST = """
const lum = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const parse = text => { const n = text.match(/[\\d.]+/g).map(Number);
  return text.startsWith("color(") ? [...n.slice(0, 3).map(v => v * 255), n[3] ?? 1] : n; };
const poor = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || node.closest("script, [hidden], :disabled, option") || !node.getClientRects().length) continue;
  let ground = node;
  while (ground && (parse(getComputedStyle(ground).backgroundColor)[3] ?? 1) < 1) ground = ground.parentElement;
  const style = getComputedStyle(node), back = lum(parse(getComputedStyle(ground ?? document.documentElement).backgroundColor));
  const text = lum(parse(node instanceof SVGElement ? style.fill : style.color));
  const ratio = (Math.max(text, back) + .05) / (Math.min(text, back) + .05);
  if (ratio < 4.5) poor.push(`${walk.currentNode.data.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
}
return poor;
"""
# What sticks out to the right, and is not in something that scrolls by itself.
STICKS_OUT = """
const out = [...document.querySelectorAll("body *")].filter(it =>
  !it.closest(".scroll, #tip, script") && it.getBoundingClientRect().right > arguments[0] + 1);
return [document.documentElement.scrollWidth > arguments[0], ...out.map(it => it.outerHTML.slice(0, 80))].filter(Boolean);
"""


ALL = "return [...document.querySelectorAll(arguments[0])]"
CHANGE = (
    "const it = document.querySelector(arguments[0]); it.value = arguments[1]; it.dispatchEvent(new Event('change'))"
)


# An entry of the timeline, as the page has it. Times are in microseconds; -1 means none.
Entry = collections.namedtuple(
    "Entry", "operation start took sequence step bucket amount track waited waited_for place"
)


def end_of(entry, now):
    return now if entry.took is None else entry.start + entry.took


def equal(found, wanted, what):
    check(found == wanted, f"{what}: the page has {found!r:.500}, the data {wanted!r:.500}")


def close(found, wanted, what, by=0.006, slack=0):
    check(abs(found - wanted) <= by * abs(wanted) + slack + 1e-9, f"{what}: {found}, not {wanted}")


def plain(text):
    return text.replace("\xa0", " ").strip()


def amount(text):
    """What a text such as `1.2 MiB` says."""
    value, unit = re.fullmatch(r"([-\d.,e]+)\s*(\S+)?", plain(text)).groups()
    return float(value.replace(",", "")) * UNITS[unit or "B"]


def whole(text):
    return int(text.replace(",", ""))


class Report:
    """One page on one screen. What it shows is held against `self.data`."""

    def __init__(self, browser, url):
        self.browser = browser
        browser.open(url)
        self.data = json.loads(self.text("#data"))
        self.ranks = range(self.data["world"]["size"])
        self.operations = self.data["timeline"]["operations"]
        self.lanes = [[Entry(*it) for it in lane["entries"]] for lane in self.data["timeline"]["ranks"]]
        self.entries = [it for lane in self.lanes for it in lane]

    def text(self, selector):
        return self.browser.js("return document.querySelector(arguments[0])?.textContent ?? null", selector)

    def has(self, selector):
        return self.text(selector) is not None

    def texts(self, selector):
        return self.browser.js(f"{ALL}.map(it => it.textContent)", selector)

    def rows(self, selector):
        cells = "[...row.cells].map(cell => (cell.querySelector('data') ?? cell).textContent.trim())"
        return self.browser.js(f"{ALL}.map(row => {cells})", f"{selector} tbody tr")

    def exact(self, selector):
        """Of a list of terms: the term, its text, and its exact value, if it has one."""
        parts = "[it.querySelector('dt').textContent, it.querySelector('dd').textContent, it.querySelector('dd data')?.value ?? null]"
        return {term: rest for term, *rest in self.browser.js(f"{ALL}.map(it => {parts})", f"{selector} > div")}

    def terms(self, selector):
        return {term: text for term, (text, _) in self.exact(selector).items()}

    def tip(self):
        return self.browser.js("const tip = document.getElementById('tip'); return tip.hidden ? null : tip.textContent")

    def focus(self, selector):
        self.browser.js("document.querySelector(arguments[0]).focus({preventScroll: true})", selector)

    def is_disabled(self, selector):
        return self.browser.js("return document.querySelector(arguments[0]).disabled", selector)

    def refuses(self, selector, text):
        """A field says of what is written into it that it cannot be."""
        self.browser.write(selector, text)
        is_valid = self.browser.js("return document.querySelector(arguments[0]).checkValidity()", selector)
        check(not is_valid, f"{text} was taken in {selector}")

    def pixels(self, selector):
        return self.browser.js("return document.querySelector(arguments[0]).toDataURL()", selector)

    def changes(self, drawn, do, undo, what):
        """What is drawn changes with `do`, and is as before after `undo`."""
        before = drawn()
        do()
        check(drawn() != before, f"{what} changes nothing")
        undo()
        check(drawn() == before, f"{what} cannot be taken back")

    # What is there

    def layout(self, width):
        equal(self.texts("h2"), SECTIONS, "the sections")
        equal(self.browser.js(STICKS_OUT, width), [], "what sticks out to the right")
        equal(self.browser.js(CONTRAST), [], "texts with a contrast below 4.5")
        for text, value in self.browser.js(f"{ALL}.map(it => [it.textContent, it.value])", "data"):
            if not re.fullmatch(r"[-\d.,e]+(\s\D+)?", text.replace("\xa0", " ")) or value in ("", "null"):
                continue
            value = float(value)
            # Times stand in the data in seconds or in microseconds.
            is_micros = abs(amount(text) - value) <= 0.006 * abs(value) + 1e-9
            scale = 1e6 if re.search(r"[nµm]?s$|min$|h$", text) and not is_micros else 1
            close(amount(text), value * scale, f"{text!r} of {value}", slack=0.0005 if text.endswith("%") else 0)

    def numbers(self):
        data, figures = self.data, self.exact("#figures")
        verdict, held = data["verdict"], data["verdict"]["straggler"]
        best = [it for it in data["validation"] if it["best"]]
        wanted = {
            "Time outside collectives": verdict["outside_collectives"],
            "Overlapped share": verdict["overlapped"],
            "Straggler": held and held["rank"],
            "Loss": data["loss"],
            "Time of a step": data["us_per_step"],
            "Best validation": best[-1]["loss"] if best else None,
        }
        for term, value in wanted.items():
            if value is not None:
                equal(float(figures[term][1]), float(value), term)
            else:
                check(term not in figures or "no number" in figures[term][0], f"{term} is {figures.get(term)}")
        equal(self.texts("#advice li"), verdict["advice"], "the advice")
        equal(self.text("#command"), data["command"], "the command")
        equal(self.terms("#option-list"), dict(data["options"]), "options")
        kind, text = data["outcome"]["kind"], data["outcome"]["text"]
        equal(self.terms("#facts")["outcome"], kind, "the outcome")
        check(kind == "done" or text[1:] in self.text("#subtitle"), f"it is not told that {text!r}")
        self.phases(verdict["phases"])
        self.traffic(data["traffic"])
        for row, it in zip(self.rows("#parameters"), data["model"]["parameters"], strict=True):
            bucket = "–" if it["bucket"] is None else str(it["bucket"])
            equal([row[0], row[4]], [it["name"], bucket], "a parameter")
            close(amount(row[2]), it["bytes"], it["name"])
        replicas, rows = data["replicas"], self.rows("#replicas-table")
        equal([row[2] for row in rows], replicas["hashes"] if replicas else [], "the hashes")
        if replicas and len(self.ranks) > 1:
            equal(all(row[3] == "the same" for row in rows), replicas["equal"], "that replicas are equal")
            equal(figures["Replicas"][0], "equal" if replicas["equal"] else "differ", "the replicas")

    def phases(self, phases):
        columns = ["step", "data", "forward", "backward", "optimizer", "save", "collectives"]
        for rank, (row, wanted) in enumerate(zip(self.rows("#phases"), phases, strict=True)):
            equal(sorted(wanted), sorted(columns), "the phases")
            equal(row[0], str(rank), "the rank of a row")
            for text, column in zip(row[2:], columns, strict=True):
                close(amount(text), wanted[column] * 1e6, f"{column} of rank {rank}")

    def traffic(self, traffic):
        collectives = [it["bytes"] for it in traffic["collectives"]]
        rows = self.rows("#traffic-table")
        most = max(map(len, [traffic["sent"], *collectives]))
        check(len(rows) == most or not sum(traffic["sent"]) + len(collectives), f"{len(rows)} rows of bytes")
        for rank, row in enumerate(rows):
            for text, values in zip(row[2:], [traffic["sent"], traffic["received"], *collectives], strict=True):
                if rank < len(values):
                    close(amount(text), values[rank], f"bytes of rank {rank}")
                else:  # of several processes, each knows the calls of its own ranks only
                    equal(text, "–", f"bytes of rank {rank}")

    # What moves

    def curves(self):
        browser = self.browser
        fields = {"Loss": "loss", "Accuracy": "accuracy", "Time of a step": "step_us", "Learning rate": "lr"}
        for number, title in enumerate(self.texts("#charts figcaption")):
            title = next(it for it in fields if title.startswith(it))
            points = {}
            for it in self.data["train"] + self.data["validation"]:
                if fields[title] in it:
                    points.setdefault(it["step"], []).append(it[fields[title]])
            steps = sorted(points)
            selector = f"#charts figure:nth-child({number + 1}) svg"
            left, top, width, height = browser.box(selector)
            seen = set()
            for part in [0.2, 0.5, 0.9]:
                browser.hover(left + part * width, top + height / 2)
                seen.add(self.point(points, title))
            check(len(seen) > 1 or len(steps) < 4, f"{title} tells of {seen} only")
            self.focus(selector)
            browser.key("Escape")
            equal(self.tip(), None, "the tip after Escape")
            for step in steps[:3]:
                browser.key("ArrowRight")
                equal(self.point(points, title), step, f"{title} by key")
        if self.has("#log-loss") and any(it["loss"] for it in self.data["train"]):
            lines = lambda: browser.js(f"{ALL}.map(it => it.outerHTML)", "#charts figure:first-child svg .gridline")
            press = lambda: browser.press("#log-loss")
            self.changes(lines, press, press, "the logarithm")

    def point(self, points, title):
        """The step of which the tip tells, the values being those of the data."""
        head, *values = self.tip().split("\n")
        step = whole(re.match(r"step ([\d,]+), epoch \d+$", head)[1])
        for text, value in zip(values, points[step], strict=True):
            text = re.sub(r" \(the best\)$", "", text.split(": ")[1])
            if value is None:
                equal(text, "no number", title)
            else:
                close(amount(text), value, f"{title} at step {step}")
        return step

    def view(self):
        shown = "const it = document.getElementById('lanes').dataset; return [Number(it.from), Number(it.to)]"
        return self.browser.js(shown)

    def sees(self, view, what, slack=0):
        """The timeline shows this range, as far as float64 is exact."""
        for found, wanted in zip(self.view(), view):
            close(found, wanted, f"{what}, an end of the timeline", by=1e-12, slack=slack)

    def timeline(self, touch):
        browser = self.browser
        if not self.entries:
            check(not self.has("#lanes"), "a timeline of nothing")
            return
        everything = self.view()
        begin, end = everything
        length = end - begin
        close(begin, min(it.start for it in self.entries), "where the timeline begins")
        check(end >= max(end_of(it, it.start) for it in self.entries) - 1e-3, "the timeline ends too early")
        half = [begin + length / 4, end - length / 4]
        for buttons, wanted in [("in", half), ("out", everything), ("in all", everything)]:
            for button in buttons.split():
                browser.press(f"#zoom-{button}")
            self.sees(wanted, f"after {buttons}", slack=1e-3 * length)
        self.focus("#lanes")
        later = [at + length / 10 for at in half]
        keys = [("+", half), (["ArrowRight"], later), (["ArrowLeft"], half), ("-", everything), ("++0", everything)]
        for keys, wanted in keys:
            for key in keys:
                browser.key(key)
            self.sees(wanted, f"after the keys {keys}", slack=1e-3 * length)
        self.pointer(touch, everything)
        browser.press("#zoom-all")
        self.steps(everything)
        self.slices(touch)
        # Where there is room for gradients, and where a rank has waited, if one has.
        many = [it for it in self.entries if it.step >= 0]
        many = [it for it in many if it.waited > 0] or many
        if many:
            browser.write("#step-number", str(many[len(many) // 2].step))
        for toggle in ["#only-waiting", "#show-gradients"]:
            if self.has(toggle):
                press = lambda: browser.press(toggle)
                self.changes(lambda: self.pixels("#lanes"), press, press, toggle)

    def pointer(self, touch, everything):
        """The wheel and two fingers zoom where they are, and dragging moves."""
        browser, (begin, end) = self.browser, everything
        left, top, width, height = browser.box("#lanes")
        x, y = left + GUTTER + (width - GUTTER) * 0.3, top + height / 2
        if touch:
            browser.touch(*[[(x - by, y), (x + by, y)] for by in (20, 40, 60)])
        else:
            browser.wheel(x, y, -240)
        view = self.view()
        span = view[1] - view[0]
        check(span < (end - begin) * 0.6, f"wheel or pinch shows {view} of {everything}")
        under = begin + (end - begin) * 0.3
        close(view[0] + span * 0.3, under, "the time under the pointer", by=0.02)
        points = [(x, y), (x - 30, y), (x - 60, y)]
        browser.touch(*[[point] for point in points]) if touch else browser.drag(points)
        moved, shift = self.view(), 60 / (width - GUTTER) * span
        by = min(shift, end - view[1])
        check(abs(moved[0] - view[0] - by) < 0.2 * shift, f"dragging moved {view} to {moved}")

    def steps(self, everything):
        """`show step` has the whole step of all ranks, and says so of a number that is none."""
        phases = ["step", "data", "forward", "backward", "optimizer"]
        own = [it for it in self.entries if it.step >= 0 and self.operations[it.operation] in phases]
        numbers = sorted({it.step for it in own})
        self.refuses("#step-number", "87654321")
        for step in numbers[:1] + numbers[len(numbers) // 2 :][:1]:
            self.browser.write("#step-number", str(step))
            parts = [it for it in own if it.step == step and not it.track]
            start, end = min(it.start for it in parts), max(end_of(it, everything[1]) for it in parts)
            view = self.view()
            check(view[0] <= start and view[1] >= end - 1e-6, f"step {step} is not all in {view}")
            check(view[1] - view[0] < 1.2 * (end - start) + 1, f"step {step} is small in {view}")

    def slices(self, touch):
        """What is told of a slice by hovering and clicking is what was recorded at this time on this rank."""
        browser, view = self.browser, self.view()
        left, top, width, height = browser.box("#lanes")
        scale = (view[1] - view[0]) / (width - GUTTER)
        # The widest collective in sight: through its middle goes a line on which all is tried.
        is_collective = lambda it: self.operations[it.operation] in COLLECTIVES
        seen = [it for it in self.entries if it.took and view[0] <= it.start and end_of(it, 0) <= view[1]]
        widest = max(seen, key=lambda it: (is_collective(it), it.took))
        time = widest.start + widest.took / 2
        x = left + GUTTER + (time - view[0]) / scale
        found = {}
        for y in range(int(top) + 2, int(top + height), 4):
            browser.touch([(x, y)]) if touch else browser.click(x, y)
            if slice := self.terms("#slice"):
                found[(slice["rank"], slice["operation"])] = slice
                check(self.tip().startswith(slice["operation"]), f"the tip {self.tip()!r} of {slice}")
        check(found, "no slice could be hit")
        for slice in found.values():
            self.slice(slice, time, slack=6 * scale)
        hit = any(operation.split(" #")[0] in COLLECTIVES for _, operation in found)
        check(hit or not is_collective(widest), "no collective could be hit")
        # Escape drops it; then the buttons go through the first lane.
        self.focus("#lanes")
        browser.key("Escape")
        equal(self.terms("#slice"), {}, "the slice after Escape")
        browser.key("0")
        lane = next(lane for lane in self.lanes if lane)
        own = [it for it in lane if not it.track and self.operations[it.operation] not in COLLECTIVES | {"gradient"}]
        names = [self.told(it) for it in sorted(own, key=lambda it: (it.start, -(it.took or 0)))]
        for press, i in [("next", 0), ("next", 1), ("next", 2), ("previous", 1)]:
            browser.press(f"#{press}-slice")
            equal(self.terms("#slice")["operation"], names[min(i, len(names) - 1)], f"the slice after {press}")

    def told(self, entry):
        """How the page names an entry."""
        operation = self.operations[entry.operation]
        if operation == "gradient":
            return f"gradient of {self.data['model']['parameters'][entry.sequence]['name']}"
        return f"{operation} #{entry.sequence}"

    def slice(self, slice, time, slack):
        """What is told of a slice is an entry of its rank at this time."""
        rank, now = int(slice["rank"].split()[0]), self.view()[1]
        for it in self.lanes[rank]:
            # A gradient has the same name in each step, and short steps fit into the slack.
            is_step = it.step < 0 or slice.get("step") == str(it.step)
            is_then = it.start - slack <= time <= end_of(it, now) + slack
            if is_step and is_then and self.told(it) == slice["operation"]:
                break
        else:
            check(False, f"{slice} was not recorded on rank {rank} at {time}")
        if it.bucket >= 0:
            equal(int(slice["bucket"]), it.bucket, "the bucket of a slice")
        if it.amount and self.operations[it.operation] == "forward":
            equal(amount(slice["samples"].split()[0]), it.amount, "the samples of a slice")
        elif it.amount:
            close(amount(slice["bytes"]), it.amount, "the bytes of a slice")
        if it.took:
            close(amount(slice["took"]), it.took, "how long a slice took", by=0.01)
        if it.waited > 0:
            waited, *who = slice["waited"].split(" for rank ")
            close(amount(waited), it.waited, "how long it waited", by=0.01)
            equal([int(rank) for rank in who], [it.waited_for] if it.waited_for >= 0 else [], "for whom it waited")
        if it.place >= 0:
            equal(slice["written in"], self.data["timeline"]["places"][it.place], "the place of a slice")

    def samples(self):
        browser, epochs, count = self.browser, self.data["samples"]["epochs"], self.data["samples"]["dataset"]
        if not epochs or not count:
            check(not self.has("#grid"), "samples of nothing")
            return
        lists = self.epoch(0)
        check(self.is_disabled("#epoch-before"), "there is an epoch before the first")
        if len(epochs) > 1:
            for button, index in [("#epoch-after", 1), ("#epoch-before", 0)]:
                browser.press(button)
                self.epoch(index)
            browser.js(CHANGE, "#epoch", str(len(epochs) - 1))
            lists = self.epoch(len(epochs) - 1)
            check(self.is_disabled("#epoch-after"), "an epoch after the last")
        self.refuses("#sample-number", str(count))
        self.grid(lists)
        if len(lists) > 1:
            only = lambda rank: browser.js(CHANGE, "#only-rank", rank)
            drawn = lambda: self.pixels("#grid")
            self.changes(drawn, lambda: only("0"), lambda: only("-1"), "only rank 0")
        browser.js("document.getElementById('grid').focus()")
        for key in ["ArrowRight", "ArrowRight"][:count]:
            browser.key(key)
        # Where a cell stands for several samples, the next is not the next sample.
        second = int(re.match(r"sample (\d+)", self.text("#sample"))[1])
        check(0 < second < 50 or count == 1, f"sample {second} follows the first")
        equal(self.text("#sample"), self.takers(lists, second), "the second sample, by keys")
        browser.key("Escape")

    def epoch(self, index):
        """The epoch that is shown is this one; its samples, a list for each rank."""
        epoch, count, note = self.data["samples"]["epochs"][index], self.data["samples"]["dataset"], "#samples-note"
        lists = epoch["ranks"]
        equal(self.text(note).split(":")[0], f"Epoch {epoch['epoch']}", "the epoch")
        for rank, (row, mine) in enumerate(zip(self.rows("#sample-counts"), lists, strict=True)):
            equal([row[0], whole(row[1])], [str(rank), len(mine)], "how many samples")
            equal([int(it) for it in re.findall(r"\d+", row[3])], mine[:10], f"the order on rank {rank}")
        if count < 5000:
            dealt = [it for mine in lists for it in mine]
            twice = sum(dealt.count(it) > 1 for it in set(dealt))
            told = re.search(r"([\d,]+) more than once", self.text(note))
            equal(whole(told[1]) if told else 0, twice, "how many were dealt twice")
        for sample in [0, count // 2, count - 1, lists[-1][len(lists[-1]) // 2] if lists[-1] else 0]:
            self.browser.write("#sample-number", str(sample))
            equal(self.text("#sample"), self.takers(lists, sample), "a sample")
        return lists

    def grid(self, lists):
        """What is told of the sample under the mouse is who takes it."""
        left, top, width, height = self.browser.box("#grid")
        tips = []
        for part in [0.11, 0.23, 0.37, 0.52, 0.68, 0.83, 0.94]:
            self.browser.hover(left + width * part, top + height * (0.9 - 0.8 * part))
            tips.append(self.tip())
        self.browser.hover(left, max(1, top - 6))  # keys begin at the first sample where the mouse is elsewhere
        for tip in filter(None, tips):
            sample = int(re.match(r"sample (\d+)", tip)[1])
            equal(tip.replace("\n", ": ", 1).replace("\n", "; "), self.takers(lists, sample), "the tip of a sample")
        check(any(tips), "no sample could be hit")

    def takers(self, lists, sample):
        batch, is_complete = self.data["samples"]["batch_size"], self.data["samples"]["complete"]
        found = [
            f"rank {rank} takes it as number {at + 1:,} (batch {at // batch}, place {at % batch})"
            for rank, mine in enumerate(lists)
            for at, it in enumerate(mine)
            if it == sample
        ]
        none = "no rank takes it" if is_complete else "not among those that are kept"
        return f"sample {sample}: " + "; ".join(found or [none])

    def buckets(self):
        browser, model = self.browser, self.data["model"]
        names = [it["name"] for it in model["parameters"]]
        sizes = [it["bytes"] for it in model["parameters"]]
        buckets = [f"bucket {i}: " for i in range(len(model["buckets"]))]
        for number, (names, sizes) in enumerate([(names, sizes), (buckets, model["buckets"])]):
            if not names:
                continue
            selector = f"#plan .plan:nth-of-type({number + 1})"
            widths = browser.js(f"{ALL}.map(it => it.offsetWidth)", f"{selector} span")
            equal(len(widths), len(names), "the blocks")
            check(widths[sizes.index(max(sizes))] == max(widths), "the largest block is not the widest")
            self.focus(selector)
            for name in names[:4]:
                browser.key("ArrowRight")
                check(self.tip().startswith(name), f"{self.tip()} instead of {name}")

    def keyboard(self):
        """The Tab key comes to every control, and it is seen where it is."""
        browser, seen = self.browser, 0
        browser.js("document.activeElement.blur(); scrollTo(0, 0)")
        wanted = browser.js(f"{ALL}.length", 'a, button:enabled, input, select, [tabindex="0"]')
        for _ in range(wanted + 2):
            browser.key("Tab")
            outline = browser.js(
                "const it = document.activeElement; if (it === document.body || it.dataset.reached) return null;"
                "it.dataset.reached = 1; const style = getComputedStyle(it);"
                "return [it.id || it.outerHTML.slice(0, 60), style.outlineStyle, parseFloat(style.outlineWidth)]"
            )
            if outline:
                seen += 1
                check(outline[1] != "none" and outline[2] >= 2, f"{outline} does not show that it has the focus")
        equal(seen, wanted, "how many controls the Tab key reaches")

    def paper(self):
        """On paper all is light, at its whole range and without controls; the screen is as before after that."""
        browser, view = self.browser, None
        if self.has("#lanes"):
            browser.press("#zoom-all")
            view = self.view()
            browser.press("#zoom-in")
            zoomed = self.view()
        browser.js("dispatchEvent(new Event('beforeprint'))")
        browser.tell("Emulation.setEmulatedMedia", media="print")
        shown = f"{ALL}.filter(it => it.getClientRects().length).length"
        equal(browser.js(shown, ".controls, nav, #tip"), 0, "controls on paper")
        ground = browser.js("return getComputedStyle(document.body).backgroundColor")
        equal(ground, "rgba(0, 0, 0, 0)", "the ground of paper")
        if view:
            self.sees(view, "on paper")
        browser.js("dispatchEvent(new Event('afterprint'))")
        browser.light(False)
        browser.drawn()
        made = browser.paper()
        check(made.startswith(b"%PDF"), "nothing was printed")
        if view:
            self.sees(zoomed, "after printing")
            browser.press("#zoom-all")

    def changes_with_the_light(self):
        corner = (
            "const c = document.getElementById('grid') ?? document.getElementById('lanes');"
            "return c && c.toDataURL().length + getComputedStyle(document.body).backgroundColor + c.toDataURL()"
        )
        self.browser.light(True)
        self.browser.drawn()
        dark = self.browser.js(corner)
        equal(self.browser.js(CONTRAST), [], "texts with a contrast below 4.5 in the dark")
        self.browser.light(False)
        self.browser.drawn()
        check(dark is None or dark != self.browser.js(corner), "the page looks the same in the dark")


def try_page(browser, path):
    url, name = path.resolve().as_uri(), path.stem
    for screen, (width, height, touch) in SCREENS.items():
        browser.screen(width, height, touch=touch)
        browser.requests()  # those of the page before
        report = Report(browser, url)
        report.layout(width)
        report.numbers()
        report.curves()
        report.timeline(touch)
        report.samples()
        report.buckets()
        report.keyboard()
        report.changes_with_the_light()
        report.paper()
        equal(browser.console(), [], f"the console of {name}")
        asked = {it for it in browser.requests() if not it.startswith("data:")}
        equal(asked, {url}, "what was asked for")
        print(f"{name}, {screen}: all as in its data", flush=True)


def main():
    given = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        pages = [given]
        if given.suffix != ".html":
            pages = [pathlib.Path(folder) / f"{name}.html" for name in RUNS]
            for page in pages:
                code, *flags = RUNS[page.stem]
                run(given, *flags, f"--report={page}", code=code)
        for page in pages:
            try_page(browser, page)


if __name__ == "__main__":
    main()
