"""Stub."""
from apportion.domains.domain import Domain
from apportion.domains.charging.settings import ChargingSettings


class _D(Domain):
    name = "charging"
    settings = ChargingSettings

    def prepare(self, settings):
        from apportion.domains.charging.job import prepare

        return prepare(settings)


DOMAIN = _D()
