"""Where a host finds the files of a model: at other members, then at the hub."""

from collections.abc import Sequence

from gateway.catalogue.mirror import CatalogueMirror
from gateway.cluster.route import preference
from gateway.distribution.fetch import FileSource
from gateway.distribution.hub_files import HubFiles
from gateway.distribution.transfer import PeerFiles
from gateway.identity.files import HostCredentials
from tenants.records.catalogue import CatalogueModel


def sources_of(mirror: CatalogueMirror, model: CatalogueModel, credentials: HostCredentials) -> Sequence[FileSource]:
    """The members that have the model, each host in another order so that they share the work; then the hub."""
    having = [each for each in mirror.having.get(model.name, ()) if each in mirror.peers and each != mirror.own]
    having.sort(key=lambda member: -preference(member, 1.0, mirror.own + model.name))
    context, cluster = credentials.client, credentials.identity.cluster
    sources: list[FileSource] = [PeerFiles(member, mirror.peers[member], context, cluster) for member in having]
    return [*sources, HubFiles(model.hub, model.files)] if model.hub else sources
