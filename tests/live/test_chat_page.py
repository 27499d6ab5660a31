"""The chat page in a real browser, headless, over a real stack that wants an API key."""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from pdserve_client.config import StackConfig
from pdserve_client.stack import POLL_S, Stack

WAIT_S = 60.0
KEY = "key-of-the-page-0123456789"
PHONE = (360, 640)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("page")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    config = StackConfig(
        grpc_port=0,
        http_port=0,
        metrics_port=0,
        worker_port=0,
        api_keys_file=str(keys),
        log_dir=str(folder),
    )
    with Stack(config) as stack:
        for _ in stack.wait_until_ready():
            time.sleep(POLL_S)
        yield stack


@pytest.fixture
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    # Containers let nobody make namespaces, and have little shared memory.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options=options, service=Service(shutil.which("chromedriver"))) as browser:
        yield browser


class Page:
    """What a person sees, and types: the page is used without a mouse."""

    def __init__(self, browser: Chrome, stack: Stack) -> None:
        self.browser = browser
        browser.get(f"http://127.0.0.1:{stack.http_port}/")

    def show_key(self) -> None:
        """Answer the question for a key, which has the focus."""
        self.wait_for(lambda: self.is_shown("#key"))
        self.type(KEY, Keys.ENTER)
        self.wait_for(lambda: "pdserve-tiny" in self.text("#model") and not self.is_shown("#key"))

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        WebDriverWait(self.browser, WAIT_S).until(lambda _: is_so())

    def wait_for_text(self, selector: str, part: str) -> None:
        self.wait_for(lambda: part in self.text(selector))

    def text(self, selector: str) -> str:
        found = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return "\n".join(element.text for element in found)

    def is_shown(self, selector: str) -> bool:
        found = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return any(element.is_displayed() for element in found)

    def type(self, *keys: str) -> None:
        """Into what has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def problems(self) -> list[str]:
        """What the browser complains of, refused scripts and styles among it."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def page(browser: Chrome, stack: Stack) -> Page:
    page = Page(browser, stack)
    page.show_key()
    return page


@contextlib.contextmanager
def stopped_workers(stack: Stack) -> Iterator[None]:
    processes = [worker.process for worker in stack.workers if worker.process is not None]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def test_a_conversation_by_keyboard(page: Page) -> None:
    page.problems()  # that the first call had no key
    page.type("Tell me a story.", Keys.ENTER)
    page.wait_for_text("#status", "tokens/s")
    page.wait_for(lambda: page.is_shown("#send"))
    first = page.text(".assistant p")
    assert len(first) > 20
    assert "first token after" in page.text("#status")

    page.type("And another.", Keys.ENTER)
    page.wait_for(lambda: page.is_shown("#send") and page.text(".assistant p") != first)
    assert page.text(".user p").splitlines() == ["Tell me a story.", "And another."]
    assert page.problems() == []


def test_the_waterfall_of_the_last_answer(page: Page) -> None:
    page.type("Tell me a story.", Keys.ENTER)
    page.wait_for(lambda: page.is_shown("#timing"))
    page.browser.find_element(By.CSS_SELECTOR, "#timing summary").send_keys(Keys.ENTER)
    page.wait_for_text("#route", "disaggregated: ")
    rows = page.text("#waterfall tr").splitlines()
    milliseconds = {row.rsplit(" ", 2)[0]: float(row.rsplit(" ", 2)[1]) for row in rows}
    total = milliseconds["time to first token"]
    stages = rows[1 : rows.index(next(row for row in rows if row.startswith("first to second")))]
    assert sum(float(row.rsplit(" ", 2)[1]) for row in stages) == pytest.approx(total, rel=0.5)


def test_escape_stops_an_answer(page: Page, stack: Stack) -> None:
    with stopped_workers(stack):
        page.type("Tell me a story.", Keys.ENTER)
        page.wait_for(lambda: page.is_shown("#stop"))
        page.type(Keys.ESCAPE)
        page.wait_for_text(".assistant .note", "Stopped.")
    page.type("Tell me a story.", Keys.ENTER)
    page.wait_for_text("#status", "tokens/s")


def test_an_error_in_words(page: Page) -> None:
    page.browser.execute_script("document.activeElement.value = 'word '.repeat(4000)")
    page.type(Keys.ENTER)
    page.wait_for_text(".assistant .error", "at most")
    assert "tokens" in page.text(".assistant .error")
    # What was refused is no part of what is sent next.
    page.type("Hello", Keys.ENTER)
    page.wait_for_text("#status", "tokens/s")


def test_a_wrong_key_is_asked_for_again(browser: Chrome, stack: Stack) -> None:
    page = Page(browser, stack)
    page.wait_for(lambda: page.is_shown("#key"))
    page.type("wrong", Keys.ENTER)
    page.wait_for_text("#model", "not known")
    page.show_key()


def test_it_fits_on_a_phone(page: Page) -> None:
    page.browser.set_window_size(*PHONE)
    page.type("Tell me a story.", Keys.ENTER)
    page.wait_for_text("#status", "tokens/s")
    script = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert page.browser.execute_script(script)
