"""Take a screenshot of the top of a report: python docs/screenshot.py runs/garage/report.html

Needs Chromium with its driver, and Selenium; writes docs/assets/report.png.
"""

import base64
import shutil
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WIDTH, HEIGHT = 1200, 1840


def photograph(page: Path) -> bytes:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    flags = [
        "--headless=new",
        "--hide-scrollbars",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
    ]
    for flag in [*flags, f"--user-data-dir={tempfile.mkdtemp()}"]:
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.resolve().as_uri())
        time.sleep(3)
        return base64.b64decode(browser.get_screenshot_as_base64())
    finally:
        browser.quit()


if __name__ == "__main__":
    (Path(__file__).parent / "assets" / "report.png").write_bytes(photograph(Path(sys.argv[1])))
