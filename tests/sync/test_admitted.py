"""What is remembered of the admissions, against the records themselves."""

import random
import sys

from composer_prime.sync.admitted import AdmittedBy
from composer_prime.sync.records import Admission

FIRST = Admission(number=1, keys={"a": "k0"})


def later_records(seed: int, count: int) -> list[Admission | None]:
    """Admissions in a row, each a change of the one before; None: one that isn't the owner's."""
    draw = random.Random(seed)
    keys: dict[str, str] = dict(FIRST.keys)
    guests: set[str] = set()
    found: list[Admission | None] = []
    for number in range(1, count):
        if draw.random() < 0.2:
            found.append(None)
            continue
        site = draw.choice("abcdef")
        keys = {name: key for name, key in keys.items() if name != site}
        if draw.random() < 0.7:
            keys[site] = f"k{draw.randrange(5)}"
        guests = guests ^ {draw.choice("abcdefg")}
        found.append(Admission(number=number, keys=keys, guests=tuple(sorted(guests))))
    return found


def test_every_admission_is_remembered_as_it_was():
    for seed in range(50):
        by, whole = AdmittedBy(FIRST), [FIRST]
        for record in later_records(seed, 30):
            by.add(record)
            whole.append(record or whole[-1])
        assert (by.newest, by.keys) == (29, whole[-1].keys), f"seed={seed}"
        for number, record in enumerate(whole):
            assert by.guests(number) == frozenset(record.guests), f"seed={seed}"
            assert {site: key for site in "abcdefg" if (key := by.key_of(site, number))} == record.keys
        for site in "abcdefgh":
            last = [number for number, record in enumerate(whole) if site in record.keys]
            assert by.last_of(site) == (last[-1] if last else None), f"seed={seed}"
        for public in ("k0", "k1", "k4", "k9"):
            held = [site for record in reversed(whole) for site, key in sorted(record.keys.items()) if key == public]
            assert by.held_by(public) == (held[0] if held else None), f"seed={seed}"


def test_a_thousand_sites_admitted_one_after_another_are_remembered_once_each():
    keys = {"first": "k"}
    by = AdmittedBy(Admission(number=1, keys=keys))
    for number in range(1000):
        keys = keys | {f"site-{number}": f"k{number}"}
        by.add(Admission(number=number + 2, keys=keys))
    assert sum(map(len, by._standings.values())) == 1001 == sum(map(len, by._numbers.values()))
    held = sum(sys.getsizeof(each) for each in (by._guests, by._standings, by._numbers, by.keys))
    assert held < 2**18 and by.key_of("site-999", 999) is None and by.key_of("site-999", 1000) == "k999"
