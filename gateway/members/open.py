"""Opens the sources of machines that the settings name."""

from gateway.members.kubernetes import KubernetesMembers, pod_api
from gateway.members.own_machine import OwnMachine
from gateway.members.protocol import Members
from gateway.members.registry import RegistryMembers
from gateway.members.static import StaticMembers
from gateway.settings.config import Config


def open_members(config: Config, registry: RegistryMembers | None) -> list[Members]:
    """The machines that hearth.toml names always count; where it names none, this host's own does."""
    source = config.cluster.members or ("static" if registry is None else "store")
    named = config.machine_addresses if source == "static" else config.machine.addresses
    members: list[Members] = [StaticMembers(named)]
    if not named:
        members.append(OwnMachine(config.machine_address, config.run_folder))
    if source.startswith("kubernetes:"):
        namespace, _, service = source.removeprefix("kubernetes:").partition("/")
        members.append(KubernetesMembers(pod_api(), namespace, service))
    if source == "store":
        if registry is None:
            raise ValueError('[cluster] members = "store" is for hosts that joined a cluster: `hearth cluster init`')
        members.append(registry)
    return members
