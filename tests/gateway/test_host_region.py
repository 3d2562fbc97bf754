"""Where a host is."""

from pathlib import Path

from gateway.identity.host_identity import HostRole
from gateway.machine_spec import machine_spec
from tests.support.hosts import host_maker


def test_a_machine_is_where_its_certificate_says_whatever_its_file_says(tmp_path: Path) -> None:
    settings = tmp_path / "hearth.toml"
    settings.write_text('[server]\nregion = "us"\n[telemetry]\notlp_url = "http://127.0.0.1:1/v1/traces"\n')
    source = str(settings), str(tmp_path / "state")
    spec = machine_spec(*source, "cpu")
    assert (spec.region, spec.telemetry and spec.telemetry.region) == ("us", "us"), "a host without a certificate"
    hosts = host_maker(tmp_path / "state")
    hosts.host(HostRole.MACHINE, "identity", region="eu")
    spec = machine_spec(*source, "cpu")
    assert (spec.region, spec.telemetry and spec.telemetry.region) == ("eu", "eu")
    settings.write_text(settings.read_text() + 'otlp_region = "us"\n')
    spec = machine_spec(*source, "cpu")
    assert (spec.region, spec.telemetry and spec.telemetry.region) == ("eu", "us")
