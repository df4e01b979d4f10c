"""A headless Chromium with one page: real mouse, keys and fingers, its console, its network and its paper."""

import base64
import json
import shutil
import sys

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

# Two frames later what an event has changed is drawn.
DRAWN = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9, "Escape": 27}


def installed(names):
    for name in names:
        if path := shutil.which(name):
            return path
    sys.exit(f"browser.py: please install {' or '.join(names)} (Debian: chromium chromium-driver)")


class Browser:
    def __init__(self):
        options = webdriver.ChromeOptions()
        options.binary_location = installed(["chromium", "chromium-browser", "google-chrome"])
        for flag in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(installed(["chromedriver"])))
        self.driver.set_script_timeout(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.driver.quit()

    def tell(self, command, **what):
        return self.driver.execute_cdp_cmd(command, what)

    def screen(self, width, height, touch=False):
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            mobile=touch,
            deviceScaleFactor=2 if touch else 1,
        )
        self.tell("Emulation.setTouchEmulationEnabled", enabled=touch, maxTouchPoints=2)
        self.light(False)

    def light(self, dark):
        # Without motion, so that what is scrolled to is there at once.
        features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in features.items()]
        self.tell("Emulation.setEmulatedMedia", media="", features=features)

    def open(self, url):
        self.driver.get(url)
        self.drawn()

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def drawn(self):
        self.driver.execute_async_script(DRAWN)

    def console(self):
        return [f"{it['level']}: {it['message']}" for it in self.driver.get_log("browser")]

    def requests(self):
        """The addresses that were asked for since the last call."""
        events = [json.loads(it["message"])["message"] for it in self.driver.get_log("performance")]
        sent = [it for it in events if it["method"] == "Network.requestWillBeSent"]
        return {it["params"]["request"]["url"] for it in sent}

    def box(self, selector):
        """Where an element is within the window, after it was brought there: left, top, width, height."""
        self.driver.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self.drawn()  # the scrolling is told of in the next frame, and hides the tip
        return self.js(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]",
            selector,
        )

    def mouse(self, kind, x, y, **more):
        self.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, x, y):
        self.mouse("mouseMoved", x, y)

    def click(self, x, y):
        self.drag([(x, y)])

    def press(self, selector):
        """A click into the middle of an element."""
        left, top, width, height = self.box(selector)
        self.click(left + width / 2, top + height / 2)
        self.drawn()

    def drag(self, points):
        self.mouse("mouseMoved", *points[0])
        self.mouse("mousePressed", *points[0], button="left", buttons=1, clickCount=1)
        for point in points[1:]:
            self.mouse("mouseMoved", *point, button="left", buttons=1)
        self.mouse("mouseReleased", *points[-1], button="left", clickCount=1)
        self.drawn()

    def wheel(self, x, y, by):
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by)
        self.drawn()

    def touch(self, *moments):
        """Fingers, each moment a list of points; they are lifted after the last."""
        for i, points in enumerate(moments):
            points = [{"x": x, "y": y, "id": id} for id, (x, y) in enumerate(points)]
            self.tell("Input.dispatchTouchEvent", type="touchMove" if i else "touchStart", touchPoints=points)
        self.tell("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.drawn()

    def key(self, key):
        what = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        if len(key) == 1:
            what["text"] = key
        self.tell("Input.dispatchKeyEvent", type="keyDown", **what)
        self.tell("Input.dispatchKeyEvent", type="keyUp", **what)
        self.drawn()

    def write(self, selector, text):
        """Types into a field in place of what it holds, and sends its form."""
        self.js("document.querySelector(arguments[0]).select()", selector)
        self.tell("Input.insertText", text=text)
        self.tell("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
        self.tell("Input.dispatchKeyEvent", type="keyUp", key="Enter", windowsVirtualKeyCode=13)
        self.drawn()

    def paper(self):
        """What a printer would get, as PDF."""
        made = self.tell("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        self.drawn()
        return base64.b64decode(made["data"])
