"""Stub."""
from apportion.domains.domain import Domain
from apportion.domains.federated.settings import FederatedSettings


class _D(Domain):
    name = "federated"
    settings = FederatedSettings

    def prepare(self, settings):
        from apportion.domains.federated.job import prepare

        return prepare(settings)


DOMAIN = _D()
