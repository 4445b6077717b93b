"""The exported page: its data is no markup, its policy allows one script, and equal rollouts give equal files."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from rollyard.exports import html
from rollyard.exports.html import TooLarge, page, write_page
from rollyard.exports.modules import join_modules
from rollyard.exports.replies import from_record
from tests.exports.rollouts import rollout

HOSTILE = "</script><script>alert(1)</script><!-- \u2028\u2029 \ud800 \x00 & <img src=x onerror=alert(1)> ]]>"


class Elements(HTMLParser):
    """The elements of a page, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}, ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def elements(*rollouts: dict) -> Elements:
    return Elements("".join(page(from_record(one) for one in rollouts)))


def test_hostile_contents_stay_data():
    parsed = elements(rollout("one", text=HOSTILE), rollout("two"))
    scripts = [(attributes, text) for tag, attributes, text in parsed.found if tag == "script"]
    assert [attributes["type"] for attributes, _ in scripts] == ["application/json", "module", "text/plain"]
    assert not [tag for tag, _, _ in parsed.found if tag in ("img", "link", "iframe", "a")]
    recorded = json.loads(scripts[0][1])
    status, body = recorded["/v1/rollouts/one?include=trajectory&run=grpo"]
    assert status == 200 and body == rollout("one", text=HOSTILE)
    assert [row["id"] for row in recorded["/v1/results"][1]["rows"]] == ["one", "two"]
    assert recorded["/v1/rollouts/one/timeline?run=grpo"][0] == 404


def test_the_policy_allows_exactly_the_script_and_the_styles_of_the_file():
    parsed = elements(rollout())
    (policy,) = [a["content"] for tag, a, _ in parsed.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    directives = dict(item.strip().split(" ", 1) for item in policy.split(";"))
    contents = {"style-src": [], "script-src": []}
    for tag, attributes, text in parsed.found:
        if tag == "style":
            contents["style-src"].append(text)
        elif tag == "script" and attributes["type"] == "module":
            contents["script-src"].append(text)
    for name, (text,) in contents.items():
        assert directives[name] == f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert directives["default-src"] == "'none'" and not {"connect-src", "img-src"} & directives.keys()
    assert {*re.findall(r"\bhttps?://[\w.]+", contents["script-src"][0])} <= {"http://www.w3.org"}, "names of XML"


def test_equal_rollouts_give_equal_files(tmp_path: Path):
    for name in ("a.html", "b.html"):
        write_page(tmp_path / name, [from_record(rollout())])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_too_much_data_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "page.html"
    write_page(path, [from_record(rollout())])
    before = path.read_bytes()
    monkeypatch.setattr(html, "MAX_BYTES", 1000)
    with pytest.raises(TooLarge, match="exceeds 0 MiB after 0 rollouts"):
        write_page(path, [from_record(rollout())])
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_the_page_has_only_the_modules_of_the_rollout_view():
    folder = files("rollyard.web")
    _, modules = join_modules(html.ENTRY, lambda path: folder.joinpath(path).read_text())
    assert "js/views/rollout.js" in modules
    assert {path for path in modules if path.startswith("js/views/")} <= {"js/views/rollout.js"}
    assert "js/main.js" not in modules


def joined(**modules: str) -> str:
    return join_modules("js/main.js", {f"js/{name}.js": text for name, text in modules.items()}.__getitem__)[0]


def test_modules_are_joined_in_the_order_of_their_imports():
    script = joined(
        main='import d, { a as b } from "./other.js";\nimport * as all from "./other.js";\nb(d, all);\n',
        other='export { x } from "./last.js";\nexport const a = 1, c = 2;\nexport default class {}\n',
        last="export function x() {}\n",
    )
    assert script.index("// js/last.js") < script.index("// js/other.js") < script.index("// js/main.js")
    assert "const { default: d, a: b } = $module1;" in script and "const all = $module1;" in script
    assert "return { x: $module0.x, a: a, default: $default };" in script


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"main": "export let a = 1;"}, "not supported: export let a"),
        ({"main": "export const { a } = b;"}, "not supported: export const"),
        ({"main": 'import a from "react";'}, "not a relative path"),
        ({"main": "import(name)"}, "not supported: import"),
        ({"main": "x = import.meta.url"}, "not supported: import.meta"),
        (
            {"main": 'import "./a.js";', "a": 'import "./main.js";'},
            "circular import: js/main.js → js/a.js → js/main.js",
        ),
    ],
)
def test_other_forms_of_modules_are_refused(modules: dict[str, str], says: str):
    with pytest.raises(ValueError, match=says):
        joined(**modules)
