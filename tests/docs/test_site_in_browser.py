"""The documentation's look in a real browser: contrast of every text, by day and by night, and no complaint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_documents import CHROMIUM, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium binary")]

PAGE = '''# A page

Words, `code`, a [link](index.md) and **strong** ones.

## A second heading

| column | another |
|---|---|
| 1 | `two` |

!!! note "A note"
    What stands in it.

```python
# a comment
@decorated
class One(Two):
    """A text."""
    def three(self, four: int = 5, *six: float) -> None:
        raise ValueError(f"{four!r}") if four > 6.5 else print(None, True)
```

```sh
confide fit train.csv --epsilon 1  # a remark
```

```toml
records = 2000  # a remark
[columns.age]
bounds = [18, 80]
```
'''
# Colours may let others through: they are laid over each other from the page on.
PROBE = """<style>* { transition: none !important }</style><script>addEventListener("load", () => setTimeout(() => {
  document.body.dataset.mdColorScheme = "SCHEME";
  setTimeout(measure, 1000);
}, 500));
function measure() {
  const parts = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
  const ground = (one) => {
    if (!one) return [255, 255, 255];
    const own = parts(getComputedStyle(one).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(one.parentElement));
  };
  const linear = (one) => (one <= 10 ? one / 3294.6 : ((one / 255 + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => { const [r, g, b] = rgb.map(linear); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect(), style = getComputedStyle(one);
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !box.width || !box.height || style.visibility === "hidden" || one.closest("script, style")) continue;
    if (!one.checkVisibility({ opacityProperty: true })) continue;
    const below = ground(one), [a, b] = [light(over(parts(style.color), below)), light(below)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, one.className + " " + one.textContent.trim().slice(0, 30)]);
  }
  found.sort((a, b) => a[0] - b[0]);
  document.title = "probe " + JSON.stringify({texts: found.length, worst: found.slice(0, 6)});
}</script></body>"""


def built(folder: Path, style: str, scheme: str) -> Path:
    """One page under the settings of the whole site, but for what is made of the code."""
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(PAGE, encoding="utf-8")
    (folder / "docs" / "style.css").write_text(style, encoding="utf-8")
    whole = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    kept = [
        part
        for part in re.split(r"^(?=\S)", whole, flags=re.M)
        if re.match(r"theme|markdown_extensions|extra_css", part)
    ]
    (folder / "mkdocs.yml").write_text(
        "site_name: t\nuse_directory_urls: false\nplugins: []\n" + "".join(kept), encoding="utf-8"
    )
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=300,
    )
    page = folder / "site" / "index.html"
    page.write_text(
        page.read_text(encoding="utf-8").replace("</body>", PROBE.replace("SCHEME", scheme)), encoding="utf-8"
    )
    return page


def probed(page: Path, folder: Path) -> tuple[dict[str, Any], str]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=8000"]
    options += ["--enable-logging=stderr"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r"<title>probe (\{.*?\})</title>", shown.stdout)
    assert found is not None, shown.stdout[:300]
    values: dict[str, Any] = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    return values, shown.stderr


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_every_text_can_be_read(scheme: str, tmp_path: Path) -> None:
    """4.5 is the contrast that WCAG asks for."""
    page = built(tmp_path, (ROOT / "docs" / "style.css").read_text(encoding="utf-8"), scheme)
    found, complaints = probed(page, tmp_path)
    assert "CONSOLE" not in complaints
    assert found["texts"] > 30
    assert found["worst"][0][0] >= 4.5, found["worst"]


def test_pale_code_is_seen(tmp_path: Path) -> None:
    page = built(tmp_path, ".highlight .c1 { color: #bbb }", "default")
    found, _ = probed(page, tmp_path)
    assert found["worst"][0][0] < 4.5
