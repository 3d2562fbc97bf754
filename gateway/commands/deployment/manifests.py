"""The objects that run Hearth in Kubernetes: gateways as a Deployment, a machine on each node as a DaemonSet, and what
lets them find and reach each other. It prints nothing and knows no cluster."""

from dataclasses import dataclass
from typing import Any, Final

SETTINGS: Final = "hearth-settings"  # a Secret: hearth.toml
SERVER_SECRET: Final = "hearth-secret"  # a Secret: the server's secret
JOIN_TOKEN: Final = "hearth-join"  # a Secret: the token that machines join with
GATEWAY: Final = "hearth-gateway"
MACHINE: Final = "hearth-machine"
_FOLDER: Final = "/srv/hearth"
_TOKEN_FOLDER: Final = "/var/run/hearth"
_USER: Final = 10001
_DEREGISTER_S: Final = 5  # so long a gateway that is to end still takes calls that are on their way
_MARGIN_S: Final = 10
MACHINE_DRAIN_S: Final = 60  # longer than an agent gives its replicas
_START_TRIES: Final = 60

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the processes listen, as hearth.toml says it; `cells`: 0 where there are no other cells."""

    clients: int = 8787
    join: int = 8790
    porter: int = 8791
    cells: int = 0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What differs between deployments. Texts and numbers may be a chart's expressions: DESCRIPTIONS has all of them.
    `ports` are numbers."""

    namespace: str
    image: str
    gateways: int | str
    gateways_max: int | str
    drain_s: int | str
    cluster: str
    region: str
    site: str
    gpus: int | str = 0
    gateway_cpu: str = "1"
    gateway_memory: str = "1Gi"
    machine_cpu: str = "2"
    machine_memory: str = "8Gi"
    prometheus: str = ""
    requests_per_gateway: int | str = 64
    ports: Ports = Ports()


DESCRIPTIONS: Final = {
    "image": "of Hearth, as `make image` builds it",
    "gateways": "how many there are at least",
    "gateways_max": "how many there are at most",
    "drain_s": "seconds that a gateway's pod may take to end: [server] drain_s of hearth.toml and 15 more",
    "cluster": "name of the cluster of hosts",
    "region": "of the gateways, as accounts may allow it",
    "site": "within the region",
    "gpus": "of each node that has GPUs",
    "gateway_cpu": "CPUs that each gateway asks for; without --prometheus their number follows how busy these are",
    "gateway_memory": "memory that each gateway asks for",
    "machine_cpu": "CPUs that each machine asks for: one for each replica at the least",
    "machine_memory": "memory that each machine asks for: sleeping models and host_kv_bytes, and 2Gi for each replica",
    "prometheus": "address of the Prometheus that KEDA asks; it is to scrape gateways, with a label `namespace`",
    "requests_per_gateway": "requests in progress, those that wait among them, for which there is one gateway",
}


def manifests(wanted: Deployment) -> list[Object]:
    """All objects, in an order in which they can be made."""
    return [
        _object(wanted, "v1", "ServiceAccount", GATEWAY),
        _role(wanted),
        _role_binding(wanted),
        _service(wanted, GATEWAY, _gateway_ports(wanted.ports)),
        _service(wanted, MACHINE, {"porter": wanted.ports.porter}, headless=True),
        _gateways(wanted),
        _machines(wanted),
        _disruption_budget(wanted),
        # Models' files come from host to host: all reach each other where hosts join and through porters.
        _policy(wanted, GATEWAY, {"http": [], "join": [MACHINE, GATEWAY], "cells": []}, _gateway_ports(wanted.ports)),
        _policy(wanted, MACHINE, {"porter": [GATEWAY, MACHINE]}, {"porter": wanted.ports.porter}),
        _scaled_by_metrics(wanted) if wanted.prometheus else _scaled_by_cpu(wanted),
    ]


def _gateway_ports(ports: Ports) -> dict[str, int]:
    return {"http": ports.clients, "join": ports.join} | ({"cells": ports.cells} if ports.cells else {})


def _labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "hearth", "app.kubernetes.io/component": component.removeprefix("hearth-")}


def _object(wanted: Deployment, version: str, kind: str, name: str, **fields: Any) -> Object:
    labels = _labels(name)
    metadata = {"name": name, "namespace": wanted.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _role(wanted: Deployment) -> Object:
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    return _object(wanted, "rbac.authorization.k8s.io/v1", "Role", GATEWAY, rules=rules)


def _role_binding(wanted: Deployment) -> Object:
    return _object(
        wanted,
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        GATEWAY,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": GATEWAY},
        subjects=[{"kind": "ServiceAccount", "name": GATEWAY, "namespace": wanted.namespace}],
    )


def _service(wanted: Deployment, name: str, ports: dict[str, int], *, headless: bool = False) -> Object:
    listed = [{"name": port, "port": number, "targetPort": port, "protocol": "TCP"} for port, number in ports.items()]
    # Gateways find out by themselves which machines answer, so that all of them are told of.
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True} if headless else {"type": "ClusterIP"}
    return _object(wanted, "v1", "Service", name, spec={**spec, "selector": _labels(name), "ports": listed})


def _gateways(wanted: Deployment) -> Object:
    mounts: list[Object] = [
        {"name": "state", "mountPath": f"{_FOLDER}/.hearth"},
        {"name": "settings", "mountPath": f"{_FOLDER}/hearth.toml", "subPath": "hearth.toml", "readOnly": True},
        {"name": "secret", "mountPath": f"{_FOLDER}/.hearth/secret", "subPath": "secret", "readOnly": True},
    ]
    volumes = [
        *({"name": name, "emptyDir": {}} for name in ("state", "tmp")),
        _secret("settings", SETTINGS),
        _secret("secret", SERVER_SECRET),
    ]
    resources = {"requests": {"cpu": wanted.gateway_cpu, "memory": wanted.gateway_memory}}
    place = ["--cluster", wanted.cluster, "--region", wanted.region, "--site", wanted.site]
    enter = _container(
        wanted, "enter-cluster", ["cluster", "init", "--name", "$(NAME)", *place], "metadata.name", mounts
    )
    enter["resources"] = resources
    serve = _container(wanted, "gateway", ["gateway", "--host", "0.0.0.0"], "metadata.name", mounts)
    serve |= {
        "ports": [_port(*port) for port in _gateway_ports(wanted.ports).items()],
        "resources": resources,
        "startupProbe": {**_http_probe("/healthz", 2), "failureThreshold": _START_TRIES},
        "livenessProbe": _http_probe("/healthz", 10),
        "readinessProbe": _http_probe("/readyz", 2),
        "lifecycle": {"preStop": {"sleep": {"seconds": _DEREGISTER_S}}},
    }
    pod = {
        "serviceAccountName": GATEWAY,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": wanted.drain_s,
        "securityContext": _pod_security(),
        "topologySpreadConstraints": [_spread("topology.kubernetes.io/zone"), _spread("kubernetes.io/hostname")],
        "initContainers": [enter],
        "containers": [serve],
        "volumes": volumes,
    }
    # No `replicas`: their number is the autoscaler's, and to apply this again is not to take it back.
    spec = {
        "selector": {"matchLabels": _labels(GATEWAY)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": _labels(GATEWAY), "annotations": _scraped(wanted)}, "spec": pod},
    }
    return _object(wanted, "apps/v1", "Deployment", GATEWAY, spec=spec)


def _spread(topology: str) -> Object:
    labels = {"matchLabels": _labels(GATEWAY)}
    return {"maxSkew": 1, "topologyKey": topology, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": labels}


def _scraped(wanted: Deployment) -> dict[str, str]:
    """What tells a Prometheus that looks for it where metrics are."""
    names = {"scrape": "true", "port": str(wanted.ports.clients), "path": "/metrics"}
    return {f"prometheus.io/{name}": value for name, value in names.items()}


def _machines(wanted: Deployment) -> Object:
    join = ["--join", f"{GATEWAY}:{wanted.ports.join}", "--token-file", f"{_TOKEN_FOLDER}/token", "--name", "$(NAME)"]
    mounts: list[Object] = [
        {"name": "state", "mountPath": f"{_FOLDER}/.hearth"},
        {"name": "settings", "mountPath": f"{_FOLDER}/hearth.toml", "subPath": "hearth.toml", "readOnly": True},
        {"name": "join", "mountPath": _TOKEN_FOLDER, "readOnly": True},
    ]
    state: Object = {"name": "state", "hostPath": {"path": "/var/lib/hearth", "type": "DirectoryOrCreate"}}
    serve = _container(wanted, "machine", ["machine", *join], "spec.nodeName", mounts)
    serve |= {
        "ports": [_port("porter", wanted.ports.porter)],
        "resources": {"requests": {"cpu": wanted.machine_cpu, "memory": wanted.machine_memory}},
        "startupProbe": {"tcpSocket": {"port": "porter"}, "periodSeconds": 2, "failureThreshold": _START_TRIES},
        "readinessProbe": {"tcpSocket": {"port": "porter"}, "periodSeconds": 5},
    }
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": MACHINE_DRAIN_S,
        "securityContext": _pod_security(),
        # A folder of the node belongs to root at first, and the machine runs as nobody in particular.
        "initContainers": [_folder_owner(wanted, mounts[:1])],
        "containers": [serve],
        "volumes": [state, {"name": "tmp", "emptyDir": {}}, _secret("settings", SETTINGS), _secret("join", JOIN_TOKEN)],
    }
    if wanted.gpus:
        serve["resources"]["limits"] = {"nvidia.com/gpu": wanted.gpus}
        pod["nodeSelector"] = {"nvidia.com/gpu.present": "true"}
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    spec = {
        "selector": {"matchLabels": _labels(MACHINE)},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": {"metadata": {"labels": _labels(MACHINE)}, "spec": pod},
    }
    return _object(wanted, "apps/v1", "DaemonSet", MACHINE, spec=spec)


def _container(wanted: Deployment, name: str, words: list[str], named_after: str, mounts: list[Object]) -> Object:
    return {
        "name": name,
        "image": wanted.image,
        "args": words,
        "env": [
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": named_after}}},
            {"name": "HOME", "value": "/tmp"},  # of libraries that keep something there: nothing else can be written
        ],
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _folder_owner(wanted: Deployment, mounts: list[Object]) -> Object:
    security = {
        "runAsUser": 0,
        "runAsNonRoot": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        "readOnlyRootFilesystem": True,
    }
    command = ["install", "-d", "-o", str(_USER), "-g", str(_USER), "-m", "700", mounts[0]["mountPath"]]
    return {
        "name": "own-folder",
        "image": wanted.image,
        "command": command,
        "resources": {"requests": {"cpu": "100m", "memory": "32Mi"}},
        "volumeMounts": mounts,
        "securityContext": security,
    }


def _pod_security() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _secret(volume: str, name: str) -> Object:
    return {"name": volume, "secret": {"secretName": name, "defaultMode": 0o440}}


def _port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _http_probe(path: str, period_s: int) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period_s, "timeoutSeconds": 2}


def _disruption_budget(wanted: Deployment) -> Object:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(GATEWAY)}}
    return _object(wanted, "policy/v1", "PodDisruptionBudget", GATEWAY, spec=spec)


def _policy(wanted: Deployment, component: str, allowed: dict[str, list[str]], ports: dict[str, int]) -> Object:
    """These pods reach these ports, all do where none are named; nobody reaches another."""
    ingress = [
        {
            "ports": [{"port": number, "protocol": "TCP"}],
            **(
                {"from": [{"podSelector": {"matchLabels": _labels(peer)}} for peer in allowed[name]]}
                if allowed[name]
                else {}
            ),
        }
        for name, number in ports.items()
    ]
    spec = {"podSelector": {"matchLabels": _labels(component)}, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(wanted, "networking.k8s.io/v1", "NetworkPolicy", component, spec=spec)


def _scaled_by_cpu(wanted: Deployment) -> Object:
    target = {"type": "Utilization", "averageUtilization": 70}
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": GATEWAY},
        "minReplicas": wanted.gateways,
        "maxReplicas": wanted.gateways_max,
        "metrics": [metric],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return _object(wanted, "autoscaling/v2", "HorizontalPodAutoscaler", GATEWAY, spec=spec)


def _scaled_by_metrics(wanted: Deployment) -> Object:
    """KEDA's object: as many gateways as the requests in progress take, those among them that wait for a model."""
    query = f'sum(hearth_open_requests{{namespace="{wanted.namespace}"}}) / {wanted.requests_per_gateway}'
    metadata = {"serverAddress": wanted.prometheus, "query": query, "threshold": "1"}
    trigger = {"type": "prometheus", "metadata": metadata}
    spec = {
        "scaleTargetRef": {"name": GATEWAY},
        "minReplicaCount": wanted.gateways,
        "maxReplicaCount": wanted.gateways_max,
        "cooldownPeriod": 300,
        "triggers": [trigger],
    }
    return _object(wanted, "keda.sh/v1alpha1", "ScaledObject", GATEWAY, spec=spec)


def grace_s(drain_s: float) -> int:
    """How long a gateway's pod may take to end."""
    return _DEREGISTER_S + int(drain_s) + _MARGIN_S
