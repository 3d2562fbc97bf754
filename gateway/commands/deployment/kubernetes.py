"""`hearth kubernetes`: prints what runs Hearth in Kubernetes, or writes a Helm chart of the same. It talks to no
cluster."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from cyclopts import Parameter

from gateway import __version__
from gateway.commands.deployment.manifests import (
    DESCRIPTIONS,
    GATEWAY,
    JOIN_TOKEN,
    MACHINE,
    SERVER_SECRET,
    SETTINGS,
    Deployment,
    Ports,
    grace_s,
    manifests,
)
from gateway.commands.terminal.options import Source, command_app
from gateway.commands.terminal.output import fail
from gateway.settings.config import Config

_TEACHING: Final = f"""\
examples:
  hearth kubernetes --image registry.example.com/hearth:1 --gpus 8     its output is for `kubectl apply -f -`
  hearth kubernetes --namespace ml --region eu-west --gateways 3
  hearth kubernetes --prometheus http://prometheus.monitoring:9090     a KEDA ScaledObject in place of an HPA
  hearth kubernetes --helm charts/hearth                               a chart of the same, with values.yaml

Gateways are a Deployment, and each node has a machine (a DaemonSet; --gpus: each node with GPUs). Before, once:

  kubectl create namespace hearth
  kubectl -n hearth create secret generic {SETTINGS} --from-file hearth.toml
  kubectl -n hearth create secret generic {SERVER_SECRET} --from-literal secret=$(openssl rand -hex 32)

hearth.toml names a store that all gateways reach, and where machines are found:

  [store]
  url = "redis://redis.hearth:6379/0"
  [cluster]
  members = "kubernetes:hearth/{MACHINE}"

Once a gateway runs, a token lets the machines of all nodes join:

  kubectl -n hearth exec deploy/{GATEWAY} -- hearth cluster token --uses 1000 --ttl 365d --bare > token
  kubectl -n hearth create secret generic {JOIN_TOKEN} --from-file token

Run it with that hearth.toml (--config): ports and the time that a gateway may take to end are those of its [server],
[cluster] and [cells]. TLS for clients ends before the gateways, at an Ingress, a Gateway or docs/envoy.yaml. Prometheus
reads /metrics from an address in [server] metrics_networks. It takes Kubernetes 1.30, where a pause before a container
ends needs no program; machines keep models in /var/lib/hearth of their node, which the namespace's Pod Security has to
allow (`privileged`), and gateways are content with `restricted`.
"""
app = command_app("kubernetes", "print manifests for Kubernetes, or write a Helm chart", _TEACHING)
_VALUE: Final = re.compile(r"<<(\w+)>>")


@app.default
def kubernetes(
    *,
    image: Annotated[str, Parameter(help="of Hearth, as `make image` builds it (default: hearth:VERSION)")] = "",
    namespace: Annotated[str, Parameter(help="where all of it is (default: hearth)")] = "hearth",
    gateways: Annotated[int, Parameter(help="at least (default: 2)")] = 2,
    gateways_max: Annotated[int, Parameter(help="at most (default: 10)")] = 10,
    gpus: Annotated[int, Parameter(help="of each node with GPUs; 0: machines run on all nodes' CPUs (default: 0)")] = 0,
    cluster: Annotated[str, Parameter(help="name of the cluster of hosts (default: hearth)")] = "hearth",
    region: Annotated[str, Parameter(help="of the gateways, as accounts may allow it")] = "",
    site: Annotated[str, Parameter(help="within the region")] = "",
    machine_cpu: Annotated[str, Parameter(help="CPUs that each machine asks for (default: 2)")] = "2",
    machine_memory: Annotated[str, Parameter(help="memory that each machine asks for (default: 8Gi)")] = "8Gi",
    prometheus: Annotated[str, Parameter(metavar="URL", help="gateways follow open requests there, by KEDA")] = "",
    helm: Annotated[Path | None, Parameter(metavar="DIR", help="write a Helm chart there in place of printing")] = None,
    source: Source,
) -> int:
    """Print manifests for Kubernetes, or write a Helm chart."""
    if not 1 <= gateways <= gateways_max:
        return fail(f"--gateways {gateways} and --gateways-max {gateways_max}: at least 1, and no more than at most")
    config = source.load_without_models()
    if not config.server.port:
        return fail("[server] port is 0, which is another one at each start: Kubernetes has to know it")
    wanted = Deployment(
        namespace=namespace,
        image=image or f"hearth:{__version__}",
        gateways=gateways,
        gateways_max=gateways_max,
        drain_s=grace_s(config.server.drain_s),
        cluster=cluster,
        region=region,
        site=site,
        gpus=gpus,
        machine_cpu=machine_cpu,
        machine_memory=machine_memory,
        prometheus=prometheus,
        ports=listening_ports(config),
    )
    if helm is None:
        print(documents(wanted), end="")
        return 0
    try:
        write_chart(helm, wanted)
    except OSError as error:
        return fail(f"cannot write {helm}: {error.strerror}")
    print(f"wrote a chart to {helm}; `helm install hearth {helm} --namespace {namespace}`")
    return 0


def listening_ports(config: Config) -> Ports:
    """Where the processes of these settings listen."""
    join, porter, cells = (
        int(listen.rpartition(":")[2])
        for listen in (config.cluster.join_listen, config.cluster.porter_listen, config.cells.listen)
    )
    return Ports(config.server.port, join, porter, cells if config.cells.others else 0)


def documents(wanted: Deployment) -> str:
    """All manifests as one YAML text."""
    return "---\n".join(_yaml(each) for each in manifests(wanted))


def write_chart(folder: Path, wanted: Deployment) -> None:
    """A chart whose values are what `wanted` says, and may be set otherwise; the namespace is that of the release.
    Ports, whether machines have GPUs and what gateways follow are as wanted, for good. Raises OSError."""
    unused = set() if wanted.gpus else {"gpus"}
    unused |= set() if wanted.prometheus else {"prometheus", "requests_per_gateway"}
    values = {name: getattr(wanted, name) for name in DESCRIPTIONS if name not in unused}
    asked = Deployment(namespace="<<namespace>>", ports=wanted.ports, **{name: f"<<{name}>>" for name in values})
    templates = folder / "templates"
    templates.mkdir(parents=True, exist_ok=True)
    chart = {
        "apiVersion": "v2",
        "name": "hearth",
        "description": "An open, self-hosted Workers AI",
        "type": "application",
        "version": chart_version(__version__),
        "appVersion": __version__,
        "kubeVersion": ">=1.30.0-0",
    }
    (folder / "Chart.yaml").write_text(_yaml(chart))
    lines = (f"# {DESCRIPTIONS[name]}\n{_yaml({name: value})}" for name, value in values.items())
    (folder / "values.yaml").write_text("\n".join(lines))
    for each in manifests(asked):
        name = f"{each['metadata']['name']}-{each['kind'].lower()}.yaml"
        (templates / name).write_text(_VALUE.sub(lambda value: _expression(value[1], values), _yaml(each)))


def chart_version(version: str) -> str:
    """A version as Helm wants it: three numbers, and what is no release behind a dash."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(.*)", version)
    assert match is not None
    rest = re.sub(r"[^0-9A-Za-z-]", "", match[4])
    return f"{match[1]}.{match[2]}.{match[3] or 0}" + (f"-{rest}" if rest else "")


def _expression(name: str, values: Mapping[str, object]) -> str:
    """A chart's expression for a value."""
    if name == "namespace":
        return "{{ .Release.Namespace }}"
    return f"{{{{ .Values.{name} | quote }}}}" if isinstance(values[name], str) else f"{{{{ .Values.{name} }}}}"


def _yaml(document: Any) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return text
