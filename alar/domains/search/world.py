"""The embedded search world: two thousand titled passages about the world's territories.

Real facts come from the Unicode CLDR tables that Babel ships: currencies of territories with their
dates, language shares, time-zone cities, scripts. A *counterfactual* world keeps the real names and
shuffles the facts and the numbers. A model trained on such worlds has to read, since it cannot
recall. Tests use the real world, which training never sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from babel import Locale
from babel.core import get_global

from alar.domains.search.corpus import Passage

REAL = "real"


@dataclass(frozen=True)
class Territory:
    """Facts about one territory.

    `since` is the year in which it adopted the currency. `previous` is the currency before, with
    its year. `languages` are (name, whole percent of the population), largest first.
    """

    name: str
    currency: str
    since: int
    previous: tuple[str, int] | None
    languages: tuple[tuple[str, int], ...]  # at most two


@dataclass(frozen=True)
class World:
    """`cities` maps a city to its territory. `name` is "real" or "counterfactual-<number>"."""

    name: str
    territories: dict[str, Territory]  # by name
    cities: dict[str, str]  # city → name of its territory

    def passages(self) -> list[Passage]:
        """All passages of this world, in a fixed order.

        Each has at most 60 tokens of the embedded tokenizer.
        """
        texts: list[tuple[str, str]] = []  # (title, text)
        for territory in self.territories.values():
            texts.append((f"{territory.name}, currency", _currency_text(territory)))
            if territory.languages:
                texts.append((f"{territory.name}, languages", _languages_text(territory)))
        regions = _names()["regions"]
        for city, name in self.cities.items():
            zone = f"Its clocks follow a time zone of {regions[city]}."
            texts.append((city, f"{city} is a city in {name}. {zone}"))
        users: dict[str, list[Territory]] = {}  # currency → territories
        speakers: dict[str, list[str]] = {}  # language → names of territories
        for territory in self.territories.values():
            users.setdefault(territory.currency, []).append(territory)
            for language, _ in territory.languages:
                speakers.setdefault(language, []).append(territory.name)
        for currency, code in _names()["currencies"].items():
            used = users.get(currency, [])[:2]  # two keep the passage short
            where = " and ".join(f"in {territory.name}" for territory in used)
            usage = f"It is used {where}." if used else "It is no longer used."
            texts.append((currency, f"The {currency} is a currency with the code {code}. {usage}"))
        for language, code in _names()["languages"].items():
            where = " and ".join(f"in {name}" for name in speakers.get(language, [])[:2])
            usage = f"It is spoken {where}." if where else "It has few speakers."
            texts.append((language, f"{language} is a language with the code {code}. {usage}"))
        for script, code in _names()["scripts"].items():
            text = f"{script} is a writing system with the code {code}."
            texts.append((f"{script} script", text))
        return [
            Passage(f"{self.name}/{row}", title, text) for row, (title, text) in enumerate(texts)
        ]


def _currency_text(territory: Territory) -> str:
    text = (
        f"The currency of {territory.name} is the {territory.currency}. It was adopted in"
        f" {territory.since}."
    )
    if territory.previous:
        text += f" It replaced the {territory.previous[0]}, adopted in {territory.previous[1]}."
    return text


def _languages_text(territory: Territory) -> str:
    (first, share), *others = territory.languages
    text = (
        f"The most spoken language of {territory.name} is {first}, with {share} percent of the"
        " people."
    )
    if others:
        text += f" {others[0][0]} follows with {others[0][1]} percent."
    return text


@cache
def _names() -> dict:
    """Names that every world shares: name → code for what has a code, and city → region."""
    english = Locale("en")
    currencies, languages = {}, {}
    for code, name in sorted(english.currencies.items()):
        if not name.startswith("Test"):  # CLDR lists "Testing Currency Code" too
            currencies[name] = code
    for code, name in sorted(english.languages.items()):
        if len(code) <= 3 and "(" not in name:  # neither dialects nor variants
            languages[name] = code
    real = real_world()
    regions = {}
    for zones in get_global("territory_zones").values():
        for zone in zones:
            city = _city_name(zone)
            if city in real.cities:
                regions[city] = zone.split("/")[0]  # "America/Lima" → "America"
    scripts = {name: code for code, name in sorted(english.scripts.items())}
    return {
        "currencies": currencies,
        "languages": languages,
        "scripts": scripts,
        "regions": regions,
    }


def _city_name(zone: str) -> str:
    exemplar = Locale("en").time_zones.get(zone, {}).get("city")
    return exemplar or zone.split("/")[-1].replace("_", " ")


@cache
def real_world() -> World:
    """The world of CLDR's facts."""
    english = Locale("en")
    territories, codes = {}, {}  # name → Territory; code → name
    for code, history in sorted(get_global("territory_currencies").items()):
        name = english.territories.get(code)
        # Entries are (currency, first day, last day, whether it is legal tender).
        dated = [e for e in history if e[3] and e[1] and e[0] in english.currencies]
        current = [entry for entry in dated if entry[2] is None]
        # CLDR's codes of other lengths are regions such as 150 (Europe).
        if name is None or len(code) != 2 or not current:
            continue
        # Days are (year, month, day), which compare in order of time.
        latest = max(current, key=lambda entry: entry[1])
        earlier = [entry for entry in dated if entry[1] < latest[1] and entry[0] != latest[0]]
        replaced = max(earlier, key=lambda entry: entry[1]) if earlier else None
        previous = (english.currencies[replaced[0]], replaced[1][0]) if replaced else None
        currency, since = english.currencies[latest[0]], latest[1][0]
        territories[name] = Territory(name, currency, since, previous, _spoken(code))
        codes[code] = name
    cities: dict[str, str] = {}
    for code, zones in sorted(get_global("territory_zones").items()):
        for zone in zones:
            city = _city_name(zone)
            titled = city in territories or city in english.currencies.values()
            if code in codes and not titled:  # the titles of passages must be unique
                cities.setdefault(city, codes[code])
    return World(REAL, territories, cities)


def _spoken(code: str) -> tuple[tuple[str, int], ...]:
    """The one or two most spoken languages of a territory, with their shares in percent."""
    names = Locale("en").languages
    shares: dict[str, int] = {}
    for language, entry in get_global("territory_languages").get(code, {}).items():
        name = names.get(language.split("_")[0])  # "zh_Hant" → Chinese
        share = round(entry["population_percent"])  # some releases of CLDR have a few above 100
        if name and 1 <= share <= 100 and "(" not in name:
            shares[name] = max(share, shares.get(name, 0))
    ranked = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        ranked = ranked[:1]  # "the most spoken" must have one answer
    return tuple(ranked[:2])


@cache
def _pools() -> tuple[list[str], list[str], list[str]]:
    """(currencies, languages, cities), from which counterfactual facts are drawn."""
    real = real_world()
    languages = set()
    for territory in real.territories.values():
        languages.update(name for name, _ in territory.languages)
    return sorted(_names()["currencies"]), sorted(languages), sorted(real.cities)


def counterfactual_world(number: int) -> World:
    """World `number`: real names, new facts. The same number always gives the same world."""
    rng = random.Random(f"counterfactual world {number}")
    currencies, languages, cities = _pools()
    territories = {}
    for name in real_world().territories:
        # Mostly recent years, as in the real world, whose years are 1694 to 2025.
        since = rng.randint(1900, 2025) if rng.random() < 0.75 else rng.randint(1690, 1899)
        current, replaced = rng.sample(currencies, 2)  # two different ones
        previous = None
        if rng.random() < 0.5:
            previous = replaced, rng.randint(max(1650, since - 120), since - 1)
        # Shares in percent: many territories have one dominant language.
        first = rng.randint(85, 100) if rng.random() < 0.4 else rng.randint(20, 99)
        pair = rng.sample(languages, 2)
        # Always below `first`: "the most spoken" must have one answer.
        most = min(first - 1, 30) if rng.random() < 0.5 else first - 1
        second = rng.randint(1, most)
        spoken = (pair[0], first), (pair[1], second)
        if rng.random() < 0.15:
            spoken = spoken[:1]
        territories[name] = Territory(name, current, since, previous, spoken)
    homes = [rng.choice(list(territories)) for _ in cities]  # a territory for each city
    return World(f"counterfactual-{number}", territories, dict(zip(cities, homes)))


@cache
def world(name: str) -> World:
    """The world called `name`: "real" or "counterfactual-<number>"."""
    if name == REAL:
        return real_world()
    kind, _, number = name.rpartition("-")
    if kind != "counterfactual" or not number.isdigit():
        raise ValueError(f"unknown world {name!r}: expected 'real' or 'counterfactual-<number>'")
    return counterfactual_world(int(number))
