"""Stub."""
from apportion.domains.domain import Domain
from apportion.domains.portfolio.settings import PortfolioJob


class _D(Domain):
    name = "portfolio"
    settings = PortfolioJob

    def prepare(self, settings):
        from apportion.domains.portfolio.job import prepare

        return prepare(settings)


DOMAIN = _D()
