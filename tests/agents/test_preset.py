"""Presets: errors name their field, and templates are filled once."""

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.agents.harness import HarnessAgent
from rollyard.agents.installation import AgentInstalls
from rollyard.agents.preset import PresetError, built_in, read_preset
from rollyard.agents.registry import Agents
from rollyard.agents.template import render
from rollyard.core import Task
from rollyard.core.failure import TaskInvalid, UnknownAgent

PLAIN = 'name = "a"\ncommand = ["x"]\n'


@pytest.mark.parametrize("name", sorted(built_in()))
def test_every_built_in_preset_loads_and_is_an_agent(name: str):
    preset = read_preset(built_in()[name])
    assert preset.name == name and preset.about
    agent = Agents().get(name)
    assert isinstance(agent, HarnessAgent) and agent.preset == preset


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name = ", "the file: is not valid TOML"),
        ('command = ["x"]', "the preset: Object missing required field `name`"),
        ('name = "A b"', "name: "),
        ('name = "a"\ncommand = [1]', "command[0]: Expected `str`, got `int`"),
        ('name = "a"\ncommand = ["{{nothing}}"]', "command[0]: unknown {{nothing}}; there are arch, base_url"),
        ('name = "a"\ncommand = ["{{model|upper}}"]', "command[0]: unknown filter |upper"),
        ('name = "a"\ncommand = ["x{{python}}"]', "command[0]: {{python}} is several arguments"),
        (PLAIN + 'stdin = "{{python}}"', "stdin: {{python}} is several arguments"),
        (PLAIN + 'speed = "fast"', "the preset: Object contains unknown field `speed`"),
        (PLAIN + 'dialect = "latin"', "dialect: "),
        (PLAIN + 'workdir = "here"', "workdir: an absolute path"),
        (PLAIN + 'workdir = "{{workdir}}"', "workdir: unknown {{workdir}}"),
        (PLAIN + 'model = "{{arch}}"', "model: a name of at most"),
        (PLAIN + '[env]\n"A=B" = "x"', "env.A=B: 1 to 200 characters"),
        (PLAIN + f'[env]\n{"A" * 300} = "x"', "env.AAA"),
        (PLAIN + '[env]\nA = "{{nothing}}"', "env.A: unknown"),
        (PLAIN + '[[files]]\npath = "relative"', "files[0].path: the absolute path"),
        (PLAIN + '[[files]]\npath = "/x"\nmode = "rw"', "files[0].mode: octal"),
        (PLAIN + '[[files]]\npath = "/x"\ncontent = "{{nothing}}"', "files[0].content: unknown"),
        (PLAIN + '[install]\nkind = "pip"', "install.packages: "),
        (PLAIN + '[install]\npackages = ["x==1"]', "install.packages: "),
        (PLAIN + '[install]\nkind = "pip"\npackages = ["x>=1"]', "install.packages[0]: a package pinned"),
        (PLAIN + '[install]\nkind = "npm"\npackages = ["x@latest"]', "install.packages[0]: a package pinned"),
        (PLAIN + '[install]\nkind = "npm"\npackages = ["x@1{{model}}"]', "install.packages[0]: only {{arch}}"),
        (PLAIN + '[install]\nkind = "pip"\npackages = ["x==1"]\nremove = ["../y"]', "install.remove[0]: "),
    ],
)
def test_an_error_names_its_field(text: str, error: str):
    with pytest.raises(PresetError) as caught:
        read_preset(text)
    assert str(caught.value).startswith(error), caught.value


def test_a_raw_file_is_not_a_template():
    preset = read_preset(PLAIN + '[[files]]\npath = "/x"\ncontent = "{{jinja}}"\nraw = true')
    assert preset.files[0].content == "{{jinja}}"


def test_inserted_values_are_not_read_as_templates():
    assert render("{{ a }} {{b|sh}}", {"a": "{{b}}", "b": "it's"}) == """{{b}} 'it'"'"'s'"""


@given(st.text())
def test_json_in_a_template_is_json_and_toml_and_printable(text: str):
    filled = render("x = {{t|json}}", {"t": text})
    assert json.loads(filled.removeprefix("x = ")) == text
    if not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text):  # TOML cannot represent half a surrogate pair
        assert tomllib.loads(filled) == {"x": text}
    assert not any(0x7F <= ord(letter) < 0xA0 or ord(letter) in (0x2028, 0xFEFF) for letter in filled)


def test_a_task_adds_to_a_preset_and_replaces_nothing_of_its_command():
    preset = read_preset(PLAIN + 'model = "m"\n[env]\nA = "1"\nB = "2"\n[[files]]\npath = "/one"')
    options = {"args": ["--more"], "env": {"B": "3"}, "files": [{"path": "/two"}], "model": "other"}
    merged = preset.with_options(options)  # type: ignore[arg-type]
    assert merged.command == ("x", "--more") and merged.model == "other"
    assert merged.env == {"A": "1", "B": "3"} and [file.path for file in merged.files] == ["/one", "/two"]
    assert preset.with_options({}) == preset
    for wrong, expected in (
        ({"command": ["y"]}, "agent.options.command: unknown; there are args, env, files, model"),
        ({"args": "x"}, "agent.options."),
        ({"args": ["{{nothing}}"]}, "agent.options.command[1]: unknown {{nothing}}"),
        ({"env": {"A": None}}, "agent.options.env"),
    ):
        with pytest.raises(TaskInvalid) as caught:
            preset.with_options(wrong)
        assert caught.value.detail.startswith(expected)


# --- the registry ---------------------------------------------------------------------------------------------


def test_an_operators_presets_are_agents_and_override_built_in_ones(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('name = "mine"\ncommand = ["x"]')
    (tmp_path / "command.toml").write_text('name = "command"\ncommand = ["theirs"]')
    agents = Agents(installs=AgentInstalls(tmp_path))
    assert {"native", "mine", "command", "mini-swe-agent"} <= set(agents.names)
    mine, command = agents.get("mine"), agents.get("command")
    assert isinstance(mine, HarnessAgent) and isinstance(command, HarnessAgent)
    assert command.preset.command == ("theirs",)
    assert "native" not in agents.presets


def test_a_broken_preset_has_a_reason_and_does_not_affect_others(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "mine.toml").write_text('name = "mine"\ncommand = [1]')
    (tmp_path / "yours.toml").write_text('name = "hers"\ncommand = ["x"]')
    agents = Agents(installs=AgentInstalls(tmp_path))
    with pytest.raises(UnknownAgent, match=r"the preset 'mine' cannot be used: command\[0\]"):
        agents.get("mine")
    with pytest.raises(UnknownAgent, match="like the file's name"):
        agents.get("yours")
    assert [getattr(record, "agent", "") for record in caplog.records] == ["mine", "yours"]
    assert agents.get("native").name == "native"


def test_an_unreadable_file_is_a_broken_preset_too(tmp_path: Path):
    (tmp_path / "latin.toml").write_bytes('name = "latin"\nabout = "für"\ncommand = ["x"]'.encode("latin-1"))
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "gone.toml").symlink_to(tmp_path / "nowhere")
    agents = Agents(installs=AgentInstalls(tmp_path))
    for name in ("latin", "folder", "gone"):
        assert name in agents.presets
        with pytest.raises(UnknownAgent, match=f"the preset '{name}' cannot be used: the file: cannot be read"):
            agents.get(name)
    assert agents.get("codex").name == "codex"


def test_a_script_beside_a_preset_is_copied_as_it_is(tmp_path: Path):
    (tmp_path / "agent.py").write_text('print(f"{{no}} template")')
    text = PLAIN + '[[files]]\npath = "/agent.py"\nsource = "agent.py"'
    (file,) = read_preset(text, tmp_path).files
    assert (file.content, file.raw, file.source) == ('print(f"{{no}} template")', True, "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('source = "none.py"', r"files\[0\].source: none.py cannot be read"),
        ('source = "../agent.py"', r"files\[0\].source: the name of a file beside the preset"),
        ('source = "agent.py"\ncontent = "x"', r"files\[0\].source: .* and no content"),
    ],
)
def test_a_script_that_cannot_be_used_is_reported(tmp_path: Path, line: str, says: str):
    (tmp_path / "agent.py").touch()
    with pytest.raises(PresetError, match=says):
        read_preset(PLAIN + f'[[files]]\npath = "/agent.py"\n{line}', tmp_path)


def test_a_task_cannot_name_a_file_of_the_host():
    options = {"files": [{"path": "/agent.py", "source": "token"}]}
    with pytest.raises(TaskInvalid, match=r"agent.options.files\[0\].source: only a preset"):
        read_preset(PLAIN).with_options(options)


# --- the page -------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/how-to/run-your-agent-program.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_page_are_presets_and_tasks(tmp_path: Path):
    text, script = blocks("toml")
    preset = read_preset(text)
    assert preset.needs_python and preset.is_installable and len(preset.try_.turns) == 2
    (tmp_path / "my-script.py").write_text("print(1)")
    assert read_preset(script, tmp_path).files[0].content == "print(1)"
    for task in (msgspec.json.decode(block, type=Task) for block in blocks("json")):
        agent = Agents().get(task.agent.name)
        assert isinstance(agent, HarnessAgent)
        agent.preset.with_options(task.agent.options)
