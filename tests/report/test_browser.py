"""The report in a real browser: nothing fails to load or run, the drawings are there, and it prints."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from confide.report import render
from confide.running.fit import Run
from tests.report.runs import class_evaluation, real_evaluation

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium binary")


def browse(folder: Path, page: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "page.html").write_text(page, encoding="utf-8")
    place = (folder / "page.html").as_uri()
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, place]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=folder)


POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def probed(page: str, script: str) -> str:
    """The page with a script that looks at it, which its own policy would not let run."""
    assert len(POLICY.findall(page)) == 1
    return POLICY.sub("", page).replace("</body>", script)


PROBE = """<script>
addEventListener("load", () => {
  const drawn = [...document.querySelectorAll("svg.plot")].map((one) => one.getBoundingClientRect());
  const seen = drawn.filter((box) => box.width > 200 && box.height > 100).length;
  const wide = document.documentElement.scrollWidth > innerWidth + 1;
  document.title = `probe plots=${drawn.length} seen=${seen} wide=${wide}`;
});
</script></body>"""


@pytest.fixture(params=["classes", pytest.param("numbers", marks=pytest.mark.slow)])
def page(request: pytest.FixtureRequest, class_run: Run, real_run: Run) -> str:
    if request.param == "classes":
        return render(class_run, evaluation=class_evaluation())
    return render(real_run, evaluation=real_evaluation())


@pytest.mark.parametrize("width", [pytest.param(1200, marks=pytest.mark.slow), 500])
def test_drawings_are_visible_and_the_console_is_silent(page: str, width: int, tmp_path: Path) -> None:
    """A drawing of no size, a page wider than its window, or anything that the browser complains about."""
    options = ("--dump-dom", "--enable-logging=stderr", f"--window-size={width},900")
    assert "CONSOLE" not in browse(tmp_path, page, *options).stderr
    shown = browse(tmp_path, probed(page, PROBE), *options)
    assert "CONSOLE" not in shown.stderr
    found = re.search(r"<title>probe plots=(\d+) seen=(\d+) wide=(\w+)", shown.stdout)
    assert found is not None
    assert int(found[1]) == int(found[2]) >= 4
    assert found[3] == "false"


def test_the_console_would_be_heard(page: str, tmp_path: Path) -> None:
    broken = page.replace("</body>", "<script>nothing.at.all</script></body>")
    assert "CONSOLE" in browse(tmp_path, broken, "--dump-dom", "--enable-logging=stderr").stderr


def test_it_prints_on_a_few_pages(page: str, tmp_path: Path) -> None:
    browse(tmp_path, page, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 9


def test_dark_follows_the_reader(page: str, tmp_path: Path) -> None:
    probe = '<script>document.title = "probe " + getComputedStyle(document.body).backgroundColor</script></body>'
    seen = []
    for setting in ("light", "dark"):
        folder = tmp_path / setting
        folder.mkdir()
        options = ("--dump-dom", f"--blink-settings=preferredColorScheme={1 if setting == 'light' else 0}")
        found = re.search(r"<title>probe rgb\((\d+)", browse(folder, probed(page, probe), *options).stdout)
        assert found is not None
        seen.append(int(found[1]))
    assert seen[0] > 200 > 60 > seen[1]


CONTRAST = """<script>
const light = (text) => {
  const linear = (one) => (one <= 10 ? one / 3294.6 : ((one / 255 + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
addEventListener("load", () => {
  const found = [...document.querySelectorAll("svg.plot text, figcaption, figure h4")].map((one) => {
    const style = getComputedStyle(one);
    const paper = light(getComputedStyle(one.closest("figure")).backgroundColor);
    return ratio(light(one.closest("svg") ? style.fill : style.color), paper);
  });
  document.title = `probe texts=${found.length} least=${Math.min(...found).toFixed(2)}`;
});
</script></body>"""


@pytest.mark.parametrize("setting", ["light", "dark"])
def test_text_of_drawings_stands_out_from_their_paper(page: str, setting: str, tmp_path: Path) -> None:
    """Drawings carry colours of their own: dark ink on a dark page would vanish. 4.5 is what WCAG asks for."""
    options = ("--dump-dom", f"--blink-settings=preferredColorScheme={1 if setting == 'light' else 0}")
    shown = browse(tmp_path, probed(page, CONTRAST), *options).stdout
    found = re.search(r"<title>probe texts=(\d+) least=([\d.]+)", shown)
    assert found is not None
    assert int(found[1]) > 20
    assert float(found[2]) >= 4.5


def test_ink_that_ignores_the_dark_would_be_seen(page: str, tmp_path: Path) -> None:
    broken = page.replace('.plot [style*="fill: #1f2933"] { fill: var(--ink) !important; }', "")
    assert broken != page
    shown = browse(tmp_path, probed(broken, CONTRAST), "--dump-dom", "--blink-settings=preferredColorScheme=0")
    found = re.search(r"<title>probe texts=\d+ least=([\d.]+)", shown.stdout)
    assert found is not None
    assert float(found[1]) < 2
