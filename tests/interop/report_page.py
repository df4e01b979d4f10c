"""Opens the page of `--report` in Chromium, tries all of its controls, and compares what it shows with its data.

report_page.py PROGRAM [FOLDER]   of runs that it makes; pictures go into FOLDER
report_page.py PAGE.html [FOLDER] of a page that is there
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

from browser import Browser

RUNS = {  # and their exit codes
    "demo": [0, "--max-epochs=2", "--batch-size=32", "--nproc-per-node=2"],
    "digits": [
        0,
        *["--model=mlp", "--hidden=256,256", "--dataset=digits", "--loss=cross-entropy"],
        *["--val-fraction=0.2", "--bucket-cap-mb=0.1", "--nproc-per-node=4", "--max-epochs=3"],
        *["--log-every=5"],
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
UNITS = {
    "ns": 1e-3,
    "µs": 1,
    "ms": 1e3,
    "s": 1e6,
    "min": 60e6,
    "h": 3600e6,
    "%": 0.01,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}

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


def check(is_true, what):
    if not is_true:
        sys.exit(f"report_page.py: {what}")


def equal(found, wanted, what):
    check(found == wanted, f"{what}: the page has {found!r:.500}, the data {wanted!r:.500}")


def close(found, wanted, what, by=0.006, slack=0):
    check(abs(found - wanted) <= by * abs(wanted) + slack + 1e-9, f"{what}: {found}, not {wanted}")


def amount(text):
    """What a text such as `1.2 MiB` says."""
    value, unit = re.fullmatch(r"([-\d.,e]+)\s*(\S+)?", text.replace("\xa0", " ").strip()).groups()
    return float(value.replace(",", "")) * UNITS[unit or "B"]


class Report:
    """One page on one screen. What it shows is held against `self.data`."""

    def __init__(self, browser, url, name):
        self.browser, self.name = browser, name
        browser.open(url)
        self.data = json.loads(browser.js("return document.getElementById('data').textContent"))
        self.ranks = range(self.data["world"]["size"])
        self.entries = [it["entries"] for it in self.data["timeline"]["ranks"]]

    def text(self, selector):
        return self.browser.js("return document.querySelector(arguments[0])?.textContent ?? null", selector)

    def texts(self, selector):
        return self.browser.js(
            "return [...document.querySelectorAll(arguments[0])].map(it => it.textContent)", selector
        )

    def rows(self, selector):
        rows = (
            "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].map(row =>"
            "[...row.cells].map(cell => (cell.querySelector('data') ?? cell).textContent.trim()))"
        )
        return self.browser.js(rows, selector)

    def terms(self, selector):
        """Of a list of terms: the term, its text, and its exact value, if it has one."""
        return {
            term: (text, value)
            for term, text, value in self.browser.js(
                "return [...document.querySelectorAll(arguments[0] + ' > div')].map(it => [it.querySelector('dt').textContent,"
                "it.querySelector('dd').textContent, it.querySelector('dd data')?.value ?? null])",
                selector,
            )
        }

    def tip(self):
        return self.browser.js("const tip = document.getElementById('tip'); return tip.hidden ? null : tip.textContent")

    def has(self, selector):
        return self.text(selector) is not None

    # What is there

    def layout(self, width):
        equal(self.texts("h2"), SECTIONS, "the sections")
        equal(self.browser.js(STICKS_OUT, width), [], "what sticks out to the right")
        equal(self.browser.js(CONTRAST), [], "texts with a contrast below 4.5")
        for text, value in self.browser.js(
            "return [...document.querySelectorAll('data')].map(it => [it.textContent, it.value])"
        ):
            if re.fullmatch(r"[-\d.,e]+(\s\D+)?", text.replace("\xa0", " ")) and value not in ("", "null"):
                scale = 1e6 if re.search(r"[nµm]?s$|min$|h$", text) and not self.is_micros(text, float(value)) else 1
                slack = 0.0005 if text.endswith("%") else 0
                close(amount(text), float(value) * scale, f"{text!r} of {value}", 0.006, slack)

    @staticmethod
    def is_micros(text, value):
        """Times stand in the data in seconds or in microseconds."""
        return abs(amount(text) - value) <= 0.006 * abs(value) + 1e-9

    def numbers(self):
        data, figures = self.data, self.terms("#figures")
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
        equal({term: text for term, (text, _) in self.terms("#option-list").items()}, dict(data["options"]), "options")
        kind, text = data["outcome"]["kind"], data["outcome"]["text"]
        equal(self.terms("#facts")["outcome"][0], kind, "the outcome")
        check(kind == "done" or text[1:] in self.text("#subtitle"), f"it is not told that {text!r}")
        columns = ["step", "data", "forward", "backward", "optimizer", "save", "collectives"]
        for row in verdict["phases"]:
            equal(sorted(row), sorted(columns), "the phases")
        phases = [[rank, *map(row.get, columns)] for rank, row in enumerate(verdict["phases"])]
        for row, wanted in zip(self.rows("#phases"), phases, strict=True):
            equal(row[0], str(wanted[0]), "the rank of a row")
            for text, seconds in zip(row[2:], wanted[1:], strict=True):
                close(amount(text), seconds * 1e6, f"a phase of rank {row[0]}")
        traffic = data["traffic"]
        rows = self.rows("#traffic-table")
        wanted = [len(traffic["sent"]), *[len(it["bytes"]) for it in traffic["collectives"]]]
        check(
            len(rows) == max(wanted) or not sum(traffic["sent"]) + len(traffic["collectives"]),
            f"{len(rows)} rows of bytes",
        )
        for rank, row in enumerate(rows):
            # Of several processes, each knows the calls of its own ranks only.
            lists = [traffic["sent"], traffic["received"], *[it["bytes"] for it in traffic["collectives"]]]
            for text, value in zip(row[2:], [dict(enumerate(it)).get(rank) for it in lists], strict=True):
                if value is None:
                    equal(text, "–", f"bytes of rank {rank}")
                else:
                    close(amount(text), value, f"bytes of rank {rank}")
        parameters = [
            [it["name"], it["bytes"], str(it["bucket"]) if it["bucket"] is not None else "–"]
            for it in data["model"]["parameters"]
        ]
        for row, (name, size, bucket) in zip(self.rows("#parameters"), parameters, strict=True):
            equal([row[0], row[4]], [name, bucket], "a parameter")
            close(amount(row[2]), size, name)
        replicas = data["replicas"]
        rows = self.rows("#replicas-table")
        equal([row[2] for row in rows], replicas["hashes"] if replicas else [], "the hashes")
        if replicas and len(self.ranks) > 1:
            equal(all(row[3] == "the same" for row in rows), replicas["equal"], "that replicas are equal")
            equal(figures["Replicas"][0], "equal" if replicas["equal"] else "differ", "the replicas")

    # What moves

    def curves(self):
        browser, charts = self.browser, self.texts("#charts figcaption")
        fields = {"Loss": "loss", "Accuracy": "accuracy", "Time of a step": "step_us", "Learning rate": "lr"}
        for number, title in enumerate(charts):
            title = next(it for it in fields if title.startswith(it))
            points = {}
            for name in ["train", "validation"]:
                for it in self.data[name]:
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
            browser.js("document.querySelector(arguments[0]).focus({preventScroll: true})", selector)
            browser.key("Escape")
            equal(self.tip(), None, "the tip after Escape")
            for i in range(min(3, len(steps))):
                browser.key("ArrowRight")
                equal(self.point(points, title), steps[i], f"{title} by key")
            browser.key("ArrowLeft")
            equal(self.point(points, title), steps[max(0, min(3, len(steps)) - 2)], f"{title} by key, back")
        if self.has("#log-loss"):
            lines = "return [...document.querySelectorAll('#charts figure:first-child svg .gridline')].map(it => it.outerHTML).join()"
            before = browser.js(lines)
            browser.press("#log-loss")
            changed = browser.js(lines) != before
            browser.press("#log-loss")
            check(changed or not any(it["loss"] for it in self.data["train"]), "the loss is drawn alike on both scales")
            equal(browser.js(lines), before, "the chart after the logarithm was taken back")

    def point(self, points, title):
        """The step of which the tip tells, the values being those of the data."""
        head, *values = self.tip().split("\n")
        step = int(re.match(r"step ([\d,]+), epoch \d+$", head)[1].replace(",", ""))
        for text, value in zip(values, points[step], strict=True):
            text = re.sub(r" \(the best\)$", "", text.split(": ")[1])
            if value is None:
                equal(text, "no number", title)
            else:
                close(amount(text), value, f"{title} at step {step}")
        return step

    def view(self):
        return self.browser.js(
            "const it = document.getElementById('lanes').dataset; return [Number(it.from), Number(it.to)]"
        )

    def pixels(self, selector):
        return self.browser.js("return document.querySelector(arguments[0]).toDataURL()", selector)

    def timeline(self, touch):
        browser = self.browser
        if not any(self.entries):
            check(not self.has("#lanes"), "a timeline of nothing")
            return
        whole = self.view()
        length = whole[1] - whole[0]

        def became(wanted, what):
            for found, value in zip(self.view(), wanted):
                check(abs(found - value) <= 1e-3 * length, f"{what} shows {self.view()}, not {wanted}")

        close(whole[0], min(it[1] for lane in self.entries for it in lane), "where the timeline begins")
        last = max(it[1] + (it[2] or 0) for lane in self.entries for it in lane)
        check(whole[1] >= last - 1e-3, "the timeline ends too early")
        half = [whole[0] + length / 4, whole[1] - length / 4]
        browser.press("#zoom-in")
        became(half, "zooming in")
        browser.press("#zoom-out")
        became(whole, "zooming out")
        browser.press("#zoom-in")
        browser.press("#zoom-all")
        became(whole, "all")
        browser.js("document.getElementById('lanes').focus({preventScroll: true})")
        for keys, wanted in [
            ("+", half),
            (["ArrowRight"], [at + length / 10 for at in half]),
            (["ArrowLeft"], half),
            ("-", whole),
            ("++0", whole),
        ]:
            for key in keys:
                browser.key(key)
            became(wanted, f"after the keys {keys}")

        left, top, width, height = browser.box("#lanes")
        gutter = 56
        at = left + gutter + (width - gutter) * 0.3
        time = whole[0] + length * 0.3
        if touch:
            y = top + height / 2
            browser.touch([(at - 20, y), (at + 20, y)], [(at - 40, y), (at + 40, y)], [(at - 60, y), (at + 60, y)])
        else:
            browser.wheel(at, top + height / 2, -240)
        view = self.view()
        check(view[1] - view[0] < length * 0.6, f"wheel or pinch shows {view} of {whole}")
        close(view[0] + (view[1] - view[0]) * 0.3, time, "the time under the pointer", by=0.02)
        points = [(at, top + height / 2), (at - 30, top + height / 2), (at - 60, top + height / 2)]
        shift = 60 / (width - gutter) * (view[1] - view[0])
        if touch:
            browser.touch(*[[point] for point in points])
        else:
            browser.drag(points)
        moved = self.view()
        wanted = min(shift, whole[1] - view[1])
        check(abs(moved[0] - view[0] - wanted) < 0.2 * shift, f"dragging moved {view} to {moved}")
        browser.press("#zoom-all")
        self.steps(whole)
        self.slices(touch)
        # Where there is room for gradients, and where a rank has waited, if one has.
        many = [it for lane in self.entries for it in lane if it[4] >= 0]
        many = [it for it in many if it[8] > 0] or many
        if many:
            browser.write("#step-number", str(many[len(many) // 2][4]))
        for toggle in ["#only-waiting", "#show-gradients"]:
            if self.has(toggle):
                before = self.pixels("#lanes")
                browser.press(toggle)
                check(self.pixels("#lanes") != before, f"{toggle} changes nothing")
                browser.press(toggle)
                check(self.pixels("#lanes") == before, f"{toggle} cannot be taken back")

    def phases(self, lane):
        operations = self.data["timeline"]["operations"]
        return sorted(
            (it for it in lane if not it[7] and operations[it[0]] not in COLLECTIVES | {"gradient"}),
            key=lambda it: (it[1], -(it[2] or 0)),
        )

    def steps(self, whole):
        """`show step` has the whole step of all ranks, and says so of a number that is none."""
        operations = self.data["timeline"]["operations"]
        of_steps = [
            operations.index(it) for it in ["step", "data", "forward", "backward", "optimizer"] if it in operations
        ]
        numbers = sorted({it[4] for lane in self.entries for it in lane if it[4] >= 0 and it[0] in of_steps})
        self.browser.write("#step-number", "87654321")
        check(
            self.browser.js("return !document.getElementById('step-number').checkValidity()"), "step 87654321 was taken"
        )
        for step in numbers[:1] + numbers[len(numbers) // 2 :][:1]:
            self.browser.write("#step-number", str(step))
            parts = [it for lane in self.entries for it in lane if it[4] == step and it[0] in of_steps and not it[7]]
            ends = [whole[1] if it[2] is None else it[1] + it[2] for it in parts]
            view = self.view()
            check(
                view[0] <= min(it[1] for it in parts) and view[1] >= max(ends) - 1e-6,
                f"step {step} is not all in {view}",
            )
            check(
                view[1] - view[0] < 1.2 * (max(ends) - min(it[1] for it in parts)) + 1,
                f"step {step} is small in {view}",
            )

    def slices(self, touch):
        """What is told of a slice by hovering and clicking is what was recorded at this time on this rank."""
        browser, operations = self.browser, self.data["timeline"]["operations"]
        parameters = self.data["model"]["parameters"]
        left, top, width, height = browser.box("#lanes")
        view = self.view()
        # The widest collective in sight: through its middle goes a line on which all is tried.
        seen = [it for lane in self.entries for it in lane if it[2] and view[0] <= it[1] and it[1] + it[2] <= view[1]]
        widest = max(seen, key=lambda it: (operations[it[0]] in COLLECTIVES, it[2]))
        time = widest[1] + widest[2] / 2
        x = left + 56 + (time - view[0]) / (view[1] - view[0]) * (width - 56)
        slack = 6 / (width - 56) * (view[1] - view[0])
        found = {}
        for y in range(int(top) + 2, int(top + height), 4):
            browser.touch([(x, y)]) if touch else browser.click(x, y)
            slice = {term: text for term, (text, _) in self.terms("#slice").items()}
            if slice:
                found[(slice["rank"], slice["operation"])] = slice
                check(self.tip().startswith(slice["operation"]), f"the tip {self.tip()!r} of {slice}")
        check(found, "no slice could be hit")
        for slice in found.values():
            rank = int(slice["rank"].split()[0])
            name = slice["operation"]
            for it in self.entries[rank]:
                told = f"{operations[it[0]]} #{it[3]}"
                if operations[it[0]] == "gradient":
                    told = f"gradient of {parameters[it[3]]['name']}"
                end = self.view()[1] if it[2] is None else it[1] + it[2]
                # A gradient has the same name in each step, and short steps fit into the slack.
                is_step = it[4] < 0 or slice.get("step") == str(it[4])
                if told == name and is_step and it[1] - slack <= time <= end + slack:
                    break
            else:
                check(False, f"{slice} was not recorded on rank {rank} at {time}")
            if it[5] >= 0:
                equal(int(slice["bucket"]), it[5], "the bucket of a slice")
            if it[6] and operations[it[0]] == "forward":
                equal(amount(slice["samples"].split()[0]), it[6], "the samples of a slice")
            elif it[6]:
                close(amount(slice["bytes"]), it[6], "the bytes of a slice")
            if it[2]:
                close(amount(slice["took"]), it[2], "how long a slice took", by=0.01)
            if it[8] > 0:
                waited, *who = slice["waited"].split(" for rank ")
                close(amount(waited), it[8], "how long it waited", by=0.01)
                equal([int(rank) for rank in who], [it[9]] if it[9] >= 0 else [], "for whom it waited")
            if it[10] >= 0:
                equal(slice["written in"], self.data["timeline"]["places"][it[10]], "the place of a slice")
        collectives = [key for key in found if key[1].split(" #")[0] in COLLECTIVES]
        check(collectives or operations[widest[0]] not in COLLECTIVES, "no collective could be hit")
        # Escape drops it; then the buttons go through the first lane.
        browser.js("document.getElementById('lanes').focus({preventScroll: true})")
        browser.key("Escape")
        equal(self.terms("#slice"), {}, "the slice after Escape")
        browser.key("0")
        lane = next(i for i, lane in enumerate(self.entries) if lane)
        names = [f"{operations[it[0]]} #{it[3]}" for it in self.phases(self.entries[lane])]
        browser.press("#next-slice")
        equal(self.terms("#slice")["operation"][0], names[0], "the first slice")
        for press, i in [("#next-slice", 1), ("#next-slice", 2), ("#previous-slice", 1)]:
            browser.press(press)
            equal(self.terms("#slice")["operation"][0], names[min(i, len(names) - 1)], f"the slice after {press}")

    def samples(self):
        browser, samples = self.browser, self.data["samples"]
        if not samples["epochs"] or not samples["dataset"]:
            check(not self.has("#grid"), "samples of nothing")
            return
        epochs, count = samples["epochs"], samples["dataset"]

        def shows(index):
            lists = epochs[index]["ranks"]
            equal(self.text("#samples-note").split(":")[0], f"Epoch {epochs[index]['epoch']}", "the epoch")
            for rank, (row, list) in enumerate(zip(self.rows("#sample-counts"), lists, strict=True)):
                equal([row[0], int(row[1].replace(",", ""))], [str(rank), len(list)], "how many samples")
                equal([int(it) for it in re.findall(r"\d+", row[3])], list[:10], f"the order on rank {rank}")
            everything = [it for list in lists for it in list]
            twice = len([it for it in set(everything) if everything.count(it) > 1]) if count < 5000 else None
            told = re.search(r"([\d,]+) more than once", self.text("#samples-note"))
            if twice is not None:
                equal(int(told[1].replace(",", "")) if told else 0, twice, "how many were dealt twice")
            for sample in [0, count // 2, count - 1, lists[-1][len(lists[-1]) // 2] if lists[-1] else 0]:
                browser.write("#sample-number", str(sample))
                equal(self.text("#sample"), self.takers(lists, sample), "a sample")
            return lists

        lists = shows(0)
        check(
            browser.js("return document.getElementById('epoch-before').disabled"), "there is an epoch before the first"
        )
        if len(epochs) > 1:
            browser.press("#epoch-after")
            shows(1)
            browser.press("#epoch-before")
            shows(0)
            browser.js(
                "const it = document.getElementById('epoch'); it.value = arguments[0]; it.dispatchEvent(new Event('change'))",
                str(len(epochs) - 1),
            )
            lists = shows(len(epochs) - 1)
            check(browser.js("return document.getElementById('epoch-after').disabled"), "an epoch after the last")
        browser.write("#sample-number", str(count))
        check(
            browser.js("return !document.getElementById('sample-number').checkValidity()"), f"sample {count} was taken"
        )

        # What is under the mouse has the colour of the rank that is told of it.
        left, top, width, height = browser.box("#grid")
        one = "const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
        colour = (
            one + "const it = document.getElementById('grid'), s = it.width / it.clientWidth;"
            "c.drawImage(it, Math.floor(arguments[0] * s), Math.floor(arguments[1] * s), 1, 1, 0, 0, 1, 1);"
            "return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3)"
        )
        legend = browser.js(
            one + "return [...document.querySelectorAll('#samples-legend .swatch')].map(it => {"
            "c.fillStyle = getComputedStyle(it).backgroundColor; c.fillRect(0, 0, 1, 1);"
            "return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3) })"
        )
        tried = 0
        for part in [0.11, 0.23, 0.37, 0.52, 0.68, 0.83, 0.94]:
            x, y = width * part, height * (0.9 - 0.8 * part)
            browser.hover(left + x, top + y)
            tip = self.tip()
            if tip is None:
                continue
            sample = int(re.match(r"sample (\d+)", tip)[1])
            equal(tip.replace("\n", ": ", 1).replace("\n", "; "), self.takers(lists, sample), "the tip of a sample")
            browser.hover(left + x, max(1, top - 6))
            who = [rank for rank, list in enumerate(lists) if sample in list]
            found = browser.js(colour, x, y)
            between = found in [[253, 253, 252], [20, 22, 25]]
            if not between and count * 8 < width * height:  # else a cell is no larger than its frame
                wanted = legend[who[0] if who else len(lists)]
                check(
                    max(abs(a - b) for a, b in zip(found, wanted)) <= 2, f"{sample} of {who} is {found}, not {wanted}"
                )
                tried += 1
        check(tried or count * 8 >= width * height, "no sample could be hit")
        before = self.pixels("#grid")
        if len(lists) > 1:
            choose = "const it = document.getElementById('only-rank'); it.value = arguments[0]; it.dispatchEvent(new Event('change'))"
            browser.js(choose, "0")
            check(self.pixels("#grid") != before, "only rank 0 looks like all")
            browser.js(choose, "-1")
            equal(self.pixels("#grid") == before, True, "all ranks again")
        browser.js("document.getElementById('grid').focus()")
        for key in ["ArrowRight", "ArrowRight"][:count]:
            browser.key(key)
        # Where a cell stands for several samples, the next is not the next sample.
        second = int(re.match(r"sample (\d+)", self.text("#sample"))[1])
        check(0 < second < 50 or count == 1, f"sample {second} follows the first")
        equal(self.text("#sample"), self.takers(lists, second), "the second sample, by keys")
        browser.key("Escape")

    def takers(self, lists, sample):
        batch = self.data["samples"]["batch_size"]
        found = [
            f"rank {rank} takes it as number {at + 1:,} (batch {at // batch}, place {at % batch})"
            for rank, list in enumerate(lists)
            for at, it in enumerate(list)
            if it == sample
        ]
        none = "no rank takes it" if self.data["samples"]["complete"] else "not among those that are kept"
        return f"sample {sample}: " + "; ".join(found or [none])

    def buckets(self):
        browser = self.browser
        for number, blocks in enumerate([self.data["model"]["parameters"], self.data["model"]["buckets"]]):
            if not blocks:
                continue
            selector = f"#plan .plan:nth-of-type({number + 1})"
            widths = browser.js(
                "return [...document.querySelectorAll(arguments[0] + ' span')].map(it => it.offsetWidth)", selector
            )
            equal(len(widths), len(blocks), "the blocks")
            sizes = blocks if number else [it["bytes"] for it in blocks]
            check(widths[sizes.index(max(sizes))] == max(widths), "the largest block is not the widest")
            wanted = [f"bucket {i}: " for i in range(len(blocks))] if number else [it["name"] for it in blocks]
            browser.box(selector)
            browser.js("document.querySelector(arguments[0]).focus({preventScroll: true})", selector)
            for name in wanted[:4]:
                browser.key("ArrowRight")
                check(self.tip().startswith(name), f"{self.tip()} instead of {name}")
            left, top, width, height = browser.box(selector)
            browser.hover(left + width * 0.5, top + height / 2)
            check(any(self.tip().startswith(name) for name in wanted), f"{self.tip()} is no block")

    def keyboard(self):
        """The Tab key comes to every control, and it is seen where it is."""
        browser = self.browser
        browser.js("document.activeElement.blur(); scrollTo(0, 0)")
        wanted = browser.js(
            "return [...document.querySelectorAll('a, button:enabled, input, select, [tabindex=\"0\"]')].length"
        )
        seen = 0
        for _ in range(wanted + 2):
            browser.key("Tab")
            style = browser.js(
                "const it = document.activeElement; if (it === document.body || it.dataset.reached) return null;"
                "it.dataset.reached = 1; const style = getComputedStyle(it);"
                "return [it.id || it.outerHTML.slice(0, 60), style.outlineStyle, parseFloat(style.outlineWidth)]"
            )
            if style:
                seen += 1
                check(style[1] != "none" and style[2] >= 2, f"{style} does not show that it has the focus")
        equal(seen, wanted, "how many controls the Tab key reaches")

    def sees(self, view, what):
        """The timeline shows this range, as far as float64 is exact."""
        for found, wanted in zip(self.view(), view):
            close(found, wanted, what, by=1e-12)

    def paper(self):
        """On paper all is light, at its whole range and without controls; the screen is as before after that."""
        browser, view = self.browser, None
        if self.has("#lanes"):
            browser.press("#zoom-all")
            view = self.view()
            browser.press("#zoom-in")
            zoomed = self.view()
        dispatch = "dispatchEvent(new Event(arguments[0]))"
        browser.js(dispatch, "beforeprint")
        browser.tell("Emulation.setEmulatedMedia", media="print")
        shown = "return [...document.querySelectorAll('.controls, nav, #tip')].filter(it => it.getClientRects().length).length"
        equal(browser.js(shown), 0, "controls on paper")
        equal(
            browser.js("return getComputedStyle(document.body).backgroundColor"),
            "rgba(0, 0, 0, 0)",
            "the ground of paper",
        )
        if view:
            self.sees(view, "the timeline on paper")
        browser.js(dispatch, "afterprint")
        browser.light(False)
        browser.drawn()
        made = browser.paper()
        check(made.startswith(b"%PDF"), "nothing was printed")
        if view:
            self.sees(zoomed, "the timeline after printing")
            browser.press("#zoom-all")
        return made

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
        light = self.browser.js(corner)
        check(dark is None or dark != light, "the page looks the same in the dark")


def try_page(browser, path, pictures):
    url, name = path.resolve().as_uri(), path.stem
    for screen, (width, height, touch) in SCREENS.items():
        browser.screen(width, height, touch=touch)
        browser.requests()  # those of the page before
        report = Report(browser, url, name)
        report.layout(width)
        report.numbers()
        report.curves()
        report.timeline(touch)
        report.samples()
        report.buckets()
        report.keyboard()
        report.changes_with_the_light()
        paper = report.paper()
        equal(browser.console(), [], f"the console of {name}")
        equal({it for it in browser.requests() if not it.startswith("data:")}, {url}, "what was asked for")
        if pictures:
            (pictures / f"{name}-{screen}.pdf").write_bytes(paper)
            for dark in [False, True]:
                browser.screen(width, height, dark, touch)
                browser.open(url)
                light = "dark" if dark else "light"
                browser.picture(pictures / f"{name}-{screen}-{light}.png")
                if steps := [it[4] for lane in report.entries for it in lane if it[4] >= 0]:
                    browser.write("#step-number", str(max(steps[: len(steps) // 2])))
                    for _ in range(4):
                        browser.press("#next-slice")
                    browser.picture(pictures / f"{name}-{screen}-{light}-step.png", "#timeline")
        print(f"{name}, {screen}: all as in its data", flush=True)


def main():
    given = pathlib.Path(sys.argv[1]).resolve()
    pictures = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if pictures:
        pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        pages = [given]
        if given.suffix != ".html":
            pages = [pathlib.Path(folder) / f"{name}.html" for name in RUNS]
            for page in pages:
                code, *flags = RUNS[page.stem]
                run = [given, *flags, f"--report={page}"]
                found = subprocess.run(run, stdout=subprocess.DEVNULL, check=False).returncode
                equal(found, code, f"the exit code of {flags}")
        for page in pages:
            try_page(browser, page, pictures)


if __name__ == "__main__":
    main()
