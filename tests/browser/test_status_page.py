"""The status page in a real browser: what is drawn, that its numbers are those of `/status.json`, that it copes."""

import base64
import json
import math
import os
from pathlib import Path

import pytest

from benchmarks.browser import look, wait_for
from ps.monitoring.metrics import TestResult
from tests.unit.status_run import Watched

PICTURES = os.environ.get("WEIGHMASTER_TEST_PICTURES")
"""A directory to put pictures of the page into, for people to look at; none are taken without."""

PIXEL = """
const canvas = document.querySelector('#strip canvas');
const rows = arguments[0], row = arguments[1], part = arguments[2];
const x = Math.floor(canvas.width * part), y = Math.floor(canvas.height * (row + 0.5) / rows);
return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data];
"""
COLOUR = """
const probe = document.createElement('i'); document.body.append(probe);
probe.style.color = getComputedStyle(document.documentElement).getPropertyValue(arguments[0]);
const found = getComputedStyle(probe).color; probe.remove();
return [...found.match(/\\d+/g).map(Number), 255];
"""


def run_with_a_muted_worker(run_dir, rounds=240):
    """Five workers, one muted from round 60 on and refused twice before; another is lost, and waited for."""
    names = ["site-north", "site-east", "site-south", "site-west", "broken-sensor"]
    watched = Watched(run_dir, workers=5, steps=400, names=names, aggregation="master").start()
    for step in range(rounds):
        loss = 2.2 * math.exp(-step / 90) + 0.12 + 0.05 * math.sin(step * 1.7)
        accuracy = 0.96 - 0.85 * math.exp(-step / 60) + 0.015 * math.sin(step * 2.3)
        others = [0.2, 0.18, 0.22, 0.2] if step < 60 else [0.26, 0.23, 0.27, 0.235]
        last = 0.2 if step < 60 else 0.005
        spoiled = math.nan if step in (100, 101) else loss * 1.3
        seconds = 0.1 + 0.02 * math.sin(step / 9)
        watched.round([*others, last], [loss] * 4 + [spoiled], seconds, examples=32, accuracy=accuracy)
        if step % 40 == 39:
            watched.record.metrics.tested(TestResult(step, loss, 0.95 - 0.8 * math.exp(-step / 60)))
            watched.publish(wait=0)
    for client in (*watched.clients[:3], watched.clients[4]):
        watched.run.push(client)
    watched.run.lose(watched.clients[3], "host-3 has not been heard of for 30 s")
    watched.run.now += 6
    return watched


def text(driver, selector):
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def number(shown):
    return float(shown.replace(",", ""))


def table(driver, selector):
    rows = "[...document.querySelectorAll(arguments[0] + ' tbody tr')]"
    return driver.execute_script(
        f"return {rows}.map(row => [...row.cells].map(cell => cell.textContent))", selector
    )


def complaints(driver):
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def picture(driver, name):
    if PICTURES:
        size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        Path(PICTURES, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def test_the_numbers_on_the_page_are_those_of_the_data(open_browser, serve, tmp_path):
    watched = run_with_a_muted_worker(tmp_path)
    data = json.loads(watched.publish().document())
    url, _ = serve(watched.feed)
    page = open_browser()
    look(page, url)
    run, figures = data["run"], data["figures"]
    assert number(text(page, "#step")) == run["step"] == 240
    assert number(text(page, "#steps")) == run["steps"] == 400
    assert number(text(page, "#loss")) == pytest.approx(figures["loss"], rel=1e-3)
    assert number(text(page, "#accuracy")) == pytest.approx(figures["accuracy"], rel=1e-3)
    assert number(text(page, "#test-accuracy").split()[0]) == pytest.approx(figures["test_accuracy"], rel=1e-3)
    assert text(page, "#phase") == "running"
    sentence = data["waiting"]["sentence"]
    assert text(page, "#waiting").lower() == f"{sentence}." and sentence.startswith(
        "round 240 waits for rank 3 since 7 s"
    )
    shown = table(page, "#workers")
    assert len(shown) == len(data["workers"]) == 5
    for cells, row in zip(shown, data["workers"], strict=True):
        assert cells[1:3] == [row["name"], row["host"]]
        counts = ("rank", "muted_rounds", "pushes", "rejected", "stale", "late", "duplicates")
        assert [number(cells[at]) for at in (0, 6, 7, 8, 9, 10, 11)] == [row[name] for name in counts]
        assert [number(cells[at]) for at in (4, 5)] == pytest.approx([row["weight"], row["share"]], rel=1e-3)
    assert shown[3][3] == "lost, 7 s ago" and "not been heard of" in shown[3][-1]
    assert data["workers"][4]["rejected"] == 2 and "muted" in shown[4][3] and "muted" not in shown[0][3]
    refused = table(page, "#refusals")
    assert [cells[1:4] for cells in refused] == [[each["name"], "rejected", "2"] for each in data["refusals"]]
    assert refused[0][4] == "the loss is nan"
    assert complaints(page) == []
    picture(page, "status")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_curves_and_strip_are_drawn(open_browser, serve, tmp_path, dark):
    watched = run_with_a_muted_worker(tmp_path)
    history = json.loads(watched.publish().document())["history"]
    url, _ = serve(watched.feed)
    page = open_browser(dark=dark)
    look(page, url)
    for chart, column in (("loss", 2), ("accuracy", 3), ("rate", 4)):
        drawn = page.execute_script(
            "return document.querySelector(arguments[0]).getAttribute('d')", f"#{chart}-chart .curve"
        )
        assert drawn.count("L") + drawn.count("M") == sum(p[column] is not None for p in history["points"])
    assert page.execute_script("return document.querySelectorAll('#accuracy-chart circle').length") == 6
    assert complaints(page) == []
    names = page.execute_script(
        "return [...document.querySelectorAll('#strip li')].map(e => [e.textContent, e.className])"
    )
    assert names[0] == ["site-north", ""] and names[4] == ["broken-sensor", "muted"]
    muted = page.execute_script(COLOUR, "--muted")
    pixel = lambda row, part: page.execute_script(PIXEL, 5, row, part)  # noqa: E731
    assert pixel(4, 0.9) == muted, "the muted worker is seen as muted"
    assert muted not in (pixel(4, 0.1), pixel(0, 0.9), pixel(0, 0.1)), "before, it was not; the others never were"
    assert pixel(0, 0.9)[3] == 255
    assert table(page, "#muted-table") == [["broken-sensor", "muted", "60 to 239"]]
    body = page.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(body) < 200) is dark
    picture(page, "dark" if dark else "light")


def test_what_is_new_is_drawn_without_reloading(open_browser, serve, tmp_path):
    watched = Watched(tmp_path, workers=1, steps=5000).start()
    watched.round([1.0])
    watched.publish()
    url, _ = serve(watched.feed)
    page = open_browser()
    look(page, url)
    assert text(page, "#step") == "1"
    for _ in range(30):
        watched.round([1.0])
    watched.publish()
    wait_for(page, "document.querySelector('#step').textContent === '31'")
    points = "document.querySelector('#loss-chart svg').dataset.points"
    assert page.execute_script(f"return {points}") == "31"
    for _ in range(1500):  # thinned meanwhile: earlier points have become others
        watched.round([1.0])
    count = len(json.loads(watched.publish().document())["history"]["points"])
    wait_for(page, f"{points} === '{count}'")
    assert text(page, "#step") == "1,531" and "2 steps" in text(page, "#thinning")
    assert complaints(page) == []


def test_64_workers_after_100_000_steps_are_drawn(open_browser, serve, tmp_path):
    watched = Watched(tmp_path, workers=64, steps=200_000).start()
    watched.round([1 / 64] * 64)
    names = [f"site-{rank}" for rank in range(64)]
    fair = dict.fromkeys(names, 1.0)
    for step in range(1, 100_000):
        shares = {**fair, "site-7": 0.0} if step > 50_000 else fair
        watched.feed.history.add(step, 1 / (1 + step / 1000), 0.5, 640, shares, watched.run.now + step / 100)
    count = len(json.loads(watched.publish().document())["history"]["points"])
    url, _ = serve(watched.feed)
    page = open_browser()
    look(page, url)
    assert page.execute_script("return document.querySelector('#loss-chart svg').dataset.points") == str(count)
    assert complaints(page) == []
    muted = page.execute_script(COLOUR, "--muted")
    assert page.execute_script(PIXEL, 64, 7, 0.75) == muted
    assert page.execute_script(PIXEL, 64, 7, 0.25) != muted
    heights = page.execute_script(
        "const c = document.querySelector('#strip canvas'), l = document.querySelector('#strip ol');"
        "return [c.clientHeight, l.clientHeight, document.querySelectorAll('#workers tbody tr').length]"
    )
    assert heights == [64 * 12, 64 * 12, 64], "each name stands beside its row"
    took = page.execute_async_script(
        "const done = arguments[0]; const began = performance.now();"
        "window.dispatchEvent(new Event('resize'));"
        "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)))"
    )
    print(f"drawn within {took:.0f} ms")
    picture(page, "many")


@pytest.mark.parametrize("workers", [1, 64])
def test_a_narrow_screen_shows_all_without_scrolling_sideways(open_browser, serve, tmp_path, workers):
    watched = Watched(tmp_path, workers=workers, names=["x" * 128]).start()
    for _ in range(20):
        watched.round([1 / workers] * workers)
    watched.publish()
    url, _ = serve(watched.feed)
    page = open_browser(width=320, height=640)
    look(page, url)
    assert page.execute_script("return document.documentElement.scrollWidth") == 320
    assert page.execute_script("return document.querySelector('#strip canvas').clientWidth") > 100
    picture(page, f"narrow-{workers}")


def test_names_are_text_whatever_is_in_them(open_browser, serve, tmp_path):
    evil = "<img src=x onerror=document.title='broken'>"
    watched = Watched(tmp_path, workers=2, names=[evil, "</script><b>"]).start()
    watched.round([0.5, 0.0], [1.0, math.nan])
    watched.publish()
    url, _ = serve(watched.feed)
    page = open_browser()
    look(page, url)
    assert [cells[1] for cells in table(page, "#workers")] == [evil, "</script><b>"]
    assert page.execute_script("return document.querySelectorAll('main img, main b').length") == 0
    assert complaints(page) == []


def test_it_says_so_when_the_server_is_gone(open_browser, serve, tmp_path):
    watched = Watched(tmp_path).start()
    watched.round([0.5, 0.5])
    watched.publish()
    url, server = serve(watched.feed)
    page = open_browser()
    look(page, url)
    server.close()
    wait_for(page, "document.body.dataset.connection === 'gone'")
    assert "does not answer since" in text(page, "#banner-text") and text(page, "#step") == "1"


def test_points_are_read_with_the_keyboard(open_browser, serve, tmp_path):
    from selenium.webdriver.common.keys import Keys

    watched = Watched(tmp_path).start()
    for loss in (4.0, 3.0, 2.0):
        watched.round([0.5, 0.5], [loss, loss])
    watched.publish()
    url, _ = serve(watched.feed)
    page = open_browser()
    look(page, url)
    chart = page.find_element("css selector", "#loss-chart svg")
    page.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.HOME)
    assert text(page, "#loss-chart output") == "step 0: 4"
    chart.send_keys(Keys.ARROW_RIGHT)
    assert text(page, "#loss-chart output") == "step 1: 3"
    assert "from 2 to 4, last 2 at step 2" in chart.get_attribute("aria-label")
    page.execute_script("document.querySelector('#loss-chart details').open = true")
    wait_for(page, "document.querySelectorAll('#loss-chart tbody tr').length === 3")
    assert table(page, "#loss-chart table") == [["0", "4"], ["1", "3"], ["2", "2"]]
