"""The layers of the configuration, and the errors of a wrong one."""

from pathlib import Path

import pytest

from emberline.config import ConfigError, check_exposure, is_loopback, needs_keys, parse_size, resolve
from emberline.protocol.price import Price


def write(home: Path, text: str) -> Path:
    path = home / "emberline.toml"
    path.write_text(text)
    return path


def test_the_defaults_need_nothing(tmp_path: Path) -> None:
    config = resolve(environ={"EMBERLINE_HOME": str(tmp_path)})
    assert config.home == tmp_path
    assert (config.server.host, config.server.port, config.server.http_workers) == ("127.0.0.1", 8686, 1)
    assert config.engine.models == ()
    assert config.auth.key is None


def test_home_falls_back_to_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(environ={}).home == tmp_path / ".emberline"
    assert resolve(environ={"EMBERLINE_HOME": "~/elsewhere"}).home == tmp_path / "elsewhere"


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    write(
        tmp_path,
        '[server]\nport = 1\ndrain_timeout_s = 5\ncors_origins = ["http://a", "http://b"]\n[log]\nlevel = "debug"\n',
    )
    environ = {"EMBERLINE_HOME": str(tmp_path), "EMBERLINE_PORT": "2", "EMBERLINE_LOG_LEVEL": "error"}
    assert resolve(environ={"EMBERLINE_HOME": str(tmp_path)}).server.port == 1
    config = resolve(environ=environ)
    assert (config.server.port, config.log.level, config.server.drain_timeout_s) == (2, "error", 5.0)
    assert config.server.cors_origins == ("http://a", "http://b")
    config = resolve({"server.port": 3, "log.level": None}, environ)
    assert (config.server.port, config.log.level) == (3, "error")


def test_the_full_name_wins_over_the_short_one(tmp_path: Path) -> None:
    environ = {"EMBERLINE_SERVER_PORT": "5", "EMBERLINE_PORT": "4"}
    assert resolve(environ=environ, home=tmp_path).server.port == 5


def test_text_values_take_their_types(tmp_path: Path) -> None:
    environ = {
        "EMBERLINE_ENGINE_KV_BYTES": "512M",
        "EMBERLINE_ENGINE_DETERMINISTIC": "true",
        "EMBERLINE_ENGINE_MODELS": "a, hf:b/c",
        "EMBERLINE_SERVER_ALLOWED_HOSTS": "ember.local",
        "EMBERLINE_SECRET": "not a section",
        "UNRELATED": "x",
    }
    config = resolve(environ=environ, home=tmp_path)
    assert config.engine.kv_bytes == 512 << 20
    assert config.engine.deterministic is True
    assert config.engine.models == ("a", "hf:b/c")
    assert config.server.allowed_hosts == ("ember.local",)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[server]\nprot = 1\n", ["'prot'", "[server]", "emberline.toml", "port"]),
        ("[sever]\nport = 1\n", ["[sever]", "emberline.toml", "server"]),
        ("server = 1\n", ["server", "[server]"]),
        ("[server]\nport = 70000\n", ["port", "70000", "65535"]),
        ('[server]\nport = "many"\n', ["port", "'many'"]),
        ("[engine]\nmodels = [1]\n", ["models"]),
        ('[engine]\ndevice = "tpu"\n', ["device", "tpu"]),
        ('[engine]\nkv_bytes = "2 bananas"\n', ["kv_bytes", "2 bananas", "2G"]),
        ('[store]\nurl = "mysql://x"\n', ["[store] url", "postgresql://"]),
        ("[server\n", ["emberline.toml", "not valid TOML"]),
        ("[server]\ndrain_timeout_s = nan\n", ["drain_timeout_s"]),
    ],
)
def test_a_wrong_file_names_the_key_and_the_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve(environ={}, home=tmp_path)
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize("name", ["EMBERLINE_SERVER_PROT", "EMBERLINE_ENGINE_THREADS"])
def test_a_wrong_variable_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolve(environ={name: "-1"}, home=tmp_path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "emberline.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"emberline\.toml"):
        resolve(environ={}, home=tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_beyond_loopback_a_key_is_needed(tmp_path: Path, host: str) -> None:
    def check(**environ: str) -> None:
        check_exposure(resolve({"server.host": host}, environ, tmp_path))

    with pytest.raises(ConfigError) as caught:
        check()
    assert host in caught.value.message
    assert "export EMBERLINE_AUTH_KEY=" in caught.value.message
    with pytest.raises(ConfigError, match="at least 16"):
        check(EMBERLINE_AUTH_KEY="short")
    check(EMBERLINE_AUTH_KEY="k" * 16)
    check(EMBERLINE_SERVER_AUTH="keys")
    with pytest.raises(ConfigError, match="--auth keys"):
        check(EMBERLINE_SERVER_AUTH="none")


@pytest.mark.parametrize(
    ("host", "auth", "key", "needed"),
    [
        ("127.0.0.1", "auto", "", False),
        ("127.0.0.1", "none", "", False),
        ("127.0.0.1", "keys", "", True),
        ("127.0.0.1", "auto", "k" * 16, True),
        ("0.0.0.0", "auto", "k" * 16, True),
        ("0.0.0.0", "keys", "", True),
        ("0.0.0.0", "none", "", True),  # which `check_exposure` refuses
    ],
)
def test_when_keys_are_needed(tmp_path: Path, host: str, auth: str, key: str, needed: bool) -> None:
    config = resolve({"server.host": host, "server.auth": auth}, {"EMBERLINE_AUTH_KEY": key} if key else {}, tmp_path)
    assert needs_keys(config) is needed


def test_an_admin_key_contradicts_a_server_without_keys(tmp_path: Path) -> None:
    config = resolve({"server.auth": "none"}, {"EMBERLINE_AUTH_KEY": "k" * 16}, tmp_path)
    with pytest.raises(ConfigError, match="drop one"):
        check_exposure(config)


def test_errors_name_the_flag_as_it_is_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(flag --log-level\)"):
        resolve({"log.level": "loud"}, {}, tmp_path)


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    config = resolve(environ={"EMBERLINE_AUTH_KEY": "very-secret-indeed"}, home=tmp_path)
    assert "very-secret" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        resolve(environ={"EMBERLINE_AUTH_KEY": "very-secret with spaces"}, home=tmp_path)
    assert "very-secret" not in caught.value.message


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""]))


def test_sizes() -> None:
    assert [parse_size(text) for text in ("7", "2G", "1.5k", "512 MiB", "1TB")] == [
        7,
        2 << 30,
        1536,
        512 << 20,
        1 << 40,
    ]
    for text in ("", "G", "-1", "2X"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(text)


def test_a_choice_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flag --device.*: there are auto, cpu, cuda"):
        resolve({"engine.device": "tpu"}, {}, tmp_path)


def test_prices(tmp_path: Path) -> None:
    path = tmp_path / "emberline.toml"
    path.write_text(
        '[[prices]]\nmodel = "@cf/A/b"\ninput = 0.6\ncached_input = "0.10"\noutput = 3\nbatch = 50\n'
        '[[prices]]\nmodel = "free"\n'
    )
    prices = resolve(environ={}, home=tmp_path).prices
    assert prices["@cf/a/b"] == Price(input=600_000, cached_input=100_000, output=3_000_000, batch=50)
    assert prices["free"] == Price()
    for wrong, message in {
        'model = "m"\ninput = "cheap"': "number 1 .*`input`",
        'model = "m"\nprice = 1': "number 1 .*price",
        "input = 1": "number 1 .*model",
        'model = "m"\n[[prices]]\nmodel = "M"': "two .*'M'",
    }.items():
        path.write_text(f"[[prices]]\n{wrong}\n")
        with pytest.raises(ConfigError, match=message):
            resolve(environ={}, home=tmp_path)
    path.write_text("prices = 1\n")
    with pytest.raises(ConfigError, match=r"\[\[prices\]\]"):
        resolve(environ={}, home=tmp_path)


def test_providers(tmp_path: Path) -> None:
    table = '[[providers]]\nname = "openai"\nkey_env = "OPENAI"\n[[providers]]\nname = "my-llm"\nurl = "http://x/v1"\n'
    write(tmp_path, table)
    environ = {"OPENAI": "sk-1", "EMBERLINE_PROVIDERS_MY_LLM_KEY": "sk-2"}
    openai, own = resolve(environ=environ, home=tmp_path).providers
    assert (openai.name, openai.key, own.key, own.url) == ("openai", "sk-1", "sk-2", "http://x/v1")
    assert "sk-1" not in repr(openai)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[[providers]]\nname = "Open AI"\n', ["[[providers]] number 1"]),
        ('[[providers]]\nname = "a"\nkey_env = "NOT_SET"\n', ["NOT_SET", "not set"]),
        ('[[providers]]\nname = "a"\nkey_env = "X"\nkey = "y"\n', ["key or key_env"]),
        ('[[providers]]\nname = "a"\nkey = "two words"\n', ["printable ASCII"]),
        ('[[providers]]\nname = "a"\n[[providers]]\nname = "a"\n', ["two [[providers]]"]),
        ('[[providers]]\nname = "a"\n[[endpoints]]\nname = "a"\nurl = "http://x"\n', ["both named a"]),
        ("[providers]\nname = 1\n", ["[[providers]]"]),
    ],
)
def test_wrong_providers(tmp_path: Path, text: str, parts: list[str]) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError) as found:
        resolve(environ={}, home=tmp_path)
    assert all(part in found.value.message for part in parts), found.value.message


def test_bounds_of_scaled_models_come_from_tables_or_json(tmp_path: Path) -> None:
    (tmp_path / "emberline.toml").write_text('[cluster.models."@cf/a/b"]\nmin_replicas = 0\nmax_replicas = 3\n')
    (bounds,) = resolve({}, {}, tmp_path).cluster.models.values()
    assert (bounds.min_replicas, bounds.max_replicas) == (0, 3)
    given = resolve({}, {"EMBERLINE_CLUSTER_MODELS": '{"m": {"max_replicas": 2}}'}, tmp_path).cluster.models
    assert {name: each.max_replicas for name, each in given.items()} == {"m": 2}
    for wrong in ('{"m": {"max_replicas": 0}}', '{"m": {"min_replicas": 3}}', '{"m": {"replicas": 1}}', "{"):
        with pytest.raises(ConfigError, match=r"bad value .* for models in \[cluster\]"):
            resolve({}, {"EMBERLINE_CLUSTER_MODELS": wrong}, tmp_path)
    with pytest.raises(ConfigError, match="use 2 or more, for one prefill and one decode replica"):
        resolve({}, {"EMBERLINE_CLUSTER_MODELS": '{"m": {"disaggregated": true}}'}, tmp_path)
