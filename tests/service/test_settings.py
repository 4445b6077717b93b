"""Settings: four sources in order of precedence, no unknown keys, no secrets shown."""

import json
from pathlib import Path

import pytest

from rollyard.cli.commands.config import masked
from rollyard.service.node_settings import for_nodes, node_settings
from rollyard.service.runtimes import uids_of
from rollyard.service.settings import Settings, SettingsError, load_settings

NOTHING = {"HOME": "/nowhere"}


def test_precedence_is_flags_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "rollyard.toml"
    file.write_text('port = 1\nrun_slots = 2\nlog_level = "error"\n')
    environ = {**NOTHING, "ROLLYARD_PORT": "3", "ROLLYARD_RUN_SLOTS": "4", "ROLLYARD_LOG_FORMAT": ""}
    loaded = load_settings({"port": 5, "host": None}, environ, file)
    settings = loaded.settings
    assert (settings.port, settings.run_slots, settings.log_level, settings.host) == (5, 4, "error", "127.0.0.1")
    assert loaded.sources["port"] == "flag"
    assert loaded.sources["run_slots"] == "env ROLLYARD_RUN_SLOTS"
    assert loaded.sources["log_level"] == f"file {file}"
    assert loaded.sources["host"] == loaded.sources["log_format"] == "default"
    assert set(loaded.sources) == set(Settings.model_fields)


def test_a_file_of_an_environment_is_below_the_folder_of_the_toml_file_also_for_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "project" / "rollyard.toml"
    file.parent.mkdir()
    file.write_text('[environments]\na = "a.py:A"\nb = "/else/b.py:B"\nc = "module.sub:C"\nd = "~/d.py:D"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    settings = load_settings({}, NOTHING, Path("project/rollyard.toml")).settings
    places = {"a": f"{tmp_path}/project/a.py:A", "b": "/else/b.py:B", "c": "module.sub:C", "d": "/home/me/d.py:D"}
    assert settings.environments == places == node_settings(for_nodes(settings), tmp_path, {}).environments
    environ = {**NOTHING, "ROLLYARD_ENVIRONMENTS": '{"a": "a.py:A"}'}
    assert load_settings({}, environ, file).settings.environments == {"a": f"{tmp_path}/a.py:A"}


def test_the_file_is_searched_by_variable_then_here_then_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".config" / "rollyard").mkdir(parents=True)
    (tmp_path / ".config" / "rollyard" / "config.toml").write_text("port = 1")
    environ = {"HOME": str(tmp_path)}
    assert load_settings({}, environ).settings.port == 1
    (tmp_path / "rollyard.toml").write_text("port = 2")
    assert load_settings({}, environ).settings.port == 2
    (tmp_path / "named.toml").write_text("port = 3")
    environ["ROLLYARD_CONFIG"] = str(tmp_path / "named.toml")
    assert load_settings({}, environ).settings.port == 3
    with pytest.raises(SettingsError, match="there is no settings file"):
        load_settings({}, environ, tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "message"),
    [
        ({"prot": 1}, {}, "", r"no setting prot \(among the flags\) — did you mean port\?"),
        ({}, {"ROLLYARD_RUN_SLOT": "1"}, "", "no setting ROLLYARD_RUN_SLOT .*did you mean ROLLYARD_RUN_SLOTS"),
        ({}, {"ROLLYARD_PROT": "1"}, "", "no setting ROLLYARD_PROT .*did you mean ROLLYARD_PORT"),
        ({}, {}, "drain = 3", r"no setting drain \(in .*\) — did you mean drain_s\?"),
        ({}, {}, "[[engines]]\nurl = 'http://e'\ncapcity = 3", r"engines.0.capcity .*did you mean capacity\?"),
        ({}, {"ROLLYARD_PORT": "http"}, "", r"port \(from env ROLLYARD_PORT\): input should be a valid integer"),
        ({"run_slots": 0}, {}, "", "run_slots .*greater than or equal to 1"),
        ({"retain_s": float("nan")}, {}, "", "retain_s"),
        ({"engines": ["gpu1:8000"]}, {}, "", "engines.0.url"),
        ({"store": "mysql://db"}, {}, "", "a SQLite file or postgresql"),
        ({"runtime": "local"}, {}, "", "runtime 'local' is not among runtimes"),
        ({}, {}, "port = ", "cannot be read as TOML"),
    ],
)
def test_an_invalid_setting_is_named(
    flags: dict[str, object], environ: dict[str, str], toml: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "rollyard.toml"
    file.write_text(toml)
    with pytest.raises(SettingsError, match=f"(?i){message}"):
        load_settings(flags, {**NOTHING, **environ}, file)


def test_unrelated_variables_with_the_prefix_are_ignored() -> None:
    load_settings({}, {**NOTHING, "ROLLYARD_TOKENIZERS": "/x", "ROLLYARD_URL": "http://x", "ROLLYARD_NO_SKIPS": "1"})


def test_lists_are_commas_or_json_and_engines_are_urls_or_tables() -> None:
    environ = {
        **NOTHING,
        "ROLLYARD_HOSTS": "a, b:80",
        "ROLLYARD_RUNTIMES": '["bubblewrap", "local"]',
        "ROLLYARD_ENGINES": "http://gpu1:8000,http://gpu2:8000",
    }
    settings = load_settings({}, environ).settings
    assert settings.hosts == ("a", "b:80")
    assert settings.runtimes == ("bubblewrap", "local")
    assert [engine.url for engine in settings.engines] == ["http://gpu1:8000", "http://gpu2:8000"]
    table = load_settings({"engines": [{"url": "http://e", "kind": "sglang"}]}, NOTHING).settings.engines[0]
    assert (table.kind, table.policy) == ("sglang", "default")


def test_the_only_allowed_runtime_is_the_default() -> None:
    assert load_settings({"runtimes": "local"}, NOTHING).settings.runtime == "local"
    assert load_settings({"runtimes": ["local", "bubblewrap"]}, NOTHING).settings.runtime == "bubblewrap"


def test_no_secret_is_shown() -> None:
    settings = load_settings(
        {"admin_tokens": ["hush-hush-hush-hush"], "engines": [{"url": "http://e", "api_key": "psst"}]}, NOTHING
    ).settings
    assert "hush" not in repr(settings) + settings.model_dump_json()
    assert "psst" not in repr(settings) + settings.model_dump_json()
    with pytest.raises(SettingsError) as caught:
        load_settings({"admin_tokens": {"a": "hush"}}, NOTHING)
    assert "hush" not in str(caught.value)


def test_mcp_servers_are_tables_or_urls_and_their_headers_are_secrets(tmp_path: Path) -> None:
    file = tmp_path / "rollyard.toml"
    file.write_text('[mcp_servers.search]\nurl = "https://h/mcp"\nheaders = { Authorization = "Bearer psst" }\n')
    settings = load_settings({}, NOTHING, file).settings
    assert settings.mcp_servers["search"].headers["Authorization"].get_secret_value() == "Bearer psst"
    assert "psst" not in repr(settings) + settings.model_dump_json()
    assert "psst" not in json.dumps(masked(settings))
    from_environ = load_settings({}, {**NOTHING, "ROLLYARD_MCP_SERVERS": '{"a": "http://a/mcp"}'}).settings
    assert from_environ.mcp_servers["a"].url == "http://a/mcp"
    file.write_text('[mcp_servers.search]\nurl = "https://h/mcp"\nheader = { A = "psst" }\n')
    with pytest.raises(SettingsError, match="did you mean headers") as caught:
        load_settings({}, NOTHING, file)
    assert "psst" not in str(caught.value)


def test_paths_are_derived_from_data_dir(tmp_path: Path) -> None:
    settings = load_settings({}, {"XDG_DATA_HOME": str(tmp_path)}).settings
    assert settings.data_dir == tmp_path / "rollyard"
    assert settings.store_path == tmp_path / "rollyard" / "rollyard.db"
    assert settings.token_path == tmp_path / "rollyard" / "token"
    assert load_settings({}, NOTHING).settings.data_dir == Path("/nowhere/.local/share/rollyard")


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu1", False)],
)
def test_loopback_is_detected(host: str, is_loopback: bool) -> None:
    assert Settings(host=host).is_loopback is is_loopback


def test_every_setting_has_a_description() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_the_host_name_that_is_listened_on_is_accepted() -> None:
    assert Settings(host="gpu1", hosts=("gpu2",)).allowed_hosts == ("gpu2", "gpu1")
    for host in ("127.0.0.1", "0.0.0.0", "::1", "localhost"):
        assert Settings(host=host).allowed_hosts == ()


@pytest.mark.parametrize("uids", ["265535-200000", "0-65535", "1-999", "4294967000-4294967295"])
def test_invalid_or_reserved_uids_are_refused(uids: str) -> None:
    with pytest.raises(SettingsError, match="sandbox_uids"):
        load_settings({"sandbox_uids": uids}, NOTHING)
    assert load_settings({"sandbox_uids": "300000-300000"}, NOTHING).settings.uid_range == range(300000, 300001)
    assert load_settings({"sandbox_uids": ""}, NOTHING).settings.uid_range is None


def test_no_two_runtimes_of_a_service_share_a_uid() -> None:
    both = Settings(runtimes=("bubblewrap", "local", "apptainer"), sandbox_uids="300000-300002")
    assert [*uids_of("bubblewrap", both)] == [300000, 300002]  # type: ignore[misc]
    assert [*uids_of("apptainer", both)] == [300001]  # type: ignore[misc]
    assert uids_of("apptainer", Settings(sandbox_uids="300000-300002")) == range(300000, 300003), "the only one"
    assert uids_of("bubblewrap", Settings(sandbox_uids="")) is None
    with pytest.raises(SettingsError, match="sandbox_uids"):
        uids_of("apptainer", Settings(runtimes=("bubblewrap", "apptainer"), sandbox_uids="300000-300000"))


def test_gym_servers_are_urls_by_name(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[gym_servers]\nmath = "http://gym:9000"\n')
    assert load_settings({}, NOTHING, file).settings.gym_servers == {"math": "http://gym:9000"}
    file.write_text('[gym_servers]\nmath = "gym:9000"\n')
    with pytest.raises(SettingsError, match=r"gym_servers"):
        load_settings({}, NOTHING, file)


def test_default_limits_are_never_above_the_ceilings_here_and_on_nodes() -> None:
    plain = Settings().sandbox_limits
    assert (plain.memory_bytes, plain.cpus) == (8 << 30, None)
    low = {
        "max_task_memory_bytes": 1 << 30,
        "max_task_disk_bytes": 2 << 30,
        "max_task_files": 5000,
        "max_task_processes": 30,
        "max_task_cpus": 0.5,
    }
    settings = Settings.model_validate(low)
    for limits in (settings.sandbox_limits, node_settings(for_nodes(settings), Path("/nowhere"), {}).sandbox_limits):
        assert (limits.memory_bytes, limits.disk_bytes, limits.files) == (1 << 30, 2 << 30, 5000)
        assert (limits.processes, limits.cpus) == (30, 0.5)
    assert Settings(sandbox_cpus=0.25, max_task_cpus=0.5).sandbox_limits.cpus == 0.25


def test_environments_are_classes_by_name(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[environments]\nmine = "environment.py:Mine"\n')
    assert load_settings({}, NOTHING, file).settings.environments == {"mine": f"{tmp_path}/environment.py:Mine"}
    file.write_text('[environments]\nmine = "environment.py"\n')
    with pytest.raises(SettingsError, match=r"environments\.mine"):
        load_settings({}, NOTHING, file)
