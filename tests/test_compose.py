"""compose.yaml and compose.hosts.yaml say what `hearth` runs. Their shape is checked against the part of the Compose
Specification that they use; tests/end_to_end/test_many_hosts.py runs what the second one says."""

import ipaddress
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.protocol.address import parse_address
from gateway.cli import parse
from gateway.joining.client import JOIN_PORT, split_address
from gateway.settings.config import load_config

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()

_WORDS: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
_SERVICE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image"],
    "properties": {
        "image": {"type": "string", "pattern": "^(\\$\\{[A-Z_]+:-)?[a-z0-9./-]+:[A-Za-z0-9._-]+\\}?$"},
        "build": {"const": {"context": ".", "args": {"TORCH": "${TORCH:-cpu}"}}},
        "command": _WORDS,
        "profiles": _WORDS,
        "init": {"type": "boolean"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "stop_grace_period": _DURATION,
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^127\.0\.0\.1:[0-9]+:[0-9]+$"}},
        "volumes": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+:/[a-z./]+$"}},
        "configs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["source", "target"],
                "properties": {"source": {"type": "string"}, "target": {"type": "string", "pattern": "^/"}},
            },
        },
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["condition"],
                "properties": {"condition": {"enum": ["service_started", "service_healthy"]}},
            },
        },
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test"],
            "properties": {
                "test": {"type": "array", "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}]},
                **dict.fromkeys(("interval", "timeout", "start_period"), _DURATION),
            },
        },
    },
}
_COMPOSE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "required": ["services"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": _SERVICE},
        "configs": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
                "properties": {"content": {"type": "string"}, "file": {"type": "string"}},
            },
        },
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
    },
}


FILES = ("compose.yaml", "compose.hosts.yaml")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read("compose.yaml")


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return document


def _hearths(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in compose["services"].items() if service["image"] == "hearth:local"}


@pytest.mark.parametrize("name", FILES)
def test_the_file_has_the_shape_that_the_specification_wants(name: str) -> None:
    jsonschema.validate(read(name), _COMPOSE)


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="docker compose is not installed",
)
@pytest.mark.parametrize("name", FILES)
def test_docker_compose_itself_accepts_the_file(name: str) -> None:
    words = ["docker", "compose", "-f", name, "config", "--quiet"]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


def test_it_runs_two_gateways_a_machine_redis_and_a_collector(compose: dict[str, Any]) -> None:
    words = [service["command"][0] for service in _hearths(compose).values()]
    assert sorted(words) == ["gateway", "gateway", "machine"]
    assert {"redis", "collector"} < set(compose["services"])


@pytest.mark.parametrize("name", FILES)
def test_every_hearth_command_parses(name: str) -> None:
    for service in _hearths(read(name)).values():
        assert parse(service["command"]).source is not None, service


def test_hosts_join_where_the_gateway_lets_them_and_share_no_files(tmp_path: Path) -> None:
    hosts = read("compose.hosts.yaml")
    (tmp_path / "hearth.toml").write_text(hosts["configs"]["hearth"]["content"])
    cluster = load_config(tmp_path / "hearth.toml").cluster
    hearths = _hearths(hosts)
    assert cluster.address in hearths, "machines know the gateway by its service's name"
    joins = [parse(each["command"]).call.keywords["join"] for each in hearths.values() if "configs" not in each]
    assert {split_address(join.join) for join in joins} == {(cluster.address, JOIN_PORT)}
    assert split_address(cluster.join_listen)[1] == JOIN_PORT
    assert len({join.name for join in joins}) == 2
    assert len({volume for each in hearths.values() for volume in each["volumes"]}) == len(hearths)


@pytest.mark.parametrize("name", FILES)
def test_everything_that_a_service_names_is_defined(name: str) -> None:
    compose = read(name)
    for service in compose["services"].values():
        assert {volume.split(":")[0] for volume in service.get("volumes", [])} <= set(compose["volumes"])
        assert {config["source"] for config in service.get("configs", [])} <= set(compose["configs"])
        assert set(service.get("depends_on", {})) <= set(compose["services"])


def test_the_settings_in_it_are_read_and_fit_the_services(compose: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "hearth.toml").write_text(compose["configs"]["hearth"]["content"])
    config = load_config(tmp_path / "hearth.toml")
    assert config.store_url.startswith("redis://redis:")
    assert config.telemetry.otlp_url is not None
    assert "//collector:4318/" in config.telemetry.otlp_url
    assert isinstance(parse_address(config.machine_address), str), "gateways reach the machine by a unix socket"


def test_gateways_and_machine_share_the_folder_of_sockets(compose: dict[str, Any]) -> None:
    shared = {tuple(service["volumes"]) for service in _hearths(compose).values()}
    assert shared == {("state:/srv/hearth/.hearth",)}
    places = {service["configs"][0]["target"] for service in _hearths(compose).values()}
    assert places == {"/srv/hearth/hearth.toml"}
    assert "WORKDIR /srv/hearth\n" in DOCKERFILE


def test_what_compose_says_of_pytorch_is_an_argument_of_the_image(compose: dict[str, Any]) -> None:
    for service in _hearths(compose).values():
        for name in service["build"]["args"]:
            assert f"ARG {name}=cpu\n" in DOCKERFILE


def test_the_image_is_built_of_every_package_and_of_nothing_that_the_build_does_not_see() -> None:
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in ("pyproject.toml", "README.md", "LICENSE", "gateway", "engine", "prefixcache", "tenants"):
        assert name in seen
        assert (ROOT / name).exists()
    copied = {word for line in DOCKERFILE.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert copied - {"--from=build", "/wheels"} == seen


def test_redis_keeps_what_it_was_told_and_evicts_nothing(compose: dict[str, Any]) -> None:
    said = " ".join(compose["services"]["redis"]["command"])
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction"):
        assert option in said


def test_only_this_host_reaches_the_ports(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(ports) == len(set(ports)) == 4


def test_monitoring_is_asked_for_by_its_profile_and_loads_the_rules_and_the_dashboard(compose: dict[str, Any]) -> None:
    services, configs = compose["services"], compose["configs"]
    assert {name for name, service in services.items() if "profiles" in service} == {"prometheus", "grafana"}
    for name, file in (("rules", "hearth.rules.yml"), ("dashboard", "hearth.dashboard.json")):
        assert configs[name]["file"] == f"gateway/observability/monitoring/{file}"
        assert (ROOT / configs[name]["file"]).is_file()
    targets = {config["source"]: config["target"] for name in services for config in services[name].get("configs", [])}
    scraping = yaml.safe_load(configs["prometheus"]["content"])
    folder = Path(targets["prometheus"]).parent
    assert [str(folder / file) for file in scraping["rule_files"]] == [targets["rules"]]
    providers = yaml.safe_load(configs["dashboards"]["content"])["providers"]
    assert [provider["options"]["path"] for provider in providers] == [str(Path(targets["dashboard"]).parent)]


def test_prometheus_scrapes_every_gateway_and_grafana_asks_prometheus(compose: dict[str, Any]) -> None:
    (job,) = yaml.safe_load(compose["configs"]["prometheus"]["content"])["scrape_configs"]
    gateways = {name: service for name, service in _hearths(compose).items() if service["command"][0] == "gateway"}
    (static,) = job["static_configs"]
    expected = {f"{name}:{parse(service['command']).call.keywords['port']}" for name, service in gateways.items()}
    assert set(static["targets"]) == expected
    assert job["job_name"] == "hearth"
    assert job["authorization"] == {"credentials": "${HEARTH_OPERATOR_TOKEN:-}"}
    (source,) = yaml.safe_load(compose["configs"]["datasources"]["content"])["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_may_read_metrics_while_the_store_is_away(compose: dict[str, Any], tmp_path: Path) -> None:
    """Docker gives addresses of these networks, and without the store no token can be checked."""
    (tmp_path / "hearth.toml").write_text(compose["configs"]["hearth"]["content"])
    networks = load_config(tmp_path / "hearth.toml").server.metrics_networks
    for address in ("172.18.0.5", "192.168.16.5"):
        assert any(ipaddress.ip_address(address) in ipaddress.ip_network(network) for network in networks)
