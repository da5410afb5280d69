"""Reasoning problems with a number for an answer: each template draws a question and works its answer out."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Template = Callable[[Random], tuple[str, str]]
"""Draws (question, answer)."""

# fmt: off
NAMES = (
    "Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Leila", "Marta",
    "Nils", "Olga", "Pavel", "Rosa", "Samir", "Tove", "Yuki",
)
THINGS = (
    "apples", "stamps", "notebooks", "candles", "tulips", "bricks", "tickets", "marbles", "pencils", "lamps",
    "muffins", "postcards",
)
PLACES = ("market stall", "school shop", "warehouse", "museum store", "garden centre", "village fair", "library")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
PARTS = ((2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth"))
UNITS = (
    ("metre", "centimetres", 100), ("kilometre", "metres", 1000), ("yard", "feet", 3), ("mile", "yards", 1760),
    ("kilogram", "grams", 1000), ("pound", "ounces", 16), ("litre", "millilitres", 1000), ("hour", "minutes", 60),
    ("minute", "seconds", 60), ("day", "hours", 24), ("week", "days", 7),
)
# fmt: on


def stock(rng: Random) -> tuple[str, str]:
    """A quantity followed through three to five events."""
    thing, count = rng.choice(THINGS), rng.randint(40, 400)
    start = f"{rng.choice(NAMES)} looks after the {thing} of a {rng.choice(PLACES)}: {count} at the start of the week."
    lines = [start]
    for day in DAYS[: rng.randint(3, 5)]:
        boxes, size = rng.randint(2, 9), rng.choice((6, 8, 12, 15, 24))
        events = [
            (f"{boxes} boxes of {size} arrive", count + boxes * size),
            (f"{boxes} customers bring back {size} each", count + boxes * size),
        ]
        if count > 10:
            sold = rng.randint(5, count // 2)
            events.append((f"{sold} are sold", count - sold))
            events += [(f"{word} of them are given away", count - count // p) for p, word in PARTS if count % p == 0]
        event, count = rng.choice(events)
        lines.append(f"On {day} {event}.")
    return " ".join([*lines, f"How many {thing} are left?"]), str(count)


def linear(rng: Random) -> tuple[str, str]:
    x, b = rng.randint(-20, 40), rng.randint(-60, 60)
    a, c = rng.sample(range(2, 16), 2)
    return f"Solve for x: {a}x {_signed(b)} = {c}x {_signed((a - c) * x + b)}.", str(x)


def system(rng: Random) -> tuple[str, str]:
    x, y = rng.randint(-12, 20), rng.randint(-12, 20)
    a, b, c, d = (rng.randint(2, 9) for _ in range(4))
    return f"Solve {a}x + {b}y = {a * x + b * y} and {c}x - {d}y = {c * x - d * y}. What is x?", str(x)


def discount(rng: Random) -> tuple[str, str]:
    price, off, tax = 4 * rng.randint(5, 200), 5 * rng.randint(1, 12), 5 * rng.randint(1, 5)
    cents = price * (100 - off) * (100 + tax) // 100  # exact: 4 divides the price, 5 both percentages
    question = (
        f"{rng.choice(NAMES)} buys a coat listed at {price} euros with {off} percent off. Then {tax} percent tax is "
        "added to the reduced price. How many euros must be paid?"
    )
    return question, f"{cents // 100}.{cents % 100:02d}".rstrip("0").rstrip(".")


def workers(rng: Random) -> tuple[str, str]:
    pace, p, q, h, k = rng.randint(2, 25), *(rng.randint(2, 12) for _ in range(4))
    question = (
        f"At a steady pace {p} workers pack {pace * p * h} parcels in {h} hours. How many parcels do {q} workers "
        f"pack in {k} hours?"
    )
    return question, str(pace * q * k)


def tank(rng: Random) -> tuple[str, str]:
    drain, gain, minutes, start = rng.randint(2, 30), rng.randint(2, 30), rng.randint(5, 90), rng.randint(0, 200)
    question = (
        f"A tank holds {start + gain * minutes} litres and has {start} litres in it. A pump adds {drain + gain} litres "
        f"a minute while {drain} litres a minute leak out. After how many minutes is it full?"
    )
    return question, str(minutes)


def nth_term(rng: Random) -> tuple[str, str]:
    a, b, c = rng.randint(0, 4), rng.randint(-9, 20), rng.randint(-30, 60)
    if a == b == 0:
        b = 7
    n = rng.randint(8, 25)
    terms = [a * i * i + b * i + c for i in range(1, n + 1)]
    shown = ", ".join(map(str, terms[:5]))
    return f"A sequence starts {shown} and goes on by the same pattern. What is term number {n}?", str(terms[-1])


def recurrence(rng: Random) -> tuple[str, str]:
    first, second, p = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 3)
    q, n = rng.randint(-4, 9), rng.randint(6, 8)
    terms = [first, second]
    while len(terms) < n:
        terms.append(p * terms[-1] + terms[-2] + q)
    question = (
        f"A sequence starts with {first} and {second}. Each later term is {p} times the term before it plus the term "
        f"before that, {_signed(q)}. What is term number {n}?"
    )
    return question, str(terms[-1])


def convert(rng: Random) -> tuple[str, str]:
    big, small, factor = rng.choice(UNITS)
    a, b, k, less = rng.randint(2, 40), rng.randint(2, factor), rng.randint(2, 15), rng.randint(2, factor)
    question = (
        f"{factor} {small} make one {big}. {rng.choice(NAMES)} needs {a} {big}s and {b} {small} for each of {k} "
        f"orders and has {less} {small} already. How many {small} are missing?"
    )
    return question, str(k * (a * factor + b) - less)


def multiples(rng: Random) -> tuple[str, str]:
    low, size = rng.randint(1, 200), rng.randint(40, 300)
    p, q = rng.sample(range(2, 13), 2)
    found = sum((i % p == 0) != (i % q == 0) for i in range(low, low + size + 1))
    return f"How many integers from {low} to {low + size} are divisible by {p} or by {q} but not by both?", str(found)


def legs(rng: Random) -> tuple[str, str]:
    hens, goats, spiders = rng.randint(3, 60), rng.randint(3, 60), rng.randint(2, 9)
    question = (
        f"A farm has hens (2 legs), goats (4 legs) and exactly {spiders} spiders (8 legs). Together they have "
        f"{hens + goats + spiders} heads and {2 * hens + 4 * goats + 8 * spiders} legs. How many goats are there?"
    )
    return question, str(goats)


def ages(rng: Random) -> tuple[str, str]:
    (a, b), times, young, later = rng.sample(NAMES, 2), rng.randint(2, 5), rng.randint(2, 20), rng.randint(2, 15)
    old = times * (young + later) - later
    question = (
        f"{a} is {old - young} years older than {b}. In {later} years {a} will be {times} times as old as {b}. How old "
        f"is {b} now?"
    )
    return question, str(young)


def branch_loop(rng: Random) -> tuple[str, str]:
    total, low, step, m, c, d = (rng.randint(1, 9) for _ in range(6))
    high, rest = low + step * rng.randint(5, 8), rng.randrange(m)
    answer = total + sum(i * c if i % m == rest else -d for i in range(low, high, step))
    lines = [
        f"total = {total}", f"for i in range({low}, {high}, {step}):", f"    if i % {m} == {rest}:",
        f"        total += i * {c}", "    else:", f"        total -= {d}", "print(total)",
    ]  # fmt: skip
    return _traced(lines), str(answer)


def digit_loop(rng: Random) -> tuple[str, str]:
    n, m, c = rng.randint(1000, 999_999), rng.randint(2, 4), rng.randint(2, 9)
    digits = [int(digit) for digit in str(n)]
    answer = sum(digit * c if digit % m == 0 else -digit for digit in digits)
    lines = [
        f"n, result = {n}, 0", "while n > 0:", "    digit = n % 10",
        f"    result += digit * {c} if digit % {m} == 0 else -digit", "    n //= 10", "print(result)",
    ]  # fmt: skip
    return _traced(lines), str(answer)


def list_loop(rng: Random) -> tuple[str, str]:
    values, limit, c = [rng.randint(1, 40) for _ in range(rng.randint(5, 8))], rng.randint(5, 25), rng.randint(2, 9)
    kept = [value for value in values if value > limit]
    lines = [f"values = {values}", f"kept = [v for v in values if v > {limit}]", f"print(sum(kept) - {c} * len(kept))"]
    return _traced(lines), str(sum(kept) - c * len(kept))


PROBLEMS: dict[str, tuple[Template, ...]] = {
    "story": (stock,),
    "equation": (linear, system),
    "rate": (discount, workers, tank),
    "sequence": (nth_term, recurrence),
    "units": (convert,),
    "counting": (multiples, legs, ages),
    "code": (branch_loop, digit_loop, list_loop),
}


def _signed(value: int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value)}"


def _traced(lines: list[str]) -> str:
    return "\n".join(["What does this Python program print?", "```python", *lines, "```"])
