"""Stub."""
from apportion.domains.domain import Domain
from apportion.domains.budget.settings import BudgetSettings


class _D(Domain):
    name = "budget"
    settings = BudgetSettings

    def prepare(self, settings):
        from apportion.domains.budget.job import prepare

        return prepare(settings)


DOMAIN = _D()
