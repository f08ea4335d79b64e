"""Settings: where they come from, what is refused, and what is never shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.settings import Settings, SettingsError, without_password


@pytest.fixture(autouse=True)
def _only_its_own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LOOP_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_without_anything_all_is_below_the_working_directory(tmp_path: Path) -> None:
    settings = Settings.load()
    assert settings.home == tmp_path / ".loop"
    assert settings.registry_url == f"sqlite:///{tmp_path}/.loop/registry.db"
    assert settings.mlflow_url == f"sqlite:///{tmp_path}/.loop/mlflow.db"
    assert settings.artifacts == tmp_path / ".loop" / "artifacts"
    assert (settings.api_host, settings.api_port) == ("127.0.0.1", 8700)


def test_the_environment_goes_before_the_file_and_the_file_before_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "loop.toml").write_text("api_port = 9001\ninference_port = 9002\ncheckpoints = 'deep/checkpoints'\n")
    monkeypatch.setenv("LOOP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOOP_API_PORT", "9100")
    settings = Settings.load()
    assert (settings.api_port, settings.inference_port) == (9100, 9002)
    assert settings.checkpoints == tmp_path / "home" / "deep" / "checkpoints"
    assert Settings.load(api_port=9200).api_port == 9200


def test_loop_config_names_another_file_which_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOP_CONFIG", str(tmp_path / "lab.toml"))
    with pytest.raises(SettingsError, match=r"lab\.toml, which does not exist; write it or unset LOOP_CONFIG"):
        Settings.load()
    (tmp_path / "lab.toml").write_text(f"home = '{tmp_path}/lab'\n")
    assert Settings.load().home == tmp_path / "lab"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("API_PORT", "eighty", "setting api_port (LOOP_API_PORT): got 'eighty'; expected a whole number"),
        ("API_PORT", "70000", "setting api_port (LOOP_API_PORT): got '70000'; expected at most 65535"),
        (
            "API_HOST",
            "0.0.0.0",
            "setting api_host (LOOP_API_HOST): expected a loopback address such as 127.0.0.1, got '0.0.0.0': "
            "nothing asks for a token yet",
        ),
        (
            "REGISTRY_URL",
            "mysql://u:hunter2@h/d",
            "setting registry_url (LOOP_REGISTRY_URL): expected sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME, "
            "got the scheme 'mysql'",
        ),
        ("HEARTBEAT_S", "60", "settings: heartbeat_s: expected at most a third of lease_s (30), got 60"),
        ("INFERENCE_PORT", "8700", "settings: inference_port: expected another port than the API's 8700"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LOOP_{name}", value)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert str(caught.value) == told


def test_an_unknown_field_of_the_file_is_refused_with_the_one_meant(tmp_path: Path) -> None:
    (tmp_path / ".loop").mkdir()
    (tmp_path / ".loop" / "loop.toml").write_text("api_prot = 9001\n")
    with pytest.raises(SettingsError, match=r"unknown field; .*did you mean api_port\?"):
        Settings.load()


def test_a_file_that_is_no_toml_says_so(tmp_path: Path) -> None:
    (tmp_path / ".loop").mkdir()
    (tmp_path / ".loop" / "loop.toml").write_text("api_port: 9001\n")
    with pytest.raises(SettingsError, match=r"cannot read .*loop\.toml: .*expected TOML lines such as api_port = 8700"):
        Settings.load()


def test_in_memory_sqlite_is_refused_because_processes_share_it() -> None:
    with pytest.raises(ValueError, match="must be a file"):
        Settings(registry_url="sqlite:///:memory:")


def test_a_relative_sqlite_path_is_made_absolute_once(tmp_path: Path) -> None:
    assert Settings(registry_url="sqlite:///lab.db").registry_url == f"sqlite:///{tmp_path}/lab.db"


def test_passwords_and_tokens_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOP_REGISTRY_URL", "postgresql://lab:hunter2@db/loop")
    monkeypatch.setenv("LOOP_TOKEN", "hunter3")
    settings = Settings.load()
    assert settings.registry_url == "postgresql://lab:hunter2@db/loop"
    assert settings.token is not None
    assert settings.token.get_secret_value() == "hunter3"
    for shown in (repr(settings), str(settings), without_password(settings.registry_url)):
        assert "hunter" not in shown
    assert without_password(settings.registry_url) == "postgresql://lab:***@db/loop"
    assert "hunter3" not in settings.model_dump_json(), "actors are handed the settings, and have no use for the token"


def test_they_come_back_from_json_as_they_were() -> None:
    settings = Settings(home=Path("/data/lab"), registry_url="postgresql://lab:pw@db/loop", lease_s=30.0)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_cluster_is_the_one_set_or_the_running_stacks(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert settings.cluster_address() is None
    settings.stack_file.write_text(json.dumps({"ray": {"address": "127.0.0.1:4567"}}))
    assert settings.cluster_address() == "127.0.0.1:4567"
    assert Settings(home=tmp_path, ray_address="10.0.0.7:6379").cluster_address() == "10.0.0.7:6379"
