"""What `hearth kubernetes` prints, held to the API's own schemas, and to what the processes need."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import yaml
from prometheus_client import generate_latest

from engine.host.supervisor import SupervisionTimeouts
from engine.replica.replica import ReplicaLimits
from gateway.cli import main, parse
from gateway.commands.deployment.kubernetes import chart_version, documents, listening_ports, write_chart
from gateway.commands.deployment.manifests import DESCRIPTIONS, Deployment, grace_s, manifests
from gateway.identity.cell_settings import CellsConfig, OtherCell
from gateway.identity.settings import ClusterConfig
from gateway.members.kubernetes import PORT_NAME
from gateway.observability.metrics import Metrics
from gateway.settings.config import Config
from gateway.settings.server import ServerConfig

WANTED = Deployment("ml", "hearth:1", 2, 10, 35, "hearth", "eu-west", "")
VARIANTS = {
    "cpu": WANTED,
    "gpu": Deployment("ml", "hearth:1", 3, 10, 35, "hearth", "", "fra1", gpus=8),
    "keda": Deployment("ml", "hearth:1", 3, 10, 35, "hearth", "", "", prometheus="http://prometheus.monitoring:9090"),
}
CUSTOM = {"ScaledObject"}  # KEDA's, which no schema of Kubernetes knows
FINISHED = re.compile(r"\{\{ \.(Release\.Namespace|Values\.(\w+))( \| quote)? \}\}")


def by_name(wanted: Deployment) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests(wanted)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_strict_validator_takes_every_object(variant: str) -> None:
    objects = list(yaml.safe_load_all(documents(VARIANTS[variant])))
    kinds = [each["kind"] for each in objects]
    assert {"DaemonSet", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "Service"} <= {*kinds}
    for each in objects:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_the_validator_finds_a_field_that_there_is_not() -> None:
    wrong = by_name(WANTED)["Deployment", "hearth-gateway"]
    wrong["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["pause"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="pause"):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_command_line_is_one_of_hearth_s(variant: str) -> None:
    for each in manifests(VARIANTS[variant]):
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", []), *pod.get("containers", [])):
            if "args" in container:
                parse(container["args"])


def test_probes_ports_and_policies_name_what_the_processes_listen_on() -> None:
    config, objects = Config(), by_name(WANTED)
    join, porter = (
        int(listen.rpartition(":")[2]) for listen in (config.cluster.join_listen, config.cluster.porter_listen)
    )
    gateway = objects["Deployment", "hearth-gateway"]["spec"]["template"]["spec"]["containers"][0]
    assert {port["name"]: port["containerPort"] for port in gateway["ports"]} == {
        "http": config.server.port,
        "join": join,
    }
    (machine,) = objects["DaemonSet", "hearth-machine"]["spec"]["template"]["spec"]["containers"]
    assert machine["ports"][0]["containerPort"] == porter
    service = objects["Service", "hearth-machine"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["ports"][0]["name"] == PORT_NAME
    for host, port in (("machine", porter), ("gateway", join)):  # both give models' files to both
        (rule,) = rules_of(objects, host, port)
        kinds = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]}
        assert kinds == {"gateway", "machine"}


def rules_of(objects: dict[tuple[str, str], dict[str, Any]], host: str, port: int) -> list[dict[str, Any]]:
    """What a host's policy lets in at a port."""
    rules = objects["NetworkPolicy", f"hearth-{host}"]["spec"]["ingress"]
    return [rule for rule in rules if rule["ports"] == [{"port": port, "protocol": "TCP"}]]


def test_ports_are_those_of_the_settings() -> None:
    other = OtherCell(name="us", addresses=["us.example:9992"], authority="us.pem")
    config = Config(
        server=ServerConfig(port=9087),
        cluster=ClusterConfig(join_listen="0.0.0.0:9090", porter_listen="[::]:9091"),
        cells=CellsConfig(listen="0.0.0.0:9092", others=[other]),
    )
    objects = by_name(dataclasses.replace(WANTED, ports=listening_ports(config)))
    service = objects["Service", "hearth-gateway"]["spec"]["ports"]
    assert {port["name"]: port["port"] for port in service} == {"http": 9087, "join": 9090, "cells": 9092}
    assert [rules_of(objects, "gateway", port) for port in (9087, 9092)] == [
        [{"ports": [{"port": port, "protocol": "TCP"}]}] for port in (9087, 9092)
    ]
    pod = objects["DaemonSet", "hearth-machine"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["ports"][0]["containerPort"] == 9091
    assert "hearth-gateway:9090" in pod["containers"][0]["args"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_asks_for_what_it_needs_and_may_do_little(variant: str) -> None:
    for each in manifests(VARIANTS[variant]):
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", []), *pod.get("containers", [])):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["capabilities"]["drop"] == ["ALL"]
            assert not security["allowPrivilegeEscalation"]
            mounted = {volume["name"] for volume in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}


def test_what_may_be_applied_again_leaves_the_number_of_gateways_to_the_autoscaler() -> None:
    objects = by_name(WANTED)
    assert "replicas" not in objects["Deployment", "hearth-gateway"]["spec"]
    scaled = objects["HorizontalPodAutoscaler", "hearth-gateway"]["spec"]
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (2, 10)
    assert scaled["scaleTargetRef"]["name"] == "hearth-gateway"


def test_what_keda_asks_for_is_a_metric_that_gateways_have() -> None:
    scaled = by_name(VARIANTS["keda"])["ScaledObject", "hearth-gateway"]["spec"]
    query = scaled["triggers"][0]["metadata"]["query"]
    promql.parse(query)
    (name,) = re.findall(r"hearth_\w+", query)
    assert name in generate_latest(Metrics(accounts=1).registry).decode()


def test_a_machine_s_pod_ends_after_its_replicas_have() -> None:
    pod = by_name(WANTED)["DaemonSet", "hearth-machine"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > SupervisionTimeouts().drain_s > ReplicaLimits().drain_s


def test_a_gateway_s_pod_ends_after_its_streams_have() -> None:
    drain_s = Config().server.drain_s
    pod = by_name(draining(drain_s))["Deployment", "hearth-gateway"]["spec"]["template"]["spec"]
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + drain_s


def draining(drain_s: float) -> Deployment:
    return Deployment("ml", "hearth:1", 2, 10, grace_s(drain_s), "hearth", "", "")


def rendered(folder: Path, namespace: str, **changes: object) -> list[dict[str, Any]]:
    """The chart's objects, as Helm makes them of these values: its templates have no more than values in them."""
    values = {**yaml.safe_load((folder / "values.yaml").read_text()), **changes}

    def value(match: re.Match[str]) -> str:
        found = namespace if match[2] is None else values[match[2]]
        return f'"{found}"' if match[3] else str(found)

    texts = [FINISHED.sub(value, path.read_text()) for path in sorted((folder / "templates").iterdir())]
    assert not any("{{" in text or "<<" in text for text in texts)
    return [yaml.safe_load(text) for text in texts]


def in_order(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_is_the_manifests(variant: str, tmp_path: Path) -> None:
    write_chart(tmp_path, VARIANTS[variant])
    assert in_order(rendered(tmp_path, "ml")) == in_order(manifests(VARIANTS[variant]))
    chart = yaml.safe_load((tmp_path / "Chart.yaml").read_text())
    assert chart["apiVersion"] == "v2"
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z-]+)?", chart["version"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_value_of_the_chart_is_documented_and_used(variant: str, tmp_path: Path) -> None:
    write_chart(tmp_path, VARIANTS[variant])
    lines = (tmp_path / "values.yaml").read_text().splitlines()
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    templates = "".join(path.read_text() for path in (tmp_path / "templates").iterdir())
    for name in values:
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[at - 1] == f"# {DESCRIPTIONS[name]}"
        assert f".Values.{name} " in templates, name


def test_the_chart_s_values_are_what_may_differ(tmp_path: Path) -> None:
    write_chart(tmp_path, WANTED)
    changed = rendered(tmp_path, "other", image="hearth:2", gateways=5, region="us-east")
    expected = Deployment("other", "hearth:2", 5, 10, 35, "hearth", "us-east", "")
    assert in_order(changed) == in_order(manifests(expected))


@pytest.mark.parametrize(("version", "chart"), [("0.2.0.dev0", "0.2.0-dev0"), ("1.2.3", "1.2.3"), ("1.2", "1.2.0")])
def test_a_chart_s_version_has_three_numbers(version: str, chart: str) -> None:
    assert chart_version(version) == chart


def test_the_command_prints_yaml_and_refuses_fewer_than_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["kubernetes", "--namespace", "ml", "--gpus", "4"]) == 0
    printed = capsys.readouterr().out
    assert {each["metadata"]["namespace"] for each in yaml.safe_load_all(printed)} == {"ml"}
    assert main(["kubernetes", "--gateways", "0"]) == 1
    assert "at least 1" in capsys.readouterr().err
    (tmp_path / "hearth.toml").write_text("[server]\nport = 0\n")
    assert main(["kubernetes"]) == 1
    assert "[server] port is 0" in capsys.readouterr().err
