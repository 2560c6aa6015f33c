"""Messages of OCPP 1.6 and 2.0.1, and the differences between the versions.

A link is the connection of one charge point. It converts messages to events at a station (arrival,
departure, meter value, status), and offers to charging profiles.
"""

import logging
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import Any

from ocpp.routing import on
from ocpp.v16 import ChargePoint as ChargePoint16
from ocpp.v16 import call as call16
from ocpp.v16 import call_result as result16
from ocpp.v201 import ChargePoint as ChargePoint201
from ocpp.v201 import call as call201
from ocpp.v201 import call_result as result201
from websockets.asyncio.server import ServerConnection

from apportion_charging import clock

_DEFAULT, _OWN = 1, 2
"""Number of the default profile, and the offset added to connectors for transactions' profiles."""

_library = logging.getLogger("apportion.ocpp")
# The library replies to invalid messages as the standard demands; `ChargePoints` logs them in a sentence.
_library.setLevel(logging.CRITICAL)


class Link(ABC):
    """Connection of a charge point; subclasses also inherit their version's library class."""

    id: str
    call: Any
    route_message: Any
    calls: Any
    results: Any
    """The library's modules of calls and results."""
    place: str
    """Name of the message field with the connector's number."""

    def __init__(self, owner: Any, point_id: str, connection: ServerConnection):
        """`owner` is the `ChargePoints` of the site, which receives all events."""
        super().__init__(point_id, connection, owner.reply_seconds, _library)  # pyright: ignore
        self.owner, self.connection = owner, connection
        self.ready = self.default_sent = False
        """Whether a message was received, and whether the default profile was sent."""

    async def set_profile(
        self, connector: int, schedule: dict[str, Any], transaction: str | None
    ) -> bool | None:
        """Send a profile, by default the default profile; return None without a valid reply."""
        default = transaction is None
        profile = {
            "stack_level": 0,
            "charging_profile_purpose": "TxDefaultProfile" if default else "TxProfile",
            "charging_profile_kind": "Relative" if default else "Absolute",
            **self.version_fields(_DEFAULT if default else _OWN + connector, schedule, transaction),
        }
        try:
            answer = await self.call(self.calls.SetChargingProfile(connector, profile))
        except Exception:
            # A timeout, a lost connection, or an invalid reply.
            return None
        return answer is not None and answer.status == "Accepted"

    @abstractmethod
    def version_fields(self, number: int, schedule: dict[str, Any], transaction: str | None) -> Any:
        """Return the profile's fields that differ between the versions."""

    def point(self, said: dict[str, Any]) -> Any:
        """Find the station of a message."""
        return self.owner.find_connector(self.id, said.get(self.place))

    @on("BootNotification")
    def on_boot(self, **_: Any) -> Any:
        self.owner.on_boot(self)
        interval = round(max(1.0, min(self.owner.every, 300.0)))
        return self.results.BootNotification(stamp(clock.now_utc()), interval, "Accepted")

    @on("Heartbeat")
    def on_heartbeat(self, **_: Any) -> Any:
        return self.results.Heartbeat(stamp(clock.now_utc()))

    @on("Authorize")
    def on_authorize(self, **_: Any) -> Any:
        return self.results.Authorize({"status": "Accepted"})

    @on("StatusNotification")
    def on_status(self, **said: Any) -> Any:
        self.owner.on_status(self.point(said), said.get("status") or said["connector_status"])
        return self.results.StatusNotification()

    @on("MeterValues")
    def on_meter(self, **said: Any) -> Any:
        self.owner.on_meter_values(
            self.point(said), said["meter_value"], said.get("transaction_id")
        )
        return self.results.MeterValues()


class _Link16(Link, ChargePoint16):
    """Connection by OCPP 1.6, in which the server numbers the transactions."""

    calls, results, place = call16, result16, "connector_id"

    def version_fields(self, number: int, schedule: dict[str, Any], transaction: str | None) -> Any:
        """Use integer transaction numbers; a transaction that began in 2.0.1 has none."""
        own = int(transaction) if transaction and transaction.isdecimal() else None
        words = {"charging_profile_id": number, "charging_schedule": schedule}
        return words | {"transaction_id": own}

    @on("StartTransaction")
    def on_start(self, **said: Any) -> Any:
        point = self.point(said)
        if point is None:
            return result16.StartTransaction(0, {"status": "Invalid"})  # pyright: ignore
        since, wh = said["timestamp"], said["meter_start"]
        car = self.owner.begin(point, None, since, wh, f"{said['connector_id']} {since} {wh}")
        return result16.StartTransaction(int(car.number), {"status": "Accepted"})  # pyright: ignore

    @on("StopTransaction")
    def on_stop(self, transaction_id: int, **_: Any) -> Any:
        self.owner.end(self.owner.find(self.id, str(transaction_id)))
        return result16.StopTransaction({"status": "Accepted"})  # pyright: ignore


class _Link201(Link, ChargePoint201):
    """Connection by OCPP 2.0.1, which reports transactions as events."""

    calls, results, place = call201, result201, "evse_id"

    def version_fields(self, number: int, schedule: dict[str, Any], transaction: str | None) -> Any:
        """Use a list of numbered schedules, as 2.0.1 requires."""
        schedules = [{"id": number, **schedule}]
        return {"id": number, "charging_schedule": schedules, "transaction_id": transaction}

    @on("TransactionEvent")
    def on_event(
        self, event_type: str, timestamp: str, transaction_info: dict[str, Any], **said: Any
    ) -> Any:
        number, state = transaction_info["transaction_id"], transaction_info.get("charging_state")
        point = self.owner.find(self.id, number)
        if event_type == "Ended":
            self.owner.end(point)
            return result201.TransactionEvent()
        if point is None:
            point = self.owner.find_connector(self.id, said.get("evse", {}).get("id"))
            if point is None:
                return result201.TransactionEvent(id_token_info={"status": "Invalid"})  # pyright: ignore
            if event_type == "Started":
                self.owner.begin(point, number, timestamp, None)
            else:
                self.owner.resume(point, number)
        self.owner.on_meter_values(point, said.get("meter_value", []))
        if state is not None:
            self.owner.on_status(point, state)
        return result201.TransactionEvent()


LINKS = {"ocpp2.0.1": _Link201, "ocpp1.6": _Link16}
"""Link class of each subprotocol, in order of preference."""


def stamp(moment: datetime) -> str:
    """Format a time as both versions require."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
