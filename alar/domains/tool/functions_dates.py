"""Dates (as ISO texts), time zones, internet addresses: datetime, calendar, zoneinfo, ipaddress.

A date that does not exist raises ValueError, and the model reads the error.
"""

from __future__ import annotations

import calendar
import ipaddress
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from alar.domains.tool.schema import integer, text, tool, tools_by_name

_DATE = text("YYYY-MM-DD", 10)
_TIME = text("HH:MM", 5)
_YEAR = integer(1, 9999)  # what `datetime.date` holds
_ADDRESS = text(longest=45)  # the longest IPv6 address, with an IPv4 part, has 45 characters


def _day(value: str) -> date:
    return date.fromisoformat(value)


def _shift_clock(time: str, minutes: int) -> str:
    # Past midnight the clock starts again at 00:00; the day is dropped.
    return (datetime.strptime(time, "%H:%M") + timedelta(minutes=minutes)).strftime("%H:%M")


def _clock_elsewhere(date: str, time: str, zone: str, to: str) -> str:
    there = (
        datetime.fromisoformat(f"{date}T{time}").replace(tzinfo=_zone(zone)).astimezone(_zone(to))
    )
    return there.strftime("%Y-%m-%d %H:%M")


def _zone(name: str) -> ZoneInfo:
    if name.startswith(("/", ".")):  # a name becomes a path, and the file is read
        raise ValueError(f"{name} is no time zone")
    return ZoneInfo(name)


def _offset(zone: str, date: str) -> str:
    # At noon, because clocks change at night.
    return datetime.fromisoformat(f"{date}T12:00").replace(tzinfo=_zone(zone)).strftime("%z")


TOOLS = tools_by_name(
    tool("weekday", "Day of the week.", lambda date: _day(date).strftime("%A"), date=_DATE),
    tool(
        "is_leap", "Whether a year is a leap year.", lambda year: calendar.isleap(year), year=_YEAR
    ),
    tool(
        "leap_days",
        "Leap years from start to before end.",
        lambda start, end: calendar.leapdays(start, end),  # `end` itself is not counted
        start=_YEAR,
        end=_YEAR,
    ),
    tool(
        "days_in_month",
        "Days of a month.",
        lambda year, month: calendar.monthrange(year, month)[1],
        year=_YEAR,
        month=integer(1, 12),
    ),
    tool(
        "month_name",
        "Name of a month.",
        lambda month: calendar.month_name[month],
        month=integer(1, 12),
    ),
    tool(
        "add_days",
        "Date some days later.",
        lambda date, days: (_day(date) + timedelta(days=days)).isoformat(),
        date=_DATE,
        days=integer(-100000, 100000),
    ),
    tool(
        "days_between",
        "Days from start to end.",
        lambda start, end: (_day(end) - _day(start)).days,
        start=_DATE,
        end=_DATE,
    ),
    tool(
        "day_of_year",
        "Number of a day in its year.",
        lambda date: _day(date).timetuple().tm_yday,
        date=_DATE,
    ),
    tool("iso_week", "ISO week number.", lambda date: _day(date).isocalendar().week, date=_DATE),
    tool(
        "from_timestamp",
        "Date of a Unix time.",
        lambda seconds: datetime.fromtimestamp(seconds, UTC).date().isoformat(),
        seconds=integer(0, 10**10),  # until the year 2286
    ),
    tool(
        "duration",
        "Seconds as h:mm:ss.",
        lambda seconds: str(timedelta(seconds=seconds)),  # from a day on: "1 day, 0:01:01"
        seconds=integer(0, 10**9),
    ),
    tool(
        "add_minutes",
        "Clock time some minutes later.",
        _shift_clock,
        time=_TIME,
        minutes=integer(-100000, 100000),  # about 69 days
    ),
    tool(
        "utc_offset",
        "UTC offset of a time zone.",
        _offset,
        zone=text("such as Asia/Tokyo", 40),
        date=_DATE,
    ),
    tool(
        "convert_time",
        "Clock time in another zone.",
        _clock_elsewhere,
        date=_DATE,
        time=_TIME,
        zone=text(longest=40),
        to=text(longest=40),
    ),
    tool(
        "ip_version",
        "4 or 6.",
        lambda address: ipaddress.ip_address(address).version,
        address=_ADDRESS,
    ),
    tool(
        "is_private",
        "Whether an IP address is private.",
        lambda address: ipaddress.ip_address(address).is_private,
        address=_ADDRESS,
    ),
    tool(
        "ip_to_int",
        "IP address as a number.",
        lambda address: int(ipaddress.ip_address(address)),
        address=_ADDRESS,
    ),
    tool(
        "int_to_ip",
        "IPv4 address of a number.",
        lambda n: str(ipaddress.IPv4Address(n)),
        n=integer(0, 2**32 - 1),  # IPv4 only
    ),
    tool(
        "network_size",
        "Addresses in a network.",
        # an error if host bits are set, as in 10.0.0.1/24
        lambda network: ipaddress.ip_network(network).num_addresses,
        network=_ADDRESS,
    ),
    tool(
        "netmask",
        "Mask of a network.",
        lambda network: str(ipaddress.ip_network(network).netmask),
        network=_ADDRESS,
    ),
    tool(
        "broadcast",
        "Broadcast address of a network.",
        lambda network: str(ipaddress.ip_network(network).broadcast_address),
        network=_ADDRESS,
    ),
    tool(
        "in_network",
        "Whether a network holds an address.",
        lambda address, network: ipaddress.ip_address(address) in ipaddress.ip_network(network),
        address=_ADDRESS,
        network=_ADDRESS,
    ),
)
